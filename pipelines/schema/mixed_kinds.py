"""A closer look at a batch's documents, where Spark's inference shows a mix and the order of its kinds
matters.

Natively: `from_json` cuts the values at the mixed paths out as VARIANTs, and one aggregate gives, for each
path and kind, the schema of its values and the first event that had it. In Python, exact for anything,
where that does not lead to the end: for a mix inside a mix, say.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from cdc_core.schema import document_schema
from cdc_core.schema import variant_shape as variant_shapes
from cdc_core.schema.document_schema import DocumentSchema, Pins, Shape
from cdc_core.sql.names import identifier, literal
from cdc_core.typed import expressions as typed_values
from cdc_core.typed import plan as typed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NODES = 40
"""Mixed paths that are looked into natively."""


def marked(df: DataFrame, column: str, mark: str | None) -> DataFrame:
    """The columns `text` and `mark` of the documents that are not null.

    A mark sorts as the events do and is one document's own: rows of a snapshot's chunk share their
    sequence, so that a digest of the text follows it.
    """
    text = identifier(column)
    digest = f"hex(xxhash64({text}))"
    order = "''"
    if mark is not None:
        order = f"CAST({identifier(mark)} AS STRING)"
        is_text = dict(df.dtypes)[mark] == "string"
        order = order if is_text else f"lpad({order}, 20, '0')"
    documents = df.where(f"{text} IS NOT NULL")
    return documents.selectExpr(f"{text} AS text", f"concat({order}, '/', {digest}) AS mark")


def in_python(df: DataFrame, *, arrays_as_documents: bool = False) -> Shape:
    """The shape of all documents of a `marked` frame, exactly."""
    shapes = df.mapInArrow(typed.observer(arrays_as_documents=arrays_as_documents), "shape STRING")
    merged = Shape()
    for row in shapes.collect():
        merged.add(Shape.from_json(json.loads(row.shape)))
    return merged


def settled(df: DataFrame, seen: Shape, *, schema: DocumentSchema, pins: Pins | None) -> Shape:
    """The shape of a `marked` frame, with the marks of each kind wherever the schema depends on them.

    `seen` is what Spark's inference saw of those documents that it takes; it is changed.
    """
    try:
        nodes = variant_shapes.unsettled(schema, seen, pins=pins)
        if not nodes:
            return seen
        if len(nodes) <= NODES and () not in nodes:
            for node, found in zip(nodes, _looked_at(df, nodes)):
                variant_shapes.replaced(seen, node, found)
            if not variant_shapes.unsettled(schema, seen, pins=pins, resolved=frozenset(nodes)):
                return seen
    except variant_shapes.NotAddressable:
        pass
    return in_python(df)


def _looked_at(df: DataFrame, nodes: Sequence[variant_shapes.Node]) -> list[Shape]:
    """What stands at each of the nodes."""
    tree = _tree(nodes)
    raw = f"CAST(from_json(text, {literal(_ddl(tree, named=False))}) AS {_ddl(tree, named=True)})"
    values = [
        f"transform({_values('raw', node, tree, 0)}, x -> named_struct('node', {number}, 'value', x))"
        for number, node in enumerate(nodes)
    ]
    found = (
        df.where("try_parse_json(text) IS NOT NULL")
        .selectExpr("mark", f"{raw} AS raw")
        .selectExpr("mark", f"inline(concat({', '.join(values)}))")
        .selectExpr("mark", "node", "value", "schema_of_variant(value) AS schema")
        .selectExpr("mark", "node", "value", f"{_KIND} AS kind")
        .groupBy("node", "kind")
        .agg(*_aggregates())
        .collect()
    )
    return [
        variant_shapes.of_kinds((row.kind, row.schema, row.mark) for row in found if row.node == number)
        for number in range(len(nodes))
    ]


def _aggregates() -> list[Any]:
    from pyspark.sql import functions as sf

    return [sf.expr("schema_of_variant_agg(value) AS schema"), sf.expr("min(mark) AS mark")]


_WRAPPERS = ", ".join(literal(key) for key in document_schema.WRAPPERS)
_FIRST_KEY = f"regexp_extract(schema, {literal('^OBJECT<`([$][A-Za-z]+)`: ')}, 1)"
_SCOPED = literal("OBJECT<`$code`: STRING, `$scope`: %")
_BARE = (
    f"regexp_replace(replace(schema, {literal('OBJECT<`$undefined`: BOOLEAN>')}, 'VOID'), {literal('`([^`]|``)*`')}, 'n')"
)
"""The schema of a variant without names that could be taken for types."""
_HOLDS = f"{_BARE} RLIKE {literal('(: |<|^)(STRING|BIGINT|BOOLEAN|DOUBLE|FLOAT|DECIMAL|VARIANT)')}"
_KIND = f"""CASE
    WHEN schema LIKE {_SCOPED} THEN {literal("$code+$scope")}
    WHEN {_FIRST_KEY} IN ({_WRAPPERS}) THEN {_FIRST_KEY}
    WHEN schema LIKE 'OBJECT<%' OR schema LIKE 'ARRAY<%' THEN concat(left(schema, 5), ' ', {_HOLDS})
    WHEN schema LIKE 'DECIMAL(%' THEN 'DOUBLE'
    ELSE schema
END"""
"""The kind of a value, as `variant_shapes.of_kinds` takes it: what holds something apart from what does
not.
"""


_Tree = dict[Any, Any]


def _tree(nodes: Collection[variant_shapes.Node]) -> _Tree:
    """The nodes as nested names; None is the element of an array, an empty tree a value to cut out."""
    tree: _Tree = {}
    for node in nodes:
        here = tree
        for name in node:
            here = here.setdefault(name, {})
    return tree


def _ddl(tree: _Tree, *, named: bool) -> str:
    """The tree as a type for `from_json`, or with the names by which the SQL reads it."""
    if not tree:
        return "VARIANT"
    if None in tree:
        return f"ARRAY<{_ddl(tree[None], named=named)}>"
    keys = (identifier(typed_values.escaped(name)) for name in tree)
    names = (f"f{number}" for number in range(len(tree))) if named else keys
    fields = (f"{name}: {_ddl(below, named=named)}" for name, below in zip(names, tree.values()))
    return f"STRUCT<{', '.join(fields)}>"


def _values(raw: str, node: variant_shapes.Node, tree: _Tree, depth: int) -> str:
    """The SQL of the values at a node, as an array."""
    if not node:
        return f"IF({raw} IS NULL, CAST(array() AS ARRAY<VARIANT>), array({raw}))"
    name, *rest = node
    if name is None:
        inner = _values(f"y{depth}", tuple(rest), tree[None], depth + 1)
        return f"coalesce(flatten(transform({raw}, y{depth} -> {inner})), CAST(array() AS ARRAY<VARIANT>))"
    return _values(f"{raw}.f{list(tree).index(name)}", tuple(rest), tree[name], depth)
