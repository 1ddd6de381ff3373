"""Verify: compares a table with the source, while both may change.

For each collection:

    digests     executors read ranges of `_id`, each at its own cluster time: the key and a digest of every document
    join        by key with the digests of the table's rows, once the table is past those times; equal keys are done
    close look  the other documents are read again, by key, and judged if the row has all their events up to the time of the read, and no
                later ones; those that changed meanwhile are read again
    result      one row per run and collection in `ops/verifications`

Only documents that differ in the join come to the driver. No table is claimed. With `repair`, differing documents are read again through
bronze (`pipelines.verify.repair`) and compared again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.gold import cut as times
from cdc_core.properties import types as values
from cdc_core.settings.parse import Settings
from cdc_core.snapshot import key_filter
from cdc_core.stream import filters
from cdc_core.tables.layout import Layer
from pipelines import clock, signs
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta
from pipelines.mongodb import catalog
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as connections
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server
from pipelines.spark import parallel
from pipelines.spark import session as sparks
from pipelines.verify import bronze_state, documents, repair, table_progress
from pipelines.verify.comparison import CollectionComparison, VerifyContext
from pipelines.verify.result import CollectionVerification, KeyVerdict, Verification
from pipelines.work_progress import WorkCounter, WorkProgress

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("name", pa.string()),
        ("collection", pa.string()),
        ("layer", pa.string()),
        ("at_ms", pa.int64()),
        ("as_of", pa.string()),
        ("version", pa.int64()),
        ("is_equal", pa.bool_()),
        ("is_sample", pa.bool_()),
        *((count, pa.int64()) for count in ("documents", *KeyVerdict, "unsettled", "repaired")),
        ("milliseconds", pa.int64()),
        ("differences", pa.string()),
    ]
)
"""`ops/verifications`: one row per run and collection; `differences` is JSON, of at most `KEPT_DIFFERENCES` documents."""
KEPT_DIFFERENCES = 1000


@dataclass(frozen=True)
class VerifyOptions:
    """The options of a verification."""

    collection: str | None = None
    layer: Layer = Layer.GOLD
    sample: int | None = None
    as_of: str = "now"
    documents_per_second: float | None = None
    repair: bool = False
    take_over: bool = False
    """Whether a repair claims tables whose owner a person knows to be gone."""


def run(
    spark: SparkSession,
    settings: Settings,
    options: VerifyOptions,
    *,
    stop: threading.Event | None = None,
    progress: Callable[[WorkProgress], None] | None = None,
) -> Verification:
    """Compare the collections, and append the results to `ops/verifications`.

    The result's `failures` are collections that could not be compared, were not reached before `stop` or because the source does not
    answer, or that were compared, but not repaired or noted. Raises `SettingsError`, `DecisionNeeded` if the pipeline never ran, and errors of a source that does not list its collections.
    Differences are not raised here, but by `refuse`.
    """
    began, id_, stop = time.monotonic(), f"{clock.now_ms():x}", stop or threading.Event()
    connection = connections.connection(settings.source)
    with contextlib.closing(connection.client()) as client:
        mongodb_server.check_suitable(mongodb_server.server_info(client))
        run_ = _VerifyRun.begin(spark, settings, options, connection, client, stop)
        namespaces = run_.chosen()
        results, failures = [], run_.failures
        with sparks.cancelling(spark, stop):
            for namespace in WorkCounter("verify", progress).each(namespaces):
                try:
                    result = run_.compared(namespace)
                    if stop.is_set():
                        break
                    # Before the note, so that the result is reported even if it cannot be appended.
                    results.append(result)
                    run_.note(result, run=id_)
                except Exception as error:  # such as a collection that is dropped meanwhile
                    if stop.is_set():
                        break
                    failures.note(str(namespace), error)
                    if isinstance(error, errors.SourceUnreachable):  # the others would wait for it in vain
                        break
    why = "stopped; start it again" if stop.is_set() else "not reached, because the source did not answer; try again"
    unreached = {*map(str, namespaces)} - {each.collection for each in results} - {*failures.by_name}
    failures.by_name.update((name, errors.Temporary(f"verifying {name}: {why}")) for name in sorted(unreached))
    return Verification(settings.name, options.layer, tuple(results), time.monotonic() - began, failures.by_name)


def refuse(result: Verification) -> None:
    """Raise an error if not all is equal: those of collections that could not be compared, `DecisionNeeded` if a table differs from the
    source, `Temporary` if some documents could not be judged."""
    refusal = _refusal(result)
    if not result.failures:
        if refusal is not None:
            raise refusal
        return
    error = errors.together(result.failures)
    if refusal is None:
        raise error
    code = errors.code(errors.worst([refusal, error]))
    raise errors.CollectionsFailed(f"{refusal}\n{errors.message_of(error)}", code) from error


def _refusal(result: Verification) -> errors.MedallionError | None:
    """The error for differences in the compared collections; None if there are none."""
    names = [each.collection for each in result.collections if each.is_wrong]
    if names:
        return errors.DecisionNeeded(
            f"{signs.some(names, 5)}: {result.layer.value} differs from "
            "the source; medallion verify --repair reads the differing documents again"
        )
    if waiting := sum(each.waiting for each in result.collections):
        return errors.Temporary(
            f"{waiting:,} documents could not be compared: their last change is not in {result.layer.value} yet. Start the pipeline, or "
            "let it catch up, and verify again"
        )
    if unsettled := sum(each.unsettled for each in result.collections):
        return errors.Temporary(
            f"{unsettled:,} documents differ at first sight, but were too many to compare closely in time. Let "
            "the pipeline catch up, and verify again"
        )
    return None


def to_json(result: Verification) -> str:
    """The result as a JSON object with the dataclasses' field names."""
    messages = {name: errors.message_of(error) for name, error in result.failures.items()}
    fields = dataclasses.asdict(replace(result, failures={})) | {"failures": messages}
    for entry, verification in zip(fields["collections"], result.collections, strict=True):
        entry |= {"is_equal": verification.is_equal, "is_judged": verification.is_judged}
    return json.dumps({**fields, "is_equal": result.is_equal, "is_judged": result.is_judged}, indent=2)


