"""The evolution of a collection's document schema by batches of documents.

`evolve` decodes a batch by the current schema, and infers only from documents that the schema does not cover. Where these are very many, it
infers from the first of them, and then only from those that still add something (`looks`). Documents of this process are read in order
instead, each by the schema of those before it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import document_schema
from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.evolution import MAX_COLUMNS, Change, join, leaf_count
from cdc_core.schema.pins import Pins
from cdc_core.schema.shape import Shape
from cdc_core.typed import plan as typed
from pipelines.schema import looks

FEW_FIELDS = 100
"""A nested document with more fields than this among `looks.BEGINNING` documents may be used as a map."""


@dataclass(frozen=True)
class Evolution:
    """The changes of a batch to its collection's schema, and the plan to type the batch.

    `refused` counts texts that are not strict JSON: the exact path types them, or finds them unreadable. `seen_at` is the `sequence` of the
    batch's first event. `also` has the counts of `evolve`'s conditions. `beginning` is the inference of the first documents, where only
    these were read.
    """

    schema: DocumentSchema
    changes: tuple[Change, ...]
    plan: typed.Plan
    refused: int = 0
    seen_at: str | None = None
    also: Mapping[str, int] = field(default_factory=dict)
    beginning: typed.Inference | None = None


def unchanged(schema: DocumentSchema, pins: Pins) -> Evolution:
    """The evolution of a batch that changes nothing."""
    return Evolution(schema, (), typed.Plan(schema, pins))


def evolve(
    documents: looks.Documents,
    *,
    current: DocumentSchema = document_schema.EMPTY,
    options: unwrap_options.UnwrapOptions | None = None,
    pins: Pins | None = None,
    reserved: frozenset[str] = frozenset(),
    also: Mapping[str, str] = {},
    beginning: typed.Inference | None = None,
) -> Evolution:
    """The schema after a batch of documents, its changes, and the plan for `typed.documents` over the same documents or some of them.

    Reads the documents once. Without a current schema, the first documents are read before, unless `beginning` is their inference. Where
    very many documents show something new, all are read again after the first of these.

    Where a path has values of several kinds, the first one by `sequence` determines the type of its column. So the result depends only on
    the documents and the current schema, and is the same for any partitioning and any cut into batches.

    `also` are conditions, as SQL by name, whose rows are counted in the same read. `reserved` are column names that no field may get, in
    addition to those of the engine.
    """
    pins, naming = pins or {}, _naming(options or unwrap_options.UnwrapOptions(), reserved)
    joined = functools.partial(join, current, pins=pins, naming=naming)
    sight, known_schema = beginning or typed.Inference(), current if current.fields else replace(current, naming=naming)
    if beginning is None and not current.fields:
        sight = _first(documents, known_schema, pins)
    if sight.shape.kinds:
        known_schema, _ = joined(sight.shape)
    # Without fields each document would take the exact path. A scalar where a map is pinned begins a column that later documents give.
    if known_schema.fields and _is_of_columns(sight) and not _has_map(pins):
        sight, known_schema = _in_order(documents, sight, known_schema, joined, pins)
    count = looks.BEGINNING
    first_look = look = documents.new(typed.Plan(known_schema, pins), also, most=count if _is_of_columns(sight) else None)
    # Where very many documents show something new, most show the same: infer from the first of them, then from those that show more.
    while look.is_cut:
        longer_sight = sight.with_other(documents.first_new(typed.Plan(known_schema, pins), count))
        wider_schema, _ = joined(longer_sight.shape)
        count *= 4
        is_narrower = wider_schema != known_schema and _is_of_columns(longer_sight)
        if is_narrower:
            sight, known_schema = longer_sight, wider_schema
        look = documents.new(typed.Plan(known_schema, pins), {}, most=count if is_narrower else None)
    # Documents that were not inferred from come later, and cannot change the types that the first documents determined.
    shape = look.with_other(sight).shape
    schema, changes = joined(shape)
    counts = dict(zip(also, itertools.chain(first_look.also, itertools.repeat(0))))
    return Evolution(schema, changes, typed.Plan(schema, pins), first_look.refused, first_look.low, counts)


def _first(documents: looks.Documents, no_schema: DocumentSchema, pins: Pins) -> typed.Inference:
    """The inference from the first `BEGINNING` documents; large ones are read in order, if not all are needed."""
    if not _has_map(pins) and (beginning := documents.first_in_order()) is not None:
        joined = functools.partial(join, no_schema, pins=pins, naming=no_schema.naming)
        sight, schema = _in_order(beginning, typed.Inference(), no_schema, joined, pins)
        if sight.shape.kinds:
            return beginning.new(typed.Plan(schema, pins), {}, most=None).with_other(sight)
    return documents.first(typed.Plan(no_schema))


def _in_order(
    documents: looks.Documents,
    sight: typed.Inference,
    known_schema: DocumentSchema,
    joined: Callable[[Shape], tuple[DocumentSchema, tuple[Change, ...]]],
    pins: Pins,
) -> tuple[typed.Inference, DocumentSchema]:
    """The inference and the schema after the documents, read in their order: each is decoded by the schema of those before it.

    Both are the given ones where documents cannot be read in order, or where all of them are needed: one may be used as a map, or the
    columns are more than a table can have. Documents that seem new and change nothing, as with a pin, end the reading in order.
    """
    longer_sight, wider_schema = sight, known_schema
    while (next_look := documents.next_new(typed.Plan(wider_schema, pins))) is not None:
        longer_sight, narrower_schema = longer_sight.with_other(next_look), wider_schema
        wider_schema, _ = joined(longer_sight.shape)
        # A column may take two of the places: REGEX.
        if not _is_of_columns(longer_sight) or leaf_count(wider_schema.struct) >= MAX_COLUMNS - 1:
            documents.start_over()
            return sight, known_schema
        if wider_schema == narrower_schema:
            documents.start_over()
            break
    return longer_sight, wider_schema


def begun(
    documents: looks.Documents,
    *,
    options: unwrap_options.UnwrapOptions,
    pins: Pins,
    reserved: frozenset[str] = frozenset(),
) -> Evolution | None:
    """The schema from the first `BEGINNING` documents, as if they were a batch of their own.

    None where all documents are needed: there is none, or one may be used as a map, or may go to quarantine, and then must not add a
    column.
    """
    naming = _naming(options, reserved)
    sight = _first(documents, replace(document_schema.EMPTY, naming=naming), pins)
    if not sight.shape.kinds or not _is_of_columns(sight):
        return None
    return _joined(document_schema.EMPTY, sight, pins, naming)


def start_here(
    texts: pa.Array,
    places: pa.Array,
    *,
    current: DocumentSchema,
    options: unwrap_options.UnwrapOptions,
    pins: Pins,
    reserved: frozenset[str],
) -> Evolution | None:
    """The schema to type documents of this process: the current one, and for many documents with the changes of the first of them.

    None where there is no current schema and the first documents cannot give one (`begun`).
    """
    if len(texts) <= looks.BEGINNING:
        return unchanged(current, pins)
    documents, plan = looks.LocalDocuments(texts, places), typed.Plan(current, pins)
    if not current.fields:
        return begun(documents, options=options, pins=pins, reserved=reserved)
    # A change that is missed here only costs time: all documents are then typed again.
    sight = typed.Inference() if documents.seem_known(plan) else documents.first_unknown(plan)
    if not sight.shape.kinds or not _is_of_columns(sight):
        return unchanged(current, pins)
    return _joined(current, sight, pins, _naming(options, reserved))


def _naming(options: unwrap_options.UnwrapOptions, reserved: frozenset[str]) -> column_names.ColumnNaming:
    naming = column_names.ColumnNaming.of(options)
    return replace(naming, reserved=naming.reserved | reserved)


def _joined(current: DocumentSchema, sight: typed.Inference, pins: Pins, naming: column_names.ColumnNaming) -> Evolution:
    schema, changes = join(current, sight.shape, pins=pins, naming=naming)
    return Evolution(schema, changes, typed.Plan(schema, pins), seen_at=sight.low, beginning=sight)


def _is_of_columns(sight: typed.Inference) -> bool:
    """Whether the inferred fields are certainly columns: none may be used as a map, and no document may go to quarantine."""
    return not sight.refused and _most_fields(sight.shape) <= FEW_FIELDS


def _has_map(pins: Pins) -> bool:
    return any(pin.is_map for pin in pins.values())


def _most_fields(shape: Shape) -> int:
    """The greatest number of fields of a nested document."""
    inner = [*shape.fields.values(), *([] if shape.element is None else [shape.element])]
    return max((max(len(each.fields), _most_fields(each)) for each in inner), default=0)
