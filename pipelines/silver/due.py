"""The work of a round of silver: which tables lack events or sweeps of bronze, and from which batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from pyspark.sql import SparkSession

from cdc_core.bronze.batch_range import BatchRange
from cdc_core.bronze.collection_ends import Sweep
from cdc_core.tables import layout as tables
from pipelines.bronze import registry, survey
from pipelines.silver.collection import CollectionWork
from pipelines.silver.positions import Positions

IDLE_AT_A_TIME = 8
"""How many collections without events move their positions in one round."""


def works(
    spark: SparkSession,
    bronze_table: tables.TableRef,
    positions: Positions,
    to: int,
    *,
    at_work: Collection[registry.Namespace] = (),
) -> list[CollectionWork]:
    """What the tables lack up to the batch `to`: one `CollectionWork` per collection that has work, from one query over bronze.

    New collections are noted, and `positions` knows them from here on. Collections `at_work`, whose positions move meanwhile, are left out.
    """

    def is_skipped(namespace: registry.Namespace) -> bool:
        return namespace in at_work or positions.failures.is_set_aside(str(namespace))

    active_namespaces = [namespace for namespace in positions.known if not is_skipped(namespace)]
    start = min([positions.discovered or 0, *map(positions.start, active_namespaces)])
    if start >= to:
        return []
    span = BatchRange(start, to)
    # Each from its own position on.
    starts = {namespace: positions.start(namespace) for namespace in positions.known}
    later_starts = {namespace: batch for namespace, batch in starts.items() if batch > start}
    counts, sweeps = survey.surveyed(spark, bronze_table, span, starts=later_starts)
    new_namespaces = [each for each in counts if each not in positions.known and not positions.is_left_out(each)]
    earlier_sweeps: tuple[Sweep, ...] = ()
    if new_namespaces and start > 0:
        # A drop may stand before the rows of the snapshot that it overtook.
        earlier_sweeps = survey.sweeps(spark, bronze_table, BatchRange(0, start), among=new_namespaces)
    positions.note(new_namespaces, to, met=counts)
    positions.begin(set(new_namespaces) - {registry.Namespace.parse(sweep.db_collection) for sweep in earlier_sweeps}, start)
    # By collection: of thousands of collections only a few have sweeps.
    sweeps_by_collection: dict[str, list[Sweep]] = {}
    for sweep in (*earlier_sweeps, *sweeps):
        sweeps_by_collection.setdefault(sweep.db_collection, []).append(sweep)
    all_works = []
    for namespace, position in positions.known.items():
        events = counts.get(namespace, survey.EventCounts())
        due_sweeps = _due(sweeps_by_collection.get(str(namespace), ()), position)
        if events.events or due_sweeps or positions.is_far_behind(namespace, to):
            position = replace(position, to=positions.start(namespace), log=positions.log, bronze=positions.bronze)
            all_works.append(CollectionWork(namespace, position, to, events, due_sweeps))
    # Bronze only grows: a collection without events in the span is not searched there again. One that failed may still have
    # events before the span.
    busy_namespaces = {work.namespace for work in all_works if work.counts.events or work.sweeps}.union(at_work)
    positions.scanned |= {
        each: to for each in positions.known if each not in busy_namespaces and positions.start(each) >= start
    }
    return [work for work in all_works if not is_skipped(work.namespace)]


def with_few_idle(works: Sequence[CollectionWork]) -> list[CollectionWork]:
    """The works without most of the idle ones: hundreds may be due in one round, and those with events would wait for them."""
    idle = sorted((work for work in works if not (work.counts.events or work.sweeps)), key=lambda work: work.position.to)
    postponed = {work.namespace for work in idle[IDLE_AT_A_TIME:]}
    return [work for work in works if work.namespace not in postponed]


def _due(sweeps: Iterable[Sweep], position: registry.SilverPosition) -> tuple[Sweep, ...]:
    return tuple(sweep for sweep in sweeps if sweep.is_due(after=position.to, swept=position.swept))
