"""Running models: failures, waiting for histories, tables of others, and models without changes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from pyspark.errors import AnalysisException

from cdc_core import errors
from cdc_core.models import sql_model
from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from pipelines.delta import local_log
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import model_changes, model_table, models
from pipelines.gold.model_inputs import ModelInputs
from tests.harness import layers, without_spark

SETTINGS = {"name": "shop", "lakehouse": {"root": "lake"}, "source": {"mongodb.connection.string": "mongodb://127.0.0.1"}}


def test_files_of_a_mounted_config_map_and_of_editors_count_once(tmp_path: Path) -> None:
    """Kubernetes mounts a ConfigMap as links into a hidden folder. Jupyter copies a file into one; Emacs locks one by a link to nowhere.

    Links to folders elsewhere are not followed.
    """
    elsewhere, tmp_path = tmp_path / "old", tmp_path / "models"
    for each in (elsewhere, tmp_path):
        each.mkdir()
    (elsewhere / "totals.sql").write_text("SELECT 0")
    (tmp_path / "old").symlink_to(elsewhere)
    data = tmp_path / "..2026_05_01"
    (data / "daily").mkdir(parents=True)
    (data / "totals.sql").write_text("SELECT 1 AS n")
    (data / "daily" / "sales.sql").write_text("SELECT 2 AS n")
    (data / "models.yml").write_text("models: [{name: totals, description: all of them}]")
    (tmp_path / "..data").symlink_to(data.name)
    for name in ("totals.sql", "models.yml", "daily"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    (tmp_path / "daily" / "back").symlink_to("../..")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "totals-checkpoint.sql").write_text("SELECT")
    (tmp_path / ".#totals.sql").symlink_to("jane@laptop.4711")
    (tmp_path / "._totals.sql").write_bytes(b"\x00\x05\x16\x07\xff")  # as macOS leaves it on a network disk
    read = models.files(settings.parse({**SETTINGS, "gold": {"models": str(tmp_path)}}))
    assert (read.names, read.models[1].description, read.problems) == (("sales", "totals"), "all of them", ())


@pytest.mark.parametrize("at", ["verdict", "made"])
@pytest.mark.parametrize(
    ("failure", "exit_code"), [(KeyError("Jane"), 1), (errors.GateFailed("totals: not published"), 3)], ids=["bug", "gate"]
)
def test_a_model_that_fails_keeps_no_other_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, exit_code: int, at: str
) -> None:
    """Only models that refer to it wait. The failure is raised after the others are made, without the text of a bug."""
    chosen = settings.parse(
        {
            "name": "shop",
            "lakehouse": {"root": str(tmp_path)},
            "source": {"mongodb.connection.string": "mongodb://127.0.0.1"},
        }
    )
    texts = {"totals": "SELECT 1 AS n", "of_totals": "SELECT * FROM {totals}", "alone": "SELECT 2 AS n"}
    found = [SimpleNamespace(name=name, names=("totals",) if "{" in text else ()) for name, text in texts.items()]
    made: list[str] = []

    class Run:
        def __init__(self, *_: Any) -> None:
            pass

        def verdict(self, model: sql_model.Model) -> None:
            if at == "verdict" and model.name == "totals":  # its input tables cannot be read
                raise failure

        def note_refusal(self, *_: Any) -> None:
            pass

        def made(self, model: sql_model.Model) -> models.ModelResult:
            if model.name == "totals":
                raise failure
            made.append(model.name)
            return models.ModelResult(model.name, "whole", 1, 1, 0.0)

    monkeypatch.setattr(models, "_ModelsRun", Run)
    monkeypatch.setattr(models, "ModelInputs", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(models, "ordered", lambda *_: SimpleNamespace(models=found, problems=()))
    with pytest.raises(errors.MedallionError) as raised:
        models.run(None, chosen)  # type: ignore[arg-type]
    assert made == ["alone"]
    assert raised.value.exit_code == exit_code and "Jane" not in str(raised.value)


def test_a_table_that_cannot_be_read_stops_only_the_models_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is damaged, which a person must mend. To remember the refusal its position was read again, and that error ended the run."""
    chosen = settings.parse({**SETTINGS, "lakehouse": {"root": str(tmp_path)}})
    damaged = errors.DecisionNeeded("gold/shop/orders: this entry of the table's log is damaged")

    def unreadable(*_: Any) -> Any:
        raise damaged

    def made(self: Any, model: sql_model.Model) -> models.ModelResult:
        names.append(model.name)
        return models.ModelResult(model.name, *(("whole", 1, 1, 0.0) if model.name == "alone" else unreadable()))

    names: list[str] = []
    texts = {"totals": "SELECT * FROM {{ ref('shop.orders') }}", "alone": "SELECT 2 AS n"}
    found = [sql_model.parse(name, text, where=name) for name, text in texts.items()]
    monkeypatch.setattr(models._ModelsRun, "made", made)
    monkeypatch.setattr(models, "ordered", lambda *_: SimpleNamespace(models=found, problems=()))
    monkeypatch.setattr(models.delta, "exists", lambda *_: False)
    monkeypatch.setattr(ModelInputs, "table", unreadable)
    with pytest.raises(errors.DecisionNeeded, match="damaged"):
        models.run(without_spark.SPARK, chosen)
    assert names == ["totals", "alone"]


