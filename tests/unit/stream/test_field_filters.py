"""Fields are excluded from events or renamed, in documents and in update descriptions."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_core.bronze import raw_event
from cdc_core.properties import types as values
from cdc_core.silver import fold
from cdc_core.stream import fields as field_filters
from cdc_core.stream.fields import FieldRules, Rename, UpdateDescription
from tests.harness import histories, pace

CASES = json.loads((Path(__file__).resolve().parents[2] / "cases" / "filters" / "fields.json").read_text(encoding="utf-8"))


def update_of(text: dict[str, Any]) -> UpdateDescription:
    return UpdateDescription(
        updated=text.get("updated", {}),
        removed=tuple(text.get("removed", ())),
        truncated=tuple((each["field"], each["size"]) for each in text.get("truncated", ())),
        disambiguated=text.get("disambiguated"),
    )


def fields_of(case: dict[str, Any]) -> FieldRules:
    filter_ = field_filters.read(case.get("exclude", ()), case.get("rename", ()))
    return filter_.of(*case.get("in", "shop.orders").split(".", 1)) or FieldRules()


@pytest.mark.parametrize("case", [pytest.param(case, id=case["about"]) for case in CASES])
def test_cases(case: dict[str, Any]) -> None:
    """Each case has its document or update as a result, in its order, and the originals are unchanged."""
    original = copy.deepcopy(case)
    fields = fields_of(case)
    if "document" in case:
        found, taken = field_filters.document(case["document"], fields=fields)
        assert json.dumps(found) == json.dumps(case["gives"])
        assert list(taken) == case.get("taken", [])
    if "update" in case:
        changed, _ = field_filters.update(update_of(case["update"]), fields=fields)
        assert changed == update_of(case["gives_update"])
        assert list(changed.updated) == list(case["gives_update"].get("updated", {}))
    assert case == original


@pytest.mark.parametrize("entry", ["", "shop", "shop.orders", "shop.orders.", "shop..x", ".orders.x"])
def test_entries_that_are_none(entry: str) -> None:
    """An entry without a field, or with an empty step, is refused."""
    with pytest.raises(values.InvalidValue):
        field_filters.read([entry], [])
    with pytest.raises(values.InvalidValue):
        field_filters.read([], [f"{entry}:name"])


@pytest.mark.parametrize("entry", ["shop.orders.x", "shop.orders.x:", "shop.orders.x:a.b"])
def test_renames_without_a_name(entry: str) -> None:
    with pytest.raises(values.InvalidValue):
        field_filters.read([], [entry])


def test_collections_without_entries() -> None:
    """A collection without entries has no rules, so that its events can stay bytes."""
    assert field_filters.read(["shop.orders.x"], []).of("shop", "items") is None


NAMES = st.sampled_from(["a", "b", "c", "0"])
LEAVES = st.none() | st.integers(0, 3)
NODES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(NAMES, NODES, max_size=4)
PATHS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map(tuple)


def _holds(node: Any, path: tuple[str, ...]) -> bool:
    if isinstance(node, list):
        return any(_holds(element, path) for element in node)
    if not isinstance(node, dict) or path[0] not in node:
        return False
    return len(path) == 1 or _holds(node[path[0]], path[1:])


@given(DOCUMENTS, st.lists(PATHS, max_size=3).map(tuple))
def test_what_is_excluded_is_gone(document: dict[str, Any], paths: tuple[tuple[str, ...], ...]) -> None:
    """After an exclusion none of its paths exists, and a repetition changes nothing."""
    fields = FieldRules(excluded=paths)
    found, _ = field_filters.document(document, fields=fields)
    assert not any(_holds(found, path) for path in paths)
    assert field_filters.document(found, fields=fields)[0] == found


@given(DOCUMENTS, PATHS)
def test_a_rename_to_a_new_name_can_be_undone(document: dict[str, Any], path: tuple[str, ...]) -> None:
    """Renaming to an unused name and back gives the same document."""
    there, taken = field_filters.document(document, fields=FieldRules(renamed=(Rename(path, "new"),)))
    assert taken == ()
    assert not _holds(there, path)
    back, _ = field_filters.document(there, fields=FieldRules(renamed=(Rename((*path[:-1], "new"), path[-1]),)))
    assert back == document


@given(DOCUMENTS, st.lists(PATHS, min_size=1, max_size=3).map(tuple))
def test_updates_agree_with_documents(document: dict[str, Any], paths: tuple[tuple[str, ...], ...]) -> None:
    """A field that an update sets is filtered as in a document."""
    fields = FieldRules(excluded=paths)
    whole, _ = field_filters.document(document, fields=fields)
    changed, _ = field_filters.update(UpdateDescription(updated=document), fields=fields)
    assert changed.updated == whole


def _drawn(draws: random.Random, depth: int) -> Any:
    """A value of at most `depth` levels."""
    kind = draws.choice(["document", "array", "scalar"]) if depth else "scalar"
    if kind == "document":
        return {name: _drawn(draws, depth - 1) for name in draws.sample("abc0", draws.randrange(1, 4))}
    if kind == "array":
        return [_drawn(draws, depth - 1) for _ in range(draws.randrange(1, 4))]
    return draws.choice([None, 0, "x"])


def _changed(draws: random.Random, node: Any) -> Any:
    """The value with something at any depth set, added or removed."""
    if not isinstance(node, dict | list) or not node or draws.random() < 0.2:
        return _drawn(draws, 2)
    changed = copy.copy(node)
    places: list[Any] = [*changed] if isinstance(changed, dict) else [*range(len(changed))]
    place = draws.choice(places)
    if draws.random() < 0.3:
        del changed[place]
    else:
        changed[place] = _changed(draws, changed[place])
    return changed


def test_a_filtered_update_leads_from_one_filtered_document_to_the_next() -> None:
    """Silver folds filtered updates onto filtered documents, wherever in documents and arrays a path leads."""
    draws, compared = random.Random(1), 0
    for _ in range(1000):
        before = {name: _drawn(draws, 3) for name in "abc"}
        after = before | {name: _changed(draws, before[name]) for name in draws.sample("abc", 2)}
        path, other = (tuple(draws.choices("abc0*", k=draws.randrange(1, 4))) for _ in range(2))
        fields = FieldRules((path,), (Rename(other, "new"),))
        server = histories.described(before, after)
        truncated = tuple((each["field"], each["size"]) for each in server["truncated"])
        update = UpdateDescription(
            json.loads(server["update"]), tuple(server["removed"]), truncated, server["disambiguated"]
        )
        start, taken_before = field_filters.document(before, fields=fields)
        end, taken_after = field_filters.document(after, fields=fields)
        found, taken = field_filters.update(update, fields=fields)
        if taken_before or taken_after or taken:
            continue  # only whole documents show that a name is taken
        change = fold.PartialUpdate("1", found.updated, found.removed, found.truncated, found.disambiguated)
        assert fold.fold(start, [change]) == fold.FoldResult(end, incomplete=False), (before, after, fields)
        compared += 1
    assert compared > 500


def test_a_rename_onto_a_taken_name_is_told() -> None:
    """The document is unchanged, and the name is returned, for the log."""
    fields = field_filters.read((), ("shop.orders.name:title",)).of("shop", "orders")
    assert fields is not None
    taken: set[str] = set()
    assert raw_event.filtered(b'{"name":1,"title":2}', fields=fields, name_conflicts=taken) == b'{"name":1,"title":2}'
    assert taken == {"title"}


@pytest.mark.parametrize(
    ("exclude", "rename", "gives"),
    [
        ("z", "y:w", '{"b":[{"n":1,"n":{"m":2.0,"m":"ü"}}],"b":3,"c":0}'),
        ("b", "c:d", '{"d":0}'),
        ("b.n.m", "c:b", '{"b":[{"n":1,"n":{}}],"b":3,"c":0}'),
        ("b.n", "b:d", '{"b":[{}],"b":3,"c":0}'),
    ],
)
def test_a_name_that_comes_twice_is_kept_twice_or_not_at_all(exclude: str, rename: str, gives: str) -> None:
    """As without the setting: silver puts the earlier value into `__rescued`."""
    fields = field_filters.read((f"shop.orders.{exclude}",), (f"shop.orders.{rename}",)).of("shop", "orders")
    assert fields is not None
    text = '{"b":[{"n":1,"n":{"m":2.0,"m":"ü"}}],"b":3,"c":0}'.encode()
    assert raw_event.filtered(text, fields=fields, name_conflicts=set()).decode() == gives
    row = {"updatedFields": text, "removedFields": None, "truncatedArrays": None, "disambiguatedPaths": None}
    assert raw_event.filtered_update(row, fields=fields, name_conflicts=set())["updatedFields"].decode() == gives


@pytest.mark.parametrize("said", [None, {}])
def test_a_name_of_thousands_of_numbers_is_gone_through_once(said: dict[str, list[str | int]] | None) -> None:
    """Each number may be a place in an array or a name. Trying all combinations would exceed Python's recursion limit and take for ever."""
    key = ".".join(["1"] * 3000)
    before = UpdateDescription({f"items.{key}": {"x": 1, "y": 2, "z": 3}, key: 1}, disambiguated=said)
    fields = FieldRules((("items", "x"), ("*",) * 6), (Rename(("items", "y"), "new"), Rename(("*", "*", "v"), "w")))
    found, taken = field_filters.update(before, fields=fields)
    # Without disambiguatedPaths, everything that the rule may mean is left out.
    assert found.updated == ({} if said is None else {f"items.{key}": {"z": 3, "new": 2}, key: 1}) and not taken