def as_of(text: str) -> documents.Time | None:
    """The cluster time of `--as-of`, in the formats of `gold --as-of`; None for now. Raises `SettingsError`."""
    time_ = times.parsed(text)
    return None if time_ is None else (int(time_[:8], 16), int(time_[8:], 16))


@dataclass(frozen=True)
class _VerifyRun:
    """One run over the collections of a pipeline; `sources` are those in the source, by name, `known` those that silver knows."""

    context: VerifyContext
    options: VerifyOptions
    sources: Mapping[str, catalog.SourceCollection]
    known: registry.KnownCollections
    failures: parallel.Failures = field(default_factory=parallel.Failures)
    began_ms: int = field(default_factory=clock.now_ms)
    """`take_over` covers owners at this time only: the comparison before the repair may take hours."""

    @staticmethod
    def begin(
        spark: SparkSession,
        settings: Settings,
        options: VerifyOptions,
        connection: connections.Connection,
        client: mongodb.Client,
        stop: threading.Event,
    ) -> _VerifyRun:
        """A run over the source's present collections; raises `DecisionNeeded` if bronze is empty."""
        layout = delta.layout(settings.lakehouse)
        context = VerifyContext(
            spark=spark,
            settings=settings,
            connection=connection,
            client=client,
            layout=layout,
            bronze=layout.bronze(settings.name),
            stop=stop,
            layer=options.layer,
            at=as_of(options.as_of),
            documents_per_second=options.documents_per_second,
        )
        # For its error: without bronze there is nothing to compare, and the source need not be read.
        table_progress.position_of(spark, context.bronze)
        sources = {each.namespace: each for each in connections.captured(settings.source, client, is_begun=True)}
        return _VerifyRun(context, options, sources, registry.read(spark, settings))

    def chosen(self) -> list[registry.Namespace]:
        """The captured collections, also those that are gone from the source; or the one that the options name.

        Raises `DecisionNeeded` if there is none: of nothing it cannot be said that it is equal.
        """
        source_namespaces = {registry.Namespace(each.db, each.name) for each in self.sources.values()}
        table_namespaces = self.known.namespaces
        if self.context.layer is Layer.BRONZE:  # silver, which notes collections, may never have run
            log_collections = bronze_log.captured_collections(self.context.spark, self.context.bronze)
            table_namespaces = tuple({*table_namespaces, *(registry.Namespace(*each) for each in log_collections)})
        source_filter = filters.of(self.context.settings.source)
        namespaces = sorted(
            source_namespaces | {each for each in table_namespaces if source_filter.includes(each.db, each.collection)},
            key=str,
        )
        name = self.options.collection
        if name is None and not namespaces:
            raise errors.DecisionNeeded(
                "there is nothing to verify: the source has no collection that the include lists name, or the user cannot see it, and "
                "silver knows none. medallion check tells which collections are captured"
            )
        if name is None:
            return namespaces
        matches = [each for each in namespaces if str(each) == name]
        if not matches:
            all_names = [str(each) for each in namespaces]
            known_names = (
                f"known are {', '.join(all_names[:10])}" if all_names else "there is none yet: medallion capture begins it"
            )
            hint = values.did_you_mean(name, all_names) or known_names
            raise errors.SettingsError(errors.Problem("--collection", f"{name} is not a captured collection", hint))
        return matches

    def compared(self, namespace: registry.Namespace) -> CollectionVerification:
        """Compare one collection and, with `repair`, repair it and compare it again."""
        began = time.monotonic()
        if self.context.layer is Layer.BRONZE:
            bronze_state.check_whole(self.context.spark, self.context.bronze, namespace)
        elif namespace in self.known.refused:  # the table of its name is another collection's
            raise self.known.refused[namespace]
        if str(namespace) not in self.sources:
            # Raises `AccessRefused`: a database that the user may not see looks like one that was dropped.
            catalog.collections(self.context.client, [namespace.db])
        comparison = self._comparison(namespace)
        try:
            result = comparison.sampled(self.options.sample) if self.options.sample else comparison.whole()
        except (mongodb_failures.CollectionChanged, mongodb_failures.ReadRefused, mongodb_failures.SnapshotExpired) as error:
            raise documents.failure(str(namespace), error) from error
        # Keys that no document can have cannot be read again.
        wrong_keys = [each.key for each in result.differences if each.kind.is_wrong]
        repairable_keys = [key for key in wrong_keys if key_filter.is_key(key)]
        if self.options.repair and len(repairable_keys) < len(wrong_keys):
            log.warning(
                "%s: %d rows have keys that no document can have; --repair cannot remove them, medallion rebuild does",
                namespace,
                len(wrong_keys) - len(repairable_keys),
            )
        if self.options.repair and repairable_keys:
            try:
                repair.through_bronze(
                    self.context.spark,
                    self.context.settings,
                    namespace,
                    repairable_keys,
                    layer=self.options.layer,
                    take_over=self.options.take_over,
                    since_ms=self.began_ms,
                    stop=self.context.stop,
                )
                result = comparison.repaired(result, repairable_keys)
            except errors.MedallionError as error:
                # The result of the comparison, which may have taken hours, is told all the same.
                self.failures.note(str(namespace), error)
        return replace(result, seconds=round(time.monotonic() - began, 3))

    def _comparison(self, namespace: registry.Namespace) -> CollectionComparison:
        options = self.context.settings.silver.for_collection(str(namespace))
        progress = table_progress.TableProgressReader(
            self.context.spark,
            self.context.client,
            namespace,
            self.options.layer,
            self.context.layout,
            self.context.bronze,
            options,
            self.context.stop.is_set,
        )
        return CollectionComparison(self.context, namespace, progress, self.sources.get(str(namespace)))

    def note(self, result: CollectionVerification, *, run: str) -> None:
        """Append the result to `ops/verifications`."""
        counts = {name: getattr(result, name) for name in SCHEMA.names if hasattr(result, name)}
        differences = [dataclasses.asdict(each) for each in result.differences[:KEPT_DIFFERENCES]]
        row = {
            **counts,
            "run": run,
            "name": self.context.settings.name,
            "layer": result.layer.value,
            "at_ms": clock.now_ms(),
            "milliseconds": round(result.seconds * 1000),
            "differences": json.dumps(differences),
        }
        ops_tables.note(self.context.spark, self.context.layout.ops("verifications"), [row], SCHEMA)
