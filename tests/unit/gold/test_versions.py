"""Versions of documents: which rows events add and change in a history."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import hypothesis
import orjson
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from cdc_core.bronze import columns as bronze
from cdc_core.gold import versions
from cdc_core.gold.versions import DocumentEvent, DocumentVersion
from cdc_core.silver import fold


def whole(at: int, value: Any, op: bronze.Op = bronze.Op.UPDATE) -> DocumentEvent:
    document = orjson.dumps({"v": value}).decode()
    return DocumentEvent(f"{at:04}", at, op, is_whole=True, document=document)


def delete(at: int) -> DocumentEvent:
    return DocumentEvent(f"{at:04}", at, bronze.Op.DELETE)


def partial(at: int, before: Any = None, **fields: Any) -> DocumentEvent:
    text = None if before is None else orjson.dumps(before).decode()
    return DocumentEvent(f"{at:04}", at, bronze.Op.UPDATE, before=text, update=fold.PartialUpdate(f"{at:04}", fields))


class Kept:
    """A key's versions, as a table keeps them."""

    def __init__(self) -> None:
        self.versions: dict[str, DocumentVersion] = {}

    def add(self, *events: DocumentEvent, folds: bool = True) -> None:
        low = min(event.sequence for event in events)
        held = [version for version in self.versions.values() if version.until is None or version.until >= low]
        for version in versions.changed(held, events, folds=folds):
            before = self.versions.get(version.sequence)
            if version.offset is None:  # only its end is written
                assert before is not None
                version = DocumentVersion(**{**vars(before), "until": version.until, "is_deleted": version.is_deleted})
            self.versions[version.sequence] = DocumentVersion(**{**vars(version), "offset": None})

    def spans(self) -> list[tuple[int, int | None, Any]]:
        """Start, end and value, in order, without versions that end where they start."""
        return [
            (
                int(key),
                None if each.until is None else int(each.until),
                None if each.document is None else orjson.loads(each.document),
            )
            for key, each in sorted(self.versions.items())
            if each.until != key
        ]


def test_versions_follow_each_other() -> None:
    kept = Kept()
    kept.add(whole(1, "a", bronze.Op.CREATE), whole(2, "b"), delete(4), whole(6, "c", bronze.Op.CREATE))
    assert kept.spans() == [(1, 2, {"v": "a"}), (2, 4, {"v": "b"}), (6, None, {"v": "c"})]
    assert [each.is_deleted for each in kept.versions.values()] == [False, True, False]


def test_updates_are_folded_each_by_itself() -> None:
    """Onto the version before, also of an earlier run; onto a pre-image where there is none."""
    kept = Kept()
    kept.add(whole(1, "a", bronze.Op.CREATE), partial(2, w=1))
    kept.add(partial(3, v="b"))
    assert [value for _, _, value in kept.spans()] == [{"v": "a"}, {"v": "a", "w": 1}, {"v": "b", "w": 1}]
    other = Kept()
    other.add(partial(5, before={"v": 1, "x": 2}, v=3))
    assert other.spans() == [(5, None, {"v": 3, "x": 2})] and not other.versions["0005"].is_incomplete


def test_a_version_without_its_document_is_no_base() -> None:
    """It was made while documents were not kept."""
    kept = Kept()
    kept.add(replace(whole(1, "a"), document=None), folds=False)
    kept.add(partial(2, before={"v": "a"}, w=1), partial(3, x=2))
    assert kept.spans()[1:] == [(2, 3, {"v": "a", "w": 1}), (3, None, {"v": "a", "w": 1, "x": 2})]
    assert not any(each.is_incomplete for each in kept.versions.values())


def test_an_unreadable_pre_image_counts_as_none() -> None:
    kept = Kept()
    kept.add(partial(1, w=1), replace(partial(2, x=2), before="{"))
    assert kept.spans() == [(1, 2, {"w": 1}), (2, None, {"w": 1, "x": 2})]
    assert all(each.is_incomplete for each in kept.versions.values())


def test_an_update_that_comes_again_is_folded_onto_the_same_version() -> None:
    """After a crash a range is repeated: the version before its first event ends where that event begins."""
    kept = Kept()
    kept.add(whole(1, "a", bronze.Op.CREATE), partial(2, w=1))
    before = kept.spans()
    kept.add(partial(2, w=1))
    assert kept.spans() == before and not kept.versions["0002"].is_incomplete


def test_a_document_that_comes_late_completes_what_followed() -> None:
    """Its updates come again with it. Until then the versions have what is known, and are incomplete."""
    kept = Kept()
    updates = [partial(3, w=1), partial(4, x=2)]
    kept.add(*updates)
    assert [each.is_incomplete for each in kept.versions.values()] == [True, True]
    kept.add(whole(1, "a", bronze.Op.READ), *updates)
    assert kept.spans() == [(1, 3, {"v": "a"}), (3, 4, {"v": "a", "w": 1}), (4, None, {"v": "a", "w": 1, "x": 2})]
    assert not any(each.is_incomplete for each in kept.versions.values())


def test_a_delete_is_remembered_for_what_comes_late() -> None:
    kept = Kept()
    kept.add(delete(5))
    kept.add(whole(3, "a", bronze.Op.READ))
    assert kept.spans() == [(3, 5, {"v": "a"})]


