"""The order of models: each after the models that it refers to."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdc_core import errors
from cdc_core.models import sql_model
from cdc_core.properties import types as values


@dataclass(frozen=True)
class Order:
    """The models that can be built, each after those that it refers to, otherwise by name; and the problems of others.

    A model that refers to one with a problem is not built either, and not reported.
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
    """The order of the models, with unknown references, name collisions and cycles as problems.

    `collections` are those that silver has; a missing one may come later if the filters capture it. `unread` are the
    names of models whose files could not be read; `taken` maps a model's name to the collection whose table has that
    name.
    """
    names = {*unread, *(each.name for each in found)}
    # Also models with the same name as an unread one: both would have one table.
    lost = {name.lower() for name in unread}
    wrong: set[str] = {*unread, *(each.name for each in found if each.name.lower() in lost)}
    problems: list[errors.Problem] = []
    for model, problem in (
        *_with_taken_names(found, taken or {}),
        *_of_one_name(found),
        *_unknown(found, names, collections, is_captured),
        *_misused(found),
    ):
        wrong.add(model.name)
        if problem is not None:
            problems.append(problem)
    by_name = {each.name: each for each in sorted(found, key=lambda each: each.name)}
    while True:
        # A model that refers to a wrong one is not built either, and so on.
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
    """The cycle in the direction of the references, from its alphabetically first name back to it."""
    # graphlib starts a cycle anywhere and goes against the references; the message must always be the same.
    around = [*reversed(circle[:-1])]
    at = around.index(min(around))
    return [*around[at:], *around[:at], around[at]]


_Found = Iterator[tuple[sql_model.Model, errors.Problem | None]]
"""Models with their problems; None if it is reported for another model."""


def _with_taken_names(found: Sequence[sql_model.Model], taken: Mapping[str, str]) -> _Found:
    for each in found:
        if each.name in taken:
            # Each would overwrite the other's rows.
            yield (
                each,
                errors.Problem(
                    each.where, f"its table would have the same name as that of {taken[each.name]}", "rename the file"
                ),
            )


def _of_one_name(found: Sequence[sql_model.Model]) -> _Found:
    seen: dict[str, sql_model.Model] = {}
    for each in found:
        # Spark's catalogs ignore case in table names.
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
