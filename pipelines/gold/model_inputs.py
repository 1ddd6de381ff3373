"""The tables that models refer to, each at one version for the whole run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from cdc_core.models import sql_model
from cdc_core.sql.names import identifier
from cdc_core.tables import layout as tables
from pipelines.delta import stored_files, table_history
from pipelines.delta import tables as delta
from pipelines.gold import current


@dataclass(frozen=True)
class ModelInput:
    """A table that models refer to, pinned at one version.

    `version` is the version that is read. `at` identifies its rows: commits without rows do not change it. `id` is Delta's id of the table,
    which differs for another table that was created in its place.
    """

    name: str
    table: tables.TableRef
    version: int
    id: str
    at: str

    @property
    def relation(self) -> str:
        """The table at its version, in a FROM clause."""
        return f"{self.table} VERSION AS OF {self.version}"

    @property
    def position(self) -> dict[str, object]:
        """This table's entry in the metadata of a model's commit."""
        return {"id": self.id, "version": self.version, "at": self.at}


@dataclass
class ModelInputs:
    """What the models of a `pipeline` read in one run: tables at their versions, and temporary views for models without a table."""

    spark: SparkSession
    layout: tables.Layout
    pinned: Mapping[str, int]
    pipeline: str
    views: dict[str, str] = field(default_factory=dict)
    """The temporary view of each model that has no table, or, in a dry run, whose table would change."""
    _tables: dict[str, ModelInput | None] = field(default_factory=dict)
    _view_positions: dict[str, dict[str, object]] = field(default_factory=dict)

    def close(self) -> None:
        """Drop the temporary views of this run."""
        for view in self.views.values():
            self.spark.catalog.dropTempView(view)

    def missing(self, model: sql_model.Model) -> Iterator[str]:
        """The names that the model refers to and that do not exist in gold yet."""
        return (name for name in model.names if name not in self.views and self.table(name) is None)

    def table(self, name: str) -> ModelInput | None:
        """A table at the version that this run reads; None for a view, and if there is no table yet."""
        if name in self.views:
            return None
        if name not in self._tables:
            table = collection_table(self.layout, name) if "." in name else self.layout.model(name)
            # Cached for the run, None too: a table that appears meanwhile must not exist for one model and be missing for another.
            self._tables[name] = self._current(name, table)
        return self._tables[name]

    def forget(self, name: str) -> None:
        """Read a model's table again, so that the models that refer to it get the version that this run has published."""
        self._tables.pop(name, None)

    @stored_files.one_look()
    def _current(self, name: str, table: tables.TableRef) -> ModelInput | None:
        if not delta.exists(self.spark, table):
            return None
        delta.check_ours(self.spark, table)
        standing = table_history.standing(self.spark, table)
        # A table is created, claimed and filled by a commit each: before the last one, and before it is rewritten after a repair, its rows
        # do not count. If its history does not say, it counts if it has rows.
        if standing.metadata.get("to") is None and (
            standing.position is not None or not delta.size(self.spark, table).files
        ):
            return None
        version, rows = self._version(table, self.pinned.get(name))
        return ModelInput(name, table, version, delta.table_id(self.spark, table), rows)

    def follows(self, name: str, position: Mapping[str, Any]) -> bool:
        """Whether a table is at a position that a model was made from, or later: another table, and an older copy of its files, have other
        rows at the same version."""
        source = self.table(name)
        assert source is not None
        version = position["version"]
        if position["id"] != source.id or version > source.version:
            return False
        return self._version(source.table, version) == (version, position["at"])

    def _version(self, table: tables.TableRef, version: int | None) -> tuple[int, str]:
        """A version, or the newest one, and the identity of its rows: `current.rows_of` the last commits with metadata, or, where another
        program changed rows after they were written, or a RESTORE did, the version in which it did."""
        return _newest(self.spark, table) if version is None else _identified(self.spark, table, version)

    def relation(self, ref: sql_model.Ref) -> str:
        """SQL for a reference, in a FROM clause."""
        if ref.name in self.views:
            return identifier(self.views[ref.name])
        source = self.table(ref.name)
        assert source is not None
        return source.relation

    def positions(self, model: sql_model.Model) -> dict[str, object]:
        """The positions of all that the model refers to; for a view, those of the tables that it reads."""
        positions: dict[str, object] = {
            name: source.position for name in model.names if (source := self.table(name)) is not None
        }
        views = {f"view {name}": self._view_positions[name] for name in model.names if name in self._view_positions}
        return positions | views

    def add_view(self, model: sql_model.Model, frame: DataFrame) -> None:
        """Make a temporary view of a model's query, for the models that refer to it in this run."""
        view = f"model_{model.name}_{uuid.uuid4().hex[:8]}"  # unique: two runs in one session do not replace each other's
        frame.createOrReplaceTempView(view)
        self.note_view(model, view)

    def note_view(self, model: sql_model.Model, view: str) -> None:
        """Note that a model has no table but the temporary view `view`, and the positions of what it reads."""
        self.views[model.name] = view
        # With a space, which no model's name contains.
        self._view_positions[model.name] = {"the query": model.digest, **self.positions(model)}


def collection_table(layout: tables.Layout, name: str) -> tables.TableRef:
    """The gold table of a collection, or its history (`<name>_history`)."""
    db, _, collection = name.partition(".")
    return layout.gold(db, collection)


@table_history.cached  # a service looks every ten seconds, and the newest commit alone does not say it
def _newest(spark: SparkSession, table: tables.TableRef) -> tuple[int, str]:
    return _identified(spark, table, None)


def _identified(spark: SparkSession, table: tables.TableRef, version: int | None) -> tuple[int, str]:
    """`ModelInputs._version`."""
    rows: str | None = None
    # Lazily: there may be a hundred tables with long histories, and two commits nearly always suffice.
    for commit in table_history.newest_first(spark, table):
        version = commit.version if version is None else version
        if commit.version > version:
            continue
        # Also behind claims, and commits that moved the position only: they repeat the identity of the rows before such a change.
        if commit.is_foreign or commit.restored is not None:
            return version, f"version {commit.version}"
        if commit.metadata is not None:
            before, rows = rows, current.rows_of(commit.metadata)
            if before not in (None, rows):
                return version, str(before)
    assert version is not None, "a table has a commit"
    return version, rows or f"version {version}"
