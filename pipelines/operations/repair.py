"""Repairs tables whose log names data files that do not exist.

Checks each table below the lakehouse's root. One commit per damaged table removes missing files from its log, and moves its position
back far enough that nothing is lost silently:

    bronze            also removes all later batches: the next capture reads their events from the oplog again, under new batch numbers.
                      If the oplog does not reach back far enough, the capture says so; snapshot.mode: when_needed then reads everything
    silver, history   position 0: the next run applies all of bronze again, guarded by `sequence`; if old events were removed from
                      bronze, the run asks for a snapshot first
    gold              no position: the next run rewrites the table from silver
    quarantine        keeps the other files; a rebuild of silver finds the events in bronze again
    ops/deletes       keeps the other files; the collection's gold table, which may lack some of the deletes, loses its position
    ops/collections   removes all files: the next run of silver finds the collections again
    ops/schemas       removes all files: silver refuses tables with unknown columns until they are rebuilt
    others            only the missing rows are lost, and the result says so

Every commit is fenced and leaves a readable table: if a run is killed, run it again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.bronze import repair as bronze_repair
from cdc_core.settings.parse import Settings
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.delta import data_file, local_log, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import history, history_position
from pipelines.spark import parallel


@dataclass(frozen=True)
class RepairResult:
    """A table with missing files: their names, the number of files removed from the log (`taken_out`), and what restores their rows.

    `version` is the repaired table's, None if nothing was changed.
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
    """Repair every table of the lakehouse with missing files; with `is_trial` only list them.

    Errors of single tables go to `failures` (`TableOwned` or `LeaseHeld` while another process writes the table), and so do folders that
    cannot be listed; the others are repaired. Raises `DecisionNeeded` if the tables are not on a file system that this process can access,
    or there are none.
    """
    layout = delta.layout(settings.lakehouse)
    root = None if layout.root is None else local_log.folder(tables.TableRef.at(layout.root))
    if root is None:
        raise errors.DecisionNeeded(
            "lakehouse: medallion repair only works on a file system that this process can see; "
            "on Databricks use FSCK REPAIR TABLE, and medallion rebuild for silver and gold"
        )
    bronze = layout.bronze(settings.name)
    own_folder = local_log.folder(bronze)
    is_trimmed = delta.exists(spark, bronze) and bronze_log.TRIMMED in delta.properties(spark, bronze)
    shadows = root.joinpath(*tables.SHADOW_FOLDERS)
    results: list[RepairResult] = []

    def unlisted(error: OSError) -> None:
        place, why = Path(error.filename), f"cannot be listed ({error.strerror}), so that files of its tables may be missing"
        if isinstance(error, FileNotFoundError):
            if not os.path.islink(place):
                return  # removed meanwhile
            why = "the disk of this link is not there"
        if place.name != "lost+found":  # that of a disk, below the folder of a layer that is its mount point
            failures.note(str(place), errors.DecisionNeeded(f"{place}: {why}"))

    # What lies beside the layers' folders, as copies of them do, are not tables of a pipeline.
    folders = [each for name in sorted(tables.FOLDERS) for each in delta.tables_below(root / name, on_error=unlisted)]
    if not folders and not failures.by_name:
        # It must not look as if no files were missing.
        raise errors.DecisionNeeded(
            f"{root}: there are no tables: no pipeline ever ran with this lakehouse.root, they were moved, or their disk is not mounted"
        )
    for folder in folders:
        names = folder.relative_to(root).parts
        # The next rebuild removes a shadow table; another pipeline's bronze can only be repaired with that pipeline's settings.
        if shadows in folder.parents or (names[0] == "bronze" and folder != own_folder):
            continue
        try:
            result = _table(spark, tables.TableRef.at(str(folder)), names, is_trial=is_trial, take_over=take_over)
        except Exception as error:
            failures.note(str(folder), error)
            continue
        if result is not None and is_trimmed and result.next in _AGAIN.values():
            # Bronze may not have all events of this table: the next run checks that, and refuses.
            next_step = "run medallion signal execute-snapshot for this collection: old events were removed from bronze"
            result = replace(result, next=next_step)
        results += [result] if result is not None else []
    return results


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
    removed_files, next_step = _plan(files, missing, names)
    version = None
    if not is_trial:
        if names[:2] == ("ops", "deletes"):
            # First: if killed in between, the next repair finds the missing deletes again.
            root = Path(table.path or "").parents[3]
            _forget_position(spark, tables.TableRef.at(str(root.joinpath("gold", *names[2:]))), take_over=take_over)
        with Writer.claim(spark, table, take_over=take_over, newest_names=("batch", "log")).released() as writer:
            to, extra = _position(writer, names, removed_files)
            version = writer.remove_files(removed_files, to=to, extra=extra)
    return RepairResult(table.label, tuple(sorted(file.name for file in missing)), len(removed_files), next_step, version)


