"""Agreement with the SMT, record by record, over all recordings of it.

Every record is compared: dropped or not, key, value, order of fields, types, headers. If ours differs, the difference must be one of
`Difference`, each of which defines exactly how the answer differs; their numbers are fixed. If the SMT raised, an independent, untyped
reading of the document defines what must be there.
"""

from __future__ import annotations

import collections
import enum
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from cdc_core.extended_json import dialects as debezium_json
from cdc_core.extended_json import wrappers
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.properties.unwrap import ArrayEncoding, FieldNameAdjustment, UnwrapOptions
from cdc_core.schema import document_schema, evolution
from cdc_core.schema.column_types import Array, Scalar, Struct
from cdc_core.schema.shape import observe
from cdc_core.unwrap import new_document_state as unwrap
from cdc_core.unwrap import printed_records
from tests.harness import recorded

CASES = pathlib.Path(__file__).parents[2] / "cases" / "unwrap"
Case = dict[str, Any]


class Difference(enum.Enum):
    """The permitted differences from the SMT, with their reasons."""

    OLDER_OPTIONS = "the options of older versions are honoured; the real one ignores them in silence"
    COLLISION = "of two fields that meet in a name the real one keeps the last; ours keeps the other in __rescued"
    DOTS = "dots become the delimiter in every flattened name; the real one does it in partial updates only"
    INNER_EMPTY_ARRAY = "empty arrays inside arrays stay; the real one drops them"
    RAISED = "the real one raises (under today's names where older options are given)"


EXPECTED_COUNTS = {
    None: 28_890,
    Difference.OLDER_OPTIONS: 447,
    Difference.COLLISION: 63,
    Difference.DOTS: 37,
    Difference.INNER_EMPTY_ARRAY: 47,
    Difference.RAISED: 2_927,
}


@functools.cache
def cases() -> dict[str, list[Case]]:
    return recorded.by("set", CASES / "smt.jsonl.xz")


@functools.cache
def by_name(option_set: str) -> dict[tuple[str, str, str], Case]:
    """The cases of a set by run, name and key, because a few names occur twice."""
    return {(case["run"], case["case"], json.dumps(case["in"]["key"])): case for case in cases()[option_set]}


def same_case(case: Case, option_set: str) -> Case:
    return by_name(option_set)[(case["run"], case["case"], json.dumps(case["in"]["key"]))]


OPTION_SETS: dict[str, dict[str, str]] = json.loads((CASES / "option_sets.json").read_text())
REFUSED = {"delete_bad_mode", "bad_array_encoding", "add_fields_bad_two_colons"}


# --- comparing -------------------------------------------------------------------------------------------------------

DROPPED = {"dropped": True}
SAME = {"same": True}


def without_nulls(value: Any) -> Any:
    """Without fields that are null, as ours are printed; nulls in arrays stay."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def real_answer(case: Case) -> dict[str, Any]:
    if case.get("dropped"):
        return DROPPED
    out = case["out"]
    if out.get("same"):
        return SAME
    headers = [header[:2] for header in out["headers"]]
    return {"key": without_nulls(out["key"]), "value": without_nulls(out["value"]), "headers": headers}


def our_answer(result: printed_records.JsonRow | unwrap.UnchangedRecord | unwrap.DroppedRecord) -> dict[str, Any]:
    match result:
        case printed_records.JsonRow():
            return {**result.to_json(), "key": without_nulls(result.key)}
        case unwrap.UnchangedRecord():
            return SAME
        case _:
            return DROPPED


def answer(case: Case) -> dict[str, Any]:
    """Our answer, with the case as the only record of its table. The table's columns are kept for the test of types."""
    result = unwrap.extracted(case["in"], options=options_of(json.dumps(case["options"])))
    if not isinstance(result, unwrap.ExtractedRecord):
        return our_answer(result)
    tables = printed_records.RecordTables()
    tables.see(result)
    COLUMNS[id(case)] = tables.schema(result.collection).struct
    return our_answer(tables.row(result))


@functools.cache
def options_of(text: str) -> UnwrapOptions:
    return unwrap_options.parse(json.loads(text))


def is_equal(ours: dict[str, Any], real: dict[str, Any]) -> bool:
    """The same JSON text: values, types of numbers, and the order of fields."""
    return json.dumps(ours) == json.dumps(real)


def difference(case: Case) -> Difference | None:
    """Which permitted difference the case shows; fails for any other. Computed once per case."""
    if id(case) not in FOUND:
        FOUND[id(case)] = found_difference(case)
    return FOUND[id(case)]


