"""Whether the rows of one key of an incremental model depend only on rows with that key, from the analysed plan of its query.

A column carries the key where it is the key column of a table, or that column cast to a type that holds each of its values. The key
is followed from the tables up to the query's columns. Each node of the plan must keep rows with other keys apart: a join compares the
keys, an aggregate groups by them, a window is partitioned by them. A node that is not known here is refused.

A query may also make its `unique_key` from the key by a function (`upper(city)`), if nothing later chooses among the rows that it
makes. Whether it makes one key of several is seen in the rows (`model_table`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from cdc_core.models import plan
from cdc_core.models.plan import Node

_Carrier: TypeAlias = "int | frozenset[int]"
"""An attribute that has the key's value; or some of an outer join that have it or are null. Of two at least one has it."""

_Key: TypeAlias = "tuple[frozenset[_Carrier], ...]"
"""For each column of the key its carriers."""

_UNCHANGED = ("SubqueryAlias", "View", "Sort", "PipeOperator", "ResolvedHint", "Repartition", "RepartitionByExpression")
"""Nodes that leave their rows as they are."""

_CHOOSING = {"GlobalLimit": "LIMIT", "LocalLimit": "LIMIT", "Offset": "OFFSET", "Sample": "TABLESAMPLE"}

_WHOLE_NUMBERS = ("byte", "short", "integer", "long")


class Mixed(Exception):
    """Rows of the model may depend on rows with other keys; the message says by what."""


@dataclass(frozen=True)
class _Rows:
    """What is known of a node's rows: their columns, and the key of each part that comes from tables with a key.

    Without keys they depend on no such table. Inner joins that no condition has linked yet have several.
    """

    columns: tuple[int, ...]
    keys: tuple[_Key, ...] = ()
    is_made: bool = False
    """The key is made by a function."""
    is_grouped: bool = False
    """Rows were grouped by such a key."""
    is_pinned: bool = False
    """In a subquery: there are none without rows of a table with a key, of which the key is compared with one outside."""

    def only(self, what: str, *, made: bool = False) -> _Key:
        """The one key of the rows, at a node that needs it, unless `made`, as it is in the tables."""
        if len(self.keys) != 1:
            raise Mixed("a join of two tables that have a key does not compare their keys")
        if self.is_made and not made:
            raise Mixed(f"{what} follows the function that makes the key")
        return self.keys[0]


def check(items: Sequence[Mapping[str, object]], tables: Mapping[str, Sequence[str]], unique_key: Sequence[str]) -> None:
    """Raise `Mixed` unless each row of a query depends, in tables with a key, only on rows with its own key.

    `items` is the query's analysed plan; `tables` are the names of its views that stand for such tables, with their key columns.
    """
    root = plan.read(items)
    query = _Query(tables)
    rows = query.rows(root)
    if not rows.keys:
        raise Mixed("it does not come from a table that has a key")
    key = rows.only("the query", made=True)
    names = {each.fields["name"]: each.id for each in _outputs(root)}
    for name, carriers in zip(unique_key, key, strict=True):
        if names.get(name) not in carriers:
            raise Mixed(f"{name} is not the key column of each table that has a key")


def _outputs(project: Node) -> tuple[Node, ...]:
    return project.expressions("projectList")


_Pin: TypeAlias = "tuple[frozenset[int], ...]"
"""For each column of the key the attributes of the query around a subquery with which the subquery compares it."""


