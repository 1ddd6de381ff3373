"""Which gold tables are due, and what models read of them, with logs written in Python."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bson
import pytest

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta import local_log, maintenance, table_definition, table_history
from pipelines.delta.writer import Writer
from pipelines.gold import current, history_position, model_inputs
from pipelines.gold import run as gold
from pipelines.operations import rebuild
from pipelines.spark import parallel
from tests.harness import bronze_rows, without_spark
from tests.harness.without_spark import SPARK, Hop

T = registry.Namespace(bronze_rows.DB, "t")


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    with without_spark.running():
        found = Hop(tmp_path)
        for number in range(2):
            found.append((number, bson.encode({"_id": number})))
            found.run()
        yield found


def committed(table: tables.TableRef, operation: str = "WRITE", **said: Any) -> int:
    """Commits without files; returns the table's version."""
    folder = local_log.folder(table)
    assert folder is not None
    return without_spark.write(folder, (local_log.newest_version(folder) or 0) + 1, [], operation, **said)


def stated(**said: Any) -> dict[str, str]:
    return {"userMetadata": json.dumps({"writer": "by hand", "released": True, **said})}


def due(hop: Hop) -> current.GoldWork | None:
    pool = parallel.Pool(SPARK, None)
    return gold._GoldRun(SPARK, hop.settings, False, pool, threading.Event())._work(T)


def at(hop: Hop, table: tables.TableRef) -> str:
    """What identifies the rows of a gold table that models read."""
    return model_inputs.ModelInputs(SPARK, hop.layout, {}, "hand")._version(table, None)[1]


@pytest.mark.parametrize("name", ["origin", "log", "generation", "bronze"])
def test_models_are_made_anew_where_their_inputs_began_anew(tmp_path: Path, name: str) -> None:
    """After silver or bronze is removed or restored, batches and versions start again and may reach the old numbers."""
    with without_spark.running():
        hop = Hop(tmp_path)
        without_spark.create(SPARK, hop.gold_table, columns="`__key` STRING")
        found = []
        for value in ("a", "a", "b"):
            committed(hop.gold_table, **stated(to=1, silver=3, lease=value, **{name: value}))
            found.append(at(hop, hop.gold_table))
    assert found[0] == found[1] != found[2]


def test_models_are_made_anew_after_rows_were_erased_from_their_inputs(hop: Hop) -> None:
    """By another program, whose commit carries no position: neither a claim, nor a move of the position without rows, hides it.

    Compactions, settings, and what was erased before the last rows came count as no change.
    """
    before = at(hop, hop.gold_table)
    committed(hop.gold_table, "OPTIMIZE")
    committed(hop.gold_table, "SET TBLPROPERTIES")
    assert at(hop, hop.gold_table) == before
    committed(hop.gold_table, "DELETE", operationParameters={"predicate": '["(__key = 1)"]'})
    erased = at(hop, hop.gold_table)
    assert erased != before
    writer = Writer.claim(SPARK, hop.gold_table)
    assert at(hop, hop.gold_table) == erased
    writer.mark(to=3, extra=current.unmoved(writer))
    writer.release()
    committed(hop.gold_table, "OPTIMIZE")
    assert at(hop, hop.gold_table) == erased
    committed(hop.gold_table, "RESTORE", operationParameters={"version": 1})
    restored = at(hop, hop.gold_table)
    assert restored not in (erased, before)
    Writer.claim(SPARK, hop.gold_table).release()
    assert at(hop, hop.gold_table) == restored
    hop.append((3, bson.encode({"_id": 3})))
    hop.silver()
    committed(hop.gold_table, **stated(to=3, silver=99))
    assert at(hop, hop.gold_table) not in (before, erased, restored)


