"""A long span of events without a query is cut into ranges, each with a commit and a position, so that little is in memory at a time.

If the first range needs Spark, so does the whole span: `tests/spark/silver/test_in_process.py`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bson
import pyarrow.parquet as pq
import pytest

from cdc_core.bronze.batch_range import BatchRange
from pipelines.bronze import collection_events, recent_files, registry, survey
from pipelines.bronze.registry import Namespace
from pipelines.delta import local_log
from pipelines.delta.writer import Writer
from pipelines.silver import in_process, ranges
from pipelines.silver import run as silver
from pipelines.spark import session as sparks
from tests.harness import bronze_rows, layers, oracle, without_spark
from tests.harness.without_spark import SPARK, Hop, Log, NeedsSpark


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    with without_spark.running():
        yield Hop(tmp_path)


def test_a_service_that_is_behind_needs_no_query(hop: Hop) -> None:
    """A backlog, or thousands of changes a second, went through Spark, which fell further behind: a minute for seconds of changes."""
    silver, gold = hop.silver_run(), hop.gold_run()
    for keys in (range(20_001), range(100)):
        hop.append(*((key, bson.encode({"_id": key})) for key in keys))
        assert silver.run_round().events == len(keys)
        assert [result.changed for result in gold.published()] == [len(keys)]
    silver.close()
    gold.close()


@pytest.mark.parametrize(("cores", "is_local"), [(8, True), (9, True), (8, False)])
def test_a_long_span_is_left_to_many_cores(hop: Hop, monkeypatch: pytest.MonkeyPatch, cores: int, is_local: bool) -> None:
    """Those of this machine, or of a cluster's executors."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(sparks, "is_local", lambda spark: is_local)
    monkeypatch.setattr(collection_events, "LOCAL_EVENTS", 3)
    monkeypatch.setattr(collection_events, "PORTION_EVENTS", 2)
    monkeypatch.setattr(in_process, "MANY_EVENTS", 2)
    for key in range(3):
        hop.append(*((number, bson.encode({"_id": number})) for number in (key, key + 1)))
    if (cores, is_local) == (8, True):
        hop.silver()
    else:
        with pytest.raises(NeedsSpark):
            hop.silver()


def test_the_size_of_an_event_is_also_that_of_its_changes(hop: Hop) -> None:
    """Updates without their documents counted as nothing, so that ranges of large ones were cut by their number alone."""
    bronze = Log(hop)
    bronze.append({"t": [{"op": "u", "key": 1, "at": 10, "update": {"text": "x" * 10_000}}]})
    counts = survey.by_batch(without_spark.SPARK, hop.bronze, Namespace(bronze_rows.DB, "t"), BatchRange(0, 9))
    assert counts is not None and counts.row_bytes > 1000


