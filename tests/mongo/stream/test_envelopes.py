"""Agreement with Debezium's connector, event by event: the same workload on a real server gives the same envelopes.

`tests/cases/envelopes` contains the connector's records of `tests.harness.connector_workload` in 45 configurations. Each of them is
imported as connector properties, and a stream per configuration follows two passes of the workload. Its bronze rows are compared with the
records in order: operation, key, update description, session, transaction, and the exact text of documents in Debezium's dialects. Every
deviation must be one of `Difference`, with the frequency in `COUNTS`. Where the connector stopped or lost its stream, `STANDS_IN` and
`promised.json` contain what its documentation promises instead.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bson.timestamp import Timestamp

from cdc_core.bronze import source_block
from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json.dialects import Dialect
from cdc_core.settings import debezium_import
from cdc_core.settings import parse as settings
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from tests.harness import captured
from tests.harness import recorded as lines_of
from tests.harness.connector_workload import IDS, REFUSED_IDS, Workload

CASES = Path(__file__).resolve().parents[2] / "cases" / "envelopes"
Event = dict[str, Any]
Row = dict[str, Any]

RECORDED_DB = "oracle"


class Difference(enum.Enum):
    """Permitted deviations from the connector, and their reasons."""

    TOMBSTONE = "a delete is one row: the null value after it exists for Kafka's compaction"
    HEARTBEAT = "heartbeats are rows that the capture commits when nothing else comes, and no records of a stream"
    REPEATED_END = "an END comes once; the real one repeats it with every event until the next transaction begins"
    WINDOW = "nothing is written to the source, where the real one opens and closes a snapshot's windows"
    LONG_DOUBLE = "the real one's Java writes a few doubles with more digits, or other ones, than they need"
    LOOK_UP = "a document that is deleted right after its update is found by one look-up and not by another"
    WILDCARD = "`addr.*` means every field of `addr`, in updates too; the real one only loses `$unset` of `addr`"
    UNSET_ABOVE = "an `$unset` of `addr` stays where only `addr.zip` is excluded; the real one loses it"
    BELOW_ARRAY = "an `$unset` inside an excluded array is excluded; the real one lets `items.0.qty` pass"
    TRUNCATED = "an array that is truncated and holds an excluded field is no error; the real one stops"
    TAKEN = "a rename onto a name that the event holds leaves the field as it was; the real one stops"


COUNTS: dict[Difference | None, int] = {
    None: 13_832,
    Difference.TOMBSTONE: 761,
    Difference.HEARTBEAT: 3,
    Difference.REPEATED_END: 48,
    Difference.WINDOW: 10,
    Difference.LONG_DOUBLE: 32,
    Difference.LOOK_UP: 7,
    Difference.WILDCARD: 22,
    Difference.UNSET_ABOVE: 2,
    Difference.BELOW_ARRAY: 1,
    Difference.TRUNCATED: 5,
    Difference.TAKEN: 3,
}
"""How many records show each difference; None counts equal ones."""

STANDS_IN = {
    "collection_include_initial_spaces": "collection_include_initial_uppercase",
    "collection_include_literal": "literal_exact_case",
    "signal_trap_no_list": "signal_with_database_list",
    "field_exclude_truncate_crash": "skipped_none",
    "field_renames_collision": "skipped_none",
}
"""Configurations in which the connector lost its stream or stopped, and those with the events that its documentation promises:

spaces around names are ignored, literal names ignore case as all names do, a signal collection does not narrow the stream, and excluded or
renamed fields (see `promised.json`) do not end it.
"""


@dataclass(frozen=True)
class Run:
    """A configuration of the connector; `small`, `pre`, `skip` and `signal` describe the recorded workload."""

    name: str
    config: Mapping[str, str]
    small: bool = False
    pre: bool = False
    skip: str | None = None
    signal: bool = False

    @property
    def is_initial(self) -> bool:
        return self.config["snapshot.mode"] == "initial"

    def settings(self, uri: str, db: str) -> settings.Settings:
        """The settings that `medallion import-debezium` makes of it, with another database."""
        named = json.dumps(self.config).replace(RECORDED_DB, db).replace(RECORDED_DB.upper(), db.upper())
        connector = {"topic.prefix": "dbz", "mongodb.connection.string": uri, **json.loads(named)}
        return settings.parse(debezium_import.imported(connector, root="lake").document)


RUNS = [Run(name, **given) for name, given in json.loads((CASES / "connectors.json").read_text()).items()]


@functools.cache
def recorded() -> dict[str, list[Event]]:
    return lines_of.by("run", CASES / "events.jsonl.xz")


# --- capturing -------------------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """The rows of one run's snapshot and of its stream."""

    snapshot: list[Row]
    stream: list[Row]


