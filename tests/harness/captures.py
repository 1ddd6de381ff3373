"""Captures of a database of the run's server, and what they landed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cdc_core.settings import parse as settings
from pipelines.capture import service as capture
from pipelines.capture.progress import CaptureResult
from pipelines.delta import tables as delta
from pipelines.spark import session as sparks
from tests.harness import oracle, sessions


def pipeline(uri: str, root: Path, db: str, **source: Any) -> settings.Settings:
    """Settings that capture all of one database."""
    chosen = {"database.include.list": db} if "collection.include.list" not in source else {}
    return settings.parse(
        {"name": "shop", "lakehouse": {"root": str(root)}, "source": {"mongodb.connection.string": uri, **chosen, **source}}
    )


def rows(_: Any, found: settings.Settings) -> list[Any]:
    """All bronze rows in order, as an independent reader has them: a query of Spark's takes many times as long."""
    return [_row(each) for each in oracle.read(table(found).path or "").sort_by("offset").to_pylist()]


def _row(value: Any) -> Any:
    """A row whose fields are attributes, as a row of Spark has them."""
    if isinstance(value, dict):
        return SimpleNamespace(**{name: _row(item) for name, item in value.items()})
    return [_row(item) for item in value] if isinstance(value, list) else value


def table(found: settings.Settings) -> Any:
    return delta.layout(found.lakehouse).bronze(found.name)


def once(spark: Any, found: settings.Settings, **more: Any) -> CaptureResult:
    return capture.run(spark, found, once=True, sessions=sessions.kept(spark), **more)


def check_numbers(found: list[Any]) -> None:
    """Offsets and batches are dense and in order, and every batch ends with a token of the stream."""
    assert [row.offset for row in found] == list(range(len(found)))
    batches = [row.batch for row in found]
    assert batches == sorted(batches)
    assert sorted(set(batches)) == list(range(1, batches[-1] + 1))
    last = {row.batch: row for row in found}
    assert all(row.resume_token.startswith("82") for row in last.values())


class Running:
    """A capture in a thread, stopped at the end of a block; its error is raised there."""

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
        self._thread.join(60)
        if self.error is not None:
            raise self.error


def until(predicate: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


QUICK = {"signal.poll.interval.ms": 200, "commit.interval.ms": 200}


def signals(landed: list[Any]) -> list[dict[str, Any]]:
    return [json.loads(row.payload) for row in landed if row.kind == "signal"]


def snapshots(landed: list[Any]) -> list[tuple[str, str]]:
    """Each snapshot row's `source.snapshot` and key."""
    return [(row.source.snapshot, row.key) for row in landed if row.kind == "snapshot"]


def plans(landed: list[Any]) -> list[dict[str, Any]]:
    """What the heartbeats say of snapshots, in order."""
    payloads = [json.loads(row.payload) for row in landed if row.kind == "heartbeat"]
    return [payload["snapshot"] for payload in payloads if "snapshot" in payload]


def done(spark: Any, found: Any, signal: str) -> bool:
    """Whether the snapshot that a signal asked for is read to its end."""
    ids = {plan["id"] for plan in plans(rows(spark, found)) if plan.get("signal") == signal}
    return any(plan["id"] in ids and plan.get("done") for plan in plans(rows(spark, found)))


def notifications(_: Any, found: Any) -> list[tuple[str, str, str]]:
    noted = oracle.read(delta.layout(found.lakehouse).ops("notifications").path or "").sort_by("timestamp").to_pylist()
    return [(row["aggregate_type"], row["id"], row["type"]) for row in noted]