def test_an_end_that_comes_late_forgets_none_after_it() -> None:
    """A version ended at a delete and now ends at an earlier one: what is between them may come still later."""
    kept = Kept()
    kept.add(whole(1, "a", bronze.Op.CREATE), delete(4))
    kept.add(delete(2))
    kept.add(delete(2))
    assert kept.spans() == [(1, 2, {"v": "a"})]
    kept.add(whole(3, "b", bronze.Op.CREATE))
    assert kept.spans() == [(1, 2, {"v": "a"}), (3, 4, {"v": "b"})]
    assert all(each.is_deleted for each in kept.versions.values())


@pytest.mark.parametrize("runs", [1, 4], ids=["at once", "one by one"])
def test_without_documents_an_update_says_only_what_it_changed(runs: int) -> None:
    """Fields from before are unknown then, except where a pre-image has them."""
    kept = Kept()
    events = [whole(1, "a"), partial(2, w=1), partial(3, x=2), partial(4, before={"v": "b"}, y=3), whole(5, "c")]
    for number in range(runs):
        kept.add(*(replace(each, document=None) for each in events[number::runs]), folds=False)
    assert kept.spans() == [(1, 2, None), (2, 3, {"w": 1}), (3, 4, {"x": 2}), (4, 5, {"v": "b", "y": 3}), (5, None, None)]
    assert [each.is_incomplete for _, each in sorted(kept.versions.items())] == [False, True, True, False, False]


EVENTS = st.lists(
    st.one_of(
        st.builds(lambda v: ("whole", v), st.integers(0, 2)),
        st.just(("delete", None)),
        st.builds(lambda v: ("read", v), st.integers(0, 2)),
    ),
    min_size=1,
    max_size=7,
)


@hypothesis.given(EVENTS, st.randoms(use_true_random=False), st.integers(1, 3))
def test_any_order_gives_the_same(drawn: list[tuple[str, Any]], random: Any, runs: int) -> None:
    """Events in several runs, shuffled and some repeated: at each moment the version of the last event before it holds."""
    made = {
        "whole": lambda at, v: whole(at, v),
        "delete": lambda at, v: delete(at),
        "read": lambda at, v: whole(at, v, bronze.Op.READ),
    }
    events = [made[what](at, value) for at, (what, value) in enumerate(drawn, 1)]
    shuffled = [*events, *random.sample(events, min(2, len(events)))]
    random.shuffle(shuffled)
    kept = Kept()
    for number in range(runs):
        if part := shuffled[number::runs]:
            kept.add(*part)
    for at, (what, value) in enumerate(drawn, 1):
        holding = [found for start, end, found in kept.spans() if start <= at and (end is None or end > at)]
        assert holding == ([] if what == "delete" else [{"v": value}]), (at, drawn)
    assert all(first[1] is None or first[1] <= second[0] for first, second in itertools.pairwise(kept.spans()))


@pytest.mark.parametrize("op", [bronze.Op.CREATE, bronze.Op.READ])
def test_known_events_change_nothing(op: bronze.Op) -> None:
    kept = Kept()
    kept.add(whole(1, "a", op), delete(2))
    held = list(kept.versions.values())
    again = versions.changed(held, [whole(1, "a", op), delete(2)], folds=True)
    assert [DocumentVersion(**{**vars(each), "offset": None}) for each in again] in ([], held)


def test_a_document_that_changes_all_the_time_is_laid_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event gives a version with the whole document: they do not become one batch, and the parts have the same rows."""
    events = [
        {
            "sequence": f"{at:04}",
            "offset": at,
            "op": "c" if at == 1 else "u",
            "is_whole": at == 1,
            "after": '{"_id":1,"pad":"%s"}' % ("x" * 1000) if at == 1 else None,
            "before": None,
            "updateDescription": {"updatedFields": f'{{"n":{at}}}', "removedFields": None},
        }
        for at in range(1, 101)
    ]
    for event in events:
        if event["updateDescription"] is not None:
            event["updateDescription"] |= {"truncatedArrays": None, "disambiguatedPaths": None}
    batch = pa.RecordBatch.from_pylist([{"__key": "1", "events": events, "stored": None}])
    whole_ = list(versions.laid_out(True)(iter([batch])))
    monkeypatch.setattr(fold, "OUTPUT_BYTES", 10_000)
    parts = list(versions.laid_out(True)(iter([batch])))
    assert len(parts) >= 10 and max(part.nbytes for part in parts) < 20_000
    assert pa.Table.from_batches(parts).to_pylist() == pa.Table.from_batches(whole_).to_pylist()
    assert sum(part.num_rows for part in parts) == 100


def test_versions_without_documents_are_laid_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions of a partition are not collected until its end, even where the documents themselves are not needed."""
    event = {"offset": 1, "op": "c", "is_whole": True, "after": None, "before": None}
    keys = [[{"__key": f"{at}", "events": [{**event, "sequence": f"{at:04}"}], "stored": None}] for at in range(100)]
    monkeypatch.setattr(fold, "OUTPUT_BYTES", 10_000)
    read = map(pa.RecordBatch.from_pylist, keys)
    first = next(versions.laid_out(False)(read))
    assert 0 < first.num_rows < 50 and len(list(read)) > 50
