"""Shapes out of Spark's `schema_of_variant` and `schema_of_variant_agg`, in which the wrappers of Extended
JSON show.

    OBJECT<_id: OBJECT<`$oid`: STRING>, n: BIGINT, tags: ARRAY<STRING>, total: DECIMAL(5,2)>

A whole number is an int32, since int64 has its wrapper; DECIMAL and DOUBLE are doubles, among which there
may be int32; VARIANT is a mix that nobody has looked into; VOID is null.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import (
    BASE,
    MAX_FIELDS,
    NOTHING,
    WRAPPERS,
    Array,
    ColumnType,
    DocumentSchema,
    Kind,
    Map,
    Pins,
    Scalar,
    Shape,
    Struct,
    groups,
    values,
)

_TOKEN = re.compile(r"OBJECT<|ARRAY<|VARIANT|VOID|STRING|BIGINT|BOOLEAN|DOUBLE|FLOAT|DECIMAL\(\d+,\d+\)")
_NAME = re.compile(r"`((?:[^`]|``)*)`|[^`:<>, ]+")
_SCALARS = {"STRING": Kind.STRING, "BIGINT": Kind.INT32, "BOOLEAN": Kind.BOOLEAN, "DOUBLE": Kind.DOUBLE}


def shape(text: str, *, mark: str = "") -> Shape:
    """The shape that the text describes; every kind has the one mark. Raises ValueError for any other
    text.
    """
    try:
        found, end = _shape(text, 0, mark)
    except IndexError:
        raise ValueError("no schema of a variant: it has no end") from None
    if end != len(text):
        raise ValueError("no schema of a variant: something follows it")
    return found


def _shape(text: str, at: int, mark: str) -> tuple[Shape, int]:
    token = _TOKEN.match(text, at)
    if token is None:
        raise ValueError("no schema of a variant: no type where one is expected")
    match token[0]:
        case "OBJECT<":
            return _object(text, token.end(), mark)
        case "ARRAY<":
            element, end = _shape(text, token.end(), mark)
            holds = element.opaque or bool(element.kinds.keys() - NOTHING)
            return Shape({Kind.ARRAY if holds else Kind.EMPTY_ARRAY: mark}, element=element), end + 1
        case "VARIANT":
            return Shape(opaque=True), token.end()
        case "VOID":
            return Shape(), token.end()
        case _:
            return Shape({_SCALARS.get(token[0], Kind.DOUBLE): mark}), token.end()


def _object(text: str, at: int, mark: str) -> tuple[Shape, int]:
    members: dict[str, Shape] = {}
    while text[at] != ">":
        name = _NAME.match(text, at)
        if name is None:
            raise ValueError("no schema of a variant: no name where one is expected")
        key = name[0] if name[1] is None else name[1].replace("``", "`")
        members[key], at = _shape(text, name.end() + 2, mark)
        at += 2 if text.startswith(", ", at) else 0
    return _of_members(members, mark), at + 1


def _of_members(members: dict[str, Shape], mark: str) -> Shape:
    """What objects of these keys were: wrappers by theirs, and documents if there are keys left."""
    found = Shape()
    for key, member in members.items():
        wrapper = WRAPPERS.get(key)
        if wrapper is not None:
            found.kinds[wrapper] = mark
        elif key != "$scope":
            found.fields[column_names.unescaped(key)] = member
    if "$code" in members and "$scope" in members:
        found.kinds[Kind.CODE_WITH_SCOPE] = mark
    elif "$scope" in members:
        found.fields["$scope"] = members["$scope"]
    holds = any(member.opaque or member.kinds.keys() - NOTHING for member in found.fields.values())
    if holds:
        found.kinds[Kind.DOCUMENT] = mark
    elif found.fields or not members:
        found.kinds[Kind.EMPTY_DOCUMENT] = mark
    return found


Node = tuple[str | None, ...]
"""Where a value stands: the names of fields, None for the elements of an array."""


class NotAddressable(Exception):
    """The kinds inside a document that is used as a map stand at no path."""


def unsettled(
    schema: DocumentSchema, seen: Shape, *, pins: Pins | None = None, resolved: Collection[Node] = frozenset()
) -> list[Node]:
    """Where the schema depends on the order in which kinds were seen, and the shape does not know it: the
    topmost nodes.

    `resolved` are the nodes whose kinds have their own marks. Raises `NotAddressable` where the values of a
    map would have to be looked into.
    """
    return [*_Unsettled(pins or {}, resolved).at(schema.struct, seen, ())]


class _Unsettled:
    """One search: what is pinned, and what has been looked into."""

    def __init__(self, pins: Pins, resolved: Collection[Node]) -> None:
        self.pins = pins
        self.resolved = resolved

    def at(self, type_: ColumnType | None, seen: Shape, node: Node) -> Iterator[Node]:
        """The nodes below one that has a column of this type."""
        if type_ is None:
            yield from self.fresh(seen, node)
        elif _is_final(type_):
            return
        elif node not in self.resolved and _is_mixed(type_, seen):
            yield node
        elif isinstance(type_, Struct):
            for name, below in seen.fields.items():
                item = type_.by_name.get(name)
                yield from self.at(None if item is None else item.type, below, (*node, name))
        elif isinstance(type_, Array):
            yield from self.at(type_.element, seen.element or Shape(), (*node, None))
        elif isinstance(type_, Map):
            self._whole(self.at(type_.value, values(seen), (*node, "*")))

    def fresh(self, seen: Shape, node: Node) -> Iterator[Node]:
        """The nodes below one that has no column yet."""
        pin = self.pins.get(tuple(name for name in node if name is not None))
        if pin is not None and (not pin.is_map or pin.type is not None):
            return
        if node not in self.resolved and _is_mixed(None, seen):
            yield node
            return
        first = next(iter(groups(seen)), [])
        if first == [Kind.ARRAY] and seen.element is not None:
            yield from self.fresh(seen.element, (*node, None))
        elif first == [Kind.DOCUMENT] and (pin is not None or len(seen.fields) > MAX_FIELDS):
            self._whole(self.fresh(values(seen), (*node, "*")))
        elif first == [Kind.DOCUMENT]:
            for name, below in seen.fields.items():
                yield from self.fresh(below, (*node, name))

    def _whole(self, nodes: Iterator[Node]) -> None:
        if next(nodes, None) is not None:
            raise NotAddressable


def _is_final(type_: ColumnType) -> bool:
    """Whether nothing that is seen changes the type."""
    match type_:
        case Array(inner) | Map(inner):
            return _is_final(inner)
        case Struct() | Scalar.INT:
            return False
        case _:
            return True


def _is_mixed(type_: ColumnType | None, seen: Shape) -> bool:
    """Whether kinds meet at this very node whose order matters for its type."""
    if seen.opaque:
        return True
    kinds = seen.kinds.keys() - NOTHING
    if type_ is Scalar.INT:
        return Kind.INT64 in kinds and Kind.NON_FINITE in kinds
    if type_ is not None or not kinds:
        return False
    if kinds & {Kind.DOCUMENT, Kind.ARRAY, Kind.CODE_WITH_SCOPE}:
        return len(kinds) > 1
    return len({BASE[kind] for kind in kinds}) > 1


_KINDS: Mapping[str, Kind] = {**WRAPPERS, "$code+$scope": Kind.CODE_WITH_SCOPE}


def of_kinds(found: Iterable[tuple[str, str, str]]) -> Shape:
    """The shape of one node out of what was found there, as (kind, schema of the variants of that kind,
    least mark).

    A kind is a wrapper's key, `$code+$scope`, or anything else for plain values.
    """
    merged = Shape()
    for name, text, mark in found:
        wrapper = _KINDS.get(name)
        if wrapper is None:
            merged.add(shape(text, mark=mark))
        else:
            merged.kinds[wrapper] = mark
    return merged


def replaced(seen: Shape, node: Node, by: Shape) -> None:
    """Puts at a node what a closer look has found there."""
    for name in node[:-1]:
        seen = _below(seen, name)
    if node[-1] is None:
        seen.element = by
    else:
        seen.fields[node[-1]] = by


def _below(seen: Shape, name: str | None) -> Shape:
    if name is not None:
        return seen.fields[name]
    return seen.element or Shape()
