"""What the demo prints, and how it resumes."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.capture.progress import CaptureProgress
from pipelines.demo import embedded_mongodb, shop
from pipelines.demo import run as demo
from pipelines.demo import tables as demo_report
from pipelines.demo.stage import DemoStage


def test_plain_lines_where_the_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at once and then one every ten seconds, each with the whole picture and without control characters."""
    now = [100.0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    played = demo.DemoRun(capture=CaptureProgress(events=1234))
    with demo.telling(Console(file=out, width=120)) as tell:
        for seconds in (0, 3, 9, 10, 15, 21):
            now[0] = 100.0 + seconds
            tell("Starting" if seconds < 10 else demo._picture(played, "The shop is open"))
    lines = out.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [["0", "s"], ["10", "s"], ["21", "s"]]
    assert "Starting" in lines[0] and "The shop is open" in lines[1] and "1,234 events" in lines[1]
    assert "".join(lines).isprintable() and lines[1].split(maxsplit=2)[2].startswith("The shop is open;")


def test_the_queries_name_a_table_as_each_reader_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the demo's parent folder paths are relative, except in Spark's SQL, because Delta only accepts absolute ones."""
    monkeypatch.chdir(tmp_path)
    table = os.path.join("demo", "lakehouse", "gold", "shop", "orders")
    shown = demo_report.queries(tables.TableRef.at(str(tmp_path / table)))
    assert f"delta.`{tmp_path / table}`" in shown["Spark SQL"]
    assert all(f'read_delta("{table}")' in shown[name] for name in ("Polars", "DuckDB"))


def test_a_folder_is_shown_as_it_is_called(tmp_path: Path) -> None:
    """Markup in its name is not interpreted, and does not end the demo."""
    out, folder = io.StringIO(), tmp_path / "a[bold]b[/x]" / "lakehouse"
    given: tuple[Any, ...] = (SimpleNamespace(name="shop"), tables.Layout(root=str(folder)), None, None)
    stage = DemoStage(folder, *given)
    demo_report._show_how_to_query(stage, screen=Console(file=out, width=1000, markup=True))
    assert "a[bold]b[/x]/lakehouse: bronze/shop" in out.getvalue()


def test_the_queries_are_python_whatever_the_folder_is_called() -> None:
    """Quotes and backticks in its name are escaped."""
    odd = tables.TableRef.at('/a "b" `c`/orders')
    for line in demo_report.queries(odd).values():
        compile(line, "shown", "exec")
    assert r"FROM delta.`/a \"b\" ``c``/orders` GROUP" in demo_report.queries(odd)["Spark SQL"]


def test_a_step_that_is_killed_is_not_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents may already be inserted: repeating the insert would fail with a duplicate key at each run."""
    diary, played, stop = MagicMock(), list[int](), threading.Event()
    diary.find_one.side_effect = lambda _: diary.replace_one.call_args and diary.replace_one.call_args.args[1]

    def play(_: object, step: int) -> str:
        played.append(step)
        if len(played) == 2:
            raise KeyboardInterrupt
        if len(played) == 3:
            stop.set()
        return "a step"

    monkeypatch.setattr(shop, "_play", play)
    client: Any = {shop.DIARY[0]: {shop.DIARY[1]: diary}}
    with pytest.raises(KeyboardInterrupt):
        shop.open_for_business(client, stop=stop, each=lambda _: None)
    shop.open_for_business(client, stop=stop, each=lambda _: None)
    assert played == [0, 1, 2]


@pytest.mark.parametrize("folder", ["/proc/demo", "/dev/null", "/dev/null/demo"])
def test_a_folder_that_cannot_be_made_is_a_mistake(folder: str) -> None:
    """It was told as a bug, without the folder."""
    with pytest.raises(errors.SettingsError, match=f"--directory: {folder}"):
        demo.run(Path(folder), mongodb_uri=None, seconds=1, stop=threading.Event())


def test_a_stop_ends_the_report_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of Ctrl-C nothing was noticed while the models were made and the documents compared, and then it ended as after a second one."""
    stop, shown = threading.Event(), []
    monkeypatch.setattr(demo, "_opened", lambda *_, **__: MagicMock())
    monkeypatch.setattr(demo, "_played", lambda *_, **__: demo.DemoRun())
    monkeypatch.setattr(demo.demo_report, "show", lambda *_, **__: shown.append("tables"))

    def models(*_: object, **__: object) -> None:
        shown.append("models")
        stop.set()

    monkeypatch.setattr(demo.quality, "show", models)
    monkeypatch.setattr(demo, "_verify", lambda *_, **__: shown.append("documents"))
    demo.run(tmp_path, mongodb_uri=None, seconds=1, stop=stop)
    assert shown == ["tables", "models"]
    assert "Stopped. Run the demo again" in capsys.readouterr().out


def test_settings_that_no_demo_wrote_stay(tmp_path: Path) -> None:
    """A demo in `conf` or in a folder with a `shop.yml` replaced its settings. Its own it writes again."""
    file = tmp_path / "shop.yml"
    file.write_text("name: shop\n")
    with pytest.raises(errors.SettingsError, match="shop.yml is not of a demo"):
        demo.run(tmp_path, mongodb_uri=None, seconds=1, stop=threading.Event())
    assert file.read_text() == "name: shop\n" and [*tmp_path.iterdir()] == [file]
    file.write_text(demo.SETTINGS.format(head=demo.SETTINGS_HEAD, directory=tmp_path, lakehouse="root: x", interval=1))
    assert demo._prepared(tmp_path) == tmp_path


def test_a_mongod_that_does_not_tell_its_version_is_tried_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is short of memory or disk even its first page may take a minute."""
    slow = tmp_path / "mongod"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(embedded_mongodb, "VERSION_PATIENCE", 0.1)
    with pytest.raises(errors.Temporary, match="mongod --version did not end in 0.1 s"):
        embedded_mongodb.EmbeddedMongoDB(tmp_path, embedded_mongodb.ServerOptions(binary=slow)).start()


def test_a_server_that_does_not_run_is_killed_without_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For `kill`, process 0 is the caller's whole process group."""
    killed: list[int] = []
    monkeypatch.setattr(embedded_mongodb.os, "kill", lambda pid, _: killed.append(pid))
    embedded_mongodb.EmbeddedMongoDB(tmp_path).kill()
    assert killed == []


def test_the_picture_names_the_step_that_came_last() -> None:
    """The newest step is shown, even if its kind was there before."""
    played = demo.DemoRun()
    for step in ("ordered", "paid", "ordered"):
        played.note(step)
    assert "3 operations, last: ordered" in demo._plain(demo._picture(played, ""))
