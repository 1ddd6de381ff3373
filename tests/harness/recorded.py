"""Reads recordings of the real connector and the real SMT, which the cases keep as compressed lines of JSON."""

from __future__ import annotations

import collections
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in order."""
    with lzma.open(path, "rt", encoding="utf-8") as texts:
        yield from map(json.loads, texts)


def by(field: str, path: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of a file by the value of their `field`, each list in order."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for record in lines(path):
        found[record[field]].append(record)
    return found
