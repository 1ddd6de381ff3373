"""Histories without Spark: the versions depend only on the events, not on their order or batches."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from cdc_core.silver import reduce
from pipelines.bronze import collection_events, registry
from pipelines.delta import live_files, table_history
from pipelines.delta.writer import Writer
from pipelines.gold import current, history, history_position, in_process_history
from pipelines.gold.history_position import HistoryPosition
from tests.harness import bronze_rows, layers, oracle, without_spark
from tests.harness.history_tables import ENDS
from tests.harness.without_spark import SPARK, Hop, NeedsSpark

NAMESPACE = registry.Namespace(bronze_rows.DB, "t")
LIMIT = 1000


@pytest.fixture(autouse=True)
def without_jvm() -> Iterator[None]:
    with without_spark.running():
        yield


class Kept:
    """A collection's bronze, and its history, which `lay_out` brings up to the newest batch."""

    def __init__(self, root: Path, *, limit: int = LIMIT, vectors: bool = True, **options: Any) -> None:
        self.hop = Hop(root, history=True, **options)
        self.bronze = without_spark.Log(self.hop)
        self.table = self.hop.layout.history(*NAMESPACE)
        self.limit, self.at = limit, HistoryPosition()
        history.create(SPARK, self.table, properties={"delta.enableDeletionVectors": str(vectors).lower()})

    def claimed(self) -> history.History:
        local = in_process_history.InProcess(self.limit)
        return history.History(SPARK, self.hop.settings, self.hop.layout, NAMESPACE, Writer.claim(SPARK, self.table), local)

    def lay_out(self, to: int | None = None) -> None:
        kept, reached = self.claimed(), to or self.bronze.batch
        kept.brought_up(self.at, registry.SilverPosition(reached), stop=threading.Event())
        kept.writer.release()
        self.at = HistoryPosition(reached, folds=table_history.standing(SPARK, self.table).metadata["folds"])

    def versions(self, *names: str) -> list[tuple[Any, ...]]:
        """Key, start and end in seconds, and columns of each version, in order."""
        table = oracle.read(self.table.path or "")
        rows = table.sort_by([("__key", "ascending"), ("__sequence", "ascending")]).to_pylist()
        seconds = ("__sequence", "__until")
        return [
            (
                row["__key"],
                *(None if row[at] is None else bronze_rows.second(row[at]) for at in seconds),
                *(row.get(name) for name in names),
            )
            for row in rows
        ]


def change(op: str, key: int, at: int, **fields: Any) -> dict[str, Any]:
    return {"op": op, "key": key, "at": at, **({} if op == "d" else {"after": {"_id": key, **fields}})}


def update(key: int, at: int, **fields: Any) -> dict[str, Any]:
    return {"op": "u", "key": key, "at": at, "update": fields}


def test_versions_end_where_the_next_ones_begin(tmp_path: Path) -> None:
    """An ended version is rewritten in full, with columns that were added later; `valid_to` is its end."""
    kept = Kept(tmp_path)
    kept.bronze.append({"t": [change("c", 1, 10, a=1, n={"x": 1}), change("c", 2, 11, a=2)]})
    kept.lay_out()
    kept.bronze.append({"t": [change("u", 1, 20, a=5, b="y"), change("d", 2, 21), change("c", 3, 22)]})
    kept.lay_out()
    assert kept.versions("a", "b", "n") == [
        ("1", 10, 20, 1, None, {"x": 1}),
        ("1", 20, None, 5, "y", None),
        ("2", 11, 21, 2, None, None),
        ("3", 22, None, None, None, None),
    ]
    table = oracle.read(kept.table.path or "")
    for mark, column in (("__sequence", "valid_from"), ("__until", "valid_to")):
        ends = zip(table[mark].to_pylist(), table[column].to_pylist())
        assert all(mark is None if at is None else bronze_rows.second(mark) == at.timestamp() for mark, at in ends)


