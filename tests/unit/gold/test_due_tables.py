"""Which gold tables are due and what models read of them, over logs that are written in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdc_core.tables import layout as tables
from pipelines.delta import local_log
from pipelines.gold import model_inputs
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


def committed(table: tables.TableRef, operation: str = "WRITE", **said: Any) -> int:
    """One commit without files; the table's version."""
    folder = local_log.folder(table)
    assert folder is not None
    return without_spark.write(folder, (local_log.newest_version(folder) or 0) + 1, [], operation, **said)


def stated(**said: Any) -> dict[str, str]:
    return {"userMetadata": json.dumps({"writer": "by hand", "released": True, **said})}


def at(hop: Hop, table: tables.TableRef) -> str:
    """What tells the rows that models read of a gold table."""
    return model_inputs.ModelInputs(SPARK, hop.layout, {})._version("t", table)[1]


@pytest.mark.parametrize("name", ["origin", "log", "generation"])
def test_models_are_made_anew_where_their_inputs_began_anew(tmp_path: Path, name: str) -> None:
    """Batches and versions begin again where silver or bronze was removed, and may come to the numbers of before."""
    with without_spark.running():
        hop = Hop(tmp_path)
        without_spark.create(SPARK, hop.gold_table, columns="`__key` STRING")
        found = []
        for value in ("a", "a", "b"):
            committed(hop.gold_table, **stated(to=1, silver=3, lease=value, **{name: value}))
            found.append(at(hop, hop.gold_table))
    assert found[0] == found[1] != found[2]
