"""The page: everything that status knows in one text that asks no network, and the dashboard beside it."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from pipelines.capture import metrics
from pipelines.operations import status
from pipelines.page import audits, page

ROOT = Path(__file__).resolve().parents[2]
WRITER = status.WriterStatus("host-a", 42, False, 99)


def layer(name: str, rows: int, **more: int) -> status.TableStatus:
    counts = {"deleted": 0, "incomplete": 0, "rescued": 0, "lag_batches": 0, "lag_events": 0, "lag_seconds": 0, **more}
    return status.TableStatus(table=f"/lake/{name}", version=7, batch=3, rows=rows, rate=1.0, writer=WRITER, **counts)


def seen() -> page.PageContent:
    bronze = status.Bronze("/lake/bronze", 9, 12_345, 1_700_000_000, 3, 90_000, 12.5, WRITER)
    orders = status.Collection(
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
        status.Status("shop", 1_700_000_000_000, status.ServerStatus("MongoDB 6.0.5", 1_700_000_003), bronze, (orders,)),
        points=tuple(page.Point(1_700_000_000_000 + 900_000 * n, n * 10, None if n < 50 else n / 10) for n in range(96)),
        changes=(page.SchemaChangeRow("shop.<orders>", "widened", "total INT → DOUBLE", 9, 1_700_000_000),),
        verifications=(verified,),
        audits=audits.audited(judged()),
        tables=(page.TableSummary("gold shop.<orders>", 7, 3, 1_234_567, "process 42 on host-a, lease for 99 s more"),),
    )


def judged() -> list[dict[str, Any]]:
    """Rows of `ops/expectations`: three runs over one table, the newest of which was refused, and one over another."""
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


def test_expectations_are_reported_by_table() -> None:
    """What was refused comes first, and in it what was not met, each with its verdicts in the runs before."""
    refused, other = audits.audited(judged())
    assert (refused.table, refused.is_published, other.table, other.is_published) == ("shop.orders", False, "totals", True)
    assert [(each.arguments, each.is_met, each.past) for each in refused.verdicts] == [
        ("min_value: 0", False, (True, True, False)),
        ("max_value: 50", True, (True, True, True)),
    ]
    assert other.verdicts[0].failure == "MetricError"


def test_the_page_says_everything_and_asks_no_network() -> None:
    """Numbers, plots and tables are in it, names are escaped, and nothing in it is fetched from anywhere."""
    text = page.rendered(seen())
    assert "<orders>" not in text and "shop.&lt;orders&gt;" in text
    for said in (
        "12,345", "MongoDB 6.0.5", "17 events, 2 min", "total INT → DOUBLE", "1.2 MB", "kept back, the last good version stays",
        "7 of 900", "&lt;k1&gt;; k2", "min_value: 0", "could not be judged: MetricError", "2 not met", "shop.orders kept back",
        "process 42 on host-a", "differs", "25 h",
    ):  # fmt: skip
        assert said in text, said
    assert text.count("<svg") == 4
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert "<script" not in text and "<link" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!#)|url\((?!#)|@import""", text)
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_a_pipeline_that_never_ran_has_a_page_too() -> None:
    """Without bronze it says what begins it."""
    source = status.ServerStatus(problem="no server answered in time")
    text = page.rendered(page.PageContent(status.Status("shop", 0, source, None, ())))
    assert "nothing yet" in text and "medallion run begins it" in text and "no server answered in time" in text


def test_the_page_cannot_be_written() -> None:
    """A folder that is not there is told in one line."""
    with pytest.raises(errors.SettingsError, match=r"--html: .*page.html cannot be written"):
        page.write(Path("/nowhere/at/all/page.html"), "")


def test_the_port_shows_metrics_and_the_page() -> None:
    """`/metrics` and `/` answer side by side; what the page meets is told without its message, and kept for a while."""
    made: list[str] = []

    def whole() -> str:
        made.append("page")
        if len(made) > 1:
            raise ValueError("a document's text")
        return "<p>a page</p>"

    port = _free_port()
    with metrics.serve(metrics.Metrics("shop"), port=port, address="127.0.0.1", page=whole):
        assert metrics.scrape(port=port, address="127.0.0.1")["medallion_commits"] == 0
        assert [_asked(port), _asked(port), len(made)] == ["<p>a page</p>", "<p>a page</p>", 1]
    with (
        metrics.serve(metrics.Metrics("shop"), port=port, address="127.0.0.1", page=whole),
        pytest.raises(urllib.error.HTTPError) as refused,
    ):
        _asked(port)
    assert (refused.value.code, refused.value.read()) == (500, b"the page could not be made: ValueError\n")
    refused.value.close()


def _asked(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        return str(answer.read().decode())


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every metric that a panel of resources/grafana.json names is told by a capture, and documented."""
    dashboard = json.loads((ROOT / "resources" / "grafana.json").read_text(encoding="utf-8"))
    found = metrics.Metrics("shop", headroom_hours=1.0)
    found.streaming.committed({}, position=(5, 6), at=7)
    found.streaming.committed({}, position=(5, 7), at=8)
    shown = {sample.name for family in found.families(now=9) for sample in family.samples}
    shown |= {family.name for family in found.families(now=9)}
    documents = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in asked for name in re.findall(r"(?:debezium_metrics|medallion)_\w+", text)}
    assert len(named) > 10
    assert named <= shown
    for name in named:
        base = re.sub(r"(P50|P95|P99)$", "", name.removeprefix("debezium_metrics_"))
        assert base in documents, name


def test_drawing_plots_leaves_no_finder_behind() -> None:
    """One without find_spec lets every later import warn, in whatever process drew a page."""
    assert all(hasattr(each, "find_spec") for each in sys.meta_path)