def test_a_version_that_comes_again_keeps_what_an_earlier_setting_said(tmp_path: Path) -> None:
    """The column stays after `keep.document` is removed. When events are repeated, only a MERGE keeps its values."""
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("c", 1, 10, a=1), change("d", 1, 20)]})
    kept.lay_out()
    kept.hop.settings = layers.pipeline(tmp_path, history=True)
    kept.bronze.append({"t": [change("c", 2, 30, a=1)]})
    kept.lay_out()
    kept.at = HistoryPosition()
    with pytest.raises(NeedsSpark):
        kept.lay_out()
    assert kept.versions("__document") == [("1", 10, 20, '{"_id":1,"a":1}'), ("2", 30, None, None)]


def test_a_late_event_moves_the_mark_of_a_delete_also_when_the_mode_is_gone(tmp_path: Path) -> None:
    """The version before the delete now ends at an update: marked as deleted it would be wrong."""
    kept = Kept(tmp_path, **{"delete.tombstone.handling.mode": "rewrite"})
    kept.bronze.append({"t": [change("c", 1, 10, a=1), change("d", 1, 20)]})
    kept.lay_out()
    kept.hop.settings = layers.pipeline(tmp_path, history=True)
    kept.bronze.append({"t": [change("u", 1, 15, a=2)]})
    kept.lay_out()
    assert kept.versions("a", "__deleted") == [("1", 10, 15, 1, False), ("1", 15, 20, 2, True)]


def test_a_late_event_says_of_no_delete_from_before_the_mode(tmp_path: Path) -> None:
    """Older rows have no mark. A version that ends at a late event is not deleted, and a null mark means that no delete is known."""
    kept = Kept(tmp_path)
    kept.bronze.append({"t": [change("c", 1, 10, v="a"), change("c", 2, 11, v="x"), change("d", 2, 15)]})
    kept.lay_out()
    kept.hop.settings = layers.pipeline(tmp_path, history=True, **{"delete.tombstone.handling.mode": "rewrite"})
    for event in (change("c", 3, 20, v="b"), change("u", 2, 13, v="y")):
        kept.bronze.append({"t": [event]})
        kept.lay_out()
    assert kept.versions("v", "__deleted") == [
        ("1", 10, None, "a", None),
        ("2", 11, 13, "x", False),
        ("2", 13, 15, "y", False),
        ("3", 20, None, "b", False),
    ]
    assert oracle.read(kept.table.path or "").column_names[-len(ENDS) :] == ENDS


def test_a_later_delete_marks_the_version(tmp_path: Path) -> None:
    kept = Kept(tmp_path, **{"delete.tombstone.handling.mode": "rewrite"})
    kept.bronze.append({"t": [change("c", 1, 10, a=1), change("c", 2, 10, a=1)]})
    kept.lay_out()
    kept.bronze.append({"t": [change("d", 1, 20)]})
    kept.lay_out()
    assert kept.versions("__deleted") == [("1", 10, 20, True), ("2", 10, None, False)]
    assert oracle.read(kept.table.path or "").column_names[-len(ENDS) :] == ENDS


