"""Silver as a service, while others write tables that it has no claim on."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import bson
import pyarrow.compute as pc
import pytest
from py4j.protocol import Py4JNetworkError

from cdc_core import errors
from cdc_core.schema import document_schema
from cdc_core.schema.column_types import Scalar
from cdc_core.silver import quarantine
from pipelines.bronze import registry, survey
from pipelines.delta import live_files, local_log, maintenance, owners
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.schema import log as schemas
from pipelines.silver import evolve, in_process, ranges
from pipelines.silver import run as silver
from tests.harness import bronze_rows, oracle, without_spark
from tests.harness.without_spark import SPARK, Hop


def test_a_table_that_was_rebuilt_under_a_service_keeps_its_generation(tmp_path: Path) -> None:
    """A service claims a table when its first event comes: the schema it knows may be the one before the rebuild."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1, "v": 1})))
        hop.silver()
        service = hop.silver_run()
        service.run_round()
        rebuild = Writer.claim(SPARK, hop.silver_table)
        to, extra = rebuild.last_metadata()
        rebuild.mark(to=to, extra={**extra, "generation": "rebuilt"})
        rebuild.release()
        hop.append((2, bson.encode({"_id": 2, "v": 2})))
        with pytest.raises(errors.CommitConflict, match="rebuilt"):  # the only collection: others would go on
            service.run_round()
        assert service.run_round().events == 1
        service.close()
        position = registry.silver_position(SPARK, hop.silver_table)
    assert (position.to, position.generation) == (2, "rebuilt")


@pytest.mark.parametrize("to", ["0", None])
def test_a_table_that_lost_its_position_under_a_service_is_made_of_all_of_bronze(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str | None
) -> None:
    """A RESTORE to its creation, or an overwrite by another program: a service claims a table when its first event comes."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        service = hop.silver_run()
        service.run_round()
        folder = Path(hop.silver_table.path or "")
        live = live_files.LiveFiles(folder)
        assert live.move_to_newest()
        removed = [{"remove": {"path": each["path"], "dataChange": True}} for each in live.files()]
        parameters = {"mode": "Overwrite"} if to is None else {"version": to}
        without_spark.write(
            folder, live.version + 1, removed, "WRITE" if to is None else "RESTORE", operationParameters=parameters
        )
        hop.append((2, bson.encode({"_id": 2})))
        # The greatest batch of its rows.
        monkeypatch.setattr(
            type(SPARK), "sql", lambda *_: SimpleNamespace(first=lambda: SimpleNamespace(batch=None)), raising=False
        )
        with pytest.raises(errors.CommitConflict, match="moved"):
            service.run_round()
        service.run_round()
        service.close()
        assert live.move_to_newest()
        assert sorted(live.rows(live.files(), ["_id"])["_id"].to_pylist()) == [1, 2]


def test_claims_are_given_back_also_where_spark_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the JVM ends, the same process may continue with another one. No table may count as held by this process because somebody
    keeps the error."""
    with without_spark.running():
        hop = Hop(tmp_path)
        for collection in "tu":
            hop.append((1, bson.encode({"_id": 1})), collection=collection)
        ended = hop.silver_run()
        ended.run_round()
        with monkeypatch.context() as without:
            without.setattr(
                without_spark._Log, "_committed", Mock(side_effect=Py4JNetworkError("Answer from Java side is empty"))
            )
            ended.close()
        for collection in "tu":
            hop.append((2, bson.encode({"_id": 2})), collection=collection)
        going_on = hop.silver_run()
        assert going_on.run_round().events == 2
        going_on.close()