def test_of_several_fields_of_an_update_none_gets_the_new_name() -> None:
    """As in a document: otherwise all but the last would be lost."""
    fields = FieldRules(renamed=(Rename(("a", "*"), "new"),))
    before = UpdateDescription({"a.x": 1, "a.y": 2}, removed=("b",))
    assert field_filters.update(before, fields=fields) == (before, ("a.new", "a.new"))
    assert field_filters.update(UpdateDescription({"a.x": 1}), fields=fields)[0].updated == {"a.new": 1}


def test_a_field_that_keeps_its_name_keeps_its_steps() -> None:
    """The server says how the path is divided. With the steps of the taken name, the value would go to the other field."""
    fields = FieldRules(renamed=(Rename(("items", "b"), "z"),))
    steps = {"items.0.b": ["items", 0, "b"], "items.0.z": ["items", 0, "z"]}
    before = UpdateDescription({"items.0.b": 1, "items.0.z": 2}, disambiguated=steps)
    assert field_filters.update(before, fields=fields) == (before, ("items.0.z",))


def test_steps_that_no_server_says_are_none() -> None:
    """A stage of `cursor.pipeline` may write any value there: the paths are then divided as without one."""
    fields = FieldRules(excluded=(("a", "x"),), renamed=(Rename(("a", "y"), "z"),))
    for steps in (5, "x", None, {"x": 1}):
        before = UpdateDescription({"a.x": 1, "a.y": 2}, disambiguated={"a.x": steps, "a.y": steps})  # type: ignore[dict-item]
        assert field_filters.update(before, fields=fields)[0].updated == {"a.z": 2}


