"""The unwrap of events that are not in the recordings: other forms, older connectors, tables of several shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.unwrap import new_document_state as unwrap
from cdc_core.unwrap import printed_records

SOURCE = {"db": "shop", "collection": "orders", "ts_ms": 5, "snapshot": "false"}


def event(after: Any = None, *, key: Any = 1, **envelope: Any) -> dict[str, Any]:
    """A record of `shop.orders`, as Debezium 3 emits it with schemas disabled."""
    text = None if after is None else json.dumps(after)
    value = {"before": None, "after": text, "updateDescription": None, "source": SOURCE, "op": "u", **envelope}
    return {"key": {"id": json.dumps(key)}, "value": value}


def partial(updated: Any, removed: list[str] | None = None, **envelope: Any) -> dict[str, Any]:
    description = {"updatedFields": json.dumps(updated), "removedFields": removed, "truncatedArrays": None}
    return event(updateDescription=description, **envelope)


def rows(events: list[Any], **options: Any) -> list[Any]:
    """The results for the events, as JSON; underscores in option names stand for dots."""
    named = unwrap_options.parse({name.replace("_", "."): value for name, value in options.items()})
    results = list(printed_records.records(events, options=named))
    return [result.to_json() if isinstance(result, printed_records.JsonRow) else result for result in results]


def values(events: list[Any], **options: Any) -> list[Any]:
    return [row["value"] for row in rows(events, **options)]


def document(one: Any, **options: Any) -> Any:
    """The document of one event, with its nulls, before it is typed."""
    named = unwrap_options.parse({name.replace("_", "."): value for name, value in options.items()})
    return unwrap.extracted(one, options=named).document


# --- forms of an event -----------------------------------------------------------------------------------------------

ENVELOPE = event({"_id": 1, "a": "x"})["value"]
KEY = {"id": "1"}
NAMED_KEY = {"schema": {"type": "struct", "name": "dbz.shop.orders.Key"}, "payload": KEY}
NAMED_VALUE = {"schema": {"type": "struct", "name": "dbz.shop.orders.Envelope"}, "payload": ENVELOPE}


@pytest.mark.parametrize(
    ("form", "key"),
    [
        ({"key": KEY, "value": ENVELOPE}, {"id": 1}),
        ({"key": NAMED_KEY, "value": NAMED_VALUE}, {"id": 1}),
        ({"key": json.dumps(KEY), "value": json.dumps(ENVELOPE)}, {"id": 1}),
        ({"key": json.dumps(NAMED_KEY), "value": json.dumps(NAMED_VALUE)}, {"id": 1}),
        ({"value": ENVELOPE}, None),
        (NAMED_VALUE, None),
        ({"schema": None, "payload": ENVELOPE}, None),
        ({"schema": {}, "payload": ENVELOPE}, None),
        (ENVELOPE, None),
        ({"key": "order 1", "value": ENVELOPE}, "order 1"),
        ({"key": {"id": "not JSON"}, "value": ENVELOPE}, {"id": "not JSON"}),
        ({"key": {"tenant": 7}, "value": ENVELOPE}, {"tenant": 7}),
    ],
)
def test_an_event_is_read_in_each_of_its_forms(form: Any, key: Any) -> None:
    """With or without schemas, with its key or alone, decoded or as texts; an unusual key is unchanged."""
    assert rows([form]) == [{"key": key, "value": {"_id": 1, "a": "x"}, "headers": []}]


def test_a_lone_surrogate_in_a_records_text_is_replaced() -> None:
    """As in the documents inside it: neither Arrow nor a UTF-8 file can contain one."""
    value = event({"_id": 1}, source={**SOURCE, "db": "\ud800"})["value"]
    found = unwrap.extracted({"key": '{"id": "\\udc00"}', "value": json.dumps(value)}, options=unwrap_options.parse({}))
    assert isinstance(found, unwrap.ExtractedRecord)
    assert (found.key, found.collection, found.document) == ({"id": "\ufffd"}, "\ufffd.orders", {"_id": 1})


@pytest.mark.parametrize(
    "other",
    [
        {"key": {"serverName": "dbz"}, "value": {"ts_ms": 1}},
        {"key": {"id": "x:1"}, "value": {"status": "BEGIN", "id": "x:1", "event_count": None}},
        {"key": {"serverName": "dbz"}, "value": None},
        {"key": {"schema": {"name": "io.debezium.connector.common.ServerNameKey"}, "payload": KEY}, "value": None},
        {"key": NAMED_KEY, "value": {"schema": {"name": "something.Else"}, "payload": ENVELOPE}},
        {"key": NAMED_KEY, "value": {"schema": {"type": "struct"}, "payload": ENVELOPE}},
        {"key": KEY, "value": "some text"},
        {"key": None, "value": [1, 2]},
        {"name": "somebody", "op": "not an event"},
        [1],
        "text",
        5,
    ],
)
def test_what_is_no_change_event_passes_unchanged(other: Any) -> None:
    """Heartbeats, transaction metadata and records of others, with any options."""
    assert rows([other], **{"flatten.struct": "true", "add.headers": "op", "operation.header": "true"}) == [
        unwrap.UnchangedRecord(other)
    ]


def test_a_text_inside_an_event_that_cannot_be_read_raises_value_error() -> None:
    """The caller adds the line or row."""
    for bad in (event(op="c", after=None), partial({})):
        bad["value"].update(after="{bad")
        with pytest.raises(ValueError):
            rows([bad])
    for text in ("5", '{"$oid": "596e275826f08b2730779e1f"}'):
        with pytest.raises(ValueError, match="holds no document"):
            rows([{"key": None, "value": {**ENVELOPE, "after": text}}])


@pytest.mark.parametrize("op", ["c", "r", "u"])
def test_an_envelope_without_after_is_no_delete(op: str) -> None:
    """The SMT raises for it. With a null it is a delete, whatever `op` is, as in the SMT, and a delete may lack what is null."""
    lacking = {name: value for name, value in {**ENVELOPE, "op": op}.items() if name not in ("after", "updateDescription")}
    with pytest.raises(ValueError, match="no field after"):
        rows([{"key": None, "value": lacking}])
    assert document({"key": None, "value": {**lacking, "after": None}}) is None
    assert document({"key": None, "value": {**lacking, "op": "d"}}) is None


# --- updates ---------------------------------------------------------------------------------------------------------


def test_unset_fields_of_a_partial_update_are_null() -> None:
    """Unlike fields that the update does not mention, they are in the document."""
    assert document(partial({"b": 2}, ["a", "c.d"])) == {"b": 2, "a": None, "c.d": None, "_id": 1}
    flat = document(partial({"b": 2}, ["c.d"]), **{"flatten.struct": "true"})
    assert flat == {"b": 2, "c_d": None, "_id": 1}


@pytest.mark.parametrize(
    ("updated", "value"),
    [
        ({"$date": 5}, 5),
        ({"$date": {"$date": 7}}, {"$date": {"$numberLong": "7"}}),
        ({"$oid": "596e275826f08b2730779e1f"}, "596e275826f08b2730779e1f"),
    ],
)
def test_an_update_of_one_field_with_the_name_of_a_wrapper_sets_that_field(updated: Any, value: Any) -> None:
    """Read as one typed value, it would end the unwrap of all other events of its file."""
    [name] = updated
    assert document(partial(updated)) == {f"${name}": value, "_id": 1}
    with pytest.raises(ValueError, match="holds no document"):
        document(partial([updated]))


def test_unset_fields_of_a_whole_document_are_null_unless_a_newer_look_up_has_them() -> None:
    """They are null in their place, if their parent still exists; nothing is added for parents that are gone."""
    description = {"updatedFields": "{}", "removedFields": ["a", "b.c", "gone.d", "back", "list.0"]}
    after = {"_id": 1, "b": {"x": 1}, "back": 5, "list": [1]}
    assert document(event(after, updateDescription=description)) == {
        "_id": 1,
        "b": {"x": 1, "c": None},
        "back": 5,
        "list": [1],
        "a": None,
    }


def test_nulls_are_left_out_of_printed_rows() -> None:
    """Except in arrays, in which a null keeps its place."""
    assert values([event({"_id": 1, "a": None, "b": {"c": None}, "d": [None, {"e": None}]})]) == [
        {"_id": 1, "b": {}, "d": [None, {}]}
    ]


# --- names that meet -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "options", "value"),
    [
        ({"a": {"b": 1}, "a_b": 2}, {"flatten.struct": "true"}, {"a_b": 2, "__rescued": {"a.b": "1"}}),
        ({"a_b": 2, "a": {"b": 1}}, {"flatten.struct": "true"}, {"a_b": 1, "__rescued": {"a_b": "2"}}),
        ({"a_b": 2, "a": {"b": None}}, {"flatten.struct": "true"}, {"a_b": 2}),
        (
            {"a": {"b": {"$date": 5}}, "a.b": 1, "a_b": 2},
            {"flatten.struct": "true"},
            {"a_b": 2, "__rescued": {"a.b": '{"$date":{"$numberLong":"5"}}', "a.b'": "1"}},
        ),
        (
            {"x": {"a-b": 1, "a.b": 2}},
            {"field.name.adjustment.mode": "avro"},
            {"x": {"a_b": 2}, "__rescued": {"x.a-b": "1"}},
        ),
        (
            {"__deleted": "mine"},
            {"delete.tombstone.handling.mode": "rewrite"},
            {"__deleted": False, "__rescued": {"__deleted": '"mine"'}},
        ),
        ({"__op": "mine"}, {"add.fields": "op"}, {"__op": "u", "__rescued": {"__op": '"mine"'}}),
        ({"__rescued": 5}, {}, {"__rescued": 5}),
        (
            {"__rescued": {"x": 5}, "a": {"b": 1}, "a_b": 2},
            {"flatten.struct": "true"},
            {"__rescued_x": 5, "a_b": 2, "__rescued": {"a.b": "1"}},
        ),
        (
            {"__rescued": {"x": 5}, "a-b": 1, "a_b": 2},
            {"field.name.adjustment.mode": "avro"},
            {"a_b": 2, "__rescued": {"a-b": "1", "__rescued": '{"x":5}'}},
        ),
    ],
)
def test_of_two_fields_that_meet_in_a_name_neither_is_lost(after: Any, options: Any, value: Any) -> None:
    """The last one gets the name, as in the SMT unless it raises; the other is rescued with its own path."""
    assert values([event(after)], **options) == [value]


def test_dots_are_the_delimiter_in_whole_and_partial_documents_alike() -> None:
    """An update of `a.b` and a document that contains it give the same column."""
    whole, update = values([event({"a": {"b": 1}}), partial({"a.b": 2})], **{"flatten.struct": "true"})
    assert (whole["a_b"], update["a_b"]) == (1, 2)


@pytest.mark.parametrize("mode", ["avro", "avro_unicode"])
@pytest.mark.parametrize("delimiter", ["_", "-", ".", ""])
def test_adjusted_names_are_joined_alike_in_whole_and_partial_documents(mode: str, delimiter: str) -> None:
    """The names are adjusted, and not the delimiter between them."""
    options = {"flatten.struct": "true", "flatten.struct.delimiter": delimiter, "field.name.adjustment.mode": mode}
    whole = document(event({"_id": 1, "a": {"b-c": {"d": 1}}}), **options)
    update = document(partial({"a.b-c.d": 1}), **options)
    assert set(whole) == set(update)


# --- deletes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "with_id", "delete", "tombstone"),
    [
        ("drop", "false", None, None),
        ("tombstone", "false", "null", None),
        ("delete-to-tombstone", "true", "null", None),
        ("rewrite", "false", {"__deleted": True}, None),
        ("rewrite", "true", {"__deleted": True, "_id": 1}, None),
        ("rewrite-with-tombstone", "false", {"__deleted": True}, "null"),
        ("rewrite-with-tombstone", "true", {"__deleted": True, "_id": 1}, "null"),
    ],
)
def test_deletes_and_tombstones_follow_the_mode(mode: str, with_id: str, delete: Any, tombstone: Any) -> None:
    """`None` is dropped, `"null"` is a key with a null value; the header of a tombstone is `d`."""
    options = {
        "delete.tombstone.handling.mode": mode,
        "delete.tombstone.handling.mode.rewrite-with-id": with_id,
        "add.headers": "op,ts_ms",
    }
    events = [event(op="d", ts_ms=7), {"key": {"id": "1"}, "value": None}]
    headers = [[["__op", "d"], ["__ts_ms", 7]], [["__op", "d"]]]
    expected = [
        unwrap.DROPPED if value is None else {"key": {"id": 1}, "value": None if value == "null" else value, "headers": h}
        for value, h in zip((delete, tombstone), headers)
    ]
    assert rows(events, **options) == expected


def test_a_rewritten_delete_is_the_document_as_it_was() -> None:
    """With `__deleted: true` at the end."""
    deleted = event(op="d", before='{"_id": 1, "a": {"b": 1}}')
    options = {"delete.tombstone.handling.mode": "rewrite", "flatten.struct": "true"}
    assert values([deleted], **options) == [{"_id": 1, "a_b": 1, "__deleted": True}]


def test_older_options_can_pass_the_tombstone_and_drop_the_delete() -> None:
    """With only `drop.tombstones: false`, `delete.handling.mode` is drop."""
    events = [event(op="d"), {"key": {"id": "1"}, "value": None}]
    assert rows(events, **{"drop.tombstones": "false"}) == [
        unwrap.DROPPED,
        {"key": {"id": 1}, "value": None, "headers": []},
    ]


# --- events of Debezium 1.x ------------------------------------------------------------------------------------------


def legacy(**envelope: Any) -> dict[str, Any]:
    value = {"after": None, "patch": None, "filter": '{"_id" : {"$numberLong" : "1004"}}', "source": SOURCE, "op": "u"}
    return {"key": {"id": "1004"}, "value": {**value, **envelope}}


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ('{"$set":{"first_name":"Anne Marie"}}', {"first_name": "Anne Marie"}),
        ('{"$v":1,"$set":{"a.b":1},"$unset":{"c":true,"d.e":true}}', {"a.b": 1, "c": None, "d.e": None}),
        ('{"$v": 1, "$unset": {"a": true}}', {"a": None}),
        ('{"first_name":"Anne"}', {"first_name": "Anne"}),
        (
            '{"$v":2,"diff":{"u":{"a":1},"i":{"b":2},"d":{"c":false},"sd":{"u":{"e":3}}}}',
            {"a": 1, "b": 2, "c": None, "d.e": 3},
        ),
        ('{"$v":2,"diff":{"sl":{"a":true,"l":4,"u1":"x","s2":{"u":{"q":1}}}}}', {"l.1": "x", "l.2.q": 1}),
    ],
)
def test_a_legacy_patch_is_a_partial_update(patch: str, expected: Any) -> None:
    """`$set` gives fields, `$unset` nulls, and a patch without operators replaces. The `_id` is that of the filter, typed."""
    assert document(legacy(patch=patch)) == {**expected, "_id": {"$numberLong": "1004"}}


def test_legacy_inserts_and_deletes_need_no_patch() -> None:
    """An insert has `after`, a delete only the filter; an event without a key gets it from there."""
    inserted, deleted = legacy(after='{"_id": {"$numberLong": "1004"}, "a": 1}', op="c"), legacy(op="d")
    assert rows([inserted, deleted, deleted["value"]]) == [
        {"key": {"id": 1004}, "value": {"_id": 1004, "a": 1}, "headers": []},
        {"key": {"id": 1004}, "value": None, "headers": []},
        {"key": {"id": 1004}, "value": None, "headers": []},
    ]


def test_a_patch_that_says_nothing_about_fields_is_refused() -> None:
    """The patch of `$push` does not contain the result."""
    with pytest.raises(ValueError, match=r"\$push"):
        rows([legacy(patch='{"$push": {"a": 1}}')])


# --- metadata --------------------------------------------------------------------------------------------------------


def test_fields_that_the_event_has_not_are_null_columns_and_no_headers() -> None:
    """An absent field of a known struct is also a null header."""
    options = {
        "add.fields": "nope,source.nope,nope.nope,id",
        "add.headers": "nope,nope.nope,id,updateDescription.removedFields",
    }
    [row] = rows([event({"_id": 1})], **options)
    headers = [["__id", None], ["__updateDescription_removedFields", None]]
    assert row == {"key": {"id": 1}, "value": {"_id": 1}, "headers": headers}
    assert document(event({"_id": 1}), **options) == {
        "_id": 1,
        "__nope": None,
        "__source_nope": None,
        "__nope_nope": None,
        "__id": None,
    }


def test_a_field_is_looked_up_in_the_envelope_only_if_its_struct_is_there() -> None:
    """A null struct gives nulls, as in the SMT. It raises for a struct that no event has, whose fields are missing here."""
    options = {
        "add.fields": "transaction.op,updateDescription.ts_ms,Source.ts_ms,op.ts_ms",
        "add.headers": "transaction.op,updateDescription.ts_ms,Source.ts_ms,op.ts_ms",
    }
    names = ("__transaction_op", "__updateDescription_ts_ms", "__Source_ts_ms", "__op_ts_ms")
    bare = event({"_id": 1}, ts_ms=7, transaction=None)
    assert document(bare, **options) == {"_id": 1, **dict.fromkeys(names)}
    assert rows([bare], **options)[0]["headers"] == [[name, None] for name in names[:2]]
    whole = event({"_id": 1}, ts_ms=7, transaction={"id": "t"}, updateDescription={"updatedFields": "{}"})
    added = {"__transaction_op": "u", "__updateDescription_ts_ms": 7}
    assert rows([whole], **options)[0]["value"] == {"_id": 1, **added}
    assert rows([whole], **options)[0]["headers"] == [list(header) for header in added.items()]


def test_metadata_with_one_name_is_all_in_the_record() -> None:
    """As headers it is repeated, as in the SMT, and of two fields the last has the name."""
    [row] = rows([event({"_id": 1}, ts_ms=7)], **{"add.fields": "op:x,ts_ms:x", "add.headers": "op:x,ts_ms:x,op:x"})
    assert row["value"] == {"_id": 1, "__x": 7, "__rescued": {"__x": '"u"'}}
    assert row["headers"] == [["__x", "u"], ["__x", 7], ["__x", "u"]]


def test_whole_structs_can_be_added() -> None:
    """The SMT fails for them; if documents are flattened, structs are too."""
    one = event({"_id": 1}, updateDescription={"removedFields": ["a"], "updatedFields": "{}"})
    [row] = rows([one], **{"add.fields": "source,updateDescription:u", "add.headers": "updateDescription"})
    assert row["value"]["__source"] == {"db": "shop", "collection": "orders", "ts_ms": 5}
    assert row["value"]["__u"] == {"removedFields": ["a"], "updatedFields": "{}"}
    assert row["headers"] == [["__updateDescription", {"removedFields": ["a"], "updatedFields": "{}"}]]
    [flat] = values([one], **{"add.fields": "source", "flatten.struct": "true"})
    assert flat == {"_id": 1, "__source_db": "shop", "__source_collection": "orders", "__source_ts_ms": 5}


# --- tables ----------------------------------------------------------------------------------------------------------


def test_the_events_of_a_collection_are_one_table() -> None:
    """The first type of a column is used, and widened if possible. Values that do not fit are rescued with their type."""
    events = [event({"_id": i, "v": value}) for i, value in enumerate([1, "x", 2.5, {"a": 1}, {"$numberLong": "3"}])]
    assert values(events) == [
        {"_id": 0, "v": 1.0},
        {"_id": 1, "__rescued": {"v": '"x"'}},
        {"_id": 2, "v": 2.5},
        {"_id": 3, "__rescued": {"v": '{"a":1}'}},
        {"_id": 4, "v": 3.0},
    ]


def test_a_rescued_array_is_one_also_where_arrays_become_documents() -> None:
    """Whether its column has another type, or another field took its name. Its elements have the paths of the event."""
    undefined = {"$undefined": True}
    of_columns = [event({"_id": 1, "v": 5, "w": [5, 5, 5]}), event({"v": [1, [], {"a": [2]}], "w": [undefined, 5, "x"]})]
    assert values(of_columns, **{"array.encoding": "document"}) == [
        {"_id": 1, "v": 5, "w": {"_0": 5, "_1": 5, "_2": 5}},
        {"w": {"_1": 5}, "__rescued": {"v": '[1,[],{"a":[2]}]', "w.2": '"x"'}},
    ]
    of_names = event({"a-b": [1, [2], undefined], "a_b": 2, "v": [0, {"x-y": [3], "x_y": 4}]})
    assert values([of_names], **{"array.encoding": "document", "field.name.adjustment.mode": "avro"}) == [
        {"a_b": 2, "v": {"_0": 0, "_1": {"x_y": 4}}, "__rescued": {"a-b": "[1,[2],null]", "v.1.x-y": "[3]"}}
    ]


def test_two_values_of_one_path_are_rescued_both() -> None:
    """As in a table, the later one as `path#2`: a name with dots may equal the path of another field, or of an element."""
    held, odd = {"a.b": 1, "a": {"b": 1}, "c": [1], "c.0": 1}, {"a.b": "w", "a": {"b": "x"}, "c": ["y"], "c.0": "z"}
    assert values([event(held), event(odd)]) == [
        held,
        {"a": {}, "c": [None], "__rescued": {"a.b": '"w"', "a.b#2": '"x"', "c.0": '"y"', "c.0#2": '"z"'}},
    ]


def test_collections_do_not_share_a_table() -> None:
    """Not even two with the same name in different databases."""
    other = event({"_id": "a", "v": "x"}, source={**SOURCE, "db": "archive"})
    assert values([event({"_id": 1, "v": 1}), other]) == [{"_id": 1, "v": 1}, {"_id": "a", "v": "x"}]


def test_empty_arrays_and_documents_are_there_without_a_type() -> None:
    """A column that was always empty prints its values; one with a type holds what fits."""
    assert values([event({"_id": 1, "a": [], "b": {}, "c": [[], {}], "d": {"e": {}}})]) == [
        {"_id": 1, "a": [], "b": {}, "c": [[], {}], "d": {"e": {}}}
    ]
    assert values([event({"_id": 1, "a": [1]}), event({"_id": 2, "a": []}), event({"_id": 3, "a": {}})]) == [
        {"_id": 1, "a": [1]},
        {"_id": 2, "a": []},
        {"_id": 3, "__rescued": {"a": "{}"}},
    ]


def test_documents_of_an_array_have_their_fields_in_one_order() -> None:
    """That in which the array first has them, as in the SMT, also for a field that is always empty or has no type."""
    after = {"_id": 1, "v": [{"c": 1, "a": {}, "n": 2}, {"n": 3, "a": {}, "c": 4}, {"x": [], "c": 5}]}
    [value] = values([event(after)])
    assert [list(item) for item in value["v"]] == [["c", "a", "n"], ["c", "a", "n"], ["c", "x"]]
    [_, value] = values([event({"_id": 2, "v": [{"n": 1, "c": 2}]}), event(after)])
    assert [list(item) for item in value["v"]] == [["c", "a", "n"], ["c", "a", "n"], ["c", "x"]]


def test_dates_of_any_year_are_milliseconds() -> None:
    """JSON can represent all of them, so none is rescued."""
    dates = [-(2**63), -62135596800000, 253402300800000, 2**63 - 1]
    assert values([event({"v": [{"$date": each} for each in dates]})]) == [{"v": dates}]


def test_a_field_that_looks_like_a_wrapper_keeps_its_name() -> None:
    """What only resembles a wrapper of type-exact JSON is a document, with columns of its names."""
    assert values([event({"_id": 1, "v": {"$oid": "x"}, "w": {"$date": "soon", "$ref": 1}})]) == [
        {"_id": 1, "v": {"$oid": "x"}, "w": {"$date": "soon", "$ref": 1}}
    ]


def test_empty_documents_have_no_value() -> None:
    """If all fields of an event were filtered out, its value is null, unless the mode marks every record."""
    assert values([event({})]) == [None]
    assert values([event({})], **{"delete.tombstone.handling.mode": "rewrite", "add.fields": "op"}) == [
        {"__deleted": False, "__op": "u"}
    ]


def test_a_document_of_empty_documents_is_no_delete() -> None:
    """Flattened, nothing of it remains. Its value is an empty record, as in the SMT, and not null."""
    assert values([event({"_id": {}, "a": {"b": {}}})], **{"flatten.struct": "true"}) == [{}]
    assert values([partial({"a": {}}, key={})], **{"flatten.struct": "true"}) == [{}]
    assert values([event({"a": {"$undefined": True}})]) == [{}]


def test_deep_and_wide_documents_pass() -> None:
    """A hundred levels, and five thousand fields."""
    deep: Any = 1
    for _ in range(100):
        deep = {"d": deep}
    [value] = values([event({"_id": 1, "deep": deep, **{f"f{i}": i for i in range(5_000)}})])
    assert value["f4999"] == 4999
    assert "deep" in value


# --- anything at all -------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "a.b", "a_b", "$oid", "__rescued"])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=4)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.floats(),
    TEXTS,
    NUMBERS.map(lambda number: {"$numberLong": str(number)}),
    NUMBERS.map(lambda number: {"$date": number}),
    st.sampled_from(
        [
            {"$oid": "596e275826f08b2730779e1f"},
            {"$binary": "AAE=", "$type": "00"},
            {"$regex": "a", "$options": "i"},
            {"$code": "f", "$scope": {"y": 1}},
            {"$numberDecimal": "1.5"},
            {"$timestamp": {"t": 4294967295, "i": 1}},
            {"$minKey": 1},
            {"$undefined": True},
        ]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(NAMES, TEXTS), inner, max_size=4),
    ),
    max_leaves=15,
)
OPTIONS = st.fixed_dictionaries(
    {
        "array.encoding": st.sampled_from(["array", "document"]),
        "flatten.struct": st.sampled_from(["true", "false"]),
        "flatten.struct.delimiter": st.sampled_from(["_", ".", ""]),
        "delete.tombstone.handling.mode": st.sampled_from([mode.value for mode in unwrap_options.DELETE_MODES]),
        "field.name.adjustment.mode": st.sampled_from(["none", "avro", "avro_unicode"]),
        "add.fields": st.sampled_from(["", "op,source,op:a"]),
    }
)


@given(st.lists(st.dictionaries(st.sampled_from(["_id", "a", "b", "a.b", "a_b", ""]), VALUES), max_size=4), OPTIONS)
def test_documents_of_any_shape_become_rows(documents: list[Any], options: dict[str, str]) -> None:
    """Each document gives one row of valid JSON, however different they are."""
    events = [event(after, key=key) for key, after in enumerate(documents)]
    printed = [json.dumps(row, allow_nan=False) for row in rows(events, **options)]
    assert len(printed) == len(documents)


@given(st.lists(VALUES, max_size=4))
def test_nothing_of_a_document_is_lost(values_of_v: list[Any]) -> None:
    """A value that is not null is in its column or in `__rescued`."""
    for value, found in zip(values_of_v, values([event({"_id": 1, "v": value}) for value in values_of_v])):
        if value is None or value == {"$undefined": True}:
            assert "v" not in found
        else:
            assert "v" in found or "v" in found["__rescued"]