def test_a_schema_that_could_not_be_read_before_is_looked_for_once_more(tmp_path: Path) -> None:
    """A short outage of a store must not keep a collection waiting until the next start."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1, "a": 1})))
        hop.silver()
        made = hop.silver_run()
        try:
            made.run_round()
            made.positions.schemas.clear()
            hop.append((2, bson.encode({"_id": 2, "a": 2})))
            assert made.run_round().events == 1 and not made.failures.by_name
        finally:
            made.close()


def test_a_service_puts_the_small_files_of_a_quarantine_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch with an unreadable event adds files, which the next batch reads: in a day a hundred thousand."""
    compacted: list[str] = []
    monkeypatch.setattr(maintenance, "MANY_FACTS", 3)
    monkeypatch.setattr(maintenance, "_compact_silently", lambda _, table: compacted.append(table.label))
    with without_spark.running():
        hop = Hop(tmp_path)
        table = hop.layout.quarantine("cases", "t")
        layer = hop.silver_run()
        for number in range(4):
            hop.append((number, bson.encode({"_id": number})))
            layer.run_round()
            assert len(compacted) == (number == 3) and not layer.failures.by_name
            hop.note_fact("other", quarantine.Reason.NO_DOCUMENT, to=number)
            log = Path(table.path or "", "_delta_log", f"{number + 1:020}")
            log.with_suffix(".crc").write_text(json.dumps({"numFiles": number + 1, "tableSizeBytes": 100}))
        layer.close()
        assert compacted == [table.label]


def test_a_quarantine_that_is_not_there_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store each look is a request. Only the steps of the claimed table make it, and it is looked for again after them."""
    looks: list[str] = []
    for name, look in {"exists": delta.exists, "found": delta.found}.items():
        monkeypatch.setattr(delta, name, lambda spark, table, look=look: looks.append(table.label) or look(spark, table))
    with without_spark.running():
        hop = Hop(tmp_path)
        layer, label = hop.silver_run(), hop.layout.quarantine("cases", "t").label
        for number in range(3):
            hop.append((number, bson.encode({"_id": number})))
            assert layer.run_round().events == 1 and looks.count(label) == 1
        (collection,) = layer.collections.values()
        assert collection.lacks_quarantine
        monkeypatch.setattr(in_process, "applied", lambda *_, **__: False)
        hop.append((4, bson.encode({"_id": 4})))
        with pytest.raises((errors.MedallionError, without_spark.NeedsSpark)):
            layer.run_round()
        assert not collection.lacks_quarantine
        layer.close()


def test_a_table_whose_schema_is_gone_takes_no_field_for_another(tmp_path: Path) -> None:
    """`A` came second and is in the column `A_2`. A schema that starts anew would add a column `A` beside `a`, which Spark cannot read. The
    table stays unchanged, and unclaimed for its rebuild."""
    with without_spark.running():
        hop = Hop(tmp_path)
        for key, name in enumerate("aA"):
            hop.append((key, bson.encode({"_id": key, name: 1})))
        hop.silver()
        shutil.rmtree(str(hop.layout.ops("schemas").path))
        hop.append((3, bson.encode({"_id": 3, "A": 1})))
        with pytest.raises(errors.DecisionNeeded, match="medallion rebuild --collection"):
            hop.silver()
        assert registry.silver_position(SPARK, hop.silver_table).to == 2
        assert not owners.is_held(SPARK, hop.silver_table)


def test_a_collection_to_which_nothing_comes_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where collections come and go, a service must not hold all that ever existed. One that comes back continues with its columns."""
    monkeypatch.setattr(registry, "IDLE_BATCHES", 2)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1, "a": 1})))
        hop.append((1, bson.encode({"_id": 1, "a": 1})), collection="busy")
        hop.run()
        layer = hop.silver_run()
        after = hop.gold_run()

        def run() -> None:
            layer.run_round()
            after.published()
            assert not layer.failures.by_name and not after.failures.by_name

        hop.append((2, bson.encode({"_id": 2, "B": 2})))
        run()
        for number in range(3):
            hop.append((number, bson.encode({"_id": number})), collection="busy")
            run()
        assert [each.collection for each in layer.collections] == ["busy"]
        assert [each.collection for each in after.sources] == ["busy"] and hop.gold_table not in after.claims
        assert not owners.is_held(SPARK, hop.silver_table) and not owners.is_held(SPARK, hop.gold_table)
        hop.append((3, bson.encode({"_id": 3, "b": 3})))  # the schema of the start has no other field of this name
        run()
        assert hop.gold_table in after.claims
        layer.close()
        after.close()
        live = live_files.of(SPARK, hop.gold_table)
        assert live is not None and live.move_to_newest()
        rows = live.rows(live.files()).sort_by("_id").to_pylist()
    fields = ("_id", "a", "B", "b_2")
    assert [[row[name] for name in fields] for row in rows] == [[1, 1, None, None], [2, None, 2, None], [3, None, None, 3]]


