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
