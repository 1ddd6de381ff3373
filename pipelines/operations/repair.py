"""Repair: tables whose log names data files that are not there.

    found    each table below the lakehouse's root whose newest version has files that cannot be found
    mended   by one commit a table that takes them out and puts its position back so far that nothing is lost in silence:

    bronze            and all that came after: the next capture reads that from the oplog again, under new numbers of batches. Where the
                      oplog does not reach back so far, the capture says so, and snapshot.mode: when_needed reads everything anew
    silver, history   position 0: the next run applies all of bronze once more, guarded by `sequence`; where old events were taken
                      from it, the run asks for a snapshot first
    gold              no position: the next run writes the table anew from silver
    ops/deletes       what is left stays; the collection's gold table, which may lack some of the deletes, has no position
    ops/collections   all of it: the next run of silver finds the collections again
    ops/schemas       all of it: silver refuses tables whose columns nobody can tell, until they are rebuilt
    the others        facts, each for itself: the result says what is gone

Every commit is fenced and leaves the table whole: killed at any moment, run it again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cdc_core import errors
from cdc_core.bronze import repair as bronze_repair
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.delta import data_file, local_log, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import history, history_position
from pipelines.spark import parallel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings


@dataclass(frozen=True)
class RepairResult:
    """A table with missing files: how many were missing, how many went with them, and what brings their rows back.

    `version` is the table's after that, None where nothing was changed.
    """

    table: str
    missing: tuple[str, ...]
    taken_out: int
    next: str
    version: int | None


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    is_trial: bool = False,
    take_over: bool = False,
    failures: parallel.Failures,
) -> list[RepairResult]:
    """Mend every table of the lakehouse that names missing files; with `is_trial` only name them.

    A table that cannot be mended is noted in `failures`, and the others are: what went with a table is told here alone. That is
    `TableOwned` or `LeaseHeld` where another process writes it, which has to be stopped first. Raises `DecisionNeeded` where the
    tables do not lie on a file system that this process sees.
    """
    layout = delta.layout(settings.lakehouse)
    root = None if layout.root is None else local_log.folder(tables.TableRef.at(layout.root))
    if root is None:
        raise errors.DecisionNeeded(
            "lakehouse: medallion repair only works on a file system that this process can see; "
            "on Databricks use FSCK REPAIR TABLE, and medallion rebuild for silver and gold"
        )
    bronze = layout.bronze(settings.name)
    own = local_log.folder(bronze)
    is_trimmed = delta.exists(spark, bronze) and bronze_log.TRIMMED in delta.properties(spark, bronze)
    shadows = root.joinpath(*tables.SHADOW_FOLDERS)
    found: list[RepairResult] = []
    for folder in delta.tables_below(root):
        names = folder.relative_to(root).parts
        # Of a copy that lies beside the layers nobody would put the position back.
        if not names or names[0] not in tables.FOLDERS:
            continue
        # A shadow is removed by the next rebuild; another pipeline's bronze has a position that only its own capture can mend.
        if shadows in folder.parents or (names[0] == "bronze" and folder != own):
            continue
        try:
            repaired = _table(spark, tables.TableRef.at(str(folder)), names, is_trial=is_trial, take_over=take_over)
        except Exception as error:
            failures.note(str(folder), error)
            continue
        if repaired is not None and is_trimmed and repaired.next in _AGAIN.values():
            # Its rows were made of events that bronze may not hold any more: the next run looks, and refuses.
            then = "run medallion signal execute-snapshot for this collection: old events were removed from bronze"
            repaired = dataclasses.replace(repaired, next=then)
        found += [repaired] if repaired is not None else []
    return found


def to_json(found: Sequence[RepairResult]) -> str:
    """The tables as one JSON object, with the names of the dataclasses' fields."""
    return json.dumps({"tables": [dataclasses.asdict(each) for each in found]}, indent=2)


