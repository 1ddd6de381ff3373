"""The registry of captured collections, and the positions of their silver tables.

`ops/collections` records every collection before its silver table is created, with the bronze batch up to which no other collection
has events, so that a run finds new collections without reading bronze from its start. Each row names its pipeline and the history of
that pipeline's bronze, because batch numbers have a meaning within one history only. Recording a collection twice changes nothing,
and a lost table is filled again from batch 0.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from cdc_core import errors
from cdc_core.properties import types as values
from cdc_core.sql.names import literal
from cdc_core.stream import filters
from cdc_core.tables import layout as tables
from pipelines.delta import local_log, ops_tables, stored_files, table_history
from pipelines.delta import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings

SCHEMA = pa.schema(
    [(name, pa.int64() if name == "batch" else pa.string()) for name in ("db", "collection", "batch", "pipeline", "log")]
)

BronzeCommit = tuple[int, str]
"""A commit of bronze: its version, and its name."""

IDLE_BATCHES = 10_000
"""The number of batches after which a collection without events moves its position."""

GENERATION = "medallion.generation"
"""The table property with the generation of a rebuilt silver table, for when its log holds no commit of ours."""

FORGOTTEN_TO = "medallion.forgotten.to"
"""The property of a table of remembered deletes with the last batch from which maintenance removed some."""


class Namespace(NamedTuple):
    """One captured collection."""

    db: str
    collection: str

    @classmethod
    def parse(cls, name: str) -> Namespace:
        """The namespace of `database.collection`; database names have no dots."""
        return cls(*name.split(".", 1))

    def __str__(self) -> str:
        return f"{self.db}.{self.collection}"

    @property
    def is_temporary(self) -> bool:
        """Whether it is a temporary collection of a MongoDB command (`$out`, map-reduce, a rename between databases)."""
        return _TEMPORARY.match(self.collection) is not None

    @property
    def predicate(self) -> str:
        """The collection's rows, as a SQL condition over bronze."""
        return f"db = {literal(self.db)} AND collection = {literal(self.collection)}"


_TEMPORARY = re.compile(r"tmp\.(agg_out|mr)\.|tmp\w{5}\.renameCollection$")


@dataclass(frozen=True)
class KnownCollections:
    """The collections with events in bronze batches up to `discovered`, in order of their names.

    `refused` are those whose table's name belongs to an earlier collection, `of_others` those that are recorded for other histories
    of bronze only.
    """

    discovered: int = 0
    namespaces: tuple[Namespace, ...] = ()
    refused: Mapping[Namespace, errors.DecisionNeeded] = field(default_factory=dict)
    of_others: frozenset[Namespace] = frozenset()


def with_own_tables(settings: Settings, namespaces: Sequence[Namespace]) -> KnownCollections:
    """The collections in the given order; those whose table's name belongs to an earlier one are refused, if they are captured."""
    collisions = delta.layout(settings.lakehouse).collisions(namespaces)
    if not collisions:  # As nearly always: a service checks thousands of collections repeatedly.
        return KnownCollections(0, tuple(namespaces))
    refusals = {
        Namespace.parse(name): errors.DecisionNeeded(
            f"{name}: its table would be {table}, which already belongs to {owner}; remove one of them from "
            "the include list, or use another pipeline with its own schema_prefix"
        )
        for owner, name, table in collisions
    }
    accepted_namespaces = tuple(each for each in namespaces if each not in refusals)
    filter_ = filters.of(settings.source)
    captured_refusals = {each: error for each, error in refusals.items() if filter_.includes(*each)}
    return KnownCollections(0, accepted_namespaces, captured_refusals)


@stored_files.one_look()
def read(spark: SparkSession, settings: Settings, *, log: str | None = None) -> KnownCollections:
    """The collections of a pipeline in `ops/collections`, none where it does not exist; `discovered` and `of_others` are for the
    history `log` of bronze."""
    table = delta.layout(settings.lakehouse).ops("collections")
    if delta.found(spark, table) is None:
        return KnownCollections()
    rows = [row for row in _rows(spark, table) if row["pipeline"] == settings.name]
    first_batches: dict[Namespace, int] = {}
    for row in rows:
        if row["db"] is not None:
            namespace = Namespace(row["db"], row["collection"])
            # Recorded more than once after a crash: the earliest batch decides who had the table's name first.
            first_batches[namespace] = min(row["batch"], first_batches.get(namespace, row["batch"]))
    history_rows = [row for row in rows if row["log"] == log]
    collections = with_own_tables(
        settings, sorted(first_batches, key=lambda namespace: (first_batches[namespace], namespace))
    )
    return replace(
        collections,
        discovered=max((row["batch"] for row in history_rows), default=0),
        namespaces=tuple(sorted(collections.namespaces)),
        of_others=frozenset(first_batches).difference((row["db"], row["collection"]) for row in history_rows),
    )


