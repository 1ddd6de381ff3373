"""Works on several tables in parallel, in threads with their own sessions."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from cdc_core import errors
from pipelines.spark import failures as spark_failures
from pipelines.spark import session as sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Sessions = Callable[[], "SparkSession"]

THREADS = 4

PATIENCE_SECONDS = 2.0
"""How long a round of a service waits for a table that takes longer than the others: it then goes on beside the next rounds."""

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
    _are_all_retried: bool = False
    """Whether all collections had failed, and those that waited are retried since."""

    def begin_round(self) -> None:
        """Allow the retry of collections whose pause is over. Within a round none is retried: its survey does not include them."""
        now = time.monotonic()
        failures = [*self.by_name.items()]  # those at work may change it meanwhile
        self._waiting = {name for name, _ in failures if self._until.get(name, 0.0) > now}
        for name, error in failures:
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
        if _may_end_by_itself(known_error):
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

    def forget(self, name: str) -> None:
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

        Where some of them only wait for a retry after an error that may be over, all are retried in the next round first. To be called when
        no collection is at work.
        """
        collections = [*names]
        if not self.by_name or any(name not in self.by_name for name in collections):
            self._are_all_retried = False
            return
        is_waited_for = any(name in self._waiting and _may_end_by_itself(self.by_name[name]) for name in collections)
        # A retry that no round waited for has failed by now, and waits again.
        if self._are_all_retried or not is_waited_for:
            self.raised()
        self._until.clear()
        self._are_all_retried = True

    def raised(self) -> None:
        """Raise the noted errors as one error, if there are any."""
        if self.by_name:
            error, worst = errors.together(self.by_name), errors.worst(list(self.by_name.values()))
            raise error from (None if error is worst else worst)


def _may_end_by_itself(error: Exception) -> bool:
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
    ended: Callable[[Any], object] = lambda item: None
    """Called with an item of `at_work` that has ended."""
    _idle: queue.SimpleQueue[SparkSession] = field(default_factory=queue.SimpleQueue)
    _threads: ThreadPoolExecutor | None = None
    _begun: dict[Future[list[Any]], Any] = field(default_factory=dict)
    """The items whose outcomes no call has returned yet."""
    _failed: threading.Event = field(default_factory=threading.Event)

    @property
    def at_work(self) -> list[Any]:
        """The items that earlier calls of `each` did not wait for, and that have not ended since."""
        return [item for future, item in self._begun.items() if not future.done()]

    def each(
        self,
        items: Sequence[Item],
        act: Callable[[SparkSession, Item], Outcome],
        *,
        stop: threading.Event,
        patience_seconds: float = math.inf,
    ) -> list[Outcome]:
        """The results of `act` in the items' order, without items that had not begun when `stop` was set.

        After `patience_seconds` it waits only until a thread is free. Items that still run stay in `at_work`, and the next call of `each` or
        `rest` after their end returns their outcomes first. After an error no further item begins. The error is raised when all begun items
        have ended.
        """
        sessions = self.sessions
        # One item needs no thread, and the first statement of a new session would be slow.
        if sessions is None or (len(items) < 2 and not self._begun and math.isinf(patience_seconds)):
            return [act(self.spark, item) for item in items if not stop.is_set()]
        if items:
            session = self._session(sessions)
            if session is self.spark:
                return [act(self.spark, item) for item in items if not stop.is_set()]
            self._idle.put(session)
        futures = [self._begin(item, act, stop, sessions) for item in items]
        self._wait(futures, time.monotonic() + patience_seconds)
        outcomes: list[Outcome] = self._ended()
        for future in self._begun.keys() & futures:
            future.add_done_callback(partial(self._tell, self._begun[future]))
        return outcomes

    def rest(self) -> list[Any]:
        """The outcomes of the items `at_work`, when all have ended. Raises as `each`."""
        wait(self._begun)
        return self._ended()

    def close(self) -> None:
        """Wait for the items `at_work`, of which no further one begins; their outcomes and errors are lost."""
        self._failed.set()
        if self._threads is not None:
            self._threads.shutdown()

    def _begin(
        self, item: Item, act: Callable[[SparkSession, Item], Outcome], stop: threading.Event, sessions: Sessions
    ) -> Future[list[Outcome]]:
        def one() -> list[Outcome]:
            if stop.is_set() or self._failed.is_set():
                return []
            session = self._session(sessions)
            try:
                return [act(session, item)]
            except BaseException:
                # No further item begins, so that the error is raised soon. Items that have begun may commit.
                self._failed.set()
                raise
            finally:
                self._idle.put(session)

        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="medallion")
        # With the caller's context: a look at a table in a store holds for the whole round (`stored_files.one_look_at`).
        future = self._threads.submit(contextvars.copy_context().run, one)
        self._begun[future] = item
        return future

    def _wait(self, futures: Sequence[Future[list[Any]]], deadline: float) -> None:
        """Wait for these futures, after the deadline only for a free thread."""
        while not all(future.done() for future in futures):
            seconds = deadline - time.monotonic()
            pending = [future for future in self._begun if not future.done()]
            if seconds <= 0 and len(pending) < THREADS:
                break
            wait(pending, seconds if 0 < seconds < math.inf else None, return_when=FIRST_COMPLETED)

    def _ended(self) -> list[Any]:
        """The outcomes of the items that have ended, in the order in which they began."""
        if self._failed.is_set():
            wait(self._begun)
        return [outcome for future in [*self._begun] if future.done() for outcome in self._taken(future)]

    def _taken(self, future: Future[list[Outcome]]) -> list[Outcome]:
        del self._begun[future]
        return future.result()

    def _tell(self, item: object, _: Future[list[Any]]) -> None:
        self.ended(item)

    def _session(self, sessions: Sessions) -> SparkSession:
        with contextlib.suppress(queue.Empty):
            while True:
                if sparks.is_open(idle := self._idle.get_nowait()):
                    return idle
        return sessions()
