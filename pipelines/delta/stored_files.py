"""The files of a table in an object store: writes and removes them, and keeps local copies of those that it reads.

The files of a Delta table never change, so that a copy stays valid as long as the table is the same one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cdc_core.tables.layout import LOG
from pipelines.delta import checkpoint
from pipelines.delta.store_folder import StoreFolder
from pipelines.delta.table_files import commit_name
from pipelines.spark import scratch, stores
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FETCH_BYTES = 128 * 2**20
"""The most bytes of a table that one read copies. Larger reads are for executors, which read columns instead of files."""

FETCH_FILES = 256
"""The most files of a table that one read copies; each takes a request."""

HELD_BYTES = 256 * 2**20
"""The most bytes of data files that this process keeps as copies."""

KEPT_COMMITS = 100
"""How many commits before the copied checkpoint can be copied on demand."""

OLD_COMMITS = 1_000
"""After this many commits a copied log starts again at a later checkpoint."""

_THREADS = 8


class StoredFiles(StoreFolder):
    """A table's folder in a store, with local copies of the files that were read or written."""

    is_remote: ClassVar[bool] = True

    @functools.cached_property
    def folder(self) -> Path:
        """The local folder of the copies."""
        return _root(os.getpid()) / hashlib.sha256(self.location.encode()).hexdigest()[:32]

    def draft(self, name: str) -> Path:
        # Beside the folder of the copies, which is removed when the table turns out to be another one.
        drafts = self.folder.with_suffix(".drafts")
        drafts.mkdir(parents=True, exist_ok=True)
        return drafts / name

    def put(self, name: str) -> None:
        draft = self.draft(name)
        try:
            self.upload(draft, name)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._keep_copy(name)

    def write(self, name: str, content: bytes) -> None:
        out = self.created(name)
        out.write(bytearray(content))
        out.close()  # raises what the store refuses
        try:
            self.draft(name).write_bytes(content)
        except OSError:  # the local disk may be full although the store is not
            self.draft(name).unlink(missing_ok=True)
        else:
            self._keep_copy(name)

    def _keep_copy(self, name: str) -> None:
        """Keep the draft of an uploaded file as its copy, for the next read."""
        draft, copy = self.draft(name), self.folder / name
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            os.replace(draft, copy)
            _HELD.add(copy)
        except OSError:
            draft.unlink(missing_ok=True)

    def read(self, name: str, start: int, size: int) -> bytes:
        self.fetch(name)
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read(size)

    def remove(self, name: str) -> None:
        for path in (self.draft(name), self.folder / name):
            path.unlink(missing_ok=True)
        self.delete(name)

    def has_commit(self, version: int) -> bool:
        return self.is_file(commit_name(version))

    def fetch(self, name: str, size_bytes: int | None = None) -> Path:
        """The copy of a file, downloaded if there is none. Raises `FileNotFoundError`, or another `OSError` where the store cannot be
        read."""
        copy = self._copy_of(name)
        if copy.exists():
            _HELD.touch(copy)
            return copy
        self._copy(copy, size_bytes, lambda draft: self.download(name, draft, size_bytes))
        if not name.startswith(LOG):  # copies of the log are not evicted, or the log would have a hole
            _HELD.add(copy)
        return copy

    def fetch_range(self, name: str, start: int, size: int) -> bytes:
        """The `size` bytes of a file from `start` on, which are kept as a copy, too. Raises as `fetch`."""
        copy = self._copy_of(f"{name}.{start}-{size}")
        if copy.exists():
            _HELD.touch(copy)
            return copy.read_bytes()
        self._copy(copy, size, lambda draft: self.download_range(name, draft, start, size))
        content = copy.read_bytes()
        _HELD.add(copy)
        return content

    def keep(self, name: str, content: bytes) -> None:
        """Keep the content of a file as its copy. Raises `OSError`."""
        self._copy(self._copy_of(name), len(content), lambda draft: draft.write_bytes(content))

    def _copy_of(self, name: str) -> Path:
        """The path of a file's copy.

        Raises `FileNotFoundError` for a name that leads out of the folder: a log in the store must not write elsewhere on this disk.
        """
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise FileNotFoundError(errno.ENOENT, "it lies in another folder than the table's", name)
        return self.folder / name

    def _copy(self, copy: Path, size_bytes: int | None, download: Callable[[Path], object]) -> None:
        """Download a copy. It gets its name when it is complete."""
        copy.parent.mkdir(parents=True, exist_ok=True)
        draft = copy.with_name(f"{copy.name}.{uuid.uuid4().hex[:8]}.draft")
        try:
            download(draft)
            if size_bytes is not None and draft.stat().st_size != size_bytes:
                raise OSError(errno.EIO, "it is not as long as the log says", str(copy))
            os.replace(draft, copy)
        finally:
            draft.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1)
