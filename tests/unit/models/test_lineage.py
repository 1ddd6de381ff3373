"""How the plan of a model's query is read."""

from __future__ import annotations

from typing import Any

from cdc_core.models import lineage


def node(kind: str, children: int, **fields: Any) -> dict[str, Any]:
    return {"class": f"catalyst.{kind}", "num-children": children, **fields}


def column(number: int) -> list[dict[str, Any]]:
    return [node("AttributeReference", 0, name="k", dataType="string", exprId={"id": number})]


def test_common_table_expressions_are_read_once_each() -> None:
    """Each of forty reads the one before it twice: read at each place, that is 2 to the power of 39 times."""
    last = 40
    plan = [node("Project", 1, projectList=[column(0)]), node("WithCTE", last + 1)]
    plan += [node("CTERelationDef", 1, id=1), node("SubqueryAlias", 1, identifier={"name": "orders"})]
    plan += [node("Project", 1, projectList=[column(1)]), node("OneRowRelation", 0)]
    for number in range(2, last + 1):
        left, right = column(2 * number), column(2 * number + 1)
        plan += [node("CTERelationDef", 1, id=number), node("Project", 1, projectList=[left])]
        plan += [node("Join", 2, joinType={"object": "Inner$"}, condition=[node("EqualTo", 2), *left, *right])]
        plan += [node("CTERelationRef", 0, cteId=number - 1, output=[each]) for each in (left, right)]
    plan += [node("CTERelationRef", 0, cteId=last, output=[column(0)])]
    lineage.check(plan, {"orders": ["k"]}, ["k"])
