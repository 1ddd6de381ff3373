"""Schema evolution without a Spark query, in the process that runs the job."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from cdc_core.properties.unwrap import UnwrapOptions, parse
from cdc_core.schema import column_types, document_schema
from cdc_core.schema import evolution as schema_evolution
from cdc_core.schema.pins import parse_pins
from cdc_core.settings.parse import CollectionSettings
from cdc_core.typed import plan
from cdc_core.typed.decoding import Decoder
from pipelines.schema import batch_evolution, decoder_processes, looks
from pipelines.schema.document_typer import DocumentTyper


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def evolution(texts: list[str], current: document_schema.DocumentSchema) -> batch_evolution.Evolution:
    places = pa.array([f"{n:024x}" for n in range(len(texts))])
    return batch_evolution.evolve(looks.LocalDocuments(pa.array(texts), places), current=current)


@pytest.mark.parametrize("second", ['{"_id": 2, "a": [1]}', "{"])
def test_the_first_documents_are_typed_once(monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    """By the schema that they lead to: by none, each would take the exact path. One that cannot be read is found all the same."""
    texts, places = pa.array(['{"_id": 1, "a": "x"}', second]), pa.array(["0", "1"])
    schemas_used: list[document_schema.DocumentSchema] = []
    typed = decoder_processes.typed

    def counted(decoder: Any, texts: Any) -> Any:
        schemas_used.append(decoder.schema)
        return typed(decoder, texts)

    monkeypatch.setattr(decoder_processes, "typed", counted)
    typer = DocumentTyper(CollectionSettings())
    batch = pa.table([texts, places], names=["after", "sequence"])
    result = typer.typed(texts, [batch], current=document_schema.EMPTY, reserved=frozenset())
    assert [[name for name, _ in schema.table()] for schema in schemas_used] == [["_id", "a"]]
    assert (result is None) == (second == "{")
    if result is not None:
        assert result[1].field("document").to_pylist() == [{"_id": 1, "a": "x"}, {"_id": 2, "a": None}]
        assert result[1].field("rescued").to_pylist() == [None, [("a", "[1]")]]


@pytest.mark.usefixtures("often_interrupted")
def test_collections_of_one_schema_are_looked_at_side_by_side() -> None:
    """Collections of tenants with the same schema, in the threads of one service: each sees its own documents only."""
    shared = evolution(['{"_id": 1, "a": "x", "deep": {"known": 1}}'], document_schema.EMPTY).schema

    def names(tenant: int) -> set[str]:
        values = {True: None, False: 1}
        texts = [json.dumps({"_id": n, "a": "x", f"f{tenant}_{n % 40}": values[n % 3 > 0]}) for n in range(300)]
        return set(re.findall(r"f[0-9]+_[0-9]+", evolution(texts, shared).schema.to_json()))

    with ThreadPoolExecutor(4) as pool:
        for _ in range(30):
            plan.decoder_of.cache_clear()  # what the decoder has learned would hide faults of concurrent learning
            for tenant, seen in enumerate(pool.map(names, range(4))):
                assert seen == {f"f{tenant}_{n}" for n in range(40)}


def test_no_schema_begins_with_a_document_that_may_belong_to_quarantine() -> None:
    """It would leave a column behind: all documents are read first, and those that cannot be read are set aside."""
    texts = ['{"_id": 1, "a": 1}', '{"_id": 2, "ghost": NaN}']
    settings: dict[str, Any] = {"options": UnwrapOptions(), "pins": {}}
    places = pa.array(["1", "2"])
    assert batch_evolution.begun(looks.LocalDocuments(pa.array(texts), places), **settings) is None
    begun = batch_evolution.begun(looks.LocalDocuments(pa.array(texts[:1]), places[:1]), **settings)
    assert begun is not None and [column.name for column in begun.schema.columns] == ["_id", "a"]


def test_new_columns_have_the_order_of_the_first_document_that_has_one() -> None:
    """And not the order of an earlier document that merely shares its partition: partitions depend on how the documents are cut."""
    current = evolution(['{"_id": 1, "b": 1}'], document_schema.EMPTY).schema
    texts = ['{"_id": 1, "b": 1, "n": null}', '{"_id": 2, "b": 1, "z": 1, "a": 2}', '{"_id": 3, "b": 1, "y": 1}']
    plan.decoder_of.cache_clear()  # a decoder that knows `n` does not report its document
    assert [column.name for column in evolution(texts, current).schema.columns] == ["_id", "b", "z", "a", "y"]


@pytest.mark.parametrize("around", ["%s", '{"d": %s}', '{"d": [%s]}'])
def test_of_two_names_that_differ_in_case_the_later_one_is_changed(around: str) -> None:
    """Regardless of how documents are cut into batches: otherwise a rebuild would give the column of one field to the other."""
    history = ['{"x": 1}', '{"userid": "u"}', '{"userId": 5, "b": 1, "B": 2}', '{"B": 1, "X": 1}']
    texts = [around % fields for fields in history]
    schema = document_schema.EMPTY
    for text in texts:
        schema = evolution([text], schema).schema
    assert evolution(texts, document_schema.EMPTY).schema == schema
    assert re.findall(r'"name":"(\w+)","column":"(\w+_2)"', schema.to_json()) == [
        ("userId", "userId_2"),
        ("B", "B_2"),
        ("X", "X_2"),
    ]


VALUES = [1, {"$numberLong": "7"}, 2.5, "x", None, {}, [], {"$date": {"$numberLong": "1"}}]
VALUES += [
    [1],
    [1, "x"],
    [2.5, None],
    {"a": 1},
    {"a": "x", "B": [1]},
    {"b": {"c": 2.5}},
    {"b": {"C": 1}, "a": []},
    [{"d": 1}],
]


def drifting(chance: random.Random, count: int) -> list[str | None]:
    """Documents whose fields change now and then, and mostly keep their values."""
    texts: list[str | None] = []
    held: dict[str, Any] = {}
    for number in range(count):
        if number % 40 == 0:
            names = chance.sample("abcdefghijABCDE", 5)
        fields = {}
        for name in chance.sample(names, chance.randrange(6)):
            value = chance.choice(VALUES)
            fields[name] = value if chance.random() < 0.1 else held.setdefault(name, value)
        texts.append(chance.choice([None, '{"ghost": NaN}']) if number % 97 == 13 else json.dumps({"_id": number, **fields}))
    return texts


@pytest.mark.parametrize("seed", range(12))
def test_the_first_of_many_new_documents_tell_what_all_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the documents with something new, only the first are examined, and those that show more than these."""
    chance = random.Random(seed)
    settings: dict[str, Any] = {
        "options": parse(
            {"flatten.struct": chance.choice(["true", "false"]), "array.encoding": chance.choice(["array", "document"])}
        ),
        "pins": parse_pins(chance.choice([{}, {}, {"a": "int"}, {"b": "map"}, {"c": "map<int>"}])),
        "reserved": frozenset(),
    }
    schema, next_new = document_schema.EMPTY, looks.LocalDocuments.next_new
    for count in (200, 300):
        texts = [None] * chance.choice([0, 60]) + drifting(chance, count)
        # As in changes, and as in a chunk of a snapshot, whose events share their place.
        places = [f"{number // chance.choice([1, 50]):024x}" for number in range(len(texts))]
        order = chance.sample(range(len(texts)), len(texts))
        given = pa.array([texts[at] for at in order], pa.string()), pa.array([places[at] for at in order])
        found = []
        # In order, by the schema of those before; in larger and larger samples, as Spark does; and all of them.
        for is_in_order, beginning in (
            (True, 10),
            (True, 1_000_000),
            (False, chance.choice([3, 10, 40])),
            (False, 1_000_000),
        ):
            monkeypatch.setattr(looks, "BEGINNING", beginning)
            monkeypatch.setattr(looks, "FEW", chance.choice([1, 5, 100]))
            monkeypatch.setattr(looks, "_DECODER_BYTES", chance.choice([0, 1, 200]))
            monkeypatch.setattr(looks, "_LARGE_BYTES", chance.choice([0, 2**21]))
            monkeypatch.setattr(looks.LocalDocuments, "next_new", next_new if is_in_order else lambda self, plan: None)
            begun = batch_evolution.start_here(*given, current=schema, **settings)
            first = None if begun is None else begun.beginning
            evolved = batch_evolution.evolve(looks.LocalDocuments(*given), current=schema, beginning=first, **settings)
            found.append((evolved.schema, evolved.changes, evolved.refused, evolved.seen_at))
        assert found[0] == found[1] == found[2] == found[3]
        schema = found[3][0]


