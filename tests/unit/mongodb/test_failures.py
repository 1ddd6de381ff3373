from __future__ import annotations

from typing import Any

import pytest
from pymongo import errors as driver

from cdc_core import errors
from pipelines.mongodb import failures, snapshot_read


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Sessions are not supported by this MongoDB deployment", errors.SourceUnreachable),
        ("A DNS label is empty.", errors.SettingsError),
    ],
)
def test_a_connection_that_is_opened_during_an_election_is_no_mistake_in_the_settings(
    message: str, expected: type[Exception]
) -> None:
    """The driver says of a server that is neither primary nor secondary that it has no sessions."""
    assert isinstance(failures.translated(driver.ConfigurationError(message), "reading a chunk"), expected)


def test_a_set_of_another_name_is_a_reason_why_no_server_answers() -> None:
    """The driver leaves out servers that are not of the set in the connection string, and then has none to ask."""
    error = driver.ServerSelectionTimeoutError('No replica set members available for replica set name "rs0", Timeout: 30s')
    told = failures.translated(error, "connecting to MongoDB")
    assert isinstance(told, errors.SourceUnreachable) and "its replicaSet" in str(told)


def test_a_package_that_a_mechanism_needs_is_named() -> None:
    """The driver says so when it logs in, and not when the client is made."""
    error = driver.ConfigurationError(
        "MONGODB-AWS authentication requires pymongo-auth-aws: install with: pip install 'pymongo[aws]'"
    )
    assert "requires pymongo-auth-aws: install with" in str(failures.translated(error, "connecting to MongoDB"))


def test_a_refusal_by_atlas_is_no_bug() -> None:
    """Atlas answers a wrong password, and a missing privilege, with a code of its own."""
    reply = {"ok": 0, "errmsg": "bad auth : authentication failed", "code": 8000, "codeName": "AtlasError"}
    error = driver.OperationFailure(reply["errmsg"], 8000, reply)
    for told in (failures.translated(error, "connecting to MongoDB"), failures.stream_error(error)):
        assert isinstance(told, errors.AccessRefused) and "(error 8000: bad auth : authentication failed)" in str(told)
    assert not failures.is_about_an_event(error)


def test_what_a_small_cluster_of_atlas_does_not_offer_is_no_missing_privilege() -> None:
    """A filter of a snapshot fails its collection alone, and a stage of the stream is named."""
    error = driver.OperationFailure("$where is not allowed in this atlas tier", 8000)
    with pytest.raises(failures.ReadRefused, match="8000"), failures.translating_read("reading"):
        raise error
    with pytest.raises(errors.SourceUnsuitable, match=r"check source\.cursor\.pipeline"), failures.translating_opening():
        raise error
    assert "check user name" not in str(failures.translated(error, "reading"))
    with pytest.raises(errors.AccessRefused, match="check user name"), failures.translating_read("reading"):
        raise driver.OperationFailure("user is not allowed to do action [find]", 8000)


def test_a_filter_that_atlas_does_not_take_is_a_refused_one() -> None:
    """A signal with it is refused, and does not end the capture; a missing privilege of other servers does."""

    class Refusing:
        code = 8000

        def __getitem__(self, name: str) -> Refusing:
            return self

        def command(self, *_: object, **__: object) -> None:
            raise driver.OperationFailure("$where is not allowed in this atlas tier", self.code)

    server: Any = Refusing()
    assert "$where is not allowed" in (snapshot_read.refusal_of_filter(server, "shop.orders", {"$where": "1"}) or "")
    server.code = 13
    with pytest.raises(errors.AccessRefused):
        snapshot_read.refusal_of_filter(server, "shop.orders", {})
