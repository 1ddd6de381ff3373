"""Which tables gold publishes in this process."""

from __future__ import annotations

from pathlib import Path

import bson
import pytest

from pipelines.bronze import collection_events
from pipelines.gold import in_process
from tests.harness import oracle, without_spark
from tests.harness.without_spark import Hop, NeedsSpark


@pytest.mark.parametrize(("cores", "file_bytes", "is_here"), [(2, 2**30, True), (64, 2**30, False), (2, 1, False)])
def test_a_large_first_load_is_written_here_with_few_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, file_bytes: int, is_here: bool
) -> None:
    """Spark is faster only with many, and writes more than one file."""
    monkeypatch.setattr(in_process, "LOCAL_ROWS", 3)
    monkeypatch.setattr(in_process, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(collection_events, "LOCAL_EVENTS", 3)
    with without_spark.running():
        hop = Hop(tmp_path)
        for start in range(0, 9, 3):
            hop.append(*((number, bson.encode({"_id": number})) for number in range(start, start + 3)))
            hop.silver()
        monkeypatch.setattr(collection_events.os, "cpu_count", lambda: cores)
        if not is_here:
            with pytest.raises(NeedsSpark):
                hop.gold()
            return
        hop.gold()
        assert sorted(oracle.read(hop.gold_table.path or "")["_id"].to_pylist()) == [*range(9)]
