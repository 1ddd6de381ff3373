"""The project's commands as processes that tests start, kill and start again, and their tables as seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tests.harness import workload

PROJECT = Path(__file__).parents[2]
FOREVER = 10**9
QUICK_JVM = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseParallelGC"}
"""Halves the start time of a JVM; no test runs long enough to need the optimizing compiler."""


class Process(Protocol):
    """A process that must be alive while a test waits for its work."""

    @property
    def arguments(self) -> Sequence[str]: ...

    @property
    def said(self) -> str: ...

    @property
    def is_running(self) -> bool: ...


@dataclass
class Command:
    """A command of the project, with at most one process at a time; its output is appended to a file."""

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> Command:
        """Start it in its own process group."""
        assert not self.is_running
        with self.log.open("ab") as out:
            out.write(f"--- {' '.join(self.arguments)}\n".encode())
            out.flush()
            self.process = subprocess.Popen(
                [sys.executable, *self.arguments],
                cwd=PROJECT,
                env={**os.environ, **QUICK_JVM, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return self

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def said(self) -> str:
        """The output of all its runs."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Send SIGKILL to the process and its JVM."""
        self.signal_group(signal.SIGKILL)
        self.wait(30)

    def kill_alone(self) -> None:
        """Send SIGKILL to the Python process only; its JVM sees the end of its input."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait(30)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to every process of the command, as a service manager does."""
        self.signal_group(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """Its exit code. Raises AssertionError with the end of its output if it still runs after `seconds`."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.said[-3000:]}") from None

    def run(self, seconds: float = 180) -> int:
        """Start it, and return its exit code."""
        return self.start().wait(seconds)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_running:
            self.signal_group(signal.SIGCONT)
            self.kill()


@dataclass(frozen=True)
class Pipeline:
    """A pipeline over one database: its settings file, its tables, and its commands."""

    folder: Path
    uri: str
    database: str
    name: str = "journey"

    @property
    def root(self) -> Path:
        return self.folder / "lakehouse"

    @property
    def bronze(self) -> Path:
        return self.root / "bronze" / self.name

    def gold(self, collection: str) -> Path:
        return self.root / "gold" / self.database / collection.replace(".", "%2E")

    @property
    def settings(self) -> Path:
        return self.folder / f"{self.name}.yml"

    def model(self, name: str) -> Path:
        return self.root / "gold" / "models" / name

    def write_settings(self, *, source: str = "", silver: str = "{}", gold: str = "{}") -> Pipeline:
        """Write the settings file; `source`, `silver` and `gold` are additional YAML of these sections."""
        self.settings.write_text(
            f"""\
name: {self.name}
lakehouse: {{root: {self.root}}}
source:
  mongodb.connection.string: {self.uri}
  database.include.list: {self.database}
  commit.interval.ms: 300
{source}
silver: {silver}
gold: {gold}
"""
        )
        return self

    def command(self, verb: str, *options: str, log: str = "") -> Command:
        """A command with this pipeline's settings."""
        arguments = ["-m", "jobs.command_line", verb, "--config", str(self.settings), "--debug", *options]
        return Command(arguments, self.folder / f"{log or verb}.log")

    def recorder(self, collections: Sequence[str] = workload.COLLECTIONS) -> Command:
        """The independent recorder of this database's resume tokens."""
        where = [
            "--database",
            self.database,
            "--collections",
            ",".join(collections),
            "--out",
            str(self.recording),
        ]
        return Command(["-m", "tests.harness.recorder", self.uri, *where], self.folder / "recorder.log")

    @property
    def recording(self) -> Path:
        return self.folder / "tokens.jsonl"

    def workload(self, *, operations: int = FOREVER, seed: int = 1, threads: int = 4, rate: float = 0) -> Command:
        """A random workload in this database."""
        options = {
            "operations": operations,
            "seed": seed,
            "threads": threads,
            "rate": rate,
            "database": self.database,
        }
        shown = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return Command(["-m", "tests.harness.workload", self.uri, *shown], self.folder / "workload.log")


def free_port() -> int:
    """A port of the loopback that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def version(table: Path) -> int:
    """The newest version of a Delta table, -1 if there is no table."""
    return max((int(file.stem) for file in (table / "_delta_log").glob("*.json") if file.stem.isdigit()), default=-1)


def positions(table: Path) -> set[str]:
    """All positions that a table has had, from the metadata of its commits."""
    found = set()
    for file in (table / "_delta_log").glob("*.json"):
        for line in file.read_text().rstrip("\n").split("\n"):
            info = json.loads(line).get("commitInfo")
            position = json.loads(info.get("userMetadata") or "{}").get("to") if info else None
            if position is not None:
                found.add(json.dumps(position))
    return found


def until(true: Callable[[], bool], *, seconds: float, what: str, alive: Sequence[Process] = ()) -> None:
    """Wait until `true` returns true; fails immediately if a process of `alive` has ended."""
    deadline = time.monotonic() + seconds
    while not true():
        for command in alive:
            assert command.is_running, f"{command.arguments} ended:\n{command.said[-3000:]}"
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


@contextlib.contextmanager
def all_killed(*commands: Command) -> Iterator[None]:
    """Kill the processes of these commands at the end of the block."""
    with contextlib.ExitStack() as stack:
        for command in commands:
            stack.enter_context(command)
        yield
