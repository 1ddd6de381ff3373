"""Compares silver with a model in plain Python: any histories, cut into any batches, in every capture mode and delete mode.

Each pair of modes has a collection, and each history a key in it. Silver runs after each batch. After the last one, and after a
rebuild, `tests.harness.oracle` compares each table with the model.

python -m tests.harness.model --histories 5000 --rounds 10
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.properties.unwrap import DeleteMode
from cdc_core.settings import parse as settings
from pipelines.delta import tables as delta
from pipelines.operations import rebuild
from pipelines.silver import run as silver
from pipelines.spark import session as sparks
from tests.harness import bronze_rows, histories, oracle, sessions
from tests.harness.histories import History, Mode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENGINE = ("__incomplete", "__known", "__document", "__sequence", "__batch", "__deleted")
SECONDS = 100
"""Seconds between the starts of two histories: more than a history has versions."""


@dataclass(frozen=True)
class Case:
    """How one collection is captured, and what a delete does to its rows."""

    mode: Mode
    deletes: DeleteMode
    has_pre_images: bool = False
    has_maps: bool = False

    @property
    def name(self) -> str:
        """The collection's name."""
        more = ["pre"] * self.has_pre_images + ["maps"] * self.has_maps
        return "_".join([self.mode.name, self.deletes.name, *more]).lower()

    @property
    def options(self) -> dict[str, Any]:
        """The collection's settings."""
        keeps = {"keep.document": True} if self.mode is Mode.DESCRIBED else {}
        maps = {"schema": {"a": "map", "b": "map<double>", "c.a": "map<string>"}} if self.has_maps else {}
        return {"delete.tombstone.handling.mode": self.deletes.value, **keeps, **maps}


MODES = (DeleteMode.TOMBSTONE, DeleteMode.DROP, DeleteMode.REWRITE, DeleteMode.REWRITE_WITH_TOMBSTONE)
CASES = (
    *(
        Case(mode, deletes, has_pre_images)
        for mode in Mode
        for deletes in MODES
        for has_pre_images in (False, True)
        if deletes.marks_deleted or not has_pre_images
    ),
    *(Case(mode, DeleteMode.TOMBSTONE, has_maps=True) for mode in Mode),
)
"""Every capture mode with every delete mode that differs in tables, also with pre-images if a delete marks the row, and with fields that
are pinned as maps."""


def faults(
    spark: SparkSession, root: Path, drawn: Sequence[History], *, cases: Sequence[Case] = CASES, rebuilds: bool = True
) -> list[str]:
    """Where the tables differ from the model, one sentence each."""
    chosen = settings.parse(
        {
            "name": "model",
            "lakehouse": {"root": str(root)},
            "source": {"mongodb.connection.string": "${env:NOWHERE}"},
            "silver": {"collections": {f"{bronze_rows.DB}.{case.name}": case.options for case in cases}},
        }
    )
    layout = delta.layout(chosen.lakehouse)
    log = bronze_rows.Log(spark, layout.bronze(chosen.name))
    landed = {case: landing(drawn, case) for case in cases}
    for batch in range(histories.BATCHES):
        log.append({case.name: landed[case][batch] for case in cases})
        silver.run(spark, chosen, sessions=sessions.kept(spark))
    found = list(_judged(spark, layout, drawn, cases))
    if rebuilds:
        for case in cases:
            rebuild.run(spark, chosen, collection=f"{bronze_rows.DB}.{case.name}")
        found += _judged(spark, layout, drawn, cases, is_rebuilt=True)
    return found


def landing(drawn: Sequence[History], case: Case) -> list[list[Mapping[str, Any]]]:
    """The collection's events, batch by batch."""
    found: list[list[Mapping[str, Any]]] = [[] for _ in range(histories.BATCHES)]
    for number, history in enumerate(drawn):
        for placed in histories.events(
            history, key=number, mode=case.mode, has_pre_images=case.has_pre_images, first=1 + number * SECONDS
        ):
            found[placed.batch].append(placed.event)
    return found


def _judged(
    spark: SparkSession, layout: Any, drawn: Sequence[History], cases: Sequence[Case], *, is_rebuilt: bool = False
) -> Iterator[str]:
    for case in cases:
        table = spark.table(str(layout.silver(bronze_rows.DB, case.name))).toArrow()
        for fault in _faults(table, drawn, case, is_rebuilt=is_rebuilt):
            yield f"{'rebuilt' if is_rebuilt else 'silver'} {case.name}: {fault}"


