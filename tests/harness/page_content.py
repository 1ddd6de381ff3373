"""Invented content of a pipeline's page."""

from __future__ import annotations

from typing import Any

from pipelines.operations import status
from pipelines.page import audits, page

WRITER = status.WriterStatus("host-a", 42, False, 99)


def layer(name: str, rows: int, **more: int) -> status.TableStatus:
    counts = {"deleted": 0, "incomplete": 0, "rescued": 0, "lag_batches": 0, "lag_events": 0, "lag_seconds": 0, **more}
    return status.TableStatus(table=f"/lake/{name}", version=7, batch=3, rows=rows, rate=1.0, writer=WRITER, **counts)


def seen() -> page.PageContent:
    bronze = status.BronzeStatus("/lake/bronze", 9, 12_345, 1_700_000_000, 3, 90_000, 12.5, WRITER)
    orders = status.CollectionStatus(
        "shop.<orders>",
        status.SnapshotStatus(1000, True),
        layer("silver", 1001, rescued=5, incomplete=2, lag_events=17, lag_seconds=130),
        layer("gold", 1000),
        17,
        4,
    )
    told = dict.fromkeys(("missing", "extra", "different", "waiting", "changing", "kept", "incomplete"), 0)
    verified = {
        "collection": "shop.<orders>", "layer": "gold", "at_ms": 1_700_000_000_000, "is_equal": False, "documents": 1000,
        "equal": 997, **told, "missing": 3, "quarantined": 0, "unsettled": 0, "repaired": 0, "milliseconds": 1500,
    }  # fmt: skip
    return page.PageContent(
        status.PipelineStatus(
            "shop", 1_700_000_000_000, status.ServerStatus("MongoDB 6.0.5", 1_700_000_003), bronze, (orders,)
        ),
        points=tuple(page.Point(1_700_000_000_000 + 900_000 * n, n * 10, None if n < 50 else n / 10) for n in range(96)),
        changes=(page.SchemaChangeRow("shop.<orders>", "widened", "total INT → DOUBLE", 9, 1_700_000_000),),
        verifications=(verified,),
        audits=audits.audited(judged()),
        tables=(page.TableSummary("gold shop.<orders>", 7, 3, 1_234_567, "process 42 on host-a, lease for 99 s more"),),
    )


def judged() -> list[dict[str, Any]]:
    """Rows of `ops/expectations`: three runs over one table, the newest of them refused, and one run over another table."""
    shared = {"at_ms": 1_700_000_000_000, "is_published": True, "judged": "changed", "rows": 900, "unexpected": 0}
    shared |= {"examples": [], "failure": None, "severity": "critical"}
    low = {"expectation": "expect_column_values_to_be_between", "columns": ["total"]}
    low |= {"arguments": '{"column": "total", "min_value": 0, "batch_id": "x"}'}
    high = low | {"arguments": '{"column": "total", "max_value": 50}', "severity": "warning"}
    unmet = {"is_met": False, "is_published": False, "unexpected": 7, "examples": ["<k1>", "k2"]}
    rows = [shared | each | {"table": "shop.orders", "place": n, "is_met": True} for n in (3, 2) for each in (low, high)]
    rows += [
        shared | each | {"table": "shop.orders", "place": 1}
        for each in (low | unmet, high | {"is_met": True, "is_published": False})
    ]
    count = {"expectation": "expect_table_row_count_to_be_between", "columns": [], "arguments": None, "judged": "whole"}
    count |= {"rows": None, "unexpected": None, "is_met": False, "failure": "MetricError", "severity": "info"}
    return [*rows, shared | count | {"table": "totals", "place": 1}]
