"""Works on several tables in parallel, in threads with their own sessions."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from cdc_core import errors
from pipelines.spark import failures as spark_failures
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Sessions = Callable[[], "SparkSession"]

THREADS = 4

TURN_SECONDS = 20.0
"""The time after which a collection with a long backlog ends its turn, so that the round ends and the others continue."""

TURN_SHARE = 4
"""A turn lasts at least this many times as long as the survey of its backlog, which takes some five seconds for twenty million events."""

RETRY_SECONDS = 60.0
"""The pause of a collection after an unknown error, which may be a lost task or a bug. After a temporary error the pause doubles each time,
up to this: each attempt claims and releases its table, which takes two commits."""

LONGEST_RETRY_SECONDS = 300.0
"""Up to this the pause after such an error doubles: the other collections wait for each attempt, which may take Spark half a minute."""

REMINDER_SECONDS = 3600.0
"""How often a collection that still fails is logged again. Logs are rotated, and `medallion status` shows only the lag."""

log = logging.getLogger(__name__)


@dataclass
class Failures:
    """The collections that failed, each with its error, while the others continue.

    After a temporary error, or where another writer holds the table, a collection is retried at once, then after growing pauses. After an
    unknown error, or where a VACUUM may only have been faster than a reader, it is retried after `RETRY_SECONDS`, and less and less often
    while it fails. After any other error it needs a person, and is retried at the next start.
    """

    by_name: dict[str, Exception] = field(default_factory=dict)
    _pauses: dict[str, float] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    _logged: dict[str, float] = field(default_factory=dict)

    def begin_round(self) -> None:
        """Allow the retry of collections whose pause is over. Within a round none is retried: its survey does not include them."""
        now = time.monotonic()
        self._waiting = {name for name in self.by_name if self._until.get(name, 0.0) > now}
        for name, error in self.by_name.items():
            if now - self._logged.get(name, now) >= REMINDER_SECONDS:
                self._log(name, error, "it still fails, the other collections continue")

    def guarding(
        self, act: Callable[[SparkSession, Item], Outcome], *, name: Callable[[Item], str]
    ) -> Callable[[SparkSession, Item], Outcome | None]:
        """A function that calls `act`, and on an error notes it under the item's name and returns None."""

        def guarded(spark: SparkSession, item: Item) -> Outcome | None:
            try:
                outcome = act(spark, item)
            except Exception as error:
                self.note(name(item), error)
                return None
            self.by_name.pop(name(item), None)
            return outcome

        return guarded

    def note(self, name: str, error: Exception) -> None:
        """Note and log an error; raises `SparkLost` where Spark is gone, which is not an error of the collection."""
        known_error = spark_failures.of_one(error)
        if sparks.is_cancelling():
            log.info("%s: unfinished work was abandoned; the next start repeats it", name)
            interruption = errors.Temporary(f"{name}: stopped before it was done; start it again")
            self.by_name[name] = known_error if isinstance(known_error, errors.MedallionError) else interruption
            return
        # Logs the same message only once: otherwise the retries of a service would hide all other messages.
        previous = self.by_name.get(name)
        self.by_name[name] = known_error
        if _passes(known_error):
            self._pauses[name] = 0.0 if previous is None else min(max(1.0, 2 * self._pauses.get(name, 0.0)), RETRY_SECONDS)
        else:
            pause = RETRY_SECONDS if previous is None else max(RETRY_SECONDS, 2 * self._pauses.get(name, 0.0))
            self._pauses[name] = min(pause, LONGEST_RETRY_SECONDS)
            self._waiting.add(name)
        self._until[name] = time.monotonic() + self._pauses[name]
        if previous is None or errors.message_of(previous) != errors.message_of(known_error):
            self._log(name, known_error, "continuing with the other collections")

    def _log(self, name: str, error: Exception, outlook: str) -> None:
        self._logged[name] = time.monotonic()
        log.error("%s: %s; %s", name, errors.message_of(error), outlook, extra={"error": type(error).__name__})

    def passed(self, name: str) -> None:
        """Forget a temporary error of a collection that has nothing left to do.

        The error may have come after its commit, or during its survey; there is no further attempt that would clear it.
        """
        if not self.is_set_aside(name):
            self.by_name.pop(name, None)

    def is_set_aside(self, name: str) -> bool:
        """Whether a collection is not to be tried now: its error needs a person, or its pause is not over."""
        return self.needs_person(name) or (name in self.by_name and name in self._waiting)

    def needs_person(self, name: str) -> bool:
        """Whether a collection has an error after which only the next start tries it again."""
        error = self.by_name.get(name)
        return isinstance(error, errors.MedallionError) and not isinstance(
            error, (errors.Temporary, errors.TableOwned, errors.FilesMissing)
        )

    def end_where_all_failed(self, names: Iterable[str]) -> None:
        """Raise the noted errors where all of these collections have failed.

        Where some of them only wait for a retry after an error that may be over, all are retried in the next round first.
        """
        collections = [*names]
        if not self.by_name or any(name not in self.by_name for name in collections):
            return
        if not any(name in self._waiting and _passes(self.by_name[name]) for name in collections):
            self.raised()
        self._until.clear()

    def raised(self) -> None:
        """Raise the noted errors as one error, if there are any."""
        if self.by_name:
            error, worst = errors.together(self.by_name), errors.worst(list(self.by_name.values()))
            raise error from (None if error is worst else worst)


