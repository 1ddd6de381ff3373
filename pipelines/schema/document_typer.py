"""Types documents of this process by their collection's schema, and evolves the schema; for silver and for histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.schema import evolution
from cdc_core.typed.decoding import Decoder, without_collector
from pipelines.delta import table_schema
from pipelines.schema import batch_evolution, decoder_processes, looks

if TYPE_CHECKING:
    from cdc_core.schema.document_schema import DocumentSchema
    from cdc_core.settings.parse import CollectionSettings

MANY_BYTES = 384 * 2**20
"""The bytes of columns above which documents are not typed here. Short texts may take many: a row has all of the table's columns."""

_COLUMN_BYTES = 4


@dataclass
class DocumentTyper:
    """Types one collection's documents, batch by batch; keeps its decoder, which adapts to them."""

    options: CollectionSettings
    _decoder: Decoder | None = field(default=None, repr=False)

    @without_collector()
    def typed(
        self,
        texts: pa.Array,
        batches: Sequence[pa.Table],
        *,
        current: DocumentSchema,
        reserved: frozenset[str],
        keeps_first: bool = False,
    ) -> tuple[list[batch_evolution.Evolution], pa.StructArray] | None:
        """The changes of the documents to the schema, and the rows of `texts`; None where some documents are unreadable, or may be, or where
        the rows are larger than `MANY_BYTES`.

        Where the first documents cannot give a first schema (`batch_evolution.start_here`), or the one that they give does not cover all
        `texts`, the schema is evolved by each of `batches`, one after the other. These have the columns of `looks.LocalDocuments`: texts, and
        their places in the order. With `keeps_first` the first documents count as a batch before them, if they give a schema.
        """
        options, pins = self.options.unwrap, self.options.pins
        first: batch_evolution.Evolution | None = batch_evolution.unchanged(current, pins)
        if len(batches) == 1:
            documents = map(table_schema.as_array, batches[0].columns)
            first = batch_evolution.start_here(*documents, current=current, options=options, pins=pins, reserved=reserved)
        first_schema = current if first is None else first.schema
        if _is_large(first_schema, texts):
            return None
        # Without fields there is nothing to type by: each document would take the exact path, and be new.
        typed_texts = decoder_processes.typed_if_known(self._by(first_schema), texts) if first_schema.fields else None
        if typed_texts is not None and pc.any(typed_texts.refused).as_py():
            return None
        evolutions = [] if first is None else [first]
        if typed_texts is None:
            # From all documents of a batch: fields that look like columns in the first ones may be keys of a map.
            evolutions = [first] if keeps_first and first is not None else []
            for batch in batches:
                evolution = batch_evolution.evolve(
                    looks.LocalDocuments(*map(table_schema.as_array, batch.columns)),
                    current=evolutions[-1].schema if evolutions else current,
                    options=options,
                    pins=pins,
                    reserved=reserved,
                    beginning=None if first is None else first.beginning,
                )
                evolutions.append(evolution)
            if _is_large(evolutions[-1].schema, texts):
                return None
            typed_texts = decoder_processes.typed(self._by(evolutions[-1].schema), texts)
            if pc.any(typed_texts.refused).as_py():
                return None
        is_unreadable = pc.struct_field(typed_texts.rows, "unreadable")
        return None if pc.any(is_unreadable).as_py() else (evolutions, typed_texts.rows)

    def _by(self, schema: DocumentSchema) -> Decoder:
        """The decoder, with what it learned in earlier batches if it has this schema."""
        if self._decoder is None or self._decoder.schema != schema:
            self._decoder = Decoder(schema, self.options.pins)
        return self._decoder


def row_bytes(schema: DocumentSchema) -> int:
    """The bytes of a typed row of which all values are null."""
    return len(evolution.leaf_paths(schema.fields, ())) * _COLUMN_BYTES


def _is_large(schema: DocumentSchema, texts: pa.Array) -> bool:
    """Whether the rows of these texts take more than `MANY_BYTES`, were all values null."""
    return len(texts) * row_bytes(schema) > MANY_BYTES
