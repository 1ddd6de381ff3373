"""Verify: is the table what the source holds? Compared where the data lies, also while both are written to.

For each collection:

    read        ranges of `_id`, each at a cluster time of its own, on executors: key and digest of every document
    met         joined by key with the digests of the table's rows, once the table is past those times; equal ones are done
    looked at   the others are read once more, by key: judged where their events are known to be in the row, and no later ones;
                those that changed meanwhile wait for the next look
    noted       one row a run and collection in `ops/verifications`

No document leaves where it is read but those that are looked at. Nothing is claimed; with `repair` what differs is read again
through bronze (`pipelines.verify.repair`), and looked at once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.properties import types as values
from cdc_core.properties.source import Operation
from cdc_core.settings.parse import OnGone, Settings
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import fields as field_filters
from cdc_core.verify import equality
from pipelines.bronze import collections as registry
from pipelines.bronze import log as bronze
from pipelines.delta import ops_tables, query_execution
from pipelines.delta import tables as delta
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as source
from pipelines.operations import quarantine
from pipelines.schema import log as schemas
from pipelines.verify import documents, standing
from pipelines.verify import rows as table_rows
from pipelines.verify.rows import Layer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATIENCE_SECONDS = 60.0
"""How long one look waits for the table to be past its time, and how long documents that change are looked at again."""
MOST_SUSPECTS = 20_000
"""So many keys are looked at closely; when more differ at first sight, the rest is counted as it was seen."""
READ_TIMES = 3
SHOWN = 20

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
        *(
            (count, pa.int64())
            for count in (
                "documents",
                "equal",
                "missing",
                "extra",
                "different",
                "waiting",
                "changing",
                "kept",
                "incomplete",
                "quarantined",
                "unsettled",
                "repaired",
            )
        ),
        ("milliseconds", pa.int64()),
        ("differences", pa.string()),
    ]
)
"""`ops/verifications`: a row a run and collection; `differences` is JSON, of at most 1,000 documents."""
KEPT_DIFFERENCES = 1000


class Verdict(str, Enum):
    """What is said of one key."""

    EQUAL = "equal"
    MISSING = "missing"
    EXTRA = "extra"
    DIFFERENT = "different"
    WAITING = "waiting"
    """Its last change is not in the table yet, and nobody brings it."""
    CHANGING = "changing"
    """It changed between every two looks."""
    KEPT = "kept"
    """The source holds it no more, and the settings keep the row."""
    INCOMPLETE = "incomplete"
    """Silver says itself that the row waits for a document that was never seen."""
    QUARANTINED = "quarantined"
    """An event of it could not be read and waits in quarantine."""

    @property
    def is_wrong(self) -> bool:
        """Whether the table does not say what the source holds."""
        return self not in (Verdict.EQUAL, Verdict.WAITING, Verdict.CHANGING, Verdict.KEPT)


@dataclass(frozen=True)
class Difference:
    """One key that is not equal, and at which paths."""

    key: str
    kind: Verdict
    paths: tuple[equality.Difference, ...] = ()


@dataclass(frozen=True)
class CollectionResult:
    """The comparison of one collection. `documents` were read from the source; `as_of` is the last cluster time of a read."""

    collection: str
    layer: Layer
    table: str
    version: int | None
    as_of: str
    documents: int
    equal: int
    missing: int = 0
    extra: int = 0
    different: int = 0
    waiting: int = 0
    changing: int = 0
    kept: int = 0
    incomplete: int = 0
    quarantined: int = 0
    unsettled: int = 0
    repaired: int = 0
    is_sample: bool = False
    seconds: float = 0.0
    differences: tuple[Difference, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether the table says of every document that it can know of what the source holds."""
        return not (self.missing or self.extra or self.different or self.incomplete or self.quarantined or self.unsettled)


