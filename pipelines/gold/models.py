"""SQL models over gold: each a table, a view, or a table that takes in what changed.

    read        the files of the folder that the settings name, with the descriptions beside them
    ordered     by their references; what refers to nothing, or in a circle, is refused by name
    pinned      each table that is referred to, at the version that it has when the run begins
    candidate   the query over these versions; of an incremental model for the keys that may have changed
    audited     where there are expectations, before anything of it is published
    published   one commit; its metadata carries the positions of the tables that it was made from

Exactly once: what is published is a function of the pinned versions. A model whose tables have not moved gets no commit, and a
killed run leaves each model at its last commit, from which the next one goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_core import errors
from cdc_core.models import graph
from cdc_core.models import model as models
from cdc_core.properties import types as values
from cdc_core.silver import merge
from cdc_core.sql.names import identifier, literal
from cdc_core.stream import filters
from cdc_core.tables import layout as tables
from pipelines.bronze import collections as registry
from pipelines.delta import query_execution, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import changes, queries
from pipelines.gold.candidate import Audit, Candidate, unjudged
from pipelines.settings import file as settings_file
from pipelines.spark import failures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cdc_core.settings.parse import Settings

log = logging.getLogger(__name__)

PROPERTIES = {
    "delta.enableDeletionVectors": "false",
    "delta.enableTypeWidening": "false",
    "delta.columnMapping.mode": "none",
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}

UNPUBLISHED = (T.NullType, T.VariantType, T.CalendarIntervalType, T.DayTimeIntervalType, T.YearMonthIntervalType)


@dataclass(frozen=True)
class Planned:
    """What a run would do to one model: nothing, wait for a table that is not there yet, or make it, whole or for some keys."""

    name: str
    materialized: str
    reads: tuple[str, ...]
    would: str
    expectations: int = 0


@dataclass(frozen=True)
class ModelResult:
    """What one run did to one model: `did` is `whole`, `changed`, `view`, `nothing`, `waits` or `failed`."""

    name: str
    did: str
    rows: int
    version: int | None
    seconds: float


@dataclass(frozen=True)
class Result:
    """What one run did to all models."""

    made: int
    seconds: float
    models: tuple[ModelResult, ...] = ()


@dataclass(frozen=True)
class Source:
    """A table that models refer to, as it is while they are made.

    `at` says where its rows stand, whatever commits without rows came after; `version` is the one that is read, `id` tells
    the table from one that is made anew in its place.
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
        """What a model's commit says of it."""
        return {"id": self.id, "version": self.version, "at": self.at}


def read(settings: Settings) -> tuple[models.Model, ...]:
    """The models in the folder that the settings name, in the order of their names; none where they name none.

    Raises `SettingsError` with the mistakes of all files.
    """
    if settings.gold.models is None:
        return ()
    folder = Path(settings.gold.models)
    if not folder.is_dir():
        raise errors.SettingsError(
            errors.Problem("gold.models", f"there is no folder {folder}", "it holds a .sql file a model")
        )
    problems: list[errors.Problem] = []
    found: list[models.Model] = []
    for path in sorted(folder.rglob("*.sql")):
        with _gathered(problems):
            found.append(models.parse(path.stem, path.read_text("utf-8-sig"), where=str(path)))
    if problems:
        raise errors.SettingsError(problems)
    told = tuple(sorted(found, key=lambda each: each.name))
    for path in sorted([*folder.rglob("*.yml"), *folder.rglob("*.yaml")]):
        with _gathered(problems):
            told = models.described(told, settings_file.document(path), where=str(path))
    if problems:
        raise errors.SettingsError(problems)
    return told


@contextmanager
def _gathered(problems: list[errors.Problem]) -> Iterator[None]:
    try:
        yield
    except errors.SettingsError as error:
        problems += error.problems
    except UnicodeDecodeError:
        problems.append(errors.Problem("gold.models", "a file is not UTF-8"))


def known_collections(spark: SparkSession, settings: Settings) -> tuple[str, ...]:
    """The names that models may give to tables of collections: the captured ones, and the histories that are kept."""
    names = [str(each) for each in registry.read(spark, settings).namespaces]
    return (*names, *(f"{name}_history" for name in names if settings.silver.for_collection(name).history))