@dataclass
class _Query:
    """A query, or a subquery with the tables and common table expressions that it shares with the one around it."""

    tables: Mapping[str, Sequence[str]]
    common: dict[int, Node] = field(default_factory=dict)
    pins: list[_Pin] = field(default_factory=list)
    common_rows: dict[int, _Rows] = field(default_factory=dict)

    def rows(self, node: Node) -> _Rows:
        """What is known of the rows of a node."""
        match node.kind:
            case "SubqueryAlias" if (key := self.tables.get(node.fields["identifier"]["name"])) is not None:
                return _table(node, key)
            case "WithCTE":
                *definitions, body = node.children
                self.common |= {each.fields["id"]: each.children[0] for each in definitions}
                return self.rows(body)
            case "CTERelationRef":
                return self._common(node)
            case "Filter":
                return self._filtered(node)
            case "Join":
                return self._joined(node)
            case "LateralJoin":
                return self._lateral(node)
            case "Union":
                return _united([self.rows(child) for child in node.children])
            case "Intersect" | "Except":
                return self._compared(node)
        if len(node.children) != 1:
            if any(self.rows(child).keys for child in node.children):
                raise Mixed(f"the keys cannot be followed through {node.kind}")
            return _Rows(_ids(node.expressions("output")))
        rows = self.rows(node.children[0])
        self._check_subqueries(node.all_expressions(), rows)
        match node.kind:
            case kind if kind in _UNCHANGED:
                return rows
            case "Project":
                return _projected(_outputs(node), rows)
            case "Aggregate":
                return _aggregated(node, rows)
            case "Window":
                return _windowed(node, rows)
            case "Distinct":
                return (
                    replace(rows, keys=(rows.only("DISTINCT", made=True),), is_grouped=rows.is_made) if rows.keys else rows
                )
            case "Generate" if not rows.is_grouped:
                return replace(rows, columns=(*rows.columns, *_ids(node.expressions("generatorOutput"))))
            case "Expand":
                return _expanded(node, rows)
        if rows.keys:
            what = _CHOOSING.get(node.kind)
            raise Mixed(f"{what} selects among the keys" if what else f"the keys cannot be followed through {node.kind}")
        return rows

    def _common(self, node: Node) -> _Rows:
        """The rows of a common table expression, which has other attributes at each place that refers to it."""
        id_, pin_count = node.fields["cteId"], len(self.pins)
        rows = self.common_rows.get(id_) or self.rows(self.common[id_])
        if len(self.pins) == pin_count:  # once: each may read another one twice, and so on; pins are of the place
            self.common_rows[id_] = rows
        return _renamed(rows, _ids(node.expressions("output")))

    def _filtered(self, node: Node) -> _Rows:
        rows = self.rows(node.children[0])
        if rows.is_grouped:
            raise Mixed("a condition follows the function that makes the key")
        conditions = [*_conjuncts(node.expressions("condition"))]
        rows = _linked(rows, conditions)
        for condition in conditions:
            rows = self._chosen(rows, condition)
        rows = _linked(rows, conditions)
        if len(rows.keys) == 1 and not rows.is_made and (pin := _pin(rows.keys[0], conditions)) is not None:
            self.pins.append(pin)
            return _Rows(rows.columns, is_pinned=True)
        return rows

    def _chosen(self, rows: _Rows, condition: Node) -> _Rows:
        """The rows that meet a condition, which may be that a subquery has a row for them."""
        if condition.kind == "Exists":
            return self._semi_joined(rows, self._subquery(condition))
        if condition.kind == "InSubquery":
            *values, listed = condition.children
            return self._semi_joined(rows, self._subquery(listed, values))
        self._check_subqueries(condition.walk(), rows)
        return rows

    def _subquery(self, expression: Node, values: Sequence[Node] = ()) -> _Subquery:
        """How the rows of a subquery depend on keys: it compares each with columns of the query around it.

        `values` are the expressions that IN compares with its columns.
        """
        query = _Query(self.tables, {**self.common}, common_rows=self.common_rows)
        rows = query.rows(plan.read(expression.fields["plan"]))
        if rows.keys:
            key = rows.only("IN")
            compared = dict(zip(rows.columns, values))
            pin = tuple(
                frozenset(value.id for id_, value in compared.items() if id_ in carriers and value.kind == _ATTRIBUTE)
                for carriers in key
            )
            query.pins.append(pin)
        if not all(map(all, query.pins)):
            raise Mixed("a subquery reads a table that has a key, and does not compare it with the key outside")
        return _Subquery(tuple(query.pins), bool(rows.keys) or rows.is_pinned)

    def _check_subqueries(self, expressions: Iterable[Node], rows: _Rows) -> None:
        for each in expressions:
            if "plan" in each.fields:
                self._check_pins(rows, self._subquery(each).pins)

    def _check_pins(self, rows: _Rows, pins: Iterable[_Pin]) -> None:
        for pin in pins:
            key = rows.only("a subquery") if rows.keys else ()
            if not rows.keys or not all(map(frozenset.intersection, key, pin)):
                raise Mixed("a subquery reads a table that has a key, and does not compare it with the key outside")

    def _semi_joined(self, rows: _Rows, subquery: _Subquery) -> _Rows:
        """The rows for which a subquery has a row. Rows without a key have that of the columns to which it is compared."""
        if not rows.keys and subquery.is_pinned:
            rows = replace(rows, keys=(tuple(frozenset.intersection(*ids) for ids in zip(*subquery.pins)),))
        self._check_pins(rows, subquery.pins)
        return rows

    def _joined(self, node: Node) -> _Rows:
        left, right = (self.rows(child) for child in node.children)
        kind = node.fields["joinType"]["object"].rpartition(".")[2].removesuffix("$")
        conditions = [*_conjuncts(node.expressions("condition"))]
        self._check_subqueries(node.all_expressions(), _Rows(()))
        if left.is_made or right.is_made:
            raise Mixed("a join follows the function that makes the key")
        columns = left.columns if kind in ("LeftSemi", "LeftAnti") else (*left.columns, *right.columns)
        if kind in ("Inner", "Cross", "LeftSemi"):
            both = _Rows(columns, (*left.keys, *right.keys), is_pinned=left.is_pinned or right.is_pinned)
            return _linked(both, conditions)
        if kind not in ("LeftOuter", "RightOuter", "FullOuter", "LeftAnti"):
            raise Mixed(f"the keys cannot be followed through {kind}")
        kept, other = (right, left) if kind == "RightOuter" else (left, right)
        if not other.keys and (not kept.keys or kind != "FullOuter"):
            return replace(kept, columns=columns, is_pinned=kept.is_pinned and kind != "FullOuter")
        if not kept.keys or not other.keys:
            raise Mixed("an outer join keeps rows of a table without a key")
        key, other_key = kept.only("a join"), other.only("a join")
        if len(_linked(_Rows((), (key, other_key)), conditions).keys) > 1:
            raise Mixed("a join of two tables that have a key does not compare their keys")
        if kind == "FullOuter":
            return _Rows(columns, (tuple(_pairs(one, two) for one, two in zip(key, other_key)),))
        return _Rows(columns, (tuple(one | _singles(_possible(two)) for one, two in zip(key, other_key)),))

    def _lateral(self, node: Node) -> _Rows:
        rows = self.rows(node.children[0])
        (right,) = node.expressions("right")
        subquery = self._subquery(right)
        if rows.is_made:
            raise Mixed("a join follows the function that makes the key")
        if node.fields["joinType"]["object"].endswith(".Inner$"):
            rows = self._semi_joined(rows, subquery)
        else:
            self._check_pins(rows, subquery.pins)
        # No later node needs the places of its columns: those of UNION and of subqueries come from a SELECT.
        return rows

    def _compared(self, node: Node) -> _Rows:
        left, right = (self.rows(child) for child in node.children)
        if left.is_made or right.is_made:
            raise Mixed(f"{node.kind.upper()} follows the function that makes the key")
        if not right.keys:
            return left
        if not left.keys:
            raise Mixed(f"{node.kind.upper()} reads a table without a key")
        return _united([left, right])