def test_a_table_that_is_removed_under_a_service_is_made_of_all_of_bronze(tmp_path: Path) -> None:
    """As at a start: the removed table's position would skip all earlier events."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1, "v": 1})))
        hop.silver()
        service = hop.silver_run()
        service.run_round()
        shutil.rmtree(str(hop.silver_table.path))
        hop.append((2, bson.encode({"_id": 2, "v": 2})))
        with pytest.raises(errors.CommitConflict, match="removed"):  # the only collection: others would go on
            service.run_round()
        assert service.run_round().events == 2
        service.close()
        live = live_files.of(SPARK, hop.silver_table)
        assert live is not None and live.move_to_newest()
        assert sorted(row["_id"] for row in live.rows(live.files()).to_pylist()) == [1, 2]


def test_a_claim_that_cannot_be_given_back_ends_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example on a full disk: the claim expires."""

    def release(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        service = hop.silver_run()
        service.run_round()
        service.idle = {str(namespace) for namespace in service.collections}
        after = hop.gold_run()
        after.published()
        with monkeypatch.context() as patched:
            patched.setattr(Writer, "release", release)
            assert service.idle and service.run_round().events == 0 and not service.collections
            assert hop.gold_table in after.claims
            after.claims.release(SPARK, hop.gold_table)
        service.close()


@pytest.mark.parametrize("lost", [OSError(24, "Too many open files"), Py4JNetworkError("Answer from Java side is empty")])
def test_what_was_done_under_a_claim_is_told_whatever_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    """Such as a rebuild whose table was swapped, or the reason why it was not."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        monkeypatch.setattr(Writer, "release", Mock(side_effect=lost))
        with Writer.claim(SPARK, hop.silver_table).released():
            pass
        with pytest.raises(errors.DecisionNeeded), Writer.claim(SPARK, hop.silver_table, take_over=True).released():
            raise errors.DecisionNeeded("bronze holds neither a delete nor all that they are made of")


def test_an_error_behind_a_claim_holds_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who keeps the error keeps its frames: the next run in the same process, such as a notebook's, must not find the table owned by
    itself."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        hop.append((2, bson.encode({"_id": 2})))
        with monkeypatch.context() as broken, pytest.raises(RuntimeError) as kept:
            broken.setattr(silver._SilverRun, "_schema", Mock(side_effect=RuntimeError))
            hop.silver()
        hop.silver()
        assert kept.value is not None and registry.silver_position(SPARK, hop.silver_table).to == 2


def test_a_collection_that_comes_later_needs_no_query(tmp_path: Path) -> None:
    """An earlier drop of the name is searched in bronze's files, without Spark's query over all of bronze."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        hop.append((1, bson.encode({"_id": 1})), collection="later")
        hop.silver()
        assert registry.silver_position(SPARK, hop.layout.silver("cases", "later")).to == 2


def test_a_collection_that_comes_later_is_looked_for_behind_what_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new collection has no events before it was found: searching an old bronze for them takes long."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.drop("dropped")
        for key in range(5):
            hop.append((key, bson.encode({"_id": key})))
        hop.silver()
        hop.append((1, bson.encode({"_id": 1})), collection="dropped")
        hop.silver()
        monkeypatch.setattr(local_log, "LOOKED_THROUGH", 3)
        hop.append((1, bson.encode({"_id": 1})), collection="later")
        hop.silver()
        hop.append((2, bson.encode({"_id": 2})), collection="later")
        hop.silver()
        later, dropped = (registry.silver_position(SPARK, hop.layout.silver("cases", name)) for name in ("later", "dropped"))
    assert (later.to, dropped.to) == (9, 7)
    assert later.origin and dropped.floor and not later.floor, (
        "made by the first batch; nothing from before the drop may come"
    )


def test_a_new_collection_that_failed_is_looked_for_behind_what_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first turn may fail, for example on a full disk: the next one must not query all of bronze."""
    claimed, full = silver._SilverRun._claimed, [errors.StorageExhausted("no space left")]

    def claim(*given: Any) -> Writer:
        if full:
            raise full.pop()
        return claimed(*given)

    with without_spark.running():
        hop = Hop(tmp_path)
        for key in range(5):
            hop.append((key, bson.encode({"_id": key})))
        hop.silver()
        service = hop.silver_run()
        service.run_round()
        monkeypatch.setattr(local_log, "LOOKED_THROUGH", 3)
        monkeypatch.setattr(silver._SilverRun, "_claimed", claim)
        hop.append((1, bson.encode({"_id": 1})), collection="later")
        assert service.run_round().events == 0 and refusals(service) == {"cases.later": errors.StorageExhausted}
        assert service.run_round().events == 1
        service.close()


def refusals(layer: Any) -> dict[str, type[Exception]]:
    """The class of each collection's error."""
    return {name: type(error) for name, error in layer.failures.by_name.items()}


def test_a_table_is_taken_over_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The take-over is meant for the owner at the start. Who claims the table later, such as a rebuild, keeps it."""
    monkeypatch.setattr(registry, "IDLE_BATCHES", 2)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.append((1, bson.encode({"_id": 1})), collection="busy")
        hop.run()
        before = [Writer.claim(SPARK, table) for table in (hop.silver_table, hop.gold_table)]
        layer, after = hop.silver_run(), hop.gold_run()
        layer.take_over = after.claims.take_over = True
        hop.append((2, bson.encode({"_id": 2})))
        layer.run_round()
        after.published()
        assert not layer.failures.by_name and not after.failures.by_name and all(before), "their owners live"
        for number in range(3):
            hop.append((number, bson.encode({"_id": number})), collection="busy")
            layer.run_round()
            after.published()
        since = [Writer.claim(SPARK, table) for table in (hop.silver_table, hop.gold_table)]
        hop.append((3, bson.encode({"_id": 3})))
        layer.run_round()
        assert refusals(layer) == {"cases.t": errors.TableOwned}
        since[0].release()
        layer.run_round()
        after.published()
        assert refusals(after) == {"cases.t": errors.TableOwned}
        since[1].release()
        layer.close()
        after.close()


def test_a_turn_is_long_beside_the_survey_that_it_begins_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn surveys the whole rest of a backlog, which takes longer than a short turn if it has a hundred million events."""
    surveyed, now = survey.surveyed, [0.0]

    def slowly(*given: Any, **named: Any) -> Any:
        now[0] += 100
        return surveyed(*given, **named)

    turns = []

    def apply(collection: object, work: Any, *, seconds: float, is_alone: bool, **named: object) -> ranges.Progress:
        assert not is_alone, "two collections have events"
        turns.append(seconds)
        return ranges.Progress(work.position, 0)

    monkeypatch.setattr(silver, "time", Mock(monotonic=lambda: now[0]))
    monkeypatch.setattr(survey, "surveyed", slowly)
    monkeypatch.setattr(ranges, "apply", apply)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        hop.append((1, bson.encode({"_id": 1})), collection="u")
        service = hop.silver_run()
        service.run_round()
        service.close()
    assert turns == [400, 400]


def test_a_take_over_applies_to_owners_at_the_start(tmp_path: Path) -> None:
    """A service may first need a table weeks after its start: a rebuild that claimed it meanwhile keeps it."""
    with without_spark.running():
        hop = Hop(tmp_path)
        for name in ("there", "later"):
            hop.append((1, bson.encode({"_id": 1})), collection=name)
        hop.run()
        silver_at, gold_at = hop.layout.silver, hop.layout.gold
        before = [Writer.claim(SPARK, of("cases", "there")) for of in (silver_at, gold_at)]
        time.sleep(0.002)  # the log counts milliseconds
        layer, after = hop.silver_run(), hop.gold_run()
        layer.take_over = after.claims.take_over = True
        time.sleep(0.002)
        since = [Writer.claim(SPARK, of("cases", "later")) for of in (silver_at, gold_at)]
        to, extra = before[0].last_metadata()
        before[0].mark(to=to, extra=extra)
        for name in ("there", "later"):
            hop.append((2, bson.encode({"_id": 2})), collection=name)
        layer.run_round()
        assert refusals(layer) == {"cases.later": errors.TableOwned}
        since[0].release()
        layer.run_round()
        after.published()
        assert refusals(after) == {"cases.later": errors.TableOwned}
        layer.close()
        after.close()


def test_a_claim_without_an_answer_holds_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error refers to the writer that nobody received: the service must not be refused by its own claim until a garbage collection."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})))
        table, commit = hop.silver_table, without_spark._Log._committed
        hop.silver()

        def unanswered(*given: Any, **named: Any) -> int:
            commit(*given, **named)
            raise OSError("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(without_spark._Log, "_committed", unanswered)
            with pytest.raises(OSError, match="no answer") as kept:
                Writer.claim(SPARK, table)
        assert kept.value.__traceback__ is not None
        Writer.claim(SPARK, table).release()


def test_a_run_that_was_taken_over_records_no_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may stall for longer than its lease while it types documents. The other process then has a larger schema with the same
    version, which must be the one that the next start reads."""
    with without_spark.running():
        hop, record = Hop(tmp_path), evolve.record
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        hop.append((2, bson.encode({"_id": 2, "x": 1})))

        def standing_still(*args: Any) -> None:
            monkeypatch.undo()
            hop.append((3, bson.encode({"_id": 3, "y": "text"})))
            silver.run(SPARK, hop.settings, take_over=True)
            record(*args)

        monkeypatch.setattr(evolve, "record", standing_still)
        with pytest.raises(errors.OwnershipLost):
            hop.silver()
        [(_, kept)] = schemas.newest(SPARK, hop.layout.ops("schemas"))
        assert [name for name, _ in kept.schema.table()] == ["_id", "x", "y"]
        noted = oracle.read(hop.layout.ops("schemas").path or "").filter(pc.field("schema").is_valid())
        assert sorted(noted["version"].to_pylist()) == [1, 2], (
            "each number once, whichever of two with one number would count"
        )
        hop.append((4, bson.encode({"_id": 4, "y": 5})))
        hop.silver()


def test_of_two_schemas_with_one_number_the_one_that_has_more_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run beside a service without a claim is killed after it recorded a schema. The service does not know this schema, and records
    another with the same version."""
    with without_spark.running():
        hop, record = Hop(tmp_path), evolve.record
        hop.append((1, bson.encode({"_id": 1})))
        hop.silver()
        service = hop.silver_run()
        service.run_round()
        hop.append((2, bson.encode({"_id": 2, "x": 1})))

        def dying(*args: Any) -> None:
            record(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(evolve, "record", dying)
            hop.silver()
        owners.HELD.clear()
        hop.append((3, bson.encode({"_id": 3, "y": "text"})))
        service.run_round()
        service.close()
        [(_, kept)] = schemas.newest(SPARK, hop.layout.ops("schemas"))
    assert (kept.version, [name for name, _ in kept.schema.table()]) == (2, ["_id", "x", "y"])


def test_a_service_notes_again_what_the_record_of_collections_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removed the folder `ops` as mere records: gold found no collection there, and published nothing more, without a word."""
    monkeypatch.setattr(silver, "NOTED_SECONDS", 0.0)
    with without_spark.running():
        hop = Hop(tmp_path)
        silver_run, gold_run = hop.silver_run(), hop.gold_run()
        for number in range(2):
            hop.append((number, bson.encode({"_id": number})))
            hop.append((number, bson.encode({"_id": number})), collection="u")
            silver_run.run_round()
            assert len(gold_run.published()) == 2
            shutil.rmtree(hop.layout.ops("collections").path or "")
        silver_run.close()
        gold_run.close()


@pytest.mark.parametrize("is_removed", (False, True))
def test_a_service_applies_again_what_was_taken_from_a_table_without_new_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    """By a RESTORE, a repair or a removal: gold published the older rows, until the collection's next event."""
    monkeypatch.setattr(silver, "NOTED_SECONDS", 0.0)
    with without_spark.running():
        hop = Hop(tmp_path)
        service = hop.silver_run()
        hop.append((0, bson.encode({"_id": 0})))
        service.run_round()
        earlier = registry.silver_position(SPARK, hop.silver_table)
        hop.append((1, bson.encode({"_id": 1})))
        service.run_round()
        if is_removed:
            shutil.rmtree(hop.silver_table.path or "")
        else:
            other = Writer.claim(SPARK, hop.silver_table, take_over=True)
            other.mark(to=earlier.to, extra=earlier.extra)
            other.release()
        assert service.run_round().events == (2 if is_removed else 1)
        service.close()
        position = registry.silver_position(SPARK, hop.silver_table)
        keys = oracle.read(hop.silver_table.path or "")["__key"].to_pylist()
    assert position.to == 2 and sorted(keys) == ["0", "1"]


def test_a_service_applies_again_all_that_a_table_lacks_without_a_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RESTORE to its creation: the table stayed empty until the collection's next event."""
    monkeypatch.setattr(silver, "NOTED_SECONDS", 0.0)
    with without_spark.running():
        hop = Hop(tmp_path)
        service = hop.silver_run()
        hop.append((0, bson.encode({"_id": 0})))
        service.run_round()
        live = live_files.LiveFiles(Path(hop.silver_table.path or ""))
        assert live.move_to_newest()
        removed = [{"remove": {"path": each["path"], "dataChange": True}} for each in live.files()]
        said = {"operationParameters": {"version": "0"}}
        without_spark.write(Path(hop.silver_table.path or ""), live.version + 1, removed, "RESTORE", **said)
        # The greatest batch of its rows.
        monkeypatch.setattr(
            type(SPARK), "sql", lambda *_: SimpleNamespace(first=lambda: SimpleNamespace(batch=None)), raising=False
        )
        assert service.run_round().events == 1
        service.close()
        assert oracle.read(hop.silver_table.path or "")["__key"].to_pylist() == ["0"]


def test_what_was_taken_from_a_table_is_applied_by_the_next_start_of_a_stopped_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service noticed it just before it was stopped. What it says then of all tables must not cover the older one."""
    monkeypatch.setattr(silver, "NOTED_SECONDS", 0.0)
    with without_spark.running():
        hop = Hop(tmp_path)
        service = hop.silver_run()
        positions = []
        for number, collection in enumerate(("t", "t", "u")):
            hop.append((number, bson.encode({"_id": number})), collection=collection)
            service.run_round()
            positions.append(registry.silver_position(SPARK, hop.silver_table))
        other = Writer.claim(SPARK, hop.silver_table, take_over=True)
        other.mark(to=positions[0].to, extra=positions[0].extra)
        other.release()
        service.stop.set()
        service.run_round()
        service.close()
        assert silver.run(SPARK, hop.settings).events == 1
        assert registry.silver_position(SPARK, hop.silver_table).to >= positions[1].to


def test_rescued_values_are_looked_at_without_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run looks at all rows, whose rescued values may be older than the setting."""
    seeds: list[document_schema.DocumentSchema] = []

    def run(_: object, seed: document_schema.DocumentSchema) -> Any:
        seeds.append(seed)
        raise errors.DecisionNeeded("by the test")

    monkeypatch.setattr(silver.silver_rebuild.SilverRebuild, "run", run)
    with without_spark.running():
        hop = Hop(tmp_path, **{"schema.on.conflict": "retype", "schema": {"pinned": "int"}})
        for number, document in enumerate([{"a": 1, "pinned": "x"}, {"a": None}]):
            hop.append((number, bson.encode({"_id": number, **document})))
            hop.silver()
            assert not seeds, "a pinned column gets no wider"
        hop.append((1, bson.encode({"_id": 1, "a": "text", "pinned": 2.5})), (2, bson.encode({"_id": 2, "a": 5})))
        hop.silver()
        (seed,) = seeds
        assert dict(seed.table()) == {"_id": Scalar.INT, "a": Scalar.TEXT, "pinned": Scalar.INT}
        monkeypatch.setattr(silver.silver_rebuild, "FEW_RESCUED", 1)
        hop.append((3, bson.encode({"_id": 3})))
        with pytest.raises(without_spark.NeedsSpark):
            hop.silver()


def test_all_rows_of_a_table_that_was_restored_are_looked_at_for_rescued_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are those of before the rebuild: their rescued values stayed out of the columns until the next start."""
    monkeypatch.setattr(silver, "NOTED_SECONDS", 0.0)
    looked_at_after: list[int] = []

    def rebuilt(_: object, __: object, position: registry.SilverPosition, *, after: int, stop: object) -> Any:
        looked_at_after.append(after)
        return position

    monkeypatch.setattr(silver.silver_rebuild, "rebuilt_for_rescued", rebuilt)
    with without_spark.running():
        hop = Hop(tmp_path, **{"schema.on.conflict": "retype"})
        service = hop.silver_run()
        positions = []
        for number in range(2):
            hop.append((number, bson.encode({"_id": number})))
            service.run_round()
            positions.append(registry.silver_position(SPARK, hop.silver_table))
        other = Writer.claim(SPARK, hop.silver_table, take_over=True)
        other.mark(to=positions[0].to, extra=positions[0].extra)
        other.release()
        service.run_round()
        service.close()
    assert looked_at_after == [0, 1, 0]


def test_after_a_failure_all_rows_are_looked_at_for_rescued_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events are committed by then, and the next round begins after them: what they rescued stayed so until the next start."""
    looked_at_after: list[int] = []

    def rebuilt(of: Any, _: object, position: registry.SilverPosition, *, after: int, stop: object) -> Any:
        looked_at_after.extend([after] * (of.namespace.collection == "t"))
        if len(looked_at_after) == 2:
            raise errors.StoreUnreachable("for a moment")
        return position

    monkeypatch.setattr(silver.silver_rebuild, "rebuilt_for_rescued", rebuilt)
    with without_spark.running():
        hop = Hop(tmp_path, **{"schema.on.conflict": "retype"})
        hop.append((1, bson.encode({"_id": 1})), collection="u")  # a run ends where all collections have failed
        service = hop.silver_run()
        for number in range(3):
            hop.append((number, bson.encode({"_id": number})))
            service.run_round()
        service.close()
    assert looked_at_after == [0, 2, 0]


def test_a_rebuild_for_rescued_values_that_was_refused_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for another rescued value, and not after the collection was released and claimed again: only a new start tries again."""
    rebuilds: list[int] = []

    def run(_: object, seed: document_schema.DocumentSchema) -> Any:
        rebuilds.append(1)
        raise errors.DecisionNeeded("by the test")

    monkeypatch.setattr(silver.silver_rebuild.SilverRebuild, "run", run)
    with without_spark.running():
        hop = Hop(tmp_path, **{"schema.on.conflict": "retype"})
        hop.append((0, bson.encode({"_id": 0, "a": 1})))
        hop.silver()
        service = hop.silver_run()
        for number in range(1, 4):
            hop.append((number, bson.encode({"_id": number, "a": "text"})))
            service.run_round()
            service._release(registry.Namespace(bronze_rows.DB, "t"))
        service.close()
        assert len(rebuilds) == 1
        hop.append((4, bson.encode({"_id": 4, "a": "text"})))
        hop.silver()
    assert len(rebuilds) == 2


def test_a_collection_that_is_stopped_before_its_first_range_keeps_its_position(tmp_path: Path) -> None:
    """It may have been searched much further: the next start would search all of it again if the position were taken for the table's."""
    with without_spark.running():
        hop = Hop(tmp_path)
        namespace = registry.Namespace(bronze_rows.DB, "t")
        hop.append((1, bson.encode({"_id": 1})), collection="t")
        service = hop.silver_run()
        service.run_round()
        hop.append((1, bson.encode({"_id": 1})), collection="u")
        service.run_round()
        hop.append((1, bson.encode({"_id": 1})), collection="t")
        (work,) = silver.due.works(SPARK, hop.bronze, service.positions, hop.batch)
        service.stop.set()
        result = service._applied(SPARK, work)
        committed = registry.silver_position(SPARK, hop.silver_table).to
        assert (service.positions.known[namespace].to, result.to) == (committed, committed) == (1, 1)
        service.close()
