"""Which files are removed from bronze when files are lost, so that it ends at a position to read again from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Batches = tuple[int, int] | None
"""The first and the last batch of a file's rows; None if unknown."""


def rewound(files: Mapping[str, Batches], missing: Sequence[str]) -> tuple[str, ...]:
    """The files that have, or may have, a batch from the first missing one on; sorted by name.

    Bronze then ends with the batch before. The position goes back to that batch's token, and later events are read from
    the source again, once. A compacted file that begins before is removed as a whole, and moves the position back to
    its first batch.
    """
    if not missing:
        return ()
    if any(files[name] is None for name in missing):
        return tuple(sorted(files))
    first = min(batches[0] for name in missing if (batches := files[name]) is not None)
    while True:
        removed = {name: batches for name, batches in files.items() if batches is None or batches[1] >= first}
        if any(batches is None for batches in removed.values()):
            return tuple(sorted(files))
        earliest = min(batches[0] for batches in removed.values() if batches is not None)
        if earliest >= first:
            return tuple(sorted(removed))
        # A compacted file begins before the first missing batch, so files that overlap it go too.
        first = earliest
