"""Encodes many BSON documents as type-exact Extended JSON in one walk over their fields.

A document is encoded here only if all of its bytes are verified: each name is expected, each type supported, each
length and each closing zero correct, each text valid UTF-8. Any other document is marked as odd.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from bson.decimal128 import Decimal128

from cdc_core.extended_json import bson_to_json, raw_bson, text_columns
from cdc_core.extended_json.field_order import FieldOrder
from cdc_core.extended_json.text_columns import Part, Places
from cdc_core.extended_json.wrappers import escape_key

VALUES_PER_STEP = 100
"""The cost of a step (values of one type in one field), in values that are encoded document by document."""

VALUE_BYTES = 16
"""The approximate size of a value with its name in BSON."""

PASSES = 3
SAMPLE = 8
"""The documents whose field order is learned in a pass; at most `PASSES` passes are made."""

MAX_DEPTH = 30
MAX_NAME = 64
MAX_ARRAY_BYTES = 16 * 1024
"""Documents with deeper nesting, longer names or larger arrays are odd."""

MAX_SCALARS_BYTES = 1024
"""The same for arrays of scalars: one step for each index is slower than encoding the document alone."""

LONG_BYTES = 80
"""Strings with a longer average are copied one by one: a copy takes about 100 ns, numpy four ns a byte."""

_PAD = 256
"""Zeros after the last document, so that reading past a wrong length stays in bounds."""

Path: TypeAlias = tuple[bytes | None, ...]
"""The names that lead to a document; None is any element of an array."""


class Unlike(Exception):
    """The documents have too little in common."""


_FIXED = {0x01: 8, 0x07: 12, 0x08: 1, 0x09: 8, 0x0A: 0, 0x10: 4, 0x11: 8, 0x12: 8, 0x13: 16}
_COUNTED = {0x02: 4, 0x03: 0, 0x04: 0, 0x05: 5}
"""The types whose value begins with its length, and what is to be added to that length."""

_SIZE = np.full(256, -1, np.int64)
_SIZE[list(_FIXED)] = list(_FIXED.values())
_MORE = np.full(256, -1, np.int64)
_MORE[list(_COUNTED)] = list(_COUNTED.values())

_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), "<u2")
_BOOLEANS = pa.array(["false", "true"])
_QUOTE, _SPACE, _BACKSLASH, _COMMA = b'" \\,'
_OBJECT_ID_LENGTH = 24


class BatchWalk:
    """One group of documents, encoded in the constructor; the result is in `texts` and `is_odd`.

    Methods take arrays with one entry per value: `at`, where it begins in the bytes of all documents; `limit` or
    `last`, where it must end at the latest; `row`, its document. The texts of documents in `is_odd` are undefined.
    """

    def __init__(self, documents: Sequence[bytes], orders: dict[Path, FieldOrder]) -> None:
        self._orders = orders
        self._raw = b"".join((*documents, bytes(_PAD)))
        self._bytes = np.frombuffer(self._raw, np.uint8)
        self._int32s, self._int64s = self._view("<i4"), self._view("<i8")
        self._uint64s, self._doubles = self._view("<u8"), self._view("<f8")
        sizes = np.fromiter(map(len, documents), np.int64, len(documents))
        ends = np.cumsum(sizes)
        self._steps = int(ends[-1]) // (VALUE_BYTES * VALUES_PER_STEP)
        self.is_odd = np.zeros(len(documents), bool)
        row = np.arange(len(documents))
        parts, end = self._documents((), ends - sizes, ends, row)
        self._mark(row, end != ends)
        self.texts = text_columns.joined(parts, len(documents))

    def _view(self, kind: str) -> npt.NDArray[Any]:
        """The values of a numpy type that begin at each byte."""
        width = np.dtype(kind).itemsize
        first = self._bytes[:width].view(kind)
        return np.lib.stride_tricks.as_strided(first, shape=(len(self._bytes) - width + 1,), strides=(1,))

    def _mark(self, row: Places, is_odd: npt.NDArray[np.bool_]) -> bool:
        """Mark the documents of odd values; returns whether there are any."""
        if not is_odd.any():
            return False
        self.is_odd[row[is_odd]] = True
        return True

    def _step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise Unlike

    def _documents(self, path: Path, at: Places, limit: Places, row: Places) -> tuple[list[Part], Places]:
        end = at + self._int32s[at]
        is_odd = (end < at + 5) | (end > limit)
        if self._mark(row, is_odd):
            at, end = np.where(is_odd, 0, at), np.where(is_odd, 5, end)
        self._mark(row, self._bytes[end - 1] != 0)
        # Nothing is read of an odd document: it ends where it begins.
        parts = self._fields(path, np.where(is_odd, end - 1, at + 4), end - 1, row)
        return parts, np.where(is_odd, limit, end)

    def _fields(self, path: Path, at: Places, last: Places, row: Places) -> list[Part]:
        order = self._orders.setdefault(path, FieldOrder())
        if not order.names:
            order.learn(self._names(at, last))
        parts, is_stuck = self._pass(order, path, at, last, row)
        text: pa.StringArray | None = None
        unread = np.arange(len(at))
        for _ in range(PASSES - 1):
            if not is_stuck.any():
                break
            # Their missing names are learned, and only they are read again.
            unread = unread[is_stuck]
            if not order.learn(self._names(at[unread], last[unread])):
                self.is_odd[row[unread]] = True
                break
            text = text_columns.joined(parts, len(at)) if text is None else text
            new_parts, is_stuck = self._pass(order, path, at[unread], last[unread], row[unread])
            mask = np.zeros(len(at), bool)
            mask[unread] = True
            text = pc.replace_with_mask(text, pa.array(mask), text_columns.joined(new_parts, len(unread)))
        else:
            self.is_odd[row[unread[is_stuck]]] = True
        return parts if text is None else [text]

    def _pass(
        self, order: FieldOrder, path: Path, at: Places, last: Places, row: Places
    ) -> tuple[list[Part], npt.NDArray[np.bool_]]:
        """The texts of one walk over the order, and which documents have fields that it did not reach."""
        if len(path) > MAX_DEPTH:
            raise Unlike
        parts: list[Part] = []
        is_first_certain = False
        for name in order.names:
            self._step()
            has_name = self._has(name, at, last)
            prefix = f",{orjson.dumps(escape_key(name.decode())).decode()}:"
            if has_name.all():
                value, at = self._values((*path, name), self._bytes[at], at + len(name) + 2, last, row)
                parts += [prefix, *value]
                is_first_certain = is_first_certain or len(parts) == len(value) + 1
            elif has_name.any():
                owners = np.flatnonzero(has_name)
                begin = at[owners]
                value, end = self._values(
                    (*path, name), self._bytes[begin], begin + len(name) + 2, last[owners], row[owners]
                )
                at = at.copy()
                at[owners] = end
                parts.append(text_columns.spread(text_columns.joined([prefix, *value], len(owners)), owners, len(at)))
        return text_columns.closed(parts, is_first_certain, len(at)), at != last

    def _has(self, name: bytes, at: Places, last: Places) -> npt.NDArray[np.bool_]:
        """Whether the name, with its NUL, follows the type byte at each place."""
        has_name: npt.NDArray[np.bool_] = at < last
        cstring = name + b"\0"
        for begin in range(0, len(cstring), 8):
            word = cstring[begin : begin + 8]
            mask = np.uint64((1 << 8 * len(word)) - 1)
            has_name &= self._uint64s[at + (1 + begin)] & mask == np.uint64(int.from_bytes(word, "little"))
        return has_name

    def _names(self, at: Places, last: Places) -> list[list[bytes]]:
        """The field names of a sample of the documents, as far as they can be read."""
        places = np.unique(np.linspace(0, len(at) - 1, SAMPLE).astype(np.int64))
        return [self._names_of(int(at[place])) for place in places if at[place] < last[place]]

    def _names_of(self, at: int) -> list[bytes]:
        names: list[bytes] = []
        with contextlib.suppress(ValueError):  # not BSON: the walk marks it as odd
            for element in raw_bson.elements(self._raw, at - 4):
                if len(element.name) > MAX_NAME or not is_text(pa.array([element.name]).view(pa.string())):
                    break
                names.append(element.name)
        return names

    def _values(
        self, path: Path, kinds: npt.NDArray[np.uint8], at: Places, limit: Places, row: Places
    ) -> tuple[list[Part], Places]:
        """The texts of the values, and where each value ends."""
        if (kinds == kinds[0]).all():
            return self._values_of(int(kinds[0]), path, at, limit, row)
        texts, places, ends = [], [], np.empty(len(at), np.int64)
        for kind in np.unique(kinds):
            members = np.flatnonzero(kinds == kind)
            parts, ends[members] = self._values_of(int(kind), path, at[members], limit[members], row[members])
            texts.append(text_columns.joined(parts, len(members)))
            places.append(members)
        return [text_columns.merged(texts, places)], ends

    def _values_of(self, kind: int, path: Path, at: Places, limit: Places, row: Places) -> tuple[list[Part], Places]:
        self._step()
        match kind:
            case 0x02:
                return self._strings(at, limit, row)
            case 0x03:
                return self._documents(path, at, limit, row)
            case 0x04:
                return self._arrays(path, at, limit, row)
            case 0x05:
                return self._binaries(at, limit, row)
        size = _FIXED.get(kind)
        if size is None:
            self.is_odd[row] = True
            return [""], limit
        end = at + size
        is_odd = end > limit
        if self._mark(row, is_odd):
            at, end = np.where(is_odd, 0, at), np.where(is_odd, limit, end)
        return self._fixed(kind, at, row), end

    def _fixed(self, kind: int, at: Places, row: Places) -> list[Part]:
        """The texts of values of a type with a fixed size."""
        match kind:
            case 0x01:
                return [_double_texts(self._doubles[at])]
            case 0x07:
                digits = _HEX[self._bytes[at[:, None] + np.arange(12)]].view(np.uint8)
                return ['{"$oid":"', text_columns.strings(digits, np.arange(len(at) + 1) * _OBJECT_ID_LENGTH), '"}']
            case 0x08:
                bytes_ = self._bytes[at]
                self._mark(row, bytes_ > 1)
                return [_BOOLEANS.take(pa.array(bytes_ & 1))]
            case 0x09:
                return ['{"$date":{"$numberLong":"', text_columns.digits(self._int64s[at]), '"}}']
            case 0x0A:
                return ["null"]
            case 0x10:
                return [text_columns.digits(self._int32s[at])]
            case 0x11:
                # The lower half is the increment, the upper half the seconds.
                timestamps = self._uint64s[at]
                seconds, increment = timestamps >> np.uint64(32), timestamps & np.uint64(0xFFFFFFFF)
                return ['{"$timestamp":{"t":', text_columns.digits(seconds), ',"i":', text_columns.digits(increment), "}}"]
            case 0x12:
                return ['{"$numberLong":"', text_columns.digits(self._int64s[at]), '"}']
            case _:
                return ['{"$numberDecimal":"', self._decimal_texts(at), '"}']

    def _decimal_texts(self, at: Places) -> pa.StringArray:
        low, high = self._uint64s[at], self._uint64s[at + 8]
        exponents = (high >> np.uint64(49) & np.uint64(0x3FFF)).astype(np.int64) - 6176
        # Arrow formats these: a coefficient of one word, up to six decimal places, and no zero, which may have a sign.
        is_plain = (high & np.uint64((1 << 49) - 1) == 0) & (low < np.uint64(1 << 63)) & (low > 0)
        is_plain &= (exponents <= 0) & (exponents > -7) & (high >> np.uint64(61) & np.uint64(3) != 3)
        exponents[~is_plain] = 1
        texts, places = [], []
        for exponent in np.unique(exponents):
            members = np.flatnonzero(exponents == exponent)
            if exponent > 0:
                raw = self._bytes[at[members, None] + np.arange(16)]
                other_texts = [bson_to_json.decimal_text(Decimal128.from_bid(value.tobytes())) for value in raw]
                texts.append(pa.array(other_texts, pa.string()))
            else:
                words = np.empty((len(members), 2), np.int64)
                coefficients = low[members].astype(np.int64)
                words[:, 0] = np.where(high[members] >> np.uint64(63) == 1, -coefficients, coefficients)
                words[:, 1] = words[:, 0] >> 63
                kind = pa.decimal128(38, int(-exponent))
                decimals = pa.Decimal128Array.from_buffers(kind, len(members), [None, pa.py_buffer(words)])
                texts.append(decimals.cast(pa.string()))
            places.append(members)
        return text_columns.merged(texts, places)

    def _strings(self, at: Places, limit: Places, row: Places) -> tuple[list[Part], Places]:
        size = self._int32s[at].astype(np.int64)
        end = at + 4 + size
        is_odd = (size < 1) | (end > limit)
        if self._mark(row, is_odd):
            at, size, end = np.where(is_odd, 0, at), np.where(is_odd, 1, size), np.where(is_odd, limit, end)
        # Includes the byte before the text and the NUL after it, which are replaced by quotes.
        text, offsets = self._cut(at + 3, size + 1)
        first, last = offsets[:-1], offsets[1:] - 1
        self._mark(row, text[last] != 0)
        text[first] = text[last] = _SPACE
        is_special = (text < _SPACE) | (text == _QUOTE) | (text == _BACKSLASH)
        is_escaped = np.logical_or.reduceat(is_special, first) if is_special.any() else None
        text[first] = text[last] = _QUOTE
        texts = text_columns.strings(text, offsets)
        if not is_text(texts):
            for place, (begin, stop) in enumerate(zip(first, offsets[1:], strict=True)):
                if not is_text(texts[place : place + 1]):
                    self.is_odd[row[place]] = True
                    text[begin:stop] = _SPACE
        if is_escaped is not None:
            escaped = [orjson.dumps(quoted[1:-1]) for quoted in texts.filter(pa.array(is_escaped)).to_pylist()]
            texts = pc.replace_with_mask(texts, pa.array(is_escaped), pa.array(escaped, pa.string()))
        return [texts], end

    def _binaries(self, at: Places, limit: Places, row: Places) -> tuple[list[Part], Places]:
        size = self._int32s[at].astype(np.int64)
        end = at + 5 + size
        # Subtype 2 repeats its length inside.
        is_odd = (size < 0) | (end > limit) | (self._bytes[at + 4] == 2)
        if self._mark(row, is_odd):
            at, size, end = np.where(is_odd, 0, at), np.where(is_odd, 0, size), np.where(is_odd, limit, end)
        data = self._bytes
        texts = [
            f'{base64.b64encode(data[begin + 5 : begin + 5 + length].tobytes()).decode()}","subType":"{data[begin + 4]:02x}'
            for begin, length in zip(at.tolist(), size.tolist(), strict=True)
        ]
        return ['{"$binary":{"base64":"', pa.array(texts, pa.string()), '"}}'], end

    def _cut(self, begin: Places, size: Places) -> tuple[npt.NDArray[np.uint8], Places]:
        """The bytes of the given ranges, concatenated, and their offsets."""
        offsets = np.zeros(len(begin) + 1, np.int64)
        np.cumsum(size, out=offsets[1:])
        if offsets[-1] > LONG_BYTES * len(begin):
            data = memoryview(self._raw)
            cut = bytearray().join([data[at:end] for at, end in zip(begin.tolist(), (begin + size).tolist(), strict=True)])
            return np.frombuffer(cut, np.uint8), offsets
        places = np.repeat((begin - offsets[:-1]).astype(np.int32), size)
        places += np.arange(offsets[-1], dtype=np.int32)
        return self._bytes[places], offsets

    def _arrays(self, path: Path, at: Places, limit: Places, row: Places) -> tuple[list[Part], Places]:
        end = at + self._int32s[at]
        largest = np.where(self._bytes[at + 4] == 0x03, MAX_ARRAY_BYTES, MAX_SCALARS_BYTES)
        is_odd = (end < at + 5) | (end > limit) | (end > at + largest)
        if self._mark(row, is_odd):
            at, end = np.where(is_odd, 0, at), np.where(is_odd, 5, end)
        self._mark(row, self._bytes[end - 1] != 0)
        items = self._items(np.where(is_odd, end - 1, at + 4), end - 1, row)
        end = np.where(is_odd, limit, end)
        if not len(items.at):
            return ["[]"], end
        owner = items.owner
        parts, _ = self._values((*path, None), items.kinds, items.at, items.end, row[owner])
        offsets = np.zeros(len(at) + 1, np.int32)
        np.cumsum(np.bincount(owner, minlength=len(at)), out=offsets[1:])
        lists = pa.ListArray.from_arrays(pa.array(offsets), text_columns.joined(parts, len(owner)))
        return ["[", pc.binary_join(lists, ","), "]"], end

    def _items(self, at: Places, last: Places, row: Places) -> _Items:
        """The elements of arrays, grouped by array."""
        groups: list[_Items] = []
        owner = np.flatnonzero(at < last)
        at, last = at[owner], last[owner]
        number = 0
        while len(owner):
            self._step()
            name = str(number).encode()
            kinds, begin = self._bytes[at], at + len(name) + 2
            size, extra_bytes = _SIZE[kinds], _MORE[kinds]
            end = begin + np.where(size < 0, self._int32s[begin] + extra_bytes, size)
            is_valid = self._has(name, at, last) & ((size >= 0) | (extra_bytes >= 0)) & (end >= begin) & (end <= last)
            if self._mark(row[owner], ~is_valid):
                owner, kinds, begin = owner[is_valid], kinds[is_valid], begin[is_valid]
                end, last = end[is_valid], last[is_valid]
            groups.append(_Items(owner, kinds, begin, end))
            has_more = end < last
            owner, at, last = owner[has_more], end[has_more], last[has_more]
            number += 1
        owners = np.concatenate([group.owner for group in groups] or [owner])
        order = np.argsort(owners, kind="stable")

        def ordered(name: str) -> npt.NDArray[Any]:
            return np.concatenate([getattr(group, name) for group in groups] or [owner])[order]

        return _Items(owners[order], ordered("kinds"), ordered("at"), ordered("end"))


class _Items(NamedTuple):
    """Elements of arrays: the index of their array, their type, and the bounds of their value."""

    owner: Places
    kinds: npt.NDArray[np.uint8]
    at: Places
    end: Places


def _double_texts(values: npt.NDArray[np.float64]) -> pa.StringArray:
    is_special = ~np.isfinite(values)
    if is_special.any():
        wrappers = [f'{{"$numberDouble":"{bson_to_json.special_double(value)}"}}' for value in values[is_special].tolist()]
        texts = _double_texts(np.where(is_special, 0.0, values))
        return pc.replace_with_mask(texts, pa.array(is_special), pa.array(wrappers, pa.string()))
    # orjson writes an array as it writes a Python float: the shortest exact text, with a point or an exponent.
    text = np.frombuffer(orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY), np.uint8)[1:-1]
    is_comma = text == _COMMA
    ends = np.append(np.flatnonzero(is_comma), len(text))
    return text_columns.strings(text[~is_comma], np.append(0, ends - np.arange(len(values))))


def is_text(texts: pa.StringArray) -> bool:
    """Whether all strings are valid UTF-8."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
