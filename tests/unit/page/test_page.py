"""The status page: one self-contained HTML text. Also the Grafana dashboard."""

from __future__ import annotations

import errno
import html
import json
import re
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from pipelines.capture import metrics
from pipelines.delta import tables as delta
from pipelines.operations import status
from pipelines.page import audits, page
from tests.harness import processes
from tests.harness.captures import pipeline
from tests.harness.page_content import judged, layer, seen

ROOT = Path(__file__).resolve().parents[3]


def test_expectations_are_reported_by_table() -> None:
    """Refused tables come first, and in a table its unmet expectations; each has its verdicts in the runs before."""
    refused, other = audits.audited(judged())
    assert (refused.table, refused.is_published, other.table, other.is_published) == ("shop.orders", False, "totals", True)
    assert [(each.arguments, each.is_met, each.past) for each in refused.verdicts] == [
        ("min_value: 0", False, (True, True, False)),
        ("max_value: 50", True, (True, True, True)),
    ]
    assert other.verdicts[0].failure == "MetricError"


def test_the_page_says_everything_and_asks_no_network() -> None:
    """It contains all numbers, plots and tables, names are escaped, and nothing is loaded from the network."""
    text = page.rendered(seen())
    assert "<orders>" not in text and "shop.&lt;orders&gt;" in text
    for said in (
        "12,345", "MongoDB 6.0.5", "17 events, 2 min", "total INT → DOUBLE", "1.2 MB", "not published; the last good version stays",
        "7 of 900", "&lt;k1&gt;; k2", "min_value: 0", "could not be checked: MetricError", "2 not met", "shop.orders not published",
        "process 42 on host-a", "differs", "1 d 1 h",
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


def test_the_last_day_is_read_from_the_batches_of_that_day(tmp_path: Path) -> None:
    """Bronze is skipped by batch. What it holds of earlier days, perhaps years, is not read."""
    settings = pipeline("mongodb://127.0.0.1", tmp_path, "shop")
    now_ms, statements = 1_700_000_000_000, []
    log = Path(delta.layout(settings.lakehouse).bronze(settings.name).path or "", "_delta_log")
    log.mkdir(parents=True)
    for hours in range(100):  # one commit an hour, the last of them now
        metadata = json.dumps({"writer": "w", "to": "t", "batch": hours})
        info = {"timestamp": now_ms - (99 - hours) * 3_600_000, "userMetadata": metadata}
        (log / f"{hours:020}.json").write_text(json.dumps({"commitInfo": info}) + "\n")

    class Spark:
        def sql(self, statement: str) -> Any:
            statements.append(statement)
            return SimpleNamespace(collect=list)

    spark: Any = Spark()
    reader = page._PageReader(spark, settings, status.PipelineStatus("shop", now_ms, status.ServerStatus(), None, ()))
    assert [each.events for each in reader.points()] == [0] * page.POINTS
    assert "batch > 75" in statements[0]


def test_a_history_has_its_place_where_one_is_kept() -> None:
    """Its backlog is shown like that of silver and gold."""
    content = seen()
    orders = replace(content.status.collections[0], history=layer("history", 9, lag_events=23, lag_seconds=90))
    kept = replace(content, status=replace(content.status, collections=(orders,)))
    assert "23 events, 1 min 30 s" in page.rendered(kept) and "history behind" in page.rendered(kept)
    assert "history behind" not in page.rendered(content)


def test_a_collection_that_silver_has_not_found_is_shown_to_wait() -> None:
    """It has no table yet, only events in bronze."""
    content = seen()
    found = status.CollectionStatus("shop.found", None, None, None, 1234, 0)
    text = page.rendered(replace(content, status=replace(content.status, collections=(found,))))
    assert "<td>1,234 events</td><td>–</td>" in text


def test_what_gold_has_no_table_of_is_named_beside_its_lag() -> None:
    """Else the lag of the other tables would be that of all of gold. A collection without documents has nothing to publish."""
    content = seen()
    refused = status.CollectionStatus("shop.refused", None, layer("silver", 9, lag_events=3, lag_seconds=7200), None, 3, 0)
    found = status.CollectionStatus("shop.found", None, None, None, 1234, 0)
    emptied = status.CollectionStatus("shop.emptied", None, layer("silver", 2, deleted=2), None, 0, 0)
    collections = (*content.status.collections, refused, found, emptied)
    cards = page._cards(replace(content, status=replace(content.status, collections=collections)))
    card = page.Card("gold behind", "2 h", "shop.refused, shop.found not in gold yet", "look")
    assert card in cards
    assert page.Card("gold behind", "0 s", "the oldest event that waits") in page._cards(content)


def test_what_cannot_be_counted_is_not_zero() -> None:
    """A collection whose tables cannot be read has an unknown number of quarantined events: the cards name it, and are not fine."""
    content = seen()
    whole = replace(content.status.collections[0], collection="shop.a", quarantined=0, silver=None, gold=layer("gold", 1))
    damaged = status.CollectionStatus("shop.b", None, None, None, 0, 0, problem="its files are missing", exit_code=3)
    text = page.rendered(replace(content, status=replace(content.status, collections=(whole, damaged))))
    for about in (
        "events without shop.b",
        "rows with rescued values without shop.b",
        "the oldest event that waits without shop.b",
    ):
        (mood,) = re.findall(rf'<b class="(\w*)">[^<]*</b><span class="quiet">{about}<', text)
        assert mood == "look", about
    (row,) = re.findall(r"<td><code>shop.b</code></td>.*?</tr>", text, re.DOTALL)
    assert ">0<" not in row and "its files are missing" in row


def test_a_snapshot_that_reads_no_more_says_so() -> None:
    """As in `medallion status`: a failed snapshot with the reason, and a paused one."""
    content = seen()
    said = {
        "failed: the filter &lt;x&gt; is refused</span>": status.SnapshotStatus(9, False, "the filter <x> is refused"),
        "<td>1,234 read, paused</td>": status.SnapshotStatus(1234, False, is_paused=True),
        "<td>1,235 read</td>": status.SnapshotStatus(1235, False),
        "<td>done</td>": status.SnapshotStatus(1236, True),
    }
    collections = tuple(replace(content.status.collections[0], snapshot=each) for each in said.values())
    text = page.rendered(replace(content, status=replace(content.status, collections=collections)))
    assert [each for each in said if each not in text] == []


def test_names_of_any_characters_are_text() -> None:
    """Names with tags, quotes, control characters, marks of direction or two hundred letters are text, and shortened beside a bar."""
    content = seen()
    hostile = ("</title><script>x</script>", "shop.\x01\x0b]]>&\"'\u202e", f"shop.{'long' * 50}")
    collections = tuple(replace(content.status.collections[0], collection=name) for name in hostile)
    status_ = replace(content.status, name=hostile[0], collections=collections)
    text = page.rendered(replace(content, status=status_))
    assert "<script" not in text and text.count("</title>") == text.count("<title>")
    labels = re.findall(r"<text[^>]*>(shop\.[^<]*)</text>", text)
    assert labels and all(len(html.unescape(each)) <= 28 and each.isprintable() for each in labels), labels
    assert html.escape(hostile[2]) in text
    assert "shop.\\x01\\x0b]]&gt;&amp;&#34;&#39;\\u202e" in text
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []


def test_what_could_not_be_judged_is_not_equal() -> None:
    """Rows whose last change is not yet in gold are a separate state; an older verification of another layer counts too."""
    content = seen()
    equal = {**content.verifications[0], "is_equal": True, "missing": 0}
    waiting = {**equal, "waiting": 7, "layer": "silver"}
    text = page.rendered(replace(content, verifications=(equal, waiting)))
    assert '<span class="look">not checked</span>' in text and ">differs<" not in text
    assert "not checked" not in page.rendered(replace(content, verifications=(equal,)))


def test_an_equal_sample_is_not_an_equal_collection() -> None:
    """`verify --sample` compares a few documents: the page says so, and not that all of them are equal."""
    content = seen()
    sample = {**content.verifications[0], "is_equal": True, "is_sample": True, "missing": 0}
    text = page.rendered(replace(content, verifications=(sample, content.verifications[0])))
    assert '<span class="fine">sample equal</span>' in text and '<span class="fine">equal</span>' not in text


def test_a_pipeline_that_never_ran_has_a_page_too() -> None:
    """Without bronze it says how to start."""
    source = status.ServerStatus(problem="no server answered in time")
    text = page.rendered(page.PageContent(status.PipelineStatus("shop", 0, source, None, ())))
    assert "nothing yet" in text and "start with medallion run" in text and "no server answered in time" in text


def test_the_page_cannot_be_written() -> None:
    """A missing folder is one line of error."""
    with pytest.raises(errors.SettingsError, match=r"--html: cannot write .*page.html"):
        page.write(Path("/nowhere/at/all/page.html"), "")


def test_a_page_without_room_is_temporary() -> None:
    with pytest.raises(errors.StorageExhausted, match=r"cannot write /dev/full: No space left"):
        page.write(Path("/dev/full"), "page")


def test_the_page_of_before_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """A reader always sees a complete page, and a full disk or a kill keeps the old one."""
    path, link = tmp_path / "page.html", tmp_path / "link"
    link.symlink_to(path)
    page.write(link, "old")
    with pytest.raises(UnicodeEncodeError):
        page.write(path, 100_000 * "new" + "\ud800")
    assert path.read_text() == "old" and sorted(tmp_path.iterdir()) == [link, path]
    path.chmod(0o600)  # the page shows keys of documents: its owner decides who may read it
    page.write(link, "new")
    assert path.read_text() == "new" and link.is_symlink() and sorted(tmp_path.iterdir()) == [link, path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_page_goes_where_no_file_can_be_put_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a pipe, or into a file that can only be written in place, as one that is mounted into a container."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EBUSY, "mounted")

    monkeypatch.setattr(Path, "replace", refuse)
    path = tmp_path / "page.html"
    page.write(path, "page")
    page.write(Path("/dev/null"), "page")
    assert path.read_text() == "page" and [*tmp_path.iterdir()] == [path] and not Path("/dev/null").is_file()


def test_the_port_shows_metrics_and_the_page() -> None:
    """`/metrics` and `/` are served together. The page is cached for a while, and an error is reported without its message."""
    made: list[str] = []

    def whole() -> str:
        made.append("page")
        if len(made) > 1:
            raise ValueError("a document's text")
        return "<p>a page</p>"

    port = processes.free_port()
    with metrics.serve(metrics.Metrics("shop"), port=port, address="127.0.0.1", page=whole):
        assert metrics.scrape("shop", port=port, address="127.0.0.1")["medallion_commits"] == 0
        assert [_asked(port), _asked(port), len(made)] == ["<p>a page</p>", "<p>a page</p>", 1]
        for path in ("", "metrics"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    with (
        metrics.serve(metrics.Metrics("shop"), port=port, address="127.0.0.1", page=whole),
        pytest.raises(urllib.error.HTTPError) as refused,
    ):
        _asked(port)
    assert (refused.value.code, refused.value.read()) == (500, b"the page could not be created: ValueError\n")
    refused.value.close()


def _asked(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        return str(answer.read().decode())


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every metric in resources/grafana.json is exported by the capture and documented."""
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
    """Pygal adds one without `find_spec`, with which every later import in the process would warn."""
    page.rendered(seen())
    assert all(hasattr(each, "find_spec") for each in sys.meta_path)