def test_updates_are_folded_onto_the_version_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the text of the document, which `add.fields` may request."""
    added: Any = reduce.AddedColumn("__after", "STRING", None, ("after",))  # type: ignore[arg-type]  # there is no Spark
    monkeypatch.setattr(reduce, "added", lambda *given, **named: (added,))
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("c", 1, 10, a=1)]})
    kept.lay_out()
    kept.bronze.append({"t": [update(1, 20, b=2), update(1, 30, a=3), update(2, 30, a=3)]})
    kept.lay_out()
    expected = [
        ("1", 10, 20, 1, None, False),
        ("1", 20, 30, 1, 2, False),
        ("1", 30, None, 3, 2, False),
        ("2", 30, None, 3, None, True),
    ]
    assert kept.versions("a", "b", "__incomplete") == expected
    texts = ['{"_id":1,"a":1}', '{"_id":1,"a":1,"b":2}', '{"_id":1,"a":3,"b":2}', '{"a":3}']
    assert [text for *_, text in kept.versions("__after")] == texts


def test_an_update_without_its_document_makes_an_incomplete_version(tmp_path: Path) -> None:
    """Without folding the version has the changed fields only, and nothing of the version before."""
    kept = Kept(tmp_path)
    kept.bronze.append({"t": [change("c", 1, 10, a=1, b=1), update(1, 20, a=2)]})
    kept.lay_out()
    kept.bronze.append({"t": [update(1, 30, b=2), {**update(1, 40, b=3), "before": {"_id": 1, "a": 9}}]})
    kept.lay_out()
    assert kept.versions("_id", "a", "b", "__incomplete") == [
        ("1", 10, 20, 1, 1, 1, False),
        ("1", 20, 30, None, 2, None, True),
        ("1", 30, 40, None, None, 2, True),
        ("1", 40, None, 1, 9, 3, False),
    ]


@pytest.mark.parametrize(
    "event",
    [{"text": "{"}, {"text": "no document"}, {"text": '{"a":tru}'}, {"text": "{'a':1}"}, {"update": "{"}, {"op": "c"}],
    ids=["cut off", "no document", "broken inside", "single quotes", "an update cut off", "without its document"],
)
def test_what_cannot_be_read_leaves_an_incomplete_version(tmp_path: Path, event: dict[str, Any]) -> None:
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("c", 1, 10, a=1), change("c", 2, 10, a=1)]})
    kept.lay_out()
    nowhere = {"op": "x", "key": 2, "at": 20}
    kept.bronze.append({"t": [{"op": "u", "key": 1, "at": 20} | event, change("u", 1, 30, a=2), nowhere]})
    kept.lay_out()
    assert kept.versions("a", "__incomplete") == [
        ("1", 10, 20, 1, False),
        ("1", 20, 30, 1, True),
        ("1", 30, None, 2, False),
        ("2", 10, 20, 1, False),
        ("2", 20, None, 1, True),
    ]


def test_what_is_for_queries_leaves_the_table_as_it_is(tmp_path: Path) -> None:
    """A document behind updates of it."""
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("c", 1, 10, a=1), update(2, 20, b=2)]})
    kept.lay_out()
    before = kept.versions("a")
    kept.bronze.append({"t": [change("r", 2, 15, a=1)]})
    with pytest.raises(NeedsSpark):
        kept.lay_out()
    assert kept.versions("a") == before


def test_a_wider_type_writes_all_versions_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one commit with the events that need it; queries do it where there are many versions."""
    kept = Kept(tmp_path)
    kept.bronze.append({"t": [change("c", 1, 10, a=1), change("c", 2, 11, a=2)]})
    kept.lay_out()
    kept.bronze.append({"t": [change("u", 1, 20, a=1.5), {"op": "d", "key": 2, "at": 21}]})
    with monkeypatch.context() as patch:
        patch.setattr(collection_events, "LOCAL_EVENTS", 1)
        with pytest.raises(NeedsSpark):
            kept.lay_out()
    before = [("1", 10, None, 1), ("2", 11, None, 2)]
    assert kept.versions("a") == before
    kept.lay_out()
    assert kept.versions("a") == [("1", 10, 20, 1.0), ("1", 20, None, 1.5), ("2", 11, 21, 2.0)]
    assert all(isinstance(version[-1], float) for version in kept.versions("a"))


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (in_process_history, "READ_BYTES", -(2**20)),
        (collection_events, "MANY_BYTES", 10),
        (live_files, "MANY_ROWS", 1),
    ],
)
def test_large_inputs_are_for_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: int
) -> None:
    kept = Kept(tmp_path, limit=100_000)
    kept.bronze.append({"t": [change("c", 1, 10, a=1), change("c", 2, 10, a=1)]})
    kept.lay_out()
    kept.bronze.append({"t": [change("u", 1, 20, a=2)]})
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(NeedsSpark):
        kept.lay_out()


