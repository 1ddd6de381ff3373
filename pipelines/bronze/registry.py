"""The captured collections: which there are, and where silver stands with each.

`ops/collections` notes every collection before its silver table is touched, with the bronze batch up to which no other
collection has events: so a run finds new collections without reading bronze from its start. It holds facts of
bronze, each with the names of the pipeline whose bronze it is and of that bronze's history, because the numbers of batches
mean nothing in another one: noting one twice changes nothing, and a lost table is found again from batch 0.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
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
"""A commit of bronze: its version, and what it is called."""

IDLE_BATCHES = 10_000
"""A collection without events moves its position when it is this many batches behind."""

GENERATION = "medallion.generation"
"""The property of a silver table that a rebuild made: what it called the rows, for when the log no longer holds a commit of ours."""

FORGOTTEN_TO = "medallion.forgotten.to"
"""The property of a table of remembered deletes from which maintenance took old ones: the last batch of those."""


class Namespace(NamedTuple):
    """One captured collection."""

    db: str
    collection: str

    @classmethod
    def parse(cls, name: str) -> Namespace:
        """That of a name as `str` gives it: no database has a dot in its name."""
        return cls(*name.split(".", 1))

    def __str__(self) -> str:
        return f"{self.db}.{self.collection}"

    @property
    def is_temporary(self) -> bool:
        """Whether MongoDB made it for the time of one command (`$out`, map-reduce, a rename between databases)."""
        return _TEMPORARY.match(self.collection) is not None

    @property
    def predicate(self) -> str:
        """The collection's rows, as SQL over bronze."""
        return f"db = {literal(self.db)} AND collection = {literal(self.collection)}"


_TEMPORARY = re.compile(r"tmp\.(agg_out|mr)\.|tmp\w{5}\.renameCollection$")


@dataclass(frozen=True)
class KnownCollections:
    """The collections that have events in bronze batches up to `discovered`, in the order of their names.

    `refused` are those without tables, because a collection that was known before has the name that theirs would get, `of_others` those
    that were noted of other bronzes alone.
    """

    discovered: int = 0
    namespaces: tuple[Namespace, ...] = ()
    refused: Mapping[Namespace, errors.DecisionNeeded] = field(default_factory=dict)
    of_others: frozenset[Namespace] = frozenset()


def with_own_tables(settings: Settings, namespaces: Sequence[Namespace]) -> KnownCollections:
    """The collections, in the order in which they were found, without those whose tables would have the name of an
    earlier one's.

    A collection that is no longer captured is not reported.
    """
    layout = delta.layout(settings.lakehouse)
    if layout.root is not None:
        # Folders tell all names apart (`layout.path_name`), and a service asks for thousands, time and again.
        return KnownCollections(0, tuple(namespaces))
    owners: dict[str, Namespace] = {}
    kept: list[Namespace] = []
    refused: dict[Namespace, errors.DecisionNeeded] = {}
    for namespace in namespaces:
        table = layout.silver(*namespace)
        owner = owners.setdefault(table.key, namespace)
        if owner == namespace:
            kept.append(namespace)
        else:
            refused[namespace] = errors.DecisionNeeded(
                f"{namespace}: its table would be {table.label}, which already belongs to {owner}; remove one of them from "
                "the include list, or use another pipeline with its own schema_prefix"
            )
    if refused:  # read for these alone: a list may have thousands of names
        chosen = filters.of(settings.source)
        refused = {each: error for each, error in refused.items() if chosen.includes(*each)}
    return KnownCollections(0, tuple(kept), refused)


@stored_files.one_look()
def read(spark: SparkSession, settings: Settings, *, log: str | None = None) -> KnownCollections:
    """What `ops/collections` holds of a pipeline; `discovered` and `of_others` count for the bronze whose history is called `log`.
    Nothing where the table does not exist yet."""
    table = delta.layout(settings.lakehouse).ops("collections")
    if delta.found(spark, table) is None:
        return KnownCollections()
    rows = [row for row in _rows(spark, table) if row["pipeline"] == settings.name]
    first: dict[Namespace, int] = {}
    for row in rows:
        if row["db"] is not None:
            namespace = Namespace(row["db"], row["collection"])
            # Noted more than once after a crash: the earliest says when it was first seen, and who had the table's name
            # first.
            first[namespace] = min(row["batch"], first.get(namespace, row["batch"]))
    own = [row for row in rows if row["log"] == log]
    known = with_own_tables(settings, sorted(first, key=lambda namespace: (first[namespace], namespace)))
    return replace(
        known,
        discovered=max((row["batch"] for row in own), default=0),
        namespaces=tuple(sorted(known.namespaces)),
        of_others=frozenset(first).difference((row["db"], row["collection"]) for row in own),
    )


