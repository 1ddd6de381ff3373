"""What `status` reads of a table's history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bson
import pytest

from cdc_core import errors
from pipelines.delta.local_log import Commit
from pipelines.operations import status
from pipelines.terminal import tables as report
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


def test_a_restore_takes_the_position_back() -> None:
    """What came between the restored version and the RESTORE is undone; what others committed says nothing."""
    history = [Commit(6, 6, None), Commit(5, 5, None, restored=2), *(Commit(n, n, {"to": n * 10}) for n in (4, 3, 2, 1))]
    assert [to for _, to in status._with_position(history)] == [20, 10]


def test_a_damaged_table_hides_no_other_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are told with it, whose line says what is wrong; then the command ends with 3."""

    def counts(reader: Any, progress: Any) -> dict[str, int]:
        if progress.table == hop.silver_table:
            raise errors.FilesMissing("its log names the file part-0, and it is not there")
        return {"rows": 7, "deleted": 0, "incomplete": 0, "rescued": 0}

    monkeypatch.setattr(status._StatusReader, "_waiting", lambda reader, found: {})
    monkeypatch.setattr(status._StatusReader, "_counts", counts)
    with without_spark.running():
        hop = Hop(tmp_path)
        for collection in ("t", "u"):
            hop.append((1, bson.encode({"_id": 1})), collection=collection)
        hop.silver()
        found = status._StatusReader(SPARK, hop.settings, hop.bronze, 5).collections()
    assert [(each.silver and each.silver.rows, each.problem and each.problem[:9]) for each in found] == [
        (None, "its log n"),
        (7, None),
    ]
    told = status.PipelineStatus("hand", 0, status.ServerStatus(), None, found)
    report.status(told)
    assert f"{found[0].collection}: its log names the file" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(errors.DecisionNeeded, match=found[0].collection):
        status.refuse(told)
