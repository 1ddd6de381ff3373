"""Captures of one database of the tests' server, and the rows that they wrote."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pymongo.errors import OperationFailure

from cdc_core.settings import parse as settings
from pipelines.capture import service as capture
from pipelines.capture.progress import CaptureResult
from pipelines.delta import tables as delta
from pipelines.snapshot import snapshot
from pipelines.spark import session as sparks
from tests.harness import oracle, sessions


def pipeline(uri: str, root: Path, db: str, **source: Any) -> settings.Settings:
    """Settings that capture all of one database."""
    chosen = {"database.include.list": db} if "collection.include.list" not in source else {}
    return settings.parse(
        {"name": "shop", "lakehouse": {"root": str(root)}, "source": {"mongodb.connection.string": uri, **chosen, **source}}
    )


def rows(_: Any, found: settings.Settings) -> list[Any]:
    """All bronze rows in order, read by delta-rs, because a Spark query takes many times as long."""
    return [_row(each) for each in oracle.read(table(found).path or "").sort_by("offset").to_pylist()]


def _row(value: Any) -> Any:
    """A row with its fields as attributes, like Spark's `Row`."""
    if isinstance(value, dict):
        return SimpleNamespace(**{name: _row(item) for name, item in value.items()})
    return [_row(item) for item in value] if isinstance(value, list) else value


def table(found: settings.Settings) -> Any:
    return delta.layout(found.lakehouse).bronze(found.name)


def once(spark: Any, found: settings.Settings, **more: Any) -> CaptureResult:
    return capture.run(spark, found, once=True, sessions=sessions.kept(spark), **more)


def check_numbers(found: list[Any]) -> None:
    """Assert that offsets and batches are in order without gaps, and that every batch ends with a token of the stream."""
    assert [row.offset for row in found] == list(range(len(found)))
    batches = [row.batch for row in found]
    assert batches == sorted(batches)
    assert sorted(set(batches)) == list(range(1, batches[-1] + 1))
    last = {row.batch: row for row in found}
    assert all(row.resume_token.startswith("82") for row in last.values())


class Running:
    """A capture in a thread. The end of the block stops it and raises its error."""

    def __init__(self, spark: Any, found: settings.Settings) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.result: CaptureResult | None = None
        self._thread = threading.Thread(target=self._run, args=(spark, found))

    def _run(self, spark: Any, found: settings.Settings) -> None:
        try:
            self.result = capture.run(spark, found, stop=self.stop, sessions=sparks.sessions(spark))
        except BaseException as error:
            self.error = error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(PATIENCE)
        if self.error is not None:
            raise self.error
        assert not self.is_alive, "the capture does not end"


PATIENCE = 180.0
"""Seconds to wait for what must happen: a capture waits ten before it starts over, and a busy machine is slow."""


def until(predicate: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@contextlib.contextmanager
def held_snapshots(documents: int) -> Iterator[None]:
    """Pause every snapshot after more than `documents` documents, until its run is stopped.

    Otherwise a snapshot may have read everything before the main thread stops the run.
    """
    commit = snapshot.Snapshot._commit

    def held(taking: snapshot.Snapshot, *given: Any) -> None:
        commit(taking, *given)
        if taking.state.documents > documents:
            taking.stopped.wait(PATIENCE)

    with mock.patch.object(snapshot.Snapshot, "_commit", held):
        yield


def step_down(client: Any, seconds: int) -> None:
    """Make the primary step down. A server that is too busy to do so within `seconds` is asked again."""

    def has_stepped_down() -> bool:
        try:
            client.admin.command({"replSetStepDown": seconds, "force": True})
        except OperationFailure as error:
            if error.code not in NOT_IN_TIME:
                raise
            return False
        return True

    until(has_stepped_down)


NOT_IN_TIME = (24, 262)
"""The codes of a step-down that took too long: LockTimeout and ExceededTimeLimit."""

QUICK = {"signal.poll.interval.ms": 200, "commit.interval.ms": 200}


def signals(landed: list[Any]) -> list[dict[str, Any]]:
    return [json.loads(row.payload) for row in landed if row.kind == "signal"]


def snapshots(landed: list[Any]) -> list[tuple[str, str]]:
    """Each snapshot row's `source.snapshot` and key."""
    return [(row.source.snapshot, row.key) for row in landed if row.kind == "snapshot"]


def plans(landed: list[Any]) -> list[dict[str, Any]]:
    """The states of snapshots in the heartbeats, in order."""
    payloads = [json.loads(row.payload) for row in landed if row.kind == "heartbeat"]
    return [payload["snapshot"] for payload in payloads if "snapshot" in payload]


def done(spark: Any, found: Any, signal: str) -> bool:
    """Whether the snapshot that a signal requested is complete."""
    ids = {plan["id"] for plan in plans(rows(spark, found)) if plan.get("signal") == signal}
    return any(plan["id"] in ids and plan.get("done") for plan in plans(rows(spark, found)))


def notifications(_: Any, found: Any) -> list[tuple[str, str, str]]:
    noted = oracle.read(delta.layout(found.lakehouse).ops("notifications").path or "").sort_by("timestamp").to_pylist()
    return [(row["aggregate_type"], row["id"], row["type"]) for row in noted]