def _rows(spark: SparkSession, table: tables.TableRef) -> list[dict[str, Any]]:
    """The table's rows, kept until it has another commit: gold asks each second, and each note is a file until they are compacted."""
    newest = table_history.commits(spark, table, limit=1)
    if table not in _READ or _READ[table][0] != newest:
        _READ[table] = newest, ops_tables.rows(spark, table, SCHEMA).to_pylist()
    return _READ[table][1]


_READ: dict[tables.TableRef, tuple[list[local_log.Commit], list[dict[str, Any]]]] = {}


def searched(spark: SparkSession, settings: Settings, namespace: Namespace, *, log: str | None) -> tuple[int, int]:
    """The batches up to which the bronze `log` was searched before the collection was found, and then: its first events lie between.
    Anywhere, where it was noted of other bronzes alone."""
    noted = _rows(spark, delta.layout(settings.lakehouse).ops("collections"))
    rows = [row for row in noted if row["pipeline"] == settings.name and row["log"] == log]
    found = min((row["batch"] for row in rows if (row["db"], row["collection"]) == namespace), default=None)
    if found is None:
        return 0, sys.maxsize
    return max((row["batch"] for row in rows if row["batch"] < found), default=0), found


def note(spark: SparkSession, settings: Settings, *, new: Sequence[Namespace], discovered: int, log: str | None) -> None:
    """Note new collections of a pipeline, and that there is no other up to the batch `discovered` of the bronze `log`."""
    named: Sequence[tuple[str | None, str | None]] = new or [(None, None)]
    rows = [dict(zip(SCHEMA.names, (*names, discovered, settings.name, log))) for names in named]
    table = delta.layout(settings.lakehouse).ops("collections")
    ops_tables.note(spark, table, rows, SCHEMA)


def chosen(spark: SparkSession, settings: Settings, collection: str | None) -> tuple[Namespace, ...]:
    """The captured collections, or the one that is named `database.collection`.

    Raises `SettingsError` where there is no such one.
    """
    known = read(spark, settings).namespaces
    if collection is None:
        return known
    found = tuple(namespace for namespace in known if str(namespace) == collection)
    if not found:
        names = [str(namespace) for namespace in known]
        known_are = f"known are {', '.join(names[:10])}" if names else "there is none yet: medallion silver makes them"
        hint = values.did_you_mean(collection, names) or known_are
        raise errors.SettingsError(errors.Problem("--collection", f"silver knows no collection {collection}", hint))
    return found


@dataclass(frozen=True)
class CaughtUp:
    """No collection has events that its table lacks, up to the bronze batch `batch`.

    Valid while every silver table is at the position that went into the digest `of`: a table that is restored, rebuilt or
    removed voids it.
    """

    batch: int
    of: str

    @staticmethod
    def at(batch: int, positions: Mapping[Namespace, SilverPosition]) -> CaughtUp:
        """The statement for silver tables that are at these positions."""
        # All of them in one digest: the statement is about the set, and a single table that moved makes it void.
        places = sorted((str(namespace), each.to, each.generation) for namespace, each in positions.items())
        return CaughtUp(batch, hashlib.blake2b(json.dumps(places).encode(), digest_size=12).hexdigest())

    @staticmethod
    def among(positions: Mapping[Namespace, SilverPosition]) -> int:
        """The greatest batch that a table states for exactly these positions; 0 where none does."""
        of = CaughtUp.at(0, positions).of
        return max((each.settled.batch for each in positions.values() if each.settled and each.settled.of == of), default=0)


