"""The order of models: each after those that it refers to."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdc_core import errors
from cdc_core.models import sql_model
from cdc_core.properties import types as values


@dataclass(frozen=True)
class Order:
    """The models that can be made, each after those that it refers to, otherwise by name; and what is wrong with others.

    A model that refers to one of these others is in neither: it waits until they are mended.
    """

    models: tuple[sql_model.Model, ...]
    problems: tuple[errors.Problem, ...] = ()


def ordered(
    found: Sequence[sql_model.Model],
    *,
    collections: Collection[str],
    is_captured: Callable[[str], bool],
    unread: Collection[str] = (),
    taken: Mapping[str, str] | None = None,
) -> Order:
    """The order of the models, and every reference to nothing, every pair that meets in one name, and every circle.

    `collections` are those that silver knows; another one may come later where the filters let it in. `unread` are the
    names of models whose files could not be read, `taken` says of a model whose table its own would be.
    """
    names = {*unread, *(each.name for each in found)}
    # Also what meets an unread one in its name: both have one table.
    lost = {name.lower() for name in unread}
    wrong: set[str] = {*unread, *(each.name for each in found if each.name.lower() in lost)}
    problems: list[errors.Problem] = []
    for model, problem in (
        *_of_collections(found, taken or {}),
        *_met(found),
        *_unknown(found, names, collections, is_captured),
        *_misused(found),
    ):
        wrong.add(model.name)
        if problem is not None:
            problems.append(problem)
    by_name = {each.name: each for each in sorted(found, key=lambda each: each.name)}
    while True:
        # What refers to a model that is wrong is not made either, nor what refers to that.
        while waiting := {name for name, each in by_name.items() if name not in wrong and wrong & set(each.names)}:
            wrong |= waiting
        graph = {
            name: [other for other in each.names if other in by_name] for name, each in by_name.items() if name not in wrong
        }
        try:
            return Order(tuple(by_name[name] for name in graphlib.TopologicalSorter(graph).static_order()), tuple(problems))
        except graphlib.CycleError as error:
            circle = _from_least(error.args[1])
            message = f"the models refer to each other in a cycle: {' → '.join(circle)}"
            problems.append(errors.Problem(by_name[circle[0]].where, message))
            wrong |= set(circle)


def _from_least(circle: Sequence[str]) -> list[str]:
    """The circle in the direction of the references, from the first name of the alphabet and back to it."""
    # graphlib begins a circle anywhere and goes against the references; the message is to be the same each time.
    around = [*reversed(circle[:-1])]
    at = around.index(min(around))
    return [*around[at:], *around[:at], around[at]]


_Found = Iterator[tuple[sql_model.Model, errors.Problem | None]]
"""Models with what is wrong with them, None where it is told of another one."""


def _of_collections(found: Sequence[sql_model.Model], taken: Mapping[str, str]) -> _Found:
    for each in found:
        if each.name in taken:
            # Each would overwrite the rows of the other.
            yield (
                each,
                errors.Problem(
                    each.where, f"its table would have the same name as that of {taken[each.name]}", "rename the file"
                ),
            )


def _met(found: Sequence[sql_model.Model]) -> _Found:
    seen: dict[str, sql_model.Model] = {}
    for each in found:
        # Spark's catalogs do not tell upper case from lower in the names of tables.
        other = seen.setdefault(each.name.lower(), each)
        if other is not each:
            message = f"the model {other.where} already has this name"
            yield each, errors.Problem(each.where, message, "rename one of the files")
            yield other, None


def _unknown(
    found: Sequence[sql_model.Model],
    names: Collection[str],
    collections: Collection[str],
    is_captured: Callable[[str], bool],
) -> _Found:
    known = [*sorted(names), *sorted(collections)]
    for each in found:
        for name in each.names:
            if name in names or name in collections or ("." in name and is_captured(name)):
                continue
            near = values.did_you_mean(name, known) or f"known are {', '.join(known[:10])}"
            what = "no captured collection" if "." in name else "no model"
            message = f"ref('{name}') refers to nothing: there is {what} of this name"
            yield each, errors.Problem(each.where, message, near)


def _misused(found: Sequence[sql_model.Model]) -> _Found:
    views = {each.name for each in found if each.materialized is sql_model.Materialization.VIEW}
    for each in found:
        for ref in each.refs:
            if ref.key and ref.name in views:
                message = f"ref('{ref.name}') has a key, but a view has no changes of its own"
                yield each, errors.Problem(each.where, message, "refer to what the view reads, or materialize it")
