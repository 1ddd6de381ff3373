"""Rows that a data file has and its table has not any more: the file's deletion vector, read and replaced.

Source: Delta's protocol, "Deletion Vectors".
"""

from __future__ import annotations

import json
import re
import struct
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cdc_core.tables import deletion_vector
from cdc_core.tables.deletion_vector import RowSet
from pipelines import clock
from pipelines.delta.table_files import TableFiles
from pipelines.delta.table_schema import NotReadable


def of(vector: Mapping[str, Any], files: TableFiles) -> RowSet:
    """The rows of a vector, as the log describes it: in the log itself, or in a file that it names. Raises `NotReadable`."""
    try:
        match vector["storageType"]:
            case "i":
                return RowSet.read(deletion_vector.inline(vector["pathOrInlineDv"], vector["sizeInBytes"]))
            case "u":
                framed = files.read(
                    file_of(vector), vector.get("offset") or 0, vector["sizeInBytes"] + deletion_vector.FRAME_BYTES
                )
                return RowSet.read(deletion_vector.framed(framed))
            case _:  # a path elsewhere, as a shallow clone has it
                raise NotReadable
    except (ValueError, LookupError, struct.error) as error:  # cut off, or of another format: Delta says what it is
        raise NotReadable from error


def is_there(vector: Mapping[str, Any], folder: Path) -> bool:
    """Whether the file that a vector lies in is as long as the log says; true for one in the log itself, or elsewhere."""
    end = (vector.get("offset") or 0) + vector["sizeInBytes"] + deletion_vector.FRAME_BYTES
    try:
        return vector["storageType"] != "u" or (folder / file_of(vector)).stat().st_size >= end
    except FileNotFoundError:
        return False


def file_of(vector: Mapping[str, Any]) -> str:
    """The name of the file in the table's folder that a vector lies in."""
    return deletion_vector.relative_path(vector["pathOrInlineDv"])


def without(file: Mapping[str, Any], rows: Iterable[int], files: TableFiles) -> list[dict[str, Any]]:
    """The actions that take rows out of a file, given by its `add` action with statistics; none where they are out of it
    already. Raises `NotReadable`.

    The new vector is in a file of its own, which VACUUM takes where no commit comes to name it.
    """
    gone, held = RowSet.of(rows), file.get("deletionVector")
    if held:
        gone |= of(held, files)  # a file has one deletion vector: the new one holds the rows of the old one, too
    count, stats = len(gone), _statistics(file)
    if held and count == held["cardinality"]:
        return []
    same = {name: file[name] for name in ("path", "partitionValues", "size", "deletionVector") if name in file}
    removed = {"remove": {**same, "deletionTimestamp": clock.now_ms(), "dataChange": True, "extendedFileMetadata": True}}
    # No row is left: the file goes, and gets no vector of all its rows.
    if stats["numRecords"] == count:
        return [removed]
    added = {
        **file,
        "stats": _with_loose_bounds(file["stats"], is_said="tightBounds" in stats),
        "deletionVector": _written(gone, files),
        "dataChange": True,
    }
    # For Delta a file is its name with its vector: the old pair goes, and the new one comes.
    return [{"add": added}, removed]


def _statistics(file: Mapping[str, Any]) -> dict[str, Any]:
    """What Delta says of a file's columns, with the number of its rows at least."""
    try:
        stats: dict[str, Any] = json.loads(file["stats"])
        int(stats["numRecords"])
    except (ValueError, TypeError, KeyError) as error:  # somebody else's, which Delta asks the file for
        raise NotReadable from error
    return stats


def _with_loose_bounds(stats: str, *, is_said: bool) -> str:
    """A file's statistics that say that the least or the greatest value may be gone; `is_said`: where they say of either already.

    As text: a decimal has more digits than a number of Python keeps, and a bound that is rounded hides rows from readers.
    """
    if is_said:
        return _TIGHT_BOUNDS.sub('"tightBounds":false', stats)
    return f'{stats.rstrip()[:-1]},"tightBounds":false}}'


_TIGHT_BOUNDS = re.compile(r'"tightBounds"\s*:\s*true')


def _written(rows: RowSet, files: TableFiles) -> dict[str, Any]:
    data, name = rows.serialized(), uuid.uuid4()
    files.write(f"deletion_vector_{name}.bin", deletion_vector.file(data))
    return {
        "storageType": "u",
        "pathOrInlineDv": deletion_vector.encoded_name(name),
        "offset": deletion_vector.OFFSET,
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }
