"""How a collection is cut into ranges that can be read within the server's snapshot window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.mongodb import catalog, snapshot_read
from pipelines.verify import documents


@pytest.mark.parametrize(
    ("pace", "threads", "size"), [(100.0, 16, 375), (1.0, 80, 1), (200.0, 2, 6000), (2000.0, 2, 25_000), (None, 2, 25_000)]
)
def test_a_range_is_read_within_a_minute(
    monkeypatch: pytest.MonkeyPatch, pace: float | None, threads: int, size: int
) -> None:
    """At any pace, and with any number of threads sharing it; otherwise the server would abort the read."""
    asked: list[int] = []

    def boundary(client: Any, collection: Any, *, lo: bytes | None, documents: int) -> None:
        asked.append(documents)

    monkeypatch.setattr(catalog, "size", lambda client, collection: SimpleNamespace(average=100, documents=10**9))
    monkeypatch.setattr(snapshot_read, "boundary", boundary)
    unused: Any = None
    reading = documents.ReadSpec(unused, unused, (0, 0), "", documents_per_second=pace)
    documents.ranges(unused, reading, threads=threads)
    assert asked == [size]