@pytest.fixture(scope="module")
def every(mongodb_uri: str) -> dict[str, Captured]:
    """All runs, in two passes of the workload: with images and without."""
    return {
        **passed(mongodb_uri, [run for run in RUNS if run.pre]),
        **passed(mongodb_uri, [run for run in RUNS if not run.pre]),
    }


def passed(uri: str, runs: Sequence[Run]) -> dict[str, Captured]:
    """One pass of the workload with a stream for each run; documents are looked up before they change again."""
    db = f"test_{uuid.uuid4().hex[:12]}"
    given = {run.name: run.settings(uri, db) for run in runs}
    streams: dict[str, captured.Stream] = {}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(mongodb.client(uri, retryWrites=False)))
        retrying = stack.enter_context(contextlib.closing(mongodb.client(uri)))
        workload = Workload(client, retrying, db, images=runs[0].pre)

        def opened(chosen: Iterable[Run]) -> None:
            now = mongodb_server.operation_time(client)
            for run in chosen:
                streams[run.name] = stream = captured.Stream(given[run.name], client, Timestamp(now.time, now.inc + 1))
                stack.callback(stream.close)

        def read(names: Iterable[str]) -> None:
            until = mongodb_server.operation_time(client)
            for name in names:
                streams[name].read(until)

        def snapshots(chosen: Iterable[Run], kind: str) -> dict[str, list[Row]]:
            after = mongodb_server.operation_time(client)
            return {run.name: captured.snapshot_rows(given[run.name], client, after=after, kind=kind) for run in chosen}

        stack.callback(client.drop_database, db)
        workload.base()
        opened(run for run in runs if not (run.small or run.is_initial))
        workload.types()
        workload.ids()
        opened(run for run in runs if run.small or run.is_initial)
        taken = snapshots((run for run in runs if run.is_initial), "true")
        workload.changes(settle=lambda: read(streams))
        read(streams)
        signalled = [run for run in runs if run.signal]
        taken |= snapshots(signalled, "incremental")
        tables = {name: stream.table for name, stream in streams.items()}
        workload.signal()
        read(run.name for run in signalled)
        tables |= {run.name: streams[run.name].table for run in signalled}
    return {name: Captured(renamed(taken.get(name, []), db), renamed(rows, db)) for name, rows in tables.items()}


def renamed(rows: Iterable[Row], db: str) -> list[Row]:
    """The rows of the pass's own database, with the name of the recorded one."""
    own = json.dumps([row for row in rows if row["db"] in (db, None)], ensure_ascii=False)
    named: list[Row] = json.loads(own.replace(db, RECORDED_DB))
    return named


# --- comparing -------------------------------------------------------------------------------------------------------

SESSION = re.compile(r'(?<=\{"id": \{"\$binary": ")[^"]+')
DOCUMENTS = ("before", "after", "updatedFields")
DESCRIPTION = ("updatedFields", "removedFields", "truncatedArrays")


def real(event: Event) -> Event:
    """A record of the connector in the form that is compared."""
    if "transaction" in event:
        transaction: Event = event["transaction"]
        return transaction
    description = event.get("updateDescription") or {}
    names = ("collection", "op", "key", "before", "after", "lsid", "txnNumber", "block")
    return {
        **{name: event.get(name) for name in names},
        **{name: description.get(name) for name in DESCRIPTION},
    }


def ours(row: Row) -> Event:
    """A row of bronze in the form that is compared: in the dialects and with the parts of a record."""
    if row["kind"] == "transaction":
        payload = json.loads(row["payload"])
        counted = sorted(payload["data_collections"] or (), key=lambda each: each["data_collection"])
        return {
            "status": payload["status"],
            "event_count": payload["event_count"],
            "id": anonymous(payload["id"]),
            "data_collections": counted or None,
        }
    description = row["updateDescription"] or {}
    block = row["transaction"]
    return {
        "collection": row["collection"],
        "op": row["op"],
        "key": rendered_key(row),
        "before": rendered(row["before"]),
        "after": rendered(row["after"]),
        "lsid": anonymous(row["source"]["lsid"]),
        "txnNumber": row["source"]["txnNumber"],
        "block": None if block is None else {**block, "id": anonymous(block["id"])},
        "updatedFields": rendered(description.get("updatedFields"), Dialect.RELAXED, comma=", "),
        "removedFields": description.get("removedFields"),
        "truncatedArrays": description.get("truncatedArrays"),
    }


def rendered(text: str | None, dialect: Dialect = Dialect.STRICT, *, comma: str = ",") -> str | None:
    return None if text is None else debezium_json.render(json.loads(text), dialect, comma=comma)


