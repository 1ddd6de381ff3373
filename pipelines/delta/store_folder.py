"""A folder in an object store, as Hadoop's file system in the JVM of a classic session reaches it: one request, or two, a method."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError

from cdc_core.tables.layout import LOG
from pipelines.spark import failures as spark_failures
from pipelines.spark import jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BUFFER_BYTES = 64 * 2**10


@dataclass(frozen=True)
class StoreFolder:
    """A folder in a store that the JVM of a classic session reaches, with its address and credentials."""

    spark: SparkSession
    location: str

    def created(self, name: str) -> Any:
        """A stream into a new file, of a name that nobody else has."""
        creating = self._files.createFile(self._at(name)).overwrite(True).recursive()
        # S3A need not look whether there is a folder of the name, or a file.
        return creating.opt("fs.s3a.create.performance", True).build()

    def upload(self, source: Path, name: str) -> None:
        """Write a file of this disk to one of a name that nobody else has."""
        # By a stream, as Spark writes its own files. `copyFromLocalFile` on S3A takes another client of the SDK, which fails
        # at stores that answer its `Expect: 100-continue` twice.
        self._copied(jvm.java_class(self.spark, "java.io.FileInputStream")(str(source)), self.created(name))

    def delete(self, name: str) -> None:
        self._files.delete(self._at(name), False)

    def download_range(self, name: str, to: Path, start: int, size: int) -> None:
        """Write so many bytes of a file to one on this disk. Raises `OSError`."""
        with _store_errors(self._address(name)):
            file = self._opened(name, start + size)  # S3A takes the length for the end: one request, for no byte more
            file.seek(start)
            limited = jvm.java_class(self.spark, "org.apache.hadoop.util.LimitInputStream")(file, size)
            self._received(limited, to)

    def download(self, name: str, to: Path, size_bytes: int | None) -> None:
        """Write a file's content to one on this disk. Raises `OSError`."""
        with _store_errors(self._address(name)):
            self._received(self._opened(name, size_bytes), to)

    def _received(self, source: Any, to: Path) -> None:
        self._copied(source, jvm.java_class(self.spark, "java.io.FileOutputStream")(str(to)))

    def _copied(self, source: Any, to: Any) -> None:
        jvm.java_class(self.spark, "org.apache.hadoop.io.IOUtils").copyBytes(source, to, _BUFFER_BYTES, True)

    def status(self, name: str) -> tuple[int, int]:
        """When a file was written, in milliseconds since 1970, and its size in bytes. Raises `OSError`."""
        with _store_errors(self._address(name)):
            found = self._files.getFileStatus(self._at(name))
            return found.getModificationTime(), found.getLen()

    def is_file(self, name: str) -> bool:
        """Whether a file is there: one request, and no exception of Java, which takes a dozen questions. Raises `OSError`."""
        with _store_errors(self._address(name)):
            return bool(self._files.isFile(self._at(name)))

    def is_folder(self, name: str) -> bool:
        """Whether there is anything below a name: one request. Raises `OSError`."""
        with _store_errors(self._address(name)):
            return bool(self._files.isDirectory(self._at(name)))

    def has_commits(self) -> bool:
        """Whether there is anything in the table's log. Raises `OSError`."""
        with contextlib.suppress(FileNotFoundError), _store_errors(self._address(LOG)):
            return any(each.getPath().getName().endswith(".json") for each in self._files.listStatus(self._at(LOG)))
        return False

    def _opened(self, name: str, size_bytes: int | None) -> Any:
        if size_bytes is None:
            return self._files.open(self._at(name))
        opening = self._files.openFile(self._at(name)).opt("fs.option.openfile.read.policy", "whole-file")
        # Then the store need not be asked for it.
        return opening.opt("fs.option.openfile.length", str(size_bytes)).build().get()

    @functools.cached_property
    def _files(self) -> Any:
        """The store's file system, of which Hadoop has one."""
        return self._at("").getFileSystem(self.spark._jsparkSession.sessionState().newHadoopConf())

    def _at(self, name: str) -> Any:
        return self._path(self._address(name))

    def _address(self, name: str) -> str:
        return f"{self.location.rstrip('/')}/{name}"

    def _path(self, path: str) -> Any:
        return self._path_class(path)

    @functools.cached_property
    def _path_class(self) -> Any:
        return jvm.java_class(self.spark, "org.apache.hadoop.fs.Path")


@contextlib.contextmanager
def _store_errors(address: str) -> Iterator[None]:
    """What the store's file system raises, as an `OSError`; that the JVM is gone stays what it is."""
    try:
        yield
    except Py4JJavaError as error:
        if spark_failures.is_caused_by(error, ("FileNotFoundException",)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address) from error
        raise OSError(errno.EIO, spark_failures.class_name(error), address) from error
    except TypeError as error:  # a class or a method that this Hadoop has not
        raise OSError(errno.ENOSYS, str(error), address) from error
