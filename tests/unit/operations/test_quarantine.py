"""Corrections of quarantined events, and their replay."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc_core import errors
from cdc_core.silver.quarantine import Reason
from pipelines.bronze.registry import Namespace
from pipelines.operations import quarantine
from pipelines.spark import parallel
from tests.harness import bronze_rows, layers, pace, without_spark

CHUNK = "snapshot:s1:1"
HELD: list[dict[str, Any]] = [
    {"resume_token": CHUNK, "key": key, "after": text, "updateDescription": None} for key, text in (("1", "{"), ("2", "["))
]


def _after(corrections: dict[str, dict[str, str]]) -> list[str]:
    quarantine._check(HELD, None, corrections)
    return [quarantine._corrected(row, corrections)["after"] for row in HELD]


def test_a_corrected_document_of_a_chunk_is_no_other_of_its_documents() -> None:
    """All documents of a snapshot's chunk have the same token; the `_id` selects one, whatever the type of its number."""
    assert _after({CHUNK: {"after": '{"_id": {"$numberLong": "2"}, "v": 5}'}}) == [
        "{",
        '{"_id": {"$numberLong": "2"}, "v": 5}',
    ]


@pytest.mark.parametrize("text", ['{"_id": 3}', '{"v": 5}'])
def test_a_correction_of_no_single_document_is_refused(text: str) -> None:
    """It matches none of the documents, or could match any."""
    with pytest.raises(errors.SettingsError, match=f"{CHUNK}.after: expected the _id of one of the quarantined documents"):
        _after({CHUNK: {"after": text}})


def test_two_corrections_of_one_token_are_refused() -> None:
    """JSON readers keep the last one: the other document would stay in quarantine, and nobody would learn why."""
    entries = [f'"{CHUNK}": {{"after": "{{\\"_id\\":{key}}}"}}' for key in (1, 2)]
    assert quarantine.read_corrections(f"{{{entries[1]}}}", where="f.json") == {CHUNK: {"after": '{"_id":2}'}}
    with pytest.raises(errors.SettingsError, match="f.json: expected a JSON object by resume token, with each of them once"):
        quarantine.read_corrections(f"{{{', '.join(entries)}}}", where="f.json")


def test_steps_of_no_path_are_refused() -> None:
    """Otherwise the document would be incomplete, and nobody would learn why."""
    held = [{"resume_token": "t", "key": "1", "after": None}]
    for steps in ("5", "[]", '["a"]', '["a", "c"]'):
        with pytest.raises(errors.SettingsError, match=r"t\.disambiguatedPaths: the steps of each path are expected"):
            quarantine._check(held, None, {"t": {"disambiguatedPaths": f'{{"a.b": {steps}}}'}})
    for right in ("{}", '{"a.b": ["a.b"], "$date.0": ["$date", 0], "$$date": ["$date"]}'):
        quarantine._check(held, None, {"t": {"disambiguatedPaths": right}})


def test_thousands_of_corrections_are_each_held_against_their_own_event() -> None:
    """A script that corrects a collection's documents writes one correction for each."""
    held = [{"resume_token": f"t{number}", "key": str(number), "after": "{"} for number in range(10_000)]
    corrections = {row["resume_token"]: {"after": f'{{"_id":{row["key"]}}}'} for row in held}
    with pace.within(3):
        quarantine._check(held, None, corrections)


def test_so_many_events_come_back_at_a_time_as_memory_and_a_commit_have_room_for() -> None:
    """The events of a document are replayed together, because later updates need the earlier ones."""
    counts = {"1": 15_000, "2": 5_000, "3": 1, "4": 30_000, "5": 1}
    documents = {"key": [*counts], "events": [*counts.values()], "bytes": [10] * 5}
    assert [*quarantine._portions(pa.table(documents))] == [["1", "2"], ["3"], ["4"], ["5"]]
    large = {"key": ["1", "2", "3"], "events": [1] * 3, "bytes": [16 * 2**20, 48 * 2**20, 1]}
    assert [*quarantine._portions(pa.table(large))] == [["1", "2"], ["3"]]
    assert [*quarantine._portions(pa.table(documents).slice(0, 0))] == []


@pytest.mark.parametrize("act", ["list", "replay"])
def test_a_damaged_quarantine_hinders_no_other(act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are listed and replayed, and the error is reported with them."""

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
        assert [*quarantine.of_pipeline(spark, chosen, failures=failures)] == [EVENT]
    else:
        done = quarantine.replay_pipeline(spark, chosen, now_ms=1, failures=failures)
        assert done == {"shop.b": quarantine.ReplayResult(1, 7)}
    assert list(failures.by_name) == ["shop.a"]


def test_events_are_told_as_they_come() -> None:
    """A million events with their documents do not fit into memory, nor does their JSON."""
    fields = {name: value for name, value in dataclasses.asdict(EVENT).items() if name != "texts"}
    texts = dataclasses.replace(EVENT, texts={"after": "{\n"})
    assert json.loads("".join(quarantine.json_parts(iter([EVENT, texts])))) == {
        "events": [{**fields, "texts": {"after": "{\n"}} if number else fields for number in range(2)]
    }
    assert "".join(quarantine.json_parts(iter([]))) == json.dumps({"events": []}, indent=2)
    assert "".join(quarantine.json_parts(iter([EVENT] * 2))) == json.dumps({"events": [fields] * 2}, indent=2)

    def endless() -> Iterator[quarantine.QuarantinedEvent]:
        while True:
            yield EVENT

    assert len([*itertools.islice(quarantine.json_parts(endless()), 100)]) == 100


HELD_STATE = quarantine.EventState.HELD
EVENT = quarantine.QuarantinedEvent("shop.b", "t", "change", "u", "1", "5", 1, "it has no document", HELD_STATE)


def test_nothing_is_replayed_into_a_bronze_that_is_gone(tmp_path: Path) -> None:
    """The command said that this was a bug."""
    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        hop.note_fact(1, Reason.UNREADABLE_AFTER, to=1)
        shutil.rmtree(hop.bronze.path or "")
        with pytest.raises(errors.DecisionNeeded, match="bronze is gone"):
            quarantine.replay(
                without_spark.SPARK, hop.layout, name=hop.settings.name, namespace=(bronze_rows.DB, "t"), now_ms=1
            )
