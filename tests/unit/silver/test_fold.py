"""Partial updates: cases as data, and a model in plain Python that every history must match."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_core.bronze import columns as bronze
from cdc_core.bronze import raw_event
from cdc_core.extended_json import wrappers
from cdc_core.extended_json.raw_bson import RepeatedFields, write_document
from cdc_core.silver import fold
from tests.harness import pace

CASES = Path(__file__).resolve().parents[2] / "cases" / "fold"
UPDATES = pa.list_(pa.struct([("sequence", pa.string()), ("updateDescription", bronze.UPDATE_DESCRIPTION)]))


def cases() -> list[Any]:
    return [
        pytest.param(case, id=f"{path.stem}: {case['what']}")
        for path in sorted(CASES.glob("*.json"))
        for case in json.loads(path.read_text())
    ]


def text(value: object) -> str:
    """Type-exact text, independent of the order of fields."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def struct(description: Mapping[str, Any] | None, sequence: str) -> dict[str, Any]:
    """One element of the `updates` column."""
    if description is None:
        return {"sequence": sequence, "updateDescription": None}
    texts = {name: text(description[name]) for name in ("updatedFields", "disambiguatedPaths") if name in description}
    nothing = {
        "updatedFields": None,
        "removedFields": None,
        "truncatedArrays": None,
        "disambiguatedPaths": None,
    }
    lists = {name: description[name] for name in ("removedFields", "truncatedArrays") if name in description}
    return {"sequence": sequence, "updateDescription": nothing | texts | lists}


