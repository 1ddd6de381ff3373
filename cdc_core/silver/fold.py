"""Partial updates applied to stored documents (`updateDescription`), with the same result as on the server.

A removed field (`$unset`, in `removedFields`) is then absent from the document, and the column of an absent field is
null (`cdc_core.schema.cast.row`). For records of ExtractNewDocumentState see `cdc_core.unwrap.new_document_state`.
Silver folds in `pipelines.silver.partial_updates`, and without a Spark query in `in_process_fold`.

All functions work on parsed type-exact Extended JSON (`orjson.loads` of the output of
`cdc_core.extended_json.bson_to_json`) and never raise because of data: a base that is newer than the update, a path
that leads nowhere, and unreadable text all have defined results.

All paths of an update are resolved against the document (`update_paths`) before any is applied; then truncatedArrays,
updatedFields and removedFields are applied in this order.

Applying a whole history, or its end, to any later state of the document gives the history's final state.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.bronze import columns as bronze
from cdc_core.extended_json import wrappers
from cdc_core.silver import update_paths
from cdc_core.silver.update_paths import Document, Target, UndecidedPath

OUTPUT_BYTES = 64 * 1024 * 1024
"""A batch of results is closed at this size, so that no Arrow string column overflows."""


class PartialUpdate(NamedTuple):
    """The description of one update event; a tuple, because millions are made.

    Paths are the server's, with the fields' real names; values are parsed type-exact Extended JSON.
    `disambiguated_paths` is None if the server did not send it, which differs from an empty one.
    """

    sequence: str
    updated_fields: Mapping[str, Any]
    removed_fields: Sequence[str] = ()
    truncated_arrays: Sequence[tuple[str, int]] = ()
    disambiguated_paths: Mapping[str, Sequence[str | int]] | None = None
    is_readable: bool = True

    @classmethod
    def from_bronze(cls, struct: Mapping[str, Any]) -> PartialUpdate:
        """The update from a bronze row's `sequence` and `updateDescription`; see `unreadable` if it cannot be parsed."""
        description = struct["updateDescription"]
        if description is None:
            return cls.unreadable(struct["sequence"])
        return _update(struct["sequence"], *(description[field.name] for field in bronze.UPDATE_DESCRIPTION))

    @classmethod
    def unreadable(cls, sequence: str) -> PartialUpdate:
        """An update of which only the place in the order is known; it changes nothing and leaves the document incomplete."""
        return cls(sequence, {}, is_readable=False)


class FoldResult(NamedTuple):
    """A document after many updates; None if nothing about it is known."""

    document: Document | None
    incomplete: bool


def fold(base: Document | None, updates: Sequence[PartialUpdate]) -> FoldResult:
    """The document after the updates, which are sorted by `sequence` first.

    Without a base, the result has what the updates tell for certain (whole top-level fields) and is incomplete. An
    update that was already applied may be applied again together with those that follow it.
    """
    ordered = sorted(map(_owned, updates), key=_sequence)
    return _fold_in_place(None if base is None else _copied(base), ordered)


def folded_text(base: str | None, updates: Sequence[PartialUpdate]) -> tuple[str | None, bool]:
    """`fold` on texts of type-exact Extended JSON: the document (None if nothing is known), and whether it is incomplete."""
    document, incomplete = _folded(base, [_owned(update) for update in updates])
    return None if document is None else document.decode(), incomplete


def are_readable(descriptions: pa.StructArray) -> bool:
    """Whether all texts in these `updateDescription`s are documents."""
    texts = (descriptions.field(name).drop_null().to_pylist() for name in ("updatedFields", "disambiguatedPaths"))
    return all(map(is_document, itertools.chain.from_iterable(texts)))


def is_document(text: str | None) -> bool:
    """Whether a text is a document that updates can be folded onto."""
    return _read(text) is not None


