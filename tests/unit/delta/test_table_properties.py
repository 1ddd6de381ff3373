"""What is asked of a catalog for its tables."""

from __future__ import annotations

import pytest

from cdc_core.tables import definition
from cdc_core.tables.layout import TableRef
from pipelines.bronze import log
from pipelines.delta import ops_tables
from pipelines.gold import current
from pipelines.silver import tables as silver


@pytest.mark.parametrize("properties", (log.PROPERTIES, silver.PROPERTIES, current.PROPERTIES, ops_tables.PROPERTIES))
def test_no_ddl_for_a_catalog_names_what_the_catalog_decides(properties: dict[str, str]) -> None:
    """A managed table that is asked for other deletion vectors, checkpoints or column mapping than its catalog's is refused."""
    for own in definition.CATALOGS_OWN:
        assert own not in definition.ddl(TableRef.named("main", "bronze", "shop"), " (a INT)", properties, ())
    kept = set(properties) - definition.CATALOGS_OWN
    assert all(f"'{name}'" in definition.ddl(TableRef.named("main", "s", "t"), "", properties, ()) for name in kept)
    assert all(f"'{name}'" in definition.ddl(TableRef.at("/lake/t"), "", properties, ()) for name in properties)