def test_a_model_over_a_history_waits_for_its_collection(tmp_path: Path) -> None:
    """Also before its first event: the settings announce it. A history of another collection does not exist."""
    chosen = settings.parse(
        {
            "name": "shop",
            "lakehouse": {"root": str(tmp_path / "lakehouse")},
            "source": {
                "mongodb.connection.string": "mongodb://127.0.0.1",
                "collection.include.list": "shop.orders,shop.other",
            },
            "silver": {"collections": {"shop.orders": {"history": True}}},
            "gold": {"models": str(tmp_path)},
        }
    )
    for name in ("orders", "other"):
        (tmp_path / f"of_{name}.sql").write_text(f"SELECT * FROM {{{{ ref('shop.{name}_history') }}}}")
    with without_spark.running():
        order = models.ordered(without_spark.SPARK, chosen)
    assert [each.name for each in order.models] == ["of_orders"]
    assert ["ref('shop.other_history') refers to nothing" in each.message for each in order.problems] == [True]


def test_a_table_that_no_model_made_is_not_overwritten(tmp_path: Path) -> None:
    """Another pipeline's database `models`, or a history there that is not kept at the moment, may use the same folder."""
    layout = delta.layout(layers.pipeline(tmp_path).lakehouse)
    model = sql_model.parse("orders", "SELECT 1 AS n", where="orders.sql")
    with without_spark.running():
        without_spark.create(without_spark.SPARK, layout.gold("models", "orders"), columns="`n` INT")
        inputs = models.ModelInputs(without_spark.SPARK, layout, {}, "second")
        table = model_table.ModelTable(without_spark.SPARK, model, inputs, models.no_audit)
        assert table.work().kind == "whole", "which a model that was killed before its first rows left"
        writer = Writer.claim(without_spark.SPARK, layout.gold("models", "orders"))
        writer.mark(to=3, extra={"silver": 7})
        with pytest.raises(errors.SettingsError, match="models/orders, which contains a collection's documents"):
            table.work()
        writer.mark(to={}, extra={"model": model.digest, "pipeline": "second"})
        assert table.work().kind == "nothing"


def test_a_view_is_made_when_the_table_that_it_was_is_removed(tmp_path: Path) -> None:
    """The run asked for this, and its other tables may stay unchanged for long."""
    layout = delta.layout(layers.pipeline(tmp_path).lakehouse)
    view = sql_model.parse("daily", "{{ config(materialized='view') }} SELECT 1 AS n", where="daily.sql")
    with without_spark.running():
        inputs = models.ModelInputs(without_spark.SPARK, layout, {}, "shop")
        run = models._ModelsRun(without_spark.SPARK, inputs, models.no_audit, False, False, {}, set())
        without_spark.create(without_spark.SPARK, layout.model("daily"), columns="`n` INT")
        with pytest.raises(errors.SettingsError, match="its former table still exists") as refused:
            models._check_no_table(without_spark.SPARK, view, layout.model("daily"))
        run.note_refusal(view, refused.value)
        verdict = run.verdict(view)
        assert verdict is not None and verdict.is_refused
        shutil.rmtree(layout.model("daily").path or "")
        assert run.verdict(view) is None


