"""The user's folder for temporary files of processes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from cdc_core import errors

KEPT_LOGS = 10
"""The newest logs of ended processes that are kept: error messages name them, and a service may restart at once."""


def folder() -> Path:
    """The folder, which is created if it is missing. Removes the files of ended processes, except for `KEPT_LOGS` logs."""
    try:
        path = Path(tempfile.gettempdir(), f"medallion-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)  # TMPDIR itself may have been removed since the start
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        if _is_full():
            raise errors.StorageExhausted(
                "no space left in the folders for temporary files; free some space and start again"
            ) from None
        raise errors.DecisionNeeded(
            "no usable folder for temporary files: set TMPDIR to one with free space that this user can write"
        ) from None
    # The owner of the folder could replace packages and libraries in it, and read documents.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise errors.DecisionNeeded(f"{path} does not belong to this user: remove it, or set TMPDIR to a folder of your own")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    leftovers = [each for each in path.glob("*-*.*") if is_gone(each.stem.rpartition("-")[2])]
    logs = sorted((each for each in leftovers if each.suffix == ".log"), key=_modified)
    for leftover in {*leftovers}.difference(logs[-KEPT_LOGS:]):
        shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        _lock(path, path.stat().st_ino)
    return path


def _is_full() -> bool:
    """Whether a folder for temporary files is usable but for its lack of space, which Python does not say."""
    for folder in tempfile._candidate_tempdir_list():  # type: ignore[attr-defined]
        try:
            descriptor, name = tempfile.mkstemp(dir=folder)
            try:
                os.write(descriptor, b"full?")
            finally:
                os.close(descriptor)
                os.unlink(name)
        except OSError as error:
            if error.errno in errors.FULL:
                return True
    return False


def _modified(file: Path) -> float:
    """A file's modification time; 0 where another process has just removed it."""
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime
    return 0.0


def is_gone(number: str) -> bool:
    """Whether `number` is the number of a process that has ended."""
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)  # sends no signal; works without /proc
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # a process of another user, or not a process number
        pass
    return False


@functools.lru_cache(maxsize=1)
def _lock(folder: Path, _inode: int) -> int:
    """Lock the folder until this process ends, so that systemd-tmpfiles does not remove old files in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor
