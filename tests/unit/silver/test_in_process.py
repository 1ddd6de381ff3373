"""Thousands of batches without a query: silver and gold must match MongoDB.

`tests/spark/silver/test_in_process.py` compares some of them with Spark.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from bson import Binary, Code, DatetimeMS, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp

from cdc_core import errors
from cdc_core.extended_json import bson_to_json
from cdc_core.schema import evolution
from cdc_core.silver import quarantine
from pipelines import helper_processes
from pipelines.bronze import collection_events, quarantine_table, survey
from pipelines.delta import (
    data_file,
    direct_log,
    live_files,
    local_log,
    log_actions,
    maintenance,
    table_definition,
    table_files,
)
from pipelines.gold import in_process as gold_small_batch
from pipelines.schema import document_typer, looks
from pipelines.schema.document_typer import DocumentTyper
from pipelines.silver import in_process, in_process_fold, ranges
from pipelines.silver.collection import SilverCollection
from tests.harness import layers, oracle, without_spark
from tests.harness.without_spark import Hop, Log, NeedsSpark

PREFIX = "p" * 31


def drawn_key(draws: random.Random) -> Any:
    """Any `_id`: one number in several types, and strings that differ only after the part that statistics keep."""
    number = draws.randrange(40)
    return draws.choice(
        [
            *(
                number,
                -number,
                Int64(number),
                float(number),
                Decimal128(str(number)),
                str(number),
                ObjectId(f"{number:024x}"),
            ),
            PREFIX + draws.choice("ab\U0010ffffé\x00") + draws.choice(["", "\U0010ffff", "x" * number]),
            *({"a": number % 3, "b": draws.choice([1, 1.0, "x"])}, {"b": 1, "a": number % 3}, Timestamp(number % 3, 1)),
            Binary(bytes([number % 4]), draws.choice([0, 4, 128])),
            DatetimeMS(draws.choice([0, -62135596800001, 253402300800000, 1700000000123, 2**62])),
            draws.choice([None, True, False, math.nan, math.inf, -0.0, 0, 0.5, Decimal128("NaN"), Decimal128("1E+3"), 1000]),
            draws.choice([2**53 + 1, float(2**53), MinKey(), MaxKey()]),
        ]
    )


TEXTS = ["", "x", "é\U0001f600", "a\x00b", "z" * 32 + "\U0010ffff", "y" * 200, '"\\', '{"$oid":1}']
DATES = [0, 1, -1, -62135596800001, -62135596800000, 253402300800000, 253402300799999, 1700000000123, 2**55, -(2**55)]
VALUES: dict[str, Any] = {
    "int": lambda draws: draws.randrange(-(2**31), 2**31),
    "long": lambda draws: Int64(draws.randrange(-(2**63), 2**63)),
    "double": lambda draws: draws.choice([0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 5e-324, 1e300]),
    "text": lambda draws: draws.choice(TEXTS),
    "bool": lambda draws: draws.random() < 0.5,
    "id": lambda draws: ObjectId(draws.randbytes(12)),
    "date": lambda draws: DatetimeMS(draws.choice(DATES)),
    "bytes": lambda draws: Binary(draws.randbytes(draws.randrange(4)), draws.choice([0, 4, 128])),
    "decimal": lambda draws: Decimal128(draws.choice(["1.50", "NaN", "1E+10", "-0", "12345678901234567890.123"])),
    "regex": lambda draws: Regex("^a", "i"),
    "end": lambda draws: draws.choice([MinKey(), MaxKey()]),
    "timestamp": lambda draws: Timestamp(draws.randrange(2**32), 1),
    "code": lambda draws: Code("f()", {"a": 1}),
    "null": lambda draws: None,
}
NAMES = ["a", "A", "b", "a.b", "c d", "`q`", "é", "$x", "", "__key", "__batch", "x,y", "__key.z", "col`1", "Ü", "ü", "İ"]
ALONE = ("int", "long", "double", "decimal", "document", "array", "documents", "end", "timestamp", "code")
BESIDE = ("text", "date", "id", "bool", "bytes", "regex")
"""A field may have several of these kinds: none widens to another, which would need Spark."""


class Documents:
    """Documents of one collection: each field has its own kinds of values, mostly one."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._below = [self._fields(NAMES[:10], 4) for _ in range(3)]
        self._top = self._fields(NAMES, 10)

    def _fields(self, names: list[str], most: int) -> dict[str, list[str]]:
        draws = self._draws
        return {name: self._kinds() for name in draws.sample(names, draws.randrange(1, most))}

    def _kinds(self) -> list[str]:
        draws = self._draws
        mixed = (*BESIDE, "document", "array", "null")
        return [draws.choice((*ALONE, *BESIDE))] * 6 + [kind for kind in mixed if draws.random() < 0.15]

    def document(self, key: Any) -> bytes:
        fields = {name: self._value(kinds, 0) for name, kinds in self._top.items() if self._draws.random() < 0.6}
        return bson.encode({"_id": key, **fields})

    def _value(self, kinds: list[str], depth: int) -> Any:
        draws, kind = self._draws, self._draws.choice(kinds)
        if kind == "document":
            below = draws.choice(self._below).items() if depth < 4 else ()
            return {name: self._value(inner, depth + 1) for name, inner in below if draws.random() < 0.7}
        if kind == "array":
            inner = draws.choice([["int"], ["int", "null"], kinds if depth < 3 else ["text"]])
            return [self._value(inner, depth + 1) for _ in range(draws.randrange(4))]
        if kind == "documents":
            return [self._value(["document" if depth < 3 else "text"], depth + 1) for _ in range(draws.randrange(3))]
        return VALUES[kind](draws)


ENGINE = ("__sequence", "__batch", "__incomplete", "__known", "__document")


def differences(hop: Hop, truth: dict[str, bytes]) -> list[str]:
    """How silver and gold differ from MongoDB."""
    documents = [oracle.read_bson(document) for document in truth.values()]
    found = []
    for table in (hop.silver_table, hop.gold_table):
        if Path(table.path or "", "_delta_log").exists():
            found += oracle.differences(documents, oracle.read(table.path or ""), added=ENGINE)
        elif documents and table is hop.gold_table:
            found.append("there is no table")
    return found


@pytest.mark.parametrize("seed", range(8))
def test_any_changes_in_any_batches(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys and values of any type, deletes, changing fields, and compactions of files in between; gold with and without deletion
    vectors."""
    draws, vectors = random.Random(seed), None if seed % 2 else False
    monkeypatch.setattr(live_files, "PART_ROWS", draws.choice([1, 2, 7, 1 << 16]))
    monkeypatch.setattr(maintenance, "MANY_FILES", draws.choice([1, 2, 3, 1000]))
    monkeypatch.setattr(maintenance, "FEW_ROWS", draws.choice([3, 20, 10_000]))
    monkeypatch.setattr(maintenance, "_surplus_files", lambda writer: len(_live(writer.table).files()))
    monkeypatch.setattr(maintenance, "_optimize", lambda writer: None)
    documents, truth = Documents(draws), {}
    with without_spark.running():
        hop = Hop(tmp_path, vectors=vectors, **draws.choice([{}, {"keep.document": True}]))
        for _ in range(draws.choice([3, 6])):
            batch = []
            for _ in range(draws.choice([1, 3, 10, 60])):
                key = drawn_key(draws)
                document = None if draws.random() < 0.2 else documents.document(key)
                batch.append((key, document))
                truth[without_spark.keys.canonical(key)] = document
            hop.append(*batch)
            hop.silver()
            if draws.random() < 0.7:
                hop.gold()
                assert differences(hop, {key: held for key, held in truth.items() if held is not None}) == []
        assert vectors is None or not any("deletionVector" in each for each in _live(hop.gold_table).files())


def test_large_files_without_deletion_vectors_are_for_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To replace a row, its file would have to be rewritten; deletion vectors spare that."""
    with without_spark.running():
        hops = {vectors: Hop(tmp_path / str(vectors), vectors=vectors) for vectors in (True, False)}
        for hop in hops.values():
            hop.append((1, bson.encode({"_id": 1, "a": 1})), (2, bson.encode({"_id": 2})))
            hop.run()
            hop.append((1, bson.encode({"_id": 1, "a": 2})))
            hop.silver()
        monkeypatch.setattr(live_files, "MANY_REWRITTEN_BYTES", 1)
        hops[True].gold()
        before = _live(hops[False].gold_table)
        with pytest.raises(NeedsSpark):
            hops[False].gold()
        assert _live(hops[False].gold_table).holds(before.files())


def test_without_deletion_vectors_a_file_that_changed_meanwhile_is_for_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program committed after the file was read: its rows may be those of the keys."""
    with without_spark.running():
        hop = Hop(tmp_path, vectors=False)
        hop.append((1, bson.encode({"_id": 1, "a": 1})), (2, bson.encode({"_id": 2})))
        hop.run()
        hop.append((1, bson.encode({"_id": 1, "a": 2})))
        hop.silver()
        folder, rest = Path(hop.gold_table.path or ""), live_files.rest

        def changed(live: live_files.LiveFiles, places: Any) -> Iterator[pa.Table]:
            yield from rest(live, places)
            without_spark.write(folder, live.version + 1, [])

        monkeypatch.setattr(live_files, "rest", changed)
        files = _live(hop.gold_table).files()
        with pytest.raises(NeedsSpark):
            hop.gold()
        assert _live(hop.gold_table).holds(files)
        assert {each.name for each in folder.glob("*.parquet")} == {each["path"] for each in files}


class Updates:
    """Documents with partial updates: the document after each update, and the server's description of it."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._is_named = draws.random() < 0.5
        self._kinds = {name: draws.choice(("long", "text", "date", "double", "decimal")) for name in "abcxyz"}

    def document(self) -> dict[str, Any]:
        draws = self._draws
        fields = {name: self._value(name) for name in "abc" if draws.random() < 0.8}
        below = {"x": self._value("x"), "deep": {"y": self._value("y"), "0": self._value("z")}}
        lines = [{"x": self._value("x"), "more": [self._value("y")]} for _ in range(draws.randrange(4))]
        dotted = {"dot.ted": self._value("z")} if self._is_named else {}
        return {**fields, "below": below, "list": self._values(), "lines": lines, **dotted}

    def _value(self, name: str) -> Any:
        return VALUES[self._kinds[name]](self._draws)

    def _values(self) -> list[Any]:
        return [self._value("x") for _ in range(self._draws.randrange(5))]

    def update(self, document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A document after a random update, and the update's description."""
        draws, after = self._draws, copy.deepcopy(document)
        places: dict[str, tuple[Any, ...]] = {}
        fields: dict[str, Any] = {}
        removed: list[str] = []
        cuts: list[dict[str, Any]] = []
        lines, values = after.get("lines", []), after.get("list", [])
        changes: list[tuple[tuple[Any, ...], Any]] = [((name,), self._value(name)) for name in "abc"]
        if "below" in after:
            changes += [(("below", "x"), self._value("x")), (("below", "new"), {"y": self._value("y")})]
            if "deep" in after["below"]:
                changes += [(("below", "deep", "y"), self._value("y")), (("below", "deep", "0"), self._value("z"))]
        changes += [(("lines", number, "x"), self._value("x")) for number in range(len(lines))]
        changes += [(("lines", number, "more", 1), self._value("y")) for number in range(len(lines))]
        changes += [(("dot.ted",), self._value("z"))] if self._is_named else []
        if values and draws.random() < 0.3:
            size = draws.randrange(len(values))
            del values[size:]
            cuts.append({"field": "list", "size": size})
        changes += [(("list", draws.randrange(len(values) + 3)), self._value("x"))] if "list" in after else []
        for path, value in draws.sample(changes, draws.randrange(1, 4)):
            if draws.random() < 0.3 and not any(isinstance(part, int) for part in path) and reached(after, path[:-1]):
                removed.append(".".join(path))
                reached(after, path[:-1]).pop(path[-1], None)
            else:
                fields[".".join(map(str, path))] = value
                put(reached(after, path[:-1]), path[-1], value)
            places[".".join(map(str, path))] = path
        if draws.random() < 0.1:
            name = draws.choice(["below", "list", "lines"])
            whole = self.document()[name]
            for changed in [path for path in places if path.split(".")[0] == name]:
                fields.pop(changed, None)
                removed = [path for path in removed if path != changed]
                del places[changed]
            cuts = [cut for cut in cuts if cut["field"] != name]
            fields[name] = after[name] = whole
        # MongoDB 6.1 also reports paths that are ambiguous.
        named = {path: list(place) for path, place in places.items() if "." in path}
        said = {
            "updatedFields": bson_to_json.dumps(bson.encode(fields)).decode(),
            "removedFields": removed,
            "truncatedArrays": cuts,
            "disambiguatedPaths": json.dumps(named) if self._is_named else None,
        }
        return after, said


def reached(value: Any, path: tuple[Any, ...]) -> Any:
    return reached(value[path[0]], path[1:]) if path else value


def put(container: Any, step: Any, value: Any) -> None:
    if isinstance(container, list):
        container.extend([None] * (step + 1 - len(container)))
    container[step] = value


@pytest.mark.parametrize("seed", range(8))
def test_any_partial_updates_in_any_batches(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several updates of a document in one batch and in several, before and after whole documents and deletes. Documents that are not known
    stay incomplete, and gold does not show them."""
    draws = random.Random(seed)
    monkeypatch.setattr(in_process_fold, "PART_ROWS", draws.choice([1, 3, 4096]))
    monkeypatch.setattr(helper_processes, "MANY_BYTES", draws.choice([0, 2**30]))
    monkeypatch.setattr(live_files, "_READ_ROWS", draws.choice([1, 2, 4096]))
    monkeypatch.setattr(maintenance, "MANY_FILES", draws.choice([2, 1000]))
    monkeypatch.setattr(maintenance, "_surplus_files", lambda writer: len(_live(writer.table).files()))
    monkeypatch.setattr(maintenance, "_optimize", lambda writer: None)
    drawn = Updates(draws)
    truth: dict[int, dict[str, Any]] = {}
    unknown: set[int] = set()
    batch: list[tuple[object, Any]] = []

    def write(key: int) -> None:
        truth[key] = {"_id": key, **drawn.document()}
        unknown.discard(key)
        batch.append((key, bson.encode(truth[key])))

    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})
        for key in range(12):
            write(key)
        for _ in range(draws.choice([3, 6])):
            hop.append(*batch)
            hop.run()
            gold, silver = (oracle.read(table.path or "") for table in (hop.gold_table, hop.silver_table))
            documents = [oracle.read_bson(bson.encode(document)) for document in truth.values()]
            is_complete = pc.invert(silver["__incomplete"])
            assert oracle.differences(documents, gold, added=ENGINE) == []
            assert oracle.differences(documents, silver.filter(is_complete), added=ENGINE) == []
            found = {
                key: known for key, known, complete in zip(*columns(silver, "__key", "__known"), is_complete.to_pylist())
            }
            assert found == {str(key): None for key in truth} | {str(key): "" for key in unknown}
            batch.clear()
            for _ in range(draws.choice([1, 3, 40])):
                key = draws.randrange(15)
                if draws.random() < 0.1:
                    write(key)
                elif draws.random() < 0.1:
                    truth.pop(key, None)
                    unknown.discard(key)
                    batch.append((key, None))
                elif key in truth:
                    truth[key], said = drawn.update(truth[key])
                    batch.append((key, said))
                else:
                    unknown.add(key)
                    batch.append((key, drawn.update(drawn.document())[1]))


@pytest.mark.parametrize(
    ("owner", "bound", "value"),
    [(in_process_fold, "READ_BYTES", -(2**20)), (collection_events, "MANY_BYTES", 3000), (live_files, "MANY_ROWS", 1)],
    ids=["large files", "large documents", "many rows"],
)
def test_updates_that_are_for_spark_are_known_before_documents_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, bound: str, value: int
) -> None:
    """Also before anything is written."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})
        hop.append(*((key, document(key, n=0, text="x" * 5000)) for key in range(4)))
        hop.silver()
        hop.append((1, {"updatedFields": '{"n":1}'}))
        before = sorted(Path(hop.silver_table.path or "").iterdir())
        typed: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(DocumentTyper, "typed", lambda *given, **named: typed.append(given))
            patch.setattr(owner, bound, value)
            with pytest.raises(NeedsSpark):
                hop.silver()
        assert not typed and sorted(Path(hop.silver_table.path or "").iterdir()) == before
        hop.silver()
        assert oracle.read(hop.silver_table.path or "").sort_by("__key")["n"].to_pylist() == [0, 1, 0, 0]


@pytest.mark.parametrize("is_first", [True, False], ids=["before a document", "beside others"])
def test_an_update_that_cannot_be_read_is_quarantined_wherever_it_stands(tmp_path: Path, is_first: bool) -> None:
    """There somebody can find it, even if a later document replaces what it changed."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})
        hop.append(*((key, document(key, n=0)) for key in range(3)))
        hop.silver()
        follows = (1, document(1, n=2)) if is_first else (2, {"updatedFields": '{"n":3}'})
        hop.append((1, {"updatedFields": '{"n":1'}), follows)
        hop.silver()
        facts = hop.facts()
        assert facts == [("t4", quarantine.Reason.UNREADABLE_UPDATE), *([("t4", quarantine.Reason.SUPERSEDED)] * is_first)]
        rows = oracle.read(hop.silver_table.path or "").sort_by("__key")
        assert columns(rows, "n", "__incomplete") == (
            [[0, 2, 0], [False] * 3] if is_first else [[0, 0, 3], [False, True, False]]
        )


def columns(table: pa.Table, *names: str) -> list[list[Any]]:
    return [table[name].to_pylist() for name in names]


def _live(table: Any) -> live_files.LiveFiles:
    live = live_files.LiveFiles(Path(table.path))
    assert live.move_to(local_log.newest_version(live.folder) or 0)
    return live


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    with without_spark.running():
        found = Hop(tmp_path)
        found.append(*((key, document(key, n=0)) for key in range(4)))
        found.append((0, document(0)), collection="other")
        found.run()
        yield found


def document(key: Any, **fields: Any) -> bytes:
    return bson.encode({"_id": key, **fields})


@pytest.mark.parametrize(
    ("is_at_once", "versions"),
    [(False, 1), (True, 2)],
)
def test_a_first_range_gives_the_schema_that_the_steps_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_at_once: bool, versions: int
) -> None:
    """The first range is inferred as a whole: a field with many names is a map, even if the first documents have few of them. Where the
    steps would type documents before the whole look, the first documents make their own version."""
    monkeypatch.setattr(looks, "BEGINNING", 2)
    monkeypatch.setattr(evolution, "MAX_FIELDS", 4)
    monkeypatch.setattr(survey, "MAX_DRIVER_ROWS", 2 if is_at_once else 1000)
    with without_spark.running():
        hop = Hop(tmp_path)
        shown = [{"b": 1}, {"b": 1, "z": 1, "m": {"k1": 1}}, *({"b": 1, "m": {f"k{n}": 1}, "a": 1} for n in range(2, 7))]
        hop.append(*((key, document(key, **fields)) for key, fields in enumerate(shown)))
        hop.silver()
        silver = oracle.read(hop.silver_table.path or "")
        assert [name for name in silver.column_names if not name.startswith("__")] == ["_id", "b", "z", "m", "a"]
        assert pa.types.is_map(silver["m"].type) is not is_at_once
        assert pc.count_distinct(oracle.read(hop.layout.ops("schemas").path or "")["version"]).as_py() == versions


@pytest.mark.parametrize(("bound", "is_here"), [(2 * 2**20, False), (8 * 2**20, True)])
def test_documents_count_as_large_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int, is_here: bool
) -> None:
    """Spark may have rewritten the file with a dictionary, which stores equal strings once: its size is no measure."""
    monkeypatch.setattr(collection_events, "MANY_BYTES", bound)
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append(*[(1, document(1, text="x" * 10_000))] * 300)
        (path,) = Path(hop.bronze.path or "").glob("*.parquet")
        pq.write_table(pq.read_table(path), path, use_dictionary=True)
        assert path.stat().st_size < 100_000
        with contextlib.nullcontext() if is_here else pytest.raises(NeedsSpark):
            hop.silver()


@pytest.mark.parametrize("is_new", [True, False], ids=["columns that they add", "columns of the table"])
def test_short_documents_count_with_all_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    """A document of a hundred bytes makes a row of 20 KB in a table of 5,000 columns."""
    documents = [(number, document(number, **{f"f{number}": 1})) for number in range(300)]
    with without_spark.running():
        hop = Hop(tmp_path)
        if not is_new:
            hop.append(*documents)
            hop.silver()
        monkeypatch.setattr(document_typer, "MANY_BYTES", 300_000)
        hop.append(*documents)
        with pytest.raises(NeedsSpark):
            hop.silver()


def alter(table: Any, **properties: str) -> None:
    """Sets properties, as somebody may."""
    folder = Path(table.path)
    held = table_definition.newest_action(folder, "metaData")
    assert held is not None
    changed = {**held, "configuration": {**held["configuration"], **properties}}
    without_spark.write(folder, (local_log.newest_version(folder) or 0) + 1, [{"metaData": changed}], "SET TBLPROPERTIES")


@pytest.mark.parametrize(
    "properties",
    [
        {"delta.constraints.small": "n < 100"},
        {"delta.enableChangeDataFeed": "true"},
        {"delta.enableRowTracking": "true"},
        {"delta.columnMapping.mode": "name"},
    ],
    ids=lambda properties: next(iter(properties)),
)
@pytest.mark.parametrize("layer", ["silver", "gold"])
def test_tables_with_unsupported_properties_are_for_spark(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, layer: str, properties: dict[str, str]
) -> None:
    """This is known before documents are typed; otherwise they would be typed twice."""
    typed: list[Any] = []
    if layer == "gold":
        hop.append((1, document(1, n=5)))
        hop.silver()
    monkeypatch.setattr(DocumentTyper, "typed", lambda *given, **named: typed.append(given))
    alter(hop.silver_table if layer == "silver" else hop.gold_table, **properties)
    hop.append((2, document(2, n=5)))
    with pytest.raises(NeedsSpark):
        getattr(hop, layer)()
    assert not typed


def test_an_event_in_quarantine_waits_until_a_document_supersedes_it(hop: Hop) -> None:
    """By the facts up to the range's first batch: those of a larger range, which was killed before its commit, do not count."""
    hop.append((1, document(1, n=1)), (2, document(2, n=1)))
    hop.run()
    hop.note_fact(1, quarantine.Reason.NO_SEQUENCE, to=1)
    hop.append((2, document(2, n=2)))
    hop.run()
    assert sorted(oracle.read(hop.gold_table.path or "")["n"].to_pylist())[-2:] == [1, 2]
    hop.note_fact(1, quarantine.Reason.SUPERSEDED, to=10)
    hop.append((2, document(2, n=3)), (1, document(1, n=3)))
    hop.run()
    assert sorted(oracle.read(hop.gold_table.path or "")["n"].to_pylist())[-2:] == [3, 3]


def test_many_events_in_quarantine_hold_back_their_own_documents_alone(hop: Hop) -> None:
    """Updates wait with the one that they follow: a document that changes every second adds tens of thousands in a morning. Events that
    were read are not read again with each new one."""
    hop.append((1, document(1, n=1)), (2, document(2, n=1)))
    hop.run()
    hop.note_fact(1, quarantine.Reason.FOLLOWS, to=1, events=30_000)
    hop.append((2, document(2, n=2)))
    hop.run()
    assert sorted(oracle.read(hop.gold_table.path or "")["n"].to_pylist())[-2:] == [1, 2]
    table = hop.layout.quarantine("cases", "t")
    held = quarantine_table.HeldEvents.of(without_spark.SPARK, table)
    assert held is not None and held.count() == 30_000
    for file in Path(table.path or "").glob("*.parquet"):
        file.unlink()
    hop.note_fact(2, quarantine.Reason.NO_DOCUMENT, to=2)
    assert (held.keys(), held.keys(before=1), held.count()) == ({"1", "2"}, {"1", "2"}, 30_001)


def test_an_update_waits_behind_an_event_of_its_document_in_quarantine(tmp_path: Path) -> None:
    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})
        hop.append((1, document(1, n=0)), (2, document(2, n=0)))
        hop.silver()
        for key, text in ((1, "{"), (2, '{"n":2}'), (1, '{"n":1}')):
            hop.append((key, {"updatedFields": text}))
            hop.silver()
        assert hop.facts() == [("t3", quarantine.Reason.UNREADABLE_UPDATE), ("t5", quarantine.Reason.FOLLOWS)]
        rows = oracle.read(hop.silver_table.path or "").sort_by("__key")
        assert columns(rows, "n", "__incomplete") == [[0, 2], [True, False]]
        hop.append((1, document(1, n=5)))
        hop.silver()
        assert [reason for _, reason in hop.facts()].count(quarantine.Reason.SUPERSEDED) == 2
        assert columns(oracle.read(hop.silver_table.path or "").sort_by("__key"), "n") == [[5, 2]]


@pytest.mark.parametrize(
    "text",
    [" ", "[]", '{"n":', '{"n":tru}', '{"n":1,}', "{'n':1}", '{"n":1}}', '{"n":1} {"n":2}', '{"n":"\t"}', r'{"n":"\'"}'],
)
def test_a_document_that_cannot_be_read_needs_no_query(hop: Hop, text: str) -> None:
    """A known document stays as it was, marked incomplete; of an unknown one nothing is known. Neither adds a column."""
    bronze = Log(hop)
    bad = [{"op": "u", "key": 1, "text": text}, {"op": "c", "key": 9, "text": text}, {"op": "c", "key": 8}]
    good = [{"op": "c", "key": 7, "after": {"_id": 7, "n": 7}}, {"op": "d", "key": 2}]
    hop._batch, bronze.batch, bronze.offset = hop._batch, hop._batch, hop._offset
    bronze.append({"t": [{**event, "at": 100 + at} for at, event in enumerate(bad + good)]})
    hop.silver()
    rows = oracle.read(hop.silver_table.path or "").sort_by("__key")
    assert columns(rows, "_id", "n", "__incomplete") == [
        [0, 1, 3, 7, None, None],
        [0, 0, 0, 7, None, None],
        [False, True, False, False, True, True],
    ]
    Reason = quarantine.Reason
    assert [reason for _, reason in hop.facts()] == [Reason.UNREADABLE_AFTER, Reason.UNREADABLE_AFTER, Reason.NO_DOCUMENT]


def test_keys_of_a_large_table_are_known_to_be_sparks_before_documents_are_typed(
    hop: Hop, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[Any] = []
    monkeypatch.setattr(DocumentTyper, "typed", lambda *given, **named: typed.append(given))
    monkeypatch.setattr(live_files, "MANY_ROWS", 3)
    hop.append((1, document(1, n=5)))
    with pytest.raises(NeedsSpark):
        hop.silver()
    assert not typed


def test_a_long_span_over_a_large_table_is_not_cut_for_this_process(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each range Spark would search the whole table for keys; for all ranges together it searches once."""
    monkeypatch.setattr(collection_events, "PORTION_EVENTS", 2)
    monkeypatch.setattr(in_process, "MANY_EVENTS", 2)
    spans: list[Any] = []
    monkeypatch.setattr(ranges, "_range", lambda collection, range_, counts, at, to: spans.append(range_) or (at, True))
    for number in range(3):
        hop.append((1, document(1, n=number)), (2, document(2, n=number)))
    hop.silver()
    assert len(spans) == 3
    monkeypatch.setattr(live_files, "MANY_ROWS", 3)
    hop.silver()
    assert len(spans) == 4


def test_a_long_span_whose_first_range_is_sparks_is_sparks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark applies the first range; all the rest, which this process would cut into several, is then one range with one position."""
    monkeypatch.setattr(collection_events, "PORTION_EVENTS", 2)
    monkeypatch.setattr(in_process, "MANY_EVENTS", 2)
    spans: list[tuple[int, int]] = []
    applied = ranges._range

    def noted(collection: Any, range_: Any, *given: Any, **named: Any) -> Any:
        spans.append((range_.after, range_.to))
        return applied(collection, range_, *given, **named)

    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})
        hop.append(*((key, document(key, n=0)) for key in range(4)))
        hop.silver()
        for n in range(6):
            hop.append((0, {"updatedFields": f'{{"n":{n}}}'}))
        monkeypatch.setattr(ranges, "_range", noted)
        monkeypatch.setattr(in_process, "applied", lambda collection, range_, *_, **__: range_.after > 1)
        # Replaces Spark's work on the first range.
        monkeypatch.setattr(SilverCollection, "events", lambda *_: None)
        monkeypatch.setattr(ranges, "_wanted", lambda *_: None)
        monkeypatch.setattr(ranges, "_confs", lambda *_: ({}, {}))
        monkeypatch.setattr(ranges, "_finding_keys", lambda *_, **__: contextlib.nullcontext())
        monkeypatch.setattr(ranges, "_written_at_once", lambda *_: True)
        hop.silver()
    assert spans == [(1, 3), (3, 7)]


def test_a_long_span_of_updates_is_cut_by_the_documents_that_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most as many updated documents are in memory at a time as whole documents would be."""
    text = random.Random(0).randbytes(5000).hex()
    with without_spark.running():
        hop = Hop(tmp_path, **{"keep.document": True})
        hop.append(*((key, document(key, n=0, text=text[key:])) for key in range(4)))
        hop.silver()
        for n in range(3):
            hop.append(*((key, {"updatedFields": f'{{"n":{n}}}'}) for key in (1, 2)))
        monkeypatch.setattr(in_process, "MANY_EVENTS", 2)
        monkeypatch.setattr(collection_events, "PORTION_BYTES", 20_000)
        before = local_log.newest_version(Path(hop.silver_table.path or ""))
        hop.silver()
        batches = oracle.read(hop.silver_table.path or "", version=(before or 0) + 2)["__batch"].to_pylist()
        assert sorted(batches) == [1, 1, 2, 2]
        assert oracle.read(hop.silver_table.path or "").sort_by("__key")["n"].to_pylist() == [0, 2, 2, 0]


def rewrite(table: Any, *, without: object = None) -> None:
    """Rewrites the rows into one file, as OPTIMIZE does, or DELETE with an `_id`, and removes the old files."""
    live = live_files.LiveFiles(Path(table.path))
    log, found = direct_log.of(without_spark.SPARK, table), live.move_to_newest()
    assert log is not None and found
    parts, statistics = live.files(), live_files.measured_columns(live)
    rows = live.rows(parts)
    rows = rows if without is None else rows.filter(pc.not_equal(rows["_id"], without))
    file = data_file.ParquetFile.write(log.store, [rows], schema=rows.schema, statistics=statistics, table=table)
    gone = [
        {"remove": {"dataChange": False, **{name: part[name] for name in ("path", "deletionVector") if name in part}}}
        for part in parts
    ]
    version = (local_log.newest_version(live.folder) or 0) + 1
    is_change = without is not None
    parameters = {"predicate": f'["(_id = {without})"]'} if is_change else {}
    actions, operation = [*gone, log_actions.added(file, is_change=is_change)], "DELETE" if is_change else "OPTIMIZE"
    without_spark.write(live.folder, version, actions, operation, operationParameters=parameters)


def test_a_compaction_of_bronze_hinders_nothing(hop: Hop) -> None:
    """It puts applied and pending events into one file. Later batches must still need no query."""
    hop.append((1, document(1, n=5)))
    rewrite(hop.bronze)
    hop.run()
    assert oracle.read(hop.gold_table.path or "").sort_by("__key")["n"].to_pylist() == [0, 5, 0, 0]


def test_files_that_others_changed_are_not_put_together(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that somebody deletes during the compaction do not come back."""
    monkeypatch.setattr(maintenance, "MANY_FILES", 2)
    monkeypatch.setattr(maintenance, "_surplus_files", lambda writer: len(_live(writer.table).files()))
    monkeypatch.setattr(maintenance, "_optimize", lambda writer: None)
    rows, calls = live_files.LiveFiles.rows, []

    def late(self: live_files.LiveFiles, *given: Any) -> Any:
        found = rows(self, *given)
        if "gold" in self.folder.parts and not calls:
            calls.append(len(found))
            rewrite(hop.gold_table, without=0)
        return found

    monkeypatch.setattr(live_files.LiveFiles, "rows", late)
    for n in range(4):
        hop.append((1, document(1, n=n)))
        hop.run()
    assert calls and sorted(oracle.read(hop.gold_table.path or "")["_id"].to_pylist()) == [1, 2, 3]


@pytest.mark.parametrize("layer", ["silver", "gold"])
def test_a_commit_in_between_is_seen(hop: Hop, monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    """After a compaction between the search for keys and the commit, the keys are searched again in the new files."""
    places, calls = live_files.LiveFiles.places, []
    table = hop.silver_table if layer == "silver" else hop.gold_table

    def late(self: live_files.LiveFiles, *given: Any) -> Any:
        found = places(self, *given)
        if layer in self.folder.parts:
            if not calls:
                rewrite(table)
            calls.append([len(rows) for _, rows in found])
        return found

    for n, keys in enumerate([range(4), (0, 3)]):  # two files, one of them with deleted rows
        hop.append(*((key, document(key, n=n)) for key in keys))
        hop.run()
    monkeypatch.setattr(live_files.LiveFiles, "places", late)
    hop.append((1, document(1, n=2)), (2, None))
    hop.run()
    assert calls == [[2], [2]]
    rows = oracle.read(hop.gold_table.path or "").sort_by("__key")
    assert [*zip(rows["_id"].to_pylist(), rows["n"].to_pylist())] == [(0, 1), (1, 2), (3, 1)]


@pytest.mark.parametrize(("events", "is_done"), [(5, True), (6, False)])
def test_the_bound_counts_a_collections_own_events(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, events: int, is_done: bool
) -> None:
    """Other collections' events in the same batches do not count."""
    monkeypatch.setattr(collection_events, "LOCAL_EVENTS", 5)
    hop.append(*((key, document(key)) for key in range(2)), collection="other")
    hop.append(*((key % 3, document(key % 3, n=key)) for key in range(events)))
    hop.append(*((key, document(key)) for key in range(2)), collection="other")
    if is_done:
        hop.run()
        assert sorted(oracle.read(hop.gold_table.path or "")["n"].to_pylist()) == [0, 2, 3, 4]
    else:
        with pytest.raises(NeedsSpark):
            hop.silver()


def test_updates_whose_documents_are_gone_need_no_query(hop: Hop) -> None:
    """A capture that was behind looks up documents that are deleted by then, which gives many updates without a document, and deletes."""
    lost = {"updatedFields": '{"n":2}'}
    hop.append((1, document(1, n=1)), (1, lost), (0, lost), (2, lost), (2, None), (0, document(0, n=3)))
    hop.run()
    rows = oracle.read(hop.silver_table.path or "").select(["__key", "n", "__incomplete", "__known"]).to_pylist()
    found = {row.pop("__key"): row for row in rows}
    assert "2" not in found
    assert (found["0"]["n"], found["0"]["__incomplete"], found["0"]["__known"]) == (3, False, None)
    assert (found["1"]["n"], found["1"]["__incomplete"]) == (1, True) and found["1"]["__known"]
    before = {row["__key"]: row for row in oracle.read(hop.silver_table.path or "").to_pylist()}
    hop.append((3, lost), (1, {"updatedFields": "{}"}), (0, document(0, n=5)))
    hop.run()
    after = {row["__key"]: row for row in oracle.read(hop.silver_table.path or "").to_pylist()}
    assert after.keys() == before.keys()
    assert (after["1"]["__known"], after["3"]["__known"]) == (before["1"]["__known"], before["3"]["__sequence"])
    assert [after[key]["__incomplete"] for key in ("0", "1", "3")] == [False, True, True]
    told = {name: before["3"][name] for name in ("__known", "__incomplete", "__batch", "__sequence")}
    assert after["3"] | told == before["3"]
    assert before["0"]["__sequence"] < after["3"]["__sequence"] < after["1"]["__sequence"] < after["0"]["__sequence"]
    hop.append((99, lost))  # nothing is known of it
    hop.silver()
    [unknown] = [row for row in oracle.read(hop.silver_table.path or "").to_pylist() if row["__key"] == "99"]
    assert (unknown["_id"], unknown["n"], unknown["__incomplete"], unknown["__known"]) == (None, None, True, "")


def test_deletes_that_leave_their_rows_need_no_query(tmp_path: Path) -> None:
    """Debezium's mode `rewrite` keeps the last known document, marked as deleted."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"delete.tombstone.handling.mode": "rewrite"})
        hop.append((1, document(1, n=1)), (2, document(2, n=1)), (3, document(3, n=1)))
        hop.run()
        before = {row["__key"]: row for row in oracle.read(hop.silver_table.path or "").to_pylist()}
        hop.append((1, None), (2, document(2, n=2)), (2, None), (3, document(3, n=2)))
        hop.run()
        after = {row["__key"]: row for row in oracle.read(hop.silver_table.path or "").to_pylist()}
        told = ("n", "__deleted", "__incomplete")
        assert {key: tuple(row[name] for name in told) for key, row in after.items()} == {
            "1": (1, True, False),
            "2": (2, True, False),
            "3": (2, False, False),
        }
        assert after["1"]["__known"] == before["1"]["__sequence"] < after["1"]["__sequence"] < after["2"]["__known"]
        assert oracle.read(hop.gold_table.path or "")["n"].to_pylist() == [2]


def test_a_delete_of_an_unknown_document_leaves_its_key_without_a_query(tmp_path: Path) -> None:
    """As after a snapshot of a part of the documents, or of none: the others are deleted sooner or later."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"delete.tombstone.handling.mode": "rewrite"})
        hop.append((1, document(1, n=1)))
        hop.run()
        hop.append((99, None), (1, None), (98, document(98, n=1)))
        hop.run()
        hop.append((99, document(99, n=2)), (97, None))
        hop.run()
        rows = {row["__key"]: row for row in oracle.read(hop.silver_table.path or "").to_pylist()}
        told = ("_id", "n", "__deleted", "__incomplete", "__known")
        assert {key: tuple(rows[key][name] for name in told) for key in ("97", "98", "99")} == {
            "97": (97, None, True, False, ""),
            "98": (98, 1, False, False, None),
            "99": (99, 2, False, False, None),
        }
        assert rows["1"]["__deleted"] and len(rows) == 4
        assert sorted(oracle.read(hop.gold_table.path or "")["__key"].to_pylist()) == ["98", "99"]


def test_deletes_that_leave_their_rows_need_no_query_where_updates_are_folded(tmp_path: Path) -> None:
    """Of a document that is deleted in the batch of its updates, the last whole state is shown; one that comes back is whole again."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"delete.tombstone.handling.mode": "rewrite", "keep.document": True})
        hop.append(*((key, document(key, n=0, m=0)) for key in range(5)))
        hop.run()
        update = {"updatedFields": '{"n":1}'}
        hop.append(
            (0, update),
            (1, update),
            (1, None),
            (2, document(2, n=2)),
            (2, update),
            (2, None),
            (3, None),
            (3, document(3, n=3)),
        )
        hop.append((3, update), (4, None), (4, update))
        hop.run()
        rows = {row["__key"]: row for row in oracle.read(hop.silver_table.path or "").to_pylist()}
        told = ("n", "m", "__deleted", "__incomplete")
        assert {key: tuple(row[name] for name in told) for key, row in rows.items()} == {
            "0": (1, 0, False, False),
            "1": (0, 0, True, False),
            "2": (2, None, True, False),
            "3": (1, None, False, False),
            "4": (1, None, False, True),
        }
        assert [json.loads(rows[key]["__document"]) for key in "12"] == [{"_id": 1, "n": 0, "m": 0}, {"_id": 2, "n": 2}]
        assert sorted(oracle.read(hop.gold_table.path or "")["__key"].to_pylist()) == ["0", "3"]


def test_an_update_after_a_delete_that_left_its_row_is_of_another_document(tmp_path: Path) -> None:
    """Its insert was lost, or is a skipped operation: the row is no deleted document any more, and nothing is known of the new one. The
    delete of another document among the same events changes nothing of that."""
    with without_spark.running():
        hop = Hop(tmp_path, **{"delete.tombstone.handling.mode": "rewrite"})
        hop.append(*((key, document(key, n=1)) for key in (1, 2, 3, 4)))
        hop.run()
        hop.append((1, None), (2, None))
        hop.run()
        hop.append((1, {"updatedFields": '{"n":2}'}), (3, {"updatedFields": '{"n":2}'}), (4, None))
        hop.run()
        rows = {row["__key"]: row for row in oracle.read(hop.silver_table.path or "").to_pylist()}
        told = ("n", "__deleted", "__incomplete")
        assert {key: tuple(row[name] for name in told) for key, row in rows.items()} == {
            "1": (1, False, True),
            "2": (1, True, False),
            "3": (1, False, True),
            "4": (1, True, False),
        }
        assert (rows["1"]["__known"], rows["3"]["__known"] < rows["3"]["__sequence"]) == ("", True)
        assert oracle.read(hop.gold_table.path or "")["__key"].to_pylist() == ["3"]


@pytest.mark.parametrize("mode", ["rewrite", "rewrite-with-tombstone"])
def test_a_row_that_is_only_marked_gets_the_column_of_a_new_delete_mode(hop: Hop, mode: str) -> None:
    """As by a MERGE, which adds the column first: false for an update, and true for a delete that leaves its row."""
    hop.settings = layers.pipeline(Path(hop.layout.root or ""), **{"delete.tombstone.handling.mode": mode})
    leaves_row = mode == "rewrite"
    hop.append((1, {"updatedFields": '{"n":2}'}), (2, None if leaves_row else document(2, n=2)))
    hop.run()
    silver = oracle.read(hop.silver_table.path or "")
    marks = dict(zip(silver["__key"].to_pylist(), silver["__deleted"].to_pylist()))
    assert marks == {"0": None, "1": False, "2": leaves_row, "3": None}


def test_a_batch_of_deletes_alone_adds_no_file(hop: Hop) -> None:
    hop.append(*((key, None) for key in (0, 1, 2, 17)))
    hop.run()
    for table in (hop.silver_table, hop.gold_table):
        assert [file["deletionVector"]["cardinality"] for file in _live(table).files()] == [3]
    hop.append((3, None))
    hop.run()
    assert [_live(table).files() for table in (hop.silver_table, hop.gold_table)] == [[], []]


def test_rows_that_are_no_documents_any_more_add_no_file(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """If silver keeps deleted documents, gold finds changed rows but none to write."""
    monkeypatch.setattr(gold_small_batch, "_is_gone", lambda rows: gold_small_batch.pc.is_valid(rows["__key"]))
    before = len(_live(hop.gold_table).files())
    hop.append((1, document(1, n=1)))
    hop.run()
    assert len(_live(hop.gold_table).files()) == before


@pytest.mark.parametrize("layer", ["silver", "gold"])
def test_where_a_deletion_vector_finds_no_room_no_data_file_is_left(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    """A service retries every second: each attempt would leave a data file on the full disk."""

    def full(files: table_files.LocalFiles, name: str, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    hop.append((1, document(1, n=5)))
    if layer == "gold":
        hop.silver()
    table = hop.silver_table if layer == "silver" else hop.gold_table
    before = sorted(Path(table.path or "").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(table_files.LocalFiles, "write", full)
        with pytest.raises((NeedsSpark, errors.StorageExhausted)):
            getattr(hop, layer)()
    assert sorted(Path(table.path or "").iterdir()) == before
    hop.run()
    assert differences(hop, {str(key): document(key, n=5 if key == 1 else 0) for key in range(4)}) == []
