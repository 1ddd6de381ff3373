"""SQL models over gold: each a table, a view, or a table that is updated by keys (incremental).

    read        the files of the folder that the settings name, with the descriptions beside them
    ordered     by their references; a missing reference, or a circle of references, is refused by name
    pinned      each table that is referred to, at one version for the whole run (`model_inputs`)
    candidate   the query over these versions; for an incremental model only the keys that may have changed (`model_table`)
    audited     if there are expectations, before anything is published
    published   one commit, with the positions of the input tables in its metadata

Exactly once: the rows are a function of the pinned versions. A model whose tables have not changed gets no commit, and a killed run leaves
each model at its last commit, from which the next run continues.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from cdc_core import errors
from cdc_core.models import graph, sql_model
from cdc_core.properties import types as values
from cdc_core.settings.parse import Settings
from cdc_core.sql.names import identifier, literal
from cdc_core.stream import filters
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta import tables as delta
from pipelines.gold import model_table, queries
from pipelines.gold.candidate import Audit, Candidate, no_audit, selected
from pipelines.gold.model_inputs import ModelInputs, collection_table
from pipelines.settings import file as settings_file
from pipelines.spark import failures as spark_failures
from pipelines.spark import session as sparks
from pipelines.work_progress import WorkCounter, WorkProgress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """What a run would do to one model, in words: nothing, wait for a missing table, or make it, whole or for some keys."""

    name: str
    materialized: str
    reads: tuple[str, ...]
    would: str
    expectations: int = 0


@dataclass(frozen=True)
class ModelResult:
    """The result of one run for one model: `did` is `whole`, `changed`, `view`, `nothing`, `waits` or `failed`."""

    name: str
    did: str
    rows: int
    version: int | None
    seconds: float


@dataclass(frozen=True)
class ModelsResult:
    """The result of one run for all models."""

    made: int
    seconds: float
    models: tuple[ModelResult, ...] = ()


@dataclass(frozen=True)
class ModelVerdict:
    """The last verdict on a model: it was refused, or, as a view, accepted, at these positions of its tables.

    `view` identifies the view that this process made in a catalog (`_ViewDefinition`).
    """

    made_from: Mapping[str, object]
    is_refused: bool = False
    view: _ViewDefinition | None = None


@dataclass(frozen=True)
class _ViewDefinition:
    """The statement that made a view, the types of its columns, and how the catalog describes it."""

    statement: str
    schema: str
    described: tuple[tuple[object, ...], ...] | None

    @staticmethod
    def of(spark: SparkSession, table: tables.TableRef, statement: str, schema: str) -> _ViewDefinition:
        """A view with what the catalog describes now: nothing where there is no such view."""
        try:
            rows = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
        except AnalysisException:
            return _ViewDefinition(statement, schema, None)
        return _ViewDefinition(statement, schema, tuple(map(tuple, rows)))

    def has_query(self, query: str) -> bool:
        """Whether the catalog has a view of this query; Spark leaves out comments before and after it."""
        texts = [str(row[1]) for row in self.described or () if row[0] == "View Text"]
        return sql_model.without_comments(query) in map(sql_model.without_comments, texts)


@dataclass(frozen=True)
class ModelFiles:
    """The models whose files could be read, ordered by name, the names of the others, and all mistakes.

    If a file of descriptions is wrong, no model counts as read: the models that it describes would lose their comments.
    """

    models: tuple[sql_model.Model, ...] = ()
    unread: tuple[str, ...] = ()
    problems: tuple[errors.Problem, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, also of unreadable ones."""
        return (*(each.name for each in self.models), *self.unread)

    def check(self) -> None:
        """Raise `SettingsError` with the mistakes of all files."""
        if self.problems:
            raise errors.SettingsError(list(self.problems))