def test_a_field_that_is_new_in_all_documents_is_looked_for_in_few(monkeypatch: pytest.MonkeyPatch) -> None:
    current = evolution(['{"_id": 1, "a": 1}'], document_schema.EMPTY).schema
    texts = [json.dumps({"_id": number, "a": 1, "late": {"b": 1}}) for number in range(5 * looks.BEGINNING)]
    looked_into, shape = [], plan.shape
    monkeypatch.setattr(plan, "shape", lambda *given: looked_into.append(len(given[0])) or shape(*given))
    assert "late" in evolution(texts, current).schema.struct.by_name
    assert sum(looked_into) < looks.FEW


def test_few_of_large_first_documents_are_inferred_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand documents of 100 KB take a quarter of a minute otherwise."""
    items = [{"at": {"$date": {"$numberLong": str(n)}}, "n": n, "ok": n % 2 == 0} for n in range(60)]
    texts = [json.dumps({"_id": n, "items": items, **({"late": 1} if n == 700 else {})}) for n in range(looks.BEGINNING)]
    inferred, shape = [], plan.shape
    monkeypatch.setattr(plan, "shape", lambda *given: inferred.extend(given[0]) or shape(*given))
    given = looks.LocalDocuments(pa.array(texts), pa.array([f"{n:024x}" for n in range(len(texts))]))
    begun = batch_evolution.begun(given, options=UnwrapOptions(), pins={}, reserved=frozenset())
    assert begun is not None and [column.name for column in begun.schema.columns] == ["_id", "items", "late"]
    assert len(inferred) < 20


@pytest.mark.parametrize("seed", range(8))
def test_a_schema_begins_alike_with_small_and_large_documents(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(f"begins {seed}")
    settings: dict[str, Any] = {
        "options": parse({"flatten.struct": chance.choice(["true", "false"])}),
        "pins": parse_pins(chance.choice([{}, {"a": "int"}, {"b": "map"}])),
        "reserved": frozenset(),
    }
    readable = [text for text in drifting(chance, 120) if text is None or "NaN" not in text]
    texts, places = pa.array(readable, pa.string()), pa.array([f"{n // 7:024x}" for n in range(len(readable))])
    monkeypatch.setattr(batch_evolution, "FEW_FIELDS", chance.choice([2, 100]))
    begun = []
    for large_bytes in (0, 2**21):
        monkeypatch.setattr(looks, "_LARGE_BYTES", large_bytes)
        found = batch_evolution.begun(looks.LocalDocuments(texts, places), **settings)
        begun.append(found and (found.schema, found.changes, found.seen_at))
    assert begun[0] == begun[1]


def test_a_pinned_map_begins_alike_with_large_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no document does not tell what the map holds: a later document does, although it fits a column of text."""
    monkeypatch.setattr(looks, "_LARGE_BYTES", 0)
    given = looks.LocalDocuments(pa.array(['{"_id":1,"b":"x"}', '{"_id":2,"b":{"k":1}}']), pa.array(["0", "1"]))
    begun = batch_evolution.begun(given, options=UnwrapOptions(), pins=parse_pins({"b": "map"}), reserved=frozenset())
    assert begun is not None and [column.name for column in begun.schema.columns] == ["_id", "b"]