def ordered(spark: SparkSession, settings: Settings) -> tuple[models.Model, ...]:
    """The models in the order in which they are made; raises `SettingsError` with all that is wrong between them."""
    captured = filters.of(settings.source)

    def is_captured(name: str) -> bool:
        db, _, collection = name.partition(".")
        return bool(db and collection) and captured.includes(db, collection)

    found = read(settings)
    if not found:
        return ()
    known = known_collections(spark, settings)
    layout = delta.layout(settings.lakehouse)
    taken = {str(_of_collection(layout, name)): name for name in known}
    met = [each for each in found if str(layout.model(each.name)) in taken]
    if met:
        raise errors.SettingsError(
            [
                errors.Problem(
                    each.where, f"its table would be that of {taken[str(layout.model(each.name))]}", "rename the file"
                )
                for each in met
            ]
        )
    return graph.ordered(found, collections=known, is_captured=is_captured)


def check(spark: SparkSession, settings: Settings) -> tuple[Planned, ...]:
    """What a run would do, in its order, after each query was parsed and analysed over the tables that there are.

    Changes nothing. Raises `SettingsError` with the mistakes of all models.
    """
    run_ = _Run(spark, settings, unjudged, False, {})
    problems: list[errors.Problem] = []
    planned = []
    try:
        for model in ordered(spark, settings):
            with _gathered(problems):
                planned.append(run_.planned(model))
    finally:
        run_.close()
    if problems:
        raise errors.SettingsError(problems)
    return tuple(planned)


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    audit: Audit = unjudged,
    take_over: bool = False,
    is_anew: bool = False,
    pinned: Mapping[str, int] | None = None,
    stop: threading.Event | None = None,
) -> Result:
    """Bring every model to where the tables are that it refers to; `is_anew` makes each whole once more.

    `pinned` gives versions of collections' gold tables by their names; others are read as they are at the start. One model's
    failure stops those that refer to it and no other: the first one is raised when the others are done. Raises
    `SettingsError` for a query that is wrong, `GateFailed`, `DecisionNeeded` for one that fails over the rows, `TableOwned`,
    `LeaseHeld`, `CommitConflict`; a model that is refused keeps its last good version.
    """
    started = time.monotonic()
    refused: list[errors.MedallionError] = []
    failed: set[str] = set()
    found: list[ModelResult] = []
    run_ = _Run(spark, settings, audit, take_over, dict(pinned or {}), is_anew)
    try:
        for model in ordered(spark, settings):
            if stop is not None and stop.is_set():
                break
            if failed & set(model.names):
                failed.add(model.name)
                continue
            try:
                found.append(run_.made(model))
            except errors.MedallionError as error:
                refused.append(error)
                failed.add(model.name)
                found.append(ModelResult(model.name, "failed", 0, None, 0.0))
    finally:
        run_.close()
    if refused:
        raise joined(refused)
    made = sum(each.did in ("whole", "changed", "view") for each in found)
    return Result(made, time.monotonic() - started, tuple(found))


def joined(found: Sequence[errors.MedallionError]) -> errors.MedallionError:
    """One error for all; the first one's kind, with what the others say beneath."""
    if len(found) == 1:
        return found[0]
    if all(isinstance(each, errors.SettingsError) for each in found):
        return errors.SettingsError([problem for each in found for problem in getattr(each, "problems", ())])
    first = next((each for each in found if not isinstance(each, errors.SettingsError)), found[0])
    return type(first)("\n".join(str(each) for each in (first, *(each for each in found if each is not first))))


def _of_collection(layout: tables.Layout, name: str) -> tables.TableRef:
    """The gold table of a collection, or the history beside it, which has the name of a collection with an ending."""
    db, _, collection = name.partition(".")
    return layout.gold(db, collection)