@dataclass(frozen=True)
class SilverPosition:
    """Where a silver table stands, at its `version`."""

    to: int = 0
    """The bronze batch up to which it is applied."""
    high: str | None = None
    """The greatest sequence that it has seen; None where its history no longer says."""
    swept: str = ""
    """The sequence of its last sweep."""
    generation: str = ""
    """What a rebuild called its rows."""
    floor: str = ""
    """The sequence of its last drop or rename, before which nothing may arrive any more."""
    log: str | None = None
    """The bronze whose batches these are; None where it has no name."""
    documents: bool | None = None
    """Whether its rows hold whole documents; None where nothing says so."""
    added: tuple[str, ...] = ()
    """The columns that `add.fields` and `add.headers` ever made."""
    version: int = -1
    settled: CaughtUp | None = field(default=None, compare=False)
    """What the last run that left the table cleanly found out about all tables."""
    origin: str = ""
    """Another one where the rows began anew: the table was made, repaired or restored since, and what was read of it at a batch may
    not be what it held at that batch the second time."""
    bronze: BronzeCommit | None = None
    """The newest commit of the bronze in which these batches were found. Where bronze's log does not hold it any more, bronze was replaced,
    and the numbers of its batches are not these."""
    deletes: int | None = None
    """The version of the table of remembered deletes that holds the last of them; None where nothing says so."""

    def is_of_other(self, log: str | None) -> bool:
        """Whether `to` counts the batches of another bronze than the one whose history is called `log`."""
        return None not in (log, self.log) and self.log != log

    @property
    def extra(self) -> dict[str, object]:
        """What a commit says beside `to`."""
        names = ("high", "swept", "generation", "floor", "log", "documents", "added", "origin", "bronze", "deletes")
        return {name: getattr(self, name) for name in names}


def bronze_commit(metadata: Mapping[str, Any]) -> BronzeCommit | None:
    """The commit of bronze that a table's commit names."""
    found = metadata.get("bronze")
    return None if found is None else (found[0], found[1])


def deletes_version(deletes: tables.TableRef) -> int | None:
    """The newest version of a table of remembered deletes; None where this process does not see it, or it is not there."""
    folder = local_log.folder(deletes)
    return None if folder is None else local_log.newest_version(folder)


def remembered_to(spark: SparkSession, deletes: tables.TableRef) -> int:
    """The last batch of which deletes are known to be remembered, or were until maintenance forgot them; 0 where there is none."""
    folder = local_log.folder(deletes)
    files = None if folder is None else local_log.files(folder)
    spans = (file.between("__batch") for file in files or ())
    forgotten = (delta.found(spark, deletes) or {}).get(FORGOTTEN_TO)
    return max(int(forgotten or 0), *(span[1] for span in spans if span is not None), 0)


def lacks_deletes(deletes: tables.TableRef, position: SilverPosition) -> bool:
    """Whether the table of remembered deletes is an older copy than the silver table at this position, as far as this process sees it."""
    if position.deletes is None or local_log.folder(deletes) is None:
        return False
    newest = deletes_version(deletes)
    return newest is None or newest < position.deletes


def silver_position(spark: SparkSession, table: tables.TableRef) -> SilverPosition:
    """Where a silver table stands: its last commit's metadata, or the greatest batch of its rows as a lower bound."""
    at = table_history.standing(spark, table)
    if at.version < 0:
        return SilverPosition()
    metadata = at.said
    # At the newest version, whose rows are those of the position: what others committed since, such as OPTIMIZE, leaves them as they
    # are, and the files of older versions to VACUUM.
    if metadata.get("to") is not None:
        return SilverPosition(
            metadata["to"],
            metadata.get("high"),
            metadata.get("swept") or "",
            metadata.get("generation") or "",
            metadata.get("floor") or "",
            metadata.get("log"),
            metadata.get("documents"),
            tuple(metadata.get("added") or ()),
            at.version,
            CaughtUp(**metadata["settled"]) if "settled" in metadata else None,
            metadata.get("origin") or "",
            bronze_commit(metadata),
            metadata.get("deletes"),
        )
    # Without its generation the table's columns would be read by the schema that they had before the rebuild.
    generation = delta.check_ours(spark, table).get(GENERATION, "")
    row = spark.sql(f"SELECT max(`__batch`) AS batch FROM {table} VERSION AS OF {at.version}").first()
    return SilverPosition(row.batch or 0, generation=generation, version=at.version)
