"""A folder in an object store, by Hadoop's file system in the JVM of a classic session; one or two requests per method."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError, Py4JJavaError

from cdc_core.tables.layout import LOG
from pipelines.spark import failures as spark_failures
from pipelines.spark import jvm, log_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BUFFER_BYTES = 64 * 2**10


@dataclass(frozen=True)
class StoreFolder:
    """A folder in a store; `location` is its URL. The session has the endpoint and credentials."""

    spark: SparkSession
    location: str

    def created(self, name: str) -> Any:
        """An output stream of Java into a new file with a unique name."""
        builder = self._files.createFile(self._at(name)).overwrite(True).recursive()
        # S3A then does not test whether there is a folder or file of that name.
        return builder.opt("fs.s3a.create.performance", True).build()

    def upload(self, source: Path, name: str) -> None:
        """Copy a local file to a new file with a unique name."""
        # By a stream, as Spark writes its own files. On S3A `copyFromLocalFile` uses another client of the SDK, which fails with stores
        # that answer its `Expect: 100-continue` twice.
        self._copied(jvm.java_class(self.spark, "java.io.FileInputStream")(str(source)), self.created(name))

    def delete(self, name: str) -> None:
        self._files.delete(self._at(name), False)

    def download_range(self, name: str, to: Path, start: int, size: int) -> None:
        """Copy the `size` bytes from `start` on of a file to a local file. Raises `OSError`."""
        with _store_errors(self._address(name)):
            file = self._opened(name, start + size)  # S3A takes the length for the end: one request of exactly these bytes
            file.seek(start)
            limited_stream = jvm.java_class(self.spark, "org.apache.hadoop.util.LimitInputStream")(file, size)
            self._received(limited_stream, to)

    def download(self, name: str, to: Path, size_bytes: int | None) -> None:
        """Copy a file to a local file; a known size saves a request. Raises `OSError`."""
        with _store_errors(self._address(name)):
            self._received(self._opened(name, size_bytes), to)

    def _received(self, source: Any, to: Path) -> None:
        self._copied(source, jvm.java_class(self.spark, "java.io.FileOutputStream")(str(to)))

    def _copied(self, source: Any, to: Any) -> None:
        jvm.java_class(self.spark, "org.apache.hadoop.io.IOUtils").copyBytes(source, to, _BUFFER_BYTES, True)

    def status(self, name: str) -> tuple[int, int]:
        """A file's modification time, in milliseconds since 1970, and its size in bytes. Raises `OSError`."""
        with _store_errors(self._address(name)):
            status = self._files.getFileStatus(self._at(name))
            return status.getModificationTime(), status.getLen()

    def written(self, name: str) -> bytes | None:
        """The content of the file that this thread's last commit has written, without a request; None where the log store does not keep
        it."""
        try:
            content = jvm.java_class(self.spark, log_store.CONDITIONAL_PUT).written(self._address(name))
        except (Py4JError, TypeError):  # not in this JVM, or one of another version
            return None
        return None if content is None else bytes(content)

    def is_file(self, name: str) -> bool:
        """Whether a file exists: one request, and no Java exception, which takes a dozen calls to translate. Raises `OSError`."""
        with _store_errors(self._address(name)):
            return bool(self._files.isFile(self._at(name)))

    def is_folder(self, name: str) -> bool:
        """Whether there is any file below a name: one request. Raises `OSError`."""
        with _store_errors(self._address(name)):
            return bool(self._files.isDirectory(self._at(name)))

    def has_commits(self) -> bool:
        """Whether the table's log has a commit as JSON. Raises `OSError`."""
        with contextlib.suppress(FileNotFoundError), _store_errors(self._address(LOG)):
            return any(each.getPath().getName().endswith(".json") for each in self._files.listStatus(self._at(LOG)))
        return False

    def _opened(self, name: str, size_bytes: int | None) -> Any:
        if size_bytes is None:
            return self._files.open(self._at(name))
        builder = self._files.openFile(self._at(name)).opt("fs.option.openfile.read.policy", "whole-file")
        # Saves the request for the length.
        return builder.opt("fs.option.openfile.length", str(size_bytes)).build().get()

    @functools.cached_property
    def _files(self) -> Any:
        """The store's file system, which Hadoop caches."""
        return self._at("").getFileSystem(self.spark._jsparkSession.sessionState().newHadoopConf())

    def _at(self, name: str) -> Any:
        return jvm.java_class(self.spark, "org.apache.hadoop.fs.Path")(self._address(name))

    def _address(self, name: str) -> str:
        return f"{self.location.rstrip('/')}/{name}"


@contextlib.contextmanager
def _store_errors(address: str) -> Iterator[None]:
    """Raise Java exceptions of the store's file system as `OSError`; an error of a lost JVM is not translated."""
    try:
        yield
    except Py4JJavaError as error:
        if spark_failures.is_caused_by(error, ("FileNotFoundException",)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address) from error
        raise OSError(errno.EIO, spark_failures.class_name(error), address) from error
    except TypeError as error:  # a class or method that this Hadoop lacks
        raise OSError(errno.ENOSYS, str(error), address) from error
