"""The command line: output for users, exit codes for schedulers."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import click
import pytest

from cdc_core import errors
from cdc_core.settings.parse import Lakehouse
from jobs import command_line, log_lines
from jobs.commands import application, inspection, interrupts
from pipelines import run as layers
from pipelines.capture import service as capture
from pipelines.capture.progress import CaptureResult
from pipelines.delta import ops_tables
from pipelines.delta import tables as delta
from pipelines.operations import cut_requests, maintain, rebuild, status
from pipelines.spark import parallel
from pipelines.spark import session as sparks

ROOT = Path(__file__).resolve().parents[3]
VERBS = (
    "demo",
    "check",
    "capture",
    "silver",
    "gold",
    "cut",
    "models",
    "run",
    "status",
    "verify",
    "maintain",
    "schema",
    "signal",
    "quarantine",
    "rebuild",
    "repair",
    "unwrap",
    "import-debezium",
)


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "shop.yml"
    path.write_text("name: shop\n")
    return path


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch, settings_file: Path):
    """Runs `medallion check` with a pipeline that raises; returns the exit code."""

    def run(error: BaseException, *arguments: str) -> int:
        def raiser(**given: object) -> None:
            raise error

        monkeypatch.setattr(inspection.check, "callback", raiser)
        return command_line.main(["check", "--config", str(settings_file), *arguments])

    return run


def test_the_environment_may_name_the_settings_file(
    monkeypatch: pytest.MonkeyPatch, settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages name commands without `--config`, to be copied; the option wins over `MEDALLION_CONFIG`."""
    seen: list[str] = []
    monkeypatch.setattr(inspection.check, "callback", lambda **given: seen.append(given["config"].name))
    monkeypatch.setenv("MEDALLION_CONFIG", str(settings_file))
    other = settings_file.with_name("other.yml")
    other.touch()
    assert command_line.main(["check"]) == command_line.main(["check", "--config", str(other)]) == 0
    assert seen == [settings_file.name, other.name]
    monkeypatch.setenv("MEDALLION_CONFIG", "missing.yml")
    assert command_line.main(["check"]) == 2
    assert "missing.yml" in capsys.readouterr().err


