"""How one value of a document is read by `from_json`, and the SQL that turns it into its column's value.

A `Part` is built from a column type and the shape of the batch: which kinds of value stand at the path
decides the type that `from_json` is given. Whatever it cannot decide exactly it declares *hard*, see
`typed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cdc_core.schema import document_schema
from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import (
    PARTS,
    Array,
    ColumnType,
    Decimal,
    Field,
    Kind,
    Map,
    Scalar,
    Shape,
    Struct,
    ddl,
)
from cdc_core.sql.names import identifier, literal

ENTRIES = "ARRAY<STRUCT<path: STRING, text: STRING>>"
"""The type of what did not fit, before it becomes a map."""

UNSAFE = r'^\{"\$|[0-9]E-?[0-9]|\\u'
"""Text from `from_json` that Extended JSON may write otherwise: a wrapper at its start, doubles with
exponents, escapes.
"""

NEGATIVE_ZERO = r"-0\.0(?![0-9])"
"""What a VARIANT does not keep."""

_EXACT_IN_DOUBLE = 2**53
_KEYS: Mapping[Kind, str] = {kind: key for key, kind in reversed(list(document_schema.WRAPPERS.items()))} | {
    Kind.INT32: "$numberInt",
    Kind.CODE_WITH_SCOPE: "$code",
}


def escaped(name: str) -> str:
    """The key that Extended JSON has for a field's own name."""
    return f"${name}" if column_names.unescaped(f"${name}") == name else name


def at(raw: str, column: str) -> str:
    """A field of a struct."""
    return f"{raw}.{identifier(column)}"


@dataclass(frozen=True)
class Path:
    """The SQL of a dotted path: a literal, or a literal that grows by the indexes of arrays."""

    pieces: tuple[str, ...] = ()
    empty: bool = True

    def name(self, name: str) -> Path:
        """The path of a field below."""
        text = name if self.empty else f".{name}"
        return Path((*self.pieces, literal(text)), empty=False)

    def sql(self, piece: str) -> Path:
        """The path of an element below, whose index or key is an SQL string."""
        return Path((*self.pieces, "'.'", piece), empty=False)

    def __str__(self) -> str:
        return self.pieces[0] if len(self.pieces) == 1 else f"concat({', '.join(self.pieces)})"


def entry(test: str, path: Path, text: str) -> str:
    """One value that did not fit where the test holds, as `ENTRIES`."""
    return f"IF({test}, array(named_struct('path', {path}, 'text', {text})), CAST(array() AS {ENTRIES}))"


class Part:
    """How one value is read.

    `ddl` is its type for `from_json`, `named` the same with the names that the SQL uses; `plain`: the raw
    value is the column's value as it is; `risky`: some row of the batch may be hard; `whole`: tests over
    the document's text that make its row hard.
    """

    ddl: str
    named: str
    plain: bool
    risky: bool
    whole: tuple[str, ...]

    def value(self, raw: str) -> str:
        """The SQL of the column's value."""
        raise NotImplementedError

    def misfits(self, raw: str, path: Path) -> list[str]:
        """What did not fit and is rescued natively: SQL expressions of type `ENTRIES`."""
        return []

    def hard(self, raw: str) -> list[str]:
        """SQL tests that send the row to the exact path."""
        return []


@dataclass(frozen=True)
class Leaf(Part):
    """A value that the SQL reads in one step."""

    ddl: str
    named: str
    to_value: Callable[[str], str] = str
    to_misfits: Callable[[str, Path], list[str]] = lambda raw, path: []
    to_hard: Callable[[str], list[str]] = lambda raw: []
    plain: bool = False
    risky: bool = False
    whole: tuple[str, ...] = ()

    def value(self, raw: str) -> str:
        return self.to_value(raw)

    def misfits(self, raw: str, path: Path) -> list[str]:
        return self.to_misfits(raw, path)

    def hard(self, raw: str) -> list[str]:
        return self.to_hard(raw)