@dataclass(frozen=True)
class _Subquery:
    """What is known of a subquery; `is_pinned`: it has no rows without rows of a table with a key."""

    pins: tuple[_Pin, ...]
    is_pinned: bool


_ATTRIBUTE = "AttributeReference"


def _ids(nodes: Iterable[Node]) -> tuple[int, ...]:
    return tuple(each.id for each in nodes)


def _possible(carriers: frozenset[_Carrier]) -> frozenset[int]:
    """The attributes that have the key's value, or may be null instead."""
    return frozenset(id_ for each in carriers for id_ in ((each,) if isinstance(each, int) else each))


def _singles(ids: Iterable[int]) -> frozenset[_Carrier]:
    return frozenset(frozenset((each,)) for each in ids)


def _pairs(*sides: Iterable[_Carrier]) -> frozenset[_Carrier]:
    return frozenset(
        frozenset(pair) for pair in itertools.product(*([i for i in side if isinstance(i, int)] for side in sides))
    )


def _is_carried(carriers: frozenset[_Carrier]) -> bool:
    return any(isinstance(each, int) or len(each) == 2 for each in carriers)


def _moved(carriers: frozenset[_Carrier], places: Mapping[int, Sequence[int]]) -> frozenset[_Carrier]:
    """The carriers as other attributes, of which `places` are those with the value of each."""
    moved: set[_Carrier] = set()
    for each in carriers:
        ids = [places.get(id_, ()) for id_ in ((each,) if isinstance(each, int) else sorted(each))]
        if isinstance(each, int):
            moved.update(*ids)
        else:
            moved |= _pairs(*ids) if len(ids) == 2 and all(ids) else _singles(itertools.chain(*ids))
    return frozenset(moved)


