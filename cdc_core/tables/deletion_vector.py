"""Deletion vectors as Delta's protocol writes them down: sets of the numbers of a file's rows, in the portable format of Roaring
bitmaps, and the files that hold them.

Sources: Delta's protocol, "Deletion Vector Format" and "Deletion Vector File Storage Format"; RoaringFormatSpec.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from array import array
from collections.abc import Iterable

MAGIC = 1681511377
"""Begins a bitmap of 64-bit numbers in the portable format."""

_COOKIE = 12346
"""Begins a bitmap of 32-bit numbers that holds no runs."""

_MAX_ARRAY = 4096
"""A container of more numbers is a bitmap of 65,536 bits, any other one a sorted array."""

OFFSET = 1
"""Where the first vector of a file begins, behind the version of the format."""


def serialized(rows: Iterable[int]) -> bytes:
    """A set of row numbers, each less than 2**32."""
    containers = [
        (high, [row & 0xFFFF for row in group])
        for high, group in itertools.groupby(sorted(set(rows)), lambda row: row >> 16)
    ]
    headers = b"".join(struct.pack("<HH", high, len(low) - 1) for high, low in containers)
    bodies = [_container(low) for _, low in containers]
    start = 8 + len(headers) + 4 * len(bodies)
    offsets = itertools.accumulate(map(len, bodies[:-1]), initial=start) if bodies else ()
    bitmap = b"".join(
        (
            struct.pack("<II", _COOKIE, len(containers)),
            headers,
            *(struct.pack("<I", offset) for offset in offsets),
            *bodies,
        )
    )
    return struct.pack("<iqI", MAGIC, 1, 0) + bitmap


def _container(numbers: list[int]) -> bytes:
    if len(numbers) <= _MAX_ARRAY:
        return struct.pack(f"<{len(numbers)}H", *numbers)
    bits = array("B", bytes(8192))
    for number in numbers:
        bits[number >> 3] |= 1 << (number & 7)
    return bits.tobytes()


def file(vector: bytes) -> bytes:
    """The content of a file that holds one vector: version, size, the vector, its checksum."""
    return b"\x01" + struct.pack(">i", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
