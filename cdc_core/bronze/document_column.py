"""A commit's column of documents, from texts, and from documents that are kept as bytes until the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from cdc_core.bronze import raw_event
from cdc_core.bronze.raw_event import FullDocument
from cdc_core.extended_json.batch_encoder import BatchEncoder, DocumentTexts
from cdc_core.stream import fields as field_filters

MAX_COLLECTIONS = 200
"""The number of collections whose encoder, with its learned field order, is kept."""

Namespace = tuple[str | None, str | None]


def filtered(texts: pa.ChunkedArray, *, fields: field_filters.FieldRules, name_conflicts: set[str]) -> pa.ChunkedArray:
    """`raw_event.filtered` for each of the texts."""
    filtered_texts = (
        raw_event.filtered(text.as_buffer().to_pybytes(), fields=fields, name_conflicts=name_conflicts) for text in texts
    )
    return pa.chunked_array([pa.array(filtered_texts, pa.string())])


@dataclass
class DocumentColumns:
    """Encodes documents of many collections, those of one collection at once."""

    _encoders: dict[Namespace, BatchEncoder] = field(default_factory=dict)

    def texts(
        self,
        documents: Sequence[bytes | FullDocument | None],
        namespaces: Sequence[Namespace],
        *,
        name_conflicts: set[str],
    ) -> DocumentTexts:
        """One text per row, null if there is no document; `lossy` are the places of byte documents with invalid UTF-8.

        The rules of byte documents are applied; `name_conflicts` is as in `raw_event.filtered`.
        """
        encoded_texts = [None if isinstance(document, FullDocument) else document for document in documents]
        full_documents: dict[Namespace, dict[int, FullDocument]] = {}
        for row, document in enumerate(documents):
            if isinstance(document, FullDocument):
                full_documents.setdefault(namespaces[row], {})[row] = document
        texts, index, count = [pa.array(encoded_texts, pa.string())], np.arange(len(encoded_texts)), len(encoded_texts)
        lossy: list[int] = []
        for namespace, by_row in full_documents.items():
            encoded, rows = self._encoder(namespace).encode([document.raw for document in by_row.values()]), [*by_row]
            fields = by_row[rows[0]].fields  # The same for all documents of a collection.
            if fields is not None:
                encoded = encoded._replace(texts=filtered(encoded.texts, fields=fields, name_conflicts=name_conflicts))
            # Most commits are of one collection, whose texts are the column already: nothing is copied.
            if len(by_row) == len(documents):
                return encoded
            index[rows] = count + np.arange(len(rows))
            count += len(rows)
            texts += encoded.texts.chunks
            lossy += [rows[place] for place in encoded.lossy]
        column = pa.chunked_array(texts, pa.string())
        return DocumentTexts(column.take(pa.array(index)) if full_documents else column, lossy)

    def _encoder(self, namespace: Namespace) -> BatchEncoder:
        """The collection's encoder; the least recently used one is forgotten."""
        encoder = self._encoders.pop(namespace, None) or BatchEncoder()
        self._encoders[namespace] = encoder
        if len(self._encoders) > MAX_COLLECTIONS:
            del self._encoders[next(iter(self._encoders))]
        return encoder
