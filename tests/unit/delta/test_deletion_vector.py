"""The binary format of deletion vectors."""

from __future__ import annotations

import itertools
import random
import struct
import zlib

import pytest

from cdc_core.tables import deletion_vector


def numbers(data: bytes) -> list[int]:
    """The numbers in a bitmap, parsed as the format's specification says."""
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
    [[0], [7, 3, 3], [65535, 65536], [2**32 - 1], list(range(4096)), list(range(4097)), list(range(60000, 140000, 2))],
    ids=lambda rows: f"{len(rows)} from {rows[0]}",
)
def test_a_vector_holds_its_rows(rows: list[int]) -> None:
    """Covers sparse and dense containers, several of them, any order and repeated rows."""
    shuffled = random.Random(1).sample(rows, len(rows))
    assert numbers(deletion_vector.RowSet.of(shuffled).serialized()) == sorted(set(rows))


def test_a_set_of_rows_is_what_a_set_of_numbers_is() -> None:
    """Covers union, difference, length, order, bits, and reading what was written, with sparse and dense containers in one set."""
    draws = random.Random(3)
    for one, other in itertools.product((0, 1, 3000, 4096, 4097, 60_000), repeat=2):
        rows = [{draws.randrange(2**18) for _ in range(size)} for size in (one, other)]
        first, second = map(deletion_vector.RowSet.of, rows)
        both = first | second
        assert list(both) == sorted(rows[0] | rows[1]) and len(both) == len(rows[0] | rows[1])
        assert deletion_vector.RowSet.read(both.serialized()) == both == deletion_vector.RowSet.of(rows[0] | rows[1])
        rest = first - second
        assert rest == deletion_vector.RowSet.of(rows[0] - rows[1])
        assert deletion_vector.RowSet.read(rest.serialized()) == rest
        assert not first - both
        for count in (70_001, 8):
            bits = both.bits(count)
            assert len(bits) == (count + 7) // 8
            ones = {at for at in range(count) if bits[at >> 3] >> (at & 7) & 1}
            assert ones == {row for row in rows[0] | rows[1] if row < count}


def test_a_file_says_its_version_size_and_checksum() -> None:
    vector = deletion_vector.RowSet.of([1, 2]).serialized()
    content = deletion_vector.file(vector)
    assert content[0] == 1 and struct.unpack_from(">i", content, deletion_vector.OFFSET) == (len(vector),)
    assert content[5:-4] == vector and content[-4:] == struct.pack(">I", zlib.crc32(vector))
