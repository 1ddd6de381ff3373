"""A pipeline whose gold tables a test writes, for tests of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core.settings import parse as settings
from pipelines.bronze import registry
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import models
from tests.harness import oracle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = {
    "orders": {"_id": "INT", "customer": "INT", "amount": "INT", "note": "STRING"},
    "customers": {"_id": "INT", "city": "STRING"},
}


@dataclass
class Shop:
    """A pipeline with two collections, whose gold tables tests write."""

    spark: SparkSession
    settings: settings.Settings
    folder: Path
    documents: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    at: int = 10

    def change(self, collection: str, *documents: dict[str, Any], gone: tuple[int, ...] = ()) -> None:
        """Write documents to the collection's gold table, and remove those with the ids `gone`."""
        table = delta.layout(self.settings.lakehouse).gold("cases", collection)
        columns = COLUMNS[collection]
        known = self.documents.setdefault(collection, {})
        known |= {each["_id"]: each for each in documents}
        kept = [tuple(each.get(name) for name in columns) for each in known.values() if each["_id"] not in gone]
        ddl = ", ".join(f"{name} {type_}" for name, type_ in columns.items())
        if not delta.exists(self.spark, table):
            delta.create(self.spark, table, columns=ddl)
            registry.note(self.spark, self.settings, new=[registry.Namespace("cases", collection)], discovered=1, log=None)
        self.at += 1
        writer = Writer.claim(self.spark, table)
        writer.overwrite(self.spark.createDataFrame(kept, ddl), to=self.at)
        writer.release()

    def run(self, **asked: Any) -> dict[str, str]:
        """What a run did to each model."""
        return {each.name: each.did for each in models.run(self.spark, self.settings, **asked).models}

    def rows(self, model: str) -> set[tuple[Any, ...]]:
        held = oracle.read(delta.layout(self.settings.lakehouse).model(model).path or "")
        return {tuple(row.values()) for row in held.to_pylist()}


def made(spark: SparkSession, root: Path, files: Mapping[str, str], *, suites: Mapping[str, str] | None = None) -> Shop:
    """A shop with models and suites of expectations, by file name; a name without a suffix is a model's."""
    folders = {"models": root / "models", "expectations": root / "expectations"}
    for folder, some in zip(folders.values(), (files, suites or {})):
        folder.mkdir(exist_ok=True)
        for name, text in some.items():
            (folder / (name if "." in name else f"{name}.sql")).write_text(text)
    chosen = settings.parse(
        {
            "name": "hand",
            "lakehouse": {"root": str(root / "lakehouse")},
            "source": {"mongodb.connection.string": "${env:NOWHERE}", "collection.include.list": r"cases\..*"},
            "gold": {name: str(folder) for name, folder in folders.items() if name == "models" or suites},
        }
    )
    return Shop(spark, chosen, folders["models"])