def test_large_documents_that_are_used_as_maps_are_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are inferred from: to decode them by no schema before that would take as long again."""
    monkeypatch.setattr(looks, "_LARGE_BYTES", 0)
    decoded, is_new = [], plan.is_new
    monkeypatch.setattr(plan, "is_new", lambda *given: decoded.extend(given[1]) or is_new(*given))
    texts = [json.dumps({"_id": n, "by": {f"user {key}": 1 for key in range(n, n + 150)}}) for n in range(20)]
    given = looks.LocalDocuments(pa.array(texts), pa.array([f"{n:024x}" for n in range(len(texts))]))
    assert batch_evolution.begun(given, options=UnwrapOptions(), pins={}, reserved=frozenset()) is None
    assert not decoded


def test_fields_that_begin_one_after_the_other_leave_few_documents_to_the_exact_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Years of a collection in one batch: each document from the first with a new field on has it."""
    texts = [json.dumps({"_id": n, **{f"f{at}": n for at in range(n // 1500 + 1)}}) for n in range(9000)]
    places = pa.array([f"{n:024x}" for n in range(len(texts))])
    exact_documents, change = [], Decoder._change
    monkeypatch.setattr(Decoder, "_change", lambda self, given: exact_documents.extend(given) or change(self, given))
    batch = pa.table([pa.array(texts), places], names=["after", "sequence"])
    result = DocumentTyper(CollectionSettings()).typed(
        batch["after"].combine_chunks(), [batch], current=document_schema.EMPTY, reserved=frozenset()
    )
    assert result is not None and result[1].field("document").field("f5").null_count == 7500
    assert len(exact_documents) < 2000  # all documents several times, if they were looked at in larger and larger samples


def test_documents_that_seem_new_for_ever_are_not_looked_at_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that a pin rescues seems new in each document, and changes nothing."""
    texts = [json.dumps({"_id": n, "a": 1.5}) for n in range(3000)]
    places = pa.array([f"{n:024x}" for n in range(len(texts))])
    steps, next_new = [], looks.LocalDocuments.next_new
    monkeypatch.setattr(looks.LocalDocuments, "next_new", lambda self, plan: steps.append(plan) or next_new(self, plan))
    batch_evolution.evolve(looks.LocalDocuments(pa.array(texts), places), pins=parse_pins({"a": "int"}))
    assert len(steps) == 1


def test_a_layout_stays_where_the_first_documents_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "BEGINNING", 3)
    texts = pa.array([None] * 5 + ['{"b": [1]}'])
    given = looks.LocalDocuments(texts, pa.array([f"{n}" for n in range(6)]))
    evolved = batch_evolution.evolve(given, options=parse({"array.encoding": "document"})).schema
    assert [column_types.ddl(type_) for _, type_ in evolved.table()] == ["STRUCT<`_0`: INT>"]


def test_more_columns_than_a_table_can_have_are_given_as_if_all_documents_were_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A nested document that grows late takes the columns before a field that begins earlier, wherever the documents are cut."""
    for owner in (schema_evolution, batch_evolution):
        monkeypatch.setattr(owner, "MAX_COLUMNS", 5)
    monkeypatch.setattr(looks, "BEGINNING", 1)
    monkeypatch.setattr(looks, "_DECODER_BYTES", 0)
    texts = ['{"_id": 1, "deep": {"a": 1}}', '{"b": 1}', '{"c": 1, "d": 1}', '{"deep": {"e": 1, "f": 1, "g": 1}}']
    found = evolution(texts, document_schema.EMPTY).schema
    monkeypatch.setattr(looks.LocalDocuments, "next_new", lambda self, plan: None)
    assert found == evolution(texts, document_schema.EMPTY).schema


def test_so_many_fields_that_they_may_be_data_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like columns in the first documents may be a map by the last."""
    monkeypatch.setattr(looks, "BEGINNING", 10)
    current = evolution(['{"_id": 1}'], document_schema.EMPTY).schema
    texts = [json.dumps({"_id": n, "by": {f"k{n * 20 + at}": 1 for at in range(20)}}) for n in range(60)]
    assert str(evolution(texts, current).changes[0].to_type) == "MAP<STRING, INT>"