@dataclass(frozen=True)
class Result:
    """What one run found."""

    name: str
    layer: Layer
    collections: tuple[CollectionResult, ...]
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether all collections are."""
        return all(each.is_equal for each in self.collections)


@dataclass(frozen=True)
class Asked:
    """What is to be compared, and how."""

    collection: str | None = None
    layer: Layer = Layer.GOLD
    sample: int | None = None
    as_of: str = "now"
    documents_per_second: float | None = None
    repair: bool = False
    patience: float = PATIENCE_SECONDS


def run(spark: SparkSession, settings: Settings, asked: Asked, *, stop: threading.Event | None = None) -> Result:
    """Compare the collections, and note what was found.

    Raises `SettingsError`, `DecisionNeeded` where the pipeline never ran, and what the source answers; never because
    something differs: `refuse` does.
    """
    began, id_ = time.monotonic(), f"{int(time.time() * 1000):x}"
    connection = source.connection(settings.source)
    with contextlib.closing(connection.client()) as client:
        mongodb.check_suitable(mongodb.server_info(client))
        verifying = _Verifying(spark, settings, asked, connection, client, stop or threading.Event())
        found = []
        for namespace in verifying.chosen():
            each = verifying.compared(namespace)
            verifying.note(each, run=id_)
            found.append(each)
    return Result(settings.name, asked.layer, tuple(found), time.monotonic() - began)


def refuse(result: Result) -> None:
    """Raise `DecisionNeeded` where a table is not what the source holds."""
    wrong = [each.collection for each in result.collections if not each.is_equal]
    if wrong:
        raise errors.DecisionNeeded(
            f"{', '.join(wrong[:5])}{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}: {result.layer.value} is not what "
            "the source holds; medallion verify --repair reads what differs again"
        )


def to_json(result: Result) -> str:
    """The result as one JSON object, with the names of the dataclasses' fields."""
    found = dataclasses.asdict(result)
    for shown, each in zip(found["collections"], result.collections, strict=True):
        shown["is_equal"] = each.is_equal
    return json.dumps({**found, "is_equal": result.is_equal}, indent=2)


def _as_of(text: str) -> documents.Time | None:
    """A cluster time, as seconds, `seconds.increment` or ISO 8601; None for now."""
    if text == "now":
        return None
    with contextlib.suppress(ValueError):
        seconds, _, increment = text.partition(".")
        return int(seconds), int(increment or 2**32 - 1)
    try:
        at = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        hint = "now, seconds since 1970, seconds.increment, or a time as 2026-05-01T08:00:00Z"
        raise errors.SettingsError(errors.Problem("--as-of", f"{text} is no cluster time", hint)) from None
    aware = at if at.tzinfo is not None else at.replace(tzinfo=datetime.timezone.utc)
    return int(aware.timestamp()), 2**32 - 1


@dataclass
class _Verifying:
    """One run over the collections of a pipeline."""

    spark: SparkSession
    settings: Settings
    asked: Asked
    connection: source.Connection
    client: mongodb.Client
    stop: threading.Event
    sources: Mapping[str, mongodb.Collection] = field(init=False)

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)
        self.bronze = self.layout.bronze(self.settings.name)
        self.at = _as_of(self.asked.as_of)
        standing.position_of(self.spark, self.bronze)
        self.sources = {each.namespace: each for each in source.captured(self.settings.source, self.client)}

    def chosen(self) -> list[registry.Namespace]:
        """The collections that are captured, or that silver knows; the one that was asked for."""
        names = {registry.Namespace(each.db, each.name) for each in self.sources.values()}
        known = sorted(names | set(registry.read(self.spark, self.settings).namespaces), key=str)
        wanted = self.asked.collection
        if wanted is None:
            return known
        found = [each for each in known if str(each) == wanted]
        if not found:
            all_names = [str(each) for each in known]
            hint = values.did_you_mean(wanted, all_names) or f"known are {', '.join(all_names[:10]) or 'none yet'}"
            raise errors.SettingsError(errors.Problem("--collection", f"there is no captured collection {wanted}", hint))
        return found

    def compared(self, namespace: registry.Namespace) -> CollectionResult:
        """One collection, compared and, where that is asked for, repaired and compared again."""
        began = time.monotonic()
        comparison = self._comparison(namespace)
        try:
            found = comparison.sampled(self.asked.sample) if self.asked.sample else comparison.whole()
        except mongodb.CollectionChanged:
            raise errors.Temporary(
                f"verifying {namespace}: it was dropped, renamed or made anew while it was read; try again"
            ) from None
        wrong = [each.key for each in found.differences if each.kind.is_wrong]
        if self.asked.repair and wrong:
            from pipelines.verify import repair

            repair.through_bronze(self.spark, self.settings, namespace, wrong, layer=self.asked.layer, stop=self.stop)
            found = comparison.repaired(found, wrong)
        return replace(found, seconds=round(time.monotonic() - began, 3))

    def _comparison(self, namespace: registry.Namespace) -> _Comparison:
        options = self.settings.silver.for_collection(str(namespace))
        where = standing.Standings(
            self.spark,
            self.client,
            namespace,
            self.asked.layer,
            self.layout,
            self.bronze,
            options,
            self.stop.is_set,
        )
        return _Comparison(self, namespace, where, self.sources.get(str(namespace)))

    def note(self, found: CollectionResult, *, run: str) -> None:
        """Append the result to `ops/verifications`."""
        counts = {name: getattr(found, name) for name in SCHEMA.names if hasattr(found, name)}
        kept = [dataclasses.asdict(each) for each in found.differences[:KEPT_DIFFERENCES]]
        row = {
            **counts,
            "run": run,
            "name": self.settings.name,
            "layer": found.layer.value,
            "at_ms": int(time.time() * 1000),
            "milliseconds": round(found.seconds * 1000),
            "differences": json.dumps(kept),
        }
        ops_tables.note(self.spark, self.layout.ops("verifications"), [row], SCHEMA, properties=ops_tables.PROPERTIES)


