"""Corrections of events in quarantine: each text is of one document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from pipelines.bronze.registry import Namespace
from pipelines.operations import quarantine
from pipelines.spark import parallel
from tests.harness import layers

CHUNK = "snapshot:s1:1"
HELD: list[dict[str, Any]] = [
    {"resume_token": CHUNK, "key": key, "after": text, "updateDescription": None} for key, text in (("1", "{"), ("2", "["))
]


def _after(corrections: dict[str, dict[str, str]]) -> list[str]:
    quarantine._check(HELD, None, corrections)
    return [quarantine._corrected(row, corrections)["after"] for row in HELD]


def test_a_corrected_document_of_a_chunk_is_no_other_of_its_documents() -> None:
    """All documents of a snapshot's chunk have one token; the `_id` says which one is meant, whatever its number's type."""
    assert _after({CHUNK: {"after": '{"_id": {"$numberLong": "2"}, "v": 5}'}}) == [
        "{",
        '{"_id": {"$numberLong": "2"}, "v": 5}',
    ]


@pytest.mark.parametrize("text", ['{"_id": 3}', '{"v": 5}'])
def test_a_correction_of_no_single_document_is_refused(text: str) -> None:
    """It is of none of them, or could be of any."""
    with pytest.raises(errors.SettingsError, match=f"{CHUNK}.after: the _id of one of the documents"):
        _after({CHUNK: {"after": text}})


def test_steps_of_no_path_are_refused() -> None:
    """Its document would be incomplete, and who wrote them would not hear why."""
    held = [{"resume_token": "t", "key": "1", "after": None}]
    for steps in ("5", "[]", '["a"]', '["a", "c"]'):
        with pytest.raises(errors.SettingsError, match=r"t\.disambiguatedPaths: the steps of each path are expected"):
            quarantine._check(held, None, {"t": {"disambiguatedPaths": f'{{"a.b": {steps}}}'}})
    for right in ("{}", '{"a.b": ["a.b"], "$date.0": ["$date", 0], "$$date": ["$date"]}'):
        quarantine._check(held, None, {"t": {"disambiguatedPaths": right}})


@pytest.mark.parametrize("act", ["list", "replay"])
def test_a_damaged_quarantine_hinders_no_other(act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are listed, and replayed, and its error is told with them."""

    def one(*given: Any, namespace: Any = None, **named: Any) -> Any:
        if str(given[1]).endswith("/shop/a`") or namespace == ("shop", "a"):
            raise errors.FilesMissing("its log names the file part-0")
        return [EVENT] if namespace is None else quarantine.ReplayResult(1, 7)

    chosen, failures = layers.pipeline(tmp_path), parallel.Failures()
    monkeypatch.setattr(quarantine.registry, "chosen", lambda *_: (Namespace("shop", "a"), Namespace("shop", "b")))
    monkeypatch.setattr(quarantine, "listed", one)
    monkeypatch.setattr(quarantine, "replay", one)
    spark: Any = None
    if act == "list":
        assert quarantine.of_pipeline(spark, chosen, failures=failures) == [EVENT]
    else:
        done = quarantine.replay_pipeline(spark, chosen, now_ms=1, failures=failures)
        assert done == {"shop.b": quarantine.ReplayResult(1, 7)}
    assert list(failures.found) == ["shop.a"]


HELD_STATE = quarantine.EventState.HELD
EVENT = quarantine.QuarantinedEvent("shop.b", "t", "change", "u", "1", "5", 1, "it has no document", HELD_STATE)