def structs(descriptions: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    return [
        struct(description, (description or {}).get("sequence", f"{number:024x}"))
        for number, description in enumerate(descriptions)
    ]


def batch(rows: Sequence[tuple[str | None, list[dict[str, Any]] | None]], string: pa.DataType | None = None) -> Any:
    keys = [str(number) for number in range(len(rows))]
    bases, updates = [base for base, _ in rows], [of for _, of in rows]
    columns = [pa.array(keys), pa.array(bases, string or pa.string()), pa.array(updates, UPDATES)]
    return pa.RecordBatch.from_arrays(columns, names=["__key", "base", "updates"])


def folded(rows: Sequence[tuple[str | None, list[dict[str, Any]] | None]]) -> list[tuple[Any, bool]]:
    batches = list(fold.fold_batch(batch(rows)))
    assert [key for of in batches for key in of.column("__key").to_pylist()] == [str(n) for n in range(len(rows))]
    return [
        (None if row["document"] is None else orjson.loads(row["document"]), row["incomplete"])
        for of in batches
        for row in of.to_pylist()
    ]


@pytest.mark.parametrize("case", cases())
def test_cases(case: dict[str, Any]) -> None:
    """The updates give the case's document with exact types, and the arguments are not changed."""
    updates = [fold.PartialUpdate.from_bronze(each) for each in structs(case["updates"])]
    before = copy.deepcopy((case["base"], updates))
    result = fold.fold(case["base"], updates)
    assert (text(result.document), result.incomplete) == (
        text(case["document"]),
        case.get("incomplete", False),
    )
    assert (case["base"], updates) == before


@pytest.mark.parametrize("case", cases())
def test_cases_in_arrow(case: dict[str, Any]) -> None:
    """The Arrow function gives the same documents as the function on values."""
    base = None if case["base"] is None else text(case["base"])
    [(document, incomplete)] = folded([(base, structs(case["updates"]))])
    assert (text(document), incomplete) == (text(case["document"]), case.get("incomplete", False))


def test_ambiguous_paths_change_nothing() -> None:
    """A path may name a field with a dot, or a field in a document: the document keeps its value, and is incomplete."""
    update = fold.PartialUpdate("1", {"a.b": 1, "c": 2, "d.e": 3}, ["a.b"])
    assert fold.fold({"a.b": 0}, [update]) == ({"a.b": 0, "c": 2}, True)


# What a server reports


class Description:
    """The update description between two documents, computed like the server's diff."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any], *, is_expanded: bool) -> None:
        self.updated: dict[str, Any] = {}
        self.removed: list[str] = []
        self.truncated: list[dict[str, Any]] = []
        self.named: dict[str, list[str | int]] | None = {} if is_expanded else None
        self.paths: list[tuple[str | int, ...]] = []
        self._document(before, after, ())

    def struct(self, sequence: str) -> dict[str, Any]:
        fields = {wrappers.escape_key(path): value for path, value in self.updated.items()}
        named = None if self.named is None else text({wrappers.escape_key(p): v for p, v in self.named.items()})
        description = {
            "updatedFields": text(fields),
            "removedFields": self.removed,
            "truncatedArrays": self.truncated,
            "disambiguatedPaths": named,
        }
        return {"sequence": sequence, "updateDescription": description}

    def is_ambiguous(self) -> bool:
        """Whether two fields have the same path, so that no description can distinguish them."""
        return len(self.paths) != len({".".join(map(str, path)) for path in self.paths})

    def _path(self, parts: tuple[str | int, ...]) -> str:
        path = ".".join(map(str, parts))
        self.paths.append(parts)
        is_unclear = any(isinstance(part, str) and ("." in part or part.isdigit()) for part in parts)
        if self.named is not None and is_unclear:
            self.named[path] = list(parts)
        return path

    def _value(self, before: Any, after: Any, parts: tuple[str | int, ...]) -> None:
        if text(before) == text(after):
            return
        if is_document(before) and is_document(after) and before:
            self._document(before, after, parts)
        elif isinstance(before, list) and isinstance(after, list) and before:
            self._array(before, after, parts)
        else:
            self.updated[self._path(parts)] = after

    def _document(self, before: dict[str, Any], after: dict[str, Any], parts: tuple[str | int, ...]) -> None:
        for name in before.keys() - after.keys():
            self.removed.append(self._path((*parts, wrappers.unescape_key(name))))
        for name, value in after.items():
            inner = (*parts, wrappers.unescape_key(name))
            if name in before:
                self._value(before[name], value, inner)
            else:
                self.updated[self._path(inner)] = value

    def _array(self, before: list[Any], after: list[Any], parts: tuple[str | int, ...]) -> None:
        if len(after) < len(before):
            self.truncated.append({"field": self._path(parts), "size": len(after)})
        for index, value in enumerate(after):
            if index < len(before):
                self._value(before[index], value, (*parts, index))
            else:
                self.updated[self._path((*parts, index))] = value


def is_document(value: object) -> bool:
    return isinstance(value, dict) and not wrappers.is_wrapper(value)


PLAIN_NAMES = st.sampled_from(["a", "b", "0", "1", "01", "", "$x", "$$oid", "$$date"])
DOTTED_NAMES = PLAIN_NAMES | st.sampled_from(["a.b", "b.0", "a.$oid", "0.1", ".", "a.b.0"])
SCALARS = st.sampled_from(
    [
        *(None, True, 5, -1, 5.0, -0.0, 1e22, "", "a.b", "\u20ac\0"),
        *({"$numberLong": "5"}, {"$date": {"$numberLong": "0"}}, {"$oid": "0" * 24}),
        {"$code": "f", "$scope": {"a": 1}},
    ]
)


@functools.cache
def documents(names: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Cached: Hypothesis analyses each new strategy again."""

    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.dictionaries(names, children, max_size=4) | st.lists(children, max_size=4)

    return st.dictionaries(names, st.recursive(SCALARS, containers, max_leaves=10), max_size=5)


@functools.cache
def values(names: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    some = SCALARS | documents(names)
    return some | st.lists(some, max_size=3)


def histories(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """States of one document, each with a few changes to the one before."""

    @st.composite
    def states(draw: st.DrawFn) -> list[dict[str, Any]]:
        history = [draw(documents(names))]
        for _ in range(draw(st.integers(1, 6))):
            state = copy.deepcopy(history[-1])
            for _ in range(draw(st.integers(1, 3))):
                change(draw, state, names)
            history.append(state)
        return history

    return states()


def change(draw: st.DrawFn, state: dict[str, Any], names: st.SearchStrategy[str]) -> None:
    """Makes one change in one of the document's containers."""
    container = draw(st.sampled_from([state, *containers_of(state)]))
    value = draw(values(names))
    if isinstance(container, dict):
        name = draw(st.sampled_from(sorted(container)) | names if container else names)
        container.pop(name, None) if draw(st.booleans()) else container.update({name: value})
    elif draw(st.booleans()) and container:
        del container[draw(st.integers(0, len(container) - 1)) :]
    else:
        index = draw(st.integers(0, len(container)))
        container[index : index + 1] = [value]


def containers_of(value: Any) -> Iterator[Any]:
    items: list[Any] = list(value.values()) if isinstance(value, dict) else value
    for item in items:
        if is_document(item) or isinstance(item, list):
            yield item
            yield from containers_of(item)


def descriptions(history: Sequence[dict[str, Any]], *, is_expanded: bool = False) -> list[Description]:
    return [Description(before, after, is_expanded=is_expanded) for before, after in zip(history, history[1:], strict=False)]


def updates(described: Sequence[Description]) -> list[dict[str, Any]]:
    return [each.struct(f"{number:024x}") for number, each in enumerate(described)]


@given(histories(PLAIN_NAMES), st.data())
def test_the_rest_of_a_history_leads_to_its_end_from_any_later_state(
    history: list[dict[str, Any]], data: st.DataObject
) -> None:
    """The updates from any point on, in any order, on any later state, give the last state."""
    start = data.draw(st.integers(0, len(history) - 1))
    base = data.draw(st.integers(start, len(history) - 1))
    rest = data.draw(st.permutations(updates(descriptions(history))[start:]))
    result = fold.fold(history[base], [fold.PartialUpdate.from_bronze(each) for each in rest])
    assert (text(result.document), result.incomplete) == (text(history[-1]), False)
    assert [(text(document), incomplete) for document, incomplete in folded([(text(history[base]), rest)])] == [
        (text(history[-1]), False)
    ]


@given(histories(PLAIN_NAMES), st.data())
def test_batches_are_cut_anywhere(history: list[dict[str, Any]], data: st.DataObject) -> None:
    """Folding a history in two parts gives the same as folding it at once."""
    of = [fold.PartialUpdate.from_bronze(each) for each in updates(descriptions(history))]
    cut = data.draw(st.integers(0, len(of)))
    first = fold.fold(history[0], of[:cut])
    assert text(fold.fold(first.document, of[cut:]).document) == text(fold.fold(history[0], of).document)


@given(histories(DOTTED_NAMES))
def test_named_paths_are_exact(history: list[dict[str, Any]]) -> None:
    """With disambiguatedPaths, names with dots are exact, and nothing is incomplete."""
    described = descriptions(history, is_expanded=True)
    for before, after, each in zip(history, history[1:], described, strict=False):
        if not each.is_ambiguous():
            result = fold.fold(before, [fold.PartialUpdate.from_bronze(each.struct("1"))])
            assert (text(result.document), result.incomplete) == (text(after), False)


@given(histories(DOTTED_NAMES))
def test_names_with_dots_are_never_guessed(history: list[dict[str, Any]]) -> None:
    """Without disambiguatedPaths a document is correct or incomplete, except for new names whose path leads into another container."""
    for before, after, each in zip(history, history[1:], descriptions(history), strict=False):
        if not each.is_ambiguous() and not any(leads_elsewhere(before, parts) for parts in each.paths):
            result = fold.fold(before, [fold.PartialUpdate.from_bronze(each.struct("1"))])
            assert result.incomplete or text(result.document) == text(after)


def leads_elsewhere(document: Any, parts: tuple[str | int, ...]) -> bool:
    """Whether the path, with every dot as a separator, leads into an existing container."""
    *way, _ = ".".join(map(str, parts)).split(".")
    if all("." not in str(part) for part in parts):
        return False
    here = document
    for step in way:
        if isinstance(here, list):
            here = here[int(step)] if step.isdigit() and int(step) < len(here) else None
        else:
            here = here.get(wrappers.escape_key(step)) if is_document(here) else None
    return is_document(here) or isinstance(here, list)


JSON_LIKE = st.recursive(
    SCALARS | st.text(max_size=3), lambda c: st.lists(c) | st.dictionaries(st.text(max_size=4), c), max_leaves=20
)


@given(
    st.none() | st.dictionaries(st.text(max_size=3), JSON_LIKE) | histories(DOTTED_NAMES).map(lambda h: h[0]),
    st.lists(
        st.builds(
            fold.PartialUpdate,
            st.text("01", max_size=2),
            st.dictionaries(st.text(".ab01$", max_size=6), JSON_LIKE, max_size=3),
            st.lists(st.text(".ab01$", max_size=6), max_size=3),
            st.lists(st.tuples(st.text(".ab01$", max_size=6), st.integers(0, 3)), max_size=2),
            st.none() | st.dictionaries(st.text(".ab01", max_size=4), st.lists(st.text("ab01", max_size=2), min_size=1)),
        ),
        max_size=4,
    ),
)
def test_the_fold_never_raises(base: dict[str, Any] | None, of: list[fold.PartialUpdate]) -> None:
    """Any updates on anything give a document; without a base and updates there is none."""
    result = fold.fold(base, of)
    assert result.document is not None or (base is None and not of)
    assert result.incomplete or base is not None


# Arrow


@pytest.mark.parametrize("broken", ["", "{", "[]", "5", '{"a": tru}', '{"a": 1}}'])
def test_text_that_cannot_be_read_leaves_the_row_incomplete(broken: str) -> None:
    """A stored document, updated fields or disambiguated paths that are no JSON documents stop nothing."""
    good = {
        "updatedFields": '{"b": 2}',
        "removedFields": None,
        "truncatedArrays": None,
        "disambiguatedPaths": None,
    }
    rows: list[tuple[str | None, list[dict[str, Any]] | None]] = [
        (broken, [{"sequence": "1", "updateDescription": good}]),
        ('{"a":1}', [{"sequence": "1", "updateDescription": good | {"updatedFields": broken}}]),
        ('{"a":1}', [{"sequence": "1", "updateDescription": good | {"disambiguatedPaths": broken}}]),
        ('{"a":1}', [{"sequence": "1", "updateDescription": good}]),
    ]
    assert folded(rows) == [({"b": 2}, True), ({"a": 1}, True), ({"a": 1}, True), ({"a": 1, "b": 2}, False)]


@pytest.mark.parametrize("steps", ["5", "null", '"a"', "{}", '["a"]', '["a","c"]', '[["a"],"b"]'])
def test_steps_that_are_none_of_their_path_leave_the_row_incomplete(steps: str) -> None:
    """A replay may bring them, because people write its texts. They must neither stop the collection nor set another field."""
    paths = f'{{"a.b":{steps}}}'
    update = {"updatedFields": '{"a.b":2}', "removedFields": None, "truncatedArrays": None, "disambiguatedPaths": paths}
    assert folded([('{"a":{"b":1}}', [{"sequence": "1", "updateDescription": update}])]) == [({"a": {"b": 1}}, True)]


def test_slices_and_missing_lists() -> None:
    """Slices of a batch, null lists and null descriptions are read at their own rows."""
    one = structs([{"updatedFields": {"a": 1}}])
    rows = [("{}", one), ("{}", None), (None, None), ("{}", []), ("{}", structs([None])), ('{"b":2}', one)]
    whole = batch(rows)
    expected = [
        ({"a": 1}, False),
        ({}, False),
        (None, True),
        ({}, False),
        ({}, True),
        ({"a": 1, "b": 2}, False),
    ]
    for start in range(len(rows)):
        [of] = fold.fold_batch(whole.slice(start, 2))
        assert [
            (None if row["document"] is None else json.loads(row["document"]), row["incomplete"]) for row in of.to_pylist()
        ] == expected[start : start + 2]


def test_large_results_are_cut_into_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of results exceeds the limit by at most one document, and no row is lost or moved."""
    monkeypatch.setattr(fold, "OUTPUT_BYTES", 100)
    rows: list[tuple[str | None, Any]] = [(text({"n": n, "x": "x" * 40}), []) for n in range(10)]
    results = list(fold.fold_batch(batch(rows)))
    assert len(results) > 3
    assert [json.loads(document)["n"] for of in results for document in of.column("document").to_pylist()] == [*range(10)]


def test_wide_strings_stay_wide() -> None:
    """The result has the string type of the input, and empty batches are accepted."""
    [full] = fold.fold_batch(batch([("{}", [])], pa.large_string()))
    [empty] = fold.fold_batch(batch([]))
    assert full.schema.field("document").type == pa.large_string()
    assert (empty.num_rows, empty.schema.names) == (0, ["__key", "document", "incomplete"])


def test_deep_documents() -> None:
    """Documents too deep for the fast JSON writer are also written."""
    deep: Any = {"a": 1}
    for _ in range(300):
        deep = {"a": deep}
    [(document, incomplete)] = folded([(json.dumps(deep), structs([{"updatedFields": {"b": "\u20ac"}}]))])
    assert (document, incomplete) == (deep | {"b": "\u20ac"}, False)


def test_folding_does_not_change_its_arguments() -> None:
    """The result only depends on the arguments: the first fold does not change them."""
    of = [fold.PartialUpdate("1", {"a": {"b": [1]}}), fold.PartialUpdate("2", {"a.b.1": 2})]
    assert fold.fold({}, of) == fold.fold({}, of) == ({"a": {"b": [1, 2]}}, False)


NAMED_TWICE = RepeatedFields((("a.b", ["a.b"]), ("a.b", ["a", "b"])))


@pytest.mark.parametrize("named", [NAMED_TWICE, {"a.b": ["a.b"]}], ids=["both listed", "one listed"])
@pytest.mark.parametrize("updated", [(("a.b", 2), ("a.b", 3)), (("a.b", 2),), ()])
def test_an_update_of_two_paths_of_one_text_leaves_the_document_incomplete(
    updated: tuple[tuple[str, object], ...], named: object
) -> None:
    """One update sets or removes the field `a.b` and the field `b` of `a`. The server reports both under one path, and lists only paths
    that are ambiguous: of a field `a.0` and the first element of the array `a` it lists one."""
    given = {
        "updatedFields": RepeatedFields(updated),
        "removedFields": ["a.b"] * (2 - len(updated)),
        "disambiguatedPaths": named,
    }
    raw = write_document({"updateDescription": given})
    event, is_exact = raw_event.decoded(raw)
    row = raw_event.update_description(event["updateDescription"], raw_event.EventText(raw, is_exact))
    held = {name: value.decode() if isinstance(value, bytes) else value for name, value in row.items()}
    update = fold.PartialUpdate.from_bronze({"sequence": "1", "updateDescription": held})
    assert fold.folded_text('{"a.b":1,"a":{"b":1}}', [update])[1]


@pytest.mark.parametrize(
    ("updated", "named"),
    [('{"a.b":2,"a.b":3}', None), ('{"a":{"b":2,"b":3}}', None), ('{"a": {"b": 2, "b": 3}}', "{}")],
    ids=["two paths of one text", "a value", "not as a writer of ours has it"],
)
def test_an_update_that_says_a_field_twice_leaves_the_document_incomplete(updated: str, named: str | None) -> None:
    """JSON parsers keep the last value: one of the values, or the field it was for, would be lost silently."""
    description = {"updatedFields": updated, "removedFields": None, "truncatedArrays": None, "disambiguatedPaths": named}
    update = fold.PartialUpdate.from_bronze({"sequence": "1", "updateDescription": description})
    assert fold.folded_text('{"a":{"b":1}}', [update]) == ('{"a":{"b":1}}', True)


@pytest.mark.parametrize("base", ['{"a":1,"a":2,"b":1}', '{"a": [{"c": 1, "c": 2}], "b": 1}'])
def test_an_update_of_a_document_that_has_a_field_twice_leaves_it_incomplete(base: str) -> None:
    """The updated document keeps only one of the two fields: as a complete document it would hide the other."""
    description = {"updatedFields": '{"b":2}', "removedFields": None, "truncatedArrays": None, "disambiguatedPaths": None}
    [(document, incomplete)] = folded([(base, [{"sequence": "1", "updateDescription": description}])])
    assert (document["b"], incomplete) == (2, True)


def test_a_path_is_explained_by_what_ends_it() -> None:
    """`a.b` is set in a document without `a`. If a newer update removes `a` or sets it to another value, the newer base lacks `a.b` for
    that reason. A later update that sets `a` to a document explains nothing: the new field may have the name `a.b`."""
    first = fold.PartialUpdate("1", {"a.b": 1})
    for later in ({"a": {"x": 2}}, {"a": [2]}):
        assert fold.fold({}, [first, fold.PartialUpdate("2", later)]) == (later, True)
    for later in (fold.PartialUpdate("2", {"a": 2}), fold.PartialUpdate("2", {}, ["a"])):
        assert not fold.fold({}, [first, later]).incomplete
    deep, above = fold.PartialUpdate("1", {"p.a.b": 1}), {"p": {"a": {"x": 2}}}
    assert fold.fold({"p": {}}, [deep, fold.PartialUpdate("2", above)]) == (above, True)
    assert fold.fold({"p": {}}, [deep, fold.PartialUpdate("2", {"p": {"c": 2}})]) == ({"p": {"c": 2}}, False)


def test_many_updates_that_end_at_one_place_are_looked_at_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a counter whose field is gone in a newer base, a batch may contain a hundred thousand updates: comparing each with all before it
    is too slow."""
    explains, count = fold._explains, itertools.count(1)
    monkeypatch.setattr(fold, "_explains", lambda *given: bool(next(count)) and explains(*given))
    of = [fold.PartialUpdate(f"{number:08}", {f"m.{number}": 1}) for number in range(200)]
    assert fold.fold({"m": 5}, of) == ({"m": 5}, True)
    assert next(count) <= 200
    assert fold.fold({"m": 5}, [*of, fold.PartialUpdate("1", {"m": 5})]) == ({"m": 5}, False)


def test_many_updates_that_end_at_many_places_are_looked_at_by_their_paths() -> None:
    """Each of the paths is compared with the updates that name it or its parents, and not with each update after it."""
    of, reset = [fold.PartialUpdate(f"{number:08}", {f"m.{number}.x": 1}) for number in range(2000)], {"m": {}}
    with pace.within(2):
        assert fold.fold(reset, of) == (reset, True)
        assert fold.fold(reset, [*of, fold.PartialUpdate("1", reset)]) == (reset, False)
        gone = [fold.PartialUpdate(f"1{number}", {}, [f"m.{number}"]) for number in range(2000)]
        assert fold.fold(reset, [*of, *gone]) == (reset, False)
        assert fold.fold(reset, [*of, *gone[1:]]) == (reset, True)
        assert fold.fold(reset, [*gone, *(each._replace(sequence="2") for each in of[:1])]) == (reset, True)


def test_updates_before_a_path_are_not_looked_at_for_it() -> None:
    """A field is replaced again and again, and a base that is newer lacks what is set in it then."""
    resets = [fold.PartialUpdate("0", {"m": {}})] * 20_000
    updates = [fold.PartialUpdate(f"1{number:08}", {f"m.{number}.x": 1}) for number in range(10_000)]
    with pace.within(2.5):
        assert fold.fold({"m": {}}, [*resets, *updates, fold.PartialUpdate("2", {"m": 1})]) == ({"m": 1}, False)


def test_an_update_of_a_new_field_in_many_documents_looks_through_their_names_once() -> None:
    seen_names = []

    class Fields(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            for name in super().__iter__():
                seen_names.append(name)
                yield name

    numbers = range(100)
    update = fold.PartialUpdate("1", {f"m.{number}.new": 1 for number in numbers})
    document, is_incomplete = fold._fold_in_place({"m": Fields({str(number): {} for number in numbers})}, [update])
    assert (document, is_incomplete) == ({"m": {str(number): {"new": 1} for number in numbers}}, False)
    assert 0 < len(seen_names) < 1000


def test_an_update_of_every_element_of_a_long_array_is_folded_in_linear_time() -> None:
    """As of `$set: {"a.$[].x": …}`, from a server without disambiguatedPaths: its paths are not gone through once for each of them."""
    numbers = range(20_000)
    update = fold.PartialUpdate("1", {f"a.{number}.x": 1 for number in numbers})
    with pace.within(2):
        document, is_incomplete = fold._fold_in_place({"a": [{"x": 0} for _ in numbers]}, [update])
    assert (document, is_incomplete) == ({"a": [{"x": 1} for _ in numbers]}, False)


def test_many_updates_are_explained_by_one_that_removes_many_fields() -> None:
    """Its fields are gone through a few times, and not once for each path."""
    passes = []

    class Names(tuple[str, ...]):
        def __iter__(self) -> Iterator[str]:
            passes.append(1)
            return super().__iter__()

    numbers = range(100)
    set_ = fold.PartialUpdate("1", {f"m.{number}.x": 1 for number in numbers})
    removed = fold.PartialUpdate("2", {}, Names(f"m.{number}" for number in numbers))
    assert fold.fold({"m": {}}, [set_, removed]) == ({"m": {}}, False)
    assert 0 < len(passes) < 20


def test_a_name_of_ten_thousand_dots_is_no_path() -> None:
    """Without disambiguatedPaths, any two components of the path could be one name."""
    name = "." * 10_000
    for update in (fold.PartialUpdate("1", {name: 1}), fold.PartialUpdate("1", {}, [name])):
        assert fold.fold({"a": 1}, [update]) == ({"a": 1}, True)
    # MongoDB's deepest document is still read by its path.
    deep: dict[str, Any] = {"n": 0}
    for _ in range(179):
        deep = {"n": deep}
    document, incomplete = fold.fold(deep, [fold.PartialUpdate("1", {".".join("n" * 180): 1})])
    assert not incomplete and text(document).count('"n":1') == 1


def test_large_updates_leave_nothing_behind() -> None:
    """The names of fields, which differ between updates, must not stay in memory."""
    updates = [fold.PartialUpdate("1", {f"{number}_{field}": 1 for field in range(1000)}) for number in range(20)]
    tracemalloc.start()
    for update in updates:
        fold.fold({}, [update])
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 500_000