@table_history.cached  # gold reads them each second, and every row is a file until compaction
def _rows(spark: SparkSession, table: tables.TableRef) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = ops_tables.rows(spark, table, SCHEMA).to_pylist()
    return rows


def searched(spark: SparkSession, settings: Settings, namespace: Namespace, *, log: str | None) -> tuple[int, int]:
    """The range of batches (after, to) in which the collection's first events were found in the history `log` of bronze; all batches
    where it is recorded for other histories only."""
    all_rows = _rows(spark, delta.layout(settings.lakehouse).ops("collections"))
    rows = [row for row in all_rows if row["pipeline"] == settings.name and row["log"] == log]
    first_batch = min((row["batch"] for row in rows if (row["db"], row["collection"]) == namespace), default=None)
    if first_batch is None:
        return 0, sys.maxsize
    return max((row["batch"] for row in rows if row["batch"] < first_batch), default=0), first_batch


def note(spark: SparkSession, settings: Settings, *, new: Sequence[Namespace], discovered: int, log: str | None) -> None:
    """Record new collections of a pipeline, and that there are no others up to the batch `discovered` of the history `log`."""
    namespaces: Sequence[tuple[str | None, str | None]] = new or [(None, None)]
    rows = [dict(zip(SCHEMA.names, (*names, discovered, settings.name, log))) for names in namespaces]
    table = delta.layout(settings.lakehouse).ops("collections")
    ops_tables.note(spark, table, rows, SCHEMA)


def chosen(spark: SparkSession, settings: Settings, collection: str | None) -> tuple[Namespace, ...]:
    """The captured collections, or only `collection`, as `database.collection`.

    Raises `SettingsError` where that is unknown.
    """
    namespaces = read(spark, settings).namespaces
    if collection is None:
        return namespaces
    matches = tuple(namespace for namespace in namespaces if str(namespace) == collection)
    if not matches:
        names = [str(namespace) for namespace in namespaces]
        names_text = f"known are {', '.join(names[:10])}" if names else "there is none yet: medallion silver makes them"
        hint = values.did_you_mean(collection, names) or names_text
        raise errors.SettingsError(errors.Problem("--collection", f"silver knows no collection {collection}", hint))
    return matches


@dataclass(frozen=True)
class CaughtUp:
    """States that all silver tables are complete up to the bronze batch `batch`.

    Valid while every silver table is at the position in the digest `of`: restoring, rebuilding or removing a table voids it.
    """

    batch: int
    of: str

    @staticmethod
    def at(batch: int, positions: Mapping[Namespace, SilverPosition]) -> CaughtUp:
        """The statement for silver tables that are at these positions."""
        # One digest of all, so that a single table that moved voids it.
        places = sorted((str(namespace), position.to, position.generation) for namespace, position in positions.items())
        return CaughtUp(batch, hashlib.blake2b(json.dumps(places).encode(), digest_size=12).hexdigest())

    @staticmethod
    def among(positions: Mapping[Namespace, SilverPosition]) -> int:
        """The greatest batch of the statements that are valid for these positions; 0 where there is none."""
        digest = CaughtUp.at(0, positions).of
        return max(
            (each.settled.batch for each in positions.values() if each.settled and each.settled.of == digest), default=0
        )


def is_other_log(log: str | None, other: str | None) -> bool:
    """Whether batch numbers of the bronze `log` mean nothing for the `other` one; unnamed logs count as the same."""
    return None not in (log, other) and log != other


@dataclass(frozen=True)
class SilverPosition:
    """The position of a silver table at its `version`."""

    to: int = 0
    """The bronze batch up to which it is applied."""
    high: str | None = None
    """The greatest sequence of the events that it has read; None where unknown."""
    swept: str = ""
    """The sequence of its last sweep."""
    generation: str = ""
    """The name that a rebuild gave to its rows."""
    floor: str = ""
    """The sequence of its last drop or rename; older events are not applied any more."""
    log: str | None = None
    """The history of bronze whose batches these are; None where it is unnamed."""
    documents: bool | None = None
    """Whether its rows hold whole documents; None where only some do, or it is unknown."""
    added: tuple[str, ...] = ()
    """The columns that `add.fields` and `add.headers` ever added."""
    version: int = -1
    settled: CaughtUp | None = field(default=None, compare=False)
    """The statement about all tables by the last run that released the table cleanly."""
    origin: str = ""
    """Changes when the table is created, repaired or restored: its rows at a batch may then differ from those at the same batch before."""
    bronze: BronzeCommit | None = None
    """The newest commit of bronze when these batches were read. Where bronze's log lacks it, bronze was replaced, and its batch numbers
    have another meaning."""
    deletes: int | None = None
    """The version of the table of remembered deletes with the last of them; None where unknown."""
    kept: int = 0
    """The last batch that was applied in a mode in which rows of deleted documents stay: a delete up to it may be remembered and its row
    stay, where silver was killed in between and the mode changed."""
    is_restored: bool = field(default=False, compare=False)
    """Whether a RESTORE brought these rows back, or another program replaced them, and silver has applied nothing since."""

    def is_of_other(self, log: str | None) -> bool:
        """Whether `to` is a batch of another history of bronze than `log`."""
        return is_other_log(self.log, log)

    @property
    def extra(self) -> dict[str, object]:
        """The metadata of a commit beside `to`."""
        names = ("high", "swept", "generation", "floor", "log", "documents", "added", "origin", "bronze", "deletes", "kept")
        return {name: getattr(self, name) for name in names}


