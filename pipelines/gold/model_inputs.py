"""The tables that models refer to, each at one version for the whole run.

That a collection's own table is made anew after a rebuild of silver is said in `current` (`GoldWork.is_rewrite`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdc_core.models import sql_model
from cdc_core.sql.names import identifier
from cdc_core.tables import layout as tables
from pipelines.delta import local_log, stored_files, table_history
from pipelines.delta import tables as delta
from pipelines.gold import current

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class ModelInput:
    """A table that models refer to, as it is while they are made.

    `version` is the version that is read. `at` identifies the rows of that version: commits that bring no rows do not
    change it. `id` is Delta's id of the table: it tells the table from another one that was created in its place.
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
        """What the commit of a model that reads it says of it."""
        return {"id": self.id, "version": self.version, "at": self.at}


@dataclass
class ModelInputs:
    """What the models of a `pipeline` read in one run: tables at their versions, and views of the session for models that have no table."""

    spark: SparkSession
    layout: tables.Layout
    pinned: Mapping[str, int]
    pipeline: str
    views: dict[str, str] = field(default_factory=dict)
    """The session's view of each model that has no table, or does not have its next version yet."""
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """Part of the names of temporary views, so that two runs in one session do not replace each other's."""
    _tables: dict[str, ModelInput | None] = field(default_factory=dict)
    _view_positions: dict[str, dict[str, object]] = field(default_factory=dict)

    def close(self) -> None:
        """Drop the session's views of this run."""
        for view in self.views.values():
            self.spark.catalog.dropTempView(view)

    def missing(self, model: sql_model.Model) -> Iterator[str]:
        """The names that the model refers to and that gold does not hold yet."""
        return (name for name in model.names if name not in self.views and self.table(name) is None)

    def table(self, name: str) -> ModelInput | None:
        """A table at the version that this run reads; None for a view, and where there is no table yet."""
        if name in self.views:
            return None
        if name not in self._tables:
            table = collection_table(self.layout, name) if "." in name else self.layout.model(name)
            # Kept for the run, None too: a table that appears meanwhile must not be read by one model and be missing for
            # another.
            self._tables[name] = self._current(name, table)
        return self._tables[name]

    def forget(self, name: str) -> None:
        """Read a model's table anew: the models that refer to it read the version that this run has published."""
        self._tables.pop(name, None)

    @stored_files.one_look()
    def _current(self, name: str, table: tables.TableRef) -> ModelInput | None:
        if not delta.exists(self.spark, table):
            return None
        delta.check_ours(self.spark, table)
        id_, files = self._identified(table)
        at = table_history.standing(self.spark, table)
        # A table is made, claimed and filled by a commit each: before the last one, and where it is to be written anew, as behind a
        # repair, it does not hold what gold says. Where its history tells nothing, its rows do.
        if at.said.get("to") is None and (at.position is not None or not files):
            return None
        version, rows = self._version(name, table)
        return ModelInput(name, table, version, id_, rows)

    def _identified(self, table: tables.TableRef) -> tuple[str, int]:
        """Delta's id of a table, and how many files it has; without a statement where this process sees its log: a service looks time and again."""
        folder = local_log.folder(table)
        size, id_ = (None, None) if folder is None else (local_log.size(folder), local_log.table_id(folder))
        if size is not None and id_ is not None:
            return id_, size.files
        detail = self.spark.sql(f"DESCRIBE DETAIL {table}").select("id", "numFiles").collect()[0]
        return detail.id, detail.numFiles

    def _version(self, name: str, table: tables.TableRef) -> tuple[int, str]:
        """The version that is read, and what identifies its rows: a digest of the metadata of the last commit that
        brought any.

        Claims and maintenance change no rows, so their commits do not count. A RESTORE carries no metadata of ours:
        after one the version itself identifies the rows.
        """
        pinned = self.pinned.get(name)
        # The commit is nearly always among the newest; the whole history is read only where it is not.
        for limit in (30, None):
            found = table_history.commits(self.spark, table, limit=limit)
            version = found[0].version if pinned is None else pinned
            for commit in found:
                if commit.version > version:
                    continue
                if commit.restored is not None:
                    return version, f"version {version}"
                if commit.metadata is not None:
                    return version, current.rows_of(commit.metadata)
        return version, f"version {version}"

    def relation(self, ref: sql_model.Ref) -> str:
        """What a reference reads, in a FROM clause."""
        if ref.name in self.views:
            return identifier(self.views[ref.name])
        source = self.table(ref.name)
        assert source is not None
        return source.relation

    def positions(self, model: sql_model.Model) -> dict[str, object]:
        """The positions of all that the model refers to; of a view those of the tables that it reads."""
        positions: dict[str, object] = {
            name: source.position for name in model.names if (source := self.table(name)) is not None
        }
        views = {f"view {name}": self._view_positions[name] for name in model.names if name in self._view_positions}
        return positions | views

    def add_view(self, model: sql_model.Model, frame: DataFrame) -> None:
        """Let the models that refer to this one read its query in this run."""
        view = f"model_{model.name}_{self.nonce}"
        frame.createOrReplaceTempView(view)
        self.views[model.name] = view
        # With a blank, which no model's name has.
        self._view_positions[model.name] = {"the query": model.digest, **self.positions(model)}


def collection_table(layout: tables.Layout, name: str) -> tables.TableRef:
    """The gold table of a collection, or the history beside it, which has the name of a collection with an ending."""
    db, _, collection = name.partition(".")
    return layout.gold(db, collection)