def _fold_in_place(base: Document | None, updates: Sequence[PartialUpdate]) -> FoldResult:
    """The fold on values that it may change; the updates are in order."""
    if base is None and not updates:
        return FoldResult(None, True)
    document: Document = {} if base is None else base
    # Without a base, fields that no update names stay unknown.
    is_lost = base is None
    blocked: dict[str, int] = {}  # paths, each with the last update that ends there
    for number, update in enumerate(updates):
        for undecided in _apply_in_place(document, update):
            if undecided.blocked is None:
                is_lost = True
            else:
                blocked[undecided.blocked] = number
    return FoldResult(document, is_lost or not _are_explained(blocked, updates))


def _apply_in_place(document: Document, update: PartialUpdate) -> Sequence[UndecidedPath]:
    """Applies the decidable paths and returns the others; the document shares the update's values.

    All paths are resolved before any is applied. A dotted path leads into the earlier state, so it may be applied after
    undotted ones: if both are about one field, the whole field wins.
    """
    if not update.is_readable:
        return (UndecidedPath("", None),)
    fields, cuts = update.updated_fields, update.truncated_arrays
    names = update_paths.path_names(tuple(fields), tuple(update.removed_fields))
    readings = _readings(document, update, names) if cuts or names.dotted or names.dotted_gone else ()
    for path, size in cuts:
        if "." not in path:
            _truncate(document, update_paths.stored_name(path), size)
    for path, name in names.whole:
        document[name] = fields[path]
    for name in names.gone:
        document.pop(name, None)
    undecided: list[UndecidedPath] = []
    for edit, reading, argument in readings:
        if isinstance(reading, UndecidedPath):
            undecided.append(reading)
        elif reading is not None:
            edit(*reading, argument)
    return undecided


_Edit: TypeAlias = Callable[[Any, Any, Any], None]


def _readings(
    document: Document, update: PartialUpdate, names: update_paths.PathNames
) -> list[tuple[_Edit, Target | UndecidedPath | None, Any]]:
    """The edits for dotted paths, each with its target and its argument."""
    fields = update.updated_fields
    paths = fields.keys()
    edits: list[tuple[_Edit, str, Any]]
    # Truncation first, as on the server: a later set may extend the array again.
    edits = [(_truncate, path, size) for path, size in update.truncated_arrays if "." in path]
    edits += [(_set, path, fields[path]) for path in names.dotted]
    edits += [(_remove, path, None) for path in names.dotted_gone]
    named = update.disambiguated_paths
    # A path set inside a removed field has a dotted name: the field `a.b` beside the removed `a`.
    others = {*paths, *update.removed_fields} if update.removed_fields else paths
    dots = update_paths.NamesWithDots()

    def target(path: str, *, is_set: bool) -> update_paths.Target | update_paths.UndecidedPath | None:
        return update_paths.target(document, path, others if is_set else paths, named, is_set=is_set, dots=dots)

    return [(edit, target(path, is_set=edit is _set), argument) for edit, path, argument in edits]


def _set(container: Any, step: Any, value: Any) -> None:
    if isinstance(container, list) and step >= len(container):
        # As on the server, elements between the old end and the new one are null.
        container.extend([None] * (step + 1 - len(container)))
    container[step] = value


def _remove(container: Any, step: Any, _: None) -> None:
    """Removes a field. The server never removes array elements: an array here is newer than the update, and stays."""
    if isinstance(container, dict):
        container.pop(step, None)


def _truncate(container: Any, step: Any, size: int) -> None:
    """Truncates an array; anything else, or a shorter array, is newer than the update and stays."""
    if isinstance(container, dict):
        array = container.get(step)
    else:
        array = container[step] if step < len(container) else None
    if isinstance(array, list):
        del array[size:]


