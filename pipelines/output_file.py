"""Writes the files that commands make for their user: whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_ALONE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors where only the file itself can be written, as one that is mounted into a container: no file beside it, no rename onto it."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file whose content `path` has after the block; after an error, `path` is as before. Raises `OSError`.

    A reader sees the old content or the new one. The file keeps its permissions, and a link stays a link. A pipe, and a file that can only
    be written in place, get the whole content at the end.
    """
    target = Path(os.path.realpath(path))
    draft, file = _draft(target)
    try:
        with file:
            yield file
        if not _is_moved(draft, target):
            with draft.open("rb") as content, target.open("wb") as output:
                shutil.copyfileobj(content, output)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _draft(target: Path) -> tuple[Path, IO[bytes]]:
    """A new file, beside the target where that can be replaced, else a temporary one."""
    if target.is_file() or not target.exists():
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        with _may_stand_alone():
            file = draft.open("xb")
            if target.exists():
                shutil.copymode(target, draft)
            return draft, file
    descriptor, name = tempfile.mkstemp(prefix="medallion-")
    return Path(name), os.fdopen(descriptor, "wb")


def _is_moved(draft: Path, target: Path) -> bool:
    """Whether the draft has become the target."""
    if draft.parent != target.parent:
        return False
    with _may_stand_alone():
        draft.replace(target)
        return True
    return False


@contextlib.contextmanager
def _may_stand_alone() -> Iterator[None]:
    """Ends the block at an error of `_ALONE`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _ALONE:
            raise