def bronze_commit(metadata: Mapping[str, Any]) -> BronzeCommit | None:
    """The commit of bronze in the metadata of a table's commit."""
    commit = metadata.get("bronze")
    return None if commit is None else (commit[0], commit[1])


def deletes_version(spark: SparkSession, deletes: tables.TableRef) -> int | None:
    """The newest version of a table of remembered deletes; None where it does not exist, or this process cannot read it."""
    folder = local_log.readable(spark, deletes)
    return None if folder is None else local_log.newest_version(folder)


def remembered_to(spark: SparkSession, deletes: tables.TableRef) -> int:
    """The last batch with remembered deletes, or with deletes that maintenance removed; 0 where there is none."""
    folder = local_log.readable(spark, deletes)
    files = None if folder is None else local_log.files(folder)
    spans = (file.between("__batch") for file in files or ())
    forgotten_to = (delta.found(spark, deletes) or {}).get(FORGOTTEN_TO)
    return max(int(forgotten_to or 0), *(span[1] for span in spans if span is not None), 0)


def lacks_deletes(spark: SparkSession, deletes: tables.TableRef, position: SilverPosition) -> bool:
    """Whether the table of remembered deletes is older than the silver table's position: a copy, or after a RESTORE; False where this
    process cannot read it. Raises `StoreUnreachable`.

    For a table in a store mostly two requests: for the position's commit, and for the one after it.
    """
    last = position.deletes
    # Before the catalog is asked for the place: most collections have no such table, and there may be thousands.
    if last is None or (folder := local_log.place(spark, deletes)) is None:
        return False
    try:
        later_commits: Iterator[local_log.Commit]
        if local_log.commit(folder, last) is not None:
            by_version = (local_log.commit(folder, version) for version in itertools.count(last + 1))
            later_commits = iter(lambda: next(by_version), None)
        elif local_log.readable(spark, deletes) is None:
            return False
        elif (local_log.newest_version(folder) or -1) < last:
            return True
        else:  # cleaned up: the log begins after it
            later_commits = local_log.commits(folder)
        return any(commit.restored is not None and commit.restored < last for commit in later_commits)
    except OSError as error:
        raise errors.StoreUnreachable(f"{deletes.label}: its log cannot be read at the moment; start again") from error


def silver_position(spark: SparkSession, table: tables.TableRef) -> SilverPosition:
    """The position of a silver table: from its last commit's metadata, or the greatest batch of its rows as a lower bound."""
    standing = table_history.standing(spark, table)
    if standing.version < 0:
        return SilverPosition()
    metadata = standing.metadata
    # The newest version: later commits such as OPTIMIZE keep the rows, while VACUUM removes the files of older versions.
    if metadata.get("to") is not None:
        plain_names = ("to", "high", "swept", "generation", "floor", "log", "documents", "origin", "deletes", "kept")
        return SilverPosition(
            **{name: metadata[name] for name in plain_names if metadata.get(name) is not None},
            added=tuple(metadata.get("added") or ()),
            version=standing.version,
            settled=CaughtUp(**metadata["settled"]) if "settled" in metadata else None,
            bronze=bronze_commit(metadata),
            is_restored=standing.is_restored,
        )
    # Without the generation, the columns would be read with the schema from before the rebuild.
    generation = delta.check_ours(spark, table).get(GENERATION, "")
    folder = local_log.readable(spark, table)
    # Silver is making it: gold looks at it meanwhile, and would wait for a query.
    if folder is not None and local_log.files(folder) == []:
        return SilverPosition(generation=generation, version=standing.version)
    row = spark.sql(f"SELECT max(`__batch`) AS batch FROM {table} VERSION AS OF {standing.version}").first()
    return SilverPosition(row.batch or 0, generation=generation, version=standing.version, is_restored=standing.is_restored)
