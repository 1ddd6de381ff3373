"""Several tables at the same time, each in a thread with a session of its own."""

from __future__ import annotations

import contextlib
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
"""A collection with a long backlog lets the others have their turn after so long: a round ends when all of its items have."""

TURN_SHARE = 4
"""A turn lasts at least this many times as long as the survey of the backlog that it begins with, which takes some five seconds for twenty
million events."""

RETRY_SECONDS = 60.0
"""The pause of a collection after an error that nobody knows: a task may have been lost, and a bug would meet it each second. After a temporary
error the pause doubles each time up to this: each attempt claims its table and gives it back, in two commits."""

log = logging.getLogger(__name__)


@dataclass
class Failures:
    """The collections that could not be brought up to date, each with its error, while the others go on.

    One whose error is temporary, or whose table another writer holds for now, is tried again, at once and then less and less often, and
    after a while one whose error nobody knows; any other waits for a person, and the next start.
    """

    found: dict[str, Exception] = field(default_factory=dict)
    _pauses: dict[str, float] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)

    def begin_round(self) -> None:
        """Let those be tried again that waited long enough; within a round none is, because what was looked at left it out."""
        now = time.monotonic()
        self._waiting = {name for name in self.found if self._until.get(name, 0.0) > now}

    def guarding(
        self, act: Callable[[SparkSession, Item], Outcome], *, name: Callable[[Item], str]
    ) -> Callable[[SparkSession, Item], Outcome | None]:
        """`act`, whose error is noted under the item's name; None then."""

        def guarded(spark: SparkSession, item: Item) -> Outcome | None:
            try:
                outcome = act(spark, item)
            except Exception as error:
                self.note(name(item), error)
                return None
            self.found.pop(name(item), None)
            return outcome

        return guarded

    def note(self, name: str, error: Exception) -> None:
        """Note and tell an error, once however often it comes; raise it where it is not the collection's: Spark is gone."""
        known = spark_failures.translated(error) or error
        if isinstance(known, errors.SparkLost):
            raise known from error
        if sparks.is_cancelling():
            log.info("%s: unfinished work was abandoned; the next start repeats it", name)
            self.found[name] = known
            return
        # The same line each time that a service tries again would hide all others.
        before = self.found.get(name)
        self.found[name] = known
        if _passes(known):
            self._pauses[name] = 0.0 if before is None else min(max(1.0, 2 * self._pauses.get(name, 0.0)), RETRY_SECONDS)
        else:
            self._pauses[name] = RETRY_SECONDS
            self._waiting.add(name)
        self._until[name] = time.monotonic() + self._pauses[name]
        if before is None or errors.message_of(before) != errors.message_of(known):
            log.error("%s: %s; continuing with the other collections", name, errors.message_of(known))

    def passed(self, name: str) -> None:
        """Forget an error that was temporary: a look at the collection found nothing left to do.

        It may have come after the commit, or while the collection was only looked at; nothing else would ever take it away.
        """
        if not self.is_set_aside(name):
            self.found.pop(name, None)

    def is_set_aside(self, name: str) -> bool:
        """Whether a collection failed in a way that trying again does not mend, or not yet."""
        error = self.found.get(name)
        is_decided = isinstance(error, errors.MedallionError) and not isinstance(
            error, (errors.Temporary, errors.TableOwned)
        )
        return is_decided or (error is not None and name in self._waiting)

    def end_where_all_failed(self, names: Iterable[str]) -> None:
        """Raise what was noted where all of these have failed: there is nothing left to go on for.

        Where some only wait for their next attempt, because what was wrong with them may be over, all have it in the next round before.
        """
        failed = [*names]
        if not self.found or any(name not in self.found for name in failed):
            return
        if not any(name in self._waiting and _passes(self.found[name]) for name in failed):
            self.raised()
        self._until.clear()

    def raised(self) -> None:
        """Raise what was noted, as one error."""
        if self.found:
            error, worst = errors.together(self.found), errors.worst(list(self.found.values()))
            raise error from (None if error is worst else worst)


def _passes(error: Exception) -> bool:
    """Whether an error is over by itself, and perhaps at once."""
    return isinstance(error, (errors.Temporary, errors.TableOwned)) and not isinstance(error, errors.Unjudged)


def looks(look: Callable[[Item], Outcome], items: Sequence[Item], *, is_near: bool) -> list[Outcome]:
    """What a look at each gives. At a table that is not near, on a disk, it is a statement or a request, which waits more than it works."""
    if is_near:
        return [look(item) for item in items]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="medallion-look") as pool:
        return [*pool.map(look, items)]


@dataclass
class Pool:
    """Sessions for threads; one that is free again is used again, because a session's first statement takes long.

    Delta reads a commit's fence from its session's settings, so no two threads share one. Without a factory, or where
    it hands out `spark` itself (Spark Connect), everything is done one by one, in `spark`.
    """

    spark: SparkSession
    sessions: Sessions | None
    _idle: queue.SimpleQueue[SparkSession] = field(default_factory=queue.SimpleQueue)

    def each(
        self, items: Sequence[Item], act: Callable[[SparkSession, Item], Outcome], *, stop: threading.Event
    ) -> list[Outcome]:
        """The outcomes in the items' order; those not begun when `stop` was set, or another one failed, are left out.

        The first error is raised, when the items that had begun have ended.
        """
        # One item needs no thread, and a session of its own would cost its first statement.
        if len(items) < 2 or self.sessions is None:
            return [act(self.spark, item) for item in items if not stop.is_set()]
        first = self._session(self.sessions)
        if first is self.spark:
            return [act(self.spark, item) for item in items if not stop.is_set()]
        self._idle.put(first)
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
                # What has not begun stays undone, so that the error is seen soon; what has begun commits, and may.
                failed.set()
                raise
            finally:
                self._idle.put(session)

        with ThreadPoolExecutor(THREADS, thread_name_prefix="medallion") as pool:
            futures = [pool.submit(one, item) for item in items]
        return [outcome for future in futures for outcome in future.result()]

    def _session(self, sessions: Sessions) -> SparkSession:
        with contextlib.suppress(queue.Empty):
            while True:
                if sparks.is_open(idle := self._idle.get_nowait()):
                    return idle
        return sessions()
