"""A survey of bronze's rows by this process, compared with counting row by row."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from cdc_core.bronze import columns as bronze
from pipelines.bronze import survey
from pipelines.bronze.registry import Namespace

NAMES = ("a", "b", "é", "${env:HOME}")


def _rows(rng: random.Random, count: int) -> pa.Table:
    rows = [
        {
            "offset": number,
            "batch": number // 10,
            "kind": rng.choice(["change", "snapshot", "heartbeat", "transaction"]),
            "db": rng.choice(NAMES),
            "collection": rng.choice(NAMES),
            "sequence": rng.choice([None, f"{rng.randrange(10**6):024x}", "z", ""]),
            "key": rng.choice([None, "1", "\U0001f600", "\uffff", "z"]),
            "op": rng.choice([None, "c", "u", "d"]),
        }
        for number in range(count)
    ]
    schema = pa.schema([bronze.SCHEMA.field(name) for name in survey.SURVEYED])
    return pa.Table.from_pylist([{"payload": None, **row} for row in rows], schema=schema)


def _expected(rows: pa.Table, only: Namespace | None, starts: dict[Namespace, int]) -> dict[Namespace, survey.EventCounts]:
    found: dict[Namespace, list[dict[str, object]]] = {}
    for row in rows.to_pylist():
        namespace = Namespace(row["db"], row["collection"])
        is_wanted = only in (None, namespace) and row["batch"] > starts.get(namespace, -1)
        if row["kind"] in ("change", "snapshot") and is_wanted:
            found.setdefault(namespace, []).append(row)
    return {
        namespace: survey.EventCounts(
            len(events),
            sum(each["op"] == "d" for each in events),
            *(
                bound((str(each[name]) for each in events if each[name] not in unordered), default="", key=str.encode)
                for name, unordered in (("sequence", (None, "z", "")), ("key", (None,)))
                for bound in (min, max)
            ),
        )
        for namespace, events in found.items()
    }


def test_rows_are_counted_by_collection() -> None:
    """Each collection from its own start; keys and sequences in the order of their bytes, without nulls and what is no sequence."""
    rng = random.Random(5)
    for only, starts in ((None, {}), (Namespace("a", "é"), {}), (None, {Namespace("b", "a"): 7, Namespace("é", "é"): 99})):
        rows = _rows(rng, 300)
        counts, sweeps = survey._surveyed_here(rows, only, starts)
        assert counts == _expected(rows, only, starts)
        assert sweeps == ()


def test_thousands_of_starts_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a killed run each collection has its own start: one by one, a million rows take minutes."""
    monkeypatch.setattr(survey, "_is_of", None)
    starts = {Namespace(f"d{number % 20}", f"c{number}"): number for number in range(2000)} | {Namespace("a", "b"): 7}
    rows = _rows(random.Random(6), 300)
    assert survey._surveyed_here(rows, None, starts)[0] == _expected(rows, None, starts)
