"""What a capture has done so far: for a person who looks on, and as the result of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipelines.snapshot import snapshot


@dataclass(frozen=True)
class CaptureProgress:
    """What a person wants to see of a running capture.

    `lag_seconds` is the age of the newest committed event; `has_read_snapshots`: none is planned or being read.
    """

    events: int = 0
    batches: int = 0
    lag_seconds: float | None = None
    reconnects: int = 0
    snapshot: snapshot.SnapshotProgress | None = None
    has_read_snapshots: bool = False


@dataclass(frozen=True)
class CaptureResult:
    """What one run did: events and snapshot rows committed, commits made, and the position at the end.

    `seconds` is the time from the opened stream to the last commit, without the start and the end of the service.
    """

    events: int
    snapshot_documents: int
    commits: int
    token: str | None
    lossy_documents: int = 0
    skipped_events: int = 0
    seconds: float = 0.0


NOTHING = CaptureResult(0, 0, 0, None)
"""What a run did that was stopped before it began."""


def joined(earlier: CaptureResult | None, later: CaptureResult) -> CaptureResult:
    """What two runs did, one after the other; the later one's documents hold those of a snapshot that it went on with."""
    if earlier is None:
        return later
    return CaptureResult(
        events=earlier.events + later.events,
        # Not a sum: a snapshot that was interrupted counts its documents from bronze, those of the run before among
        # them.
        snapshot_documents=later.snapshot_documents or earlier.snapshot_documents,
        commits=earlier.commits + later.commits,
        token=later.token or earlier.token,
        lossy_documents=earlier.lossy_documents + later.lossy_documents,
        skipped_events=earlier.skipped_events + later.skipped_events,
        seconds=earlier.seconds + later.seconds,
    )


@dataclass(frozen=True)
class StreamCounts:
    """What the commits of the stream hold; `batches` is how many commits there were with the newest of them, a
    snapshot's too."""

    events: int = 0
    lossy: int = 0
    skipped: int = 0
    batches: int = 0
    lag_seconds: float | None = None


@dataclass
class RunCounts:
    """What one run has done so far. Each field has one thread that writes it, so that none loses what another one wrote."""

    stream: StreamCounts = StreamCounts()
    """The committer's."""
    reconnects: int = 0
    """The reader's."""
    snapshot: snapshot.SnapshotProgress | None = None
    """The snapshot thread's."""
    began_at: float | None = None
    """The main thread's, as those below: when the run began to read, and how many commits there were then."""
    commits_before: int = 0
    seconds: float = 0.0

    def begin(self, *, commits: int) -> None:
        """The run begins to read."""
        self.began_at, self.commits_before = time.monotonic(), commits

    def end(self) -> None:
        """The last rows of the run are committed."""
        if self.began_at is not None:
            self.seconds = time.monotonic() - self.began_at

    def progress(self, *, has_read_snapshots: bool) -> CaptureProgress:
        """All of it, for a person."""
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
        """All of it, as a run's result."""
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
    """Shows the progress of a run to whoever wants to see it."""

    counts: RunCounts
    report: Callable[[CaptureProgress], None] | None
    has_read_snapshots: Callable[[], bool]

    def show(self) -> None:
        """Hand on the progress as it is now."""
        if self.report is not None:
            self.report(self.counts.progress(has_read_snapshots=self.has_read_snapshots()))
