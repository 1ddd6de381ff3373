"""A person's document is removed from all layers, as `docs/operations.md` says, and stays removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.gold import models
from pipelines.operations import quarantine
from tests.harness import bronze_rows, oracle
from tests.harness.layers import Hop, document, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODES = ("tombstone", "drop", "rewrite")


def test_an_erased_document_is_in_no_table_and_the_others_go_on(spark: SparkSession, lakehouse: Path) -> None:
    """After its delete: its events and versions, and its row where the mode keeps one."""
    collections = {mode: {"delete.tombstone.handling.mode": mode, "history": True} for mode in MODES}
    hop = Hop(spark, pipeline(lakehouse, collections), log="one")
    hop.bronze.append({mode: [document(key, 10 + key, "c", name=f"p{key}") for key in (1, 2)] for mode in MODES})
    hop.bronze.append({mode: [{"op": "d", "key": 1, "at": 21, "before": {"_id": 1, "name": "p1"}}] for mode in MODES})
    hop.bronze.append({"other": [document(1, 22, "c")]})
    hop.run()
    spark.sql(f"ALTER TABLE {hop.bronze.table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
    spark.sql(f"DELETE FROM {hop.bronze.table} WHERE db = '{bronze_rows.DB}' AND collection <> 'other' AND key = '1'")
    for mode in MODES:
        kept = {"rewrite": [hop.silver_table(mode)], "drop": [hop.silver_table(mode), hop.gold_table(mode)]}
        for table in [hop.layout.history(bronze_rows.DB, mode), *kept.get(mode, [])]:
            spark.sql(f"DELETE FROM {table} WHERE __key = '1'")
    hop.bronze.append({mode: [document(2, 31, name="p2 later"), document(3, 32, "c", name="p3")] for mode in MODES})
    hop.run()
    for mode in MODES:
        history = hop.layout.history(bronze_rows.DB, mode)
        versions = [(row["_id"], row["name"]) for row in spark.table(str(history)).orderBy("__sequence", "_id").collect()]
        assert versions == [(2, "p2"), (2, "p2 later"), (3, "p3")], mode
        names = {2: "p2 later", 3: "p3"}
        assert {row["_id"]: row["name"] for row in hop.rows(mode)} == names, mode
        assert {row["_id"]: row["name"] for row in hop.documents(mode)} == names, mode
    assert hop.documents("other") == [{"_id": 1, "__key": "1"}]


def test_events_that_left_quarantine_are_in_its_table_until_they_are_erased(spark: SparkSession, lakehouse: Path) -> None:
    """The delete ends the stay of a document's events: only the list of all events still shows them, with their documents."""
    hop = Hop(spark, pipeline(lakehouse))
    broken = '{"_id": 1, "name": "Anna'
    hop.bronze.append({"people": [document(1, 10, "c", name="A"), document(1, 11) | {"text": broken}]})
    hop.bronze.append({"people": [{"op": "d", "key": 1, "at": 21}]})
    hop.run()
    table = hop.layout.quarantine(bronze_rows.DB, "people")

    def found(*, all_states: bool) -> list[str]:
        events = quarantine.listed(spark, table, all_states=all_states, with_texts=True)
        return [text for event in events for text in (event.texts or {}).values()]

    assert found(all_states=False) == []
    assert found(all_states=True) == [broken]
    spark.sql(f"DELETE FROM {table} WHERE key = '1'")
    assert found(all_states=True) == []
    hop.bronze.append({"people": [document(1, 31, "c", name="B")]})
    hop.run()
    assert [row["name"] for row in hop.documents("people")] == ["B"]


def test_models_lose_what_is_erased_from_the_tables_that_they_read(
    spark: SparkSession, lakehouse: Path, tmp_path: Path
) -> None:
    """A DELETE moves no position: a model over a history is made again for it also where no other event comes."""
    query = "SELECT _id, name, valid_from FROM {{ ref('cases.people_history'KEY) }}"
    incremental = "{{ config(materialized='incremental', unique_key=['_id', 'valid_from']) }}\n"
    (tmp_path / "whole.sql").write_text(query.replace("KEY", ""))
    (tmp_path / "by_key.sql").write_text(incremental + query.replace("KEY", ", key=['_id', 'valid_from']"))
    (tmp_path / "above.sql").write_text("SELECT name FROM {{ ref('by_key') }}")
    hop = Hop(spark, pipeline(lakehouse, {"people": {"history": True}}), log="one")
    hop.settings = replace(hop.settings, gold=replace(hop.settings.gold, models=str(tmp_path)))

    def made() -> tuple[set[str], list[list[str]]]:
        """What a run did, and the names in each model."""
        did = {each.did for each in models.run(spark, hop.settings).models}
        rows = (oracle.read(hop.layout.model(name).path or "")["name"].to_pylist() for name in ("whole", "by_key", "above"))
        return did, [sorted(names) for names in rows]

    hop.bronze.append({"people": [document(key, 10 + key, "c", name=f"p{key}") for key in (1, 2)]})
    hop.bronze.append({"people": [{"op": "d", "key": 1, "at": 21}]})
    hop.run()
    assert made() == ({"whole"}, [["p1", "p2"]] * 3)
    spark.sql(f"DELETE FROM {hop.layout.history(bronze_rows.DB, 'people')} WHERE __key = '1'")
    assert made() == ({"whole", "changed"}, [["p2"]] * 3)
    assert made() == ({"nothing"}, [["p2"]] * 3)
