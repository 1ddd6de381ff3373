"""Which files of bronze's log hold a range of batches, of thousands of commits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdc_core.silver import reduce
from cdc_core.tables import claims
from pipelines.bronze import batch_rows
from pipelines.delta import local_log

COLLECTIONS = 300


@pytest.fixture
def bronze(tmp_path: Path) -> Path:
    """The log of a snapshot of `COLLECTIONS` collections, each of which has a commit of its own."""
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


def files_of(bronze: Path, collection: int, span: reduce.BatchRange) -> list[str]:
    among = {"db": "shop", "collection": f"c{collection:04}"}
    return [each.path.name for each in batch_rows.span_files(bronze, span, among)]


def test_a_collection_is_found_in_the_commits_of_a_snapshot_of_hundreds(bronze: Path) -> None:
    """Else each of them takes a query of Spark's, and seconds of processor time."""
    span = reduce.BatchRange(0, COLLECTIONS)
    assert files_of(bronze, 7, span) == ["f7.parquet"]
    assert files_of(bronze, COLLECTIONS, span) == [f"f{COLLECTIONS}.parquet"]
    assert len(batch_rows.span_files(bronze, reduce.BatchRange(100, 250))) == 150


def test_the_log_is_read_once_for_all_collections(bronze: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    span = reduce.BatchRange(0, COLLECTIONS + 1)
    assert files_of(bronze, 7, span) == ["f7.parquet"]
    with monkeypatch.context() as patch:
        patch.setattr(local_log, "_commit", None)
        assert files_of(bronze, 8, span) == ["f8.parquet"]
    append(bronze / "_delta_log", COLLECTIONS + 1)
    assert files_of(bronze, COLLECTIONS + 1, span) == [f"f{COLLECTIONS + 1}.parquet"]
