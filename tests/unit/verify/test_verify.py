"""Verification: a failing collection does not affect the others, and rows that could not be judged are no success."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import bson
import pyarrow as pa
import pytest
from bson import Timestamp

from cdc_core import errors
from cdc_core.schema import document_schema
from cdc_core.schema.evolution import Change, ChangeKind
from cdc_core.settings import parse as settings
from cdc_core.typed.plan import Plan
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.bronze.registry import Namespace
from pipelines.delta.writer import Writer
from pipelines.schema import batch_evolution
from pipelines.schema import log as schemas
from pipelines.spark import parallel
from pipelines.terminal import tables as report
from pipelines.verify import comparison, table_progress
from pipelines.verify import run as verify
from pipelines.verify.result import CollectionVerification, KeyDifference, KeyVerdict, Verification
from tests.harness import bronze_rows, without_spark

SPARK = cast("Any", None)


def result(name: str, **counts: Any) -> CollectionVerification:
    return CollectionVerification(name, verify.Layer.GOLD, name, 1, "1.1", documents=1, equal=1, **counts)


class Run:
    """A run over two collections, in which the first one raises or is stopped."""

    def __init__(self, error: Exception | None = None, stop: threading.Event | None = None) -> None:
        self.error, self.stop = error, stop
        self.compared_: list[str] = []
        self.noted: list[str] = []
        self.failures = parallel.Failures()

    def chosen(self) -> list[Namespace]:
        return [Namespace("shop", "a"), Namespace("shop", "b")]

    def compared(self, namespace: Namespace) -> CollectionVerification:
        self.compared_.append(str(namespace))
        if self.stop is not None:
            self.stop.set()
        if namespace.collection == "a" and self.error is not None:
            raise self.error
        return result(str(namespace), different=1)

    def note(self, found: CollectionVerification, *, run: str) -> None:
        self.noted.append(found.collection)


def verified(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, stop: threading.Event | None = None) -> Verification:
    for name in ("server_info", "check_suitable"):
        monkeypatch.setattr(verify.mongodb_server, name, lambda *_: None)
    client = contextlib.nullcontext()
    monkeypatch.setattr(client, "close", lambda: None, raising=False)
    connection = type("Connection", (), {"client": lambda _: client})()
    monkeypatch.setattr(verify.connections, "connection", lambda *_: connection)
    monkeypatch.setattr(verify._VerifyRun, "begin", lambda *_: run)
    chosen = settings.parse(
        {
            "name": "shop",
            "lakehouse": {"root": str(root)},
            "source": {"mongodb.connection.string": "mongodb://127.0.0.1"},
        }
    )
    return verify.run(SPARK, chosen, verify.VerifyOptions(), stop=stop)


@pytest.mark.parametrize(
    ("error", "noted", "code"),
    [
        (errors.Temporary("shop.a was dropped while it was read"), ["shop.b"], 3),
        (RuntimeError("of Spark"), ["shop.b"], 1),
        (errors.SourceUnreachable("no server"), [], 75),
    ],
)
def test_a_collection_that_cannot_be_compared_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, noted: list[str], code: int
) -> None:
    """Differences in the others are shown and refused together with its error. If the source is unreachable, none can be compared, and
    each is named: in a list without it, a collection would count as equal."""
    run = Run(error)
    found = verified(run, tmp_path, monkeypatch)
    assert run.noted == [each.collection for each in found.collections] == noted
    unreached = {"shop.b": "verifying shop.b: not reached, because the source did not answer; try again"}
    told = {"shop.a": errors.message_of(error), **({} if noted else unreached)}
    assert json.loads(verify.to_json(found))["failures"] == told
    assert not found.is_equal
    with pytest.raises(errors.MedallionError) as raised:
        verify.refuse(found)
    assert errors.code(raised.value) == code
    assert errors.message_of(error) in str(raised.value)
    assert ("shop.b: gold differs" in str(raised.value)) == bool(noted)


@pytest.mark.parametrize("error", [None, RuntimeError("a job that was cancelled")])
def test_a_stop_ends_it_and_notes_nothing_of_what_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """No further collection is compared, and the exit code asks for another attempt."""
    stop = threading.Event()
    run = Run(error, stop)
    found = verified(run, tmp_path, monkeypatch, stop)
    assert (run.compared_, run.noted, found.collections) == (["shop.a"], [], ())
    assert list(found.failures) == ["shop.a", "shop.b"]
    with pytest.raises(errors.MedallionError, match="stopped") as raised:
        verify.refuse(found)
    assert errors.code(raised.value) == 75


def test_a_result_that_cannot_be_written_down_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result of an hour of reading is still shown if the disk is full, or the table is read-only."""
    run = Run()
    monkeypatch.setattr(run, "note", lambda found, run: _raise(errors.StorageExhausted("ops/verifications: no space left")))
    found = verified(run, tmp_path, monkeypatch)
    assert [each.different for each in found.collections] == [1, 1]
    report.verified(found)
    assert "shop.a: compared, and then: ops/verifications: no space left" in capsys.readouterr().out
    with pytest.raises(errors.CollectionsFailed, match=r"shop\.a, shop\.b: gold differs") as raised:
        verify.refuse(found)
    assert errors.code(raised.value) == 3


