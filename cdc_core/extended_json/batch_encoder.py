"""Many BSON documents of one collection as type-exact Extended JSON, encoded field by field over all of them.

Documents of one collection are mostly alike. Encoding one takes some sixty calls into C; here one numpy call reads a
field of a thousand documents, and Arrow joins the texts (`batch_walk`). Odd documents (repeated fields, rare types,
names that no other document has, …) are encoded one by one with `bson_to_json.encode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.extended_json import bson_to_json
from cdc_core.extended_json.batch_walk import BatchWalk, Path, Unlike
from cdc_core.extended_json.field_order import FieldOrder

GROUP_BYTES = 4 * 1024 * 1024
"""Documents are encoded in groups of this size: larger groups need more memory, smaller ones are slower."""

MIN_DOCUMENTS = 128
"""A group with fewer documents is encoded one by one, which is faster."""

PAUSE = 16
"""The number of groups that are encoded one by one after a group of dissimilar documents."""


class DocumentTexts(NamedTuple):
    """The texts of documents in their order, and the places of those that contained invalid UTF-8."""

    texts: pa.ChunkedArray
    lossy: Sequence[int]


class BatchEncoder:
    """Encodes documents of one collection, and remembers their field order for the next call."""

    def __init__(self) -> None:
        self._orders: dict[Path, FieldOrder] = {}
        self._pause = 0

    def encode(self, documents: Sequence[bytes]) -> DocumentTexts:
        """The texts of the documents, each as `bson_to_json.encode` writes it; raises `ValueError` if one is not BSON."""
        texts: list[pa.Array] = []
        lossy: list[int] = []
        start = 0
        for group in _groups(documents):
            group_texts = self._encode_group(group)
            texts += group_texts.texts.chunks
            lossy += [start + place for place in group_texts.lossy]
            start += len(group)
        return DocumentTexts(pa.chunked_array(texts, pa.string()), lossy)

    def _encode_group(self, documents: Sequence[bytes]) -> DocumentTexts:
        if len(documents) < MIN_DOCUMENTS or self._pause:
            self._pause = max(0, self._pause - 1)
            return _one_by_one(documents)
        try:
            walk = BatchWalk(documents, self._orders)
        except Unlike:
            self._orders, self._pause = {}, PAUSE
            return _one_by_one(documents)
        odd_places = np.flatnonzero(walk.is_odd)
        if 2 * len(odd_places) > len(documents):
            self._orders, self._pause = {}, PAUSE
        if not len(odd_places):
            return DocumentTexts(pa.chunked_array([walk.texts]), ())
        odd_texts = _one_by_one([documents[place] for place in odd_places.tolist()])
        texts = pc.replace_with_mask(walk.texts, pa.array(walk.is_odd), odd_texts.texts.combine_chunks())
        return DocumentTexts(pa.chunked_array([texts]), [int(odd_places[place]) for place in odd_texts.lossy])


def _groups(documents: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    begin = size = 0
    for place, document in enumerate(documents):
        if size > GROUP_BYTES:
            yield documents[begin:place]
            begin, size = place, 0
        size += len(document)
    yield documents[begin:]


def _one_by_one(documents: Sequence[bytes]) -> DocumentTexts:
    encoded = [bson_to_json.encode(document) for document in documents]
    texts = pa.chunked_array([pa.array([text.text for text in encoded], pa.string())])
    return DocumentTexts(texts, [place for place, text in enumerate(encoded) if text.lossy])
