"""A commit's column of documents, from texts, and from documents that are kept as bytes until the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from cdc_core.bronze.raw_event import FullDocument
from cdc_core.extended_json.batch_encoder import BatchEncoder, DocumentTexts

MAX_COLLECTIONS = 200
"""The number of collections whose encoder, with its learned field order, is kept."""

Namespace = tuple[str | None, str | None]


@dataclass
class DocumentColumns:
    """Encodes documents of many collections, those of one collection at once."""

    _encoders: dict[Namespace, BatchEncoder] = field(default_factory=dict)

    def texts(self, documents: Sequence[bytes | FullDocument | None], namespaces: Sequence[Namespace]) -> DocumentTexts:
        """One text per row, null if there is no document; `lossy` are the places of byte documents with invalid UTF-8."""
        ready = [None if isinstance(each, FullDocument) else each for each in documents]
        waiting: dict[Namespace, dict[int, FullDocument]] = {}
        for place, each in enumerate(documents):
            if isinstance(each, FullDocument):
                waiting.setdefault(namespaces[place], {})[place] = each
        texts, index, count = [pa.array(ready, pa.string())], np.arange(len(ready)), len(ready)
        lossy: list[int] = []
        for namespace, held in waiting.items():
            found, places = self._encoder(namespace).encode([each.raw for each in held.values()]), [*held]
            # Most commits are of one collection, whose texts are the column already: nothing is copied.
            if len(held) == len(documents):
                return found
            index[places] = count + np.arange(len(places))
            count += len(places)
            texts += found.texts.chunks
            lossy += [places[each] for each in found.lossy]
        column = pa.chunked_array(texts, pa.string())
        return DocumentTexts(column.take(pa.array(index)) if waiting else column, lossy)

    def _encoder(self, namespace: Namespace) -> BatchEncoder:
        """The collection's encoder; the least recently used one is forgotten."""
        encoder = self._encoders.pop(namespace, None) or BatchEncoder()
        self._encoders[namespace] = encoder
        if len(self._encoders) > MAX_COLLECTIONS:
            del self._encoders[next(iter(self._encoders))]
        return encoder
