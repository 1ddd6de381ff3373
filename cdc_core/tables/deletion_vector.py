"""Deletion vectors in Delta's format: sets of row numbers of a data file as portable Roaring bitmaps, and the files for
them.

Sources: Delta's protocol, "Deletion Vector Format" and "Deletion Vector File Storage Format"; RoaringFormatSpec.
"""

from __future__ import annotations

import base64
import itertools
import struct
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

MAGIC = 1681511377
"""The first bytes of a bitmap of 64-bit numbers in the portable format."""

_COOKIE = 12346
"""The first bytes of a bitmap of 32-bit numbers without runs."""

_MAX_ARRAY = 4096
"""A container with more numbers is a bitmap of 65,536 bits, otherwise a sorted array."""

_BITMAP_BYTES = 8192

OFFSET = 1
"""The offset of the first vector in a file, after the version byte."""

FRAME_BYTES = 8
"""The bytes around a vector in a file: its size and its checksum."""


@dataclass(frozen=True)
class RowSet:
    """Row numbers of a data file, each less than 2**32, as in a Roaring bitmap.

    `containers` has the lower 16 bits by the upper 16 bits: a set if they are few, otherwise an integer with bit n set
    for n.
    """

    containers: Mapping[int, frozenset[int] | int]

    @staticmethod
    def of(rows: Iterable[int]) -> RowSet:
        groups = itertools.groupby(sorted(set(rows)), lambda row: row >> 16)
        return RowSet({high: _container([row & 0xFFFF for row in group]) for high, group in groups})

    @staticmethod
    def read(vector: bytes) -> RowSet:
        """The rows of a vector in the portable format; ValueError for other formats."""
        magic, count = struct.unpack_from("<iq", vector)
        if magic != MAGIC:
            raise ValueError(f"a deletion vector of format {magic}")
        containers: dict[int, frozenset[int] | int] = {}
        offset = 12
        for _ in range(count):
            (key,) = struct.unpack_from("<I", vector, offset)
            offset = _read_bitmap(vector, offset + 4, key << 16, containers)
        return RowSet(containers)

    def __or__(self, other: RowSet) -> RowSet:
        union = dict(self.containers)
        for high, low in other.containers.items():
            union[high] = _union(union[high], low) if high in union else low
        return RowSet(union)

    def __sub__(self, other: RowSet) -> RowSet:
        pairs = ((high, low, other.containers.get(high)) for high, low in self.containers.items())
        rest = ((high, low if taken is None else _difference(low, taken)) for high, low, taken in pairs)
        return RowSet({high: low for high, low in rest if low})

    def __len__(self) -> int:
        return sum(map(_count, self.containers.values()))

    def __iter__(self) -> Iterator[int]:
        for high, low in sorted(self.containers.items()):
            yield from (high << 16 | number for number in _numbers(low))

    def serialized(self) -> bytes:
        """The vector in the portable format."""
        containers = sorted(self.containers.items())
        headers = b"".join(struct.pack("<HH", high, _count(low) - 1) for high, low in containers)
        bodies = [_body(low) for _, low in containers]
        start = 8 + len(headers) + 4 * len(bodies)
        offsets = itertools.accumulate(map(len, bodies[:-1]), initial=start) if bodies else ()
        return b"".join(
            (
                struct.pack("<iqI", MAGIC, 1, 0),
                struct.pack("<II", _COOKIE, len(containers)),
                headers,
                *(struct.pack("<I", offset) for offset in offsets),
                *bodies,
            )
        )

    def bits(self, count: int) -> bytes:
        """One bit for each of the rows 0 to `count` - 1, least significant first: whether the set has the row."""
        size = (count + 7) // 8
        empty = bytes(_BITMAP_BYTES)
        parts = (
            _bits(self.containers[high]).to_bytes(_BITMAP_BYTES, "little") if high in self.containers else empty
            for high in range((size + _BITMAP_BYTES - 1) // _BITMAP_BYTES)
        )
        return b"".join(parts)[:size]


def _container(low: Sequence[int]) -> frozenset[int] | int:
    return frozenset(low) if len(low) <= _MAX_ARRAY else _bits(low)


def _bits(low: Iterable[int] | int) -> int:
    """An integer with bit n set for each n."""
    if isinstance(low, int):
        return low
    bits = bytearray(_BITMAP_BYTES)
    for number in low:
        bits[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(bits, "little")


def _union(one: frozenset[int] | int, other: frozenset[int] | int) -> frozenset[int] | int:
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        union = one | other
        return union if len(union) <= _MAX_ARRAY else _bits(union)
    return _bits(one) | _bits(other)


def _difference(one: frozenset[int] | int, other: frozenset[int] | int) -> frozenset[int] | int:
    rest = _bits(one) & ~_bits(other)
    return rest if rest.bit_count() > _MAX_ARRAY else frozenset(_numbers(rest))


def _count(low: frozenset[int] | int) -> int:
    return low.bit_count() if isinstance(low, int) else len(low)


def _numbers(low: frozenset[int] | int) -> list[int]:
    """The numbers, sorted."""
    if isinstance(low, frozenset):
        return sorted(low)
    bits = low.to_bytes(_BITMAP_BYTES, "little")
    return [index << 3 | bit for index, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


def _body(low: frozenset[int] | int) -> bytes:
    if isinstance(low, int):
        return low.to_bytes(_BITMAP_BYTES, "little")
    return struct.pack(f"<{len(low)}H", *sorted(low))


def file(*vectors: bytes) -> bytes:
    """The content of a file with these vectors: version, then for each one size, vector, checksum."""
    return b"\x01" + b"".join(
        part
        for vector in vectors
        for part in (struct.pack(">i", len(vector)), vector, struct.pack(">I", zlib.crc32(vector)))
    )


# --- reading


def _read_bitmap(vector: bytes, start: int, base: int, containers: dict[int, frozenset[int] | int]) -> int:
    """Adds the containers of the 32-bit bitmap at `start` to `containers`; returns where it ends."""
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
        at += 4 * size  # the containers' offsets: each begins where the one before ends
    for number, (high, less_one) in enumerate(headers):
        low: Sequence[int] | int
        if runs >> number & 1:
            (count,) = struct.unpack_from("<H", vector, at)
            pairs = struct.unpack_from(f"<{2 * count}H", vector, at + 2)
            low = [member for first, extra in zip(pairs[::2], pairs[1::2]) for member in range(first, first + extra + 1)]
            at += 2 + 4 * count
        elif less_one < _MAX_ARRAY:
            low = struct.unpack_from(f"<{less_one + 1}H", vector, at)
            at += 2 * (less_one + 1)
        else:
            low = int.from_bytes(vector[at : at + _BITMAP_BYTES], "little")
            at += _BITMAP_BYTES
        containers[base | high] = low if isinstance(low, int) else _container(low)
    return at


_RUN_COOKIE = 12347
"""The first bytes of a bitmap of 32-bit numbers with runs."""

_OFFSETS_FROM = 4
"""A bitmap with runs has offsets if it has at least this many containers."""


def framed(content: bytes) -> bytes:
    """The vector at its offset in a file, between size and checksum; ValueError if these do not match."""
    (size,) = struct.unpack_from(">i", content)
    vector = content[4 : 4 + size]
    if content[4 + size : 8 + size] != struct.pack(">I", zlib.crc32(vector)):
        raise ValueError("a deletion vector with another checksum")
    return vector


def relative_path(encoded: str) -> str:
    """The path of a vector file below its table's folder, from an optional random prefix and a UUID in Z85."""
    prefix, coded = encoded[:-_UUID_SIGNS], encoded[-_UUID_SIGNS:]
    name = f"deletion_vector_{uuid.UUID(bytes=_z85(coded))}.bin"
    return f"{prefix}/{name}" if prefix else name


def encoded_name(name: uuid.UUID) -> str:
    """The name in the log of the file `deletion_vector_<name>.bin` in the table's folder."""
    return base64.b85encode(name.bytes).decode("ascii").translate(_FROM_RFC1924)


def inline(encoded: str, size: int) -> bytes:
    """A vector that is stored in the log."""
    return _z85(encoded)[:size]


_UUID_SIGNS = 20

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_RFC1924 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""Both encode base 85 in groups of five characters, with different alphabets."""

_TO_RFC1924, _FROM_RFC1924 = str.maketrans(_Z85, _RFC1924), str.maketrans(_RFC1924, _Z85)


def _z85(text: str) -> bytes:
    return base64.b85decode(text.translate(_TO_RFC1924))
