"""Reads checkpoints of a table's log that are one Parquet file, without Spark."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from cdc_core.tables.layout import LOG

_NAME = re.compile(r"[0-9]{20}\.checkpoint\.parquet")

_PART_ROWS = 4096
"""Rows that are read at a time; the statistics of a wide table's file are kilobytes of text."""


def newest(folder: Path, version: int | None = None) -> Path | None:
    """The path of the newest checkpoint, or of the newest up to a version; None where there is none."""
    log = folder / LOG
    # By `_last_checkpoint`: listing a long log takes seconds.
    last = noted(log)
    if last is not None and (version is None or last <= version) and (path := log / name(last)).exists():
        return path
    with contextlib.suppress(FileNotFoundError):
        names = (entry.name for entry in os.scandir(log) if _NAME.fullmatch(entry.name))
        # All names have the same length, with leading zeros: the greatest name has the greatest version.
        file_name = max((name for name in names if version is None or int(name[:20]) <= version), default=None)
        return None if file_name is None else log / file_name
    return None


NOTED = "_last_checkpoint"
"""The file of the log in which Delta notes its last checkpoint."""


def name(version: int) -> str:
    """The file name of a version's checkpoint."""
    return f"{version:020}.checkpoint.parquet"


def noted_version(path: Path) -> int:
    """The version that the file `NOTED` names. Raises `OSError`, `ValueError`, `TypeError` or `KeyError`."""
    version = json.loads(path.read_text("utf-8"))["version"]
    if not isinstance(version, int) or not _NAME.fullmatch(name(version)):
        raise ValueError(f"{path}: {version} is no version")
    return version


def noted(log: Path) -> int | None:
    """The version of the last checkpoint in a log's folder, of any form; None where none is noted."""
    try:
        return noted_version(log / NOTED)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def actions(path: Path) -> Iterator[dict[str, Any]]:
    """The actions of a checkpoint, in the form of a commit; without `txn`, `remove` and `domainMetadata`."""
    with pq.ParquetFile(path) as parquet:
        # Those three do not affect the live files, and are most of a long log's checkpoint. `domainMetadata` also has a `configuration`
        # that is a string instead of a map.
        columns = [column for column in parquet.schema_arrow if column.name not in ("txn", "remove", "domainMetadata")]
        # Parsed fields are copies of text fields, and may have dates that Python cannot represent.
        names = [f"{column.name}.{field.name}" for column in columns for field in column.type if _is_said(field.name)]
        for part in parquet.iter_batches(_PART_ROWS, columns=names):
            for kind in part.schema.names:
                for action in part[kind].drop_null().to_pylist():
                    yield {kind: {key: _plain(key, value) for key, value in action.items() if value is not None}}


def _is_said(key: str) -> bool:
    return not key.endswith("_parsed")


_MAPS = ("partitionValues", "tags", "configuration")


def _plain(key: str, value: Any) -> Any:
    """A value in the form of JSON: Parquet's maps are lists of pairs, and its structs contain nulls."""
    if key in _MAPS:
        return dict(value)
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value