def _table(node: Node, key: Sequence[str]) -> _Rows:
    """The rows of a table with a key. Its columns are those of the next node below that names any."""
    below = node
    while not (outputs := below.expressions("projectList") or below.expressions("output")):
        (below,) = below.children
    ids = {each.fields["name"]: each.id for each in outputs}
    return _Rows(tuple(ids.values()), (tuple(frozenset((ids[name],)) for name in key),))


def _conjuncts(conditions: Sequence[Node]) -> Iterator[Node]:
    """The conditions that all have to be met."""
    nodes = [*conditions]
    while nodes:
        node = nodes.pop()
        if node.kind == "And":
            nodes += node.children
        else:
            yield node


def _same(expression: Node) -> Node:
    """An expression without casts that change no value."""
    while expression.kind in ("Cast", "Alias") and (
        expression.kind == "Alias" or _is_lossless(expression.children[0], expression.fields["dataType"])
    ):
        expression = expression.children[0]
    return expression


def _is_lossless(expression: Node, target: object) -> bool:
    """Whether each value of an expression has one of its own in another type."""
    source = _referred(_same(expression)).fields.get("dataType")
    if source in _WHOLE_NUMBERS and target in _WHOLE_NUMBERS:
        return _WHOLE_NUMBERS.index(str(source)) <= _WHOLE_NUMBERS.index(str(target))
    return source == target or (target == "string" and source in (*_WHOLE_NUMBERS, "boolean", "date"))


def _referred(expression: Node) -> Node:
    """The attribute of the query around a subquery to which an expression refers; any other expression as it is."""
    return expression.expressions("e")[0] if expression.kind == "OuterReference" else expression


def _equal(conditions: Iterable[Node]) -> Iterator[tuple[Node, Node]]:
    """What the conditions compare."""
    for each in conditions:
        if each.kind in ("EqualTo", "EqualNullSafe"):
            left, right = map(_same, each.children)
            yield left, right


def _linked(rows: _Rows, conditions: Sequence[Node]) -> _Rows:
    """The rows that meet conditions: columns that are equal to a key carry it, and parts with one key become one."""
    keys = list(rows.keys)
    equal = [
        (condition.kind, {left.id, right.id})
        for condition in conditions
        for left, right in _equal([condition])
        if left.kind == right.kind == _ATTRIBUTE
    ]
    for _ in equal:
        # A null is equal to nothing but by `<=>`.
        keys = [
            tuple(
                carriers.union(
                    *(ids for kind, ids in equal if ids & (_possible(carriers) if kind == "EqualTo" else carriers))
                )
                for carriers in key
            )
            for key in keys
        ]
    merged: list[_Key] = []
    for key in keys:
        for number, other in enumerate(merged):
            if all(map(frozenset.intersection, key, other)):
                merged[number] = tuple(map(frozenset.union, key, other))
                break
        else:
            merged.append(key)
    return replace(rows, keys=tuple(merged))


def _pin(key: _Key, conditions: Sequence[Node]) -> _Pin | None:
    """The columns around a subquery to which its conditions compare each column of its key; None if there is one without."""
    found: list[set[int]] = [set() for _ in key]
    for pair in _equal(conditions):
        for own, outer in (pair, pair[::-1]):
            if outer.kind == "OuterReference" and own.kind == _ATTRIBUTE:
                for ids, carriers in zip(found, key):
                    if own.id in carriers:
                        ids.add(_referred(outer).id)
    return tuple(map(frozenset, found)) if all(found) else None


def _carries(expression: Node, carriers: frozenset[_Carrier]) -> bool:
    """Whether an expression has the key's value."""
    inner = _same(expression)
    if inner.kind == "Coalesce" and len(inner.children) == 2:
        one, two = map(_same, inner.children)
        return one.kind == two.kind == _ATTRIBUTE and one.id != two.id and frozenset((one.id, two.id)) in carriers
    return inner.kind == _ATTRIBUTE and inner.id in carriers