@dataclass
class _Run:
    """The models of one run, with the versions that it reads and the claims that it holds."""

    spark: SparkSession
    settings: Settings
    audit: Audit
    take_over: bool
    pinned: dict[str, int]
    is_anew: bool = False
    sources: dict[str, Source | None] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)
    """The session's view of each model that has no table, or not yet the one that it would have."""
    below: dict[str, dict[str, object]] = field(default_factory=dict)
    """What these views stand on."""
    moved: set[str] = field(default_factory=set)
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)

    def close(self) -> None:
        """Drop the session's views of this run."""
        for view in self.views.values():
            self.spark.catalog.dropTempView(view)

    # --- what there is to do

    def planned(self, model: models.Model) -> Planned:
        """What a run would do; the query is analysed, over the queries of models that are not made yet."""
        missing = [name for name in model.names if name not in self.views and self._source(name) is None]
        if missing:
            self._parsed(model)
            would = f"wait for {', '.join(missing)}, which gold does not hold yet"
        else:
            frame = self._frame(model, self._relation)
            self._check_columns(model, frame)
            would = self._would(model)
            if model.name in self.moved or model.materialized is models.Materialized.VIEW:
                self._seen(model, frame)
        reads = tuple(f"{ref.name} by {', '.join(ref.key)}" if ref.key else ref.name for ref in model.refs)
        return Planned(model.name, model.materialized.value, reads, would)

    def _would(self, model: models.Model) -> str:
        if model.materialized is models.Materialized.VIEW:
            return "be a view" if self.layout.root is None else "be read by the models that refer to it"
        if self.moved & set(model.names):
            is_followed = any(ref.key and ref.name in self.moved for ref in model.refs)
            self.moved.add(model.name)
            if model.materialized is models.Materialized.INCREMENTAL and is_followed:
                return "take in the keys that change"
            return "be made whole"
        work = self._work(model)
        if work.kind != "nothing":
            self.moved.add(model.name)
        said = {
            "nothing": "stay: its tables have not moved",
            "whole": "be made whole",
            "changed": "take in the keys that changed",
        }
        return said[work.kind] + (f", because {work.why}" if work.why else "")

    def _work(self, model: models.Model) -> _Work:
        """How a model comes to where its tables are."""
        table = self.layout.model(model.name)
        to = {name: source.position for name in model.names if (source := self._source(name)) is not None}
        to |= {f"view {name}": self.below[name] for name in model.names if name in self.below}
        if not delta.exists(self.spark, table):
            return _Work("whole", to, {}, "it is not there yet")
        commit = table_history.position(self.spark, table)
        live = dict(commit.metadata or {}) if commit is not None else {}
        if self.is_anew:
            return _Work("whole", to, live, "that was asked")
        if live.get("model") != model.digest:
            return _Work("whole", to, live, "the model is another one")
        held = found if isinstance(found := live.get("to"), dict) else {}
        moved = [name for name in to if not _is_same(held.get(name), to[name])]
        if not moved and held.keys() == to.keys():
            return _Work("nothing", to, live)
        if model.materialized is not models.Materialized.INCREMENTAL:
            return _Work("whole", to, live)
        if held.keys() != to.keys():
            return _Work("whole", to, live, "it refers to other tables")
        keyed = {ref.name for ref in model.refs if ref.key}
        unkeyed = {ref.name for ref in model.refs if not ref.key} | {name for name in to if name.startswith("view ")}
        for name in moved:
            if name in unkeyed or name not in keyed:
                return _Work("whole", to, live, f"{name} changed, which it reads without a key")
            if held[name]["id"] != to[name]["id"] or held[name]["version"] > to[name]["version"]:
                return _Work("whole", to, live, f"{name} was made anew or pinned before")
        return _Work("changed", to, live, moved=tuple(moved))

    def _source(self, name: str) -> Source | None:
        """A table at the version that this run reads; None where there is none yet."""
        if name in self.views:
            return None
        if name not in self.sources:
            table = _of_collection(self.layout, name) if "." in name else self.layout.model(name)
            self.sources[name] = self._looked_at(name, table)
        return self.sources[name]

    def _looked_at(self, name: str, table: tables.TableRef) -> Source | None:
        if not delta.exists(self.spark, table):
            return None
        delta.check_ours(self.spark, table)
        version, at = self._stands(name, table)
        id_ = self.spark.sql(f"DESCRIBE DETAIL {table}").select("id").collect()[0].id
        return Source(name, table, version, id_, at)

    def _stands(self, name: str, table: tables.TableRef) -> tuple[int, str]:
        """The version that is read, and where its rows stand: what the last commit said that brought any.

        Claims and maintenance do not move a table; after a RESTORE only the version says where it is.
        """
        pinned = self.pinned.get(name)
        for limit in (30, None):
            found = table_history.commits(self.spark, table, limit=limit)
            version = found[0].version if pinned is None else pinned
            for commit in found:
                if commit.version > version:
                    continue
                if commit.restored is not None:
                    return version, f"version {version}"
                if commit.metadata is not None:
                    said = {each: commit.metadata.get(each) for each in ("to", "silver", "generation", "model")}
                    return version, hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=12).hexdigest()
        return version, f"version {version}"

    # --- queries

    def _relation(self, ref: models.Ref) -> str:
        if ref.name in self.views:
            return identifier(self.views[ref.name])
        source = self._source(ref.name)
        assert source is not None
        return source.relation

    def _parsed(self, model: models.Model) -> None:
        """Raise where the text is no query; its tables need not be there."""
        with suppress(queries.NotThere), queries.said(model, knows_missing=True):
            self.spark.sql(queries.one_query(model.query(lambda ref: "`not there yet`")))

    def _frame(self, model: models.Model, relation: Callable[[models.Ref], str]) -> DataFrame:
        with queries.said(model):
            return self.spark.sql(queries.one_query(model.query(relation)))

    def _check_columns(self, model: models.Model, frame: DataFrame) -> None:
        """Raise where columns cannot be published, or those that are named are not there."""
        problems = []
        names = frame.columns
        lowered = [name.lower() for name in names]
        for name in sorted({name for name in names if lowered.count(name.lower()) > 1}):
            problems.append(
                errors.Problem(model.where, f"the column {name} is there twice", "give one of them another name")
            )
        for each in frame.schema:
            if isinstance(each.dataType, UNPUBLISHED):
                told = each.dataType.simpleString()
                problems.append(
                    errors.Problem(model.where, f"the column {each.name} has the type {told}", "cast it to another one")
                )
        for name in (*model.unique_key, *(name for name, _ in model.columns)):
            if name not in names:
                near = values.did_you_mean(name, names) or f"it has {', '.join(names[:20])}"
                problems.append(errors.Problem(model.where, f"the model has no column {name}", near))
        for ref in model.refs:
            if ref.key:
                present = self.spark.sql(f"SELECT * FROM {self._relation(ref)}").columns
                for name in ref.key:
                    if name not in present:
                        near = values.did_you_mean(name, present) or f"it has {', '.join(present[:20])}"
                        problems.append(errors.Problem(model.where, f"key: {ref.name} has no column {name}", near))
        if problems:
            raise errors.SettingsError(problems)

    def _seen(self, model: models.Model, frame: DataFrame) -> None:
        """The model's query for those that refer to it in this run."""
        view = f"model_{model.name}_{self.nonce}"
        frame.createOrReplaceTempView(view)
        self.views[model.name] = view
        stands = {name: source.position for name in model.names if (source := self._source(name)) is not None}
        views = {f"view {name}": self.below[name] for name in model.names if name in self.below}
        self.below[model.name] = {"model": model.digest, **stands, **views}

    # --- doing it

    def made(self, model: models.Model) -> ModelResult:
        """One model, brought to where its tables are."""
        started = time.monotonic()
        if any(name not in self.views and self._source(name) is None for name in model.names):
            self._parsed(model)
            return ModelResult(model.name, "waits", 0, None, time.monotonic() - started)
        whole = self._frame(model, self._relation)
        self._check_columns(model, whole)
        if model.materialized is models.Materialized.VIEW:
            did, rows, version = self._viewed(model, whole)
        else:
            did, rows, version = self._written(model, whole)
        return ModelResult(model.name, did, rows, version, time.monotonic() - started)

    def _viewed(self, model: models.Model, frame: DataFrame) -> tuple[str, int, int | None]:
        """A view: in a catalog one that readers have too, elsewhere the query for the models that refer to it."""
        table = self.layout.model(model.name)
        self.audit(self.spark, Candidate(model.name, table, lambda: frame))
        self._seen(model, frame)
        if self.layout.root is not None:
            return "view", 0, None
        query = model.query(
            lambda ref: str(_of_collection(self.layout, ref.name) if ref.is_collection else self.layout.model(ref.name))
        )
        columns = ", ".join(
            f"{identifier(name)} COMMENT {literal(dict(model.columns).get(name, ''))}" for name in frame.columns
        )
        with queries.said(model):
            self.spark.sql(f"CREATE OR REPLACE VIEW {table} ({columns}) COMMENT {literal(model.description)} AS {query}")
        return "view", 0, None

    def _written(self, model: models.Model, whole: DataFrame) -> tuple[str, int, int | None]:
        work = self._work(model)
        if work.kind == "nothing":
            return "nothing", 0, None
        table = self.layout.model(model.name)
        columns = [F.col(identifier(name)).alias(name, metadata=_metadata(model, name)) for name in whole.columns]
        writer = Writer.claim(self.spark, table, take_over=self.take_over) if delta.exists(self.spark, table) else None
        try:
            if writer is not None:
                work = self._work(model)  # as the claim found it: another run may have moved it on meanwhile
                if work.kind == "nothing":
                    return "nothing", 0, None
            with queries.failing(model):
                if work.kind == "changed" and writer is not None and _fits(self.spark, table, whole):
                    keys = self._affected(model, work)
                    if keys is not None:
                        return "changed", *self._merged(model, work, writer, keys)
                return "whole", *self._replaced(model, work, writer, whole.select(*columns))
        finally:
            self.sources.pop(model.name, None)  # those that refer to it read what it is now
            if writer is not None:
                with suppress(errors.MedallionError):
                    writer.release()

    def _replaced(self, model: models.Model, work: _Work, writer: Writer | None, frame: DataFrame) -> tuple[int, int | None]:
        """Replace the rows by those of the query, after they were judged; their number, and the version."""
        table = self.layout.model(model.name)
        rows = query_execution.computed(frame)
        try:
            self._check_unique(model, rows)
            said = self.audit(self.spark, Candidate(model.name, table, lambda: rows, keys=model.unique_key, live=work.live))
            owner = writer
            if owner is None:
                ddl = ", ".join(f"{identifier(each.name)} {merge.ddl(each.dataType)}" for each in frame.schema)
                delta.create(self.spark, table, columns=ddl, properties=PROPERTIES)
                owner = Writer.claim(self.spark, table, take_over=self.take_over)
            try:
                if model.description != self._description(table):
                    owner.alter(f"SET TBLPROPERTIES ('comment' = {literal(model.description)})")
                version = owner.overwrite(
                    rows.select(
                        *(F.col(identifier(name)).alias(name, metadata=_metadata(model, name)) for name in rows.columns)
                    ),
                    to=work.to,
                    extra={**said, "model": model.digest},
                    overwrite_schema=True,
                )
            finally:
                if writer is None:
                    with suppress(errors.MedallionError):
                        owner.release()
            return rows.count(), version
        finally:
            query_execution.release(rows)

    def _description(self, table: tables.TableRef) -> str:
        return self.spark.sql(f"DESCRIBE DETAIL {table}").select("description").collect()[0].description or ""

    def _merged(self, model: models.Model, work: _Work, writer: Writer, keys: DataFrame) -> tuple[int, int | None]:
        """Put the rows of the keys that may have changed in the place of those that are there; how many keys."""
        affected = f"keys_{model.name}_{self.nonce}"
        source = f"rows_{model.name}_{self.nonce}"
        keys.createOrReplaceTempView(affected)
        rows = query_execution.computed(self._frame(model, lambda ref: self._restricted(model, ref, affected)))
        try:
            self._check_unique(model, rows)
            live = self.spark.table(str(writer.table))
            same = [F.col(f"l.{identifier(name)}").eqNullSafe(F.col(f"k.{identifier(name)}")) for name in model.unique_key]
            staying = live.alias("l").join(keys.alias("k"), _all(same), "left_anti")
            whole = staying.unionByName(rows)
            said = self.audit(
                self.spark, Candidate(model.name, writer.table, lambda: whole, rows, keys=model.unique_key, live=work.live)
            )
            extra = {**said, "model": model.digest}
            gone = keys.alias("k").join(rows.alias("l"), _all(same), "left_anti").withColumn("__gone", F.lit(True))
            rows.withColumn("__gone", F.lit(False)).unionByName(gone, allowMissingColumns=True).createOrReplaceTempView(
                source
            )
            version = writer.merge(
                _statement(str(writer.table), source, rows.columns, model.unique_key), to=work.to, extra=extra
            )
            return keys.count(), version
        finally:
            query_execution.release(rows)
            for view in (affected, source):
                self.spark.catalog.dropTempView(view)

    def _restricted(self, model: models.Model, ref: models.Ref, affected: str) -> str:
        """A table with a key, of which the rows of the affected keys are read; one without, whole."""
        if not ref.key:
            return self._relation(ref)
        on = " AND ".join(f"r.{identifier(of)} <=> k.{identifier(to)}" for of, to in zip(ref.key, model.unique_key))
        return f"(SELECT r.* FROM {self._relation(ref)} AS r LEFT SEMI JOIN {identifier(affected)} AS k ON {on})"

    def _affected(self, model: models.Model, work: _Work) -> DataFrame | None:
        """The keys of the rows that changed, as they were and as they are; None where an older version cannot be read any more."""
        held: dict[str, Any] = work.live["to"]
        found: DataFrame | None = None
        try:
            for ref in model.refs:
                if ref.name not in work.moved or not ref.key:
                    continue
                source = self._source(ref.name)
                assert source is not None
                keys = changes.changed_keys(self.spark, source.table, held[ref.name]["version"], source.version, ref.key)
                named = keys.toDF(*model.unique_key)
                found = named if found is None else found.unionByName(named)
            assert found is not None
            return query_execution.computed(found.distinct())
        except (PySparkException, Py4JJavaError, errors.CommitConflict) as error:
            told = failures.condition(error) or type(error).__name__
            log.info("%s is made whole: what changed cannot be told (%s)", model.name, told)
            return None

    def _check_unique(self, model: models.Model, rows: DataFrame) -> None:
        if not model.unique_key:
            return
        repeated = rows.groupBy(*map(identifier, model.unique_key)).count().where("`count` > 1").count()
        if repeated:
            raise errors.DecisionNeeded(
                f"{model.where}: unique_key {', '.join(model.unique_key)} is not unique: {repeated} keys are there more than once. "
                "Nothing of it was published; group by it, or name the columns that tell the rows apart"
            )


