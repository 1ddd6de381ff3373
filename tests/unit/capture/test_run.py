"""How the layers of one application end together, without Spark."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines import run as pipeline
from pipelines import standstill
from pipelines.capture.progress import CaptureResult
from pipelines.delta import local_log, owners, query_execution
from pipelines.spark import jvm
from pipelines.spark import session as sparks
from tests.harness import captures

BARE = {"name": "shop", "lakehouse": {"root": "/nowhere"}, "source": {"mongodb.connection.string": "mongodb://localhost/"}}
SETTINGS = settings.parse(BARE)


class Layers:
    """Stand-ins for the three layers; each runs until it is stopped, or raises the given error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **raised: BaseException) -> None:
        self.raised, self.runs = raised, 0
        self.takes_over: list[bool] = []
        monkeypatch.setattr(sparks, "is_classic", lambda spark: False)
        monkeypatch.setattr(sparks, "is_local", lambda spark: True)
        monkeypatch.setattr(sparks, "is_shared", lambda spark: False)
        monkeypatch.setattr(sparks, "sessions", lambda spark: lambda: spark)
        monkeypatch.setattr(pipeline, "SNAPSHOT_SECONDS", 0.0)
        monkeypatch.setattr(pipeline.cut_requests, "serve", lambda *_, stop: stop.wait(10))
        for name, module in (("capture", pipeline.capture), ("silver", pipeline.silver), ("gold", pipeline.publish)):
            monkeypatch.setattr(module, "run", self._layer(name))

    def _layer(self, name: str) -> Any:
        def run(*_: object, stop: threading.Event, once: bool, take_over: bool = False, **__: object) -> object:
            self.runs += name == "capture"
            self.takes_over += [take_over] * (name == "capture")
            error = self.raised.pop(name, None)
            if error is not None:
                raise error
            assert once or stop.wait(10)
            return {name: name} if name == "gold" else name  # gold returns results of its tables and of its models

        return run


def test_layers_that_run_once_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal showed the last of the snapshot, with the time left, while silver and gold ran."""
    Layers(monkeypatch)
    turns: list[str] = []

    @contextlib.contextmanager
    def turn(name: str) -> Iterator[None]:
        turns.append(name)
        yield
        turns.append(f"{name} ended")

    pipeline.run(None, SETTINGS, once=True, stop=threading.Event(), turn=turn)  # type: ignore[arg-type]
    assert turns == ["capture", "capture ended", "silver", "silver ended", "gold", "gold ended"]


def test_a_layer_that_fails_ends_the_others_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event that stops all layers belongs to the caller: nobody else sets it."""
    Layers(monkeypatch, gold=errors.TableOwned("process 7 writes it"))
    stop = threading.Event()
    with pytest.raises(errors.TableOwned):
        pipeline.run(None, SETTINGS, once=False, stop=stop)  # type: ignore[arg-type]
    assert not stop.is_set()


def test_layers_that_share_a_session_set_nothing_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence of one layer's MERGE would apply to another layer's commit, which Delta may then silently skip."""
    Layers(monkeypatch)
    stop = threading.Event()
    stop.set()
    for is_shared in (True, False):
        monkeypatch.setattr(sparks, "is_shared", lambda _, found=is_shared: found)
        spark = Mock()
        pipeline.run(spark, SETTINGS, once=False, stop=stop)
        assert query_execution.takes_settings(spark) is not is_shared


def test_once_the_error_that_says_most_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gold continues where silver failed. A refusal by its gate needs a person, and a retry does not help."""
    refused = errors.GateFailed("totals: the new version is not published")
    for raised in ({"gold": refused}, {"silver": errors.CommitConflict("again"), "gold": refused}):
        Layers(monkeypatch, **raised)
        with pytest.raises(errors.GateFailed):
            pipeline.run(None, SETTINGS, once=True, stop=threading.Event())  # type: ignore[arg-type]


