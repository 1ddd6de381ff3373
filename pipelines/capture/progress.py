"""The progress of a running capture, and the result of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cdc_core import errors
from pipelines.snapshot import snapshot


@dataclass(frozen=True)
class CaptureProgress:
    """The progress of a running capture.

    `lag_seconds` is the age of the newest committed event. `has_read_snapshots`: no snapshot is planned or being read.
    """

    events: int = 0
    batches: int = 0
    lag_seconds: float | None = None
    reconnects: int = 0
    snapshot: snapshot.SnapshotProgress | None = None
    has_read_snapshots: bool = False


@dataclass(frozen=True)
class CaptureResult:
    """The result of a run: events and snapshot rows committed, commits, and the position at the end.

    `seconds` is the time from the first read to the last commit. `failed_snapshots` are collections that could not be read, with the
    reasons.
    """

    events: int
    snapshot_documents: int
    commits: int
    token: str | None
    lossy_documents: int = 0
    skipped_events: int = 0
    seconds: float = 0.0
    failed_snapshots: Mapping[str, str] = field(default_factory=dict)


NOTHING = CaptureResult(0, 0, 0, None)
"""The result of a run that was stopped before it began."""


def joined(earlier: CaptureResult | None, later: CaptureResult) -> CaptureResult:
    """The result of two consecutive runs."""
    if earlier is None:
        return later
    return CaptureResult(
        events=earlier.events + later.events,
        # Not a sum: a snapshot that is continued counts the documents of the runs before as well.
        snapshot_documents=later.snapshot_documents or earlier.snapshot_documents,
        commits=earlier.commits + later.commits,
        token=later.token or earlier.token,
        lossy_documents=earlier.lossy_documents + later.lossy_documents,
        skipped_events=earlier.skipped_events + later.skipped_events,
        seconds=earlier.seconds + later.seconds,
        failed_snapshots=later.failed_snapshots,
    )


def refuse_unread(result: CaptureResult, *, is_stopped: bool) -> None:
    """Raise `CollectionsFailed` if a snapshot could not read a collection; call it after showing the result of a run that ends."""
    if result.failed_snapshots:
        reasons = "; ".join(f"{name}: {why}" for name, why in result.failed_snapshots.items())
        others = "the run was stopped before its end" if is_stopped else "all other events are captured"
        raise errors.CollectionsFailed(f"the snapshot failed, and {others}: {reasons}", 3)


@dataclass(frozen=True)
class StreamCounts:
    """Counts of the committed rows of the stream; `batches` counts all commits up to the newest of them, also a snapshot's."""

    events: int = 0
    lossy: int = 0
    skipped: int = 0
    batches: int = 0
    lag_seconds: float | None = None


@dataclass
class RunCounts:
    """The counts of one run. Each field is written by one thread only, so that no update is lost."""

    stream: StreamCounts = StreamCounts()
    """Written by the committer."""
    reconnects: int = 0
    """Written by the reader."""
    snapshot: snapshot.SnapshotProgress | None = None
    """Written by the snapshot thread."""
    began_at: float | None = None
    """Written by the main thread, as those below: the monotonic time at which the run began to read, and the commits before."""
    commits_before: int = 0
    seconds: float = 0.0

    def begin(self, *, commits: int) -> None:
        """Note that the run begins to read."""
        self.began_at, self.commits_before = time.monotonic(), commits

    def end(self) -> None:
        """Note that the last rows of the run are committed."""
        if self.began_at is not None:
            self.seconds = time.monotonic() - self.began_at

    def progress(self, *, has_read_snapshots: bool) -> CaptureProgress:
        """The counts as progress."""
        stream = self.stream
        return CaptureProgress(
            events=stream.events,
            batches=stream.batches,
            lag_seconds=stream.lag_seconds,
            reconnects=self.reconnects,
            snapshot=self.snapshot,
            has_read_snapshots=has_read_snapshots,
        )

    def result(self, *, commits: int, token: str | None) -> CaptureResult:
        """The counts as the result of the run."""
        return CaptureResult(
            events=self.stream.events,
            snapshot_documents=self.snapshot.total_documents if self.snapshot is not None else 0,
            commits=commits,
            token=token,
            lossy_documents=self.stream.lossy,
            skipped_events=self.stream.skipped,
            seconds=self.seconds,
        )


@dataclass(frozen=True)
class ProgressReporter:
    """Passes the progress of a run to `report`, where there is one."""

    counts: RunCounts
    report: Callable[[CaptureProgress], None] | None
    has_read_snapshots: Callable[[], bool]

    def show(self) -> None:
        """Report the current progress."""
        if self.report is not None:
            self.report(self.counts.progress(has_read_snapshots=self.has_read_snapshots()))