def _faults(table: pa.Table, drawn: Sequence[History], case: Case, *, is_rebuilt: bool) -> Iterator[str]:
    deleted = pc.fill_null(table["__deleted"], False) if "__deleted" in table.column_names else pa.repeat(False, len(table))
    incomplete = {int(key) for key in table.filter(pc.fill_null(table["__incomplete"], False))["__key"].to_pylist()}
    alive = [number for number, history in enumerate(drawn) if history.end is not None]
    yield from (f"{number}: incomplete: {drawn[number]}" for number in sorted(incomplete & set(alive)))
    gone = [number for number, history in enumerate(drawn) if history.end is None]
    rest = table.filter(deleted)
    living = table.filter(pc.invert(deleted))
    if case.deletes.keeps_row:
        are_gone = _are_of(living, gone)
        rest, living = living.filter(are_gone), living.filter(pc.invert(are_gone))
    yield from _differing(living, {number: drawn[number].end for number in alive}, drawn, is_rebuilt)
    left = {int(key) for key in rest["__key"].to_pylist()}
    if is_rebuilt and not case.has_maps:  # a pinned map keeps its type, so other values stay rescued
        yield from _left_out(table, drawn)
    if case.deletes.removes_row:
        yield from (f"{number}: a deleted row is there: {drawn[number]}" for number in sorted(left))
        return
    told = {number: _told(drawn[number], case) for number in gone}
    if case.deletes.marks_deleted:
        was = {number for number in gone if any(version is not None for version in drawn[number].versions)}
        yield from (f"{number}: not marked as deleted: {drawn[number]}" for number in sorted(was - left))
    known = {number: document for number, document in told.items() if document is not None}
    yield from _differing(rest.filter(_are_of(rest, known)), known, drawn, is_rebuilt)


def _left_out(table: pa.Table, drawn: Sequence[History]) -> Iterator[str]:
    """Values that a rebuild left in `__rescued`, although a column of another type could hold them."""
    for row in table.select(["__key", "__rescued"]).to_pylist():
        for path, text in row["__rescued"] or ():
            if not _stays_rescued(json.loads(text)):
                yield f"{row['__key']}: {path}: {text} is still rescued: {drawn[int(row['__key'])]}"


def _stays_rescued(value: Any) -> bool:
    """Whether no column can hold the value: dates out of range, and documents and arrays without any value."""
    match value:
        case {"$date": {"$numberLong": _}}:
            return True
        case dict():
            return all(map(_stays_rescued, value.values()))
        case list():
            return all(map(_stays_rescued, value))
    return value is None


def _are_of(table: pa.Table, numbers: Iterable[int]) -> pa.ChunkedArray:
    """Which rows belong to these histories."""
    return pc.is_in(table["__key"], pa.array([str(number) for number in numbers], pa.string()))


def _told(history: History, case: Case) -> histories.Document | None:
    """The document that a deleted row must show; None if the events do not determine it."""
    versions = history.versions
    last = max((number for number, version in enumerate(versions) if version is not None), default=None)
    if last is None:
        return None
    if case.has_pre_images:
        return versions[last]
    begun = last
    while begun > 0 and versions[begun - 1] is not None:
        begun -= 1
    is_snapshotted = history.snapshot is not None and begun <= history.snapshot <= last
    is_told = begun > 0 or (is_snapshotted and history.late == 0)
    match case.mode:
        case Mode.WHOLE:
            is_told = last > 0 or (is_snapshotted and history.late == 0)
        case Mode.LOOKED_UP:
            is_told = is_told and history.behind == 0
        case Mode.DESCRIBED:  # without a pre-image the row shows the last whole document of the range, or stays as it was
            is_told = is_told and case.deletes.keeps_row
    return versions[last] if is_told else None


def _differing(table: pa.Table, documents: Mapping[int, Any], drawn: Sequence[History], is_rebuilt: bool) -> Iterator[str]:
    values = [oracle.read_bson(histories.raw(document, number)) for number, document in documents.items()]
    added = [name for name in ENGINE if name in table.column_names]
    for difference in oracle.differences(values, table, added=added, is_rebuilt=is_rebuilt):
        number = difference.split(":")[0]
        yield f"{difference}: {drawn[int(number)] if number.isdigit() else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare silver with the model for generated histories; 0 if they agree."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.harness.model", description="Silver against a model in plain Python."
    )
    parser.add_argument("--histories", type=int, default=2000, help="so many in each collection")
    parser.add_argument("--rounds", type=int, default=1, help="so often, each with a seed of its own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", default="", help="the collections whose names hold this")
    arguments = parser.parse_args(argv)
    cases = [case for case in CASES if arguments.cases in case.name]
    spark = sparks.session("model", conf={"spark.driver.memory": "3g"})
    found: list[str] = []
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        begun = time.monotonic()
        drawn = histories.drawn(arguments.histories, seed=seed)
        with tempfile.TemporaryDirectory(prefix="medallion-model-") as folder:
            new = faults(spark, Path(folder), drawn, cases=cases)
        print(
            f"seed {seed}: {len(drawn):,} histories in {len(cases)} collections, {time.monotonic() - begun:,.0f} s",
            flush=True,
        )
        for fault in new:
            print(fault, flush=True)
        found += new
    sparks.stop()
    print("FAULTS: see above" if found else "every table is as the model says")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
