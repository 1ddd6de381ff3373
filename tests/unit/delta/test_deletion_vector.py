"""The binary format of deletion vectors."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
from pyroaring import BitMap64

from cdc_core.tables import deletion_vector


def numbers(data: bytes) -> list[int]:
    """The numbers in a vector without runs, parsed as the format's specification says."""
    magic, count, key, cookie, containers = struct.unpack_from("<iqIII", data)
    assert (magic, count, key, cookie) == (deletion_vector.MAGIC, 1, 0, 12346)
    bitmap, found = data[16:], []
    for at in range(containers):
        high, size = struct.unpack_from("<HH", bitmap, 8 + 4 * at)
        (offset,) = struct.unpack_from("<I", bitmap, 8 + 4 * containers + 4 * at)
        if size + 1 <= 4096:
            low = struct.unpack_from(f"<{size + 1}H", bitmap, offset)
        else:
            low = tuple(bit for bit in range(65536) if bitmap[offset + bit // 8] >> (bit % 8) & 1)
            assert len(low) == size + 1
        found += [high << 16 | each for each in low]
    return found


@pytest.mark.parametrize(
    "rows",
    [
        [0],
        [7, 3],
        [65535, 65536],
        [2**32 - 1],
        list(range(0, 8191, 2)),
        list(range(0, 8195, 2)),
        list(range(60000, 140000, 2)),
    ],
    ids=lambda rows: f"{len(rows)} from {rows[0]}",
)
def test_a_vector_holds_its_rows(rows: list[int]) -> None:
    """Covers sparse and dense containers, several of them, and any order."""
    vector = deletion_vector.serialized(BitMap64(random.Random(1).sample(rows, len(rows))))
    assert numbers(vector) == sorted(rows)
    assert list(deletion_vector.read(vector)) == sorted(rows)


def test_runs_of_rows_are_read_as_written() -> None:
    rows = BitMap64(range(10, 100_000))
    vector = deletion_vector.serialized(rows)
    assert len(vector) < 100 and deletion_vector.read(vector) == rows


@pytest.mark.parametrize("vector", [b"", b"\x01", struct.pack("<i", deletion_vector.MAGIC), bytes(40)])
def test_other_bytes_are_no_vector(vector: bytes) -> None:
    with pytest.raises((ValueError, LookupError, struct.error)):
        deletion_vector.read(vector)


def test_a_file_says_its_version_size_and_checksum() -> None:
    vector = deletion_vector.serialized(BitMap64([1, 2]))
    content = deletion_vector.file(vector)
    assert content[0] == 1 and struct.unpack_from(">i", content, deletion_vector.OFFSET) == (len(vector),)
    assert content[5:-4] == vector and content[-4:] == struct.pack(">I", zlib.crc32(vector))
