"""The SMT's options: defaults, older options, and refused values."""

from __future__ import annotations

import pytest

from cdc_core import errors
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.properties.unwrap import (
    AddedField,
    ArrayEncoding,
    DeleteMode,
    FieldNameAdjustment,
    FieldNames,
    FieldValues,
    UnwrapOptions,
)


def problems(options: dict[str, object]) -> list[str]:
    with pytest.raises(errors.SettingsError) as refused:
        unwrap_options.parse(options, where="silver.defaults")
    return [str(problem) for problem in refused.value.problems]


def test_no_options_are_the_defaults_of_the_smt() -> None:
    """An empty mapping gives Debezium 3's defaults."""
    assert unwrap_options.parse({}) == UnwrapOptions()
    assert UnwrapOptions().delete_tombstone_handling_mode is DeleteMode.TOMBSTONE


def test_every_option_is_read_from_strings_as_a_connector_has_them() -> None:
    """Strings, with the transformation's prefix; case is ignored where Debezium ignores it."""
    parsed = unwrap_options.parse(
        {
            "transforms.unwrap.type": "io.debezium.connector.mongodb.transforms.ExtractNewDocumentState",
            "transforms.unwrap.array.encoding": "DOCUMENT",
            "transforms.unwrap.flatten.struct": " True ",
            "transforms.unwrap.flatten.struct.delimiter": "",
            "transforms.unwrap.delete.tombstone.handling.mode": "rewrite-with-tombstone",
            "transforms.unwrap.delete.tombstone.handling.mode.rewrite-with-id": "true",
            "transforms.unwrap.add.fields": " op , source.ts_ms:at, id",
            "transforms.unwrap.add.fields.prefix": "",
            "transforms.unwrap.add.headers": "updateDescription.updatedFields,ord,updateDescription",
            "transforms.unwrap.add.headers.prefix": "h.",
            "transforms.unwrap.field.name.adjustment.mode": "avro_unicode",
        }
    )
    assert parsed == UnwrapOptions(
        flatten_struct=True,
        flatten_struct_delimiter="",
        delete_tombstone_handling_mode=DeleteMode.REWRITE_WITH_TOMBSTONE,
        rewrite_with_id=True,
        add_fields=(
            AddedField("", "op", "op"),
            AddedField("source", "ts_ms", "at"),
            AddedField("transaction", "id", "id"),
        ),
        add_headers=(
            AddedField("updateDescription", "updatedFields", "h.updateDescription_updatedFields"),
            AddedField("source", "ord", "h.ord"),
            AddedField("updateDescription", "updateDescription", "h.updateDescription"),
        ),
        field_names=FieldNames(FieldNameAdjustment.AVRO_UNICODE),
        field_values=FieldValues(ArrayEncoding.DOCUMENT),
    )


def test_settings_may_hold_booleans_and_lists() -> None:
    """YAML has both, and they mean the same as the strings."""
    parsed = unwrap_options.parse({"flatten.struct": True, "add.fields": ["op", "source.ts_ms"]})
    assert parsed == unwrap_options.parse({"flatten.struct": "true", "add.fields": "op,source.ts_ms"})


@pytest.mark.parametrize(
    ("older", "mode"),
    [
        ({"delete.handling.mode": "drop"}, DeleteMode.DROP),
        ({"delete.handling.mode": "none"}, DeleteMode.TOMBSTONE),
        ({"delete.handling.mode": "rewrite"}, DeleteMode.REWRITE),
        ({"drop.tombstones": "true"}, DeleteMode.DROP),
        ({"drop.tombstones": "false"}, DeleteMode.OLDER_DROP_WITH_TOMBSTONE),
        ({"drop.tombstones": "false", "delete.handling.mode": "none"}, DeleteMode.OLDER_NONE_WITH_TOMBSTONE),
        ({"drop.tombstones": "false", "delete.handling.mode": "rewrite"}, DeleteMode.REWRITE_WITH_TOMBSTONE),
    ],
)
def test_older_delete_options_decide_together_where_the_new_one_is_not_given(
    older: dict[str, str], mode: DeleteMode
) -> None:
    """The defaults are `drop.tombstones: true` and `delete.handling.mode: drop`; today's option takes precedence."""
    assert unwrap_options.parse(older).delete_tombstone_handling_mode is mode
    assert unwrap_options.parse({**older, "delete.tombstone.handling.mode": ""}).delete_tombstone_handling_mode is mode
    newer = {**older, "delete.tombstone.handling.mode": "tombstone"}
    assert unwrap_options.parse(newer).delete_tombstone_handling_mode is DeleteMode.TOMBSTONE


def test_other_older_options_have_today_s_meaning() -> None:
    """Names are adjusted for Avro, a header `__op` and fields of `source` are added. An explicit adjustment mode takes precedence."""
    parsed = unwrap_options.parse(
        {
            "sanitize.field.names": "true",
            "operation.header": "true",
            "add.source.fields": "ts_ms,version",
            "add.fields.prefix": "x_",
        }
    )
    assert parsed.field_names.adjustment is FieldNameAdjustment.AVRO
    assert parsed.add_headers == (AddedField("", "op", "__op"),)
    assert parsed.add_fields == (AddedField("source", "ts_ms", "__ts_ms"), AddedField("source", "version", "__version"))
    both = unwrap_options.parse({"sanitize.field.names": "true", "field.name.adjustment.mode": "none"})
    assert both.field_names.adjustment is FieldNameAdjustment.NONE