def rendered_key(row: Row) -> str:
    """The key's `id`: the `_id` of the document key, or of the document that a snapshot read."""
    id_ = json.loads(row["documentKey"] or row["after"])["_id"]
    return debezium_json.render(id_, Dialect.RELAXED)


def anonymous(text: str | None) -> str | None:
    """A session's text without its unique identifier."""
    return None if text is None else SESSION.sub("SESSION", text)


def place(event: Event) -> tuple[Any, ...]:
    """What an event is about, without its content."""
    return tuple(event.get(name) for name in ("collection", "op", "key", "status", "id"))


def is_recorded(run: Run, event: Event) -> bool:
    """Whether the recorded workload made this event, too."""
    match event:
        case {"status": _}:
            return True
        case {"collection": "probe"}:
            return False
        case {"collection": "types" | "ids"} | {"collection": "tset", "op": "u"} if run.small:
            return False
    return event["op"] == "r" or run.skip is None or event["key"] != json.dumps(run.skip)


def left_out(event: Event, before: Event | None) -> Difference | None:
    """Why a record of the connector has no row."""
    match event:
        case {"tombstone": True}:
            return Difference.TOMBSTONE
        case {"heartbeat": True}:
            return Difference.HEARTBEAT
        case {"transaction": {"status": "END"}} if event["transaction"] == before:
            return Difference.REPEATED_END
        case {"collection": "signals", "case": str(case)} if case.startswith("unknown/"):
            return Difference.WINDOW
    return None


@functools.cache
def promised(run: str) -> dict[str, Event]:
    """What events of a run must contain instead of the recorded values, by case."""
    found: list[Event] = json.loads((CASES / "promised.json").read_text(encoding="utf-8"))
    return {event["case"]: event for event in found if event["run"] == run}


@dataclass
class Expected:
    """The events that a run must have, recorded or promised ones; `seen` counts records without a row."""

    run: Run
    snapshot: list[Event]
    stream: list[tuple[str, Event]]
    seen: collections.Counter[Difference | None]


def expected(run: Run) -> Expected:
    found = Expected(run, [], [], collections.Counter())
    ended: Event | None = None
    for event in recorded()[STANDS_IN.get(run.name, run.name)]:
        why = left_out(event, ended)
        if why is not None:
            found.seen[why] += 1
        elif event.get("op") == "r":
            found.snapshot.append(real(event))
        else:
            instead = promised(run.name).get(event["case"], {})
            changed = {name: value for name, value in instead.items() if name in (*DOCUMENTS, *DESCRIPTION)}
            found.stream.append((event["case"], {**real(event), **changed}))
        if event.get("transaction", {}).get("status") == "END":
            ended = event["transaction"]
    return found


def difference(case: str, ours: Event, real: Event) -> Difference | None:
    """The permitted difference that the event shows; fails for any other."""
    other = {name for name in real if ours[name] != real[name]}
    if not other:
        return None
    if case.startswith("racy_") and other == {"after"} and ours["after"] is None:
        return Difference.LOOK_UP
    for name in other:
        assert name in DOCUMENTS and None not in (ours[name], real[name]), (case, name, ours[name], real[name])
        assert debezium_json.parse(ours[name]) == debezium_json.parse(real[name]), (case, name)
    return Difference.LONG_DOUBLE


# --- the tests -------------------------------------------------------------------------------------------------------


def seen_in_stream(run: Run, rows: Iterable[Row]) -> collections.Counter[Difference | None]:
    """The differences of a run's stream, counted; fails if an event is missing, additional, in another place, or different."""
    wanted = expected(run)
    found = [ours(row) for row in rows if row["kind"] in ("change", "transaction")]
    found = [event for event in found if is_recorded(run, event)]
    assert [place(event) for event in found] == [place(event) for _, event in wanted.stream]
    seen = wanted.seen
    for event, (case, recorded_event) in zip(found, wanted.stream, strict=True):
        why = difference(case, event, recorded_event)
        instead = promised(run.name).get(case)
        seen[Difference[instead["why"]] if why is None and instead is not None else why] += 1
    return seen


def seen_in_snapshot(run: Run, rows: Iterable[Row]) -> collections.Counter[Difference | None]:
    """The differences of its snapshot, whose rows have no order."""
    wanted = {place(event): event for event in expected(run).snapshot}
    found = {place(event): event for event in map(ours, rows) if is_recorded(run, event)}
    assert found.keys() == wanted.keys()
    return collections.Counter(difference("", found[key], wanted[key]) for key in found)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_stream_has_the_connectors_events(run: Run, every: dict[str, Captured]) -> None:
    """All events and no others, in the same order and with the same content."""
    seen_in_stream(run, every[run.name].stream)


