"""Deletion vectors as Delta's protocol writes them down: sets of the numbers of a file's rows, in the portable format
of Roaring bitmaps, and the files that hold them.

Sources: Delta's protocol, "Deletion Vector Format" and "Deletion Vector File Storage Format"; RoaringFormatSpec.
"""

from __future__ import annotations

import base64
import itertools
import struct
import uuid
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


# --- reading


def rows(vector: bytes) -> set[int]:
    """The row numbers of a vector in the portable format; ValueError for another one."""
    magic, count = struct.unpack_from("<iq", vector)
    if magic != MAGIC:
        raise ValueError(f"a deletion vector of format {magic}")
    found: set[int] = set()
    at = 12
    for _ in range(count):
        (key,) = struct.unpack_from("<I", vector, at)
        at = _bitmap(vector, at + 4, key << 32, found)
    return found


def _bitmap(vector: bytes, start: int, base: int, found: set[int]) -> int:
    """Add the numbers of the 32-bit bitmap at `start`; where it ends."""
    cookie: int = struct.unpack_from("<I", vector, start)[0]
    has_runs = cookie & 0xFFFF == _RUN_COOKIE
    if has_runs:
        size, at = (cookie >> 16) + 1, start + 4
        runs = int.from_bytes(vector[at : at + (size + 7) // 8], "little")
        at += (size + 7) // 8
    elif cookie == _COOKIE:
        (size,) = struct.unpack_from("<I", vector, start + 4)
        runs, at = 0, start + 8
    else:
        raise ValueError(f"a bitmap of format {cookie}")
    headers = [struct.unpack_from("<HH", vector, at + 4 * number) for number in range(size)]
    at += 4 * size
    if not has_runs or size >= _OFFSETS_FROM:
        at += 4 * size  # where each container begins, which is where the one before it ends
    for number, (high, less_one) in enumerate(headers):
        first = base | high << 16
        if runs >> number & 1:
            (count,) = struct.unpack_from("<H", vector, at)
            pairs = struct.unpack_from(f"<{2 * count}H", vector, at + 2)
            for low, more in zip(pairs[::2], pairs[1::2]):
                found.update(range(first + low, first + low + more + 1))
            at += 2 + 4 * count
        elif less_one < _MAX_ARRAY:
            found.update(first | low for low in struct.unpack_from(f"<{less_one + 1}H", vector, at))
            at += 2 * (less_one + 1)
        else:
            bits = vector[at : at + 8192]
            found.update(
                first | byte << 3 | bit for byte, each in enumerate(bits) if each for bit in range(8) if each >> bit & 1
            )
            at += 8192
    return at


_RUN_COOKIE = 12347
"""Begins a bitmap of 32-bit numbers of which some containers hold runs."""

_OFFSETS_FROM = 4
"""With runs, so many containers at least say where each begins."""


def framed(content: bytes) -> bytes:
    """The vector that stands at its offset in a file: its size comes before it, its checksum after. ValueError where
    they do not fit."""
    (size,) = struct.unpack_from(">i", content)
    vector = content[4 : 4 + size]
    if content[4 + size : 8 + size] != struct.pack(">I", zlib.crc32(vector)):
        raise ValueError("a deletion vector with another checksum")
    return vector


def relative_path(encoded: str) -> str:
    """Where a file of vectors lies below its table's folder: a random prefix, perhaps, and a UUID in Z85."""
    prefix, coded = encoded[:-_UUID_SIGNS], encoded[-_UUID_SIGNS:]
    name = f"deletion_vector_{uuid.UUID(bytes=_z85(coded))}.bin"
    return f"{prefix}/{name}" if prefix else name


def inline(encoded: str, size: int) -> bytes:
    """The vector that stands in the log itself."""
    return _z85(encoded)[:size]


_UUID_SIGNS = 20

_TO_RFC1924 = str.maketrans(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
)
"""Both are base 85 in groups of five signs, and differ by their alphabets."""


def _z85(text: str) -> bytes:
    return base64.b85decode(text.translate(_TO_RFC1924))
