"""The errors of the project and their exit codes.

    MedallionError                      1   a bug, unless a subclass says otherwise
    ├── SettingsError                   2   settings or arguments are wrong; lists all mistakes
    ├── DecisionNeeded                  3   a person must decide
    │   ├── AccessRefused                   wrong password, missing privilege
    │   ├── SourceUnsuitable                no replica set, too old, a view, a time-series collection
    │   ├── PositionLost                    the oplog no longer holds the position
    │   ├── TableNotOurs                    another pipeline or program created the table
    │   ├── FilesMissing                    a table's log names files that are missing or damaged
    │   ├── TableOwned                      a live writer on this host holds the claim
    │   ├── OwnershipLost                   another writer took over the claim
    │   ├── ConcurrentWritesUnsafe          on this store two drivers can overwrite each other's commits
    │   └── GateFailed                      a version failed its expectations
    ├── CollectionsFailed               several collections failed; the exit code of the most serious error
    └── Temporary                       75  try again
        ├── SourceUnreachable               no server, no network, a long election
        ├── StoreUnreachable                the lakehouse's store does not answer, or refuses access
        ├── LeaseHeld                       a writer on another host holds an unexpired lease
        ├── StorageExhausted                no space left
        ├── Unjudged                        Spark failed while it checked expectations
        ├── CommitConflict                  Delta conflicts, after all retries
        ├── CommitUnknown                   a commit got no answer, so its writer stops
        └── SparkLost                       Spark ended while the application ran

A message says what happened, where (collection, position, path of a setting) and what to do next. It never contains
document data, a password, or a whole settings object.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar


class MedallionError(Exception):
    """The root of the tree; `exit_code` is the exit code of the command."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One mistake in settings or arguments: its path, the message, and a hint."""

    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        return f"{text} ({self.hint})" if self.hint else text


class SettingsError(MedallionError):
    """Settings or arguments are wrong; `problems` lists all mistakes."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = Problem("", problems)
        if isinstance(problems, Problem):
            problems = (problems,)
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DecisionNeeded(MedallionError):
    """Trying again changes nothing: a person must decide."""

    exit_code = 3


class AccessRefused(DecisionNeeded):
    """The server refused the credentials, or the user lacks a privilege."""


class SourceUnsuitable(DecisionNeeded):
    """The source is reachable, but does not offer change streams."""


class PositionLost(DecisionNeeded):
    """The oplog no longer holds the position, or the server refuses its resume token."""


class TableNotOurs(DecisionNeeded):
    """Where a table of the pipeline should be, there is one that mongo-medallion did not create, or of an unsupported format."""


class FilesMissing(DecisionNeeded):
    """A table's log names data files that are missing or damaged."""


class TableOwned(DecisionNeeded):
    """A live process on this host writes the table."""


class OwnershipLost(DecisionNeeded):
    """Another writer took the table over; this one committed nothing after that."""


class ConcurrentWritesUnsafe(DecisionNeeded):
    """The lakehouse's store does not exclude concurrent commits; nothing was written."""


class GateFailed(DecisionNeeded):
    """Expectations refused a version; the last good one stays published."""


class Temporary(MedallionError):
    """The same command may succeed later."""

    exit_code = 75


class SourceUnreachable(Temporary):
    """No server answered in time."""


class Unjudged(Temporary):
    """Spark failed while it checked expectations; the version is checked again."""


class StoreUnreachable(Temporary):
    """The lakehouse's store does not answer, or refuses access."""


class LeaseHeld(Temporary):
    """A writer on another host holds a lease that has not expired."""


class StorageExhausted(Temporary):
    """The disk or the quota is full, or a file has reached its maximum size; nothing was committed."""


class CollectionsFailed(MedallionError):
    """Several collections failed; the others were processed. The exit code is that of the most serious error."""

    exit_code = 3

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# A bug recurs at every run; a temporary error resolves itself.
_WORST_FIRST = (1, 3, 2, 75)


_Failure = TypeVar("_Failure", bound=BaseException)


def worst(failures: Sequence[_Failure]) -> _Failure:
    """The most serious of these errors: a bug, then a decision, then wrong settings, then a temporary error."""
    return min(failures, key=lambda each: _WORST_FIRST.index(code(each)))


def worst_code(codes: Iterable[int]) -> int:
    """The most serious of these exit codes."""
    return min(codes, key=_WORST_FIRST.index)


def code(error: BaseException) -> int:
    """The exit code of an error."""
    return error.exit_code if isinstance(error, MedallionError) else MedallionError.exit_code


def together(failures: Mapping[str, Exception]) -> Exception:
    """One error for the failures of several collections or tables, by name; a single failure is returned as it is."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    lines = [f"{len(failures)} failed; others, if any, did not:"]
    lines += [f"{name}: {message_of(error)}" for name, error in failures.items()]
    worst_error = worst(list(failures.values()))
    return CollectionsFailed("\n  ".join(lines), code(worst_error))


def message_of(error: Exception) -> str:
    """The text of an error for logs and reports.

    Only the class name for foreign errors, whose text may quote a document.
    """
    return str(error) if isinstance(error, MedallionError) else f"this is a bug: {type(error).__name__}"


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a disk or a quota is full, or a file has reached its maximum size."""


def of_file(error: OSError, problem: Problem) -> MedallionError:
    """The error of a command that cannot read or write a file: temporary where there is no room for it, else a mistake in
    its arguments."""
    if error.errno in FULL:
        return StorageExhausted(f"{problem}; free some space and start again")
    return SettingsError(problem)


class CommitConflict(Temporary):
    """Other commits kept winning until the retries were used up, or the table was restored or removed under its writer."""


class CommitUnknown(Temporary):
    """The store did not confirm a commit; the next start finds out whether it succeeded."""


class SparkLost(Temporary):
    """Spark's JVM ended; what it committed is in the tables, and the rest is repeated."""