def test_the_text_of_an_update_has_its_names_escaped() -> None:
    """A field that is named like a wrapper is escaped in bronze, under its old name and under a new one."""
    fields = field_filters.read(("shop.orders.$ref",), ("shop.orders.$date:$oid",)).of("shop", "orders")
    assert fields is not None
    texts = {"updatedFields": b'{"$$ref":1,"$$date":2}', "disambiguatedPaths": b'{"$$date":["$date"]}'}
    row = {**texts, "removedFields": ["$ref", "n"], "truncatedArrays": None}
    found = raw_event.filtered_update(row, fields=fields, name_conflicts=set())
    assert (found["updatedFields"], found["disambiguatedPaths"]) == (b'{"$$oid":2}', b'{"$$oid":["$oid"]}')
    assert found["removedFields"] == ["n"]


def test_a_name_of_thousands_of_digits_is_no_place_in_an_array() -> None:
    """Python cannot convert it to a number, and the capture must not stop at such an event."""
    name = "1" * 5000
    before = UpdateDescription({f"items.{name}": 1, f"items.{name}.x": 1, "items.1.x": 1}, disambiguated={})
    assert field_filters.update(before, fields=FieldRules(excluded=(("items", "x"),)))[0].updated == {
        f"items.{name}": 1,
        f"items.{name}.x": 1,
    }


def test_many_entries_are_not_looked_for_one_by_one() -> None:
    """The cost of a field does not grow with the lists, whose entries mostly name other fields."""
    compared: list[object] = []

    class Step(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str.__eq__(self, other)

    excluded = tuple((Step(f"secret{number}"), "x") for number in range(200))
    renamed = tuple(Rename((Step(f"old{number}"),), "new") for number in range(200))
    before = {f"field{number}": number for number in range(200)}
    found, _ = field_filters.document(
        {**before, "secret1": {"x": 1, "y": 2}, "old1": 5}, fields=FieldRules(excluded, renamed)
    )
    assert found == {**before, "secret1": {"y": 2}, "new": 5}
    assert len(compared) < 2000


def test_many_exclusions_below_an_array_cost_no_more_per_element() -> None:
    with pace.within(2):
        rules = FieldRules(excluded=tuple(("items", f"secret{number}") for number in range(1000)))
        items = [{"secret1": 1, "name": number} for number in range(10_000)]
        found, _ = field_filters.document({"items": items}, fields=rules)
        assert found == {"items": [{"name": number} for number in range(10_000)]}


def test_many_entries_cost_no_more_per_key_of_an_update() -> None:
    with pace.within(3):
        rules = FieldRules(
            excluded=tuple((f"secret{number}",) for number in range(1000)),
            renamed=tuple(Rename((f"old{number}",), "new") for number in range(1000)),
        )
        plain = {f"field{number}": number for number in range(50_000)}
        found, conflicts = field_filters.update(UpdateDescription({**plain, "secret7": 1, "old7": 2}), fields=rules)
        assert (found.updated, conflicts) == ({**plain, "new": 2}, ())
