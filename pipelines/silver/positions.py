"""Which collections silver knows, where the table of each stands, and up to where bronze was searched for others.

It is read at a start and kept by the run, which alone moves these tables. What it says is on disk, too, so that a run that
is killed at any moment leaves nothing behind that the next one would miss.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from cdc_core import errors
from cdc_core.signals import signal as signals
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.schema import log as schemas
from pipelines.silver import set_back
from pipelines.spark import parallel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings


@dataclass
class Positions:
    """The collections with their positions; `failures` takes what cannot be read, and the others go on."""

    spark: SparkSession
    settings: Settings
    failures: parallel.Failures
    take_over: bool = False
    began_ms: int = 0
    """Since when another's claim counts, whatever `take_over` says."""
    known: dict[registry.Namespace, registry.SilverPosition] = field(default_factory=dict)
    unread: set[registry.Namespace] = field(default_factory=set)
    """Collections whose position could not be read so far."""
    unnoted: set[registry.Namespace] = field(default_factory=set)
    """Collections that were noted of another bronze alone, and have no events in this one so far."""
    scanned: dict[registry.Namespace, int] = field(default_factory=dict)
    """Up to which batch bronze was searched for a collection's events, where there were none."""
    schemas: dict[str, schemas.SchemaVersion] = field(default_factory=dict)
    discovered: int | None = None
    """Up to which batch every collection is known; None before anything is read."""
    noted: int = 0
    settled: int = 0
    """The batch up to which no collection has events that its table has not."""
    log: str | None = None
    """What the history of this bronze is called."""
    bronze: registry.BronzeCommit | None = None
    """The newest commit of this bronze at the last look at it."""
    trimmed_to: int = 0
    """The last batch of which maintenance took events from bronze."""
    _first_batches: dict[tuple[str, str], int] | None = None
    """What it left of each collection, where that was asked for."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.layout = delta.layout(self.settings.lakehouse)

    def read(self) -> None:
        """What a start has to know, read side by side: Spark plans each of these for longer than it reads."""
        with ThreadPoolExecutor(parallel.THREADS) as pool:
            kept = pool.submit(schemas.newest, self.spark, self.layout.ops("schemas"))
            noted = registry.read(self.spark, self.settings, log=self.log)
            self._refuse(noted)
            self._look_at_trims()
            positions = zip(noted.namespaces, pool.map(self._readable_position, noted.namespaces))
            self.known = {namespace: position for namespace, position in positions if position is not None}
        # The notes are about another bronze's batches, and their numbers mean nothing here: all of this one is searched.
        is_other = any(position.is_of_other(self.log) for position in self.known.values())
        self.settled = 0 if is_other else registry.CaughtUp.among(self.known)
        self.scanned = dict.fromkeys(self.known, self.settled)
        self.unnoted = {each for each in noted.of_others if each in self.known and not self.known[each].to}
        self.noted = noted.discovered
        self.discovered = max(noted.discovered, self.settled)
        generations = {str(namespace): position.generation for namespace, position in self.known.items()}
        self.schemas = schemas.of_generations(kept.result(), generations)

    def reread(self, namespace: registry.Namespace) -> bool:
        """Read one collection's position and schema anew, after its error; whether they could be read."""
        try:
            self._look_at_trims()  # by now: a service lives for longer than maintenance waits
            position = self._position(namespace)
            known = self.known.get(namespace)
            if known is None or (position.to, position.generation) != (known.to, known.generation):
                self.scanned.pop(namespace, None)  # of a table that was restored these batches are to be applied again
            # Another run may have rebuilt the table meanwhile: its schema is that of the generation that the table has now.
            found = _schemas_of(self.spark, self.layout, {namespace: position})
            self.known[namespace] = position
            self.unread.discard(namespace)
            self.schemas |= found
        except Exception as error:  # whatever it is, the other collections go on
            self.failures.note(str(namespace), error)
            return False
        return True

    def find_schema(self, namespace: registry.Namespace) -> bool:
        """Look for a table's schema, which was noted since the others were read, or could not be read then; whether there is one."""
        self.schemas |= _schemas_of(self.spark, self.layout, {namespace: self.known[namespace]})
        return str(namespace) in self.schemas

    def check_log(self) -> None:
        """Refuse collections whose tables were made from another bronze: its batch numbers mean nothing in this one."""
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
        """Write new collections down before any of their tables is touched: a crash after the first one's commit loses
        none of the others. Of those that are `met` also what only another bronze was known to have."""
        known_elsewhere = self.unnoted.intersection(met)
        # Without new ones now and then, so that the next start need not search all of bronze for them.
        if new or known_elsewhere or to - self.noted >= registry.IDLE_BATCHES:
            registry.note(self.spark, self.settings, new=[*new, *sorted(known_elsewhere)], discovered=to, log=self.log)
            self.noted = to
        self.unnoted -= known_elsewhere
        self.discovered = to
        if not new:
            return
        accepted = registry.with_own_tables(self.settings, (*self.known, *new))
        self._refuse(accepted)
        positions = {namespace: self._readable_position(namespace) for namespace in new if namespace in accepted.namespaces}
        found = {namespace: position for namespace, position in positions.items() if position is not None}
        self.known |= found
        # New to what was noted alone, where somebody removed that: the table is there, and has a schema, perhaps a rebuild's.
        are_there = {namespace: position for namespace, position in found.items() if position.version >= 0}
        self.schemas |= _schemas_of(self.spark, self.layout, are_there) if are_there else {}
        self.check_log()

    def begin(self, new: Iterable[registry.Namespace], searched: int) -> None:
        """Let new collections without a table begin behind the batch up to which bronze was searched: it has no event of them before, and
        to look for some there takes the longer, the older a pipeline is."""
        found = (namespace for namespace in new if namespace in self.known and self.known[namespace].version < 0)
        self.scanned |= dict.fromkeys(found, searched)

    def start(self, namespace: registry.Namespace) -> int:
        """From where on a collection may have events that its table has not."""
        return max(self.known[namespace].to, self.scanned.get(namespace, 0))

    def is_far_behind(self, namespace: registry.Namespace, to: int) -> bool:
        """Whether a table's own position is so old that a commit without rows is worth its price."""
        return to - self.known[namespace].to >= registry.IDLE_BATCHES

    def settle(self, to: int) -> None:
        """Remember `to` as the batch up to which no collection has unapplied events, where that is true of all of
        them."""
        if all(self.start(namespace) >= to for namespace in self.known):
            self.settled = to

    def settled_metadata(self) -> dict[str, object]:
        """What a table's last commit states about all tables, so that the next start need not search the batches before
        it."""
        return {"settled": asdict(registry.CaughtUp.at(self.settled, self.known)), "bronze": self.bronze}

    def is_left_out(self, namespace: registry.Namespace) -> bool:
        """Whether a collection that bronze shows gets no table."""
        return namespace.is_temporary or str(namespace) in self.failures.found

    def table(self, namespace: registry.Namespace) -> tables.TableRef:
        """The collection's table in silver."""
        return self.layout.silver(*namespace)

    def _refuse(self, collections: registry.KnownCollections) -> None:
        for namespace, error in collections.refused.items():
            self.failures.note(str(namespace), error)

    def _position(self, namespace: registry.Namespace) -> registry.SilverPosition:
        """Where a collection's table stands; raises `DecisionNeeded` where bronze does not hold what it has to apply again."""
        position = registry.silver_position(self.spark, self.table(namespace))
        # One without a name was made anew, and has no event yet.
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
        if is_of_this and registry.lacks_deletes(deletes, position):
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
        """Take what bronze says of itself now. Raises `CommitConflict` where an older copy was brought back since the last look."""
        if self.bronze != newest.commit and bronze_log.is_held(self.spark, self._bronze, self.bronze) is False:
            raise errors.CommitConflict(
                f"{self._bronze.label}: an older copy of it was restored while silver read it; nothing was applied after "
                "that. Start again to continue from there"
            )
        self.log, self.bronze = newest.log, newest.commit

    def _went_back(self, namespace: registry.Namespace, position: registry.SilverPosition) -> bool:
        """Whether a table stands before events that maintenance took from bronze, because all layers had applied them."""
        # Where it has no position the collection may be new: its events come after those that were searched before it was found.
        is_new = not position.to
        after, found = (
            registry.searched(self.spark, self.settings, namespace, log=self.log) if is_new else (position.to, position.to)
        )
        if after >= self.trimmed_to:
            return False
        with self._lock:  # once for all of them: it is a look at all of bronze
            if self._first_batches is None:
                self._first_batches = bronze_log.first_batches(self.spark, self._bronze)
        first = self._first_batches.get(namespace, 0)
        # A table that was removed looks like that of a new collection, and its events may lie in batches that were searched before: where
        # gold has a position, there was one.
        return first > found or (
            is_new and bool(table_history.standing(self.spark, self.layout.gold(*namespace)).said.get("to"))
        )

    def _look_at_trims(self) -> None:
        self.trimmed_to, self._first_batches = bronze_log.trimmed_to(self.spark, self._bronze), None

    @property
    def _bronze(self) -> tables.TableRef:
        return self.layout.bronze(self.settings.name)

    def _readable_position(self, namespace: registry.Namespace) -> registry.SilverPosition | None:
        """Where a collection's table stands; None, and noted, where it cannot be read: the others go on."""
        try:
            return self._position(namespace)
        except Exception as error:
            self.failures.note(str(namespace), error)
            self.unread.add(namespace)
            return None


def _schemas_of(
    spark: SparkSession, layout: tables.Layout, positions: Mapping[registry.Namespace, registry.SilverPosition]
) -> dict[str, schemas.SchemaVersion]:
    """The schemas of these collections' tables, as they are kept now, and of no others: those have generations of their own."""
    generations = {str(namespace): position.generation for namespace, position in positions.items()}
    kept = schemas.latest(spark, layout.ops("schemas"), generations=generations)
    return {name: kept[name] for name in generations if name in kept}
