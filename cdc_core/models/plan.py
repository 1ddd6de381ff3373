"""An analysed plan of Spark, from its JSON: each node with its expressions, and each expression with the plan of its subquery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """A node of a plan or of an expression: `kind` is the name of Spark's class, `fields` are its arguments as in the JSON."""

    kind: str
    fields: Mapping[str, Any]
    children: tuple[Node, ...]

    @property
    def id(self) -> int:
        """The number of an attribute or alias."""
        return int(self.fields["exprId"]["id"])

    def expressions(self, name: str) -> tuple[Node, ...]:
        """The expressions of an argument, in their order; none if it is empty."""
        return tuple(trees(self.fields.get(name)))

    def all_expressions(self) -> Iterator[Node]:
        """The expressions of all arguments of a node of a plan, each with those that it consists of."""
        for value in self.fields.values():
            for each in trees(value):
                yield from each.walk()

    def walk(self) -> Iterator[Node]:
        """This node and all below it, without the plans of subqueries."""
        # Without recursion: conditions of a thousand parts are that deep.
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield node
            nodes += reversed(node.children)


def read(items: Sequence[Mapping[str, Any]]) -> Node:
    """The tree of nodes in pre-order, as `TreeNode.toJSON` writes it."""
    nodes: list[Node] = []
    for item in reversed(items):
        children = tuple(nodes.pop() for _ in range(item["num-children"]))
        nodes.append(Node(str(item["class"]).rpartition(".")[2], item, children))
    (root,) = nodes
    return root


def trees(value: object) -> Iterator[Node]:
    """The expressions of an argument: it is a tree, or a list of trees or of such lists."""
    if not isinstance(value, list) or not value:
        return
    if isinstance(value[0], Mapping):
        if "num-children" in value[0]:
            yield read(value)
        return
    for each in value:
        yield from trees(each)
