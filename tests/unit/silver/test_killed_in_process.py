"""A process may be killed at any step of a batch without a query: the next run completes it.

`tests/spark/silver/test_in_process.py` tests this with Delta's own transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.bronze import quarantine_table
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
CASES = [*((layer, *each) for layer in ("silver", "gold") for each in STATEMENTS), ("silver", quarantine_table, "append")]


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
        bad = {"op": "u", "key": 3, "at": 23, "text": "{"}
        bronze.append(
            {"t": [new, {"op": "d", "key": 2, "at": 21}, {"op": "c", "key": 7, "at": 22, "after": {"_id": 7}}, bad]}
        )
        yield found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("layer", "owner", "name"), CASES, ids=[f"{layer} {name}" for layer, _, name in CASES])
def test_killed_at_any_step_it_goes_on(hop: Hop, layer: str, owner: Any, name: str, after: bool) -> None:
    """Leaves new columns without rows, remembered deletes, facts about a quarantined event, or a data file that no commit names."""
    if layer == "gold":
        hop.silver()
    killed_at(getattr(hop, layer), owner, name, after=after)
    hop.run()
    rows = sorted(oracle.read(hop.gold_table.path or "").to_pylist(), key=lambda row: row["_id"])
    expected = [{"_id": 0, "n": 0}, {"_id": 1, "n": 1, "new": "x"}, {"_id": 3, "n": 0}, {"_id": 7}]
    assert [plain({name: row[name] for name in row if name != "__key"}) for row in rows] == expected
    held = quarantine_table.HeldEvents.of(without_spark.SPARK, hop.layout.quarantine("cases", "t"))
    assert held is not None and (held.count(), held.keys()) == (1, {"3"})
