"""Requests a cut from a running pipeline, which makes it while its own silver and gold are paused.

Both sides communicate through the append-only table `ops/cut_requests`. The states of its rows:

    serving     a process runs all layers, and polls this table
    asked       a client requests a cut
    taken       the running pipeline makes it
    made        it is in `ops/cuts`; or
    failed      with the message and exit code of the error
    withdrawn   the client has stopped waiting

A pipeline that is killed in between has recorded no cut, and the client gets an error.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from cdc_core.tables.layout import TableRef
from pipelines import clock
from pipelines.delta import ops_tables, owners, table_history
from pipelines.delta import tables as delta
from pipelines.operations import cut
from pipelines.spark import failures as spark_failures
from pipelines.spark import parallel

log = logging.getLogger(__name__)

_PROCESS = ("host", "process", "started")

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("name", pa.string()),
        ("state", pa.string()),
        ("at_ms", pa.int64()),
        ("host", pa.string()),
        ("process", pa.int64()),
        ("started", pa.string()),
        ("as_of", pa.string()),
        ("cut", pa.string()),
        ("made_ms", pa.int64()),
        ("code", pa.int64()),
        ("message", pa.string()),
    ]
)
"""`name` is the pipeline's; `host`, `process` and `started` identify the writing process; the other columns belong to single states."""

SERVING, ASKED, TAKEN, MADE, FAILED, WITHDRAWN = "serving", "asked", "taken", "made", "failed", "withdrawn"

LOOK_SECONDS = 0.5
TAKE_SECONDS = 60.0
"""How long a running pipeline may take to accept a request: it looks every `signal.poll.interval.ms`, and at least four times in this."""
SAY_SECONDS = 43_200.0
"""How often a pipeline writes `serving` again: old rows of ops expire while it runs."""


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    as_of: str,
    take_over: bool = False,
    sessions: parallel.Sessions | None = None,
    stop: threading.Event | None = None,
) -> cut.Cut:
    """The cut, made by the running pipeline, or by `cut.run` in this process if none runs.

    Raises what `cut.run` raises, and `Temporary` if the pipeline ends before the cut is made.
    """
    if take_over or not _is_served(spark, settings):
        return cut.run(spark, settings, as_of=as_of, take_over=take_over, sessions=sessions, stop=stop)
    return _asked(spark, settings, as_of=as_of, stop=stop or threading.Event())


def _table(settings: Settings) -> TableRef:
    return delta.layout(settings.lakehouse).ops("cut_requests")


def _rows(spark: SparkSession, settings: Settings) -> list[dict[str, Any]]:
    table = _table(settings)
    if not delta.exists(spark, table):
        return []
    rows = ops_tables.rows(spark, table, SCHEMA).to_pylist()
    return sorted((row for row in rows if row["name"] == settings.name), key=lambda row: row["at_ms"])


def _record(spark: SparkSession, settings: Settings, state: str, id_: str = "", **fields: object) -> None:
    identity = owners.identity()
    head = {"id": id_, "name": settings.name, "state": state, "at_ms": clock.now_ms()}
    row = {**head, **{name: getattr(identity, name) for name in _PROCESS}, **fields}
    ops_tables.note(spark, _table(settings), [row], SCHEMA)


