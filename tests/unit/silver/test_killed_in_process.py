"""A process may be killed at any step of a batch without a query: the next run completes it.

`tests/spark/silver/test_in_process.py` tests this with Delta's own transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.delta import live_files, maintenance
from pipelines.delta.writer import Writer
from tests.harness import oracle, without_spark
from tests.harness.layers import killed_at, plain
from tests.harness.without_spark import Hop, Log

STATEMENTS = [
    (Writer, "define"),
    (Writer, "replace_arrow"),
    (Writer, "compact_files"),
    (live_files.LiveFiles, "places"),
]


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    """A table of four documents, where two files already are too many."""
    with without_spark.running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "MANY_FILES", 1)
        patch.setattr(maintenance, "_surplus_files", lambda writer: len(writer.live.files()))
        found = Hop(tmp_path)
        bronze = Log(found)
        bronze.append({"t": [{"op": "c", "key": key, "at": 10 + key, "after": {"_id": key, "n": 0}} for key in range(4)]})
        found.run()
        new = {"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "n": 1, "new": "x"}}
        bronze.append({"t": [new, {"op": "d", "key": 2, "at": 21}, {"op": "c", "key": 7, "at": 22, "after": {"_id": 7}}]})
        yield found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), STATEMENTS, ids=[name for _, name in STATEMENTS])
@pytest.mark.parametrize("layer", ["silver", "gold"])
def test_killed_at_any_step_it_goes_on(hop: Hop, layer: str, owner: Any, name: str, after: bool) -> None:
    """Leaves new columns without rows, remembered deletes, or a data file that no commit names."""
    if layer == "gold":
        hop.silver()
    killed_at(getattr(hop, layer), owner, name, after=after)
    hop.run()
    rows = sorted(oracle.read(hop.gold_table.path or "").to_pylist(), key=lambda row: row["_id"])
    expected = [{"_id": 0, "n": 0}, {"_id": 1, "n": 1, "new": "x"}, {"_id": 3, "n": 0}, {"_id": 7}]
    assert [plain({name: row[name] for name in row if name != "__key"}) for row in rows] == expected
