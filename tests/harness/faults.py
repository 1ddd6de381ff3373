"""Injects faults at the boundaries of a commit: before its data file, between file and commit, inside the commit, and after it,
before its answer.

`injected` injects one during a block, by patching the functions of `pipelines.delta` through which every commit to every table goes.
`python -m tests.harness.faults <command>` runs `medallion` with the faults that the environment variables name.
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
"""The suffix of a file beside the one that `TOLD_VARIABLE` names: if it exists, no further run is started."""


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
    """A fault at the `nth` commit to tables whose path contains `table`."""

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
    """A fault to be injected; `has_struck` says whether its commit has come."""

    fault: Fault
    tell: Callable[[], None]
    seen: int = 0
    has_struck: bool = False

    def due(self, table: Any) -> bool:
        """Whether the fault belongs to this commit to the table. Must be called once per commit."""
        if self.has_struck or self.fault.table not in str(table):
            return False
        self.seen += 1
        return self.seen == self.fault.nth

    def around(self, act: Callable[[], Any]) -> Any:
        """Perform the commit, with the fault before, inside or after it."""
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
    """Cause the fault."""
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
    """The process ID of this process' JVM."""
    from pyspark import SparkContext

    return int(SparkContext._gateway.proc.pid)


@contextlib.contextmanager
def injected(fault: Fault, tell: Callable[[], None] = lambda: None) -> Iterator[Injection]:
    """Inject the fault during the block; `tell` is called when it strikes."""
    found = Injection(fault, tell)
    asked, appended, written = FencedCommits._outcome, direct_log.DirectLog.append, data_file.ParquetFile.write

    def of_writer(self: Any, act: Callable[[Any], Any], fence: Any) -> Any:
        if fault.boundary is not Boundary.BEFORE_FILE and found.due(self.table):
            return asked(self, lambda fence: found.around(lambda: act(fence)), fence)
        return asked(self, act, fence)

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
    """Run `medallion` once for each fault in the environment, in one process, and then without a fault.

    A run that fails after its fault is followed by the next one; any other run is the last, as is the current one if the file with the
    suffix `OVER` exists. The faults that struck are appended to the file that `TOLD_VARIABLE` names, one JSON object per line.
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
