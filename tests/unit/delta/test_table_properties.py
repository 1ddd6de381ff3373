"""What DDL asks of a catalog."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import AnalysisException

from cdc_core.tables import definition
from cdc_core.tables.layout import TableRef
from pipelines.bronze import log
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta
from pipelines.gold import current
from pipelines.silver import tables as silver


@pytest.mark.parametrize("properties", (log.PROPERTIES, silver.PROPERTIES, current.PROPERTIES, ops_tables.PROPERTIES))
def test_no_ddl_for_a_catalog_names_what_the_catalog_decides(properties: dict[str, str]) -> None:
    """A catalog refuses a managed table with other deletion vectors, checkpoints or column mapping than its own."""
    for own in definition.CATALOGS_OWN:
        assert own not in definition.ddl(
            TableRef.named("main", "bronze", "shop"), " (a INT)", properties, (), sets_all=False
        )
    kept = set(properties) - definition.CATALOGS_OWN
    assert all(
        f"'{name}'" in definition.ddl(TableRef.named("main", "s", "t"), "", properties, (), sets_all=False) for name in kept
    )
    assert all(
        f"'{name}'" in definition.ddl(TableRef.at("/lake/t"), "", properties, (), sets_all=True) for name in properties
    )


def test_tables_that_are_written_together_do_not_write_their_checkpoints_together() -> None:
    """Each table has its own interval, always the same. Properties without an interval get none."""

    def interval(name: str) -> int:
        found = re.search(
            rf"'{definition.CHECKPOINTS}' = '(\d+)'",
            definition.ddl(TableRef.at(name), "", silver.PROPERTIES, (), sets_all=True),
        )
        assert found is not None
        return int(found[1])

    found = [interval(f"/lake/silver/shop/orders{number}") for number in range(50)]
    assert found[0] == 690, "the same in every process"
    assert min(found) >= 500 and max(found) < 1000 and len(set(found)) > 25
    assert [interval(f"{root}/silver/shop/orders0") // 500 for root in ("s3a://lake", "/Volumes/lake", "file:/lake")] == [
        0,
        0,
        1,
    ]
    assert definition.CHECKPOINTS not in definition.ddl(TableRef.at("/lake/t"), "", {}, (), sets_all=True)


@pytest.mark.parametrize("name", ("delta.enableChangeDataFeed", "delta.enableRowTracking"))
def test_a_property_is_on_in_whatever_letters_somebody_wrote_it(name: str) -> None:
    """Delta accepts `True`, as Python writes it, and keeps the spelling. Missing it would report wrong changes to readers of changes."""
    assert definition.replaces_rows({definition.DELETION_VECTORS: "True"})
    assert not definition.replaces_rows({definition.DELETION_VECTORS: "true", name: "True"})


class Catalog:
    """Accepts tables, but no new schemas: only an administrator's exist."""

    def __init__(self, *schemas: str) -> None:
        self.schemas = schemas
        self.tables: set[str] = set()

    def sql(self, statement: str) -> Any:
        verb, name = statement.split()[0], next(word for word in statement.split() if "`" in word)
        if statement.startswith("CREATE SCHEMA"):
            raise AnalysisException("no CREATE SCHEMA on the catalog", errorClass="INSUFFICIENT_PERMISSIONS")
        if verb == "CREATE":
            self.tables.add(name)
        elif statement.startswith("DESCRIBE SCHEMA") and name not in self.schemas:
            raise AnalysisException(name, errorClass="SCHEMA_NOT_FOUND")
        elif statement.startswith("SHOW TBLPROPERTIES") and name not in self.tables:
            raise AnalysisException(name, errorClass="TABLE_OR_VIEW_NOT_FOUND")
        return SimpleNamespace(collect=lambda: [SimpleNamespace(key=definition.FORMAT_PROPERTY, value=definition.FORMAT)])


def test_a_schema_that_is_there_asks_for_no_right_to_make_one() -> None:
    """Unity Catalog requires the right to create schemas for CREATE SCHEMA IF NOT EXISTS even if the schema exists."""
    table, catalog = TableRef.named("main", "shop_bronze", "shop"), Catalog("`main`.`shop_bronze`")
    delta.create(catalog, table, columns="n BIGINT")  # type: ignore[arg-type]
    assert catalog.tables == {str(table)}
    with pytest.raises(AnalysisException, match="CREATE SCHEMA"):
        delta.create(Catalog(), table, columns="n BIGINT")  # type: ignore[arg-type]