@pytest.mark.parametrize("run", [run for run in RUNS if run.is_initial or run.signal], ids=lambda run: run.name)
def test_a_snapshot_has_the_connectors_rows(run: Run, every: dict[str, Captured]) -> None:
    """Every document as it was at that time, whatever `skipped.operations` says, and marked as part of a snapshot."""
    rows = every[run.name].snapshot
    seen_in_snapshot(run, rows)
    assert {row["source"]["snapshot"] for row in rows} <= ({"incremental"} if run.signal else {"true", "last"})


def test_differences_are_as_many_as_is_known(every: dict[str, Captured]) -> None:
    """Every record of every run is equal or shows a known difference, as often as expected."""
    seen: collections.Counter[Difference | None] = collections.Counter()
    for run in RUNS:
        seen += seen_in_stream(run, every[run.name].stream) + seen_in_snapshot(run, every[run.name].snapshot)
    assert seen == COUNTS


def test_all_sources_are_the_connectors(every: dict[str, Captured]) -> None:
    """Cluster time in whole seconds, `ord` within the second, and the wall time of changes; rows without a time have no source."""
    for run in RUNS:
        for row in [*every[run.name].snapshot, *every[run.name].stream]:
            check_source(row)


def check_source(row: Row) -> None:
    source = row["source"]
    if row["kind"] not in ("change", "snapshot", "schema_change"):
        assert source is None
        return
    seconds = int(row["sequence"][:8], 16)
    assert source["ts_ms"] == seconds * 1_000
    assert (source["ts_us"], source["ts_ns"]) == (seconds * 1_000_000, seconds * 1_000_000_000)
    assert source["ord"] == int(row["sequence"][8:16], 16) > 0
    assert (source["version"], source["connector"], source["name"]) == (source_block.VERSION, "mongodb", "dbz")
    assert (source["db"], source["collection"]) == (row["db"], row["collection"])
    if row["kind"] == "snapshot":
        assert source["wallTime"] is None
    else:
        assert source["snapshot"] is None
        assert abs(source["wallTime"] - source["ts_ms"]) < 60_000


def test_lists_reach_every_name_on_them(every: dict[str, Captured]) -> None:
    """`probe` is in every list, in some of them after a space: its one insert is in every stream with inserts."""
    counts = {run.name: len([row for row in every[run.name].stream if row["collection"] == "probe"]) for run in RUNS}
    assert counts == {run.name: int(run.name != "skipped_c") for run in RUNS}


def test_lists_reach_no_other_name(every: dict[str, Captured]) -> None:
    """Lists of collections and pipelines exclude all events of other collections."""
    narrow = [run for run in RUNS if any(name.startswith(("collection.", "cursor.")) for name in run.config)]
    assert len(narrow) == 10
    for run in narrow:
        rows = [*every[run.name].snapshot, *every[run.name].stream]
        assert not {"types", "tset", "ids"} & {row["collection"] for row in rows}


def test_a_repeated_field_is_kept(every: dict[str, Captured]) -> None:
    """If a field occurs twice in a document the connector sends the last value; the text in bronze has both."""
    [row] = [row for row in every["cs_nodata"].stream if row["key"] == '"duplicate_field"']
    assert row["after"] == '{"_id":"duplicate_field","v":1,"v":"second"}'


def test_a_document_has_one_key(every: dict[str, Captured]) -> None:
    """For every type of `_id`, the snapshot row, update, replacement and delete have the same key."""
    found = every["full_initial"]
    read = [row["key"] for row in found.snapshot if row["collection"] == "ids"]
    changed = [row for row in found.stream if row["collection"] == "ids"]
    assert len(set(read)) == len(read) == len(IDS) - len(REFUSED_IDS)
    assert collections.Counter(row["key"] for row in changed) == dict.fromkeys(read, 3)


def test_collections_that_come_and_go_leave_rows(every: dict[str, Captured]) -> None:
    """The connector sends nothing for a rename or a drop; in bronze each is a row of its own in its place."""
    rows = [row for row in every["cs_nodata"].stream if row["collection"] in ("ddl", "ddl2")]
    said = [(json.loads(row["payload"])["operation"] if row["op"] is None else row["op"], row["key"]) for row in rows]
    assert said == [
        ("create", None),
        ("c", "1"),
        ("rename", None),
        ("c", "2"),
        ("drop", None),
        ("create", None),
        ("c", "3"),
    ]


def test_a_signal_is_heard_in_its_place(every: dict[str, Captured]) -> None:
    """A signal in a captured collection is a change followed by a signal; later events follow both."""
    rows = every["incremental_snapshot"].stream
    [at] = [number for number, row in enumerate(rows) if row["kind"] == "signal"]
    assert (rows[at - 1]["collection"], rows[at - 1]["key"]) == ("signals", '"sig1"')
    assert [row["key"] for row in rows[at:] if row["kind"] == "change"] == ['"o9"']
