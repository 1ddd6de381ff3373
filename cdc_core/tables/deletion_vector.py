"""Deletion vectors in Delta's format: sets of row numbers of a data file as portable Roaring bitmaps, and the files for
them.

Sources: Delta's protocol, "Deletion Vector Format" and "Deletion Vector File Storage Format"; RoaringFormatSpec.
"""

from __future__ import annotations

import base64
import struct
import uuid
import zlib

from pyroaring import BitMap64

MAGIC = 1681511377
"""The first bytes of a bitmap of 64-bit numbers in the portable format."""

OFFSET = 1
"""The offset of the first vector in a file, after the version byte."""

FRAME_BYTES = 8
"""The bytes around a vector in a file: its size and its checksum."""


def serialized(rows: BitMap64) -> bytes:
    """The vector of a set of row numbers in the portable format."""
    return struct.pack("<i", MAGIC) + rows.serialize()


def read(vector: bytes) -> BitMap64:
    """The row numbers of a vector in the portable format. Raises `ValueError`, `IndexError` or `struct.error` for other bytes."""
    (magic,) = struct.unpack_from("<i", vector)
    if magic != MAGIC:
        raise ValueError(f"a deletion vector of format {magic}")
    return BitMap64.deserialize(vector[4:])


def file(*vectors: bytes) -> bytes:
    """The content of a file with these vectors: version, then for each one size, vector, checksum."""
    return b"\x01" + b"".join(
        part
        for vector in vectors
        for part in (struct.pack(">i", len(vector)), vector, struct.pack(">I", zlib.crc32(vector)))
    )


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
