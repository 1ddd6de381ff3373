from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from bson.timestamp import Timestamp
from pymongo import errors as driver

from cdc_core import errors
from pipelines.mongodb import server

NEW, OLD = Timestamp(20, 1), Timestamp(10, 1)


def answering(**replies: dict[str, Any]) -> Any:
    """A client whose server gives these replies."""
    return SimpleNamespace(admin=SimpleNamespace(command=replies.__getitem__))


def test_the_operation_time_is_known_before_the_server_signs_its_times() -> None:
    """A server with users that has just started leaves it out of its replies; the time of its last write is in one of them."""
    hello = {"lastWrite": {"opTime": {"ts": OLD, "t": 1}}}
    assert server.operation_time(answering(ping={"operationTime": NEW}, hello=hello)) == NEW
    assert server.operation_time(answering(ping={}, hello=hello)) == OLD
    with pytest.raises(errors.SourceUnreachable, match="may have just started"):
        server.operation_time(answering(ping={}, hello={"msg": "isdbgrid"}))


@pytest.mark.parametrize("wanted", ["rs0", None], ids=["named", "unnamed"])
def test_a_replica_set_that_was_never_initiated_says_so(monkeypatch: pytest.MonkeyPatch, wanted: str | None) -> None:
    """The driver only says that no member is a primary, and so the message was to check that the server is running."""
    member = answering(hello={"isreplicaset": True})
    monkeypatch.setattr(server.mongodb, "seeds", lambda _: iter([member]))
    unselected = driver.ServerSelectionTimeoutError("No replica set members match selector")
    client = SimpleNamespace(admin=SimpleNamespace(command=Mock(side_effect=unselected)))
    client.options = SimpleNamespace(replica_set_name=wanted)
    with pytest.raises(errors.SourceUnreachable, match=r"rs\.initiate\(\)"):
        server.server_info(client)  # type: ignore[arg-type]
