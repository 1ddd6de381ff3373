"""Publishes gold as a whole: current documents and models, each audited first."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.models import sql_model
from cdc_core.settings.parse import Settings
from cdc_core.stream import filters
from pipelines import standstill
from pipelines.bronze import registry
from pipelines.delta import query_execution
from pipelines.gold import expectations, models
from pipelines.gold import run as gold
from pipelines.new_commits import NewCommits
from pipelines.spark import failures as spark_failures
from pipelines.spark import parallel
from pipelines.spark import session as sparks
from pipelines.work_progress import WorkProgress

MODELS_PAUSE_SECONDS = 10.0
"""The pause of a service between two runs of the models."""


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    once: bool = True,
    take_over: bool = False,
    only_models: bool = False,
    is_anew: bool = False,
    sessions: parallel.Sessions | None = None,
    stop: threading.Event | None = None,
    silver_news: NewCommits | None = None,
    audit: expectations.Gate | None = None,
    progress: Callable[[WorkProgress], None] | None = None,
) -> dict[str, object]:
    """Publish documents, and models if the settings name a folder; returns the results under `gold` and `models`.

    Without `once`, a thread makes the models while documents are published. A table that is refused by its expectations does not stop other
    tables: `GateFailed` is raised at the end. A service that is already running passes its gate as `audit`, so that mistakes made in files
    since then do not end it.
    """
    if only_models and settings.gold.models is None:
        raise errors.SettingsError(errors.Problem("gold.models", "not set", "for example models: conf/models"))
    # A single run reports mistakes in models at its end; a service is refused at its start, while somebody is watching.
    if audit is None:
        audit = _gate(spark, settings, models.files(settings)) if once else gate(spark, settings)
    stop_event = stop or threading.Event()
    results: dict[str, object] = {}
    failures: list[Exception] = []

    def made() -> None:
        if settings.gold.models is not None and not (once and stop_event.is_set()):
            results["models"] = models.run(
                spark, settings, audit=audit, take_over=take_over, is_anew=is_anew, stop=stop_event, progress=progress
            )

    def note(error: Exception) -> None:
        """Keep the error until everything else is done; if Spark is lost, raise it."""
        if isinstance(spark_failures.translated(error), errors.SparkLost):
            raise error
        failures.append(error)

    if only_models:
        made()
        return results
    models_thread = None
    if not once and settings.gold.models is not None:
        query_execution.share(spark)
        models_thread = _ModelsThread(spark, settings, audit, take_over, stop_event, sessions)
    try:
        results["gold"] = gold.run(
            spark,
            settings,
            once=once,
            take_over=take_over,
            sessions=sessions,
            stop=stop_event if models_thread is None else models_thread.stop,
            audit=audit,
            silver_news=silver_news,
            progress=progress,
        )
    except Exception as error:  # of the gate or of collections, also a bug: models are made from the others
        note(error)
    finally:
        if models_thread is not None:
            models_thread.close()
    if models_thread is not None and models_thread.lost is not None:
        raise models_thread.lost
    if once:
        try:
            made()
        except Exception as error:
            note(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        causes = [spark_failures.translated(each) or each for each in failures]
        raise models.joined(causes) from errors.worst(causes)
    return results


def gate(spark: SparkSession, settings: Settings) -> expectations.Gate:
    """The gate with the suites of the settings, after the files of both folders were checked.

    Raises `SettingsError` with all mistakes in them, such as a suite for a table that does not exist.
    """
    model_files = models.files(settings)
    model_files.check()
    return _gate(spark, settings, model_files)


def _gate(spark: SparkSession, settings: Settings, model_files: models.ModelFiles) -> expectations.Gate:
    audit = expectations.Gate.of(settings)
    if settings.lakehouse.root is None:
        expectations.check_views(
            tuple(audit.suites.values()),
            views={each.name for each in model_files.models if each.materialized is sql_model.Materialization.VIEW},
        )
    if audit.suites:
        source_filter = filters.of(settings.source)
        table_names = [*map(str, registry.read(spark, settings).namespaces), *model_files.names]
        expectations.check_tables(
            tuple(audit.suites.values()),
            known=table_names,
            is_captured=lambda name: "." in name and source_filter.includes(*name.split(".", 1)),
            histories={name for name in models.known_collections(spark, settings) if name not in table_names},
        )
    return audit


class _ModelsThread(threading.Thread):
    """Makes models while documents are published: a model may take minutes, but documents should be seconds old.

    Refusals and failures are logged once, and tried again in the next run.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        audit: expectations.Gate,
        take_over: bool,
        stop: threading.Event,
        sessions: parallel.Sessions | None,
    ) -> None:
        super().__init__(name="gold-models", daemon=True)
        self.spark = sessions() if sessions is not None else spark
        self.settings, self.audit, self.take_over = settings, audit, take_over
        self.ended = threading.Event()
        self.stop = standstill.Either(stop, self.ended)
        self.judged: dict[str, models.ModelVerdict] = {}
        self.switched: set[str] = set()
        self.lost: errors.SparkLost | None = None
        """Set if Spark was lost, which publishing documents without queries may not notice."""
        self.start()

    def run(self) -> None:
        message = ""
        while not self.stop.is_set():
            try:
                models.run(
                    self.spark,
                    self.settings,
                    audit=self.audit,
                    take_over=self.take_over,
                    judged=self.judged,
                    switched=self.switched,
                    stop=self.stop,
                )
                message = ""
            except Exception as error:  # such as a file that is being replaced: the next run tries again
                failure = spark_failures.translated(error) or error
                if isinstance(failure, errors.SparkLost):
                    self.lost = failure
                    self.ended.set()
                    return
                if sparks.is_cancelling():  # by the stop: the model has no mistake
                    models.log.info("models: unfinished work was abandoned; the next start repeats it")
                    return
                last_message, message = message, errors.message_of(failure)
                for line in message.splitlines() if message != last_message else ():  # not the same error every few seconds
                    models.log.warning("%s", line)
            self.take_over = False  # it covers owners at the start only
            # Not woken by new documents: a model over many tables would be made again for each of them.
            self.ended.wait(MODELS_PAUSE_SECONDS)

    def close(self) -> None:
        """End the thread, and wait for the model that is being made."""
        self.ended.set()
        self.join()


def checked(spark: SparkSession, settings: Settings) -> tuple[models.ModelPlan, ...]:
    """What a run would do to each model, with the number of its expectations; changes nothing.

    Raises `SettingsError` with all mistakes of both folders.
    """
    problems: list[errors.Problem] = []
    plans: tuple[models.ModelPlan, ...] = ()
    counts: Counter[str] = Counter()
    try:
        counts.update(
            {name: len(each.expectations) for name, each in _gate(spark, settings, models.files(settings)).suites.items()}
        )
    except errors.SettingsError as error:
        problems += error.problems
    try:
        plans = models.check(spark, settings)
    except errors.SettingsError as error:
        problems += [each for each in error.problems if each not in problems]
    if problems:
        raise errors.SettingsError(problems)
    return tuple(dataclasses.replace(each, expectations=counts[each.name]) for each in plans)
