"""Errors of an executor that reads a collection are returned as data, with their class."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cdc_core import errors
from cdc_core.schema.document_schema import DocumentSchema
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import snapshot_read
from pipelines.verify import documents

UNUSED: Any = None


def reading(*, is_exact: bool = False) -> documents.ReadSpec:
    collection: Any = SimpleNamespace(namespace="shop.orders")
    return documents.ReadSpec(UNUSED, collection, (1, 1), DocumentSchema().to_json(), is_exact=is_exact)


@pytest.mark.parametrize(
    ("raised", "kind", "attempts"),
    [
        (errors.SourceUnreachable("an election"), errors.SourceUnreachable, documents.ATTEMPTS),
        (mongodb_failures.SnapshotExpired(), errors.SourceUnreachable, documents.ATTEMPTS),
        (mongodb_failures.CollectionChanged(), errors.Temporary, 1),
        (mongodb_failures.ReadRefused("the server refuses to read it (error 2)"), errors.DecisionNeeded, 1),
        (errors.AccessRefused("the user lacks a right"), errors.AccessRefused, 1),
        (ValueError("of a document"), errors.MedallionError, 1),
    ],
)
def test_what_an_executor_cannot_read_is_an_outcome(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception], attempts: int
) -> None:
    """An interruption is retried after pauses of growing length; if it persists, the other ranges of the read fail at once."""
    asked: list[int] = []
    paused: list[float] = []

    def read_chunk(*_: Any, **__: Any) -> Any:
        asked.append(1)
        raise raised

    monkeypatch.setattr(documents, "_failed", {})
    monkeypatch.setattr(documents.connections, "worker_client", lambda _: UNUSED)
    monkeypatch.setattr(snapshot_read, "read_chunk", read_chunk)
    # Only in this module: threads of a client from another test may sleep too.
    monkeypatch.setattr(documents, "time", SimpleNamespace(sleep=paused.append, monotonic=time.monotonic))
    batches = iter([pa.RecordBatch.from_pydict({"id": [0, 1]})])
    ranges = (snapshot_read.IdRange(), snapshot_read.IdRange())
    found = pa.Table.from_batches(documents._read_ranges(reading(), ranges, "a read", batches))
    assert found.schema.equals(documents.READ)
    assert found["key"].to_pylist() == [None, None]
    (told,) = {documents.error_of(text).__class__ for text in found["error"].to_pylist()}
    assert told is kind
    assert "of a document" not in str(found["error"].to_pylist())
    assert len(asked) == attempts
    assert paused == [documents.PAUSE * 2**n for n in range(attempts - 1)]


def test_a_time_that_the_user_gave_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server no longer has it, and will not have it the next time."""

    def read_chunk(*_: Any, **__: Any) -> Any:
        raise mongodb_failures.SnapshotExpired

    monkeypatch.setattr(snapshot_read, "read_chunk", read_chunk)
    with pytest.raises(errors.DecisionNeeded, match="leave out --as-of"):
        documents.by_keys(UNUSED, reading(is_exact=True), ["1"])
