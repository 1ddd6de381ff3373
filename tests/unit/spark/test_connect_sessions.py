"""Sessions of one application over Spark Connect."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from pipelines.spark import jvm
from pipelines.spark import session as sparks


@pytest.mark.parametrize("is_databricks", (False, True))
def test_each_session_is_given_the_packages_of_a_checkout(monkeypatch: pytest.MonkeyPatch, is_databricks: bool) -> None:
    """What is shipped over Spark Connect belongs to one session of it; Databricks has the wheel."""
    made: list[Any] = [mock.Mock(spec=["conf", "addArtifacts"]) for _ in range(2)]
    left = iter(made)
    monkeypatch.setattr(sparks, "_connect_session", lambda: next(left))
    monkeypatch.setattr(sparks, "is_classic", lambda _: False)
    monkeypatch.setattr(sparks, "is_databricks", lambda: is_databricks)
    monkeypatch.setattr(sparks, "_apply", lambda *_: None)
    monkeypatch.setattr(jvm, "is_installed", lambda: False)
    fresh = sparks.sessions(mock.Mock())
    assert [fresh(), fresh()] == made
    for each in made:
        assert [str(call.args[0]).endswith(".zip") for call in each.addArtifacts.call_args_list] == [True] * (
            not is_databricks
        )