@dataclass(frozen=True)
class _Work:
    """How a model comes to the positions `to`: `nothing`, `whole`, or `changed` for what `moved`."""

    kind: str
    to: dict[str, Any]
    live: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    moved: tuple[str, ...] = ()


def _is_same(held: object, now: object) -> bool:
    """Whether a table, or what a view stands on, is where it was: its version may be another one, where commits brought no rows."""
    if not isinstance(held, dict) or not isinstance(now, dict) or held.keys() != now.keys():
        return held == now
    names = ("id", "at") if "at" in now else now.keys()
    return all(_is_same(held[name], now[name]) for name in names)


def _all(conditions: Sequence[Any]) -> Any:
    found = conditions[0]
    for each in conditions[1:]:
        found = found & each
    return found


def _metadata(model: models.Model, name: str) -> dict[str, str]:
    comment = dict(model.columns).get(name, "")
    return {"comment": comment} if comment else {}


def _fits(spark: SparkSession, table: tables.TableRef, frame: DataFrame) -> bool:
    """Whether the table has the query's columns."""
    present = {each.name: each.dataType for each in spark.table(str(table)).schema}
    wanted = {each.name: each.dataType for each in frame.schema}
    return present.keys() == wanted.keys() and all(merge.is_same(present[name], wanted[name]) for name in wanted)


def _statement(target: str, source: str, columns: Sequence[str], keys: Sequence[str]) -> str:
    """The MERGE of the keys that may have changed."""
    on = " AND ".join(f"t.{identifier(name)} <=> s.{identifier(name)}" for name in keys)
    names = ", ".join(map(identifier, columns))
    inserted = ", ".join(f"s.{identifier(name)}" for name in columns)
    assigned = ", ".join(f"t.{identifier(name)} = s.{identifier(name)}" for name in columns)
    return (
        f"MERGE INTO {target} AS t USING {identifier(source)} AS s ON {on}\n"
        f"WHEN MATCHED AND s.`__gone` THEN DELETE\n"
        f"WHEN MATCHED THEN UPDATE SET {assigned}\n"
        f"WHEN NOT MATCHED AND NOT s.`__gone` THEN INSERT ({names}) VALUES ({inserted})"
    )