def _are_explained(blocked: Mapping[str, int], updates: Sequence[PartialUpdate]) -> bool:
    """Whether a later update explains each blocked path: the base is newer than both, and needs neither."""
    if not blocked:
        return True
    numbers_by_path: dict[str, list[int]] = {}
    cuts = [frozenset(_cut_paths(update)) for update in updates]
    for number, update in enumerate(updates):
        for path in (*update.updated_fields, *cuts[number]):
            numbers_by_path.setdefault(path, []).append(number)
    for path, last_number in blocked.items():
        # Only later updates that name the path or a parent of it: there may be a hundred thousand, and as many paths.
        prefixes = itertools.accumulate(path.split("."), "{}.{}".format)
        by_prefix = (numbers_by_path.get(prefix, ()) for prefix in prefixes)
        later = (numbers[at] for numbers in by_prefix for at in range(bisect.bisect(numbers, last_number), len(numbers)))
        if not any(_explains(updates[number], cuts[number], path) for number in later):
            return False
    return True


def _cut_paths(update: PartialUpdate) -> Sequence[str]:
    """The paths that an update removes or truncates."""
    return (*update.removed_fields, *(field for field, _ in update.truncated_arrays))


def _explains(update: PartialUpdate, cut: Collection[str], blocked: str) -> bool:
    """Whether this update is the reason that the path is blocked: it removed or truncated (`cut`) or replaced the path or
    a part of it. A base newer than both updates contains its effect.
    """
    components = blocked.split(".")
    for end in range(1, len(components) + 1):
        path = ".".join(components[:end])
        if path in cut:
            return True
        if path in update.updated_fields:
            # If a container continues there, the base that lacks it contains neither this update nor a later one.
            return not _leads_on(update.updated_fields[path], components[end:])
    return False


def _leads_on(value: Any, components: Sequence[str]) -> bool:
    """Whether the components lead to a container."""
    parts = update_paths.path_parts((*components, ""))
    return update_paths.is_container(value) and len(update_paths.containers(value, parts)[0]) == len(parts.components)


def _sequence(update: PartialUpdate) -> str:
    return update.sequence


def _owned(update: PartialUpdate) -> PartialUpdate:
    """The update with copied values, so that applying later ones does not change the argument."""
    return update._replace(updated_fields=_copied(update.updated_fields))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


# Arrow


def fold_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """One row `__key, document, incomplete` for each row `__key, base, updates`, in order; several batches if they are large.

    `base` STRING is the stored document or null, `updates` ARRAY<STRUCT<sequence, updateDescription>> in any order,
    `document` STRING the folded document as type-exact Extended JSON, null if nothing is known.
    """
    text = batch.schema.field("base").type
    schema = pa.schema([("__key", batch.schema.field("__key").type), ("document", text), ("incomplete", pa.bool_())])
    documents: list[bytes | None] = []
    incomplete: list[bool] = []
    start, size = 0, 0
    for base, updates in zip(batch.column("base").to_pylist(), _updates(batch.column("updates")), strict=True):
        document, is_incomplete = _folded(base, updates)
        documents.append(document)
        incomplete.append(is_incomplete)
        size += len(document or b"")
        if size >= OUTPUT_BYTES:
            yield _results(batch.column("__key").slice(start, len(documents)), documents, incomplete, schema)
            start, size, documents, incomplete = start + len(documents), 0, [], []
    yield _results(batch.column("__key").slice(start), documents, incomplete, schema)


def _results(
    keys: pa.Array, documents: Sequence[bytes | None], incomplete: Sequence[bool], schema: pa.Schema
) -> pa.RecordBatch:
    columns = [keys, pa.array(documents, schema.field("document").type), pa.array(incomplete, pa.bool_())]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _folded(base: str | None, updates: list[PartialUpdate]) -> tuple[bytes | None, bool]:
    """One row's result; an unreadable stored document counts as unknown."""
    # Spark's `collect_list` has no order.
    if len(updates) > 1:
        updates.sort(key=_sequence)
    document = _read(base)
    # The server may have changed either of two fields with one name, and the parsed document only has the last.
    is_lost = bool(updates) and document is not None and base is not None and _has_repeated(document, base)
    result = _fold_in_place(document, updates)
    return None if result.document is None else _written(result.document), result.incomplete or is_lost