def test_an_older_copy_of_gold_is_written_anew_where_deletes_are_forgotten(hop: Hop) -> None:
    """The copy may have documents whose deletes are forgotten. A copy that had applied the deletes has none.

    A number beyond silver's position is of a bronze that was removed and made anew.
    """
    deletes = hop.layout.deletes(*T)
    committed(hop.gold_table, **stated(**{**table_history.standing(SPARK, hop.gold_table).metadata, "to": 1}))
    for forgotten, is_behind in ((1, False), (2, True), (3, False)):
        shutil.rmtree(deletes.path or "", ignore_errors=True)
        without_spark.create(SPARK, deletes, columns="`__key` STRING", properties={registry.FORGOTTEN_TO: str(forgotten)})
        work = due(hop)
        assert work is not None and work.is_rewrite is is_behind, forgotten


def test_a_restored_gold_table_is_written_anew_once(hop: Hop) -> None:
    """Deletes that it had applied may be forgotten by now. A claim of a killed process does not change this."""
    assert due(hop) is None
    older = [
        each.version for each in table_history.newest_first(SPARK, hop.gold_table) if (each.metadata or {}).get("to") == 1
    ]
    committed(hop.gold_table, "RESTORE", operationParameters={"version": older[0]})
    work = due(hop)
    assert work is not None and work.is_rewrite
    Writer.claim(SPARK, hop.gold_table).release()
    work = due(hop)
    assert work is not None and work.is_rewrite
    committed(hop.gold_table, **stated(to=2, **current.GoldTable(SPARK, work, hop.silver_table, hop.silver_table).extra()))
    assert due(hop) is None


def test_readers_keep_what_gold_has_while_silver_begins_anew(hop: Hop) -> None:
    """A silver table that was repaired or made again has not applied anything yet."""
    committed(hop.silver_table, **stated(to=0))
    assert due(hop) is None
    committed(hop.silver_table, **stated(to=2, origin="anew"))
    work = due(hop)
    assert work is not None and work.is_rewrite


def test_readers_keep_what_gold_has_while_silver_is_behind_it(hop: Hop, caplog: pytest.LogCaptureFixture) -> None:
    """After a RESTORE of silver, and after a claim on it that applied nothing. The log says once what gold waits for.

    What silver applies then is published. So is a restored silver that is not behind gold: it may have nothing to apply.
    """
    version = {(each.metadata or {}).get("to"): each.version for each in table_history.newest_first(SPARK, hop.silver_table)}
    committed(hop.silver_table, "RESTORE", operationParameters={"version": version[1]})
    assert registry.silver_position(SPARK, hop.silver_table).to == 1
    service = hop.gold_run()
    assert [service._work(T), service._work(T)] == [None, None]
    assert caplog.text.count("cases.t: silver was restored to batch 1, and gold has published batch 2") == 1
    Writer.claim(SPARK, hop.silver_table).release()
    assert service._work(T) is None
    with pytest.raises(errors.DecisionNeeded, match="run medallion silver first"):
        rebuild.run(SPARK, hop.settings, collection=str(T), layer=tables.Layer.GOLD)
    committed(hop.silver_table, **stated(to=2, origin="anew"))
    work = due(hop)
    assert work is not None and work.is_rewrite
    committed(hop.gold_table, **stated(to=2, **current.GoldTable(SPARK, work, hop.silver_table, hop.silver_table).extra()))
    later = committed(hop.silver_table, **stated(to=3, origin="anew"))
    committed(hop.silver_table, **stated(to=4, origin="anew"))
    committed(hop.silver_table, "RESTORE", operationParameters={"version": later})
    work = due(hop)
    assert work is not None and not work.is_rewrite


@pytest.mark.parametrize(
    ("folded", "folds", "log", "start"),
    [(False, True, "a", 0), (False, False, "a", 7), (True, True, "a", 7), (None, True, "a", 7), (True, True, "b", 0)],
)
def test_a_history_reads_again_what_it_passed_over(folded: bool | None, folds: bool, log: str, start: int) -> None:
    """When updates are folded again, those from the time without folding are only in bronze. A run continues after a kill."""
    at = history_position.HistoryPosition(7, log="a", folds=folded)
    assert at.start(registry.SilverPosition(9, log=log), folds=folds) == start
    assert at.extra["folds"] is folded


