"""Where this process puts the files of a path table: into a folder that it sees, or into a store (`stored_files`)."""

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
    """The name of a commit in the table's folder."""
    return f"{LOG}/{version:020}.json"


def commit_info(commit: Path) -> dict[str, Any]:
    """Who made a commit, and what it says of itself; nothing where it does not. Raises `OSError`, and `DecisionNeeded` where it is cut off."""
    try:
        with open(commit, encoding="utf-8") as lines:
            # Only this line is parsed: the others may name thousands of files.
            return next((json.loads(line)["commitInfo"] for line in lines if line.startswith('{"commitInfo"')), {})
    except ValueError as error:
        raise spark_failures.commit_damaged(str(commit)) from error


def identity(file: Mapping[str, Any]) -> tuple[Any, ...]:
    """What Delta knows the file of an action by: its name and its deletion vector."""
    vector = file.get("deletionVector") or {}
    return file["path"], vector.get("storageType"), vector.get("pathOrInlineDv"), vector.get("offset")


def sync(file: Path) -> None:
    """Have a file's content on the disk. Raises `OSError`."""
    with file.open("rb") as written:
        os.fsync(written.fileno())


def is_whole(file: Path, size: int | None) -> bool:
    """Whether a data file is there, as long as the log says: a power failure may leave it without what was written last."""
    try:
        return file.stat().st_size == size or size is None
    except FileNotFoundError:
        return False


class TableFiles(Protocol):
    """The folder of one table."""

    @property
    def folder(self) -> Path:
        """Where this process reads it."""

    @property
    def is_remote(self) -> bool:
        """Whether each look at it is a request to a store."""

    def draft(self, name: str) -> Path:
        """Where a file is written before it is put into the table's folder."""

    def put(self, name: str) -> None:
        """The draft of this name, whole, in the table's folder."""

    def write(self, name: str, content: bytes) -> None:
        """A small file of this name in the table's folder."""

    def read(self, name: str, start: int, size: int) -> bytes:
        """So many bytes of a file of the table's folder, fewer at its end. Raises `OSError`, or an error of Spark's."""

    def remove(self, name: str) -> None:
        """Take a file away again that no commit names."""

    def has_commit(self, version: int) -> bool:
        """Whether the log holds a commit as JSON; after the retention time it goes."""


@dataclass(frozen=True)
class LocalFiles:
    """A folder that this process sees."""

    folder: Path
    is_remote: ClassVar[bool] = False

    def draft(self, name: str) -> Path:
        return self.folder / name

    def put(self, name: str) -> None:
        """It was written where it belongs, and is on the disk before a commit that names it: a power failure would leave it empty."""
        sync(self.folder / name)

    def write(self, name: str, content: bytes) -> None:
        try:
            (self.folder / name).write_bytes(content)
            self.put(name)
        except OSError:
            self.remove(name)  # what is half written only fills the disk that may have been full
            raise

    def read(self, name: str, start: int, size: int) -> bytes:
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read(size)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def has_commit(self, version: int) -> bool:
        return (self.folder / commit_name(version)).exists()
