from __future__ import annotations

import pytest
from pymongo import errors as driver

from cdc_core import errors
from pipelines.mongodb import failures


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
