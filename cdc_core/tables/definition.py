"""How our Delta tables are defined: format, properties, features, and DDL."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from cdc_core.tables import layout as tables

DELETION_VECTORS = "delta.enableDeletionVectors"
ROW_TRACKING = "delta.enableRowTracking"
TYPE_WIDENING = "delta.enableTypeWidening"
_FOLLOWING_ROWS = ("delta.enableChangeDataFeed", ROW_TRACKING)
"""Properties with which readers follow a row through updates: only Spark's statements record that a row is the same."""

APP_ID = "mongo-medallion"
"""The single `txnAppId` of all commits: a fence, never a position."""

FORMAT_PROPERTY = "medallion.format"
FORMAT = "1"
CATALOGS_OWN = {"delta.enableDeletionVectors", "delta.checkpointPolicy", "delta.columnMapping.mode"}
"""Properties that Unity Catalog sets for its managed tables."""

REQUIRED = {
    "delta.columnMapping.mode": "none",  # columns are written and read by their names
    "delta.appendOnly": "false",
}
"""Properties of our tables unless they set others, regardless of a cluster's defaults (`…delta.properties.defaults.…`)."""

CATALOG_MANAGED = {"catalogManaged", "catalogOwned-preview"}
"""Features of tables whose commits go through a catalog."""

CHECKPOINTS = "delta.checkpointInterval"
CHECKPOINTS_TO_ONE_OF_DELTA = 10
"""For a table in a local folder, `checkpoint_writer` writes this many checkpoints for each one that Delta writes."""


def replaces_rows(properties: Mapping[str, str]) -> bool:
    """Whether a row may be replaced by marking it as deleted and writing another: the table has deletion vectors, and no
    reader follows rows.
    """
    return is_on(properties, DELETION_VECTORS) and not follows_rows(properties)


def follows_rows(properties: Mapping[str, str]) -> bool:
    """Whether readers may follow a row through updates."""
    return any(is_on(properties, name) for name in _FOLLOWING_ROWS)


def is_on(properties: Mapping[str, str], name: str) -> bool:
    """Whether a property is true, in any case: Delta keeps the user's spelling."""
    return (properties.get(name) or "").lower() == "true"  # a Java map has no `get` with a default


def ddl(
    table: tables.TableRef, columns: str, properties: Mapping[str, str], cluster_by: Sequence[str], *, sets_all: bool
) -> str:
    """A table's definition for CREATE TABLE: its name, columns, clustering and properties.

    Without `sets_all` the properties leave out those that a catalog sets for its managed tables, which raise an error.
    """
    delta_properties = {**REQUIRED, **properties, **checkpoints(table, properties)}
    set_properties = {name: value for name, value in delta_properties.items() if sets_all or name not in CATALOGS_OWN}
    rendered = ", ".join(f"'{name}' = '{value}'" for name, value in {FORMAT_PROPERTY: FORMAT, **set_properties}.items())
    # Delta cuts the text there, and counts a character beyond U+FFFF before it as one, where Java has two: blanks take the difference.
    room = " " * sum(ord(sign) > 0xFFFF for sign in f"{table}{columns}")
    clustering = f" {room}CLUSTER BY {room}({', '.join(cluster_by)})" if cluster_by else ""
    return f"{table}{columns} USING DELTA{clustering} TBLPROPERTIES ({rendered})"


def checkpoints(table: tables.TableRef, properties: Mapping[str, str]) -> dict[str, str]:
    """Delta's checkpoint interval: that of `properties` plus up to as much again, depending on the table's name; ten times
    that in a local folder.

    Without the variation, tables that are written together would also checkpoint together: ten of them stop a service
    for twenty seconds.
    """
    if CHECKPOINTS not in properties:
        return {}
    base_interval = int(properties[CHECKPOINTS])
    interval = base_interval + zlib.crc32(str(table).encode("utf-8", "surrogatepass")) % base_interval
    is_folder = table.path is not None and table.path.startswith(("/", "file:")) and not table.path.startswith("/Volumes/")
    return {CHECKPOINTS: str(interval * CHECKPOINTS_TO_ONE_OF_DELTA if is_folder else interval)}