@dataclass(frozen=True)
class _First:
    """The first sight of a whole collection: how many documents there are, how many rows agree, and the keys of the others."""

    documents: int
    equal: int
    suspects: tuple[str, ...]
    unsettled: int


@dataclass
class _Comparison:
    """One collection's comparison."""

    run: _Verifying
    namespace: registry.Namespace
    standings: standing.Standings
    collection: mongodb.Collection | None
    last: documents.Time = (0, 0)
    version: int | None = None

    def __post_init__(self) -> None:
        self.spark = self.run.spark
        # Reads that come later are later than everything that bronze holds by now, unless a time is asked for.
        now = mongodb.operation_time(self.run.client)
        self.begun = (now.time, now.inc)
        position = standing.position_of(self.spark, self.run.bronze)
        self.first_batch = position.batch if self.run.at is None else 0

    # --- what is read

    def _schema(self) -> schemas.Kept:
        name = str(self.namespace)
        silver = registry.silver_position(self.spark, self.run.layout.silver(self.namespace.db, self.namespace.collection))
        ops = self.run.layout.ops("schemas")
        return schemas.latest(self.spark, ops, generations={name: silver.generation}).get(name, schemas.Kept())

    def _reading(self, schema: schemas.Kept, *, is_whole: bool) -> documents.Reading:
        assert self.collection is not None
        given = self.run.settings.source
        listed = field_filters.read(given.field_exclude_list, given.field_renames)
        at = self.run.at if is_whole else None
        return documents.Reading(
            connection=self.run.connection,
            collection=self.collection,
            after=at or self.begun,
            schema=schema.schema.to_json(),
            is_exact=at is not None,
            fields=listed.of(*self._names) if listed.entries else None,
            condition=given.snapshot_collection_filter_overrides.get(str(self.namespace)) if is_whole else None,
            documents_per_second=self.run.asked.documents_per_second,
        )

    @property
    def _names(self) -> tuple[str, str]:
        return self.namespace.db, self.namespace.collection

    # --- the first sight

    def whole(self) -> CollectionResult:
        """Every document and every row."""
        for attempt in range(READ_TIMES):
            schema = self._schema()
            first = self._first_sight(schema)
            if not first.unsettled or attempt == READ_TIMES - 1 or self._schema() == schema:
                break  # a column that was widened meanwhile makes every row another
        verdicts = self._settled(first.suspects)
        # What was in the source at first sight and is judged equal counts; what is gone from both does not.
        equal = first.equal + sum(each.kind is Verdict.EQUAL and each.key not in self.gone for each in verdicts)
        return self._result(first.documents, equal, verdicts, unsettled=first.unsettled)

    def _first_sight(self, schema: schemas.Kept) -> _First:
        threads = _threads(self.spark)
        if self.collection is None:
            read = self.spark.createDataFrame([], documents.READ_DDL)
        else:
            reading = self._reading(schema, is_whole=True)
            ranges = documents.ranges(self.run.client, reading, threads=threads)
            pace = reading.documents_per_second
            shared = replace(reading, documents_per_second=pace / min(threads, len(ranges)) if pace else None)
            read = documents.digests(self.spark, shared, ranges)
        with _held(read) as seen:
            counted = seen.agg(F.count("*").alias("n"), F.max(F.struct("seconds", "increment")).alias("last")).first()
            self.last = max(self.last, tuple(counted.last) if counted.last else self.begun)
            stands = self.standings.past(self.last, until=time.monotonic() + self.run.asked.patience)
            self.version = stands.held.version
            rows = stands.held.digests(schema.schema).groupBy("key")
            rows = rows.agg(F.count("*").alias("rows"), F.first("digest").alias("held"))
            both = seen.select("key", "digest").join(rows, "key", "full")
            is_equal = (F.col("rows") == 1) & (F.col("digest") == F.col("held"))
            suspects = both.where(~F.coalesce(is_equal, F.lit(False)))
            with _held(suspects.select("key", F.col("digest").isNotNull().alias("is_document"))) as others:
                told = others.agg(F.count("*").alias("n"), F.count_if("is_document").alias("documents")).first()
                keys = [row.key for row in others.select("key").limit(MOST_SUSPECTS).collect()]
        return _First(counted.n, counted.n - told.documents, tuple(keys), told.n - len(keys))

    def sampled(self, documents_wanted: int) -> CollectionResult:
        """So many documents of the source, and so many rows of the table."""
        held = table_rows.newest(self.spark, self.standings.table, self.standings.options)
        chosen = {} if self.collection is None else dict.fromkeys(self._chosen_ids(documents_wanted))
        wanted = {**chosen, **dict.fromkeys(held.sampled(documents_wanted))}
        verdicts = self._settled(tuple(wanted))
        equal = sum(each.kind is Verdict.EQUAL and each.key not in self.gone for each in verdicts)
        return replace(self._result(len(wanted) - len(self.gone), equal, verdicts), is_sample=True)

    def _chosen_ids(self, wanted: int) -> list[str]:
        assert self.collection is not None
        found = mongodb.sampled_ids(self.run.client, self.collection, documents=wanted)
        return [documents.key_of(raw) for raw in found]

    # --- looking closely

    def _settled(self, keys: Sequence[str]) -> list[Difference]:
        """What is said of each key, after as many looks as it takes or patience allows."""
        self.gone: set[str] = set()
        until = time.monotonic() + self.run.asked.patience
        settled: list[Difference] = []
        waiting: Sequence[str] = keys
        while waiting:
            looked = self._looked(waiting, until=until)
            settled += (each for each in looked if each.kind not in (Verdict.WAITING, Verdict.CHANGING))
            moving = [each for each in looked if each.kind in (Verdict.WAITING, Verdict.CHANGING)]
            can_settle = any(each.kind is Verdict.CHANGING for each in moving) or self.standings.captures()
            if not moving or not can_settle or time.monotonic() >= until or self.run.stop.is_set():
                settled += moving
                break
            waiting = [each.key for each in moving]
        return self._explained(settled)

    def _looked(self, keys: Sequence[str], *, until: float) -> list[Difference]:
        schema = self._schema()
        if self.collection is None:
            now = mongodb.operation_time(self.run.client)
            seen = documents.nothing((now.time, now.inc), keys)
        else:
            seen = documents.by_keys(self.run.client, self._reading(schema, is_whole=False), keys)
        first, last = min(each.at for each in seen.values()), max(each.at for each in seen.values())
        self.last = max(self.last, last)
        stands = self.standings.past(last, until=until)
        self.version = stands.held.version
        rows = stands.held.some(keys, schema.schema)
        moved = self.standings.moved(stands, keys, since=first, first=self.first_batch)
        return [self._judged(key, seen[key], rows.get(key, []), stands, moved.get(key), schema) for key in keys]

    def _judged(
        self,
        key: str,
        seen: documents.Seen,
        rows: Sequence[equality.Row],
        stands: standing.Standing,
        moved: standing.Moved | None,
        schema: schemas.Kept,
    ) -> Difference:
        if len(rows) == 1 and seen.text is not None:
            found = equality.differences(equality.Document.read(seen.text), rows[0], schema.schema)
            if not found:
                return Difference(key, Verdict.EQUAL)
        else:
            found = ()
        if key in stands.unseen or (moved is not None and moved.unapplied):
            return Difference(key, Verdict.WAITING)
        if moved is not None and moved.sequence > documents.sequence(seen.at):
            return Difference(key, Verdict.CHANGING)
        if seen.text is None and not rows:
            self.gone.add(key)
            return Difference(key, Verdict.EQUAL)
        if not rows:
            return Difference(key, Verdict.MISSING)
        if len(rows) > 1:
            return Difference(key, Verdict.DIFFERENT, (equality.Difference("", f"{len(rows)} rows"),))
        if seen.text is None:
            return Difference(key, Verdict.EXTRA)
        return Difference(key, Verdict.DIFFERENT, found)

    # --- what is known of differences

    def _explained(self, found: Sequence[Difference]) -> list[Difference]:
        """The same with what the settings and silver say of them."""
        wrong = [each.key for each in found if each.kind.is_wrong]
        if not wrong:
            return list(found)
        incomplete, held = self._incomplete(wrong), self._quarantined()
        is_kept, is_unread = self._keeps_rows(), self._is_being_read()
        told = []
        for each in found:
            kind = each.kind
            if kind is Verdict.EXTRA and is_kept:
                kind = Verdict.KEPT
            elif kind.is_wrong and each.key in held:
                kind = Verdict.QUARANTINED
            elif kind.is_wrong and each.key in incomplete:
                kind = Verdict.INCOMPLETE
            elif kind is Verdict.MISSING and is_unread:
                kind = Verdict.WAITING
            told.append(replace(each, kind=kind))
        return told

    def _keeps_rows(self) -> bool:
        """Whether the settings keep the row of a document that is gone."""
        options = self.standings.options
        is_dropped = self.collection is None and OnGone.KEEP in (options.on_drop, options.on_rename)
        skips = Operation.DELETE in self.run.settings.source.skipped_operations
        return options.unwrap.delete_tombstone_handling_mode.keeps_row or is_dropped or skips

    def _incomplete(self, keys: Iterable[str]) -> set[str]:
        table = self.run.layout.silver(*self._names)
        if not delta.exists(self.spark, table):
            return set()
        named = self.spark.createDataFrame(pa.table({"__key": pa.array(list(keys), pa.string())}))
        marked = self.spark.table(str(table)).where("coalesce(`__incomplete`, false)").select("__key")
        return {row["__key"] for row in marked.join(F.broadcast(named), "__key", "left_semi").collect()}

    def _quarantined(self) -> set[str]:
        events = quarantine.listed(self.spark, self.run.layout.quarantine(*self._names))
        return {each.key for each in events if each.key is not None}

    def _is_being_read(self) -> bool:
        """Whether the collection's snapshot is not at its end."""
        name = str(self.namespace)
        states = snapshot_state.states(bronze.snapshot_heartbeats(self.spark, self.run.bronze))
        return any(name in state.missing and name not in state.conditions for state in states)

    # --- the result

    def repaired(self, before: CollectionResult, keys: Sequence[str]) -> CollectionResult:
        """The result after a repair of these keys: each of them looked at once more."""
        now = mongodb.operation_time(self.run.client)
        self.begun = (now.time, now.inc)
        verdicts = self._settled(keys)
        again = {each.key for each in verdicts}
        left = [each for each in before.differences if each.key not in again]
        mended = [each for each in verdicts if each.kind is Verdict.EQUAL]
        documents_mended = sum(each.key not in self.gone for each in mended)
        result = self._result(before.documents, before.equal + documents_mended, [*left, *verdicts])
        return replace(result, repaired=len(mended), unsettled=before.unsettled, is_sample=before.is_sample)

    def _result(self, read: int, equal: int, verdicts: Sequence[Difference], *, unsettled: int = 0) -> CollectionResult:
        others = sorted((each for each in verdicts if each.kind is not Verdict.EQUAL), key=lambda each: each.key)
        counts = {kind.value: sum(each.kind is kind for each in others) for kind in Verdict if kind is not Verdict.EQUAL}
        return CollectionResult(
            collection=str(self.namespace),
            layer=self.run.asked.layer,
            table=self.standings.table.label,
            version=self.version,
            as_of=f"{self.last[0]}.{self.last[1]}",
            documents=read,
            equal=equal,
            unsettled=unsettled,
            is_sample=False,
            differences=tuple(others),
            **counts,
        )


@contextlib.contextmanager
def _held(df: DataFrame) -> Iterator[DataFrame]:
    """The rows, worked out once and kept by the executors for the time of a block."""
    computed = query_execution.computed(df)
    try:
        yield computed
    finally:
        query_execution.release(computed)


def _threads(spark: SparkSession) -> int:
    """How many ranges are read at a time."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # over Spark Connect nobody says
        return 8


__all__ = ["Asked", "CollectionResult", "Difference", "Layer", "Result", "Verdict", "refuse", "run", "to_json"]
