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


def folder() -> Path:
    """The folder, made where it is missing; what gone processes left there is removed."""
    try:
        found = Path(tempfile.gettempdir(), f"medallion-{os.getuid()}")
    except FileNotFoundError:
        raise errors.DecisionNeeded(
            "there is no folder for temporary files: set TMPDIR to one that this user may write and that has space"
        ) from None
    found.mkdir(mode=0o700, exist_ok=True)
    status = found.lstat()
    # In a folder of somebody else, packages and libraries of ours could be exchanged, and documents read.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise errors.DecisionNeeded(
            f"{found} is not a folder of this user: remove it, or set TMPDIR to a folder of your own"
        )
    if status.st_mode & 0o077:
        found.chmod(0o700)
    for old in found.glob("*-*.*"):
        number = old.stem.rpartition("-")[2]
        if is_gone(number):
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        _keep(found, found.stat().st_ino)
    return found


def is_gone(number: str) -> bool:
    """Whether a part of a name is the number of a process that has ended."""
    return number.isdigit() and not Path("/proc", number).exists()


@functools.lru_cache(maxsize=1)
def _keep(folder: Path, _inode: int) -> int:
    """Lock the folder for as long as this process lives: systemd-tmpfiles leaves what is below it alone then, however old it is."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held
