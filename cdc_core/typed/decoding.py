"""Documents' texts as Arrow columns: decoded in C by types generated for the schema, column by column.

`Decoder.typed` gives the same rows as `exact.rows`, and reports which documents would change the schema. Three checks
prove the fast path correct:

    the decoder refuses     a key without a column, a document where a scalar is expected, a number out of range, bad JSON
    the values' classes     are checked for each column before it is built: neither 5.5 nor "5" is an INT
    the number of keys      in the texts and in the decoded values differs if a document has a field twice

A value whose class its column does not expect (for DECIMAL and REGEX, every value) is converted alone by `cast.cast`:
it fits or is rescued. A refused document takes the exact path, and the decoder learns from it (a key that is always
null, an ObjectId in a column of strings), so that the next such document is fast. What it learned changes the speed,
never a result.
"""

from __future__ import annotations

import enum
import gc
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.schema import evolution, kinds
from cdc_core.schema.column_types import PARTS, Array, ColumnType, Map, Steps, Struct
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.pins import Pins
from cdc_core.schema.shape import Shape
from cdc_core.typed import exact
from cdc_core.typed.document_readers import DocumentReader, ReaderBuilder
from cdc_core.typed.lessons import Lessons
from cdc_core.typed.readers import ANY, Findings, NoneType, Where, count_keys

SLICE = 1 << 20
"""Approximate bytes of text decoded at once, so that the results stay in the processor's cache."""

SLICE_ROWS = 250
"""Minimum documents per slice, because each column has a fixed cost."""

_LARGE_SLICE = 16 << 20
"""Approximate bytes above which a slice has fewer documents: decoded numbers take up to nine times the memory of their text."""

_LESSON, _LATER_LESSONS = 8, 10
"""The decoder is rebuilt after this number of refused documents, then each time after ten times as many."""

_LESSON_BYTES = 8 << 10
"""A refused document counts as one, and as one more for each such part of its text: the exact path takes longer for it."""

_FEW = 4
"""The refused documents that are looked at first: mostly each of them shows a new field, or none does."""

_FIRST_ROWS, _FIRST_SLICE = 32, 256 << 10
"""The most documents of the first slice, and approximately the most bytes of several."""


class Detail(enum.Enum):
    """What is asked of typed texts: the rest is left out, because documents on the exact path take most of the time."""

    ALL = enum.auto()
    MARKS = enum.auto()
    """No rows: only which documents are new or refused."""
    KNOWN = enum.auto()
    """Nothing but that a document is new, if one is: the texts after it are not read."""


@dataclass(frozen=True)
class TypedTexts:
    """Texts as columns like `exact.rows`, with what is known about each document.

    `new`: the document may change the schema (false positives are possible, false negatives are not). `refused`: not
    strictly valid JSON. `exact` is the number that took the exact path.
    """

    rows: pa.StructArray
    new: pa.BooleanArray
    refused: pa.BooleanArray
    exact: int = 0

    def with_doubts(self) -> pa.StructArray:
        """`rows` with `is_doubtful` (new or refused); none of its rows is null."""
        document, rescued, unreadable = self.rows.flatten()
        columns = [document, rescued, pc.fill_null(unreadable, False), pc.or_(self.new, self.refused)]
        return pa.StructArray.from_arrays(columns, names=["document", "rescued", "unreadable", "is_doubtful"])