def _table(
    spark: SparkSession, table: tables.TableRef, names: Sequence[str], *, is_trial: bool, take_over: bool
) -> RepairResult | None:
    files = delta.data_files(spark, table)
    if files is None:
        raise errors.DecisionNeeded(f"{table.label}: its log cannot be read from here; on Databricks use FSCK REPAIR TABLE")
    missing = [file for file in files if not file.is_there]
    if not missing:
        return None
    delta.check_ours(spark, table)
    if names[0] == "gold" and history.RESERVED.issubset(spark.table(str(table)).columns):
        names = ("history", *names[1:])
    gone, then = _plan(files, missing, names)
    version = None
    if not is_trial:
        if names[:2] == ("ops", "deletes"):
            # First: killed in between, the next repair finds the deletes missing once more.
            root = Path(table.path or "").parents[3]
            _forget_position(spark, tables.TableRef.at(str(root.joinpath("gold", *names[2:]))), take_over=take_over)
        with Writer.claim(spark, table, take_over=take_over, kept=("batch", "log")).released() as writer:
            to, extra = _position(writer, names, gone)
            version = writer.remove_files(gone, to=to, extra=extra)
    return RepairResult(table.label, tuple(sorted(file.name for file in missing)), len(gone), then, version)


def _forget_position(spark: SparkSession, table: tables.TableRef, *, take_over: bool) -> None:
    """Let a gold table be written anew from silver by its next run."""
    if not delta.exists(spark, table):
        return
    with Writer.claim(spark, table, take_over=take_over).released() as writer:
        writer.mark(to=None, extra={})


_AGAIN = {
    "silver": "medallion silver will apply all of bronze again",
    "history": "medallion gold will apply all of bronze again",
}
"""What brings back the rows of tables that are made of bronze's events."""


def _plan(
    files: Sequence[data_file.DataFile], missing: Sequence[data_file.DataFile], names: Sequence[str]
) -> tuple[Sequence[data_file.DataFile], str]:
    """The files that go, and what brings their rows back."""
    match names:
        case ("bronze", _):
            batches = {file.name: file.between("batch") for file in files}
            # Whole batches from the first missing one on: the position must be a token before which nothing is missing.
            chosen = set(bronze_repair.rewound(batches, [file.name for file in missing]))
            return [file for file in files if file.name in chosen], (
                "medallion capture will read the later events from the oplog again; if it says that the position is lost, set "
                "snapshot.mode: when_needed"
            )
        case ("silver" | "history" as kind, *_):
            return missing, _AGAIN[kind]
        case ("gold", *_):
            return missing, "medallion gold will rewrite the table"
        case ("ops", "deletes", *_):
            return (
                missing,
                "medallion gold will rewrite the collection's table; the remembered deletes in these files are lost",
            )
        case ("ops", "collections"):
            return files, "medallion silver will find the collections again"
        case ("ops", "schemas"):
            # All of them: by an older schema than its table's, columns would be taken for others.
            return (
                files,
                "run medallion rebuild for each collection, to rebuild its table and schema from bronze; until then silver refuses it",
            )
    return missing, "the contents of these files are lost"


def _position(writer: Writer, names: Sequence[str], gone: Sequence[data_file.DataFile]) -> tuple[object, dict[str, object]]:
    """The position and the extras of a table out of which files are taken."""
    match names:
        case ("bronze", _):
            # What is left came by these settings: the next start compares its own with them, and tells what they had left out.
            first = min(span[0] if (span := file.between("batch")) else 0 for file in gone)
            left = table_history.last_commit(
                writer.spark, writer.table, saying=lambda said: (said.get("batch") or first) < first
            )
            said = {**((left.metadata if left is not None else None) or {}), **_named(writer.metadata, "batch", "log")}
            return writer.metadata.get("to"), _named(said, "batch", "log", *bronze_log.OF_THE_STREAM)
        case ("silver", *_):
            # Without `high`, so that what is applied again counts as late and is compared with the rows that are left.
            return 0, _named(writer.metadata, "generation", "log", "added")
        case ("history", *_):
            # Where old events are not in bronze any more, it would begin in the middle, without a word.
            return 0, {history_position.GAP: True, **_named(writer.metadata, "added")}
        case ("gold", *_):
            return None, {}
    return writer.metadata.get("to"), {}


def _named(said: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: said[name] for name in names if name in said}
