"""The definition of a table of a local log (`local_log`): its properties, features, columns and identifier, without a Spark job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from cdc_core.tables import layout as tables
from pipelines.delta import checkpoint, local_log

MANY_ACTIONS = 2000
"""The most actions that this process keeps: two of each of a thousand tables."""


def properties(folder: Path) -> dict[str, str] | None:
    """The table's properties; None where they cannot be read here."""
    metadata = newest_action(folder, "metaData")
    return None if metadata is None else dict(metadata.get("configuration") or {})


def features(folder: Path) -> frozenset[str] | None:
    """The table features of readers and writers; None where they cannot be read here."""
    action = newest_action(folder, "protocol")
    return (
        None if action is None else frozenset((*(action.get("readerFeatures") or ()), *(action.get("writerFeatures") or ())))
    )


def columns(folder: Path) -> list[str] | None:
    """The names of the table's columns, in order; None where they cannot be read here."""
    metadata = newest_action(folder, "metaData")
    return None if metadata is None else [each["name"] for each in json.loads(metadata["schemaString"])["fields"]]


def column_types(folder: Path) -> StructType | None:
    """The table's columns with their types; None where they cannot be read here."""
    metadata = newest_action(folder, "metaData")
    return None if metadata is None else StructType.fromJson(json.loads(metadata["schemaString"]))


def table_id(folder: Path) -> str | None:
    """Delta's identifier of the table; None where it cannot be read here."""
    metadata = newest_action(folder, "metaData")
    return None if metadata is None else str(metadata["id"])


class _ReadAction(NamedTuple):
    """The newest action of a kind up to a version, and the stamp of that version's commit (`local_log.stamp`)."""

    version: int
    stamp: tuple[int, int] | None
    action: dict[str, Any]


_READ: dict[tuple[Path, str], _ReadAction] = {}
"""The last answers of `newest_action`, by folder and kind."""


def newest_action(folder: Path, kind: str) -> dict[str, Any] | None:
    """The newest action of a kind of which one counts (`metaData`, `protocol`); None where it cannot be read here.

    From the commits after the last call for the table, for which services call this again and again. At first from the commits after the
    newest checkpoint, else from the checkpoint.
    """
    newest_version = local_log.newest_version(folder)
    if newest_version is None:
        return None
    try:
        action = _followed(folder, kind, newest_version) or _first_read(folder, kind, newest_version)
        stamp = local_log.stamp(folder, newest_version)
    except (OSError, ValueError):  # cleaned up just now, or damaged, which Delta reports
        return None
    if action is not None and stamp is not None:
        if len(_READ) >= MANY_ACTIONS:
            _READ.clear()
        _READ[folder, kind] = _ReadAction(newest_version, stamp, action)
    return action


def _followed(folder: Path, kind: str, version: int) -> dict[str, Any] | None:
    """The action of the last call, or of the commits after it; None where the log does not have that call's commit."""
    read = _READ.get((folder, kind))
    # A table that was removed and created again uses the same version numbers again.
    if read is None or read.version > version or read.stamp != local_log.stamp(folder, read.version):
        return None
    return _committed(folder, kind, after=read.version, to=version) or read.action


def _first_read(folder: Path, kind: str, version: int) -> dict[str, Any] | None:
    checkpoint_path = checkpoint.newest(folder)
    after = -1 if checkpoint_path is None else int(checkpoint_path.name[:20])
    action = _committed(folder, kind, after=after, to=version)
    if action is not None or checkpoint_path is None:
        return action
    values = pq.ParquetFile(checkpoint_path).read([kind])[kind].drop_null()
    return dict(values[0].as_py()) if len(values) else None


def _committed(folder: Path, kind: str, *, after: int, to: int) -> dict[str, Any] | None:
    """The newest action of a kind in the commits after a version; None where they have none."""
    for version in range(to, after, -1):
        for line in (folder / tables.LOG / f"{version:020}.json").read_text("utf-8").split("\n"):
            if line.startswith(f'{{"{kind}"'):
                return dict(json.loads(line)[kind])
    return None
