"""Checkpoints of a table's log that are one Parquet file, read by this process."""

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
"""Of a wide table the statistics of a file are kilobytes of text."""


def newest(folder: Path, version: int | None = None) -> Path | None:
    """The newest checkpoint, or that of a version up to this one; None where there is none."""
    log = folder / LOG
    # As Delta notes it: to list a long log takes seconds.
    at = noted(log)
    if at is not None and (version is None or at <= version) and (path := log / name(at)).exists():
        return path
    with contextlib.suppress(FileNotFoundError):
        names = (entry.name for entry in os.scandir(log) if _NAME.fullmatch(entry.name))
        # Names of one length, with leading zeros: the greatest text is the greatest version.
        found = max((name for name in names if version is None or int(name[:20]) <= version), default=None)
        return None if found is None else log / found
    return None


NOTED = "_last_checkpoint"
"""Where Delta notes its last checkpoint."""


def name(version: int) -> str:
    """The name of a version's checkpoint in the log's folder."""
    return f"{version:020}.checkpoint.parquet"


def noted_version(path: Path) -> int:
    """The version of the checkpoint that `NOTED` names. Raises `OSError`, `ValueError`, `TypeError` or `KeyError`."""
    return int(json.loads(path.read_text("utf-8"))["version"])


def noted(log: Path) -> int | None:
    """The version of the checkpoint that is noted in a log's folder, whatever it consists of; None where none is."""
    try:
        return noted_version(log / NOTED)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def actions(path: Path) -> Iterator[dict[str, Any]]:
    """The actions of a checkpoint, as a commit would have them; those that say what is live."""
    with pq.ParquetFile(path) as held:
        # None says what is live: fences and tombstones are most of a long log's checkpoint. A domain, as that of clustering, has a
        # `configuration` that is a text.
        actions = [each for each in held.schema_arrow if each.name not in ("txn", "remove", "domainMetadata")]
        # What is parsed is there as text, too, and may hold dates that Python has not.
        names = [f"{each.name}.{field.name}" for each in actions for field in each.type if _is_said(field.name)]
        for part in held.iter_batches(_PART_ROWS, columns=names):
            for name in part.schema.names:
                for action in part[name].drop_null().to_pylist():
                    yield {name: {key: _plain(key, value) for key, value in action.items() if value is not None}}


def _is_said(key: str) -> bool:
    return not key.endswith("_parsed")


_MAPS = ("partitionValues", "tags", "configuration")


def _plain(key: str, value: Any) -> Any:
    """A value as JSON has it: Parquet's maps are lists of pairs, and its structs hold nulls."""
    if key in _MAPS:
        return dict(value)
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value