def files(settings: Settings) -> ModelFiles:
    """The models in the folder of the settings; none without such a setting.

    Raises `SettingsError` if the folder does not exist.
    """
    if settings.gold.models is None:
        return ModelFiles()
    folder = Path(settings.gold.models)
    if not os.path.isdir(folder):
        raise errors.SettingsError(
            errors.Problem(
                "gold.models",
                f"there is no folder {folder}, or it cannot be looked into",
                "it must contain one .sql file per model",
            )
        )
    problems: list[errors.Problem] = []
    models: list[sql_model.Model] = []
    paths = settings_file.below(folder, ".sql")
    for path in paths:
        with _gathered(problems):
            models.append(sql_model.parse(path.stem, settings_file.content(path), where=str(path)))
    unread = tuple(path.stem for path in paths if str(path) not in {each.where for each in models})
    # After all queries: a description may be in a file before or after that of its model.
    described = tuple(sorted(models, key=lambda each: each.name))
    description_problems: list[errors.Problem] = []
    for path in settings_file.below(folder, ".yml", ".yaml"):
        with _gathered(description_problems):
            described = sql_model.described(described, settings_file.document(path), unread=unread, where=str(path))
    if description_problems:
        return ModelFiles((), tuple(path.stem for path in paths), (*problems, *description_problems))
    return ModelFiles(described, unread, tuple(problems))


@contextmanager
def _gathered(problems: list[errors.Problem]) -> Iterator[None]:
    """Adds the mistakes of a `SettingsError` to the problems instead of raising it, so that a user sees those of all files at once."""
    try:
        yield
    except errors.SettingsError as error:
        problems += error.problems


def known_collections(spark: SparkSession, settings: Settings) -> tuple[str, ...]:
    """The collections' tables that models may refer to: those of documents, and histories that are switched on."""
    names = [str(each) for each in registry.read(spark, settings).namespaces]
    return (*names, *(f"{name}_history" for name in names if settings.silver.for_collection(name).history))


def ordered(spark: SparkSession | None, settings: Settings) -> graph.Order:
    """The models in the order in which they are made, and all mistakes in and between their files.

    Without `spark` no table is read: which collections silver has is then unknown, and a model may refer to any.

    Raises `SettingsError` if the folder does not exist.
    """
    source_filter = filters.of(settings.source)

    def is_captured(name: str) -> bool:
        db, _, collection = name.partition(".")
        base = collection.removesuffix("_history")
        is_history = base != collection and settings.silver.for_collection(f"{db}.{base}").history
        return bool(db and collection) and (
            spark is None or source_filter.includes(db, collection) or (is_history and source_filter.includes(db, base))
        )

    model_files = files(settings)
    if not model_files.models:
        return graph.Order((), model_files.problems)
    collections = () if spark is None else known_collections(spark, settings)
    layout = delta.layout(settings.lakehouse)
    by_key = {collection_table(layout, name).key: name for name in collections}
    owners = {each.name: by_key.get(layout.model(each.name).key) for each in model_files.models}
    order = graph.ordered(
        model_files.models,
        collections=collections,
        is_captured=is_captured,
        unread=model_files.unread,
        table_owners={name: owner for name, owner in owners.items() if owner is not None},
    )
    return graph.Order(order.models, (*model_files.problems, *order.problems))