def test_a_repair_that_takes_too_long_loses_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture is paused or behind: what differs, after an hour of reading, was neither shown nor noted."""
    error, different = errors.Temporary("bronze: not read again"), (KeyDifference("1", KeyVerdict.MISSING),)
    compared = replace(result("shop.a", missing=1), differences=different)
    monkeypatch.setattr(verify._VerifyRun, "_comparison", lambda *_: SimpleNamespace(whole=lambda: compared))
    monkeypatch.setattr(verify.repair, "through_bronze", lambda *_, **__: _raise(error))
    context: Any = SimpleNamespace(spark=SPARK, settings=None, layer=verify.Layer.GOLD, stop=None)
    sources: Any = {"shop.a": None}
    run = verify._VerifyRun(context, verify.VerifyOptions(repair=True), sources, registry.KnownCollections())
    assert run.compared(Namespace("shop", "a")).differences == different
    assert run.failures.by_name == {"shop.a": error}


def test_of_nothing_it_is_not_said_that_it_is_equal() -> None:
    """The user cannot list the collections, or the include list names none: an exit code of 0 would be that of a sound table."""
    chosen = settings.parse(
        {"name": "shop", "lakehouse": {"root": "/nowhere"}, "source": {"mongodb.connection.string": "mongodb://127.0.0.1"}}
    )
    context: Any = SimpleNamespace(settings=chosen, layer=verify.Layer.GOLD)
    run = verify._VerifyRun(context, verify.VerifyOptions(), {}, registry.KnownCollections())
    with pytest.raises(errors.DecisionNeeded, match="nothing to verify"):
        run.chosen()


def test_the_table_of_another_collection_is_not_compared() -> None:
    """In a catalog the names of two collections may become one: the second one would differ in all documents, and their repair be in vain."""
    second = Namespace("shop", "a_b")
    refusal = errors.DecisionNeeded("shop.a_b: its table already belongs to shop.a-b")
    context: Any = SimpleNamespace(layer=verify.Layer.GOLD)
    run = verify._VerifyRun(context, verify.VerifyOptions(), {}, registry.KnownCollections(refused={second: refusal}))
    with pytest.raises(errors.DecisionNeeded, match="already belongs"):
        run.compared(second)


@pytest.mark.parametrize("layer", [verify.Layer.GOLD, verify.Layer.BRONZE])
def test_what_the_user_may_not_see_was_not_dropped(monkeypatch: pytest.MonkeyPatch, layer: verify.Layer) -> None:
    """The server leaves the database out of its list. Its rows would all be extra, or kept where the settings keep those of dropped ones."""
    asked: list[Any] = []

    def collections(client: Any, databases: Any) -> Any:
        asked.extend(databases)
        raise errors.AccessRefused("the user lacks a privilege")

    monkeypatch.setattr(verify.catalog, "collections", collections)
    monkeypatch.setattr(verify.bronze_state, "check_whole", lambda *_: None)
    context: Any = SimpleNamespace(layer=layer, client=None, spark=SPARK, bronze=None)
    run = verify._VerifyRun(context, verify.VerifyOptions(layer=layer), {}, registry.KnownCollections())
    monkeypatch.setattr(verify._VerifyRun, "_comparison", lambda *_: pytest.fail("it was compared"))
    with pytest.raises(errors.AccessRefused):
        run.compared(Namespace("crm", "a"))
    assert asked == ["crm"]


def _raise(error: Exception) -> None:
    raise error


def test_a_repair_leaves_the_count_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept rows of deleted documents are counted at first, and are not among the differences."""
    monkeypatch.setattr(comparison.CollectionComparison, "__post_init__", lambda self: setattr(self, "gone", set()))
    monkeypatch.setattr(comparison.mongodb_server, "operation_time", lambda _: Timestamp(5, 1))
    settled = comparison._SettledKeys([KeyDifference("1", KeyVerdict.EQUAL)], 1, 0)
    monkeypatch.setattr(comparison.CollectionComparison, "_settled", lambda self, keys: settled)
    context: Any = SimpleNamespace(client=None, layer=verify.Layer.GOLD)
    progress: Any = SimpleNamespace(table=SimpleNamespace(label="gold"))
    compared = comparison.CollectionComparison(context, Namespace("shop", "a"), progress, None)
    seen = (KeyDifference("1", KeyVerdict.MISSING), KeyDifference("2", KeyVerdict.KEPT))
    after = compared.repaired(result("shop.a", missing=1, kept=8, differences=seen), ["1"])
    assert (after.kept, after.missing, after.repaired) == (8, 0, 1)