def _read(text: str | None) -> Any:
    """The parsed document; None if there is none or the text is not a document."""
    if text is None:
        return None
    try:
        document = orjson.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _has_repeated(parsed: Document, text: str) -> bool:
    """Whether a document in the text has a field twice; `orjson` parses only the last of them."""
    try:
        if orjson.dumps(parsed) == text.encode():  # nearly all texts were written by orjson, and this is the cheapest check
            return False
    except orjson.JSONEncodeError:
        pass
    repeats: list[bool] = []
    try:
        json.loads(text, object_pairs_hook=lambda pairs: repeats.append(len(dict(pairs)) < len(pairs)))
    except RecursionError:
        return True
    return any(repeats)


def _written(document: Document) -> bytes:
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError:  # deeper than orjson's 254 levels
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _update(
    sequence: str,
    updated_fields: str | None,
    removed_fields: Sequence[str] | None,
    truncated_arrays: Sequence[Mapping[str, Any]] | None,
    disambiguated_paths: str | None,
) -> PartialUpdate:
    """An update from the texts of a bronze row."""
    updated = _paths(updated_fields)
    disambiguated = None if disambiguated_paths is None else _paths(disambiguated_paths)
    if updated is None or (disambiguated_paths is not None and not _is_division(disambiguated)):
        return PartialUpdate.unreadable(sequence)
    removed = removed_fields or ()
    cuts = [(cut["field"], cut["size"]) for cut in truncated_arrays] if truncated_arrays else ()
    # Two paths with one text (`a.b` in `a`, and a field `a.b`) cannot be told apart.
    other_paths = [*removed, *(field for field, _ in cuts)]
    names_twice = other_paths and len({*updated, *other_paths}) < len(updated) + len(other_paths)
    if names_twice:
        return PartialUpdate.unreadable(sequence)
    return PartialUpdate(sequence, updated, removed, cuts, disambiguated)


def are_steps(text: str) -> bool:
    """Whether a text is a usable `disambiguatedPaths`."""
    return _is_division(_paths(text))


def _is_division(named: Mapping[str, Any] | None) -> bool:
    """Whether each path is divided into its own steps: after a manual correction of an event they may be wrong, and the
    value would get into another field.
    """
    return named is not None and all(
        isinstance(steps, list) and ".".join(map(str, steps)) == path for path, steps in named.items()
    )


def _paths(text: str | None) -> Any:
    """A document whose names are paths, with their real names; None if the text is not a document, or has repeated fields."""
    if text is None:
        return {}
    document = _read(text)
    if document is None or _has_repeated(document, text):
        return None
    # Only escaped names contain these three characters; other texts need no copy.
    if document and '"$$' in text:
        return {wrappers.unescape_key(path): value for path, value in document.items()}
    return document


def _updates(column: pa.Array) -> Iterator[list[PartialUpdate]]:
    """The updates of each row, read column by column, which is several times as fast as row by row."""
    sequences, descriptions = column.flatten().flatten()
    rows = zip(sequences.to_pylist(), *map(_values, descriptions.flatten()), strict=True)
    described = descriptions.is_valid().to_pylist()
    updates = (
        _update(*row) if is_described else PartialUpdate.unreadable(row[0])
        for is_described, row in zip(described, rows, strict=True)
    )
    for count in pc.fill_null(pc.list_value_length(column), 0).to_pylist():
        yield list(itertools.islice(updates, count))


def _values(column: pa.Array) -> Sequence[Any]:
    """The values as Python objects; lists are cut from their flattened elements, which is several times as fast."""
    if column.null_count == len(column):
        return [None] * len(column)
    if not pa.types.is_list(column.type):
        values: list[Any] = column.to_pylist()
        return values
    elements = iter(column.flatten().to_pylist())
    counts = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
    return [list(itertools.islice(elements, count)) if count else () for count in counts]