def _root(process: int) -> Path:
    """The folder of this process's copies, which is removed at its end.

    Its name is unique: in a restarted container the process has the same number as before, and the copies of the process before may be of
    tables that have been removed.
    """
    scratch_folder = scratch.folder()
    for leftover in scratch_folder.glob(f"copies-*-{process}.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    root = scratch_folder / f"copies-{uuid.uuid4().hex[:12]}-{process}.tmp"

    def remove() -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root


class _HeldCopies:
    """A cache of copied data files, at most `HELD_BYTES`; the least recently used are evicted."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError):
            self._sizes[path] = path.stat().st_size
            self._sizes.move_to_end(path)
            while sum(self._sizes.values()) > HELD_BYTES:
                # A reader that has it open continues. One that opens it now gets an `OSError`, and uses Spark.
                self._sizes.popitem(last=False)[0].unlink(missing_ok=True)

    def touch(self, path: Path) -> None:
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)


_HELD = _HeldCopies()


@dataclass
class CopiedLog:
    """A copy of the log of one table in a store, from its last checkpoint on, in a folder like the table's own.

    Empty as long as the store has no such table.
    """

    files: StoredFiles
    _first: int = -1
    _newest: int = -1
    _modified_ms: int = -1
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def newest(self) -> int | None:
        """The newest version at the last `follow`; None where there was no table."""
        with self._lock:
            return self._newest if self._newest >= 0 else None

    def follow(self) -> None:
        """Copy the commits after the last call. Raises `OSError` where the store cannot be reached, or only Delta can read the log."""
        with self._lock:
            if self._newest >= 0 and not self._is_same():
                self._forget()
            if self._newest < 0 and not self._begin():
                return
            while self._is_copied(self._newest + 1):
                self._newest += 1
            if self._newest - self._first > OLD_COMMITS:
                with contextlib.suppress(OSError):  # the copied commits have the same content
                    self._begin_later()

    def note_commit(self, version: int, modified_ms: int, size_bytes: int) -> None:
        """Copy a commit that this thread has just made, given with its file's status, where it is the next one.

        Then nothing is asked of the store for it. A log that is only written, and never followed, stays short here.
        """
        with self._lock:
            if not 0 <= self._newest == version - 1 < self._first + OLD_COMMITS:
                return
            name, content = commit_name(version), self.files.written(commit_name(version))
            with contextlib.suppress(OSError):  # the next `follow` copies it
                if content is None or len(content) != size_bytes:
                    self.files.fetch(name, size_bytes)
                else:
                    self.files.keep(name, content)
                self._newest, self._modified_ms = version, modified_ms

    def bring_commit(self, version: int, *, is_alone: bool = False) -> None:
        """Copy a commit where few requests are needed: a new one, one of the last `KEPT_COMMITS` before the checkpoint, or one that
        `is_alone`, which is not part of reading the whole history."""
        with self._lock:
            if version > self._newest and not (is_alone and self._newest < 0):
                self.follow()
            elif is_alone or self._first - KEPT_COMMITS <= version < self._first:
                self.files.fetch(commit_name(version))

    def _is_same(self) -> bool:
        """Whether the newest copied commit is still that of the store: a table may be removed and created again."""
        try:
            size_bytes = (self.folder / commit_name(self._newest)).stat().st_size
            return self.files.status(commit_name(self._newest)) == (self._modified_ms, size_bytes)
        except FileNotFoundError:  # in the store, or here after a clean-up of temporary folders
            return False

    def _forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._first = self._newest = self._modified_ms = -1

    def _begin(self) -> bool:
        """Copy the last checkpoint with its commit, or the first commit; false where there is no table."""
        self._forget()  # a failed attempt may have left files
        if not self.files.is_folder(LOG):
            return False
        checkpoint_version = self._noted_checkpoint()
        if checkpoint_version is not None and self._is_copied(checkpoint_version):
            self._first = self._newest = checkpoint_version
        elif checkpoint_version is None and self._is_copied(0):
            self._first = self._newest = 0
        elif checkpoint_version is not None or self.files.has_commits():
            raise OSError(errno.ENOTSUP, "its log begins in a way that only Delta reads", str(self.folder))
        return self._newest >= 0

    def _begin_later(self) -> None:
        """Copy a later checkpoint, and remove the old commits before it."""
        checkpoint_version = self._noted_checkpoint()
        if checkpoint_version is None or checkpoint_version <= self._first:
            return
        for version in range(max(0, self._first - KEPT_COMMITS), checkpoint_version - KEPT_COMMITS):
            (self.folder / commit_name(version)).unlink(missing_ok=True)
        (self.folder / LOG / checkpoint.name(self._first)).unlink(missing_ok=True)
        self._first = checkpoint_version

    def _noted_checkpoint(self) -> int | None:
        """Copy the checkpoint that the store's log names as the last; its version, or None where there is none."""
        name = f"{LOG}/{checkpoint.NOTED}"
        (self.folder / name).unlink(missing_ok=True)  # the only file of a log that is overwritten
        if not self.files.is_file(name):
            return None
        try:
            version = checkpoint.noted_version(self.files.fetch(name))
        except (ValueError, TypeError, KeyError) as error:
            raise OSError(
                errno.ENOTSUP, "what it says of its checkpoint is not to be read here", str(self.folder)
            ) from error
        name = f"{LOG}/{checkpoint.name(version)}"
        if not (self.folder / name).exists():
            _, size_bytes = self.files.status(name)
            if size_bytes > FETCH_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
            self.files.fetch(name, size_bytes)
        return version

    def _is_copied(self, version: int) -> bool:
        """Copy a commit; false where the store does not have it."""
        name = commit_name(version)
        if not self.files.is_file(name):
            return False
        try:
            modified_ms, size_bytes = self.files.status(name)
            self.files.fetch(name, size_bytes)
        except FileNotFoundError:  # removed just now
            return False
        self._modified_ms = modified_ms
        return True


_COPIED: dict[Path, CopiedLog] = {}
"""The copied log of each folder: all readers and writers of this process share what was fetched."""

_COPYING = threading.Lock()
"""Held while a log is added to `_COPIED`."""


def place(spark: SparkSession, location: str) -> Path | None:
    """The folder of the copies of a table in a store.

    None where this session's JVM reaches no store, or where a part of the log is outside of the store.
    """
    if "://" not in location or sparks.is_databricks() or not sparks.is_classic(spark):
        return None
    files = StoredFiles(spark, location)
    with _COPYING:
        if files.folder not in _COPIED and _has_commits_elsewhere(spark, location):
            return None
        copied_log = _COPIED.setdefault(files.folder, CopiedLog(files))
        if copied_log.files.spark.sparkContext is not spark.sparkContext:  # the JVM was started again
            copied_log.files = files
    return files.folder


def _has_commits_elsewhere(spark: SparkSession, location: str) -> bool:
    """Whether a commit counts before its file is in the log: with DynamoDB, Delta reads newest commits from there."""
    conf = spark.sparkContext.getConf()
    names = (stores.log_store_of(stores.scheme(location)), stores.LOG_STORE_OF_ALL)
    return any((conf.get(name, "") or "").endswith("DynamoDBLogStore") for name in names)


@dataclass(frozen=True)
class _Look:
    """A block in which each log is followed once: of all tables, or of the one in `folder`."""

    folder: Path | None = None
    followed: set[Path] = field(default_factory=set)


_LOOKS: ContextVar[tuple[_Look, ...]] = ContextVar("looks", default=())
"""The looks around the current code, the outermost first."""


@contextlib.contextmanager
def one_look() -> Iterator[None]:
    """In the block, or the decorated function, `follow` reads each log once in this context: for reads that belong together."""
    with _looking(_Look()):
        yield


@contextlib.contextmanager
def one_look_at(folder: Path | None) -> Iterator[None]:
    """As `one_look`, for one table only; without effect for None."""
    with contextlib.nullcontext() if folder is None else _looking(_Look(folder)):
        yield


@contextlib.contextmanager
def _looking(look: _Look) -> Iterator[None]:
    token = _LOOKS.set((*_LOOKS.get(), look))
    try:
        yield
    finally:
        _LOOKS.reset(token)


def follow(folder: Path) -> None:
    """Bring a copied log up to date (`CopiedLog.follow`); does nothing for a table's own folder. Raises `OSError`."""
    copied_log = copied(folder)
    looks = [look for look in _LOOKS.get() if look.folder in (None, folder)]
    if copied_log is None or any(folder in look.followed for look in looks):
        return
    copied_log.follow()
    for look in looks:
        look.followed.add(folder)


def note_commit(folder: Path, version: int, modified_ms: int, size_bytes: int) -> None:
    """Note a commit of this thread for a copied log (`CopiedLog.note_commit`); does nothing for a table's own folder."""
    if copied_log := copied(folder):
        copied_log.note_commit(version, modified_ms, size_bytes)


def copied(folder: Path) -> CopiedLog | None:
    """The copied log in a folder, which may lack older commits; None for a table's own folder."""
    return _COPIED.get(folder)


def commit_path(folder: Path, version: int, *, is_alone: bool = False) -> Path:
    """The path of a commit, which is copied first for a copied log; the file may be missing. Raises `OSError`."""
    path = folder / commit_name(version)
    copied_log = copied(folder)
    if copied_log is not None and not path.exists():
        with contextlib.suppress(FileNotFoundError):
            copied_log.bring_commit(version, is_alone=is_alone)
    return path


def bring(folder: Path, files: Iterable[tuple[str, int | None]]) -> None:
    """Copy files of a table, given by name and size in bytes; does nothing for a table's own folder.

    Raises `FileNotFoundError`, or another `OSError` where the store cannot be read or the files exceed `FETCH_FILES` or `FETCH_BYTES`.
    """
    copied_log = copied(folder)
    if copied_log is None:
        return
    missing_files = [(name, size) for name, size in dict(files).items() if not (folder / name).exists()]
    if any("://" in name or name.startswith("/") for name, _ in missing_files):
        raise FileNotFoundError(errno.ENOENT, "it lies in another table's folder", str(folder))
    if len(missing_files) > FETCH_FILES or sum(size or 0 for _, size in missing_files) > FETCH_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(folder))
    if len(missing_files) == 1:
        copied_log.files.fetch(*missing_files[0])
    elif missing_files:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="medallion-fetch") as pool:
            list(pool.map(copied_log.files.fetch, *zip(*missing_files)))
