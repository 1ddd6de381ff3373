"""A commit's column of documents: texts that are there already, and documents that stayed bytes until the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from cdc_core.bronze.raw_event import FullDocument
from cdc_core.extended_json.batch_encoder import BatchEncoder, DocumentTexts

MAX_COLLECTIONS = 200
"""Of so many collections it is kept what was learned of their documents' fields."""

Namespace = tuple[str | None, str | None]


@dataclass
class DocumentColumns:
    """Writes the documents of many collections, those of one at once."""

    _encoders: dict[Namespace, BatchEncoder] = field(default_factory=dict)

    def texts(self, documents: Sequence[bytes | FullDocument | None], namespaces: Sequence[Namespace]) -> DocumentTexts:
        """One text a row, null where there is no document; `lossy` are the places of documents that were bytes and not UTF-8."""
        ready = [None if isinstance(each, FullDocument) else each for each in documents]
        waiting: dict[Namespace, list[int]] = {}
        for place, each in enumerate(documents):
            if isinstance(each, FullDocument):
                waiting.setdefault(namespaces[place], []).append(place)
        texts, index = [pa.array(ready, pa.string())], np.arange(len(ready))
        lossy: list[int] = []
        for namespace, places in waiting.items():
            held = [each.raw for each in map(documents.__getitem__, places) if isinstance(each, FullDocument)]
            found = self._encoder(namespace).encode(held)
            index[places] = sum(map(len, texts)) + np.arange(len(places))
            texts += found.texts.chunks
            lossy += [places[each] for each in found.lossy]
        # Most commits are of one collection: what was written is the column, and its gigabytes are not copied.
        if [*waiting.values()] == [[*range(len(documents))]]:
            return DocumentTexts(pa.chunked_array(texts[1:], pa.string()), lossy)
        column = pa.chunked_array(texts, pa.string())
        return DocumentTexts(column.take(pa.array(index)) if waiting else column, lossy)

    def _encoder(self, namespace: Namespace) -> BatchEncoder:
        """The collection's, which becomes the last one to be forgotten."""
        encoder = self._encoders.pop(namespace, None) or BatchEncoder()
        self._encoders[namespace] = encoder
        if len(self._encoders) > MAX_COLLECTIONS:
            del self._encoders[next(iter(self._encoders))]
        return encoder
