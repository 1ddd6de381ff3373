"""Types documents of this process by their collection's schema, and evolves the schema; for silver and for histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from cdc_core.typed.decoding import Decoder
from pipelines.delta import table_schema
from pipelines.schema import decoder_processes, looks
from pipelines.schema import log as schemas

if TYPE_CHECKING:
    from cdc_core.schema.document_schema import DocumentSchema
    from cdc_core.settings.parse import CollectionSettings


@dataclass
class DocumentTyper:
    """Types one collection's documents, batch by batch; keeps its decoder, which adapts to them."""

    options: CollectionSettings
    _decoder: Decoder | None = field(default=None, repr=False)

    def begun(
        self, texts: pa.Array, places: pa.Array, *, current: DocumentSchema, reserved: frozenset[str]
    ) -> schemas.Evolution | None:
        """The schema to type the documents by (`schemas.start_here`); None where the first documents cannot give one."""
        return schemas.start_here(
            texts, places, current=current, options=self.options.unwrap, pins=self.options.pins, reserved=reserved
        )

    def typed(
        self,
        texts: pa.Array,
        begun: schemas.Evolution,
        *,
        batches: Sequence[pa.Table],
        current: DocumentSchema,
        reserved: frozenset[str],
    ) -> tuple[list[schemas.Evolution], pa.StructArray] | None:
        """The changes of the documents to the schema, and their rows; None where some documents are unreadable, or may be.

        Where the schema `begun` does not cover all documents, the schema is evolved by each of `batches`, one after the other. These have
        the columns of `looks.LocalDocuments`: texts, and their places in the order.
        """
        # Without fields there is nothing to type by: each document would take the exact path, and be new.
        typed_texts = decoder_processes.typed(self._by(begun.schema), texts) if begun.schema.fields else None
        if typed_texts is not None and pc.any(typed_texts.refused).as_py():
            return None
        evolutions = [begun]
        if typed_texts is None or pc.any(typed_texts.new).as_py():
            # From all documents of a batch: fields that look like columns in the first ones may be keys of a map.
            evolutions = []
            for batch in batches:
                evolution = schemas.evolve(
                    looks.LocalDocuments(*map(table_schema.as_array, batch.columns)),
                    current=evolutions[-1].schema if evolutions else current,
                    options=self.options.unwrap,
                    pins=self.options.pins,
                    reserved=reserved,
                    beginning=begun.beginning,
                )
                evolutions.append(evolution)
            if typed_texts is None or evolutions[-1].schema.fields != begun.schema.fields:
                typed_texts = decoder_processes.typed(self._by(evolutions[-1].schema), texts)
                if pc.any(typed_texts.refused).as_py():
                    return None
        rows = typed_texts.with_doubts()
        return None if pc.any(rows.field("unreadable")).as_py() else (evolutions, rows)

    def _by(self, schema: DocumentSchema) -> Decoder:
        self._decoder = Decoder.kept(self._decoder, schema, self.options.pins)
        return self._decoder
