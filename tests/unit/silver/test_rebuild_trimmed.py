"""A rebuild during maintenance, without a JVM."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.delta import table_comparison
from pipelines.delta import tables as delta
from pipelines.silver.rebuild import SilverRebuild


def test_nothing_is_compared_where_events_went_from_bronze_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shadow that lacks these events may look complete by its keys."""
    is_whole = iter((True, False))
    edges = SimpleNamespace(first=lambda: SimpleNamespace(first=1, last=3))
    spark: Any = SimpleNamespace(sql=lambda _: edges, table=lambda name: name)
    found: Any = SimpleNamespace(writer=SimpleNamespace(table="shadow"), layout=None)
    compared: list[object] = []
    monkeypatch.setattr(bronze_log, "is_whole", lambda *_: next(is_whole))
    monkeypatch.setattr(bronze_log, "newest", lambda *_: bronze_log.BronzeHead(3, "one"))
    monkeypatch.setattr(delta, "exists", lambda *_: True)
    monkeypatch.setattr(registry, "silver_position", lambda *_: registry.SilverPosition(to=3, log="one"))
    monkeypatch.setattr(table_comparison, "compared", lambda *tables, **_: compared.append(tables))
    monkeypatch.setattr(SilverRebuild, "_bronze", SimpleNamespace(label="bronze"))
    monkeypatch.setattr(SilverRebuild, "_shadows", lambda *_: contextlib.nullcontext(iter(())))
    monkeypatch.setattr(SilverRebuild, "_retyped", lambda *_: (found, registry.SilverPosition(to=3)))
    monkeypatch.setattr(SilverRebuild, "_deletes", lambda *_: None)
    monkeypatch.setattr(SilverRebuild, "recorded_schema", lambda *_: SimpleNamespace(schema=None))
    nothing: Any = None
    writer: Any = SimpleNamespace(table="live")
    namespace = registry.Namespace("cases", "orders")
    work = SilverRebuild(spark, nothing, nothing, namespace, writer, False, False, threading.Event())
    with pytest.raises(errors.DecisionNeeded, match="execute-snapshot"):
        work.run()
    assert not compared