def test_help_lists_every_command_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` names each command once, with its whole first sentence, and shows examples and exit codes."""
    assert command_line.main(["--help"]) == 0
    text = capsys.readouterr().out
    listed = re.search(r"Commands:\n(.*?)\n\n", text, re.S)
    assert listed is not None
    assert tuple(re.findall(r"^  ([\w-]+) ", listed[1], re.M)) == VERBS
    assert "..." not in listed[1]
    assert "Examples:" in text and "Exit codes:" in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained(verb: str) -> None:
    """Every option of every command has a help text."""
    options = [p for p in command_line.medallion.commands[verb].params if isinstance(p, click.Option)]
    assert options and all(option.help for option in options)
    assert command_line.medallion.commands[verb].help


@pytest.mark.parametrize("verb", ("capture", "silver", "gold", "run"))
def test_every_layer_runs_once_or_continuously(verb: str) -> None:
    """Each command that runs layers has `--take-over` and `--once/--continuous`."""
    names = {name for p in command_line.medallion.commands[verb].params for name in (*p.opts, *p.secondary_opts)}
    assert {"--config", "--take-over", "--once", "--continuous", "--debug"} <= names


@pytest.mark.parametrize("verb", ("capture", "silver", "gold", "run", "maintain", "quarantine", "rebuild", "repair"))
def test_every_writer_can_take_over(verb: str) -> None:
    """Each command that claims tables takes them from an owner that a person knows to be gone."""
    assert "--take-over" in {name for p in command_line.medallion.commands[verb].params for name in p.opts}


@pytest.mark.parametrize("columns", ("80", "100"))
def test_help_cuts_no_option_in_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    """A line that ends within `--as-of` looks like another option."""
    monkeypatch.setenv("COLUMNS", columns)
    for verb in VERBS:
        assert command_line.main([verb, "--help"]) == 0
    assert not re.search(r"-$", capsys.readouterr().out, re.M)


def test_help_answers_at_once() -> None:
    """`--help` does not import Spark, the driver or Arrow."""
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jobs", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"pyspark", "pymongo", "pyarrow", "rich", "yaml"}


@pytest.mark.parametrize(
    "arguments", (["captur"], ["capture"], ["capture", "--config", "missing.yml"], ["status", "--jsn"], [])
)
def test_wrong_arguments_end_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt command or option, or a missing file, is reported on stderr with exit code 2."""
    monkeypatch.delenv("MEDALLION_CONFIG", raising=False)
    assert command_line.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err and not shown.out


@pytest.mark.parametrize(
    ("error", "code"),
    (
        (errors.SettingsError("silver.default: unknown key"), 2),
        (errors.AccessRefused("the server refused the password"), 3),
        (errors.TableOwned("process 7 writes it"), 3),
        (errors.LeaseHeld("a writer on host b holds it"), 75),
        (errors.StorageExhausted("no space left"), 75),
        (errors.MedallionError("something of ours"), 1),
    ),
)
def test_each_error_ends_with_its_code(raising, error, code, capsys: pytest.CaptureFixture[str]) -> None:
    """There is one clear message on stderr, no traceback, and the exit code of the error's class, by whose name the documents give advice."""
    assert raising(error) == code
    shown = capsys.readouterr()
    name = "" if type(error) in (errors.SettingsError, errors.MedallionError) else f" [{type(error).__name__}]"
    assert shown.err == f"medallion: {error}{name}\n"
    assert not shown.out


def test_an_unexpected_exception_is_a_bug(raising, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so, without the exception's text, which may contain a document."""
    assert raising(KeyError("card 4111")) == 1
    line = capsys.readouterr().err
    assert line.startswith("medallion: this is a bug: KeyError at ")
    assert line.count("\n") == 1 and "4111" not in line


@pytest.mark.parametrize("verb", ("capture", "run"))
def test_a_source_that_nobody_serves_is_told_before_spark_starts(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(sparks, "session", never)
    uri = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=500"  # long enough for the connection to be refused
    file = tmp_path / "shop.yml"
    file.write_text(
        f"name: shop\nlakehouse: {{root: {tmp_path}}}\n"
        f"source: {{mongodb.connection.string: '{uri}', database.include.list: [shop]}}\n"
    )
    assert command_line.main([verb, "--once", "--config", str(file)]) == errors.SourceUnreachable.exit_code
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_debug_shows_the_traceback(raising, capsys: pytest.CaptureFixture[str]) -> None:
    """`--debug` adds the traceback and does not change the exit code."""
    assert raising(KeyError("x"), "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_before_the_start_is_told_in_one_line(raising, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupt ends with 130 and a sentence, not with a traceback."""
    assert raising(KeyboardInterrupt()) == 130
    assert "\nmedallion: stopped at once" in capsys.readouterr().err


def test_what_an_interrupt_leads_to_is_an_interrupt(raising, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupt ends Spark, so errors of its later calls are expected."""
    error = ConnectionRefusedError()
    error.__context__ = KeyboardInterrupt()
    assert raising(error) == 130
    assert "stopped at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    (
        ["gold", "--as-of", "tomorrow"],
        ["gold", "--as-of", "now", "--models"],
        ["cut", "list", "--as-of", "10:1"],
        ["cut", "show", "--as-of", "10:1", "--cut", "10-1"],
        ["verify", "--as-of", "9999999999"],
        ["verify", "--sample", "5", "--as-of", "10:1"],
        ["verify", "--sample", "0"],
        ["verify", "--max-docs-per-second", "nan"],
        ["verify", "--layer", "iron"],
        ["silver", "--conf", "spark.driver.memory"],
        ["silver", "--conf", "=4g"],
    ),
)
def test_what_cannot_be_asked_is_refused_before_spark_starts(
    arguments: list[str], settings_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid times, numbers and choices, and options that exclude each other: exit code 2 and a message."""
    monkeypatch.setattr(application, "opened", lambda *_, **__: pytest.fail("Spark was started"))
    assert command_line.main([*arguments, "--config", str(settings_file)]) == 2
    assert capsys.readouterr().err


def test_corrections_that_are_no_text_are_refused_before_spark_starts(
    settings_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not text is a mistake, which the message names, and not a bug."""
    monkeypatch.setattr(application, "opened", lambda *_, **__: pytest.fail("Spark was started"))
    file = settings_file.with_name("corrections.json")
    file.write_bytes(b"\xff\xfe{")
    options = ["--collection", "a.b", "--corrections", str(file)]
    assert command_line.main(["quarantine", "replay", *options, "--config", str(settings_file)]) == 2
    assert "corrections.json: not UTF-8 at byte 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (["stop-snapshot", "--data-collections", ""], "--data-collections must not be empty"),
        (["execute-snapshot", "--data-collections", "a.b", "--filter", ""], "its filter is no Extended JSON"),
        (["pause-snapshot", "--data-collections", "a.b"], "pause-snapshot does not take --data-collections"),
        (["stop-snapshot", "--data-collections", "a.b", "--filter", "{}"], "stop-snapshot does not take --filter"),
        (["log", "--message", "m", "--type", "blocking"], "log does not take --type"),
        (["stop-snapshot", "--type", "blocking"], "stop-snapshot only takes --type incremental"),
        (["execute-snapshot", "--data", "[" * 100_000], "--data is not valid JSON"),
    ),
)
def test_a_signal_is_refused_that_would_ask_for_more_than_was_written(
    arguments: list[str], says: str, settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell's empty variable names no collection, which would mean all of them. An option without effect is refused."""
    settings_file.write_text(
        f"name: shop\nlakehouse: {{root: {settings_file.parent}/lake}}\nsource: {{mongodb.connection.string: mongodb://localhost}}\n"
    )
    assert command_line.main(["signal", *arguments, "--config", str(settings_file)]) == 2
    assert says in capsys.readouterr().err


def test_a_signal_to_a_lakehouse_without_bronze_says_so(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative root in another working directory is such a lakehouse: the running capture never finds the signal."""
    monkeypatch.chdir(settings_file.parent)
    settings_file.write_text(
        "name: shop\nlakehouse: {root: ./lake}\nsource: {mongodb.connection.string: mongodb://localhost}\n"
    )
    monkeypatch.setattr(application, "session", lambda *_, **__: pytest.fail("Spark was started"))
    monkeypatch.setattr(ops_tables, "note", lambda *_, **__: None)
    told = f"handles it at its first start: there is no {settings_file.parent}/lake/bronze/shop yet\n"
    for says in (told, "handles it at its next poll, or when it starts\n"):
        assert command_line.main(["signal", "pause-snapshot", "--config", str(settings_file)]) == 0
        assert capsys.readouterr().out.endswith(says)
        (log := settings_file.parent / "lake" / "bronze" / "shop" / "_delta_log").mkdir(parents=True, exist_ok=True)
        (log / f"{0:020}.json").write_text('{"metaData":{"configuration":{}}}')


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    (
        (["status"], 0, "lake/bronze/shop: run medallion capture first"),
        (["schema"], 0, "run medallion silver first"),
        (["cut", "list"], 0, "There are no cuts yet"),
        (
            ["rebuild", "--collection", "a.b"],
            2,
            "silver knows no collection a.b (there is none yet: medallion silver makes them)",
        ),
        (["signal", "execute-snapshot"], 2, "which collections shall be read?"),
    ),
)
def test_what_needs_no_spark_is_answered_without_its_start(
    arguments: list[str],
    code: int,
    says: str,
    settings_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Mistakes, and a lakehouse without tables, are reported at once and not after seconds."""
    settings_file.write_text(
        f"name: shop\nlakehouse: {{root: {settings_file.parent}/lake}}\nsource:\n"
        "  mongodb.connection.string: mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=10\n"
    )
    monkeypatch.setattr(application, "session", lambda *_, **__: pytest.fail("Spark was started"))
    assert command_line.main([*arguments, "--config", str(settings_file)]) == code
    assert says in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_asks_to_stop_and_a_second_one_interrupts(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal sets the event that a pipeline watches.

    A second one abandons Spark and interrupts at once. The two signals that `timeout` sends count as one.
    """
    abandoned: list[int] = []
    now = 100.0
    monkeypatch.setattr(interrupts, "abandon", lambda: abandoned.append(1))
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now))
    before = signal.getsignal(number)
    with interrupts.stopping() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(5)
        now += interrupts.AGAIN_SECONDS / 2
        os.kill(os.getpid(), number)
        assert not abandoned
        now += interrupts.AGAIN_SECONDS / 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(5)
    assert abandoned == [1]
    assert signal.getsignal(number) is before


def test_a_signal_stops_whatever_the_main_thread_is_at() -> None:
    """The thread holds the event's lock for a moment whenever it waits for the event; the signal's handler must not wait for that lock."""

    def stands_still(*_: object) -> NoReturn:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, stands_still)
    too_late = threading.Timer(2, os.kill, (os.getpid(), signal.SIGUSR1))
    too_late.start()
    try:
        with interrupts.stopping() as stop:
            with stop._cond:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
            assert stop.wait(1)
    finally:
        too_late.cancel()
        signal.signal(signal.SIGUSR1, before)


def test_a_stop_waits_for_no_commit_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a store does not answer, the process ends without a second signal."""
    abandoned: list[int] = []
    monkeypatch.setattr(interrupts, "abandon", lambda: abandoned.append(1))
    monkeypatch.setattr(interrupts, "STOP_SECONDS", interrupts.AGAIN_SECONDS + 0.1)
    with interrupts.stopping() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5) and not abandoned
        threading.Event().wait(5)
    assert abandoned == [1] and signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("is_stopped", (True, False))
def test_a_capture_that_was_stopped_waits_for_no_read(
    is_stopped: bool, settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a silent server, in a snapshot: Python waits for the threads that read it, which can take 60 seconds."""
    abandoned: list[int] = []

    def run(*_: object, stop: threading.Event, **__: object) -> CaptureResult:
        if is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.wait(5)
        return CaptureResult(0, 0, 0, None)

    monkeypatch.setattr(application, "opened", lambda *_, **__: (None, None))
    monkeypatch.setattr(capture, "run", run)
    monkeypatch.setattr(interrupts, "abandon", lambda: abandoned.append(1))
    assert command_line.main(["capture", "--config", str(settings_file)]) == 0
    assert abandoned == [1] * is_stopped


@pytest.mark.parametrize(
    ("module", "arguments"),
    ((maintain, ["maintain"]), (rebuild, ["rebuild", "--collection", "a.b"]), (cut_requests, ["gold", "--as-of", "now"])),
)
def test_what_was_stopped_half_way_is_not_done(
    module: ModuleType, arguments: list[str], settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 75, so that a scheduler starts it again, even if its Spark jobs were cancelled."""

    def cancelled(spark: object, *given: object, stop: threading.Event, **named: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
        assert sparks._CANCELLED.wait(5)
        raise RuntimeError("a job was cancelled")

    monkeypatch.setattr(sparks, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(sparks, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(sparks, "is_classic", lambda spark: True)
    monkeypatch.setattr(application, "opened", lambda *_, **__: (None, None))
    monkeypatch.setattr(module, "run", cancelled)
    assert command_line.main([*arguments, "--config", str(settings_file)]) == 75


def test_a_maintenance_that_was_stopped_between_two_tables_is_not_done(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result is shown, and the exit code says that work is left."""
    left = maintain.MaintenanceResult("shop", (), 0.0, ("silver/a/b",))
    monkeypatch.setattr(application, "opened", lambda *_, **__: (None, None))
    monkeypatch.setattr(maintain, "run", lambda *_, **__: left)
    assert command_line.main(["maintain", "--json", "--config", str(settings_file)]) == 75
    assert "silver/a/b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "is_stopped", "code"),
    [
        (["capture", "--once"], False, 3),
        (["run", "--once"], False, 3),
        (["capture"], False, 3),  # in mode initial_only it ends by itself
        (["capture"], True, 0),
        (["run"], True, 0),
        (["capture", "--once"], True, 3),
        (["run", "--once"], True, 3),
    ],
)
def test_a_run_that_could_not_read_a_collection_is_no_success(
    command: list[str],
    is_stopped: bool,
    code: int,
    settings_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A scheduler would not learn of it otherwise; a service goes on until it is stopped, and its log and status tell it."""
    result = CaptureResult(3, 0, 1, None, failed_snapshots={"shop.a": "the server refuses to read it"})

    def ended(*_: object, stop: threading.Event, **__: object) -> CaptureResult:
        if is_stopped:
            stop.set()
        return result

    monkeypatch.setattr(application, "opened", lambda *_, **__: (None, None))
    monkeypatch.setattr(sparks, "sessions", lambda spark: None)
    monkeypatch.setattr(interrupts, "abandon", lambda: None)
    monkeypatch.setattr(capture, "run", ended)
    monkeypatch.setattr(layers, "run_again", lambda *_, **given: {"capture": ended(**given)})
    assert command_line.main([*command, "--config", str(settings_file)]) == code
    told = capsys.readouterr().err
    assert ("shop.a: the server refuses to read it" in told) == bool(code)
    assert ("all other events are captured" in told) == (bool(code) and not is_stopped)


@pytest.mark.parametrize("output", ([], ["--json"], ["--html"]))
def test_a_status_that_lacks_a_collection_says_so(
    output: list[str], settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a page is written first, and then the exit code is that of the collection's error."""
    damaged = status.CollectionStatus("shop.a", None, None, None, 0, 0, problem="its files are missing", exit_code=3)
    shown = status.PipelineStatus("shop", 0, status.ServerStatus(), None, (damaged,))
    settings = SimpleNamespace(name="shop", lakehouse=Lakehouse(root="/lake"))
    monkeypatch.setattr(application, "opened", lambda *_, **__: (settings, None))
    monkeypatch.setattr(status, "read", lambda *_: shown)
    html = settings_file.with_name("page.html")
    file = [str(html)] * (output == ["--html"])
    assert command_line.main(["status", *output, *file, "--config", str(settings_file)]) == 3
    assert html.exists() == bool(file)


def test_an_output_without_room_is_no_bug() -> None:
    """The disk is full, for example with `medallion import-debezium connector.json > conf/shop.yml`."""
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "jobs", "--help"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert run.returncode == 75 and "no space left" in run.stderr, run.stderr


def test_an_error_that_nobody_hears_keeps_its_code() -> None:
    """Supervisors use the exit code, even if the log's disk is full or the terminal is closed."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "jobs", "status", "--config", "/nowhere.yml"]
        assert subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=full).returncode == 2


def test_a_table_that_fails_hides_no_maintenance_of_another(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The completed work is shown before the error."""
    size = delta.TableSize(1, 10)
    done = maintain.TableResult("silver/a/b", maintain.TableKind.SILVER, size, size, ("checkpoint written",))

    def run(*_: object, failures: parallel.Failures, **__: object) -> maintain.MaintenanceResult:
        failures.note("silver/a/c", errors.FilesMissing("silver/a/c: medallion repair"))
        return maintain.MaintenanceResult("shop", (done,), 0.0)

    monkeypatch.setattr(application, "opened", lambda *_, **__: (None, None))
    monkeypatch.setattr(maintain, "run", run)
    assert command_line.main(["maintain", "--config", str(settings_file)]) == 3
    shown = capsys.readouterr()
    assert "checkpoint written" in shown.out and "medallion repair" in shown.err


def test_characters_that_a_terminal_lacks_are_escaped(settings_file: Path) -> None:
    """Characters that its encoding lacks are escaped, in names of collections too."""
    settings_file.write_text(
        "name: shop\nlakehouse: {root: lakehouse}\nsource:\n"
        "  mongodb.connection.string: mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=10\n"
        f"  signal.enabled.channels: file\n  signal.file: {settings_file}/signals\n"
    )
    shown = subprocess.run(
        [sys.executable, "-m", "jobs", "check", "--config", str(settings_file)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (shown.returncode, r"\u2192 create it" in shown.stdout) == (75, True), shown.stderr


@pytest.mark.parametrize(
    ("file", "verb"),
    (
        ("bronze_capture.py", "capture"),
        ("silver_merge.py", "silver"),
        ("gold_current.py", "gold"),
        ("gold_models.py", "gold"),
        ("maintain.py", "maintain"),
    ),
)
def test_a_job_runs_from_a_plain_checkout(file: str, verb: str, tmp_path: Path) -> None:
    """Each job finds its packages by its own location, and runs its command with the arguments."""
    shown = subprocess.run(
        [sys.executable, str(ROOT / "jobs" / file), "--help"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"Usage: medallion {verb} [OPTIONS]\n")


def test_a_log_event_is_one_line_with_its_values() -> None:
    """A log line has time, level, module, event and pairs. Names may contain line breaks and control characters, which are escaped,
    and quotes, which must not end a value.
    """
    record = logging.makeLogRecord(
        {
            "name": "pipelines.capture.service",
            "levelname": "INFO",
            "msg": "committed\nit\x1b[2J",
            "created": 0.25,
            "msecs": 250,
            "batch": 7,
            "where": "a b",
            "name_": 'a" level="error',
            "plain": 'a"b',
            "last": "a \\",
        }
    )
    assert log_lines.LogLine().format(record) == (
        '1970-01-01T00:00:00.250Z info pipelines.capture.service committed\\nit\\x1b[2J batch=7 where="a b" '
        r'name_="a\" level=\"error" plain="a\"b" last="a \\"'
    )


def test_a_terminal_obeys_no_name_in_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*given: object, **named: object) -> None:
        raise errors.DecisionNeeded("shop.a\x1b[2J\rb: one\nshop.c: two")

    monkeypatch.setattr(command_line.medallion, "main", failing)
    assert command_line.main(["status"]) == 3
    assert capsys.readouterr().err == "medallion: shop.a\\x1b[2J\\rb: one\nshop.c: two\n"


def test_a_library_that_raises_its_own_level_is_not_heard() -> None:
    """Great Expectations sets the level of one of its loggers when it is imported."""
    said = (
        "import logging; from jobs import log_lines; log_lines.configure();"
        "talker = logging.getLogger('great_expectations.data_context.types.base'); talker.setLevel(logging.INFO);"
        "talker.info('of a library'); logging.getLogger('pipelines.gold.run').info('of ours')"
    )
    shown = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, cwd=ROOT)
    assert shown.stderr.count("\n") == 1 and shown.stderr.endswith("of ours\n")


def test_a_stop_during_a_call_of_spark_is_no_error_in_the_log() -> None:
    """py4j logs a `KeyboardInterrupt` as an error of the root logger, before the command says that it was stopped."""
    said = (
        "import logging; from py4j import java_gateway; from jobs import log_lines; log_lines.configure();"
        "exec(compile('logging.exception(1)', java_gateway.__file__, 'exec')); logging.warning('of ours')"
    )
    shown = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, cwd=ROOT)
    assert shown.stderr.count("\n") == 1 and shown.stderr.endswith("of ours\n"), shown.stderr


@pytest.mark.parametrize("name", ["SQLQueryContextLogger", "DataFrameQueryContextLogger"])
def test_pyspark_says_nothing_of_what_it_raises(name: str) -> None:
    """Otherwise a missing table would be logged as an error with a traceback, and a value that cannot be cast would be shown."""
    said = (
        "from jobs import log_lines; log_lines.configure(); from pyspark.logger import PySparkLogger;"
        f"logger = PySparkLogger.getLogger('{name}'); logger.propagate = False; logger.exception('CAST_INVALID_INPUT', errorClass='x')"
    )
    shown = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, cwd=ROOT)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_what_writes_one_thing_is_not_interrupted_by_two_signals() -> None:
    """Ctrl-C and SIGTERM wait for the end of such a block; a third signal interrupts. The earlier handlers are restored."""
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.undisturbed():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        done = True
    assert done and signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyboardInterrupt), interrupts.undisturbed():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_reader_that_ends_first_changes_nothing() -> None:
    """With a reader like `head`, the command completes its work and keeps its exit code."""
    program = (
        "import sys\nfrom jobs import command_line\nfrom pipelines.terminal import live_lines, tables\n"
        "code = command_line.main(['--help'])\ntables.console().print('x' * 100_000)\nprint('y', file=sys.stderr)\n"
        "print('left for the end')\nsys.exit(code or 75)\n"
    )
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (75, "y\n")
        assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=pipe, stderr=pipe).returncode == 75


def test_a_terminal_that_was_closed_changes_nothing() -> None:
    """As under `medallion run & disown`, then exit: each line was kept, and written again with the next one; a clean stop exited with 75."""
    program = (
        "import signal, sys\nfrom jobs import command_line\nfrom pipelines.terminal import live_lines\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\ncommand_line._open_streams()\nwith live_lines.capture_progress():\n"
        "    print('begun', flush=True)\n    sys.stdin.readline()\n    print('a line', file=sys.stderr)\nprint('done')\nsys.exit(75)\n"
    )
    terminal, own = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=own, stderr=own
    ) as process:
        os.close(own)
        shown = b""
        while b"begun" not in shown:
            shown += os.read(terminal, 4096)
        os.close(terminal)
        process.communicate(b"\n")
    assert process.returncode == 75


def test_unbuffered_output_comes_line_by_line() -> None:
    """With `python -u` or PYTHONUNBUFFERED, as in most containers."""
    program = "import os\nfrom jobs import command_line\ncommand_line._open_streams()\nprint('a line')\nos._exit(0)"
    assert subprocess.check_output([sys.executable, "-u", "-c", program], cwd=ROOT) == b"a line\n"


@pytest.mark.parametrize(
    ("package", "told"),
    [("pyspark", "pip install 'mongo-medallion[spark]'"), ("pymongo", "pip install 'mongo-medallion'\n")],
)
def test_a_package_that_is_not_installed_is_no_bug(package: str, told: str, settings_file: Path) -> None:
    """Without the extra `spark` nothing but --help works, and a command says what to install."""
    program = f"import sys\nsys.modules['{package}'] = None\nfrom jobs import command_line\nsys.exit(command_line.main())"
    command = [sys.executable, "-c", program, "status", "--root", "/lake", "--config", str(settings_file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and f"the Python package {package} is missing in" in done.stderr
    assert told in done.stderr


def test_a_command_whose_output_is_closed_does_its_work(tmp_path: Path) -> None:
    """A scheduler may start it without stdin, stdout and stderr."""
    made = tmp_path / "made"
    program = (
        "import sys\nfrom jobs import command_line\nfrom pipelines.terminal import live_lines, tables\n"
        "command_line.main(['--help'])\ntables.console().print('x')\n"
        f"with live_lines.capture_progress():\n    open({str(made)!r}, 'w').write(str(len([sys.stdin, sys.stdout, sys.stderr])))\n"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0 and made.read_text() == "3"