@pytest.mark.parametrize(
    ("enabled", "wanted", "is_switched"),
    [("true", True, True), ("false", True, False), ("true", False, False), ("false", False, False)],
)
def test_a_switch_that_was_interrupted_is_not_done(tmp_path: Path, enabled: str, wanted: bool, is_switched: bool) -> None:
    """The property changes first. While the protocol has the feature, readers that do not support it cannot read the table."""
    with without_spark.running():
        table = tables.Layout(str(tmp_path)).gold("cases", "t")
        without_spark.create(SPARK, table, columns="`__key` STRING", properties={"delta.enableDeletionVectors": "true"})
        folder = Path(table.path or "")
        made = table_definition.newest_action(folder, "metaData")
        assert made is not None
        without_spark.write(folder, 1, [{"metaData": {**made, "configuration": {"delta.enableDeletionVectors": enabled}}}])
        assert maintenance.are_vectors_switched(SPARK, table, wanted) is is_switched
        if not wanted:
            committed(table)
            without_spark.write(folder, 3, [{"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}])
            assert maintenance.are_vectors_switched(SPARK, table, wanted)


def test_a_collection_takes_no_models_place(hop: Hop) -> None:
    """A database may have the name `models`: the collection is refused, and the model's rows stay."""
    place = hop.layout.model("orders")
    without_spark.create(SPARK, place, columns="`n` BIGINT")
    committed(place, **stated(to={"cases.t": {"id": "1", "version": 3, "at": "x"}}, model="digest"))
    made = hop.gold_run()
    with pytest.raises(errors.DecisionNeeded, match="a model is made"):
        made._position(registry.Namespace("models", "orders"), registry.SilverPosition())


@pytest.mark.parametrize("is_removed", [True, False])
def test_gold_is_not_rebuilt_from_a_silver_that_begins_anew(hop: Hop, is_removed: bool, tmp_path: Path) -> None:
    """Readers would lose their data: the error says that silver comes first. A mistake in a model does not matter here."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "wrong.sql").write_text("{{ rf('a') }}")
    hop.settings = replace(hop.settings, gold=replace(hop.settings.gold, models=str(tmp_path / "models")))
    if is_removed:
        shutil.rmtree(hop.silver_table.path or "")
    else:
        committed(hop.silver_table, **stated(to=0))
    with pytest.raises(errors.DecisionNeeded, match="nothing has been applied yet"):
        rebuild.run(SPARK, hop.settings, collection=str(T), layer=tables.Layer.GOLD)
    commits = [*table_history.newest_first(SPARK, hop.gold_table)]
    assert {(each.metadata or {}).get("to") for each in commits[:3]} == {2}


def test_a_collection_without_documents_is_not_loaded_at_every_look(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no table, and a service looks at all collections again and again; a document that comes makes it due."""
    loads: list[str] = []
    load = gold.in_process.first_load

    def first_load(*given: Any) -> Any:
        loads.append("load")
        return load(*given)

    monkeypatch.setattr(gold.in_process, "first_load", first_load)
    hop.append((1, bson.encode({"_id": 1})), (1, None), collection="u")
    hop.silver()
    service = hop.gold_run()
    for _ in range(3):
        service.published()
    assert loads.count("load") == 1
    hop.append((2, bson.encode({"_id": 2})), collection="u")
    hop.silver()
    assert [each.changed for each in service.published()] == [1]
    service.close()


def test_a_silver_that_begins_anew_is_not_taken_for_the_one_without_documents(hop: Hop) -> None:
    """Its versions begin at 0 again: the one in which the table before it was empty may be one with documents now."""
    hop.append((1, bson.encode({"_id": 1})), (1, None), collection="u")
    hop.silver()
    service = hop.gold_run()
    service.published()
    folder = local_log.folder(hop.layout.silver(bronze_rows.DB, "u"))
    assert folder is not None
    shutil.rmtree(folder)
    hop.append((2, bson.encode({"_id": 2})), collection="u")
    hop.silver()
    assert [each.changed for each in service.published()] == [1]
    service.close()