def test_what_ended_long_ago_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that changes all the time may have a hundred thousand large versions: one event needs only the last."""
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("u", 1, at, a="x" * 1000) for at in range(10, 40)]})
    kept.lay_out()
    monkeypatch.setattr(collection_events, "MANY_BYTES", 8000)
    kept.bronze.append({"t": [update(1, 50, b=1)]})
    kept.lay_out()
    assert kept.versions("b", "__incomplete")[-2:] == [("1", 39, 50, None, False), ("1", 50, None, 1, False)]


def test_a_long_span_is_laid_out_range_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each range is a commit with a position, so that little is in memory at a time."""
    monkeypatch.setattr(collection_events, "PORTION_EVENTS", 2)
    kept = Kept(tmp_path, limit=100_000)
    monkeypatch.setattr(in_process_history.survey, "MAX_DRIVER_ROWS", 1)
    kept.limit = 3
    for at in range(10, 16):
        kept.bronze.append({"t": [change("u", at % 2, at, a=at)]})
    kept.lay_out()
    assert [each[1:] for each in kept.versions("a")] == [
        (10, 12, 10),
        (12, 14, 12),
        (14, None, 14),
        (11, 13, 11),
        (13, 15, 13),
        (15, None, 15),
    ]
    log = Path(kept.table.path or "") / "_delta_log"
    said = [
        orjson.loads(orjson.loads(path.read_bytes().split(b"\n")[0])["commitInfo"].get("userMetadata", "{}"))
        for path in sorted(log.glob("*.json"))
    ]
    assert [each["to"] for each in said if each.get("to")][:3] == [2, 4, 6]


def test_a_span_of_very_many_events_is_for_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranges would search for keys in more and more rows, and need Spark in the end."""
    kept = Kept(tmp_path, limit=3)
    monkeypatch.setattr(in_process_history.survey, "MAX_DRIVER_ROWS", 1)
    monkeypatch.setattr(collection_events, "PORTION_EVENTS", 2)
    monkeypatch.setattr(collection_events, "SPAN_EVENTS", 5)
    for at in range(10, 16):
        kept.bronze.append({"t": [change("u", 1, at, a=at)]})
    with pytest.raises(NeedsSpark):
        kept.lay_out()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_and_any_batches_come_to_the_same(tmp_path: Path, seed: int) -> None:
    """Events may be late, early or repeated, in batches of any size: the table is a function of the events.

    The exception are deletes without a known version when they came: their versions have no duration.
    """
    rng = random.Random(seed)
    folds, mode = rng.random() < 0.5, rng.choice(["tombstone", "rewrite", "drop"])
    options = {"keep.document": folds, "delete.tombstone.handling.mode": mode}
    events = []
    for at in rng.sample(range(10, 10_000), 60):
        key = rng.randrange(6)
        kind = rng.choice(["c", "u", "u", "u", "d"] + ["p"] * 3)
        events.append(update(key, at, **{rng.choice("ab"): at}) if kind == "p" else change(kind, key, at, a=at, c=str(at)))
    events.sort(key=lambda event: event["at"])
    at_once = Kept(tmp_path / "at_once", **options)
    at_once.bronze.append({"t": events})
    at_once.lay_out()
    # Whole documents after their updates need queries: with folding, the events keep their order.
    shuffled = events[:] if folds else rng.sample(events, len(events))
    batches = Kept(tmp_path / "batches", vectors=seed % 3 > 0, **options)
    start = 0
    while start < len(shuffled):
        count = rng.randrange(1, 12)
        again = [] if folds else rng.sample(shuffled[:start], min(start, rng.randrange(4)))
        batches.bronze.append({"t": shuffled[start : start + count] + again})
        start += count
        batches.lay_out()
    columns = ("a", "b", "c", "__incomplete", "__deleted", "__document")
    found, expected = ([each for each in kept.versions(*columns) if each[1] != each[2]] for kept in (batches, at_once))
    assert found == expected


def test_large_files_without_deletion_vectors_are_for_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path, vectors=False)
    kept.bronze.append({"t": [change("c", 1, 10, a=1)]})
    kept.lay_out()
    monkeypatch.setattr(live_files, "MANY_REWRITTEN_BYTES", 1)
    kept.bronze.append({"t": [change("c", 2, 20, a=1)]})
    kept.lay_out()
    kept.bronze.append({"t": [change("u", 1, 30, a=2)]})
    with pytest.raises(NeedsSpark):
        kept.lay_out()
    assert kept.versions("a") == [("1", 10, None, 1), ("2", 20, None, 1)]


def test_what_others_changed_meanwhile_is_not_taken_out_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody rewrote files after the versions were found: their places are no longer valid."""
    kept = Kept(tmp_path)
    kept.bronze.append({"t": [change("c", 1, 10, a=1)]})
    kept.lay_out()
    kept.bronze.append({"t": [change("u", 1, 20, a=2)]})
    monkeypatch.setattr(live_files.LiveFiles, "holds", lambda *_: False)
    with pytest.raises(NeedsSpark):
        kept.lay_out()
    monkeypatch.undo()
    assert kept.versions("a") == [("1", 10, None, 1)]


