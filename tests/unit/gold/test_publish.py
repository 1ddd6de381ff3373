"""Documents and models: a failure in one affects the other as little as possible."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from py4j.protocol import Py4JNetworkError

from cdc_core import errors
from cdc_core.settings import parse as settings
from pipelines.delta import query_execution
from pipelines.gold import publish
from pipelines.spark import session as sparks

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


def raising(error: Exception) -> Any:
    """A function that raises this error for any arguments."""

    def raises(*_: Any, **__: Any) -> None:
        raise error

    return raises


@pytest.mark.parametrize("error", [errors.DecisionNeeded("shop.b: its table would be that of shop.a"), KeyError("name")])
def test_models_are_made_where_a_collection_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Models use the other collections, even after a bug, and the error is raised after them."""
    made: list[str] = []
    monkeypatch.setattr(publish.gold, "run", raising(error))
    monkeypatch.setattr(publish.models, "run", lambda *_, **__: made.append("models"))
    with pytest.raises(type(error)) as raised:
        publish.run(SPARK, chosen(tmp_path))
    assert raised.value is error and made == ["models"]


def test_models_that_follow_in_the_session_of_the_documents_set_nothing_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence of one MERGE would apply to another commit of the session."""
    spark = Mock()
    monkeypatch.setattr(sparks, "is_shared", lambda _: True)
    monkeypatch.setattr(publish, "gate", Mock())
    monkeypatch.setattr(publish.gold, "run", Mock())
    monkeypatch.setattr(publish.models, "run", Mock())
    publish.run(spark, chosen(tmp_path), once=False)
    assert not query_execution.takes_settings(spark)


def test_no_model_is_made_where_spark_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who starts Spark again starts with the documents."""
    made: list[str] = []
    monkeypatch.setattr(publish.gold, "run", raising(Py4JNetworkError("Answer from Java side is empty")))
    monkeypatch.setattr(publish.models, "run", lambda *_, **__: made.append("models"))
    with pytest.raises(Py4JNetworkError):
        publish.run(SPARK, chosen(tmp_path))
    assert not made


def test_a_bug_is_told_with_what_else_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported as a bug without its text, which may quote a document."""
    bug = KeyError("Jane")
    monkeypatch.setattr(publish.gold, "run", raising(bug))
    monkeypatch.setattr(publish.models, "run", raising(errors.GateFailed("totals: the new version is not published")))
    with pytest.raises(errors.MedallionError) as raised:
        publish.run(SPARK, chosen(tmp_path))
    assert str(raised.value) == "this is a bug: KeyError\ntotals: the new version is not published"
    assert (raised.value.exit_code, raised.value.__cause__) == (1, bug)


def test_models_that_follow_outlive_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a file that is being replaced: the next look makes the models. A lasting error is logged once, until it is over."""
    wrong = errors.Temporary("a.sql: try again")
    looks, made = iter([FileNotFoundError("a.sql"), wrong, wrong, wrong, None, wrong]), threading.Event()

    def look(*_: Any, **__: Any) -> None:
        error = next(looks, made)
        if error is made:
            made.set()
        elif isinstance(error, Exception):
            raise error

    monkeypatch.setattr(publish, "MODELS_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(publish.models, "run", look)
    following = publish._ModelsThread(SPARK, chosen(tmp_path), SPARK, False, threading.Event(), None)
    assert made.wait(10)
    following.close()
    assert [each.getMessage() for each in caplog.records].count(str(wrong)) == 2


def test_a_model_that_a_stop_has_interrupted_is_told_of_as_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its jobs were cancelled: nobody has to look into its query."""
    cancelled = errors.DecisionNeeded("totals.sql: the query could not be computed: SPARK_JOB_CANCELLED")
    monkeypatch.setattr(sparks, "is_cancelling", lambda: True)
    monkeypatch.setattr(publish.models, "run", raising(cancelled))
    following = publish._ModelsThread(SPARK, chosen(tmp_path), SPARK, False, threading.Event(), None)
    following.join(10)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_spark_that_is_lost_to_models_ends_the_documents_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary folder was removed, or an answer was truncated. Documents are published without queries, and would continue for weeks
    without models."""
    lost, stop = errors.SparkLost("the temporary folder of this Spark was emptied"), threading.Event()
    monkeypatch.setattr(publish, "gate", Mock())
    monkeypatch.setattr(publish.models, "run", raising(lost))
    monkeypatch.setattr(publish.gold, "run", lambda *_, stop, **__: stop.wait(10))
    with pytest.raises(errors.SparkLost) as raised:
        publish.run(Mock(), chosen(tmp_path), once=False, stop=stop)
    assert raised.value is lost and not stop.is_set()


def test_models_that_follow_end_after_the_model_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the documents have failed, the service ended only after all models of the round."""
    began, stops = threading.Event(), []

    def made(*_: Any, stop: threading.Event, **__: Any) -> None:
        began.set()
        stops.append(stop.wait(1))

    monkeypatch.setattr(publish.models, "run", made)
    following = publish._ModelsThread(SPARK, chosen(tmp_path), SPARK, False, threading.Event(), None)
    assert began.wait(10)
    following.close()
    assert stops == [True]


def test_a_temporary_error_hides_no_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that retries forever would never show it: the exit code is that of the error that needs a decision."""
    monkeypatch.setattr(publish.gold, "run", raising(errors.StoreUnreachable("shop.a: the store does not answer")))
    monkeypatch.setattr(publish.models, "run", raising(errors.GateFailed("totals: the new version is not published")))
    with pytest.raises(errors.GateFailed) as raised:
        publish.run(SPARK, chosen(tmp_path))
    assert str(raised.value) == "totals: the new version is not published\nshop.a: the store does not answer"


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a.sql": "SELECT 1", "b.sql": "{{ rf('a') }}"}, "b.sql:1: there is no rf"),
        ({"a.sql": "SELECT 1", "m.yml": "models: ["}, "m.yml:1"),
        ({"a.sql": "SELECT 1", "m.yml": "models: [{name: aa}]"}, "there is no model aa (did you mean a?)"),
    ],
)
def test_a_mistake_in_a_model_keeps_no_run_from_the_documents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], told: str, once: bool
) -> None:
    """A run publishes the documents, and then reports the mistake. A service is refused at its start, while somebody can see it."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    published: list[Any] = []
    monkeypatch.setattr(publish.gold, "run", lambda *_, **given: published.append(given["once"]))
    made: list[Any] = []
    monkeypatch.setattr(publish.models._ModelsRun, "made", lambda _, model: made.append(model.name))
    monkeypatch.setattr(publish.models._ModelsRun, "verdict", lambda *_: None)
    monkeypatch.setattr(publish.models, "known_collections", lambda *_: ())
    with pytest.raises(errors.SettingsError) as refused:
        publish.run(SPARK, chosen(tmp_path), once=once)
    assert told in str(refused.value)
    assert published == ([True] if once else [])
    assert made == (["a"] if once and "b.sql" in files else [])