def _passes(error: Exception) -> bool:
    """Whether an error may end by itself, possibly at once."""
    return isinstance(error, (errors.Temporary, errors.TableOwned)) and not isinstance(error, errors.Unjudged)


def looks(look: Callable[[Item], Outcome], items: Sequence[Item], *, is_near: bool) -> list[Outcome]:
    """The results of `look` for each item, in order. In threads unless `is_near`: tables on a local disk need no statement or request."""
    if is_near:
        return [look(item) for item in items]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="medallion-look") as pool:
        return [*pool.map(look, items)]


@dataclass
class Pool:
    """A pool of sessions for threads. Sessions are reused, because the first statement of a session is slow.

    Delta reads a commit's fence from its session's settings, so no two threads share a session. Without a factory `sessions`, or where it
    returns `spark` itself (Spark Connect), all items are processed one by one with `spark`.
    """

    spark: SparkSession
    sessions: Sessions | None
    _idle: queue.SimpleQueue[SparkSession] = field(default_factory=queue.SimpleQueue)

    def each(
        self, items: Sequence[Item], act: Callable[[SparkSession, Item], Outcome], *, stop: threading.Event
    ) -> list[Outcome]:
        """The results of `act` in the items' order, without items that had not begun when `stop` was set.

        After an error no further item begins. The error is raised when all begun items have ended.
        """
        # One item needs no thread, and the first statement of a new session would be slow.
        if len(items) < 2 or self.sessions is None:
            return [act(self.spark, item) for item in items if not stop.is_set()]
        session = self._session(self.sessions)
        if session is self.spark:
            return [act(self.spark, item) for item in items if not stop.is_set()]
        self._idle.put(session)
        return self._in_threads(items, act, stop, self.sessions)

    def _in_threads(
        self,
        items: Sequence[Item],
        act: Callable[[SparkSession, Item], Outcome],
        stop: threading.Event,
        sessions: Sessions,
    ) -> list[Outcome]:
        failed = threading.Event()

        def one(item: Item) -> list[Outcome]:
            if stop.is_set() or failed.is_set():
                return []
            session = self._session(sessions)
            try:
                return [act(session, item)]
            except BaseException:
                # No further item begins, so that the error is raised soon. Items that have begun may commit.
                failed.set()
                raise
            finally:
                self._idle.put(session)

        with ThreadPoolExecutor(THREADS, thread_name_prefix="medallion") as pool:
            # With the caller's context: a look at a table in a store holds for the whole round (`stored_files.one_look_at`).
            futures = [pool.submit(contextvars.copy_context().run, one, item) for item in items]
        return [outcome for future in futures for outcome in future.result()]

    def _session(self, sessions: Sessions) -> SparkSession:
        with contextlib.suppress(queue.Empty):
            while True:
                if sparks.is_open(idle := self._idle.get_nowait()):
                    return idle
        return sessions()