FOUND: dict[int, Difference | None] = {}
"""By the identity of a case, which `cases` keeps alive."""

COLUMNS: dict[int, Struct] = {}
"""The columns of a case's own table, by the identity of the case."""


def found_difference(case: Case) -> Difference | None:
    ours = answer(case)
    if "error" in case:
        check_where_the_real_one_raised(case, ours)
        return Difference.RAISED
    real = real_answer(case)
    if is_equal(ours, real):
        return None
    if case["set"].startswith("legacy_"):
        return difference_of_older_options(case, ours)
    return difference_of_records(case, ours, real)


def difference_of_older_options(case: Case, ours: dict[str, Any]) -> Difference:
    expected = expected_of_older_options(case)
    if expected is None:
        check_where_the_real_one_raised(case, ours)
        return Difference.RAISED
    return Difference.OLDER_OPTIONS if is_equal(ours, expected) else difference_of_records(case, ours, expected)


def difference_of_records(case: Case, ours: dict[str, Any], real: dict[str, Any]) -> Difference:
    assert ours.keys() == real.keys() and (ours["key"], ours["headers"]) == (real["key"], real["headers"])
    return difference_of_values(case, ours["value"], real["value"])


def difference_of_values(case: Case, ours: dict[str, Any], real: dict[str, Any]) -> Difference:
    options = options_of(json.dumps(case["options"]))
    kept = {name: value for name, value in ours.items() if name != printed_records.RESCUED}
    if kept != ours and is_equal(kept, real):
        document = dict(source_document(case["in"]["value"], debezium_json.parse(case["in"]["key"]["id"])))
        for path, text in ours[printed_records.RESCUED].items():
            assert list(values_at(document, path)) == [json.loads(text)]
        return Difference.COLLISION
    dotless = {name.replace(".", options.flatten_struct_delimiter): value for name, value in real.items()}
    if options.flatten_struct and is_equal(dotless, ours):
        return Difference.DOTS
    assert is_equal(without_inner_empty_arrays(ours), real), (case["set"], case["case"], ours, real)
    return Difference.INNER_EMPTY_ARRAY


def values_at(value: Any, path: str) -> Iterator[Any]:
    """The values of a document at a dotted path, whose names may contain dots themselves."""
    for name, item in value.items() if isinstance(value, dict) else ():
        if path == name:
            yield item
        elif path.startswith(f"{name}."):
            yield from values_at(item, path[len(name) + 1 :])


def without_inner_empty_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_inner_empty_arrays(item) for name, item in value.items()}
    return [without_inner_empty_arrays(item) for item in value if item != []] if isinstance(value, list) else value


@pytest.mark.parametrize("option_set", sorted(set(OPTION_SETS) - REFUSED))
def test_every_record_of_an_option_set_agrees_but_for_the_permitted_differences(option_set: str) -> None:
    """Key, value, order of fields, headers and dropping are those of the SMT, or differ as intended."""
    assert cases()[option_set]
    for case in cases()[option_set]:
        difference(case)


def test_as_many_records_agree_and_differ_as_the_documents_say() -> None:
    """The counts in the documents are those of the comparison."""
    found = collections.Counter(difference(case) for every in cases().values() for case in every)
    assert found == EXPECTED_COUNTS
    documented = (CASES.parent.parent.parent / "docs" / "unwrap.md").read_text(encoding="utf-8")
    assert all(f"{count:,}" in documented for count in (*found.values(), found.total()))
    assert f"under {len(cases())} option sets" in documented


def test_option_sets_that_the_real_one_refuses_are_refused() -> None:
    """At the start, and not at the first record."""
    for option_set in REFUSED:
        with pytest.raises(unwrap_options.errors.SettingsError):
            unwrap_options.parse(OPTION_SETS[option_set])


# --- the options of older versions -----------------------------------------------------------------------------------


def expected_of_older_options(case: Case) -> dict[str, Any] | None:
    """The SMT's answer with today's names of the same options; None if it raises."""
    today = same_case(case, todays_option_set(case))
    if "error" in today:
        return None
    if case["set"] == "legacy_operation_header_sanitize":
        return with_header_and_source(case, real_answer(today))
    return real_answer(today)


def todays_option_set(case: Case) -> str:
    match case["set"]:
        case "legacy_delete_handling_drop":
            return "delete_drop"
        case "legacy_delete_handling_none":
            return "delete_tombstone"
        case "legacy_delete_handling_rewrite":
            return "delete_rewrite"
        case "legacy_drop_tombstones_false":
            return "delete_rewrite_with_tombstone" if case["in"]["value"] is None else "delete_drop"
        case _:
            return "avro"