def _process(record: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(record.get(name) for name in _PROCESS)


def _is_served(spark: SparkSession, settings: Settings, by: Mapping[str, Any] | None = None) -> bool:
    """Whether the process that holds bronze's claim serves requests; with `by`, whether it wrote this row."""
    holder = owners.holder(spark, delta.layout(settings.lakehouse).bronze(settings.name))
    if holder is None:
        return False
    serving_rows = [by] if by is not None else [row for row in _rows(spark, settings) if row["state"] == SERVING]
    return _process(holder) in map(_process, serving_rows)


# The client


def _asked(spark: SparkSession, settings: Settings, *, as_of: str, stop: threading.Event) -> cut.Cut:
    id_ = uuid.uuid4().hex
    _record(spark, settings, ASKED, id_, as_of=as_of)
    log.info("%s: asking the running pipeline for the cut", settings.name)
    until = time.monotonic() + TAKE_SECONDS
    taken_row: Mapping[str, Any] | None = None
    while not stop.wait(LOOK_SECONDS):
        # Check this before reading the rows: a pipeline that ends right after the cut has written `made` by then.
        is_served = _is_served(spark, settings, taken_row)
        states = {row["state"]: row for row in _rows(spark, settings) if row["id"] == id_}
        if MADE in states:
            return cut.named(cut.read(spark, settings), states[MADE]["cut"])
        if FAILED in states:
            raise _error(states[FAILED])
        if not is_served:
            end_message = "the pipeline that runs ended before the cut was made; nothing was noted. Try again"
            if TAKEN in states:  # killed between the cut and its answer, it has noted the cut
                end_message = (
                    "the pipeline that ran ended before it answered; medallion cut list shows whether the cut was made"
                )
            return _withdrawn(spark, settings, id_, end_message)
        taken_row = states.get(TAKEN)
        if taken_row is None and time.monotonic() > until:
            busy_message = f"the pipeline that runs did not take the request up in {TAKE_SECONDS:.0f} s; try again"
            return _withdrawn(spark, settings, id_, busy_message)
    return _withdrawn(spark, settings, id_, "stopped before the cut was made")


def _withdrawn(spark: SparkSession, settings: Settings, id_: str, why: str) -> cut.Cut:
    _record(spark, settings, WITHDRAWN, id_)
    raise errors.Temporary(f"{settings.name}: {why}")


def _error(record: Mapping[str, Any]) -> errors.MedallionError:
    """The pipeline's error, with its exit code."""
    kinds: tuple[type[errors.MedallionError], ...] = (errors.SettingsError, errors.DecisionNeeded, errors.Temporary)
    kind = next((each for each in kinds if each.exit_code == record["code"]), errors.MedallionError)
    return kind(record["message"])


# The running pipeline


@dataclass(frozen=True)
class _RequestOutcome:
    """The outcome of a request: a state and its columns."""

    state: str
    fields: Mapping[str, object]


def serve(spark: SparkSession, settings: Settings, make: Callable[[str], cut.Cut], *, stop: threading.Event) -> int:
    """Make requested cuts until `stop` is set; returns how many. Errors go to the client; only `SparkLost` is raised."""
    # Also where signals are hardly ever polled: the command that asks waits.
    pause, cuts_made, last_version = min(settings.source.signal_poll_interval_ms / 1000, TAKE_SECONDS / 4), 0, -1
    serving_at: float | None = None
    last_warning = ""
    # Kept until they are written: the client waits as long as this process lives.
    unrecorded: dict[str, _RequestOutcome] = {}
    while not stop.is_set():
        try:
            is_said = serving_at is not None and time.monotonic() - serving_at <= SAY_SECONDS
            # Also where somebody has removed the table: until then no client would ask.
            if not (is_said and delta.exists(spark, _table(settings))):
                unrecorded = _unanswered(spark, settings) | unrecorded
                _record(spark, settings, SERVING)
                serving_at, last_version = time.monotonic(), -1
            _record_outcomes(spark, settings, unrecorded)
            # Reading the version is cheaper than reading rows, and requests are rare.
            version = table_history.version(spark, _table(settings))
            for request in _open(spark, settings) if version != last_version else ():
                unrecorded[request["id"]] = outcome = _answer(spark, settings, request, make)
                cuts_made += outcome.state == MADE
                _record_outcomes(spark, settings, unrecorded)
            last_version, last_warning = version, ""
        except Exception as error:  # for example an unreadable table: the next poll tries again
            if stop.is_set():
                break
            failure = spark_failures.of_one(error)  # raises where Spark is lost: layers that run no query would not notice
            earlier, last_warning = last_warning, errors.message_of(failure)
            if last_warning != earlier:  # repeated every few seconds while a store is down, it would hide other messages
                log.warning("requests for cuts were not looked at: %s", last_warning)
        stop.wait(pause)
    return cuts_made


def _open(spark: SparkSession, settings: Settings) -> list[dict[str, Any]]:
    """The requests that are neither taken nor withdrawn, oldest first.

    Includes old ones, because the clocks of two hosts may differ: at worst a cut is made for a client that was killed.
    """
    rows = _rows(spark, settings)
    settled_ids = {row["id"] for row in rows if row["state"] not in (ASKED, SERVING)}
    return [row for row in rows if row["state"] == ASKED and row["id"] not in settled_ids]


def _unanswered(spark: SparkSession, settings: Settings) -> dict[str, _RequestOutcome]:
    """The outcome of requests that this process took before its Spark ended, and another one was started: their clients still wait."""
    identity = owners.identity()
    rows = [row for row in _rows(spark, settings) if _process(row) == tuple(getattr(identity, name) for name in _PROCESS)]
    answered_ids = {row["id"] for row in rows if row["state"] in (MADE, FAILED)}
    message = "Spark ended before the answer was written, so that it is not known whether the cut was noted; try again"
    outcome = _RequestOutcome(FAILED, {"code": errors.Temporary.exit_code, "message": message})
    return {row["id"]: outcome for row in rows if row["state"] == TAKEN and row["id"] not in answered_ids}


def _answer(
    spark: SparkSession, settings: Settings, request: Mapping[str, Any], make: Callable[[str], cut.Cut]
) -> _RequestOutcome:
    """Make the cut; returns the outcome."""
    try:
        # If this commit fails with an unknown outcome, the request may count as taken and would never be retried: it fails.
        _record(spark, settings, TAKEN, request["id"])
        new_cut = make(request["as_of"])
    except Exception as error:
        failure = spark_failures.translated(error) or error
        log.warning("a requested cut was not made: %s", errors.message_of(failure))
        return _RequestOutcome(FAILED, {"code": errors.code(failure), "message": errors.message_of(failure)})
    log.info("%s: made the requested cut %s", settings.name, new_cut.name)
    return _RequestOutcome(MADE, {"cut": new_cut.name, "made_ms": new_cut.made_ms})


def _record_outcomes(spark: SparkSession, settings: Settings, unrecorded: dict[str, _RequestOutcome]) -> None:
    """Write outcomes for the clients; those that could not be written stay in `unrecorded`."""
    for id_, outcome in list(unrecorded.items()):
        _record(spark, settings, outcome.state, id_, **outcome.fields)
        del unrecorded[id_]