def test_a_model_is_made_when_the_table_in_its_place_is_removed(tmp_path: Path) -> None:
    """The refusal asked for this. A service made the model only when one of its other tables changed, and did not say that it waits."""
    layout = delta.layout(layers.pipeline(tmp_path).lakehouse)
    model = sql_model.parse("daily", "SELECT 1 AS n", where="daily.sql")
    with without_spark.running():
        inputs = models.ModelInputs(without_spark.SPARK, layout, {}, "second")
        run = models._ModelsRun(without_spark.SPARK, inputs, models.no_audit, False, False, {}, set())
        without_spark.create(without_spark.SPARK, layout.model("daily"), columns="`n` INT")
        Writer.claim(without_spark.SPARK, layout.model("daily")).mark(to={}, extra={"model": "other", "pipeline": "first"})
        with pytest.raises(errors.SettingsError, match="or remove this table") as refused:
            run.made(model)
        run.note_refusal(model, refused.value)
        verdict = run.verdict(model)
        assert verdict is not None and verdict.is_refused
        shutil.rmtree(layout.model("daily").path or "")
        assert run.verdict(model) is None


def test_a_view_that_is_as_it_was_made_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service looks every few seconds, and a catalog notes each time that the view is another one. One of somebody else stays."""
    made: list[str] = []
    catalog: list[tuple[str, ...]] = []
    owner = {model_table.view_owner("hand"): "true"}

    def sql(statement: str) -> Any:
        if statement.startswith("DESCRIBE"):
            if not catalog:
                raise AnalysisException("there is no such view")
            return SimpleNamespace(collect=lambda: [*catalog])
        made.append(statement)
        catalog[:] = [("View Text", statement)]
        return None

    position = {"at": 1}
    inputs: Any = SimpleNamespace(
        layout=SimpleNamespace(
            root=None, model=lambda _: tables.TableRef.named("shop", "number"), gold=lambda *_: "shop.shop__orders"
        ),
        add_view=lambda *_: None,
        positions=lambda _: position,
        pipeline="hand",
    )
    spark: Any = SimpleNamespace(sql=sql)
    audited: list[str] = []
    audit: Any = lambda _, candidate: audited.append(candidate.name)  # noqa: E731
    monkeypatch.setattr(models.delta, "exists", lambda *_: False)
    monkeypatch.setattr(models.delta, "shown", lambda *_: owner if catalog else None)
    judged: dict[str, models.ModelVerdict] = {}

    def run(text: str, schema: str = "n INT") -> int:
        model = sql_model.parse("number", "{{ config(materialized='view') }} " + text, where="number.sql")
        frame: Any = SimpleNamespace(columns=["n"], schema=SimpleNamespace(json=lambda: schema))
        models._ModelsRun(spark, inputs, audit, False, False, judged, set())._viewed(model, frame)
        return len(made)

    assert [run("SELECT 1 AS n"), run("SELECT 1 AS n")] == [1, 1]
    position["at"] = 2  # the tables have other rows: judged again, and the same view
    assert run("SELECT 1 AS n") == 1 and len(audited) == 2
    assert [run("SELECT 2 AS n"), run("SELECT 2 AS n", "n BIGINT"), run("SELECT 2 AS n", "n BIGINT")] == [2, 3, 3]
    catalog[:] = [("View Text", "of somebody else")]
    assert [run("SELECT 2 AS n", "n BIGINT"), run("SELECT 2 AS n", "n BIGINT")] == [4, 4]
    catalog.clear()
    assert [run("SELECT 2 AS n", "n BIGINT"), run("SELECT 2 AS n", "n BIGINT")] == [5, 5]
    assert "TBLPROPERTIES ('mongo-medallion.pipeline.hand' = 'true')" in made[-1]
    for somebody in ({}, {model_table.view_owner("second"): "true"}):  # made by hand, or by another pipeline: it stays
        owner, catalog[:] = somebody, [("View Text", "of somebody else")]
        with pytest.raises(errors.TableNotOurs, match=r"shop\.number: .* that no model of the pipeline hand made"):
            run("SELECT 2 AS n", "n BIGINT")
    assert len(made) == 5
    catalog[:] = [("View Text", "SELECT 2 AS n", "")]  # as an earlier version made it, which named no pipeline
    owner = {}
    assert run("-- two\nSELECT 2 AS n /* of them */", "n BIGINT") == 6


def test_a_model_whose_tables_have_not_moved_takes_no_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service looks every ten seconds: analysing each model would make Delta list the logs of its tables."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "totals.sql").write_text("SELECT count(*) AS n FROM {{ ref('cases.t') }}")
    monkeypatch.setattr(local_log, "size", lambda _: local_log.TableSize(1, 1))  # as from Delta's checksum
    with without_spark.running():
        hop = without_spark.Hop(tmp_path / "lakehouse")
        hop.append((1, bson.encode({"_id": 1})))
        hop.run()
        chosen = replace(hop.settings, gold=replace(hop.settings.gold, models=str(folder)))
        (model,) = models.files(chosen).models
        table = hop.layout.model("totals")
        without_spark.create(without_spark.SPARK, table, columns="n BIGINT")
        writer = Writer.claim(without_spark.SPARK, table)
        inputs = ModelInputs(without_spark.SPARK, hop.layout, {}, chosen.name)
        writer.mark(to=inputs.positions(model), extra={"model": model.digest, "pipeline": chosen.name})
        writer.release()
        assert [each.did for each in models.run(without_spark.SPARK, chosen).models] == ["nothing"]
        hop.append((2, bson.encode({"_id": 2})))
        hop.run()
        with pytest.raises(errors.MedallionError, match="NeedsSpark"):
            models.run(without_spark.SPARK, chosen)


def test_over_an_older_copy_of_its_table_a_model_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's version numbers are used again: changes that gold makes in both were not among those since the model's version."""
    model = sql_model.parse(
        "each",
        "{{ config(materialized='incremental', unique_key='k') }} SELECT _id AS k FROM {{ ref('cases.t', key='_id') }}",
        where="each.sql",
    )
    monkeypatch.setattr(local_log, "size", lambda _: local_log.TableSize(1, 1))  # as from Delta's checksum
    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        table, each = hop.gold_table, hop.layout.model("each")

        def changed(key: int) -> str:
            """What a run would do to the model after a change of its table."""
            hop.append((key, bson.encode({"_id": key})))
            hop.run()
            inputs = ModelInputs(without_spark.SPARK, hop.layout, {}, "shop")
            work = model_table.ModelTable(without_spark.SPARK, model, inputs, models.no_audit).work()
            if work.kind == "whole":
                made_from.update(work.to)
            return work.kind

        made_from: dict[str, Any] = {}
        assert changed(1) == "whole", "it is not there yet"
        shutil.copytree(table.path or "", tmp_path / "copy")
        hop.append((2, bson.encode({"_id": 2})))
        hop.run()
        without_spark.create(without_spark.SPARK, each, columns="`k` INT")
        assert changed(3) == "whole"
        Writer.claim(without_spark.SPARK, each).mark(to=made_from, extra={"model": model.digest, "pipeline": "shop"})
        assert changed(4) == "changed"
        shutil.rmtree(table.path or "")
        shutil.copytree(tmp_path / "copy", table.path or "")
        known_version = made_from["cases.t"]["version"]
        while (local_log.newest_version(Path(table.path or "")) or 0) <= known_version:
            assert changed(5) == "whole"


def test_of_a_large_table_the_rows_that_changed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads only these rows, not whole files, and no query counts the rows of both versions."""
    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        hop.append(*((number, bson.encode({"_id": number, "v": "a"})) for number in range(100)))
        hop.run()
        before = local_log.newest_version(Path(hop.gold_table.path or "")) or 0
        hop.append((5, bson.encode({"_id": 5, "v": "b"})), (6, None), (100, bson.encode({"_id": 100, "v": "a"})))
        hop.run()
        after = local_log.newest_version(Path(hop.gold_table.path or "")) or 0
        seen = model_changes._seen(without_spark.SPARK, hop.gold_table, before, after)
        found = model_changes._few_rows(seen) or ()
        assert [rows.sort_by("_id").select(["_id", "v"]).to_pylist() for rows in found] == [
            [{"_id": 5, "v": "a"}, {"_id": 6, "v": "a"}],
            [{"_id": 5, "v": "b"}, {"_id": 100, "v": "a"}],
        ]
        monkeypatch.setattr(model_changes, "FEW_ROWS", 1)
        assert model_changes._few_rows(seen) is None
