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
    models: Sequence[sql_model.Model],
    *,
    collections: Collection[str],
    is_captured: Callable[[str], bool],
    unread: Collection[str] = (),
    table_owners: Mapping[str, str] | None = None,
) -> Order:
    """The order of the models, with unknown references, name collisions and cycles as problems.

    `collections` are those that silver has; a missing one may come later if the filters capture it. `unread` are the
    names of models whose files could not be read; `table_owners` maps a model's name to the collection whose table has that
    name.
    """
    names = {*unread, *(model.name for model in models)}
    # Also models with the same name as an unread one: both would have one table.
    unread_names = {name.lower() for name in unread}
    invalid: set[str] = {*unread, *(model.name for model in models if model.name.lower() in unread_names)}
    problems: list[errors.Problem] = []
    for model, problem in (
        *_with_taken_names(models, table_owners or {}),
        *_of_one_name(models),
        *_unknown(models, names, collections, is_captured),
        *_misused(models),
    ):
        invalid.add(model.name)
        if problem is not None:
            problems.append(problem)
    by_name = {model.name: model for model in sorted(models, key=lambda each: each.name)}
    while True:
        # A model that refers to a wrong one is not built either, and so on.
        while dependents := {name for name, model in by_name.items() if name not in invalid and invalid & set(model.names)}:
            invalid |= dependents
        graph = {
            name: [other for other in model.names if other in by_name]
            for name, model in by_name.items()
            if name not in invalid
        }
        try:
            return Order(tuple(by_name[name] for name in graphlib.TopologicalSorter(graph).static_order()), tuple(problems))
        except graphlib.CycleError as error:
            cycle = _from_least(error.args[1])
            message = f"the models refer to each other in a cycle: {' → '.join(cycle)}"
            problems.append(errors.Problem(by_name[cycle[0]].where, message))
            invalid |= set(cycle)


def _from_least(circle: Sequence[str]) -> list[str]:
    """The cycle in the direction of the references, from its alphabetically first name back to it."""
    # graphlib starts a cycle anywhere and goes against the references; the message must always be the same.
    names = [*reversed(circle[:-1])]
    start = names.index(min(names))
    return [*names[start:], *names[:start], names[start]]


_Found = Iterator[tuple[sql_model.Model, errors.Problem | None]]
"""Models with their problems; None if it is reported for another model."""


def _with_taken_names(models: Sequence[sql_model.Model], table_owners: Mapping[str, str]) -> _Found:
    for model in models:
        if model.name in table_owners:
            # Each would overwrite the other's rows.
            yield (
                model,
                errors.Problem(
                    model.where,
                    f"its table would have the same name as that of {table_owners[model.name]}",
                    "rename the file",
                ),
            )


def _of_one_name(models: Sequence[sql_model.Model]) -> _Found:
    models_by_name: dict[str, sql_model.Model] = {}
    for model in models:
        # Spark's catalogs ignore case in table names.
        other = models_by_name.setdefault(model.name.lower(), model)
        if other is not model:
            message = f"the model {other.where} already has this name"
            yield model, errors.Problem(model.where, message, "rename one of the files")
            yield other, None


def _unknown(
    models: Sequence[sql_model.Model],
    names: Collection[str],
    collections: Collection[str],
    is_captured: Callable[[str], bool],
) -> _Found:
    known_names = [*sorted(names), *sorted(collections)]
    for model in models:
        for name in model.names:
            if name in names or name in collections or ("." in name and is_captured(name)):
                continue
            hint = values.did_you_mean(name, known_names) or f"known are {', '.join(known_names[:10])}"
            what = "no captured collection" if "." in name else "no model"
            message = f"ref('{name}') refers to nothing: there is {what} of this name"
            yield model, errors.Problem(model.where, message, hint)


def _misused(models: Sequence[sql_model.Model]) -> _Found:
    views = {model.name for model in models if model.materialized is sql_model.Materialization.VIEW}
    for model in models:
        for ref in model.refs:
            if ref.key and ref.name in views:
                message = f"ref('{ref.name}') has a key, but a view has no changes of its own"
                yield model, errors.Problem(model.where, message, "refer to what the view reads, or materialize it")
