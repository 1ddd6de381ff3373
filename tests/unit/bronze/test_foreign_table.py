"""A table of another program in the place of one of ours is refused by name, and is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings.parse import CollectionSettings
from cdc_core.tables.layout import TableRef
from pipelines.bronze import log as bronze_log
from pipelines.bronze import quarantine_table
from pipelines.operations import quarantine
from pipelines.verify import table_rows
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


@pytest.mark.parametrize(
    "read",
    [
        bronze_log.newest,
        bronze_log.read_position,
        quarantine_table.count,
        lambda spark, table: [*quarantine.listed(spark, table)],
        lambda spark, table: table_rows.newest(
            spark, table, CollectionSettings(), silver=TableRef.at(f"{table.path}_silver")
        ),
    ],
)
def test_a_table_of_another_program_is_refused(tmp_path: Path, read: Any) -> None:
    """Exit code 3. A query would fail at a column that the table does not have, which looks like a bug."""
    with without_spark.running():
        table = Hop(tmp_path).layout.bronze("foreign")
        without_spark.make_foreign(table)
        with pytest.raises(errors.TableNotOurs, match="did not create"):
            read(SPARK, table)