def test_the_first_of_many_documents_give_them_their_schema(tmp_path: Path) -> None:
    """As in silver: without a schema each document would take the slow exact path. Fields that come later are still found."""
    kept = Kept(tmp_path, limit=10_000)
    kept.bronze.append(
        {"t": [change("c", key, 10 + key, a=key, **({"late": "x"} if key > 1090 else {})) for key in range(1100)]}
    )
    kept.lay_out()
    found = kept.versions("a", "late")
    assert len(found) == 1100 and [each[3] for each in found].count(None) == 0
    assert [each[4] for each in found].count("x") == 9


@pytest.mark.parametrize(("older", "is_here"), [(30, True), (10, False)])
def test_a_sweep_that_ends_nothing_takes_no_query(tmp_path: Path, older: int, is_here: bool) -> None:
    """After each first snapshot no version is older than its first chunk."""
    kept = Kept(tmp_path)
    kept.bronze.append({"t": [change("c", 1, older, a=1), change("r", 2, 20, a=1)]})
    kept.bronze.append({"t": [{"sweep": 20}]})
    if is_here:
        kept.lay_out()
        assert [each[:3] for each in kept.versions()] == [("1", 30, None), ("2", 20, None)]
    else:
        with pytest.raises(NeedsSpark):
            kept.lay_out()


def test_updates_from_before_a_switch_to_whole_documents_are_folded(tmp_path: Path) -> None:
    """The history is behind when `capture.mode` changes: it still folds events without documents, and only then stops keeping documents."""
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("c", 1, 10, v=1), change("c", 2, 11, v=1)]})
    kept.lay_out()
    kept.bronze.append({"t": [update(1, 20, v=2), update(2, 21, v=2), change("u", 1, 30, v=3)]})
    kept.hop.settings = layers.pipeline(tmp_path, history=True)
    kept.lay_out()
    expected = [("1", 10, 20, 1, False), ("1", 20, 30, 2, False), ("1", 30, None, 3, False), ("2", 11, 21, 1, False)]
    assert kept.versions("v", "__incomplete") == [*expected, ("2", 21, None, 2, False)]
    kept.bronze.append({"t": [change("u", 2, 40, v=4)]})
    kept.lay_out()
    assert kept.at.folds is False


def test_updates_of_the_old_mode_that_come_late_are_folded(tmp_path: Path) -> None:
    """The history has the new settings before the capture. Back in the old mode, versions without a document are made again."""
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("c", 1, 10, v=1, w=1), change("c", 2, 11, v=1, w=1)]})
    kept.lay_out()
    kept.hop.settings = layers.pipeline(tmp_path, history=True)
    for events in ([change("u", 2, 20, v=2, w=1)], [update(1, 30, v=3)]):
        kept.bronze.append({"t": events})
        kept.lay_out()
    expected = [("1", 10, 30, 1, 1, False), ("1", 30, None, 3, 1, False), ("2", 11, 20, 1, 1, False)]
    assert kept.versions("v", "w", "__incomplete") == [*expected, ("2", 20, None, 2, 1, False)]
    kept.hop.settings = layers.pipeline(tmp_path, history=True, **{"keep.document": True})
    kept.bronze.append({"t": [update(2, 40, v=4)]})
    kept.lay_out()
    expected += [("2", 20, 40, 2, 1, False), ("2", 40, None, 4, 1, False)]
    assert kept.versions("v", "w", "__incomplete") == expected
    assert kept.at.folds is True