def _forget_position(spark: SparkSession, table: tables.TableRef, *, take_over: bool) -> None:
    """Remove a gold table's position, so that its next run rewrites it from silver."""
    if not delta.exists(spark, table):
        return
    with Writer.claim(spark, table, take_over=take_over).released() as writer:
        writer.mark(to=None, extra={})


_AGAIN = {
    "silver": "medallion silver will apply all of bronze again",
    "history": "medallion gold will apply all of bronze again",
    "quarantine": "run medallion rebuild for this collection, which puts the events of bronze that cannot be read into quarantine again; "
    "until then later updates of their documents do not wait for them",
}
"""What restores the rows of tables that are built from bronze."""


def _plan(
    files: Sequence[data_file.DataFile], missing: Sequence[data_file.DataFile], names: Sequence[str]
) -> tuple[Sequence[data_file.DataFile], str]:
    """The files to remove from the log, and what restores their rows."""
    match names:
        case ("bronze", _):
            batches = {file.name: file.between("batch") for file in files}
            # Whole batches from the first missing one on: nothing may be missing before the new position.
            file_names = set(bronze_repair.rewound(batches, [file.name for file in missing]))
            return [file for file in files if file.name in file_names], (
                "medallion capture will read the later events from the oplog again (if no batch is left, it begins as at its "
                "first start); if it says that the position is lost, set snapshot.mode: when_needed"
            )
        case ("silver" | "history" | "quarantine" as kind, *_):
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
            # All files: with a schema older than the table, columns would be mistaken for others.
            return (
                files,
                "run medallion rebuild for each collection, to rebuild its table and schema from bronze; until then silver refuses it",
            )
    return missing, "the contents of these files are lost"


def _position(writer: Writer, names: Sequence[str], gone: Sequence[data_file.DataFile]) -> tuple[object, dict[str, object]]:
    """The position and the extra metadata for the commit that removes files."""
    match names:
        case ("bronze", _):
            # The remaining events were captured with these settings: the next start compares them with its own, to report gaps.
            first_batch = min(span[0] if (span := file.between("batch")) else 0 for file in gone)
            commit = table_history.last_commit(
                writer.spark, writer.table, matching=lambda metadata: (metadata.get("batch") or first_batch) < first_batch
            )
            metadata = {
                **((commit.metadata if commit is not None else None) or {}),
                **_named(writer.metadata, "batch", "log"),
            }
            return writer.metadata.get("to"), _named(metadata, "batch", "log", *bronze_log.OF_THE_STREAM)
        case ("silver", *_):
            # Without `high`: events that are applied again then count as late, and are compared with the remaining rows.
            return 0, _named(writer.metadata, "generation", "log", "added")
        case ("history", *_):
            # Otherwise it would silently begin in the middle if old events were removed from bronze.
            return 0, {history_position.GAP: True, **_named(writer.metadata, "added")}
        case ("gold", *_):
            return None, {}
    return writer.metadata.get("to"), {}


def _named(metadata: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: metadata[name] for name in names if name in metadata}