@dataclass(frozen=True)
class Document(Part):
    """A document: `known` fields have columns, `texts` have none and are rescued, `refused` ones make the
    row hard.
    """

    known: tuple[tuple[Field, Part | None], ...]
    texts: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...]
    others: bool

    @cached_property
    def _members(self) -> list[tuple[str, str, str, str]]:
        """Key, column, type for `from_json`, the same named."""
        members = [(escaped(item.name), item.column, part.ddl, part.named) for item, part in self.known if part is not None]
        members += [(escaped(name), column, "STRING", "STRING") for name, column in self.texts]
        members += [(key, column, "STRING", "STRING") for key, column in self.refused]
        return members or [("\u0001nothing", "nothing", "STRING", "STRING")]

    @cached_property
    def ddl(self) -> str:  # type: ignore[override]
        return f"STRUCT<{self.fields_ddl}>"

    @cached_property
    def fields_ddl(self) -> str:
        """The fields as a struct's inside."""
        return ", ".join(f"{identifier(key)}: {type_}" for key, _, type_, _ in self._members)

    @cached_property
    def fields_named(self) -> str:
        """The fields as a struct's inside, by the names that the SQL uses."""
        members = ((column, named) for _, column, _, named in self._members)
        return ", ".join(f"{identifier(column)}: {named}" for column, named in members)

    @cached_property
    def named(self) -> str:  # type: ignore[override]
        return f"STRUCT<{self.fields_named}>"

    @cached_property
    def plain(self) -> bool:  # type: ignore[override]
        has_others = self.texts or self.refused
        return not has_others and all(part is not None and part.plain for _, part in self.known)

    @cached_property
    def risky(self) -> bool:  # type: ignore[override]
        is_risky = any(part is not None and part.risky for _, part in self.known)
        return is_risky or self.others or bool(self.refused)

    @cached_property
    def whole(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(test for _, part in self.known if part is not None for test in part.whole)

    def value(self, raw: str) -> str:
        if self.plain:
            return raw
        fields = ", ".join(f"{literal(item.column)}, {field_value(item, part, raw)}" for item, part in self.known)
        return f"IF({raw} IS NULL, NULL, named_struct({fields}))"

    def misfits(self, raw: str, path: Path) -> list[str]:
        found = [
            test
            for item, part in self.known
            if part is not None
            for test in part.misfits(at(raw, item.column), path.name(item.name))
        ]
        for name, column in self.texts:
            found.append(entry(f"{at(raw, column)} IS NOT NULL", path.name(name), at(raw, column)))
        return found

    def hard(self, raw: str) -> list[str]:
        found = [test for item, part in self.known if part is not None for test in part.hard(at(raw, item.column))]
        found += [f"{at(raw, column)} RLIKE {literal(UNSAFE)}" for _, column in self.texts]
        return found + [f"{at(raw, column)} IS NOT NULL" for _, column in self.refused]


def field_value(item: Field, part: Part | None, raw: str) -> str:
    """The SQL of a field's value in the struct `raw`, null where the batch has none."""
    return f"CAST(NULL AS {ddl(item.type)})" if part is None else part.value(at(raw, item.column))


@dataclass(frozen=True)
class Elements(Part):
    """An array. `element` is None where only empty ones were seen."""

    type: Array
    element: Part | None
    depth: int
    others: bool

    @cached_property
    def ddl(self) -> str:  # type: ignore[override]
        return f"ARRAY<{'STRING' if self.element is None else self.element.ddl}>"

    @cached_property
    def named(self) -> str:  # type: ignore[override]
        return f"ARRAY<{'STRING' if self.element is None else self.element.named}>"

    @cached_property
    def plain(self) -> bool:  # type: ignore[override]
        return self.element is not None and self.element.plain

    @cached_property
    def risky(self) -> bool:  # type: ignore[override]
        return self.others or (self.element is not None and self.element.risky)

    @cached_property
    def whole(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.element is None else self.element.whole

    def value(self, raw: str) -> str:
        if self.plain:
            return raw
        x = f"x{self.depth}"
        value = f"CAST(NULL AS {ddl(self.type.element)})" if self.element is None else self.element.value(x)
        return f"transform({raw}, {x} -> {value})"

    def misfits(self, raw: str, path: Path) -> list[str]:
        x, i = f"x{self.depth}", f"i{self.depth}"
        inner = [] if self.element is None else self.element.misfits(x, path.sql(f"CAST({i} AS STRING)"))
        if not inner:
            return []
        found = f"flatten(transform({raw}, ({x}, {i}) -> concat({', '.join(inner)})))"
        return [f"coalesce({found}, CAST(array() AS {ENTRIES}))"]

    def hard(self, raw: str) -> list[str]:
        x = f"x{self.depth}"
        inner = [] if self.element is None else self.element.hard(x)
        return [f"exists({raw}, {x} -> {any_of(inner)})"] if inner else []


@dataclass(frozen=True)
class Entries(Part):
    """A document used as a map. `item` is None where only empty ones were seen."""

    type: Map
    item: Part | None
    depth: int
    others: bool

    @cached_property
    def ddl(self) -> str:  # type: ignore[override]
        return f"MAP<STRING, {'STRING' if self.item is None else self.item.ddl}>"

    @cached_property
    def named(self) -> str:  # type: ignore[override]
        return f"MAP<STRING, {'STRING' if self.item is None else self.item.named}>"

    @cached_property
    def plain(self) -> bool:  # type: ignore[override]
        return self.item is not None and self.item.plain

    @cached_property
    def risky(self) -> bool:  # type: ignore[override]
        return True

    @cached_property
    def whole(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.item is None else self.item.whole

    def value(self, raw: str) -> str:
        if self.plain:
            return raw
        k, x = f"k{self.depth}", f"x{self.depth}"
        value = f"CAST(NULL AS {ddl(self.type.value)})" if self.item is None else self.item.value(x)
        return f"transform_values({raw}, ({k}, {x}) -> {value})"

    def misfits(self, raw: str, path: Path) -> list[str]:
        e = f"e{self.depth}"
        inner = [] if self.item is None else self.item.misfits(f"{e}.value", path.sql(f"{e}.key"))
        if not inner:
            return []
        found = f"flatten(transform(map_entries({raw}), {e} -> concat({', '.join(inner)})))"
        return [f"coalesce({found}, CAST(array() AS {ENTRIES}))"]

    def hard(self, raw: str) -> list[str]:
        x, k = f"x{self.depth}", f"k{self.depth}"
        wrappers = ", ".join(literal(key) for key in document_schema.WRAPPERS)
        tests = [f"exists(map_keys({raw}), {k} -> {k} LIKE {literal('$$%')} OR {k} IN ({wrappers}))"]
        inner = [] if self.item is None else self.item.hard(x)
        return tests + ([f"exists(map_values({raw}), {x} -> {any_of(inner)})"] if inner else [])


def any_of(tests: Iterable[str]) -> str:
    """True where one of the tests is; never null."""
    return " OR ".join(f"coalesce({test}, false)" for test in dict.fromkeys(tests))


# --- building -----------------------------------------------------------------------------------------------


def document(type_: Struct, shape: Shape, *, text: str, depth: int = 0) -> Document:
    """How the documents of one path are read."""
    taken = column_names.Taken(item.column for item in type_.fields)
    known = tuple(
        (item, part(item.type, _below(shape, shape.fields.get(item.name)), text=text, depth=depth)) for item in type_.fields
    )
    texts, refused = [], []
    for name, seen in shape.fields.items():
        if name in type_.by_name or not (seen.kinds or seen.opaque):
            continue
        if _may_be_scalar(seen):
            refused.append((escaped(name), taken.unique("refused")))
        else:
            texts.append((name, taken.unique("text")))
    refused += [(key, taken.unique("refused")) for key in (*_wrapper_keys(shape), *_not_escaped(type_))]
    others = bool(shape.opaque or shape.kinds.keys() - {Kind.DOCUMENT, Kind.EMPTY_DOCUMENT})
    return Document(known=known, texts=tuple(texts), refused=tuple(refused), others=others)


def part(type_: ColumnType, shape: Shape | None, *, text: str, depth: int) -> Part | None:
    """How the values of one column are read; None where the batch has none and no type reads nothing as it
    is.
    """
    if shape is None or not (shape.kinds or shape.opaque):
        return _plain(_UNSEEN[type_]) if isinstance(type_, Scalar) and type_ in _UNSEEN else None
    match type_:
        case Struct():
            return document(type_, shape, text=text, depth=depth)
        case Array(element):
            inner = part(element, _below(shape, shape.element), text=text, depth=depth + 1)
            others = bool(shape.opaque or shape.kinds.keys() - {Kind.ARRAY, Kind.EMPTY_ARRAY})
            return Elements(type_, inner, depth, others)
        case Map(item):
            inner = part(item, _below(shape, document_schema.values(shape)), text=text, depth=depth + 1)
            return Entries(type_, inner, depth, True)
        case Decimal():
            return _decimal(type_, shape, text)
        case _:
            return _SCALARS[type_](shape, text)


def _below(shape: Shape, seen: Shape | None) -> Shape | None:
    """What was seen inside a value of this shape: in a mix that nobody has looked into there may be anything."""
    return Shape(opaque=True) if shape.opaque else seen


_UNSEEN: Mapping[Scalar, str] = {
    Scalar.INT: "INT",
    Scalar.BIGINT: "BIGINT",
    Scalar.DOUBLE: "DOUBLE",
    Scalar.STRING: "STRING",
    Scalar.TEXT: "STRING",
    Scalar.BOOLEAN: "BOOLEAN",
}


def _plain(type_: str) -> Leaf:
    return Leaf(type_, type_, plain=True)


def _may_be_scalar(shape: Shape) -> bool:
    containers = {Kind.EMPTY_DOCUMENT, Kind.EMPTY_ARRAY}
    return shape.opaque or bool(shape.kinds.keys() - containers)


def _wrapper_keys(shape: Shape) -> list[str]:
    """The keys of wrappers that stand, or may stand, where a document is expected."""
    if shape.opaque:
        return list(document_schema.WRAPPERS)
    wrapped = (seen for seen in shape.kinds if seen in _KEYS and seen is not Kind.INT32)
    return list(dict.fromkeys(_KEYS[seen] for seen in wrapped))


def _not_escaped(type_: Struct) -> list[str]:
    """Names that Extended JSON escapes although they are no wrappers (`$ref`), as somebody else may have
    written them.
    """
    names = (item.name for item in type_.fields)
    return [name for name in names if escaped(name) != name and name not in document_schema.WRAPPERS]


def _only(shape: Shape, *kinds: Kind) -> bool:
    """Whether nothing but these kinds was seen."""
    return not shape.opaque and shape.kinds.keys() <= set(kinds)


@dataclass(frozen=True)
class _Wrapper:
    """One wrapper: its key, the type of what it holds with the keys and by other names, and the SQL of its
    value.
    """

    key: str
    ddl: str
    named: str
    value: Callable[[str], str]


def _wrapped(shape: Shape, wrappers: Mapping[Kind, _Wrapper]) -> Leaf:
    """A column whose values all come in wrappers; anything else there is hard, but for `{}`, which is
    rescued.
    """
    used = {seen: wrapper for seen, wrapper in wrappers.items() if shape.opaque or seen in shape.kinds}
    used = used or dict(list(wrappers.items())[:1])
    keys = {wrapper.key for wrapper in used.values()}
    strangers = [key for key in _wrapper_keys(shape) if key not in keys]
    if "$code" in keys and not any(wrapper.key == "$scope" for wrapper in used.values()):
        strangers.append("$scope")
    members = [(wrapper.key, wrapper.ddl, wrapper.named) for wrapper in used.values()]
    members += [(key, "STRING", "STRING") for key in strangers]
    columns = [f"w{number}" for number in range(len(members))]
    values = [(wrapper, column) for wrapper, column in zip(used.values(), columns)]
    has_others = not _only(shape, *used, Kind.EMPTY_DOCUMENT)

    def to_value(raw: str) -> str:
        found = [wrapper.value(at(raw, column)) for wrapper, column in values]
        return found[0] if len(found) == 1 else f"coalesce({', '.join(found)})"

    def blank(raw: str) -> str:
        return f"{raw} IS NOT NULL AND " + " AND ".join(f"{at(raw, column)} IS NULL" for column in columns)

    def to_misfits(raw: str, path: Path) -> list[str]:
        return [] if has_others else [entry(blank(raw), path, "'{}'")]

    def to_hard(raw: str) -> list[str]:
        tests = [f"{at(raw, column)} IS NOT NULL" for column in columns[len(values) :]]
        if has_others:
            return [*tests, f"{raw} IS NOT NULL AND {to_value(raw)} IS NULL"]
        return [*tests, f"{raw} IS NOT NULL AND {to_value(raw)} IS NULL AND NOT ({blank(raw)})"]

    named = [f"`{column}`: {type_}" for column, (_, _, type_) in zip(columns, members)]
    return Leaf(
        ddl=f"STRUCT<{', '.join(f'`{key}`: {type_}' for key, type_, _ in members)}>",
        named=f"STRUCT<{', '.join(named)}>",
        to_value=to_value,
        to_misfits=to_misfits,
        to_hard=to_hard,
        risky=has_others,
    )


def _string_wrapper(key: str, value: Callable[[str], str] = str) -> _Wrapper:
    return _Wrapper(key, "STRING", "STRING", value)


_TEXTS: Mapping[Kind, _Wrapper] = {
    Kind.OBJECT_ID: _string_wrapper("$oid"),
    Kind.DECIMAL: _string_wrapper("$numberDecimal"),
    Kind.SYMBOL: _string_wrapper("$symbol"),
    Kind.CODE: _string_wrapper("$code"),
    Kind.MIN_KEY: _string_wrapper("$minKey", lambda raw: f"IF({raw} IS NULL, NULL, 'MinKey')"),
    Kind.MAX_KEY: _string_wrapper("$maxKey", lambda raw: f"IF({raw} IS NULL, NULL, 'MaxKey')"),
}
_LONG: Mapping[Kind, _Wrapper] = {
    Kind.INT64: _string_wrapper("$numberLong", lambda raw: f"try_cast({raw} AS BIGINT)"),
}


def _long_as_double(raw: str) -> str:
    number = f"try_cast({raw} AS BIGINT)"
    return f"IF({number} BETWEEN -{_EXACT_IN_DOUBLE} AND {_EXACT_IN_DOUBLE}, CAST({number} AS DOUBLE), NULL)"


_DOUBLE: Mapping[Kind, _Wrapper] = {
    Kind.NON_FINITE: _string_wrapper("$numberDouble", lambda raw: f"try_cast({raw} AS DOUBLE)"),
    Kind.INT64: _string_wrapper("$numberLong", _long_as_double),
}


@dataclass(frozen=True)
class _Case:
    """What a VARIANT may be: the test over its schema, and the SQL of the column's value from the variant."""

    schema: str
    value: Callable[[str], str]


_SIMPLE = (
    "BIGINT",
    "BOOLEAN",
    "STRING",
    "OBJECT<>",
    "OBJECT<`$date`: OBJECT<`$numberLong`: STRING>>",
    *(f"OBJECT<`{key}`: STRING>" for key in ("$oid", "$numberLong", "$numberDecimal", "$numberDouble")),
)
"""Variants that `to_json` writes as Extended JSON does; DECIMAL too, but for the point of a whole number."""


def _variant(cases: Sequence[_Case], text: str, *, undecided: str = "none") -> Leaf:
    """A column that finds out in each row what its value is; simple scalars that do not fit are rescued
    natively.

    `undecided` is the wrapper that may fit although its case gave no value.
    """
    simple_schemas = ", ".join(literal(schema) for schema in _SIMPLE if undecided not in schema)

    def schema(raw: str) -> str:
        return f"schema_of_variant({raw})"

    def to_value(raw: str) -> str:
        whens = " ".join(f"WHEN {schema(raw)} {case.schema} THEN {case.value(raw)}" for case in cases)
        return f"CASE {whens} END"

    def simple(raw: str) -> str:
        written = f"NOT contains(to_json({raw}), {literal(chr(92) + 'u')})"
        return f"({schema(raw)} IN ({simple_schemas}) AND {written} OR {schema(raw)} LIKE 'DECIMAL(%')"

    def unexplained(raw: str) -> str:
        return f"{raw} IS NOT NULL AND {schema(raw)} <> 'VOID' AND {to_value(raw)} IS NULL"

    def to_misfits(raw: str, path: Path) -> list[str]:
        number = f"to_json({raw})"
        is_whole = f"{schema(raw)} LIKE 'DECIMAL(%' AND NOT contains({number}, '.')"
        written = f"IF({is_whole}, concat({number}, '.0'), {number})"
        return [entry(f"{unexplained(raw)} AND {simple(raw)}", path, written)]

    def to_hard(raw: str) -> list[str]:
        return [f"{unexplained(raw)} AND NOT {simple(raw)}"]

    return Leaf(
        ddl="VARIANT",
        named="VARIANT",
        to_value=to_value,
        to_misfits=to_misfits,
        to_hard=to_hard,
        risky=True,
        whole=(f"{text} RLIKE {literal(NEGATIVE_ZERO)}",),
    )


def _in_wrapper(wrapper: _Wrapper) -> _Case:
    path = literal(f'$["{wrapper.key}"]')
    type_ = "BIGINT" if wrapper.key in ("$minKey", "$maxKey") else "STRING"
    return _Case(
        f"= {literal(f'OBJECT<`{wrapper.key}`: {type_}>')}",
        lambda raw: wrapper.value(f"try_variant_get({raw}, {path}, 'STRING')"),
    )


def _as(type_: str) -> Callable[[str], str]:
    return lambda raw: f"try_variant_get({raw}, '$', '{type_}')"


def _int(shape: Shape, text: str) -> Part:
    return _plain("INT") if _only(shape, Kind.INT32) else _variant([_Case("= 'BIGINT'", _as("INT"))], text)


def _bigint(shape: Shape, text: str) -> Part:
    if _only(shape, Kind.INT32):
        return _plain("BIGINT")
    if _only(shape, Kind.INT64, Kind.EMPTY_DOCUMENT):
        return _wrapped(shape, _LONG)
    return _variant([_Case("= 'BIGINT'", _as("BIGINT")), *map(_in_wrapper, _LONG.values())], text)


def _double(shape: Shape, text: str) -> Part:
    if _only(shape, Kind.INT32, Kind.DOUBLE):
        return _plain("DOUBLE")
    if _only(shape, Kind.INT64, Kind.NON_FINITE, Kind.EMPTY_DOCUMENT):
        leaf = _wrapped(shape, _DOUBLE)
        return replace(leaf, risky=leaf.risky or Kind.INT64 in shape.kinds)
    plain = [_Case(schema, _as("DOUBLE")) for schema in ("= 'BIGINT'", "= 'DOUBLE'", "LIKE 'DECIMAL(%'")]
    return _variant([*plain, *map(_in_wrapper, _DOUBLE.values())], text, undecided="$numberLong")


def _string(shape: Shape, text: str) -> Part:
    if _only(shape, Kind.STRING):
        return _plain("STRING")
    scalars = {Kind.STRING, Kind.INT32, Kind.DOUBLE, Kind.BOOLEAN}
    if not shape.opaque and not scalars & shape.kinds.keys():
        return _wrapped(shape, _TEXTS)
    return _variant([_Case("= 'STRING'", _as("STRING")), *map(_in_wrapper, _TEXTS.values())], text)


def _text(shape: Shape, text: str) -> Part:
    if _only(shape, Kind.STRING):
        return _plain("STRING")
    unsafe = literal(UNSAFE)
    return Leaf("STRING", "STRING", to_hard=lambda raw: [f"{raw} RLIKE {unsafe}"], plain=True, risky=True)


def _boolean(shape: Shape, text: str) -> Part:
    if _only(shape, Kind.BOOLEAN):
        return _plain("BOOLEAN")
    return _variant([_Case("= 'BOOLEAN'", _as("BOOLEAN"))], text)


def _in_range(number: str) -> str:
    return f"{number} BETWEEN {document_schema.MIN_DATE_MS} AND {document_schema.MAX_DATE_MS}"


def _milliseconds(raw: str) -> str:
    return f"try_cast({raw}.w AS BIGINT)"


def _date(raw: str) -> str:
    return f"IF({_in_range(_milliseconds(raw))}, timestamp_millis({_milliseconds(raw)}), NULL)"


_TIMES: Mapping[Kind, _Wrapper] = {
    Kind.DATE: _Wrapper("$date", "STRUCT<`$numberLong`: STRING>", "STRUCT<w: STRING>", _date),
    Kind.TIMESTAMP: _Wrapper(
        "$timestamp",
        "STRUCT<t: BIGINT, i: BIGINT>",
        "STRUCT<t: BIGINT, i: BIGINT>",
        lambda raw: f"timestamp_seconds({raw}.t)",
    ),
}


def _timestamp(shape: Shape, text: str) -> Part:
    leaf = _wrapped(shape, _TIMES)
    if Kind.DATE not in shape.kinds and not shape.opaque:
        return leaf

    def out_of_range(raw: str) -> str:
        return f"NOT ({_in_range(_milliseconds(at(raw, 'w0')))})"

    def to_misfits(raw: str, path: Path) -> list[str]:
        far = literal('{"$date":{"$numberLong":"'), literal('"}}')
        written = f"concat({far[0]}, {at(raw, 'w0')}.w, {far[1]})"
        return [*leaf.to_misfits(raw, path), entry(out_of_range(raw), path, written)]

    def to_hard(raw: str) -> list[str]:
        return [f"{test} AND NOT coalesce({out_of_range(raw)}, false)" for test in leaf.to_hard(raw)]

    return Leaf(leaf.ddl, leaf.named, leaf.to_value, to_misfits, to_hard, risky=leaf.risky)


_BINARY: Mapping[Kind, _Wrapper] = {
    Kind.BINARY: _Wrapper(
        "$binary", "STRUCT<base64: STRING>", "STRUCT<base64: STRING>", lambda raw: f"unbase64({raw}.base64)"
    )
}


def _pair(kind: Kind, scalar: Scalar, type_: str, first: str, second: str) -> Mapping[Kind, _Wrapper]:
    one, other = PARTS[scalar]

    def value(raw: str) -> str:
        built = f"named_struct({literal(one)}, {raw}.{first}, {literal(other)}, {raw}.{second})"
        return f"IF({raw}.{first} IS NULL OR {raw}.{second} IS NULL, NULL, {built})"

    return {kind: _Wrapper(_KEYS[kind], type_, _pair_named(type_), value)}


def _pair_named(type_: str) -> str:
    return type_.replace("`$ref`", "a").replace("`$id`", "b").replace("`$oid`", "c")


_REGEX = _pair(Kind.REGEX, Scalar.REGEX, "STRUCT<pattern: STRING, options: STRING>", "pattern", "options")
_POINTER = _pair(Kind.DB_POINTER, Scalar.DB_POINTER, "STRUCT<`$ref`: STRING, `$id`: STRUCT<`$oid`: STRING>>", "a", "b.c")


def _code_with_scope(shape: Shape, text: str) -> Part:
    """A struct of two keys side by side, so not a wrapper like the others."""
    strangers = [key for key in _wrapper_keys(shape) if key != "$code"]
    columns = [f"w{number}" for number in range(len(strangers))]
    one, other = PARTS[Scalar.CODE_WITH_SCOPE]

    def to_value(raw: str) -> str:
        built = f"named_struct({literal(one)}, {raw}.code, {literal(other)}, {raw}.scope)"
        return f"IF({raw}.code IS NULL OR {raw}.scope IS NULL, NULL, {built})"

    def to_hard(raw: str) -> list[str]:
        tests = [f"{raw} IS NOT NULL AND {to_value(raw)} IS NULL", f"{raw}.scope RLIKE {literal(UNSAFE)}"]
        return tests + [f"{at(raw, column)} IS NOT NULL" for column in columns]

    return Leaf(
        ddl=f"STRUCT<{', '.join(f'`{key}`: STRING' for key in ('$code', '$scope', *strangers))}>",
        named=f"STRUCT<{', '.join(f'{column}: STRING' for column in ('code', 'scope', *columns))}>",
        to_value=to_value,
        to_hard=to_hard,
        risky=True,
    )


def _decimal(type_: Decimal, shape: Shape, text: str) -> Part:
    """A pinned decimal: texts without an exponent and with few enough digits natively, all else is hard."""
    digits = rf"^-?[0-9]+(\.[0-9]{{0,{type_.scale}}})?$"

    def exact(raw: str) -> str:
        return f"IF({raw} RLIKE {literal(digits)}, try_cast({raw} AS {ddl(type_)}), NULL)"

    wrappers = {
        Kind.DECIMAL: _string_wrapper("$numberDecimal", exact),
        Kind.INT64: _string_wrapper("$numberLong", exact),
    }
    if _only(shape, Kind.DECIMAL, Kind.INT64, Kind.EMPTY_DOCUMENT):
        leaf = _wrapped(shape, wrappers)
        return replace(leaf, risky=True)
    cases = [
        _Case("= 'BIGINT'", lambda raw: exact(f"to_json({raw})")),
        _Case("LIKE 'DECIMAL(%'", lambda raw: exact(f"to_json({raw})")),
        *map(_in_wrapper, wrappers.values()),
    ]
    return _variant(cases, text, undecided="$numberDecimal")


_SCALARS: Mapping[Scalar, Callable[[Shape, str], Part]] = {
    Scalar.INT: _int,
    Scalar.BIGINT: _bigint,
    Scalar.DOUBLE: _double,
    Scalar.STRING: _string,
    Scalar.TEXT: _text,
    Scalar.BOOLEAN: _boolean,
    Scalar.TIMESTAMP: _timestamp,
    Scalar.BINARY: lambda shape, text: _wrapped(shape, _BINARY),
    Scalar.REGEX: lambda shape, text: _wrapped(shape, _REGEX),
    Scalar.CODE_WITH_SCOPE: _code_with_scope,
    Scalar.DB_POINTER: lambda shape, text: _wrapped(shape, _POINTER),
}
