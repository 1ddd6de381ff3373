"""Where this process puts the files of a path table: into a folder that it sees, or into a store by way of the JVM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipelines.spark import jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TableFiles(Protocol):
    """The folder of one table."""

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

    def has_commit(self, version: int) -> bool | None:
        """Whether the log holds a commit as JSON; after the retention time it goes. None where to ask is dearer than to
        try."""


@dataclass(frozen=True)
class LocalFiles:
    """A folder that this process sees."""

    folder: Path

    def draft(self, name: str) -> Path:
        return self.folder / name

    def put(self, name: str) -> None:
        """It was written where it belongs."""

    def write(self, name: str, content: bytes) -> None:
        try:
            (self.folder / name).write_bytes(content)
        except OSError:
            self.remove(name)  # what is half written only fills the disk that may have been full
            raise

    def read(self, name: str, start: int, size: int) -> bytes:
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read(size)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def has_commit(self, version: int) -> bool | None:
        return (self.folder / "_delta_log" / f"{version:020}.json").exists()


@dataclass(frozen=True)
class StoredFiles:
    """A folder in a store that the JVM of a classic session reaches."""

    spark: SparkSession
    location: str

    def draft(self, name: str) -> Path:
        return jvm.scratch() / name

    def put(self, name: str) -> None:
        draft, files = self.draft(name), self._files()
        source = self._path(f"file:{draft}")
        # By a stream, as Spark writes its own files. `copyFromLocalFile` on S3A takes another client of the SDK, which fails
        # at stores that answer its `Expect: 100-continue` twice.
        copy = jvm.java_class(self.spark, "org.apache.hadoop.fs.FileUtil").copy
        try:
            copy(source.getFileSystem(files.getConf()), source, files, self._at(name), False, True, files.getConf())
        finally:
            draft.unlink(missing_ok=True)

    def write(self, name: str, content: bytes) -> None:
        out = self._files().create(self._at(name), True)
        out.write(bytearray(content))
        out.close()  # what the store refuses, it refuses here

    def read(self, name: str, start: int, size: int) -> bytes:
        file = self._files().open(self._at(name))
        try:
            file.seek(start)
            return bytes(file.readNBytes(size))
        finally:
            file.close()

    def remove(self, name: str) -> None:
        self.draft(name).unlink(missing_ok=True)
        self._files().delete(self._at(name), False)

    def has_commit(self, version: int) -> bool | None:
        return None

    def _path(self, path: str) -> Any:
        return jvm.java_class(self.spark, "org.apache.hadoop.fs.Path")(path)

    def _at(self, name: str) -> Any:
        return self._path(f"{self.location.rstrip('/')}/{name}")

    def _files(self) -> Any:
        return self._at("").getFileSystem(self.spark._jsparkSession.sessionState().newHadoopConf())
