"""Checkpoints of a table's log that are one Parquet file, read by this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

_NAME = re.compile(r"[0-9]{20}\.checkpoint\.parquet")


def newest(folder: Path, version: int) -> Path | None:
    """The newest checkpoint of a version up to this one; None where there is none."""
    names = (each.name for each in (folder / "_delta_log").glob("*.checkpoint.parquet"))
    # Names of one length, with leading zeros: the greatest text is the greatest version.
    found = max((name for name in names if _NAME.fullmatch(name) and int(name[:20]) <= version), default=None)
    return None if found is None else folder / "_delta_log" / found


def actions(path: Path) -> Iterator[dict[str, Any]]:
    """The actions of a checkpoint, as a commit would have them; those that say what is live."""
    with pq.ParquetFile(path) as held:
        # Neither says what is live: fences and tombstones are most of a long log's checkpoint.
        names = [name for name in held.schema_arrow.names if name not in ("txn", "remove")]
        for row in held.read(names).to_pylist():
            for name, action in row.items():
                if action is not None:
                    yield {name: {key: _plain(key, value) for key, value in action.items() if _is_said(key, value)}}


def _is_said(key: str, value: Any) -> bool:
    return value is not None and not key.endswith("_parsed")


_MAPS = ("partitionValues", "tags", "configuration")


def _plain(key: str, value: Any) -> Any:
    """A value as JSON has it: Parquet's maps are lists of pairs, and its structs hold nulls."""
    if key in _MAPS:
        return dict(value)
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value
