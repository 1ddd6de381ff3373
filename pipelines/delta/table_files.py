"""How this process writes and reads the files of a path table: in a local folder (here), or in a store (`stored_files`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from cdc_core.tables.layout import LOG
from pipelines.spark import failures as spark_failures


def commit_name(version: int) -> str:
    """The name of a version's commit, relative to the table's folder."""
    return f"{LOG}/{version:020}.json"


def commit_info(commit: Path) -> dict[str, Any]:
    """The `commitInfo` of a commit; empty where it has none. Raises `OSError`, and `DecisionNeeded` where the file is truncated."""
    try:
        with open(commit, encoding="utf-8") as lines:
            # Parses only this line: the others may name thousands of files.
            return next((json.loads(line)["commitInfo"] for line in lines if line.startswith('{"commitInfo"')), {})
    except ValueError as error:
        raise spark_failures.commit_damaged(str(commit)) from error


def identity(file: Mapping[str, Any]) -> tuple[Any, ...]:
    """Delta's key of the file of an `add` or `remove` action: its path and its deletion vector."""
    vector = file.get("deletionVector") or {}
    return file["path"], vector.get("storageType"), vector.get("pathOrInlineDv"), vector.get("offset")


def sync(file: Path) -> None:
    """Flush a file's content to the disk. Raises `OSError`."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def is_whole(file: Path, size: int | None) -> bool:
    """Whether a data file exists with the size of the log, if that is known: a power failure may truncate it."""
    try:
        return file.stat().st_size == size or size is None
    except FileNotFoundError:
        return False


def is_readable(file: Path, size: int | None) -> bool:
    """Whether a Parquet file is whole, and begins and ends as such a file does: a power failure may leave zeros of the right length."""
    if not is_whole(file, size):
        return False
    with file.open("rb") as stream:
        begin = stream.read(_MARK_BYTES)
        if begin not in _MARKS:
            return False
        stream.seek(-_MARK_BYTES, os.SEEK_END)
        return begin == stream.read()


_MARKS, _MARK_BYTES = (b"PAR1", b"PARE"), 4
"""What a Parquet file begins and ends with; the second one is encrypted."""


class TableFiles(Protocol):
    """The folder of one table."""

    @property
    def folder(self) -> Path:
        """The local folder: the table's own, or that of its copies."""

    @property
    def is_remote(self) -> bool:
        """Whether the table is in a store, so that each access is a request."""

    def draft(self, name: str) -> Path:
        """The local path where a file is written before `put`."""

    def put(self, name: str) -> None:
        """Move the draft of this name into the table's folder, durably."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file into the table's folder, durably."""

    def read(self, name: str, start: int, size: int) -> bytes:
        """The `size` bytes from `start` on of a file; fewer at its end. Raises `OSError`, or an error of Spark."""

    def remove(self, name: str) -> None:
        """Remove a file that no commit names, and its draft."""

    def has_commit(self, version: int) -> bool:
        """Whether the log holds a commit as JSON; Delta removes it after the retention time."""


@dataclass(frozen=True)
class LocalFiles:
    """A table's folder on a local file system."""

    folder: Path
    is_remote: ClassVar[bool] = False

    def draft(self, name: str) -> Path:
        return self.folder / name

    def put(self, name: str) -> None:
        """Flush the draft, which is in its final place, to the disk: otherwise a power failure could leave a committed file empty."""
        sync(self.folder / name)

    def write(self, name: str, content: bytes) -> None:
        try:
            (self.folder / name).write_bytes(content)
            self.put(name)
        except OSError:
            self.remove(name)  # the disk may be full
            raise

    def read(self, name: str, start: int, size: int) -> bytes:
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read(size)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def has_commit(self, version: int) -> bool:
        return (self.folder / commit_name(version)).exists()