def test_short_documents_of_a_wide_table_are_applied_in_short_ranges(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has all of the columns: of nine hundred, a hundred thousand rows took a gigabyte, and of a thousand they went to Spark."""
    monkeypatch.setattr(in_process, "MANY_EVENTS", 2)
    monkeypatch.setattr(collection_events, "PORTION_BYTES", 8000)
    names = [f"f{number}" for number in range(500)]
    hop.append((0, bson.encode({"_id": 0, **dict.fromkeys(names, 1)})))
    for key in range(1, 9):
        hop.append((key, bson.encode({"_id": key})))
    hop.silver()  # without columns yet, each document counts with its own size
    before = len([*local_log.commits(Path(hop.silver_table.path or ""))])
    for key in range(8):
        hop.append((key, bson.encode({"_id": key})))
    hop.silver()
    commits = [*local_log.commits(Path(hop.silver_table.path or ""))][:-before]
    positions = {commit.metadata.get("to") for commit in commits if commit.metadata} - {None}
    assert positions >= {12, 15, 17}


@pytest.mark.parametrize(
    ("bound", "is_from", "positions"),
    [
        (("PORTION_EVENTS", 2), (in_process, "MANY_EVENTS", 2), [3, 5, 7]),
        (("PORTION_BYTES", 1), (in_process, "MANY_EVENTS", 2), [2, 3, 4, 5, 6, 7]),
        (("PORTION_BYTES", 1), (collection_events, "LARGE_FILE_BYTES", 1), [2, 3, 4, 5, 6, 7]),
    ],
    ids=["events", "bytes of many", "bytes of few"],
)
def test_a_long_span_is_applied_range_by_range(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, bound: tuple[str, int], is_from: tuple[object, str, int], positions: list[int]
) -> None:
    """Also one of few events that are large: four collections with two thousand documents of 140 KB each took 5 GB."""
    bronze = Log(hop)
    bronze.append({"t": [{"op": "c", "key": key, "at": 10 + key, "after": {"_id": key, "n": 0}} for key in range(4)]})
    hop.run()
    monkeypatch.setattr(collection_events, *bound)
    monkeypatch.setattr(*is_from)
    for at, (key, n) in enumerate(((0, 1), (1, 1), (2, 2), (3, 3), (0, 0), (1, 1))):
        bronze.append({"t": [{"op": "u", "key": key, "at": 20 + at, "after": {"_id": key, "n": n}}]})
    read, in_order = [], collection_events.in_order
    with monkeypatch.context() as patch:
        patch.setattr(
            collection_events,
            "in_order",
            lambda *given, **named: read.append(threading.current_thread().name) or in_order(*given, **named),
        )
        hop.silver()
    if bound[0] == "PORTION_EVENTS":  # each document is larger than the other bound
        assert [name.split("_")[0] for name in read] == ["medallion-ahead"] * len(positions)
    commits = local_log.commits(Path(hop.silver_table.path or ""))
    assert {commit.metadata.get("to") for commit in commits if commit.metadata} - {None} == {1, *positions}
    hop.run()
    assert oracle.rows(oracle.read(hop.gold_table.path or ""), by="__key") == [
        {"_id": key, "n": key, "__key": str(key)} for key in range(4)
    ]


def test_few_events_in_large_files_of_others_are_read_once(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many collections read all files of the span twice, to find that its own documents are one range: a backlog took half as long
    again."""
    monkeypatch.setattr(collection_events, "LARGE_FILE_BYTES", 1)
    monkeypatch.setattr(survey, "by_batch", lambda *_: pytest.fail("the events were counted by batch"))
    for key in range(3):
        hop.append((key, bson.encode({"_id": key})))
    hop.silver()
    assert len(oracle.rows(oracle.read(hop.silver_table.path or ""), by="__key")) == 3


@pytest.mark.parametrize("is_compacted", [False, True])
def test_many_small_commits_are_read_once_for_all_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compacted: bool
) -> None:
    """Each collection opened all of them: a hundred collections took two minutes for five minutes of commits. Also beside a file that holds
    batches of before."""
    reads: list[Path] = []
    read = recent_files._read
    monkeypatch.setattr(recent_files, "_read", lambda path, names: reads.append(path) or read(path, names))
    with without_spark.running():
        hop = Hop(tmp_path)
        commits: list[list[Mapping[str, Any]]] = []
        commit = hop.commit
        for number in range(130):
            rows: list[Mapping[str, Any]] = []
            monkeypatch.setattr(hop, "commit", rows.extend)
            for collection in ("a", "b", "c"):
                hop.append((number % 7, bson.encode({"_id": number % 7, "n": number})), collection=collection)
            commits.append([row | {"batch": number + 1} for row in rows])
        first = sum(commits[:5], []) if is_compacted else commits[0]
        later = commits[5:] if is_compacted else commits[1:]
        for batch, rows in ((5 if is_compacted else 1, first), *((rows[0]["batch"], rows) for rows in later)):
            hop._batch = batch
            commit(rows)
        if is_compacted:
            silver.run(SPARK, hop.settings, to=3)
        assert silver.run(SPARK, hop.settings).events == 3 * (127 if is_compacted else 130)
        for collection in ("a", "b", "c"):
            table = pq.read_table([*Path(hop.layout.silver(bronze_rows.DB, collection).path or "").glob("*.parquet")])
            newest = {row["_id"]: row["n"] for row in sorted(table.to_pylist(), key=lambda row: row["__sequence"])}
            assert {*newest.values()} == {*range(123, 130)}
    assert len(reads) == len({*reads}) and len(reads) >= 125


def test_a_repaired_table_is_compared_with_all_that_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position does not tell what its rows have seen. That was known again from the first range on, so that the next ones replaced
    newer rows with older documents."""
    monkeypatch.setattr(registry, "IDLE_BATCHES", 1)
    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": False})
        bronze = Log(hop)
        bronze.append({"other": [{"op": "c", "key": 9, "at": 9, "after": {"_id": 9}}]})
        for v in (1, 2, 3):
            bronze.append({"t": [{"op": "u", "key": 1, "at": 10 + v, "after": {"_id": 1, "v": v}}]})
        hop.silver()
        with Writer.claim(without_spark.SPARK, hop.silver_table).released() as writer:
            writer.mark(to=0, extra={"log": writer.metadata["log"]})
        rows = layers.table_rows(without_spark.SPARK, hop.silver_table)
        monkeypatch.setattr(ranges, "_greatest_sequence", lambda _: rows[0]["__sequence"], raising=False)
        silver.run(without_spark.SPARK, hop.settings, to=1)  # has no event of it
        for to in (3, 4):
            with contextlib.suppress(NeedsSpark):  # by a MERGE, which leaves the row as it is
                silver.run(without_spark.SPARK, hop.settings, to=to)
            assert [row["v"] for row in layers.table_rows(without_spark.SPARK, hop.silver_table)] == [3]