def test_what_differs_comes_before_what_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first differences are shown and stored: very many kept or waiting rows hid those that are wrong."""
    monkeypatch.setattr(comparison.CollectionComparison, "__post_init__", lambda self: None)
    context: Any = SimpleNamespace(layer=verify.Layer.GOLD)
    progress: Any = SimpleNamespace(table=SimpleNamespace(label="gold"))
    compared = comparison.CollectionComparison(context, Namespace("shop", "a"), progress, None)
    seen = {
        "1": KeyVerdict.KEPT,
        "2": KeyVerdict.WAITING,
        "3": KeyVerdict.MISSING,
        "4": KeyVerdict.EQUAL,
        "5": KeyVerdict.EXTRA,
    }
    found = compared._result(3, 1, [KeyDifference(key, kind) for key, kind in seen.items()])
    assert [each.key for each in found.differences] == ["3", "5", "1", "2"]


def test_reads_are_later_than_what_bronze_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secondary may answer with the state of the requested time; later events of bronze would be in a batch that is not read."""
    clock = iter(range(1, 9))
    monkeypatch.setattr(comparison.mongodb_server, "operation_time", lambda _: Timestamp(next(clock), 0))
    held = bronze_log.BronzePosition
    monkeypatch.setattr(comparison.table_progress, "position_of", lambda *_: held("82", batch=next(clock), offset=0))
    unused: Any = None
    context: Any = SimpleNamespace(spark=unused, settings=unused, client=unused, bronze=unused, at=None)
    compared = comparison.CollectionComparison(context, Namespace("shop", "a"), unused, None)
    assert compared.begun >= (compared.first_batch, 0)


def test_as_many_documents_are_held_at_once_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close look may answer for the first keys only; each key is judged once, also those that wait for another look."""
    monkeypatch.setattr(comparison.CollectionComparison, "__post_init__", lambda self: setattr(self, "gone", set()))
    looked: list[str] = []

    def parted(self: Any, keys: Any, *, until: float) -> Any:
        is_again = keys[0] in looked
        looked.extend(keys[:64])
        first = [KeyDifference(each, KeyVerdict.EQUAL) for each in keys[:64]]
        return (first, []) if is_again else (first[1:], [replace(first[0], kind=KeyVerdict.CHANGING)])

    monkeypatch.setattr(comparison.CollectionComparison, "_parted", parted)
    unused: Any = None
    context: Any = SimpleNamespace(client=None, stop=threading.Event())
    source = comparison.catalog.SourceCollection("shop", "a", None)
    compared = comparison.CollectionComparison(context, Namespace("shop", "a"), unused, source)
    keys = [str(number) for number in range(150)]
    settled = compared._settled(keys)
    assert (settled.equal, settled.unsettled, len(settled.verdicts)) == (150, 0, 150)
    assert looked == [*keys, "0", "64", "128"]


def test_gold_is_judged_by_the_schema_of_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silver may have been rebuilt since, with wider types: values that are narrower in gold would count as differences."""
    monkeypatch.setattr(
        comparison.CollectionComparison, "__post_init__", lambda self: setattr(self, "spark", without_spark.SPARK)
    )
    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1, "n": 1})))
        hop.run()
        name = Namespace(bronze_rows.DB, "t")
        ops, change = hop.layout.ops("schemas"), Change("", ChangeKind.REBUILT, None, "b")
        schemas.append(
            without_spark.SPARK,
            ops,
            collection=str(name),
            version=2,
            batch=1,
            evolution=batch_evolution.Evolution(document_schema.EMPTY, (change,), Plan(document_schema.EMPTY)),
            generation="b",
        )
        writer = Writer.claim(without_spark.SPARK, hop.silver_table)
        writer.mark(to=1, extra={"generation": "b"})
        found = []
        for layer in (verify.Layer.SILVER, verify.Layer.GOLD):
            context: Any = SimpleNamespace(layer=layer, layout=hop.layout)
            given: Any = (hop.settings.silver.for_collection(str(name)), lambda: False)
            progress = table_progress.TableProgressReader(
                without_spark.SPARK, cast("Any", None), name, layer, hop.layout, hop.bronze, *given
            )
            found.append(comparison.CollectionComparison(context, name, progress, None)._schema().generation)
    assert found == ["b", ""]


