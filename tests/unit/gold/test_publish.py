"""Documents and models: what fails in one hinders the other as little as it can."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from pipelines.gold import publish

SPARK = cast("Any", None)


def chosen(tmp_path: Path) -> settings.Settings:
    return settings.parse(
        {
            "name": "shop",
            "lakehouse": {"root": str(tmp_path)},
            "source": {"mongodb.connection.string": "mongodb://127.0.0.1"},
            "gold": {"models": str(tmp_path)},
        }
    )


def test_models_are_made_where_a_collection_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made of the others, and the error is raised when they are."""
    made: list[str] = []

    def failing(*_: Any, **__: Any) -> None:
        raise errors.DecisionNeeded("shop.b: its table would be that of shop.a")

    monkeypatch.setattr(publish, "gate", lambda *_: None)
    monkeypatch.setattr(publish.gold, "run", failing)
    monkeypatch.setattr(publish.models, "run", lambda *_, **__: made.append("models"))
    with pytest.raises(errors.DecisionNeeded, match=r"shop\.b"):
        publish.run(SPARK, chosen(tmp_path))
    assert made == ["models"]


def test_models_that_follow_outlive_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is being replaced, say: the next look makes them."""
    looks, made = iter([FileNotFoundError("a.sql"), None]), threading.Event()

    def look(*_: Any, **__: Any) -> None:
        error = next(looks, None)
        if error is not None:
            raise error
        made.set()

    monkeypatch.setattr(publish, "MODELS_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(publish.models, "run", look)
    following = publish._ModelsThread(SPARK, chosen(tmp_path), SPARK, False, threading.Event(), None)
    assert made.wait(10)
    following.close()
