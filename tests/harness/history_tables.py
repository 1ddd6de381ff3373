"""History tables over a bronze that a test writes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core.settings import parse as settings
from pipelines.delta import local_log
from pipelines.delta import tables as delta
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from tests.harness import bronze_rows, oracle, sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


ENGINE = ("__incomplete", "__as_captured", "__document", "__sequence", "__until", "__deleted", "valid_from", "valid_to")
ENDS = ["__key", "__sequence", "__until", "__deleted", "valid_from", "valid_to"]
"""The last columns of a history table whose versions say whether a delete ended them, however it was written."""


class HistoryHop:
    """A lakehouse whose bronze a test writes, with silver and gold."""

    def __init__(self, spark: SparkSession, root: Path, collections: Mapping[str, Mapping[str, Any]]) -> None:
        self.spark = spark
        self.settings = settings.parse(
            {
                "name": "shop",
                "lakehouse": {"root": str(root)},
                "source": {"mongodb.connection.string": "${env:NOWHERE}"},
                "silver": {
                    "defaults": {"history": True},
                    "collections": {f"{bronze_rows.DB}.{name}": dict(options) for name, options in collections.items()},
                },
            }
        )
        self.layout = delta.layout(self.settings.lakehouse)
        self.bronze = bronze_rows.Log(spark, self.layout.bronze("shop"))

    def run(self) -> gold.GoldResult:
        silver.run(self.spark, self.settings, sessions=sessions.kept(self.spark))
        return gold.run(self.spark, self.settings, sessions=sessions.kept(self.spark))

    def table(self, collection: str) -> str:
        return str(self.layout.history(bronze_rows.DB, collection))

    def versions(self, collection: str) -> list[dict[str, Any]]:
        """All versions in the order of `valid_from`."""
        table = self.layout.history(bronze_rows.DB, collection)
        if local_log.folder(table) is None:
            return [row.asDict(recursive=True) for row in self.spark.table(str(table)).orderBy("valid_from").collect()]
        return oracle.rows(oracle.read(table.path or ""), by="valid_from")

    def at(self, collection: str, second: int) -> dict[Any, Any]:
        """The documents at a second, as `_id` to `v`."""
        at = datetime(1970, 1, 1) + timedelta(seconds=second)
        return {
            row["_id"]: row["v"]
            for row in self.versions(collection)
            if row["valid_from"] <= at and (row["valid_to"] is None or row["valid_to"] > at)
        }


def change(op: str, key: int, at: int, v: Any = None) -> dict[str, Any]:
    return {"op": op, "key": key, "at": at, **({} if op == "d" else {"after": {"_id": key, "v": v}})}