def test_a_table_is_judged_by_the_columns_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gold lacks what silver has just added. A table that is set back has more columns than its batch tells: after a repair, or where an
    older copy of bronze was restored, whose batches have smaller numbers."""
    monkeypatch.setattr(
        comparison.CollectionComparison, "__post_init__", lambda self: setattr(self, "spark", without_spark.SPARK)
    )

    def columns(layer: verify.Layer) -> list[str]:
        context: Any = SimpleNamespace(layer=layer, layout=hop.layout)
        name = Namespace(bronze_rows.DB, "t")
        given: Any = (None, name, layer, hop.layout, hop.bronze, None)
        progress = table_progress.TableProgressReader(without_spark.SPARK, *given)
        schema = comparison.CollectionComparison(context, name, progress, None)._schema().schema
        return sorted(each for each, _ in schema.table())

    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1, "n": 1})))
        hop.run()
        hop.append((2, bson.encode({"_id": 2, "m": "x"})))
        hop.silver()
        assert columns(verify.Layer.GOLD) == ["_id", "n"]
        for to in (2, 1):
            Writer.claim(without_spark.SPARK, hop.silver_table).mark(to=to)
            assert columns(verify.Layer.SILVER) == ["_id", "m", "n"]


def test_batches_of_another_bronze_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    """Bronze was removed and captured again, with fewer batches: what is in it counted as applied, and each document that had changed as one
    that differs for good. So it is in gold until it is rewritten from a silver table that was rebuilt."""

    def positions() -> list[int]:
        given: Any = (hop.layout, hop.bronze, None)
        readers = (
            table_progress.TableProgressReader(without_spark.SPARK, cast("Any", None), name, layer, *given)
            for layer in (verify.Layer.SILVER, verify.Layer.GOLD)
        )
        return [each.position() for each in readers]

    name = Namespace(bronze_rows.DB, "t")
    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        for number in range(3):
            hop.append((number, bson.encode({"_id": number})))
        hop.run()
        assert positions() == [3, 3]
        hop.log = "two"
        hop.append((9, bson.encode({"_id": 9})))
        assert positions() == [0, 0]
        Writer.claim(without_spark.SPARK, hop.silver_table).mark(to=1, extra={"log": "two", "generation": "b"})
        assert positions() == [1, 0]


def test_rows_that_wait_are_no_success() -> None:
    """Nobody can tell whether they equal the source: the error is temporary. Differences take precedence."""
    waiting, different = result("shop.a", waiting=2), result("shop.b", different=1)
    with pytest.raises(errors.Temporary, match="2 documents"):
        verify.refuse(Verification("shop", verify.Layer.GOLD, (waiting,), 0.0))
    with pytest.raises(errors.DecisionNeeded, match=r"shop\.b"):
        verify.refuse(Verification("shop", verify.Layer.GOLD, (waiting, different), 0.0))
    verify.refuse(Verification("shop", verify.Layer.GOLD, (result("shop.a", changing=1),), 0.0))


def test_what_could_not_be_judged_is_told_apart_from_equal() -> None:
    """The JSON alone shows that some rows could not be judged."""
    found = Verification("shop", verify.Layer.GOLD, (result("shop.a", waiting=2), result("shop.b")), 0.0)
    told = json.loads(verify.to_json(found))
    assert [each["is_judged"] for each in told["collections"]] == [False, True]
    assert (told["is_judged"], told["is_equal"]) == (False, True)


def test_the_result_of_a_sample_is_stored_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nobody can tell a few equal documents from an equal collection."""
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(
        verify.ops_tables,
        "note",
        lambda _, __, new, schema: rows.extend(pa.Table.from_pylist(new, schema=schema).to_pylist()),
    )
    context: Any = SimpleNamespace(spark=SPARK, settings=SimpleNamespace(name="shop"), layout=SimpleNamespace(ops=str))
    run = verify._VerifyRun(context, verify.VerifyOptions(), {}, cast("Any", None))
    for is_sample in (False, True):
        run.note(result("shop.a", is_sample=is_sample), run="r")
    assert [row["is_sample"] for row in rows] == [False, True]