def with_header_and_source(case: Case, under_avro: dict[str, Any]) -> dict[str, Any]:
    """`operation.header` adds a header `__op`, `add.source.fields` a field of `source`."""
    if "value" not in under_avro:
        return under_avro
    envelope = case["in"]["value"]
    added = {} if under_avro["value"] is None else {"__ts_ms": envelope["source"]["ts_ms"]}
    value = None if under_avro["value"] is None else {**under_avro["value"], **added}
    return {**under_avro, "value": value, "headers": [["__op", envelope["op"]]]}


# --- where the real one raises ---------------------------------------------------------------------------------------


def check_where_the_real_one_raised(case: Case, ours: dict[str, Any]) -> None:
    """Ours contains everything in the event: as a value, as JSON text, or in `__rescued`."""
    options = options_of(json.dumps(case["options"]))
    expected = read_plainly(case, options)
    if expected is DROPPED:
        assert ours == DROPPED
        return
    assert ours["headers"] == expected["headers"]
    assert is_held(expected["key"], ours["key"]), (case["set"], case["case"], ours["key"])
    if expected["value"] is None:
        assert ours["value"] is None
        return
    value = dict(ours["value"])
    rescued = value.pop(printed_records.RESCUED, {})
    assert is_held(expected["value"], value), (case["set"], case["case"], ours["value"], expected["value"])
    assert {path: json.loads(text) for path, text in rescued.items()} == expected["displaced"]


def is_held(expected: Any, ours: Any) -> bool:
    """Whether ours equals the expected value, whose mixed parts may be JSON texts."""
    if isinstance(expected, Wrapped):
        return ours == expected.plain or (isinstance(ours, str) and json.loads(ours) == expected.wrapper)
    if isinstance(ours, str) and not isinstance(expected, str):
        return json_of(expected) == json.loads(ours)
    if isinstance(expected, dict):
        present = {name: item for name, item in expected.items() if plain(item) is not None}
        is_same = isinstance(ours, dict) and list(present) == list(ours)
        return is_same and all(map(is_held, present.values(), ours.values()))
    if isinstance(expected, list):
        return isinstance(ours, list) and len(expected) == len(ours) and all(map(is_held, expected, ours))
    return type(expected) is type(ours) and expected == ours or is_number(expected) and expected == ours


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Wrapped:
    """A scalar as it is printed, and in type-exact JSON."""

    def __init__(self, plain: Any, wrapper: Any) -> None:
        self.plain = plain
        self.wrapper = wrapper


def plain(value: Any) -> Any:
    return value.plain if isinstance(value, Wrapped) else value


def json_of(value: Any) -> Any:
    """The value as in its JSON text."""
    if isinstance(value, Wrapped):
        return value.wrapper
    if isinstance(value, dict):
        return {name: json_of(item) for name, item in value.items()}
    return [json_of(item) for item in value] if isinstance(value, list) else value


def read_plainly(case: Case, options: UnwrapOptions) -> dict[str, Any]:
    """The expected record of the event, without regard for types."""
    envelope = case["in"]["value"]
    mode = options.delete_tombstone_handling_mode
    key = {"id": shaped(debezium_json.parse(case["in"]["key"]["id"]), options)}
    if envelope is None:
        headers = [[added.name, "d"] for added in options.add_headers if added.field == "op"]
        return {"key": key, "value": None, "headers": headers, "displaced": {}} if mode.keeps_tombstone else DROPPED
    is_delete = envelope["after"] is None and envelope["updateDescription"] is None
    if is_delete and mode.drops_delete:
        return DROPPED
    headers = [[added.name, item] for added in options.add_headers for item in looked_up(envelope, added)]
    if is_delete and not mode.rewrites_delete:
        return {"key": key, "value": None, "headers": headers, "displaced": {}}
    pairs = list(document_pairs(envelope, debezium_json.parse(case["in"]["key"]["id"]), options))
    if mode.adds_deleted:
        pairs.append((adjusted("__deleted", options), "__deleted", is_delete))
        if options.rewrite_with_id and not any(path.split(".")[0] == "_id" for _, path, _ in pairs):
            identity = debezium_json.parse(case["in"]["key"]["id"])
            pairs += flat_pairs({"_id": identity}, options, "", "")
    for added in options.add_fields:
        pairs.append((added.name, added.name, next(looked_up(envelope, added), None)))
    value: dict[str, Any] = {}
    paths: dict[str, str] = {}
    displaced: dict[str, Any] = {}
    for name, path, item in pairs:
        if value.get(name) is not None and item is not None:
            displaced[paths[name]] = json_of(value[name])
        if item is not None or name not in value:
            value[name], paths[name] = item, path
    return {"key": key, "value": value, "headers": headers, "displaced": displaced}