def test_once_a_snapshot_that_failed_is_not_hidden_by_a_temporary_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run would not tell of it, where it came with a signal."""
    Layers(monkeypatch, silver=errors.CommitConflict("again"))
    captured = CaptureResult(3, 0, 1, None, failed_snapshots={"shop.a": "the server refuses to read it"})
    monkeypatch.setattr(pipeline.capture, "run", lambda *_, **__: captured)
    with pytest.raises(errors.CollectionsFailed, match=r"(?s)shop\.a.*again") as raised:
        pipeline.run(None, SETTINGS, once=True, stop=threading.Event())  # type: ignore[arg-type]
    assert raised.value.exit_code == errors.DecisionNeeded.exit_code


def test_once_a_stop_that_cancels_a_layer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 0, as after a stop of `medallion silver`: the next start continues with what was cancelled."""
    layers, stop = Layers(monkeypatch), threading.Event()
    monkeypatch.setattr(sparks, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(sparks, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(sparks, "is_classic", lambda spark: True)
    monkeypatch.setattr(sparks, "is_started", lambda spark: True)

    def cancelled(*_: object, **__: object) -> None:
        stop.set()
        assert sparks._CANCELLED.wait(5)
        raise RuntimeError("a job was cancelled")

    monkeypatch.setattr(pipeline.silver, "run", cancelled)
    assert pipeline.run(Mock(), SETTINGS, once=True, stop=stop) == {"capture": "capture"}
    assert layers.runs == 1


def test_a_jvm_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers start anew with another session, until they are asked to stop."""
    layers, stop = Layers(monkeypatch, silver=ConnectionRefusedError()), threading.Event()
    monkeypatch.setattr(pipeline, "RUN_SECONDS", 0.0)
    monkeypatch.setattr(jvm, "is_gone", lambda: True)
    monkeypatch.setattr(jvm, "forget", lambda: None)

    def again() -> None:
        threading.Timer(0.2, stop.set).start()

    results = pipeline.run_again(None, SETTINGS, again=again, once=False, take_over=True, stop=stop)  # type: ignore[arg-type]
    assert (layers.runs, sorted(results)) == (2, ["capture", "gold", "silver"])
    assert layers.takes_over == [True, False], "a person knew of the owners of then"


def test_a_mistake_in_a_file_ends_no_service_behind_a_lost_jvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake came while it ran, and nobody watches the start of another JVM: the exit code would leave it to a person."""
    stop, model = threading.Event(), tmp_path / "a.sql"
    Layers(monkeypatch, silver=ConnectionRefusedError())
    monkeypatch.setattr(pipeline, "RUN_SECONDS", 0.0)
    monkeypatch.setattr(jvm, "is_gone", lambda: True)
    monkeypatch.setattr(jvm, "forget", lambda: None)
    model.write_text("SELECT 1")

    def again() -> None:
        model.write_text("{{ rf('a') }}")
        threading.Timer(0.2, stop.set).start()

    chosen = settings.parse({**BARE, "gold": {"models": str(tmp_path)}})
    results = pipeline.run_again(None, chosen, again=again, once=False, stop=stop)  # type: ignore[arg-type]
    assert sorted(results) == ["capture", "gold", "silver"]


def test_what_an_abandoned_layer_holds_is_free_for_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is still at work when its JVM has ended keeps its writer alive: the next run would find its table owned by its own
    process, and end for a person.
    """
    stop, table = threading.Event(), tables.TableRef.at("/nowhere/silver/shop/orders")
    Layers(monkeypatch, silver=ConnectionRefusedError())
    monkeypatch.setattr(pipeline, "RUN_SECONDS", 0.0)
    monkeypatch.setattr(jvm, "is_gone", lambda: True)
    monkeypatch.setattr(jvm, "forget", lambda: None)
    writer, at_work = owners.identity(), Mock()
    last_commit = local_log.Commit(1, 0, claims.parsed(writer.metadata(now_ms=0, to=7)))
    owners.HELD[writer.writer] = at_work
    with pytest.raises(errors.TableOwned):
        owners.refuse_second(table, last_commit)

    def again() -> None:
        owners.refuse_second(table, last_commit)
        stop.set()

    pipeline.run_again(None, SETTINGS, again=again, once=False, stop=stop)  # type: ignore[arg-type]


def test_the_next_run_waits_for_what_an_abandoned_layer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture serves metrics until it has ended, which takes longer while MongoDB does not answer: the next one found the port in use,
    by itself, and ended as if the settings were wrong.
    """
    layers, stop, port = Layers(monkeypatch, silver=ConnectionRefusedError()), threading.Event(), threading.Lock()
    monkeypatch.setattr(pipeline, "RUN_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(jvm, "is_gone", lambda: True)
    for name in ("forget", "abandon"):
        monkeypatch.setattr(jvm, name, lambda: None)
    captured = pipeline.capture.run

    def slow(*args: Any, **named: Any) -> object:
        assert port.acquire(blocking=False), "the run before still has it"
        try:
            return captured(*args, **named)
        finally:
            time.sleep(1.0 if layers.runs == 1 else 0.0)
            port.release()

    def again() -> None:
        threading.Timer(0.2, stop.set).start()

    monkeypatch.setattr(pipeline.capture, "run", slow)
    results = pipeline.run_again(None, SETTINGS, again=again, once=False, stop=stop)  # type: ignore[arg-type]
    assert (layers.runs, sorted(results)) == (2, ["capture", "gold", "silver"])


def test_nothing_of_the_run_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it had read was kept with its error, while the next one ran for weeks."""
    held: list[weakref.ref[threading.Event]] = []

    def lost(*_: Any, **__: Any) -> dict[str, object]:
        if held:
            return {}
        read = threading.Event()
        held.append(weakref.ref(read))
        raise errors.SparkLost("its JVM ended")

    monkeypatch.setattr(pipeline, "run", lost)
    monkeypatch.setattr(pipeline, "RUN_SECONDS", 0.0)
    monkeypatch.setattr(sparks, "is_local", lambda _: True)
    monkeypatch.setattr(jvm, "forget", lambda: None)
    kept: list[object] = []

    def again() -> None:
        gc.collect()
        kept.append(held[0]())

    pipeline.run_again(None, SETTINGS, again=again, once=False, stop=threading.Event())  # type: ignore[arg-type]
    assert kept == [None]


def test_a_jvm_that_ends_at_once_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end again, for example for lack of memory."""
    Layers(monkeypatch, silver=ConnectionRefusedError())
    monkeypatch.setattr(jvm, "is_gone", lambda: True)
    with pytest.raises(errors.SparkLost):
        pipeline.run_again(None, SETTINGS, again=lambda: None, once=False, stop=threading.Event())  # type: ignore[arg-type,return-value]


def test_a_given_spark_that_is_stopped_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark-submit started its JVM, and only spark-submit can start another one."""
    Layers(monkeypatch, silver=errors.SparkLost("Spark was stopped"))
    monkeypatch.setattr(pipeline, "RUN_SECONDS", 0.0)
    monkeypatch.setattr(sparks, "is_given", lambda: True)
    with pytest.raises(errors.SparkLost):
        pipeline.run_again(None, SETTINGS, again=lambda: None, once=False, stop=threading.Event())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("error", [errors.CollectionsFailed("one of its collections", 3), KeyError("v")])
def test_layers_stand_still_and_go_on(error: Exception) -> None:
    """No layer runs during the block. The results from before and after it are combined, and a stop ends the layers in either.

    A failed collection, also one that failed by a bug, ends no layer.
    """
    still, stop = standstill.Standstill(), threading.Event()
    running: set[str] = set()
    ended: dict[str, list[int]] = {}

    def layer(name: str) -> Any:
        def rounds(stop: threading.Event) -> list[int]:
            running.add(name)
            assert stop.wait(10) and stop.is_set()
            running.discard(name)
            if name == "gold" and not ended:
                ended["failed"] = []
                raise error
            return [1]

        body = still.stoppable(name, rounds, together=lambda before, last: before + last)

        def ends() -> None:
            try:
                ended[name] = body(stop)
            finally:
                stop.set()  # as a run does where a layer fails

        return threading.Thread(target=ends)

    threads = [layer(name) for name in ("silver", "gold")]
    for thread in threads:
        thread.start()
    for _ in range(2):
        captures.until(lambda: len(running) == 2, seconds=10)
        with still.standing(stop):
            assert not running and "silver" not in ended
    captures.until(lambda: len(running) == 2, seconds=10)
    stop.set()
    with pytest.raises(errors.Temporary), still.standing(stop):
        raise AssertionError("nothing is done behind a stop")
    for thread in threads:
        thread.join(10)
    assert (ended["silver"], ended["gold"]) == ([1, 1, 1], [1, 1])


def test_a_layer_that_stands_still_often_holds_one_result() -> None:
    """A service that makes a cut every minute would otherwise collect results for weeks."""

    class Result:
        """What a layer returns for one of its runs."""

    still, stop, made = standstill.Standstill(), threading.Event(), weakref.WeakSet[Result]()
    begun: list[int] = []

    def rounds(stop: threading.Event) -> Result:
        begun.append(len(begun))
        assert stop.wait(10)
        result = Result()
        made.add(result)
        return result

    body = still.stoppable("silver", rounds, together=lambda before, last: last)
    thread = threading.Thread(target=body, args=(stop,))
    thread.start()
    for number in range(3):
        captures.until(lambda number=number: len(begun) > number, seconds=10)  # type: ignore[misc]
        with still.standing(stop):
            assert len(made) == 1
    stop.set()
    thread.join(10)


def test_a_mistake_in_a_file_ends_no_service_behind_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gold starts anew after a cut, and the mistake came while it ran: it is logged, and the capture continues."""
    gold = {"models": str(tmp_path), "expectations": str(tmp_path)}
    chosen = settings.parse({**BARE, "gold": gold})
    audits: list[Any] = []
    monkeypatch.setattr(pipeline.publish.gold, "run", lambda *_, audit, **__: audits.append(audit))
    monkeypatch.setattr(pipeline.publish, "_ModelsThread", lambda *_: Mock(lost=None, ended=threading.Event()))
    layers = pipeline._Run(chosen, Mock, False, False, threading.Event(), None)
    for text in ("SELECT 1", "{{ rf('a') }}"):
        (tmp_path / "a.sql").write_text(text)
        layers._gold(threading.Event())
    assert audits[0] is audits[1] is not None
    later = pipeline._Run(chosen, Mock, False, False, threading.Event(), None)
    with pytest.raises(errors.SettingsError, match="there is no rf"):
        later._gold(threading.Event())
