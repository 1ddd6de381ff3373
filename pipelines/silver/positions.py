"""The collections that silver knows, the position of each table, and how far bronze was searched for new collections.

Read at a start and then kept by the run, which is the only writer of these tables. All of it can be read again from the tables, so a run
may be killed at any moment.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from cdc_core.signals import signal as signals
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.schema import log as schemas
from pipelines.silver import set_back
from pipelines.spark import parallel


@dataclass
class Positions:
    """The collections with their positions; a collection that cannot be read is noted in `failures`, and the others continue."""

    spark: SparkSession
    settings: Settings
    failures: parallel.Failures
    take_over: bool = False
    began_ms: int = 0
    """Claims of others that are newer than this count, whatever `take_over` says."""
    known: dict[registry.Namespace, registry.SilverPosition] = field(default_factory=dict)
    unread: set[registry.Namespace] = field(default_factory=set)
    """Collections whose position could not be read yet."""
    unnoted: set[registry.Namespace] = field(default_factory=set)
    """Collections that are noted for another bronze only, and have no events in this one yet."""
    scanned: dict[registry.Namespace, int] = field(default_factory=dict)
    """The batch up to which bronze was searched for a collection's events and had none."""
    schemas: dict[str, schemas.SchemaVersion] = field(default_factory=dict)
    discovered: int | None = None
    """The batch up to which all collections are known; None before anything is read."""
    noted: int = 0
    """`discovered`, as `ops/collections` has it."""
    settled: int = 0
    """The batch up to which every table has all events of its collection."""
    log: str | None = None
    """The name of this bronze's history."""
    bronze: registry.BronzeCommit | None = None
    """The newest commit of this bronze when it was last read."""
    trimmed_to: int = 0
    """The last batch from which maintenance removed events of bronze."""
    _first_batches: dict[tuple[str, str], int] | None = None
    """The first remaining batch of each collection in the bronze that was last looked at, once it was read."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)

    def read(self) -> None:
        """Read what a start needs, in threads: Spark plans each of these queries for longer than it runs them."""
        with ThreadPoolExecutor(parallel.THREADS) as pool:
            newest_schemas = pool.submit(schemas.newest, self.spark, self.layout.ops("schemas"))
            known_collections = registry.read(self.spark, self.settings, log=self.log)
            self._note_refused(known_collections)
            self.trimmed_to = bronze_log.trimmed_to(self.spark, self._bronze)
            positions = zip(known_collections.namespaces, pool.map(self._readable_position, known_collections.namespaces))
            self.known = {namespace: position for namespace, position in positions if position is not None}
        # Positions that count another bronze's batches mean nothing here: all of this bronze is searched.
        is_other = any(position.is_of_other(self.log) for position in self.known.values())
        self.settled = 0 if is_other else registry.CaughtUp.among(self.known)
        self.scanned = dict.fromkeys(self.known, self.settled)
        self.unnoted = {each for each in known_collections.of_others if each in self.known and not self.known[each].to}
        self.noted = known_collections.discovered
        self.discovered = max(known_collections.discovered, self.settled)
        generations = {str(namespace): position.generation for namespace, position in self.known.items()}
        self.schemas = schemas.of_generations(newest_schemas.result(), generations)

    def reread(self, namespace: registry.Namespace) -> bool:
        """Read one collection's position and schema again after its error; whether they could be read."""
        try:
            # Maintenance may have run since the start of a service.
            self.trimmed_to = bronze_log.trimmed_to(self.spark, self._bronze)
            position = self._position(namespace)
            previous = self.known.get(namespace)
            if previous is None or (position.to, position.generation) != (previous.to, previous.generation):
                self.scanned.pop(namespace, None)  # a restored table needs these batches again
            # Another run may have rebuilt the table: its schema is the one of its present generation.
            table_schemas = _schemas_of(self.spark, self.layout, {namespace: position})
            self.known[namespace] = position
            self.unread.discard(namespace)
            self.schemas |= table_schemas
        except Exception as error:  # of any kind: the other collections continue
            self.failures.note(str(namespace), error)
            return False
        return True

    def find_schema(self, namespace: registry.Namespace) -> bool:
        """Read a table's schema, which may have been recorded after the others were read; whether there is one."""
        self.schemas |= _schemas_of(self.spark, self.layout, {namespace: self.known[namespace]})
        return str(namespace) in self.schemas

    def check_log(self) -> None:
        """Note an error for collections whose tables were made from another bronze: its batch numbers mean nothing in this one."""
        for namespace, position in self.known.items():
            if position.is_of_other(self.log):
                self.failures.note(
                    str(namespace),
                    errors.DecisionNeeded(
                        f"{namespace}: silver was built from another bronze table than {self._bronze.label}: that one was removed "
                        "and created again, or another pipeline captures the same collection. Restore the old bronze, or build "
                        "silver from this one: medallion rebuild --collection …"
                    ),
                )

    def note(self, new: Sequence[registry.Namespace], to: int, *, met: Collection[registry.Namespace] = ()) -> None:
        """Note new collections before any of their tables is written: a crash after the first one's commit loses none of the others.

        Collections that are `met` in this bronze, and were noted for another one only, are noted for this one too.
        """
        known_elsewhere = self.unnoted.intersection(met)
        # Now and then also without new ones, so that the next start need not search all of bronze for them.
        if new or known_elsewhere or to - self.noted >= registry.IDLE_BATCHES:
            registry.note(self.spark, self.settings, new=[*new, *sorted(known_elsewhere)], discovered=to, log=self.log)
            self.noted = to
        self.unnoted -= known_elsewhere
        self.discovered = to
        if not new:
            return
        collections = registry.with_own_tables(self.settings, (*self.known, *new))
        self._note_refused(collections)
        with_tables = set(collections.namespaces)
        positions = {namespace: self._readable_position(namespace) for namespace in new if namespace in with_tables}
        new_positions = {namespace: position for namespace, position in positions.items() if position is not None}
        self.known |= new_positions
        # If `ops/collections` was removed, tables of such collections exist, and have schemas, maybe those of a rebuild.
        existing_positions = {namespace: position for namespace, position in new_positions.items() if position.version >= 0}
        self.schemas |= _schemas_of(self.spark, self.layout, existing_positions) if existing_positions else {}
        self.check_log()

    def begin(self, new: Iterable[registry.Namespace], searched: int) -> None:
        """Let new collections without a table start after the batch `searched`: bronze has no earlier events of them, and searching for
        some takes longer the older a pipeline is."""
        new_namespaces = (namespace for namespace in new if namespace in self.known and self.known[namespace].version < 0)
        self.scanned |= dict.fromkeys(new_namespaces, searched)

    def start(self, namespace: registry.Namespace) -> int:
        """The batch after which a collection may have events that its table lacks."""
        return max(self.known[namespace].to, self.scanned.get(namespace, 0))

    def is_far_behind(self, namespace: registry.Namespace, to: int) -> bool:
        """Whether a table's own position is so old that a commit without rows pays off."""
        return to - self.known[namespace].to >= registry.IDLE_BATCHES

    def settle(self, to: int) -> None:
        """Set `settled` to this batch, if no known collection has unapplied events up to it."""
        if all(self.start(namespace) >= to for namespace in self.known):
            self.settled = to

    def settled_metadata(self) -> dict[str, object]:
        """Commit metadata about all tables, with which the next start need not search the batches up to `settled`."""
        # Less where a table went back since (`reread`): it lacks events again.
        settled = min([self.settled, *map(self.start, self.known)])
        return {"settled": asdict(registry.CaughtUp.at(settled, self.known)), "bronze": self.bronze}

    def is_left_out(self, namespace: registry.Namespace) -> bool:
        """Whether a collection found in bronze gets no table: it is temporary, or has failed."""
        return namespace.is_temporary or str(namespace) in self.failures.by_name

    def table(self, namespace: registry.Namespace) -> tables.TableRef:
        """The collection's table in silver."""
        return self.layout.silver(*namespace)

    def _note_refused(self, collections: registry.KnownCollections) -> None:
        for namespace, error in collections.refused.items():
            self.failures.note(str(namespace), error)

    def _position(self, namespace: registry.Namespace) -> registry.SilverPosition:
        """The position of a collection's table; moved back first if bronze, or the table of remembered deletes, is an older copy.

        Raises `DecisionNeeded` if bronze lacks events that must be applied again.
        """
        position = registry.silver_position(self.spark, self.table(namespace))
        # A bronze without a name was just created and has no events.
        is_of_this = self.log is not None and position.log == self.log
        if is_of_this and bronze_log.is_held(self.spark, self._bronze, position.bronze) is False:
            set_back.to_common_batch(
                self.spark,
                self.table(namespace),
                self._bronze,
                newest=self.bronze,
                take_over=self.take_over,
                since_ms=self.began_ms,
            )
            position = registry.silver_position(self.spark, self.table(namespace))
        deletes = self.layout.deletes(*namespace)
        if is_of_this and registry.lacks_deletes(self.spark, deletes, position):
            set_back.to_remembered_batch(
                self.spark, self.table(namespace), deletes, take_over=self.take_over, since_ms=self.began_ms
            )
            position = registry.silver_position(self.spark, self.table(namespace))
        if self._went_back(namespace, position) and not bronze_log.is_whole(self.spark, self._bronze, str(namespace)):
            raise errors.DecisionNeeded(
                f"{namespace}: silver was restored, repaired or removed, or is an older copy, and old events that it needs "
                f"were removed from bronze. To read the documents again, run {signals.snapshot_command(str(namespace))}"
            )
        return position

    def look(self, newest: bronze_log.BronzeHead) -> None:
        """Take over the newest state of bronze. Raises `CommitConflict` if an older copy of it was restored since the last call."""
        if self.bronze != newest.commit:
            self._first_batches = None  # maintenance, whose removals are commits too, may have run
            if bronze_log.is_held(self.spark, self._bronze, self.bronze) is False:
                raise errors.CommitConflict(
                    f"{self._bronze.label}: an older copy of it was restored while silver read it; nothing was applied after "
                    "that. Start again to continue from there"
                )
        self.log, self.bronze = newest.log, newest.commit

    def _went_back(self, namespace: registry.Namespace, position: registry.SilverPosition) -> bool:
        """Whether a table's position is before events that maintenance removed from bronze after all layers had applied them."""
        if not self.trimmed_to:  # as nearly always: `searched` goes through the rows of all collections
            return False
        # A collection without a position may be new: then its events come after the batches searched before it was found.
        is_new = not position.to
        after, found_batch = (
            registry.searched(self.spark, self.settings, namespace, log=self.log) if is_new else (position.to, position.to)
        )
        if after >= self.trimmed_to:
            return False
        with self._lock:  # once for all collections: it reads all of bronze
            if self._first_batches is None:
                self._first_batches = bronze_log.first_batches(self.spark, self._bronze)
        first_batch = self._first_batches.get(namespace, 0)
        # A removed table looks like that of a new collection, but its events may lie in batches that were searched before. If gold has a
        # position, there was such a table.
        return first_batch > found_batch or (
            is_new and bool(table_history.standing(self.spark, self.layout.gold(*namespace)).metadata.get("to"))
        )

    @property
    def _bronze(self) -> tables.TableRef:
        return self.layout.bronze(self.settings.name)

    def _readable_position(self, namespace: registry.Namespace) -> registry.SilverPosition | None:
        """The position of a collection's table; None, with the error noted, if it cannot be read."""
        try:
            return self._position(namespace)
        except Exception as error:
            self.failures.note(str(namespace), error)
            self.unread.add(namespace)
            return None


def _schemas_of(
    spark: SparkSession, layout: tables.Layout, positions: Mapping[registry.Namespace, registry.SilverPosition]
) -> dict[str, schemas.SchemaVersion]:
    """The recorded schemas of these collections' tables, each of the table's present generation."""
    generations = {str(namespace): position.generation for namespace, position in positions.items()}
    return schemas.latest(spark, layout.ops("schemas"), generations=generations)
