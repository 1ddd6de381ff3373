"""Many BSON documents of one collection as type-exact Extended JSON: field by field over all of them, and not document by document.

Documents of a collection look alike. Where one is decoded, proven and written with some sixty calls into C, numpy reads one field of a
thousand documents with one call, and Arrow joins the texts (`batch_walk`). What is odd there (repeated fields, kinds that are
rare, names that no other document has …) is written alone by `bson_to_json.encode`, which proves what it writes in its own way.
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
"""Documents of so many bytes are written at once: more take memory, fewer take longer."""

MIN_DOCUMENTS = 128
"""Fewer are written one by one, which is quicker."""

PAUSE = 16
"""After a group of documents that do not look alike so many are written one by one before the next is tried."""


class DocumentTexts(NamedTuple):
    """The texts of documents, in their order, and the places of those that had bytes which are not UTF-8."""

    texts: pa.ChunkedArray
    lossy: Sequence[int]


class BatchEncoder:
    """Writes the documents of one collection; what it has learned of their fields serves for the next ones."""

    def __init__(self) -> None:
        self._orders: dict[Path, FieldOrder] = {}
        self._pause = 0

    def encode(self, documents: Sequence[bytes]) -> DocumentTexts:
        """The texts of the documents, each as `bson_to_json.encode` writes it; ValueError where one is no BSON document."""
        texts: list[pa.Array] = []
        lossy: list[int] = []
        at = 0
        for group in _groups(documents):
            found = self._encode_group(group)
            texts += found.texts.chunks
            lossy += [at + each for each in found.lossy]
            at += len(group)
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
        odd = np.flatnonzero(walk.is_odd)
        if 2 * len(odd) > len(documents):
            self._orders, self._pause = {}, PAUSE
        if not len(odd):
            return DocumentTexts(pa.chunked_array([walk.texts]), ())
        alone = _one_by_one([documents[place] for place in odd.tolist()])
        texts = pc.replace_with_mask(walk.texts, pa.array(walk.is_odd), alone.texts.combine_chunks())
        return DocumentTexts(pa.chunked_array([texts]), [int(odd[place]) for place in alone.lossy])


def _groups(documents: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    begin = size = 0
    for place, document in enumerate(documents):
        if size > GROUP_BYTES:
            yield documents[begin:place]
            begin, size = place, 0
        size += len(document)
    yield documents[begin:]


def _one_by_one(documents: Sequence[bytes]) -> DocumentTexts:
    encoded = [bson_to_json.encode(each) for each in documents]
    texts = pa.chunked_array([pa.array([each.text for each in encoded], pa.string())])
    return DocumentTexts(texts, [place for place, each in enumerate(encoded) if each.lossy])