def check(spark: SparkSession, settings: Settings) -> tuple[ModelPlan, ...]:
    """What a run would do to each model, in its order, after analysing each query over the existing tables; changes nothing.

    Raises `SettingsError` with the mistakes of all models, or `TableNotOurs` with these and what is in a model's place.
    """
    inputs = ModelInputs(spark, delta.layout(settings.lakehouse), {}, settings.name)
    dry_run = _DryRun(spark, inputs, known_collections(spark, settings))
    order = ordered(spark, settings)
    failures: list[Exception] = [errors.SettingsError(list(order.problems))] if order.problems else []
    plans = []
    try:
        for model in order.models:
            try:
                plans.append(dry_run.planned(model))
            except (errors.SettingsError, errors.TableNotOurs) as error:
                failures.append(error)
    finally:
        inputs.close()
    if failures:
        raise joined(failures)
    return tuple(plans)


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    audit: Audit = no_audit,
    take_over: bool = False,
    is_anew: bool = False,
    pinned: Mapping[str, int] | None = None,
    judged: dict[str, ModelVerdict] | None = None,
    switched: set[str] | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[WorkProgress], None] | None = None,
) -> ModelsResult:
    """Bring every model up to date with the tables that it refers to; `is_anew` makes all of them whole.

    `pinned` gives versions of collections' gold tables by name; others are read at their newest version. A service passes the same `judged`
    and `switched` to each run: refused models, and views, are not audited again while their tables stay the same, and the setting for
    deletion vectors is applied once to a model without changes. A model that fails, or has a mistake in its file, stops only the models
    that refer to it, and is raised at the end: `SettingsError` for a wrong query, `GateFailed`, `DecisionNeeded` for a query that fails on
    these rows, `TableOwned`, `LeaseHeld`, `CommitConflict`. A refused model keeps its last good version.
    """
    started = time.monotonic()
    order = ordered(spark, settings)
    failures: list[Exception] = [errors.SettingsError(list(order.problems))] if order.problems else []
    failed_names: set[str] = set()
    results: list[ModelResult] = []
    inputs = ModelInputs(spark, delta.layout(settings.lakehouse), dict(pinned or {}), settings.name)
    verdicts, switched = {} if judged is None else judged, set() if switched is None else switched
    run_ = _ModelsRun(spark, inputs, audit, take_over, is_anew, verdicts, switched, settings.gold.deletion_vectors)
    try:
        for model in WorkCounter("models", progress).each(order.models):
            if stop is not None and stop.is_set():
                break
            if failed_names & set(
                model.names
            ):  # nothing is made from a model that failed, or from one that was skipped for it
                failed_names.add(model.name)
                continue
            try:
                verdict = run_.verdict(model)
                if verdict is not None and verdict.is_refused:
                    failed_names.add(model.name)
                    results.append(ModelResult(model.name, "failed", 0, None, 0.0))
                    continue
                results.append(run_.made(model))
            except Exception as error:
                failure = spark_failures.translated(error) or error
                if isinstance(failure, errors.SparkLost) or sparks.is_cancelling():
                    raise
                if isinstance(failure, errors.MedallionError):
                    run_.note_refusal(model, failure)
                failures.append(failure)
                failed_names.add(model.name)
                results.append(ModelResult(model.name, "failed", 0, None, 0.0))
    finally:
        inputs.close()
    if failures:
        joined_error, worst = joined(failures), errors.worst(failures)
        raise joined_error from (None if joined_error is worst else worst)
    made_count = sum(each.did in ("whole", "changed", "view") for each in results)
    return ModelsResult(made_count, time.monotonic() - started, tuple(results))


def joined(failures: Sequence[Exception]) -> errors.MedallionError:
    """One error with the messages of all.

    Its class, which determines the exit code, is that of the worst one (`errors.worst`); a bug becomes a `MedallionError`.
    """
    if len(failures) == 1 and isinstance(failures[0], errors.MedallionError):
        return failures[0]
    if all(isinstance(each, errors.SettingsError) for each in failures):
        return errors.SettingsError([problem for each in failures for problem in getattr(each, "problems", ())])
    worst = errors.worst(failures)
    message = "\n".join(errors.message_of(each) for each in (worst, *(each for each in failures if each is not worst)))
    if isinstance(worst, errors.CollectionsFailed):
        return errors.CollectionsFailed(message, worst.exit_code)
    return type(worst)(message) if isinstance(worst, errors.MedallionError) else errors.MedallionError(message)