def slice_rows(texts: pa.Array) -> int:
    """How many of these texts make about `SLICE` bytes."""
    size_bytes: int = texts.nbytes
    wanted_rows, most_rows = (limit * max(1, len(texts)) // max(1, size_bytes) for limit in (SLICE, _LARGE_SLICE))
    return max(1, min(max(SLICE_ROWS, wanted_rows), most_rows))


def joined(schema: DocumentSchema, parts: Sequence[tuple[int, TypedTexts]]) -> TypedTexts:
    """The parts in one, ordered by their positions."""
    if len(parts) == 1:
        return parts[0][1]
    if not parts:
        return TypedTexts(pa.nulls(0, exact.result_type(schema)), pa.nulls(0, pa.bool_()), pa.nulls(0, pa.bool_()))
    sorted_parts = [part for _, part in sorted(parts, key=itemgetter(0))]
    rows, new, refused = zip(*((part.rows, part.new, part.refused) for part in sorted_parts))
    count = sum(part.exact for part in sorted_parts)
    return TypedTexts(pa.concat_arrays(rows), pa.concat_arrays(new), pa.concat_arrays(refused), count)


_pauses: list[None] = []
"""One entry for each block of `without_collector` that has not ended, of all threads."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Disables Python's garbage collector: among millions of values without cycles it would take most of the time."""
    _pauses.append(None)
    gc.disable()
    try:
        yield
    finally:
        _pauses.pop()
        if not _pauses:  # a block that begins at this moment enables it again at its own end
            gc.enable()


class Decoder:
    """Types texts by one schema, and learns from refused documents; not thread-safe."""

    def __init__(self, schema: DocumentSchema, pins: Pins | None = None) -> None:
        self.schema = schema
        self._fields = [pa.field(name, exact.arrow(type_)) for name, type_ in schema.table()]
        self._row_type = exact.result_type(schema)
        self.pins = pins or {}
        self._lessons = Lessons()
        self._refused, self._lesson = 0, _LESSON
        self._typed = 0
        self._root: DocumentReader | None = None
        self._dense: dict[Steps, DocumentReader] = {}
        self.sparse: set[Steps] = set()
        """Places whose documents are decoded key by key: they have few of very many fields, or keys that no struct has."""
        self._decode: Callable[[str], Any] = _refuse
        self._make()

    def typed(self, texts: pa.Array, detail: Detail = Detail.ALL) -> TypedTexts:
        """The row of each text; null for a null, and for all texts where the `detail` leaves out rows."""
        parts = []
        start = 0
        with without_collector():
            while start < len(texts):
                part = texts.slice(start, self.portion(texts))
                typed_texts = self.part(part, detail)
                if detail is Detail.KNOWN and typed_texts.new.true_count:
                    return typed_texts
                parts.append((start, typed_texts))
                start += len(part)
        return joined(self.schema, parts)

    def portion(self, texts: pa.Array) -> int:
        """How many of these texts to decode at once."""
        # Small at first: before the decoder has learned, thousands of documents, or large ones, would take the exact path.
        most_rows = _FIRST_SLICE * len(texts) // max(1, int(texts.nbytes))
        return min(slice_rows(texts), max(1, min(_FIRST_ROWS, most_rows)) + self._typed)

    def _make(self) -> None:
        """Builds the decoder for the schema and what was learned so far."""
        # Without fields there is nothing to decode into, and an array's column cannot take an array laid out as a
        # document.
        values = self.schema.naming.values
        if self.schema.fields and (values.are_kept or not _holds_array(self.schema.struct)):
            self.sparse |= self._lessons.irregular(self._typed)
            builder = ReaderBuilder(self.schema, self.pins, self._lessons, self.sparse)
            self._root = builder.document(self.schema.struct, (), ())
            self._dense = {place: reader for place, reader in builder.documents.items() if place not in self.sparse}
            self._decode = msgspec.json.Decoder(self._root.decoded).decode

    def part(self, texts: pa.Array, detail: Detail = Detail.ALL) -> TypedTexts:
        """`typed` for at most `portion` texts."""
        self._typed += len(texts)
        strings = texts.to_pylist()
        refused, unsure = _odd(texts, strings) if self._root is not None else ({*range(len(strings))}, set())
        accepted, structs = self._decoded(strings, refused)
        findings = Findings()
        try:
            decoded_rows = self._rows(structs, findings) if structs else None
            # One comparison for the whole slice; only if it fails, also when strings are counted precisely, is each
            # document checked.
            if (
                structs
                and _fields(texts, strings, accepted, unsure) != findings.keys
                and sum(_count_fields(strings[number]) for number in accepted) != findings.keys
            ):
                findings.hard.update(index for index, number in enumerate(accepted) if not _has_fields_once(strings[number]))
        except RecursionError:  # deeper than any BSON document
            accepted, findings, decoded_rows = [], Findings(), None
        hard_numbers = {number for number, text in enumerate(strings) if text is not None}.difference(accepted)
        exact_numbers = sorted(hard_numbers.union(accepted[index] for index in findings.hard))
        new_numbers = {accepted[index] for index in findings.new}
        if exact_numbers and not (new_numbers and detail is Detail.KNOWN):
            exact_texts = [strings[number] for number in exact_numbers]
            first = _FEW if detail is Detail.KNOWN else len(exact_texts)
            if self._change(exact_texts[:first]) or (exact_texts[first:] and self._change(exact_texts[first:])):
                new_numbers.update(exact_numbers)
        has_rows = detail is Detail.ALL or (detail is Detail.KNOWN and not new_numbers)
        rows = (
            self._assembled(strings, decoded_rows, accepted, exact_numbers)
            if has_rows
            else pa.nulls(len(strings), self._row_type)
        )
        if sparse_places := {place for place, reader in self._dense.items() if reader.is_sparse}:
            self.sparse |= sparse_places
            self._make()
        odd_numbers = {number for number in exact_numbers if not _is_json(strings[number])}
        return TypedTexts(rows, _flags(new_numbers, len(strings)), _flags(odd_numbers, len(strings)), len(exact_numbers))

    def _decoded(self, strings: Sequence[str | None], refused: set[int]) -> tuple[list[int], list[Any]]:
        """The numbers of the texts that the decoder accepts, and their decoded values."""
        decode = self._decode
        numbers, structs = [], []
        for number, text in enumerate(strings):
            if text is not None and number not in refused:
                try:
                    structs.append(decode(text))
                except (msgspec.DecodeError, RecursionError):
                    continue
                numbers.append(number)
        return numbers, structs

    def _rows(self, structs: list[Any], findings: Findings) -> pa.StructArray:
        """The rows of decoded documents, like `exact.rows`."""
        assert self._root is not None
        arrays: dict[tuple[str, ...], pa.Array] = {}
        if self.schema.naming.flatten:
            _, empty_documents = _flattened(self._root, structs, _root, (), arrays, findings)
            for row, path, text in empty_documents:
                findings.rescue(row, path, text)
        else:
            for item, reader, values, classes, place in self._root.members(structs, _root, findings):
                if reader is not None and classes != {NoneType}:
                    arrays[(item.name,)] = reader.read(values, classes, place, findings)
        count = len(structs)
        columns = [
            arrays[column.path] if column.path in arrays else pa.nulls(count, item.type)
            for column, item in zip(self.schema.columns, self._fields)
        ]
        rescued = pa.nulls(count, exact.RESCUED)
        if any(findings.rescued.values()):
            entries = [[*findings.rescued[row].items()] or None if row in findings.rescued else None for row in range(count)]
            rescued = pa.array(entries, exact.RESCUED)
        document = pa.StructArray.from_arrays(columns, fields=self._fields)
        unreadable = pa.array(itertools.repeat(False, count), pa.bool_())
        return pa.StructArray.from_arrays([document, rescued, unreadable], names=["document", "rescued", "unreadable"])

    def _assembled(
        self, strings: list[str | None], decoded_rows: pa.StructArray | None, accepted: list[int], exact_numbers: list[int]
    ) -> pa.StructArray:
        """All rows in order, from decoded documents and exact ones."""
        if decoded_rows is not None and len(accepted) == len(strings) and not exact_numbers:
            return decoded_rows
        parts = [] if decoded_rows is None else [decoded_rows]
        if exact_numbers:
            parts.append(exact.rows(pa.array([strings[number] for number in exact_numbers], pa.string()), self.schema))
        if not parts:
            return pa.nulls(len(strings), self._row_type)
        # The exact row wins if a document has both.
        places = {number: at for at, number in enumerate((*accepted, *exact_numbers))}
        order = pa.array([places.get(number) for number in range(len(strings))], pa.int64())
        return pa.concat_arrays(parts).take(order)

    def _change(self, texts: list[str]) -> bool:
        """Whether some of the documents would change the schema; the decoder learns from all of them."""
        shape = Shape()
        for text in texts:
            document = exact.observed(shape, text, "", values=self.schema.naming.values)
            if document is not None:
                self._lessons.learn(kinds.laid_out(document, self.schema.naming.values), self.schema.struct)
        self._refused += sum(1 + len(text) // _LESSON_BYTES for text in texts)
        # Rarely, because making a schema's structs costs far more than decoding a document.
        if self._refused >= self._lesson:
            while self._refused >= self._lesson:
                self._lesson *= _LATER_LESSONS
            self._make()
        return bool(evolution.join(self.schema, shape, pins=self.pins)[1])


def _holds_array(type_: ColumnType) -> bool:
    match type_:
        case Struct(fields):
            return any(_holds_array(field.type) for field in fields)
        case Map(value):
            return _holds_array(value)
        case _:
            return isinstance(type_, Array)


def _refuse(text: str) -> Any:
    raise msgspec.DecodeError


def _root(number: int) -> tuple[int, str | None]:
    return number, None


def _flattened(
    document: DocumentReader,
    structs: list[Any],
    where: Where,
    path: tuple[str, ...],
    arrays: dict[tuple[str, ...], pa.Array],
    findings: Findings,
    laid_out: Collection[int] = (),
) -> tuple[pa.BooleanArray, list[tuple[int, str | None, str]]]:
    """Puts the columns below a document into `arrays`. Returns where all of them are null, and the documents below that
    are empty, with their texts.
    """
    all_null = pa.array(itertools.repeat(True, len(structs)), pa.bool_())
    empty_documents: list[tuple[int, str | None, str]] = []
    for item, reader, values, classes, place in document.members(structs, where, findings, laid_out):
        column = (*path, item.name)
        if isinstance(reader, DocumentReader):
            inner_structs, absent, inner_laid_out = reader.structs(values, classes, place, findings)
            is_null, inner_empty = _flattened(reader, inner_structs, place, column, arrays, findings, inner_laid_out)
            holds_nothing = is_null if absent is None else pc.and_not(is_null, pa.array(absent, pa.bool_()))
            if holds_nothing.true_count:
                empty_documents += [
                    (*place(row), "[]" if row in inner_laid_out else "{}")
                    for row, is_empty in enumerate(holds_nothing.to_pylist())
                    if is_empty
                ]
            empty_documents += inner_empty
        elif reader is not None:
            array = reader.read(values, classes, place, findings)
            is_null = array.is_null()
            parts = PARTS.get(item.type, ())
            arrays.update(
                {(*column, part): pc.struct_field(array, number) for number, part in enumerate(parts)} or {column: array}
            )
        else:
            continue
        all_null = pc.and_(all_null, is_null)
    return all_null, empty_documents


def _bytes(texts: pa.Array) -> bytes:
    """The texts' bytes joined; they may include bytes hidden behind nulls."""
    offsets = memoryview(texts.buffers()[1]).cast("q" if pa.types.is_large_string(texts.type) else "i")
    data = texts.buffers()[2]
    if data is None:
        return b""
    return bytes(memoryview(data)[offsets[texts.offset] : offsets[texts.offset + len(texts)]])


_UNSURE = re.compile(r'\\\\":|"[ \t\r\n]+:')


def _odd(texts: pa.Array, strings: list[str | None]) -> tuple[set[int], set[int]]:
    """The numbers of texts that the fast path cannot read (possible lone surrogates), and of texts whose keys cannot be
    counted by their ends (a backslash or whitespace before the colon).
    """
    blob = _bytes(texts)  # searching for one byte is ten times as fast as for two
    has_spaces = (b" " in blob and b'" ' in blob) or any(sign in blob for sign in (b"\n", b"\t", b"\r"))
    has_escapes = b"\\" in blob
    refused = _numbers(_may_hold_surrogates, strings) if has_escapes and b"\\u" in blob else set()
    unsure = _numbers(_UNSURE.search, strings) if has_spaces or (has_escapes and b'\\\\":' in blob) else set()
    return refused, unsure


def _numbers(is_so: Callable[[str], object], strings: list[str | None]) -> set[int]:
    return {number for number, text in enumerate(strings) if text is not None and is_so(text)}


def _may_hold_surrogates(text: str) -> bool:
    unescaped = text.replace("\\\\", "")  # an escaped backslash escapes nothing
    return "\\ud" in unescaped or "\\uD" in unescaped


def _fields(texts: pa.Array, strings: list[str | None], accepted: list[int], unsure: set[int]) -> int:
    """The number of fields in these texts, counted by the bytes that end a key outside strings.

    A string that begins with a colon counts as well, so the count is never too small.
    """
    # If no text was refused, the buffer can be counted as it is.
    if len(accepted) == len(strings) and not unsure:
        blob = _bytes(texts)
    else:
        blob = "\n".join([strings[number] or "" for number in accepted if number not in unsure]).encode()
    count = blob.count(b'":') - (blob.count(b'\\":') if b"\\" in blob else 0)
    return count + sum(_count_fields(strings[number]) for number in unsure.intersection(accepted))


def _count_fields(text: str | None) -> int:
    """The number of fields in a JSON text: outside strings, each colon follows a key."""
    assert text is not None
    # Without escapes, quotes delimit strings.
    unescaped = text.replace("\\\\", "").replace('\\"', "")
    return "".join(unescaped.split('"')[::2]).count(":")


def _has_fields_once(text: str | None) -> bool:
    """Whether no field appears twice in the document."""
    assert text is not None
    try:
        document = ANY.decode(text)
    except (msgspec.DecodeError, RecursionError):  # a value that the decoder skipped
        return False
    return _count_fields(text) == count_keys(document)


def _is_json(text: str | None) -> bool:
    """Whether the text is strictly valid JSON; the exact path also accepts NaN and lone surrogates."""
    try:
        ANY.decode(text or "")
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def refused(texts: pa.Array) -> pa.BooleanArray:
    """Which texts are not strictly valid JSON."""
    return pa.array([text is not None and not _is_json(text) for text in texts.to_pylist()], pa.bool_())


def _flags(numbers: set[int], count: int) -> pa.BooleanArray:
    """True at these positions."""
    return pa.array(
        [number in numbers for number in range(count)] if numbers else itertools.repeat(False, count), pa.bool_()
    )
