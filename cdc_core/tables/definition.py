"""How a Delta table of ours is defined: its format, its properties and features, and the text of its DDL."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from cdc_core.tables import layout as tables

DELETION_VECTORS = "delta.enableDeletionVectors"


ROW_TRACKING = "delta.enableRowTracking"
_FOLLOWING_ROWS = ("delta.enableChangeDataFeed", ROW_TRACKING)
"""Properties by which readers follow a row through its updates: only a statement of Spark tells Delta that it is one."""


def replaces_rows(properties: Mapping[str, str]) -> bool:
    """Whether a row may be replaced by marking it as deleted and writing another one: there are deletion vectors, and
    nobody follows rows."""
    return is_on(properties, DELETION_VECTORS) and not any(is_on(properties, name) for name in _FOLLOWING_ROWS)


def is_on(properties: Mapping[str, str], name: str) -> bool:
    """Whether a property is true, in whatever letters somebody wrote it: Delta keeps them."""
    return (properties.get(name) or "").lower() == "true"  # a map of Java knows no other default


APP_ID = "mongo-medallion"
"""The one `txnAppId` of every table's commits: a fence, never a position."""


FORMAT_PROPERTY = "medallion.format"


FORMAT = "1"


CATALOGS_OWN = {"delta.enableDeletionVectors", "delta.checkpointPolicy", "delta.columnMapping.mode"}
"""Properties that Unity Catalog sets for its managed tables itself."""


REQUIRED = {
    "delta.columnMapping.mode": "none",  # this process writes and reads columns by their names
    "delta.appendOnly": "false",
}
"""What our tables are where they do not say otherwise, whatever a cluster gives new ones (`…delta.properties.defaults.…`)."""


CATALOG_MANAGED = {"catalogManaged", "catalogOwned-preview"}
"""Features of tables whose commits a catalog decides on."""


def ddl(table: tables.TableRef, columns: str, properties: Mapping[str, str], cluster_by: Sequence[str]) -> str:
    wanted = {**REQUIRED, **properties, **checkpoints(table, properties)}
    all_properties = {FORMAT_PROPERTY: FORMAT, **(wanted if table.path is not None else _of_ours(wanted))}
    rendered = ", ".join(f"'{name}' = '{value}'" for name, value in all_properties.items())
    clustering = f" CLUSTER BY ({', '.join(cluster_by)})" if cluster_by else ""
    return f"{table}{columns} USING DELTA{clustering} TBLPROPERTIES ({rendered})"


CHECKPOINTS = "delta.checkpointInterval"

CHECKPOINTS_TO_ONE_OF_DELTA = 10
"""In a folder that the committing process sees it writes so many itself (`checkpoint_writer`), of which Delta writes the last."""


def checkpoints(table: tables.TableRef, properties: Mapping[str, str]) -> dict[str, str]:
    """Delta's interval of checkpoints: that of `properties` with up to as much more, by the table's name, and ten times as long in a folder.

    Tables that are written together would come to theirs together: of ten a service would stand still for twenty seconds.
    """
    if CHECKPOINTS not in properties:
        return {}
    least = int(properties[CHECKPOINTS])
    interval = least + zlib.crc32(str(table).encode("utf-8", "surrogatepass")) % least
    is_folder = table.path is not None and table.path.startswith(("/", "file:")) and not table.path.startswith("/Volumes/")
    return {CHECKPOINTS: str(interval * CHECKPOINTS_TO_ONE_OF_DELTA if is_folder else interval)}


def _of_ours(properties: Mapping[str, str]) -> dict[str, str]:
    """Properties without those that a catalog decides for its managed tables: asking for others there is an error."""
    return {name: value for name, value in properties.items() if name not in CATALOGS_OWN}
