"""The commands schema, quarantine and rebuild as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs import command_line
from jobs.commands import application
from pipelines.delta import table_history
from pipelines.delta.writer import Writer
from tests.harness import bronze_rows
from tests.harness.layers import Hop, document, pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = f"{bronze_rows.DB}.orders"
SETTINGS = """
name: hand
lakehouse: {root: ROOT}
source: {mongodb.connection.string: "${env:NOWHERE}"}
silver: {defaults: {keep.document: true}}
"""


class Person:
    """A user at a terminal, with a settings file over a directly written bronze."""

    def __init__(self, hop: Hop, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.hop = hop
        self._file = file
        self._capsys = capsys

    def says(self, verb: str, *arguments: str, code: int = 0) -> str:
        """What the command prints to stdout, or to stderr if it must end with another code."""
        self._capsys.readouterr()
        assert command_line.main([*verb.split(), "--config", str(self._file), *arguments]) == code
        shown = self._capsys.readouterr()
        return " ".join((shown.out if code == 0 else shown.err).split())

    def reads(self, verb: str, *arguments: str) -> Any:
        """The JSON that the command prints."""
        return json.loads(self.says(verb, *arguments, "--json"))


@pytest.fixture
def settings_file(lakehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(application, "quiet_log", lambda: None)
    file = tmp_path / "hand.yml"
    file.write_text(SETTINGS.replace("ROOT", str(lakehouse)))
    return file


@pytest.fixture
def person(spark: SparkSession, lakehouse: Path, settings_file: Path, capsys: pytest.CaptureFixture[str]) -> Person:
    return Person(Hop(spark, pipeline(lakehouse, **{"keep.document": True})), settings_file, capsys)


@pytest.fixture(scope="module")
def held(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Hop:
    """One unreadable event is held, and another one was superseded by a whole document."""
    hop = Hop(spark, pipeline(tmp_path_factory.mktemp("held"), **{"keep.document": True}))
    hop.bronze.append({"orders": [document(1, 10, "c"), document(1, 20) | {"text": "{"}]})
    hop.bronze.append({"orders": [document(1, 30, v=3), document(2, 31) | {"text": "{"}]})
    hop.silver()
    return hop


@pytest.fixture
def keeper(held: Hop, lakehouse: Path, settings_file: Path, capsys: pytest.CaptureFixture[str]) -> Person:
    """A user of a lakehouse with such events."""
    return Person(held.copied(lakehouse), settings_file, capsys)


def test_schema_shows_columns_and_what_changed_them(person: Person) -> None:
    """Each column with its type; each change with its types, its batch, and the time of the first event of its range."""
    hop = person.hop
    hop.bronze.append({"orders": [document(1, 10, "c", v=1)]})
    hop.silver()
    hop.bronze.append({"orders": [document(2, 20, "c", v=1.5, s="x")]})
    hop.silver()
    [found] = person.reads("schema")["collections"]
    assert (found["collection"], found["version"]) == (ORDERS, 2)
    assert found["columns"] == [
        {"name": "_id", "type": "INT"},
        {"name": "v", "type": "DOUBLE"},
        {"name": "s", "type": "STRING"},
    ]
    told = [(c["path"], c["what"], c["from_type"], c["to_type"], c["batch"], c["at"]) for c in found["changes"]]
    assert told == [
        ("_id", "added", None, "INT", 1, 10),
        ("v", "added", None, "INT", 1, 10),
        ("v", "widened", "INT", "DOUBLE", 2, 20),
        ("s", "added", None, "STRING", 2, 20),
    ]
    shown = person.says("schema", "--collection", ORDERS)
    assert "v DOUBLE" in shown and "1970-01-01 00:00:20 2 widened v INT → DOUBLE" in shown


def test_an_unknown_collection_is_wrong(person: Person) -> None:
    """A collection that silver does not know ends with exit code 2 and suggests the nearest name."""
    person.hop.bronze.append({"orders": [document(1, 10, "c")]})
    person.hop.silver()
    for verb in ("schema", "quarantine list", "quarantine replay"):
        assert f"did you mean {ORDERS}?" in person.says(verb, "--collection", "cases.order", code=2)


@pytest.mark.journey
def test_quarantine_brings_a_corrected_event_back_to_its_place(person: Person, tmp_path: Path) -> None:
    """Unreadable events are listed, corrected and replayed; then silver and gold are as if the events had been readable."""
    hop = person.hop
    hop.bronze.append({"orders": [document(1, 10, "c", v=1, w=1), document(2, 11, "c", v=1)]})
    broken = document(1, 20) | {"text": '{"_id":1,"v":2,'}
    hop.bronze.append({"orders": [broken, {"op": "u", "key": 1, "at": 21, "update": {"w": 2}}]})
    hop.run()
    held = person.reads("quarantine list")["events"]
    assert [(e["collection"], e["key"], e["batch"], e["reason"]) for e in held] == [
        (ORDERS, "1", 2, "after is not a JSON document"),
        (ORDERS, "1", 2, "it follows an event that could not be read"),
    ]
    assert "texts" not in held[0]
    assert '"v":2' not in person.says("quarantine list") + person.says("quarantine list", "--all")
    assert '"v":2' in person.says("quarantine list", "--documents")
    assert "nothing to replay; 2 still in quarantine" in person.says("quarantine replay")

    mended = tmp_path / "mended.json"
    mended.write_text(json.dumps({held[0]["resume_token"]: {"after": '{"_id":1,"v":2,"w":1}'}}))
    arguments = ("quarantine replay", "--collection", ORDERS, "--corrections", str(mended))
    assert "2 replayed, up to bronze batch 3" in person.says(*arguments)
    hop.run()
    assert hop.documents("orders") == [{"_id": 1, "v": 2, "w": 2, "__key": "1"}, {"_id": 2, "v": 1, "__key": "2"}]
    assert not any("__incomplete" in row for row in hop.rows("orders"))
    assert person.reads("quarantine list") == {"events": []}
    assert [e["state"] for e in person.reads("quarantine list", "--all")["events"]] == ["ended", "ended"]


def test_replay_respects_the_claim_of_the_capture(keeper: Person) -> None:
    """While a capture holds bronze, replay ends with exit code 3 and bronze is unchanged; list still works."""
    hop = keeper.hop
    owner = Writer.claim(hop.spark, hop.bronze.table)
    before = table_history.version(hop.spark, hop.bronze.table)
    held = keeper.reads("quarantine list")["events"]
    mended = hop.settings.lakehouse.root + "/mended.json"
    Path(mended).write_text(json.dumps({held[0]["resume_token"]: {"after": '{"_id":2}'}}))
    arguments = ("quarantine replay", "--collection", ORDERS, "--corrections", mended)
    assert "on this host writes it" in keeper.says(*arguments, code=3)
    assert table_history.version(hop.spark, hop.bronze.table) == before
    owner.release()
    assert "1 replayed" in keeper.says(*arguments)


def test_status_counts_what_is_held(keeper: Person) -> None:
    """`quarantined` counts the events that are held now, not the facts about them."""
    from pipelines.operations import status

    hop = keeper.hop
    assert hop.spark.table(str(hop.layout.quarantine(bronze_rows.DB, "orders"))).count() == 3
    reading = status._StatusReader(hop.spark, hop.settings, hop.bronze.table, 0)
    assert [each.quarantined for each in reading.collections()] == [1]


@pytest.mark.journey
def test_rebuild_shows_what_differs_and_swaps(person: Person) -> None:
    """A dry run shows counts, columns and reasons; a rebuild swaps the table. While silver holds the table it ends with exit code 3."""
    hop = person.hop
    hop.bronze.append({"orders": [document(1, 10, "c", v=1), document(2, 11, "c", v="x")]})
    hop.run()
    arguments = ("rebuild", "--collection", ORDERS)
    shown = person.says(*arguments, "--dry-run")
    for told in ("rows 2 2", "rescued values 1 0", "column v retyped: INT → STRING", "not swapped"):
        assert told in shown
    owner = Writer.claim(hop.spark, hop.silver_table("orders"))
    assert "on this host writes it" in person.says(*arguments, code=3)
    owner.release()
    found = person.reads(*arguments)
    assert (found["comparison"]["differing"], found["version"] is None) == (2, False)
    assert "swapped: version" in person.says(*arguments, "--layer", "gold")
    assert [row["v"] for row in hop.documents("orders")] == ["1", "x"]
    assert "did you mean" in person.says("rebuild", "--collection", "cases.order", code=2)
