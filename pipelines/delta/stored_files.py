"""The files of a table in an object store: how this process writes and removes them, and copies of what it reads of them.

No file of a Delta table changes once it is there, so that what was copied once stays right, as long as the table is the same one.
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
from pipelines.delta import checkpoint, table_files
from pipelines.delta.store_folder import StoreFolder
from pipelines.delta.table_files import commit_name
from pipelines.spark import scratch, stores
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FETCH_BYTES = 128 * 2**20
"""So many bytes of a table are copied for one look at it. Executors, which read columns and not files, share more."""

FETCH_FILES = 256
"""So many files of a table are copied for one look at it: each takes a request."""

HELD_BYTES = 256 * 2**20
"""So many bytes of copies this process keeps."""

KEPT_COMMITS = 100
"""So many commits before a copied checkpoint are copied when somebody asks for them."""

OLD_COMMITS = 1_000
"""After so many commits a copied log begins anew, at a later checkpoint."""

_THREADS = 8


class StoredFiles(StoreFolder):
    """The same folder as a table's, whose files this process writes, and of which it holds copies."""

    is_remote: ClassVar[bool] = True

    @functools.cached_property
    def folder(self) -> Path:
        """Where on this disk the copies of its files lie."""
        return _root(os.getpid()) / hashlib.sha256(self.location.encode()).hexdigest()[:32]

    def draft(self, name: str) -> Path:
        # Not among the copies, which go where the table is found to be another one.
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
        self._keep(name)

    def write(self, name: str, content: bytes) -> None:
        out = self.created(name)
        out.write(bytearray(content))
        out.close()  # what the store refuses, it refuses here
        try:
            self.draft(name).write_bytes(content)
        except OSError:  # a full disk here is none there
            self.draft(name).unlink(missing_ok=True)
        else:
            self._keep(name)

    def _keep(self, name: str) -> None:
        """Make a draft that was put a copy: whoever reads the table next finds it here."""
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
        for held in (self.draft(name), self.folder / name):
            held.unlink(missing_ok=True)
        self.delete(name)

    def has_commit(self, version: int) -> bool:
        return self.is_file(commit_name(version))

    def fetch(self, name: str, size_bytes: int | None = None) -> Path:
        """The copy of a file, which is made where there is none. Raises `FileNotFoundError`, and another `OSError` where the store
        cannot be read."""
        copy = self._copy_of(name)
        if copy.exists():
            _HELD.touch(copy)
            return copy
        self._copy(copy, size_bytes, lambda draft: self.download(name, draft, size_bytes))
        if not name.startswith(LOG):  # a log with a hole would end before it
            _HELD.add(copy)
        return copy

    def fetch_range(self, name: str, start: int, size: int) -> bytes:
        """So many bytes of a file from `start` on, of which a copy is held, too. Raises as `fetch`."""
        copy = self._copy_of(f"{name}.{start}-{size}")
        if copy.exists():
            _HELD.touch(copy)
            return copy.read_bytes()
        self._copy(copy, size, lambda draft: self.download_range(name, draft, start, size))
        found = copy.read_bytes()
        _HELD.add(copy)
        return found

    def _copy_of(self, name: str) -> Path:
        """Where the copy of a file lies. Raises `FileNotFoundError` for what a log names outside of the table's folder: whoever may write in
        the store shall not write on this disk."""
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise FileNotFoundError(errno.ENOENT, "it lies in another folder than the table's", name)
        return self.folder / name

    def _copy(self, copy: Path, size_bytes: int | None, download: Callable[[Path], None]) -> None:
        """Make a copy, of which whoever reads meanwhile sees all or nothing."""
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
    """The folder of this process' copies, which goes with it.

    Its name is a new one: in a container that is started again the process has the number of the one before, whose copies may be
    of tables that were removed since.
    """
    mine = scratch.folder()
    for left in mine.glob(f"copies-*-{process}.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    root = mine / f"copies-{uuid.uuid4().hex[:12]}-{process}.tmp"

    def remove() -> None:
        if os.getpid() == process:  # and not a child of it that ends
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root


class _HeldCopies:
    """The copied data files, of which those that were not read for the longest time go."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError):
            self._sizes[path] = path.stat().st_size
            self._sizes.move_to_end(path)
            while sum(self._sizes.values()) > HELD_BYTES:
                # Whoever has it open goes on reading; whoever opens it now asks Spark.
                self._sizes.popitem(last=False)[0].unlink(missing_ok=True)

    def touch(self, path: Path) -> None:
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)


_HELD = _HeldCopies()


@dataclass
class CopiedLog:
    """The log of one table in a store, from its last checkpoint on, copied commit by commit into a folder like the table's own.

    Nothing is in it as long as the store has no such table.
    """

    files: StoredFiles
    _first: int = -1
    _newest: int = -1
    _modified_ms: int = -1
    _committed: int = -1
    _said: str = ""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def newest(self) -> int | None:
        """The newest version at the last look; None where there was no table."""
        with self._lock:
            return self._newest if self._newest >= 0 else None

    def follow(self) -> None:
        """Copy what was committed since the last look. Raises `OSError` where the log cannot be read, or not by this
        process."""
        with self._lock:
            if self._newest >= 0:
                # A commit of this process is the next one only where the commit before it is still the one that was copied.
                is_next = self._committed == self._newest + 1 and self._is_copied(self._committed)
                if is_next and self._is_own():
                    self._newest += 1
                elif is_next or not self._is_same():
                    self._forget()
            if self._newest < 0 and not self._begin():
                return
            while self._is_copied(self._newest + 1):
                self._newest += 1
            if self._newest - self._first > OLD_COMMITS:
                with contextlib.suppress(OSError):  # the commits that are copied say the same
                    self._begin_later()

    def note_commit(self, version: int, metadata: str) -> None:
        """This process has made a commit, which says this and follows on those that are copied: it need not be looked for."""
        with self._lock:
            self._committed, self._said = version, metadata

    def bring_commit(self, version: int, *, is_alone: bool = False) -> None:
        """Copy a commit, if that is to be had at a bearable price. One that `is_alone`, no step on a way through all, takes a request."""
        with self._lock:
            if version > self._newest and not (is_alone and self._newest < 0):
                self.follow()
            elif is_alone or self._first - KEPT_COMMITS <= version < self._first:
                self.files.fetch(commit_name(version))

    def _is_own(self) -> bool:
        """Whether the copy of this process' commit is that: a table that was made again has another one of its number."""
        return table_files.commit_info(self.folder / commit_name(self._committed)).get("userMetadata") == self._said

    def _is_same(self) -> bool:
        """Whether the newest commit that was copied is still that of the store: a table may be removed and made again."""
        try:
            size_bytes = (self.folder / commit_name(self._newest)).stat().st_size
            return self.files.status(commit_name(self._newest)) == (self._modified_ms, size_bytes)
        except FileNotFoundError:  # there, or here, where somebody cleans up temporary folders
            return False

    def _forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._first = self._newest = self._modified_ms = self._committed = -1

    def _begin(self) -> bool:
        """Copy the last checkpoint with its commit, or the first commit; False where there is no table."""
        self._forget()  # what an attempt that failed left
        if not self.files.is_folder(LOG):
            return False
        noted = self._noted_checkpoint()
        if noted is not None and self._is_copied(noted):
            self._first = self._newest = noted
        elif noted is None and self._is_copied(0):
            self._first = self._newest = 0
        elif noted is not None or self.files.has_commits():
            raise OSError(errno.ENOTSUP, "its log begins in a way that only Delta reads", str(self.folder))
        return self._newest >= 0

    def _begin_later(self) -> None:
        """Copy a later checkpoint, and remove the commits that are long before it."""
        noted = self._noted_checkpoint()
        if noted is None or noted <= self._first:
            return
        for version in range(max(0, self._first - KEPT_COMMITS), noted - KEPT_COMMITS):
            (self.folder / commit_name(version)).unlink(missing_ok=True)
        (self.folder / LOG / checkpoint.name(self._first)).unlink(missing_ok=True)
        self._first = noted

    def _noted_checkpoint(self) -> int | None:
        """The version of the checkpoint that the store's log names, which is copied; None where it names none."""
        name = f"{LOG}/{checkpoint.NOTED}"
        (self.folder / name).unlink(missing_ok=True)  # the one name of a log that is written more than once
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
        """Whether the store has the commit, which is copied then."""
        name = commit_name(version)
        if version != self._committed and not self.files.is_file(name):
            return False
        try:
            modified_ms, size_bytes = self.files.status(name)
            self.files.fetch(name, size_bytes)
        except FileNotFoundError:  # removed just now
            return False
        self._modified_ms = modified_ms
        return True


_COPIED: dict[Path, CopiedLog] = {}
_COPYING = threading.Lock()


def place(spark: SparkSession, location: str) -> Path | None:
    """The folder of the copies of a table in a store; None where no store is reached by way of this session's JVM, or its log is not in
    the store alone."""
    if "://" not in location or sparks.is_databricks() or not sparks.is_classic(spark):
        return None
    files = StoredFiles(spark, location)
    with _COPYING:
        if files.folder not in _COPIED and _has_commits_elsewhere(spark, location):
            return None
        held = _COPIED.setdefault(files.folder, CopiedLog(files))
        if held.files.spark.sparkContext is not spark.sparkContext:  # its JVM was started anew
            held.files = files
    return files.folder


def _has_commits_elsewhere(spark: SparkSession, location: str) -> bool:
    """Whether a commit may be one before its file is in the log: Delta looks into DynamoDB, too."""
    conf = spark.sparkContext.getConf()
    names = (stores.log_store_of(stores.scheme(location)), stores.LOG_STORE_OF_ALL)
    return any((conf.get(name, "") or "").endswith("DynamoDBLogStore") for name in names)


_LOOKED: ContextVar[set[Path] | None] = ContextVar("looked", default=None)


@contextlib.contextmanager
def one_look() -> Iterator[None]:
    """In the block, or the function, this thread looks at each log once: for what is asked together while it writes nothing."""
    outer = _LOOKED.get()
    token = _LOOKED.set(set() if outer is None else outer)
    try:
        yield
    finally:
        _LOOKED.reset(token)


def follow(folder: Path) -> None:
    """Bring a copied log up to what the store has now, as `CopiedLog.follow`; a table's own folder is as it is."""
    held, looked = copied(folder), _LOOKED.get()
    if held is None or (looked is not None and folder in looked):
        return
    held.follow()
    if looked is not None:
        looked.add(folder)


def note_commit(folder: Path, version: int, metadata: str) -> None:
    """This process has committed a version of a table, whose log may be a copied one, with this metadata."""
    if held := copied(folder):
        held.note_commit(version, metadata)


def copied(folder: Path) -> CopiedLog | None:
    """The log whose copies a folder holds, of which older ones may not be there; None for a table's own folder."""
    return _COPIED.get(folder)


def commit_path(folder: Path, version: int, *, is_alone: bool = False) -> Path:
    """Where a commit lies; of a copied log it is copied first, where the store has it. Raises `OSError`."""
    path = folder / commit_name(version)
    held = copied(folder)
    if held is not None and not path.exists():
        with contextlib.suppress(FileNotFoundError):
            held.bring_commit(version, is_alone=is_alone)
    return path


def bring(folder: Path, files: Iterable[tuple[str, int | None]]) -> None:
    """Copy files of a table, given by their names and sizes in bytes, where its folder holds copies.

    Raises `FileNotFoundError`, and another `OSError` where the store cannot be read or that is more than this process copies.
    """
    held = copied(folder)
    if held is None:
        return
    missing = [(name, size) for name, size in dict(files).items() if not (folder / name).exists()]
    if any("://" in name or name.startswith("/") for name, _ in missing):
        raise FileNotFoundError(errno.ENOENT, "it lies in another table's folder", str(folder))
    if len(missing) > FETCH_FILES or sum(size or 0 for _, size in missing) > FETCH_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(folder))
    if len(missing) == 1:
        held.files.fetch(*missing[0])
    elif missing:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="medallion-fetch") as pool:
            list(pool.map(held.files.fetch, *zip(*missing)))
