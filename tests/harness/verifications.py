"""Runs a pipeline for tests of its verification, and reads the result of one collection."""

from __future__ import annotations

from typing import Any

from pipelines.capture import service as capture
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.verify.result import CollectionVerification, Verification
from tests.harness import sessions


def play(spark: Any, found: Any) -> None:
    """Run each layer once."""
    for layer in (capture, silver, gold):
        layer.run(spark, found, once=True, sessions=sessions.kept(spark))


def kinds(found: CollectionVerification) -> dict[str, list[str]]:
    """The keys of the differences, by kind."""
    told: dict[str, list[str]] = {}
    for each in found.differences:
        told.setdefault(each.kind.value, []).append(each.key)
    return told


def only(result: Verification, name: str = "orders") -> CollectionVerification:
    (found,) = [each for each in result.collections if each.collection.endswith(f".{name}")]
    return found
