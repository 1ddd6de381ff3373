from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from bson.timestamp import Timestamp

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