def document_pairs(envelope: dict[str, Any], identity: Any, options: UnwrapOptions) -> Iterator[tuple[str, str, Any]]:
    yield from flat_pairs(source_document(envelope, identity), options, "", "")


def source_document(envelope: dict[str, Any], identity: Any) -> dict[str, Any]:
    """The event's document: whole, partial, or as it was before."""
    text = envelope["after"] or (envelope["updateDescription"] or {}).get("updatedFields") or envelope["before"]
    document = debezium_json.parse(text or "{}")
    if envelope["after"] is None and envelope["updateDescription"] is not None:
        removed = envelope["updateDescription"]["removedFields"] or []
        document = {**document, **dict.fromkeys(removed), "_id": identity}
    return document


def flat_pairs(document: dict[str, Any], options: UnwrapOptions, prefix: str, above: str) -> Iterator[tuple[str, str, Any]]:
    delimiter = options.flatten_struct_delimiter
    for name, value in document.items():
        own = name.replace(".", delimiter) if options.flatten_struct else name
        path = f"{above}{wrappers.unescape_key(name)}"
        full = prefix + adjusted(wrappers.unescape_key(own), options)
        inner = shaped(value, options, is_nested=False)
        if value == {"$undefined": True}:
            continue
        if options.flatten_struct and isinstance(inner, dict):
            yield from flat_pairs(inner, options, full + delimiter, f"{path}.")
        else:
            yield full, path, shaped(value, options)


def adjusted(name: str, options: UnwrapOptions) -> str:
    return options.field_names.of(name)


def shaped(value: Any, options: UnwrapOptions, *, is_nested: bool = True) -> Any:
    """The value as it is printed; only its first level if documents are flattened."""
    match value:
        case [] if options.field_names.adjustment is not FieldNameAdjustment.NONE:
            return None
        case list():
            items = [shaped(item, options) if item != [] else [] for item in value] if is_nested else value
            if options.field_values.arrays is ArrayEncoding.ARRAY:
                return items
            encoded = {f"_{index}": item for index, item in enumerate(value)}
            return shaped(encoded, options) if is_nested else encoded
        case {"$oid": text} | {"$symbol": text} | {"$numberDecimal": text}:
            return Wrapped(text, value)
        case {"$numberLong": text}:
            return Wrapped(int(text), value)
        case {"$numberDouble": text}:
            return Wrapped(text, value)
        case {"$date": {"$numberLong": text}}:
            return Wrapped(int(text), value)
        case {"$timestamp": {"t": seconds}}:
            return Wrapped(seconds * 1000, value)
        case {"$binary": {"base64": text}}:
            return Wrapped(text, value)
        case {"$minKey": _}:
            return Wrapped("MinKey", value)
        case {"$maxKey": _}:
            return Wrapped("MaxKey", value)
        case {"$undefined": _}:
            return None
        case {"$regularExpression": {"pattern": pattern, "options": flags}}:
            return {"regex": pattern, "options": flags}
        case {"$code": code, "$scope": scope}:
            return {"code": code, "scope": json.dumps(scope, separators=(",", ":"))}
        case {"$code": code}:
            return Wrapped(code, value)
        case dict() if is_nested:
            named = ((adjusted(wrappers.unescape_key(name), options), item) for name, item in value.items())
            return {name: shaped(item, options) for name, item in named}
        case _:
            return value


STRUCT_FIELDS = {
    "transaction": ("id", "total_order", "data_collection_order"),
    "updateDescription": ("removedFields", "updatedFields", "truncatedArrays"),
}


def looked_up(envelope: dict[str, Any], added: unwrap_options.AddedField) -> Iterator[Any]:
    """The metadata that an entry names, if the event has it; `snapshot` is null for "false"."""
    source = envelope["source"]
    envelope = {**envelope, "source": {**source, "snapshot": source["snapshot"].replace("false", "") or None}}
    part = envelope if not added.struct else envelope.get(added.struct) or {}
    known = STRUCT_FIELDS.get(added.struct, ())
    if added.field in part or added.field in envelope or added.field in known:
        yield part.get(added.field, envelope.get(added.field))


# --- types -----------------------------------------------------------------------------------------------------------