@dataclass
class _DryRun:
    """A dry run over the models; `moved` are those of which a run would publish a new version."""

    spark: SparkSession
    inputs: ModelInputs
    known: tuple[str, ...] = ()
    moved: set[str] = field(default_factory=set)

    def _with_nearest(self, name: str) -> str:
        """A name that is missing in gold, with similar names if it is unknown and may be mistyped."""
        hint = "" if name in self.known else values.did_you_mean(name, self.known)
        return f"{name} ({hint})" if hint else name

    def planned(self, model: sql_model.Model) -> ModelPlan:
        """What a run would do to one model; its query is analysed, over the queries of models without a table."""
        missing = list(self.inputs.missing(model))
        if missing:
            queries.check_syntax(self.spark, model)
            would = f"wait for {', '.join(map(self._with_nearest, missing))}, which gold does not hold yet"
        else:
            frame = queries.frame(self.spark, model, self.inputs.relation)
            queries.check(self.spark, model, frame, self.inputs.relation)
            _check_no_table(self.spark, model, self.inputs.layout.model(model.name))
            _check_no_view(self.spark, model, self.inputs)
            would = self._would(model)
            if model.name in self.moved or model.materialized is sql_model.Materialization.VIEW:
                self.inputs.add_view(model, frame)
        reads = tuple(f"{ref.name} by {', '.join(ref.key)}" if ref.key else ref.name for ref in model.refs)
        return ModelPlan(model.name, model.materialized.value, reads, would)

    def _would(self, model: sql_model.Model) -> str:
        if model.materialized is sql_model.Materialization.VIEW:
            return "be a view" if self.inputs.layout.root is None else "be read by the models that refer to it"
        if self.moved & set(model.names):
            is_followed = any(ref.key and ref.name in self.moved for ref in model.refs)
            self.moved.add(model.name)
            if model.materialized is sql_model.Materialization.INCREMENTAL and is_followed:
                return "take in the keys that change"
            return "be made whole"
        work = model_table.ModelTable(self.spark, model, self.inputs, no_audit).work()
        if work.kind != "nothing":
            self.moved.add(model.name)
        actions = {
            "nothing": "stay: its tables have not moved",
            "whole": "be made whole",
            "changed": "take in the keys that changed",
        }
        return actions[work.kind] + (f", because {work.why}" if work.why else "")


def _check_no_table(spark: SparkSession, model: sql_model.Model, table: tables.TableRef) -> None:
    """Raise `SettingsError` if a view has a former table: its readers would get rows that are not updated; `TableNotOurs` if the table is
    another project's."""
    if model.materialized is sql_model.Materialization.VIEW and delta.exists(spark, table):
        delta.check_ours(spark, table)
        how = f"DROP TABLE {table}" if table.path is None else f"remove the folder {table.path}"
        message = "it is a view now, but its former table still exists, with the rows of its last run"
        raise errors.SettingsError(errors.Problem(model.where, message, how))


def _check_no_view(spark: SparkSession, model: sql_model.Model, inputs: ModelInputs) -> None:
    """Raise `TableNotOurs` if the catalog has a view in the model's place that no model of the pipeline made."""
    table = inputs.layout.model(model.name)
    if table.path is None and not delta.exists(spark, table):
        is_view = model.materialized is sql_model.Materialization.VIEW
        view = _ViewDefinition.of(spark, table, "", "")
        has_its_query = is_view and view.has_query(_query_in_catalog(model, inputs.layout))
        model_table.check_view(spark, table, inputs.pipeline, has_its_query=has_its_query)


def _query_in_catalog(model: sql_model.Model, layout: tables.Layout) -> str:
    """The query over the tables' and views' names, without versions."""
    return model.query(lambda ref: str(collection_table(layout, ref.name) if ref.is_collection else layout.model(ref.name)))


