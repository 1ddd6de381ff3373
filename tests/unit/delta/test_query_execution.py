"""Which tables are small, so that their queries run without compiled code; and settings for a single statement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.errors import AnalysisException

from cdc_core.tables.layout import TableRef
from pipelines.delta import query_execution


def _table(folder: Path, *, rows: int, size_bytes: int) -> TableRef:
    log = folder / "_delta_log"
    log.mkdir(parents=True)
    metadata = {"schemaString": '{"type": "struct", "fields": []}', "partitionColumns": [], "configuration": {}}
    add = {"path": "a.parquet", "size": size_bytes, "stats": json.dumps({"numRecords": rows})}
    actions = [{"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}, {"metaData": metadata}, {"add": add}]
    (log / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))
    (log / f"{0:020}.crc").write_text(json.dumps({"numFiles": 1, "tableSizeBytes": size_bytes}))
    return TableRef(f"delta.`{folder}`", path=str(folder))


@pytest.mark.parametrize(
    ("rows", "size_bytes", "is_small"),
    [(100, 10_000, True), (100, 10**9, False), (400_000, 19_000_000, False)],
)
def test_a_table_is_small_in_bytes_and_in_rows(tmp_path: Path, rows: int, size_bytes: int, is_small: bool) -> None:
    """Similar documents compress so well that 400,000 of them fit in a file of 19 MB."""
    assert query_execution.are_small(_table(tmp_path, rows=rows, size_bytes=size_bytes)) is is_small


def test_a_table_that_is_not_there_yet_is_small(tmp_path: Path) -> None:
    """It has nothing to read."""
    assert query_execution.are_small(TableRef("delta.`none`", path=str(tmp_path / "none")))


def test_settings_of_which_one_is_refused_leave_none_behind() -> None:
    """Otherwise the fence of a MERGE that does not run would apply to the session's next commit."""
    held: dict[str, str] = {"a": "1"}

    def set_(name: str, value: str) -> None:
        if name == "refused":
            raise AnalysisException(name, errorClass="CONFIG_NOT_AVAILABLE")
        held[name] = value

    spark: Any = Mock(conf=Mock(get=held.get, set=set_, unset=held.__delitem__))
    with (
        pytest.raises(AnalysisException),
        query_execution.required_confs(spark, {"a": "2", "b": "2", "refused": "2", "c": "2"}),
    ):
        pass
    assert held == {"a": "1"}