def test_an_update_whose_document_was_gone_takes_no_service_back_to_the_beginning(tmp_path: Path) -> None:
    """Documents were kept once. Now updates have their own, but for one that was deleted before it was looked up: the service keeps documents
    for the range with that event, and not from then on."""
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("c", 1, 10, v=1)]})
    kept.lay_out()
    kept.hop.settings = layers.pipeline(tmp_path, history=True)
    service, applied = kept.claimed(), []
    for event in (change("u", 1, 20, v=2), update(1, 30, v=3), change("d", 1, 31), change("c", 2, 40, v=1)):
        kept.bronze.append({"t": [event]})
        at, silver = history_position.position(SPARK, kept.table), registry.SilverPosition(kept.bronze.batch)
        applied.append(service.brought_up(at, silver, stop=threading.Event()))
    assert applied == [1, 1, 1, 1]
    assert history_position.position(SPARK, kept.table).folds is False


@pytest.mark.parametrize("folds", [False, None])
def test_updates_from_before_a_switch_are_folded_again_from_the_beginning(tmp_path: Path, folds: bool | None) -> None:
    """After a repair, or where an older copy of bronze was restored. Versions that were whole were replaced by the changed fields alone,
    as incomplete, because the last commit before did not fold any more."""
    kept = Kept(tmp_path, **{"keep.document": True})
    kept.bronze.append({"t": [change("c", 1, 10, v=1, w=1), update(1, 20, v=2)]})
    kept.lay_out()
    kept.hop.settings = layers.pipeline(tmp_path, history=True)
    kept.bronze.append({"t": [change("u", 1, 30, v=3, w=1)]})
    kept.lay_out()
    assert kept.at.folds is False
    before = kept.versions("v", "w", "__incomplete")
    assert before == [("1", 10, 20, 1, 1, False), ("1", 20, 30, 2, 1, False), ("1", 30, None, 3, 1, False)]
    kept.at = HistoryPosition(folds=folds)
    kept.lay_out()
    assert kept.versions("v", "w", "__incomplete") == before


def test_updates_from_before_a_drop_are_folded_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When documents begin to be kept, all versions are made again, also those of a collection that was dropped since. Afterwards an event
    from before the drop is refused again.
    """
    # Incomplete versions are for queries, which look for their updates in earlier batches; here the range has all of them.
    monkeypatch.setattr(in_process_history, "_waits", lambda *_: False)
    kept = Kept(tmp_path, **{"keep.document": False})
    kept.bronze.append({"t": [change("c", 1, 10, v=1, w=1), update(1, 20, v=2), change("d", 1, 30), {"drop": 40}]})
    kept.lay_out()
    assert kept.versions("v", "w", "__incomplete") == [("1", 10, 20, 1, 1, False), ("1", 20, 30, 2, None, True)]
    kept.at = history_position.position(SPARK, kept.table)
    assert kept.at.floor
    kept.hop.settings = layers.pipeline(tmp_path, history=True, **{"keep.document": True})
    for events in ([change("c", 1, 50, v=3)], [change("u", 2, 35, v=1)]):
        kept.bronze.append({"t": events})
        kept.lay_out()
        kept.at = history_position.position(SPARK, kept.table)
        expected = [("1", 10, 20, 1, 1, False), ("1", 20, 30, 2, 1, False), ("1", 50, None, 3, None, False)]
        assert kept.versions("v", "w", "__incomplete") == expected


def test_a_position_that_moves_alone_leaves_what_is_made_of_the_versions(tmp_path: Path) -> None:
    """Every run moves all positions: without this a model on a history would be rewritten although nothing changed."""
    kept = Kept(tmp_path, **{"delete.tombstone.handling.mode": "drop"})
    seen = []
    for events in ([change("c", 1, 10, a=1)], [change("d", 1, 20)], [change("d", 1, 21)], [change("c", 2, 30, a=1)]):
        kept.bronze.append({"t": events})
        kept.lay_out()
        said = table_history.standing(SPARK, kept.table).metadata
        seen.append((said["to"], current.rows_of(said)))
    assert [to for to, _ in seen] == [1, 2, 3, 4]
    first, second, third, last = (rows for _, rows in seen)
    assert first == second == third != last
