"""Shapes out of Spark's schemas of variants."""

from __future__ import annotations

import pytest

from cdc_core.schema import document_schema
from cdc_core.schema import variant_shape as variant_shapes
from cdc_core.schema.document_schema import Kind, Shape


def kinds(shape: Shape) -> set[Kind]:
    """The kinds at the root."""
    return set(shape.kinds)


def test_wrappers_show() -> None:
    """An object of a wrapper's key is that wrapper; keys that are left are a document's."""
    shape = variant_shapes.shape(
        "OBJECT<_id: OBJECT<`$oid`: STRING>, m: OBJECT<`$numberLong`: STRING, a: BIGINT>, "
        "c: OBJECT<`$code`: STRING, `$scope`: OBJECT<x: BIGINT>>, u: OBJECT<`$undefined`: BOOLEAN>>"
    )
    assert kinds(shape) == {Kind.DOCUMENT}
    assert kinds(shape.fields["_id"]) == {Kind.OBJECT_ID}
    assert kinds(shape.fields["m"]) == {Kind.INT64, Kind.DOCUMENT}
    assert kinds(shape.fields["c"]) == {Kind.CODE, Kind.CODE_WITH_SCOPE}
    assert kinds(shape.fields["u"]) == {Kind.UNDEFINED}


def test_names_of_any_kind() -> None:
    """Quoted names are read, escaped keys become the field's own name."""
    shape = variant_shapes.shape("OBJECT<``: BIGINT, `<x: BIGINT>`: STRING, `a``b, c`: BOOLEAN, `$$oid`: DECIMAL(2,1)>")
    assert {name: kinds(below) for name, below in shape.fields.items()} == {
        "": {Kind.INT32},
        "<x: BIGINT>": {Kind.STRING},
        "a`b, c": {Kind.BOOLEAN},
        "$oid": {Kind.DOUBLE},
    }


def test_what_holds_nothing_is_empty() -> None:
    """Arrays and documents from which no column can come count as empty, at any depth."""
    shape = variant_shapes.shape("OBJECT<a: ARRAY<VOID>, b: OBJECT<c: ARRAY<ARRAY<VOID>>>, d: OBJECT<>, e: VOID>")
    assert kinds(shape) == {Kind.EMPTY_DOCUMENT}
    assert kinds(shape.fields["a"]) == {Kind.EMPTY_ARRAY}
    assert kinds(shape.fields["b"]) == kinds(shape.fields["d"]) == {Kind.EMPTY_DOCUMENT}
    assert kinds(shape.fields["e"]) == set()


@pytest.mark.parametrize("text", ["", "INT", "OBJECT<a BIGINT>", "BIGINT, BIGINT", "OBJECT<a: BIGINT"])
def test_other_texts_are_refused(text: str) -> None:
    """A text that is no schema of a variant is no shape."""
    with pytest.raises(ValueError):
        variant_shapes.shape(text)


def test_only_mixes_that_matter_are_unsettled() -> None:
    """A mix is looked into where the column's type may depend on it, and nowhere else."""
    known = {"_id": 1, "i": 1, "s": "x", "d": {"n": 1}, "l": [1], "t": ["x"], "b": {"$numberLong": "5"}}
    schema, _ = document_schema.join(document_schema.EMPTY, document_schema.observe(known))
    seen = variant_shapes.shape(
        "OBJECT<_id: BIGINT, i: VARIANT, s: VARIANT, d: OBJECT<n: VARIANT, m: VARIANT>, l: ARRAY<VARIANT>, "
        "t: ARRAY<VARIANT>, b: VARIANT, f: OBJECT<`$date`: OBJECT<`$numberLong`: STRING>, `$oid`: STRING>>"
    )
    nodes = {("i",), ("d", "n"), ("d", "m"), ("l", None), ("f",)}
    assert set(variant_shapes.unsettled(schema, seen)) == nodes


def test_pins_settle() -> None:
    """A pinned path needs no look; the values of a map cannot be looked at."""
    seen = variant_shapes.shape("OBJECT<a: VARIANT, m: OBJECT<x: BIGINT, y: STRING>>")
    pins = document_schema.parse_pins({"a": "string"})
    assert variant_shapes.unsettled(document_schema.EMPTY, seen, pins=pins) == []
    pins = document_schema.parse_pins({"a": "string", "m": "map"})
    with pytest.raises(variant_shapes.NotAddressable):
        variant_shapes.unsettled(document_schema.EMPTY, seen, pins=pins)
