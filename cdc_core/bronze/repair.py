"""What of bronze goes when files of it are lost: so much that the position is one from which all of it is read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Batches = tuple[int, int] | None
"""The first and the last batch of a file's rows; None where that is not known."""


def rewound(files: Mapping[str, Batches], missing: Sequence[str]) -> tuple[str, ...]:
    """The files that hold, or may hold, a batch from the first missing one on; in the order of their names.

    Bronze then ends with the batch before: the position goes back to that one's token, and what came after is read from the
    source again, once. A compacted file that begins before goes as a whole, and takes the position back to its own
    first batch.
    """
    if not missing:
        return ()
    if any(files[name] is None for name in missing):
        return tuple(sorted(files))
    first = min(batches[0] for name in missing if (batches := files[name]) is not None)
    while True:
        gone = {name: batches for name, batches in files.items() if batches is None or batches[1] >= first}
        if any(batches is None for batches in gone.values()):
            return tuple(sorted(files))
        earliest = min(batches[0] for batches in gone.values() if batches is not None)
        if earliest >= first:
            return tuple(sorted(gone))
        # A compacted file that goes as a whole begins before the first missing batch, and takes other files with it.
        first = earliest