SCALARS = {
    "int32": {Scalar.INT},
    "int64": {Scalar.BIGINT},
    "int64:org.apache.kafka.connect.data.Timestamp": {Scalar.TIMESTAMP},
    "float64": {Scalar.DOUBLE},
    "boolean": {Scalar.BOOLEAN},
    "bytes": {Scalar.BINARY},
    "string": {Scalar.STRING},
    "string:io.debezium.data.Json": {Scalar.STRING},
    "string:io.debezium.data.Enum": {Scalar.STRING},
}


def has_type(type_: Any, compact: Any, value: Any) -> bool:
    """Whether a column type is that of the SMT's schema; a value that is only null or empty has no type."""
    if type_ is None:
        return is_hollow(value)
    if isinstance(compact, str):
        return value is None or type_ in SCALARS[compact.replace("?", "")]
    if "array?" in compact or "array" in compact:
        element = compact.get("array?", compact.get("array"))
        items = value or []
        return isinstance(type_, Array) and all(has_type(type_.element, element, item) for item in items)
    if compact.get("struct?") == "io.debezium.mongodb.regex":
        return type_ is Scalar.REGEX
    types = {field.name: field.type for field in type_.fields}
    fields = (value or {}).items()
    return isinstance(type_, Struct) and all(has_type(types.get(n), compact["fields"][n], item) for n, item in fields)


def is_hollow(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(is_hollow, value.values() if isinstance(value, dict) else value))
    return value is None


def test_columns_have_the_types_of_the_real_schema() -> None:
    """int32 is INT, int64 BIGINT, Timestamp TIMESTAMP, and so on, at every depth of every record that agrees."""
    compared = 0
    for every in cases().values():
        for case in every:
            if not case.get("out", {}).get("schema") or case["out"].get("same") or difference(case) is not None:
                continue
            struct = COLUMNS[id(case)]
            assert has_type(struct, case["out"]["schema"], case["out"]["value"]), (case["set"], case["case"], struct)
            compared += 1
    assert compared > 20_000


def test_columns_of_metadata_have_their_types_even_where_they_are_small() -> None:
    """A count of 1 in `total_order` is an int64, as in Debezium's schema."""
    options = unwrap_options.parse({"add.fields": "total_order,ord"})
    event = {"op": "c", "after": "{}", "source": {"ord": 1}, "transaction": {"total_order": 1}}
    shape = observe(unwrap.extracted({**event, "after": '{"a": 1}'}, options=options).document)
    schema, _ = evolution.join(document_schema.EMPTY, shape)
    assert [(field.name, field.type) for field in schema.fields] == [
        ("a", Scalar.INT),
        ("__total_order", Scalar.BIGINT),
        ("__ord", Scalar.INT),
    ]


# --- many records in one table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("option_set", ["default", "flatten", "array_document", "avro", "delete_rewrite", "add_fields"])
def test_records_of_compatible_shape_agree_as_one_table_too(option_set: str) -> None:
    """A record whose values fit the table's columns is the same as alone, however many others share the table."""
    by_collection: dict[tuple[str, str], list[Case]] = collections.defaultdict(list)
    for case in cases()[option_set]:
        if "error" not in case and difference(case) is None and "value" in real_answer(case):
            source = (case["in"]["value"] or {}).get("source", {})
            by_collection[(case["run"], source.get("collection", ""))].append(case)
    tables = sum(len(list(compatible_groups(every))) for every in by_collection.values())
    assert tables >= len(by_collection)


def compatible_groups(every: list[Case]) -> Iterator[list[Case]]:
    """Tables of cases: those with a value that does not fit the columns are in the next table."""
    options = options_of(json.dumps(every[0]["options"]))
    while every:
        results = [our_answer(row) for row in printed_records.records([case["in"] for case in every], options=options)]
        fitting = [case for case, ours in zip(every, results) if printed_records.RESCUED not in (ours["value"] or {})]
        for case, ours in zip(every, results):
            if printed_records.RESCUED not in (ours["value"] or {}):
                assert ours == real_answer(case)
        assert fitting, "the first record of a table fits it"
        yield fitting
        every = [case for case in every if case not in fitting]


# --- $unset ----------------------------------------------------------------------------------------------------------


def test_removed_fields_are_null_where_the_real_one_forgets_them() -> None:
    """Each path of `removedFields` in a partial update is a null field of the record."""
    checked = 0
    for case in cases()["default"]:
        description = (case["in"]["value"] or {}).get("updateDescription") or {}
        for path in description.get("removedFields") or []:
            result = unwrap.extracted(case["in"], options=UnwrapOptions())
            is_partial = case["in"]["value"]["after"] is None
            if is_partial or "." not in path:
                assert result.document[path] is None
                assert path not in case["out"]["value"]
                checked += 1
    assert checked > 50
