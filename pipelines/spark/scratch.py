"""The folder of this user for what lives as long as a process."""

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
"""The last logs of gone processes stay: the errors that those ended with name them, and a service is started again at once."""


def folder() -> Path:
    """The folder, made where it is missing; what else gone processes left there is removed."""
    try:
        found = Path(tempfile.gettempdir(), f"medallion-{os.getuid()}")
    except FileNotFoundError:
        raise errors.DecisionNeeded(
            "no usable folder for temporary files: set TMPDIR to one with free space that this user can write"
        ) from None
    found.mkdir(mode=0o700, exist_ok=True)
    status = found.lstat()
    # In a folder of somebody else, packages and libraries of ours could be exchanged, and documents read.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise errors.DecisionNeeded(
            f"{found} does not belong to this user: remove it, or set TMPDIR to a folder of your own"
        )
    if status.st_mode & 0o077:
        found.chmod(0o700)
    gone = [each for each in found.glob("*-*.*") if is_gone(each.stem.rpartition("-")[2])]
    logs = sorted((each for each in gone if each.suffix == ".log"), key=_written)
    for old in {*gone}.difference(logs[-KEPT_LOGS:]):
        shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        _keep(found, found.stat().st_ino)
    return found


def _written(file: Path) -> float:
    """When a file was written last; one that another process has just removed, before all others."""
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime
    return 0.0


def is_gone(number: str) -> bool:
    """Whether a part of a name is the number of a process that has ended."""
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)  # no signal is sent; and not by /proc, which some systems do not have
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # another user's, or no number of a process
        pass
    return False


@functools.lru_cache(maxsize=1)
def _keep(folder: Path, _inode: int) -> int:
    """Lock the folder for as long as this process lives: systemd-tmpfiles leaves what is below it alone then, however old it is."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held