def _is_of(expression: Node, carriers: frozenset[_Carrier]) -> bool:
    """Whether an expression is a function of the key alone."""
    parts = [*expression.walk()]
    ids = {each.id for each in parts if each.kind == _ATTRIBUTE}
    return bool(ids) and ids <= carriers and not any("plan" in each.fields for each in parts)


def _projected(outputs: Sequence[Node], rows: _Rows) -> _Rows:
    """The rows of a SELECT: the columns that carry the key, or, where there is none, those that a function makes of it."""
    keys, is_made = [], rows.is_made
    places: dict[int, list[int]] = {}
    for each in outputs:
        if (inner := _same(each)).kind == _ATTRIBUTE:
            places.setdefault(inner.id, []).append(each.id)
    for key in rows.keys:
        selected = [
            _moved(carriers, places).union(each.id for each in outputs if _carries(each, carriers)) for carriers in key
        ]
        made = [frozenset(each.id for each in outputs if _is_of(each, carriers)) for carriers in key]
        is_made = is_made or not all(map(_is_carried, selected))
        keys.append(tuple(one if _is_carried(one) else two for one, two in zip(selected, made)))
    if is_made and len(keys) > 1:
        raise Mixed("a join of two tables that have a key does not compare their keys")
    if not all(map(all, keys)):
        raise Mixed("a SELECT leaves out the key")
    return replace(rows, columns=_ids(outputs), keys=tuple(keys), is_made=is_made)


def _aggregated(node: Node, rows: _Rows) -> _Rows:
    outputs, groups = node.expressions("aggregateExpressions"), node.expressions("groupingExpressions")
    if not rows.keys:
        return replace(rows, columns=_ids(outputs), is_pinned=rows.is_pinned and bool(groups))
    key = rows.only("GROUP BY", made=True)
    is_kept = [any(_carries(each, carriers) for each in groups) for carriers in key]
    if not all(kept or any(_is_of(each, carriers) for each in groups) for kept, carriers in zip(is_kept, key)):
        raise Mixed("an aggregate is not grouped by the key")
    grouped = replace(rows, is_made=rows.is_made or not all(is_kept))
    plain = [each for each in outputs if not any(part.kind == "AggregateExpression" for part in each.walk())]
    result = _projected(plain, grouped)
    return replace(result, columns=_ids(outputs), is_grouped=grouped.is_made)


def _windowed(node: Node, rows: _Rows) -> _Rows:
    columns = (*rows.columns, *_ids(node.expressions("windowExpressions")))
    parts = node.expressions("partitionSpec")
    for carriers in rows.only("a window") if rows.keys else ():
        if not any(_carries(each, carriers) for each in parts):
            raise Mixed("a window is not partitioned by the key")
    return replace(rows, columns=columns)


def _expanded(node: Node, rows: _Rows) -> _Rows:
    """The rows of GROUPING SETS: a column carries the key if it does so in each of the sets."""
    columns = _ids(node.expressions("output"))
    sets = [[*plan.trees(each)] for each in node.fields["projections"]]
    keys = tuple(
        tuple(
            frozenset(id_ for id_, *of_sets in zip(columns, *sets) if all(_carries(each, carriers) for each in of_sets))
            for carriers in key
        )
        for key in rows.keys
    )
    return replace(rows, columns=columns, keys=keys)


def _renamed(rows: _Rows, columns: tuple[int, ...]) -> _Rows:
    """The rows with other attributes at the same places."""
    places = {own: (other,) for own, other in zip(rows.columns, columns) if columns.count(other) == 1}
    keys = tuple(tuple(_moved(carriers, places) for carriers in key) for key in rows.keys)
    if not all(_is_carried(carriers) for key in keys for carriers in key):
        raise Mixed("a SELECT leaves out the key")
    return replace(rows, columns=columns, keys=keys)


def _united(parts: Sequence[_Rows]) -> _Rows:
    """The rows of several queries, with the attributes of the first: a column carries the key if it does so in each."""
    columns = parts[0].columns
    if not any(each.keys for each in parts):
        return replace(parts[0], is_pinned=all(each.is_pinned for each in parts))
    if not all(each.keys for each in parts):
        raise Mixed("a part of UNION reads no table that has a key")
    keys = [_renamed(each, columns).only("UNION") for each in parts]
    key = tuple(frozenset.intersection(*carriers) for carriers in zip(*keys))
    if not all(map(_is_carried, key)):
        raise Mixed("the parts of UNION have their keys in different columns")
    return _Rows(columns, (key,))