def test_a_colon_without_a_new_name_changes_nothing() -> None:
    """As in Debezium, where a connector starts with it."""
    assert unwrap_options.parse({"add.fields": "op:, source.ts_ms:"}) == unwrap_options.parse(
        {"add.fields": "op,source.ts_ms"}
    )


def test_a_name_is_added_once() -> None:
    """Repetitions in `add.fields`, and `operation.header` beside `op`, do not add a field twice."""
    parsed = unwrap_options.parse({"add.fields": "op,op", "add.headers": "op", "operation.header": "true"})
    assert parsed.add_fields == (AddedField("", "op", "__op"),)
    assert parsed.add_headers == (AddedField("", "op", "__op"),)


def test_blanks_around_the_delimiter_do_not_count_but_those_of_a_prefix_do() -> None:
    """As Kafka Connect and Debezium read them."""
    parsed = unwrap_options.parse({"flatten.struct.delimiter": " - ", "add.fields.prefix": " x ", "add.fields": "op"})
    assert (parsed.flatten_struct_delimiter, parsed.add_fields) == ("-", (AddedField("", "op", " x op"),))
    assert unwrap_options.parse({"flatten.struct.delimiter": " "}).flatten_struct_delimiter == ""


def test_two_fields_with_one_name_are_both_added() -> None:
    """A record has each header as often as it is given; the current options go before the older ones."""
    parsed = unwrap_options.parse({"add.fields": "op:x,ts_ms:x,op:x,ts_ms", "add.source.fields": "ts_ms,db"})
    assert parsed.add_fields == (
        AddedField("", "op", "__x"),
        AddedField("", "ts_ms", "__x"),
        AddedField("", "ts_ms", "__ts_ms"),
        AddedField("source", "db", "__db"),
    )
    headers = unwrap_options.parse({"add.headers": "op:x,ts_ms:x,op:x"}).add_headers
    assert headers == (AddedField("", "op", "__x"), AddedField("", "ts_ms", "__x"), AddedField("", "op", "__x"))


def test_all_mistakes_are_refused_at_once() -> None:
    """Each problem names the option, the allowed values, and the nearest valid name."""
    assert problems(
        {
            "array.encoding": "documnt",
            "delete.tombstone.handling.mode": "nonsense",
            "flatten.struct": "maybe",
            "add.fields": "op:a:b",
            "flaten.struct": "true",
        }
    ) == [
        "silver.defaults.array.encoding: one of array, document is expected, found documnt (did you mean document?)",
        "silver.defaults.flatten.struct: one of true, false is expected, found maybe",
        "silver.defaults.delete.tombstone.handling.mode: one of drop, tombstone, rewrite, rewrite-with-tombstone, "
        "delete-to-tombstone is expected, found nonsense",
        "silver.defaults.add.fields: each entry is expected as [struct.]field[:new_name], found op:a:b",
        "silver.defaults.flaten.struct: there is no such option (did you mean flatten.struct?)",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"add.fields": 5},
        {"add.headers": ":op"},
        {"flatten.struct.delimiter": ["_"]},
        {"delete.handling.mode": "tombstone"},
        {"sanitize.field.names": "yes"},
        {"drop.tombstones": "no"},
        {"field.name.adjustment.mode": "Avro!"},
        {"negate": "perhaps"},
        {"array.encoding": 5},
    ],
)
def test_a_value_outside_its_set_is_refused(options: dict[str, object]) -> None:
    """It is one problem, which names the option."""
    [problem] = problems(options)
    assert problem.startswith(f"silver.defaults.{next(iter(options))}: ")


def test_what_kafka_and_other_transformations_read_is_accepted_and_named() -> None:
    """They have no effect, and a warning says why."""
    options = dict.fromkeys(unwrap_options.IGNORED, "true")
    assert unwrap_options.parse(options) == UnwrapOptions()
    assert [text.split(":")[0] for text in unwrap_options.ignored(options)] == list(unwrap_options.IGNORED)[1:]


@pytest.mark.parametrize("mode", list(DeleteMode))
def test_a_delete_does_one_thing_to_a_row_and_one_to_a_record(mode: DeleteMode) -> None:
    """In a table exactly one of the three answers holds; a record is rewritten, dropped, or a key with a null value."""
    assert [mode.removes_row, mode.marks_deleted, mode.keeps_row].count(True) == 1
    assert not (mode.rewrites_delete and mode.drops_delete)


@pytest.mark.parametrize(
    ("name", "avro", "avro_unicode"),
    [
        ("_id", "_id", "_u005fid"),
        ("a.b", "a_b", "a_u002eb"),
        ("1a", "_1a", "_u0031a"),
        ("a1", "a1", "a1"),
        ("é", "_", "_u00e9"),
        ("ĉ", "_", "_u109"),
        ("\t", "_", "_u009"),
        ("😊", "__", "_ud83d_ude0a"),
        ("", "", ""),
    ],
)
def test_names_are_adjusted_as_debezium_does(name: str, avro: str, avro_unicode: str) -> None:
    """By characters of UTF-16; codes of three digits are not padded, as in Debezium."""
    assert FieldNameAdjustment.NONE.adjusted(name) == name
    assert FieldNameAdjustment.AVRO.adjusted(name) == avro
    assert FieldNameAdjustment.AVRO_UNICODE.adjusted(name) == avro_unicode