@dataclass(frozen=True)
class _ModelsRun:
    """One run over the models."""

    spark: SparkSession
    inputs: ModelInputs
    audit: Audit
    take_over: bool
    is_anew: bool
    judged: dict[str, ModelVerdict]
    switched: set[str]
    deletion_vectors: bool | None = None

    def verdict(self, model: sql_model.Model) -> ModelVerdict | None:
        """The last verdict, if the model's query and input rows are still the same."""
        verdict = self.judged.get(model.name)
        return verdict if verdict is not None and model_table.is_same(verdict.made_from, self._made_from(model)) else None

    def _made_from(self, model: sql_model.Model) -> dict[str, object]:
        # Refusals of a table in the model's place ask for its removal, which moves none of the positions.
        has_table = delta.exists(self.spark, self.inputs.layout.model(model.name))
        return {"the query": model.digest, "a table in its place": has_table, **self.inputs.positions(model)}

    def note_refusal(self, model: sql_model.Model, error: errors.MedallionError) -> None:
        """Remember a refusal that is due to the rows or the query; other errors may have passed in the next run."""
        if isinstance(error, (errors.GateFailed, errors.SettingsError)) or type(error) is errors.DecisionNeeded:
            # Its tables are read: where that is what failed, it fails again, and the other models are still to be made.
            with suppress(Exception):
                self.judged[model.name] = ModelVerdict(self._made_from(model), is_refused=True)

    def made(self, model: sql_model.Model) -> ModelResult:
        """Publish one model from the pinned versions of its tables."""
        started = time.monotonic()
        if list(self.inputs.missing(model)):  # as a list: all of them are read, so that errors are raised here
            queries.check_syntax(self.spark, model)
            return ModelResult(model.name, "waits", 0, None, time.monotonic() - started)
        is_view = model.materialized is sql_model.Materialization.VIEW
        table = model_table.ModelTable(
            self.spark, model, self.inputs, self.audit, self.take_over, self.is_anew, self.deletion_vectors
        )
        # Before Spark analyses the query: the result of nearly every run in a service.
        if not is_view and table.work().kind == "nothing":
            if model.name not in self.switched:
                self.switched.add(model.name)  # before: a failure is told once, and the model is as good as it was
                table.switch_vectors()
            return ModelResult(model.name, "nothing", 0, None, time.monotonic() - started)
        frame = queries.frame(self.spark, model, self.inputs.relation)
        queries.check(self.spark, model, frame, self.inputs.relation)
        did, rows, version = self._viewed(model, frame) if is_view else table.written(frame)
        return ModelResult(model.name, did, rows, version, time.monotonic() - started)

    def _viewed(self, model: sql_model.Model, frame: DataFrame) -> tuple[str, int, int | None]:
        """Create the view in the catalog; without a catalog only the models that refer to it can read it."""
        table = self.inputs.layout.model(model.name)
        _check_no_table(self.spark, model, table)
        verdict, earlier = self.verdict(model), self.judged.get(model.name)
        # Audited before any model or reader can see it.
        if verdict is None:
            self.audit(self.spark, Candidate(model.name, table, functools.partial(selected, frame)))
            verdict = ModelVerdict(self._made_from(model), view=None if earlier is None else earlier.view)
            self.judged[model.name] = verdict
        self.inputs.add_view(model, frame)
        if self.inputs.layout.root is not None:
            return "view", 0, None
        query = _query_in_catalog(model, self.inputs.layout)
        columns = ", ".join(
            f"{identifier(name)} COMMENT {literal(dict(model.columns).get(name, ''))}" for name in frame.columns
        )
        owner = f"{literal(model_table.view_owner(self.inputs.pipeline))} = 'true'"
        statement = f"CREATE OR REPLACE VIEW {table} ({columns}) COMMENT {literal(model.description)} TBLPROPERTIES ({owner}) AS {query}"
        # Not in each round of a service: a catalog notes each time that the view is another one.
        view = _ViewDefinition.of(self.spark, table, statement, frame.schema.json())
        if view.described is None or view != verdict.view:
            model_table.check_view(self.spark, table, self.inputs.pipeline, has_its_query=view.has_query(query))
            with queries.errors_of_file(model):
                self.spark.sql(statement)
            view = _ViewDefinition.of(self.spark, table, statement, frame.schema.json())
            self.judged[model.name] = replace(verdict, view=view)
        return "view", 0, None
