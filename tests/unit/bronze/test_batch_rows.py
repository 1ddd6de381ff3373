"""Which files in bronze's log contain a range of batches, with hundreds of commits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from cdc_core.bronze import columns
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines.bronze import batch_rows
from pipelines.delta import local_log

COLLECTIONS = 300


@pytest.fixture
def bronze(tmp_path: Path) -> Path:
    """The log of a snapshot of `COLLECTIONS` collections, with a commit for each."""
    log = tmp_path / "_delta_log"
    log.mkdir()
    (log / f"{0:020}.json").write_text(json.dumps({"commitInfo": {"operation": "CREATE TABLE", "timestamp": 0}}))
    for batch in range(1, COLLECTIONS + 1):
        append(log, batch)
    return tmp_path


def append(log: Path, batch: int) -> None:
    held = {"batch": batch, "db": "shop", "collection": f"c{batch:04}"}
    stats = json.dumps({"numRecords": 1, "minValues": held, "maxValues": held})
    said = {
        "operation": "WRITE",
        "timestamp": batch,
        "userMetadata": claims.WriterIdentity("w", "host", 1, "").metadata(now_ms=0, to=None, extra={"batch": batch}),
    }
    lines = [{"commitInfo": said}, {"add": {"path": f"f{batch}.parquet", "stats": stats, "size": 10}}]
    (log / f"{batch:020}.json").write_text("\n".join(map(json.dumps, lines)))


def files_of(bronze: Path, collection: int, span: BatchRange) -> list[str]:
    among = {"db": "shop", "collection": f"c{collection:04}"}
    return [each.path.name for each in batch_rows.span_files(bronze, span, among)]


def test_a_collection_is_found_in_the_commits_of_a_snapshot_of_hundreds(bronze: Path) -> None:
    """Otherwise each collection needs a Spark query, and seconds of processor time."""
    span = BatchRange(0, COLLECTIONS)
    assert files_of(bronze, 7, span) == ["f7.parquet"]
    assert files_of(bronze, COLLECTIONS, span) == [f"f{COLLECTIONS}.parquet"]
    assert len(batch_rows.span_files(bronze, BatchRange(100, 250))) == 150


def test_the_log_is_read_once_for_all_collections(bronze: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    span = BatchRange(0, COLLECTIONS + 1)
    assert files_of(bronze, 7, span) == ["f7.parquet"]
    with monkeypatch.context() as patch:
        patch.setattr(local_log, "_commit", None)
        assert files_of(bronze, 8, span) == ["f8.parquet"]
    append(bronze / "_delta_log", COLLECTIONS + 1)
    assert files_of(bronze, COLLECTIONS + 1, span) == [f"f{COLLECTIONS + 1}.parquet"]


def test_a_collection_is_read_without_the_documents_of_all_others(tmp_path: Path) -> None:
    """Reading one of 2,000 collections out of a commit of 100,000 events takes 150 ms, and five minutes for all of them."""
    count, collections = 3 * columns.GROUP_ROWS, [f"c{number:04}" for number in range(COLLECTIONS)]
    numbers, names = pa.array(range(count), pa.int64()), pa.array([collections[-(at % COLLECTIONS)] for at in range(count)])
    rows = columns.table(count, offset=numbers, db="shop", collection=names, after=numbers.cast(pa.string()))
    parts = columns.row_groups(pa.concat_tables([rows, columns.table(1, offset=count)]))
    assert [each.num_rows for each in parts] == [columns.GROUP_ROWS] * 3 + [1]
    assert parts[-1]["offset"].to_pylist() == [count], "a row of no collection"
    file = tmp_path / "commit.parquet"
    with pq.ParquetWriter(file, columns.SCHEMA) as writer:
        for part in parts:
            writer.write_table(part)
    of = [local_log.AddedFile(file, {})]
    whole, own_bytes = (batch_rows.bytes_of(of, ["after"], among) for among in (None, {"db": "shop", "collection": "c0001"}))
    assert whole and own_bytes and whole > 2.5 * own_bytes, "of more bytes its events are for Spark"
    with file.open("r+b") as damaged:  # what is read of them cannot be decoded
        last = pq.ParquetFile(file).metadata.row_group(2).column(0)
        damaged.write(b"\0" * last.data_page_offset)
    read = ["db", "collection", "offset", "after"]
    first, own = (batch_rows._matching(of, read, {"db": "shop", "collection": collections[at]}, 2**20) for at in (0, -1))
    assert first is None and own is not None
    assert own["offset"].to_pylist() == numbers.filter(pc.equal(names, collections[-1])).to_pylist()


def test_a_small_commit_and_one_of_one_collection_stay_as_they_are() -> None:
    """Their rows are one row group, or as few as their bytes allow."""
    large = columns.table(2 * columns.GROUP_ROWS, db="shop", collection="a")
    few = pa.concat_tables([columns.table(2, db="shop", collection=name) for name in "ba"])
    assert [columns.row_groups(each) for each in (large, few)] == [[large], [few]]


@pytest.mark.parametrize(("held", "way"), [(b"0123456789", "read"), (b"", "table")])
def test_a_file_that_is_not_as_long_as_the_log_says_is_left_to_delta(bronze: Path, held: bytes, way: str) -> None:
    """A power failure may truncate the file. Spark reads an empty file as one without rows, and silver would continue without them."""
    (bronze / "f7.parquet").write_bytes(held)
    spark = mock.MagicMock()
    batch_rows.rows(spark, tables.TableRef.at(str(bronze)), BatchRange(6, 7))
    assert [name.split(".")[0] for name, _, _ in spark.mock_calls][0] == way


def test_rows_that_the_log_says_are_too_many_are_not_read_to_be_counted(
    bronze: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark reads them after a look at the log alone: a survey of a few million rows must not read them all to find that out."""
    counted: list[BatchRange] = []
    monkeypatch.setattr(batch_rows, "bytes_of", lambda *_: 1)
    monkeypatch.setattr(batch_rows, "read", lambda *_, **__: counted.append(span))
    nothing: Any = None
    table, span = tables.TableRef.at(str(bronze)), BatchRange(0, 100)
    assert batch_rows.few_rows(nothing, table, span, ["batch"], limit=99) is None
    assert counted == []
