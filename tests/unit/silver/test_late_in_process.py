"""Events that are older than what the table has seen need no query: as after each snapshot of a collection that is written to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.bronze import registry
from pipelines.delta.writer import Writer
from pipelines.silver import ranges
from tests.harness import oracle, without_spark
from tests.harness.layers import killed_at
from tests.harness.without_spark import SPARK, Hop, Log, NeedsSpark


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    with without_spark.running():
        yield Hop(tmp_path)


def written(key: int, at: int, op: str = "u", **fields: Any) -> dict[str, Any]:
    return {"op": op, "key": key, "at": at, "after": {"_id": key, "n": at, **fields}}


def deleted(key: int, at: int) -> dict[str, Any]:
    return {"op": "d", "key": key, "at": at}


def numbers(hop: Hop, layer: str = "silver") -> dict[int, int]:
    table = getattr(hop, f"{layer}_table")
    return {row["_id"]: row["n"] for row in oracle.read(table.path or "").to_pylist()}


@pytest.mark.parametrize("seed", range(12))
def test_batches_in_any_order_give_each_documents_last_state(seed: int, tmp_path: Path) -> None:
    """Documents and deletes: the newest event of a key wins, whether it came first or last."""
    draws = random.Random(seed)
    events = [
        (deleted if draws.random() < 0.3 else written)(draws.randrange(8), at) for at in range(1, draws.choice([20, 60]))
    ]
    last = {each["key"]: each for each in events}
    events += draws.sample(events, 5)  # some are captured twice
    draws.shuffle(events)
    mode = draws.choice(["tombstone", "rewrite-with-tombstone"])
    with without_spark.running():
        hop = Hop(tmp_path, **{"delete.tombstone.handling.mode": mode})
        bronze = Log(hop)
        bronze.append({"t": [written(key, 0, "c") for key in range(8)]})
        hop.silver()
        while events:
            size = draws.choice([1, 3, 10])
            bronze.append({"t": events[:size]})
            events = events[size:]
            hop.silver()
            if draws.random() < 0.5:
                hop.gold()
        hop.gold()
        assert numbers(hop, "gold") == numbers(hop)
        assert numbers(hop) == {
            key: last[key]["at"] if key in last else 0 for key in range(8) if last.get(key, {}).get("op") != "d"
        }


def test_deletes_that_the_mode_ignores_stay_ignored(tmp_path: Path) -> None:
    with without_spark.running():
        hop = Hop(tmp_path, **{"delete.tombstone.handling.mode": "drop"})
        bronze = Log(hop)
        for events in ([written(1, 5), written(2, 5)], [deleted(1, 3), written(2, 4), written(3, 2)]):
            bronze.append({"t": events})
            hop.silver()
        assert numbers(hop) == {1: 5, 2: 5, 3: 2}


def test_a_late_document_counts_for_the_schema_and_a_late_delete_is_remembered(hop: Hop) -> None:
    """As where Spark applies them: the schemas and the deletes must not depend on the way."""
    bronze = Log(hop)
    for events in ([written(1, 9), written(2, 9)], [written(1, 3, old="x"), deleted(2, 4)]):
        bronze.append({"t": events})
        hop.silver()
    rows = oracle.read(hop.silver_table.path or "")
    assert "old" in rows.column_names and numbers(hop) == {1: 9, 2: 9}
    remembered = oracle.read(hop.layout.deletes("cases", "t").path or "").to_pylist()
    assert [row["__key"] for row in remembered] == ["2"]


def test_what_needs_the_documents_that_came_before_is_for_spark(hop: Hop) -> None:
    """A late update without its document, and a late document of a row that is incomplete: it may be the one that the row lacks."""
    bronze = Log(hop)
    bronze.append({"t": [written(1, 5), written(2, 5), {"op": "u", "key": 2, "at": 9, "update": {"n": 9}}]})
    hop.silver()
    for late in ({"op": "u", "key": 1, "at": 4, "update": {"n": 4}}, written(2, 6)):
        bronze.append({"t": [late]})
        with pytest.raises(NeedsSpark):
            hop.silver()


def test_a_delete_that_was_remembered_and_not_applied_is_for_spark(hop: Hop) -> None:
    """As after a process was killed in between, or an older copy of the table was restored: the row is still there, and must go."""
    bronze = Log(hop)
    bronze.append({"t": [written(1, 5), written(2, 5), written(3, 6)]})
    hop.run()
    bronze.append({"t": [written(3, 4), deleted(1, 9)]})
    killed_at(hop.silver, Writer, "replace_arrow", after=False)
    with pytest.raises(NeedsSpark):
        hop.silver()


def test_a_newest_sequence_that_is_none_is_read_from_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version noted the text of such an event, after which every event was late."""
    with without_spark.running():
        hop = Hop(tmp_path)
        bronze = Log(hop)
        bronze.append({"t": [written(1, 5)]})
        hop.silver()
        position = registry.silver_position(SPARK, hop.silver_table)
        with Writer.claim(SPARK, hop.silver_table).released() as writer:
            writer.mark(to=position.to, extra=replace(position, high="zzz").extra)
        monkeypatch.setattr(ranges, "_greatest_sequence", lambda _: position.high)
        hop.append((2, b"\5\0\0\0\0"))
        hop.silver()
        healed = registry.silver_position(SPARK, hop.silver_table)
        assert position.high is not None and healed.high is not None and position.high < healed.high < "z"


@pytest.mark.parametrize("place", ["zzz", "f" * 25])
def test_an_event_without_a_place_in_the_order_makes_none_after_it_late(tmp_path: Path, place: str) -> None:
    """It goes to quarantine. As the newest that the table has seen it would make all events late, for ever."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})  # here late events are for Spark
        bronze = Log(hop)
        bronze.append({"t": [written(1, 5)]})
        hop.silver()
        bronze.batch += 1
        bronze._write([bronze._row("t", written(2, 6)) | {"sequence": place}, bronze._row("t", written(3, 7))])
        hop.silver()
        bronze.append({"t": [written(1, 8)]})
        hop.silver()
        assert numbers(hop) == {1: 8, 3: 7} and len(hop.facts()) == 1


@pytest.mark.parametrize(
    ("options", "late"),
    [
        ({"delete.tombstone.handling.mode": "rewrite"}, deleted(1, 3)),
        ({"keep.document": True}, written(1, 3, "r")),
    ],
    ids=["rows that a delete left", "documents that updates are folded onto"],
)
def test_what_these_settings_keep_is_for_spark(options: dict[str, Any], late: dict[str, Any], tmp_path: Path) -> None:
    with without_spark.running():
        hop = Hop(tmp_path, **options)
        bronze = Log(hop)
        bronze.append({"t": [written(1, 5)]})
        hop.silver()
        bronze.append({"t": [late]})
        with pytest.raises(NeedsSpark):
            hop.silver()
