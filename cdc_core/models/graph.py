"""The order of models: each after those that it refers to."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Collection, Iterator, Sequence

from cdc_core import errors
from cdc_core.models import sql_model
from cdc_core.properties import types as values


def ordered(
    found: Sequence[sql_model.Model], *, collections: Collection[str], is_captured: Callable[[str], bool]
) -> tuple[sql_model.Model, ...]:
    """The models in an order in which each comes after those that it refers to; otherwise by name.

    `collections` are those that silver knows; another one may come later where the filters let it in. Raises
    `SettingsError` that names every reference to nothing, every pair that meets in one name, and a circle's models.
    """
    problems = [*_met(found), *_unknown(found, collections, is_captured), *_misused(found)]
    if problems:
        raise errors.SettingsError(problems)
    by_name = {each.name: each for each in sorted(found, key=lambda each: each.name)}
    graph = {name: [other for other in each.names if other in by_name] for name, each in by_name.items()}
    try:
        return tuple(by_name[name] for name in graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        circle = _from_least(error.args[1])
        raise errors.SettingsError(
            errors.Problem(by_name[circle[0]].where, f"the models refer to each other in a circle: {' → '.join(circle)}")
        ) from None


def _from_least(circle: Sequence[str]) -> list[str]:
    """The circle in the direction of the references, from the first name of the alphabet and back to it."""
    # graphlib begins a circle anywhere and goes against the references; the message is to be the same each time.
    around = [*reversed(circle[:-1])]
    at = around.index(min(around))
    return [*around[at:], *around[:at], around[at]]


def _met(found: Sequence[sql_model.Model]) -> Iterator[errors.Problem]:
    seen: dict[str, sql_model.Model] = {}
    for each in found:
        # Spark's catalogs do not tell upper case from lower in the names of tables.
        other = seen.setdefault(each.name.lower(), each)
        if other is not each:
            yield errors.Problem(each.where, f"the model {other.where} has this name already", "rename one of the files")


def _unknown(
    found: Sequence[sql_model.Model], collections: Collection[str], is_captured: Callable[[str], bool]
) -> Iterator[errors.Problem]:
    names = {each.name for each in found}
    known = [*sorted(names), *sorted(collections)]
    for each in found:
        for name in each.names:
            if name in names or name in collections or ("." in name and is_captured(name)):
                continue
            near = values.did_you_mean(name, known) or f"known are {', '.join(known[:10])}"
            what = "no captured collection" if "." in name else "no model"
            yield errors.Problem(each.where, f"ref('{name}') refers to nothing: there is {what} of this name", near)


def _misused(found: Sequence[sql_model.Model]) -> Iterator[errors.Problem]:
    views = {each.name for each in found if each.materialized is sql_model.Materialization.VIEW}
    for each in found:
        for ref in each.refs:
            if ref.key and ref.name in views:
                yield errors.Problem(
                    each.where,
                    f"ref('{ref.name}') has a key, but a view has no changes of its own",
                    "refer to what the view reads, or materialize it",
                )
