"""Faults at the borders of a commit: before its data file, between file and commit, inside the commit, and after it, before
its answer.

`injected` puts one in for the time of a block, over the places of `pipelines.delta` through which every commit of
every table goes. In a process of its own the same is asked for by environment variables: `python -m tests.harness.faults <command>`
runs `medallion` with them. The product knows nothing of this.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any
from unittest import mock

from py4j.protocol import Py4JNetworkError

from cdc_core.tables import claims
from pipelines.delta import data_file, direct_log
from pipelines.delta.fenced_commits import FencedCommits

VARIABLE, TOLD_VARIABLE, LEASE_VARIABLE = "MEDALLION_FAULTS", "MEDALLION_FAULTS_TOLD", "MEDALLION_LEASE_MS"
OVER = ".over"
"""The suffix of the file, beside the one that tells, that says that no run is to follow: the process was asked to end."""


class Boundary(Enum):
    """Where in a commit."""

    BEFORE_FILE = "before the data file"
    BEFORE_COMMIT = "between file and commit"
    INSIDE_COMMIT = "inside the commit"
    AFTER_COMMIT = "after the commit, before its answer"


class Kind(Enum):
    """What happens there."""

    INTERRUPT = "KeyboardInterrupt"
    NETWORK = "Py4JNetworkError"
    EXIT = "Python ends"
    JVM = "the JVM ends"
    BOTH = "both end"


IN_PROCESS = (Kind.INTERRUPT, Kind.NETWORK)


@dataclass(frozen=True)
class Fault:
    """What happens at the commit number `nth` to a table whose path holds `table`."""

    boundary: Boundary
    kind: Kind
    table: str = ""
    nth: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"boundary": self.boundary.name, "kind": self.kind.name})

    @staticmethod
    def from_json(text: str) -> Fault:
        said = json.loads(text)
        return Fault(Boundary[said["boundary"]], Kind[said["kind"]], said["table"], said["nth"])


@dataclass
class Injection:
    """A fault on its way; `has_struck` tells whether its commit came."""

    fault: Fault
    tell: Callable[[], None]
    seen: int = 0
    has_struck: bool = False

    def due(self, table: Any) -> bool:
        """Whether this commit to the table is the one; each is asked for once."""
        if self.has_struck or self.fault.table not in str(table):
            return False
        self.seen += 1
        return self.seen == self.fault.nth

    def around(self, act: Callable[[], Any]) -> Any:
        """The commit, with the fault before it, in it, or after it."""
        self.has_struck = True
        self.tell()
        match self.fault.boundary:
            case Boundary.BEFORE_FILE | Boundary.BEFORE_COMMIT:
                strike(self.fault.kind)
            case Boundary.INSIDE_COMMIT:
                threading.Timer(0.02, strike, (self.fault.kind,)).start()
            case Boundary.AFTER_COMMIT:
                answer = act()
                strike(self.fault.kind)
                return answer
        return act()


def strike(kind: Kind) -> None:
    """Let it happen."""
    match kind:
        case Kind.INTERRUPT:
            raise KeyboardInterrupt
        case Kind.NETWORK:
            raise Py4JNetworkError("Answer from Java side is empty")
        case Kind.EXIT:
            os._exit(137)
        case Kind.JVM:
            os.kill(jvm(), signal.SIGKILL)
        case Kind.BOTH:
            os.kill(jvm(), signal.SIGKILL)
            os._exit(137)


def jvm() -> int:
    """The process of this process' JVM."""
    from pyspark import SparkContext

    return int(SparkContext._gateway.proc.pid)


@contextlib.contextmanager
def injected(fault: Fault, tell: Callable[[], None] = lambda: None) -> Iterator[Injection]:
    """The fault, for the time of the block; `tell` is called when it strikes."""
    found = Injection(fault, tell)
    asked, appended, written = FencedCommits._outcome, direct_log.DirectLog.append, data_file.ParquetFile.write

    def of_writer(self: Any, metadata: str, act: Callable[[], Any]) -> Any:
        if fault.boundary is not Boundary.BEFORE_FILE and found.due(self.table):
            return asked(self, metadata, lambda: found.around(act))
        return asked(self, metadata, act)

    def of_facts(self: Any, file: Any) -> Any:
        if fault.boundary is not Boundary.BEFORE_FILE and found.due(self.store.folder):
            return found.around(lambda: appended(self, file))
        return appended(self, file)

    def of_file(files: Any, rows: Any, **given: Any) -> Any:
        if fault.boundary is Boundary.BEFORE_FILE and found.due(files.folder):
            return found.around(lambda: written(files, rows, **given))
        return written(files, rows, **given)

    with (
        mock.patch.object(FencedCommits, "_outcome", of_writer),
        mock.patch.object(direct_log.DirectLog, "append", of_facts),
        mock.patch.object(data_file.ParquetFile, "write", staticmethod(of_file)),
    ):
        yield found


def main() -> int:
    """`medallion` once for each fault that the environment asks for, in one process, and then without any.

    An error of a run with a fault is what the fault was to lead to, and the next run begins; a fault that ends a process ends
    this one. The file with the suffix `OVER` ends it after the run that it is at. What struck is written to the file that the environment names, one JSON object a line.
    """
    from jobs import command_line

    planned = [Fault.from_json(text) for text in json.loads(os.environ.pop(VARIABLE, "[]"))]
    told = os.environ.pop(TOLD_VARIABLE, os.devnull)
    claims.LEASE_MS = int(os.environ.pop(LEASE_VARIABLE, claims.LEASE_MS))
    for fault in planned:
        with injected(fault, lambda fault=fault: _tell(told, fault)) as injection:
            code = command_line.main(sys.argv[1:])
        if not injection.has_struck or code == 0 or os.path.exists(told + OVER):
            return code
    return command_line.main(sys.argv[1:])


def _tell(path: str, fault: Fault) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(fault.to_json() + "\n")
        file.flush()


if __name__ == "__main__":
    raise SystemExit(main())
