"""Documents typed on Spark's executors: Extended JSON text in, a struct of the table's columns out, in Arrow batches.

Each task decodes its texts with `decoding.Decoder`, which uses `exact` for what it cannot prove. Both are plain Python
on Arrow, so they run wherever Spark runs Python, including Spark Connect.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from cdc_core.properties.unwrap import FieldValues
from cdc_core.schema import column_types
from cdc_core.schema.document_schema import DocumentSchema
from cdc_core.schema.pins import Pin, Pins
from cdc_core.schema.shape import Shape
from cdc_core.sql.names import identifier
from cdc_core.typed import decoding, exact

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESCUED = "MAP<STRING, STRING>"


@dataclass(frozen=True)
class Plan:
    """How documents are typed: the schema, and the pins that may still change it."""

    schema: DocumentSchema
    pins: Pins = field(default_factory=dict)

    @property
    def document_ddl(self) -> str:
        """The type of the column `document`."""
        table = self.schema.table()
        fields = (f"{identifier(name)}: {column_types.ddl(type_)}" for name, type_ in table)
        return f"STRUCT<{', '.join(fields)}>"


def documents(df: DataFrame, *, plan: Plan) -> DataFrame:
    """`df`, with texts in `after`, and four more columns: `document`, `rescued`, `unreadable`, `is_doubtful`.

    `document` is a STRUCT of the table's columns in table order; `rescued` a MAP from dotted path to Extended JSON
    text, null if everything fit. A null text gives a null document. `unreadable`: the text is not a document, and the
    other two are null. `is_doubtful`: the document may change the schema, or is not strictly valid JSON. A caller that
    did not inspect the documents before must then write none of them.
    """
    from pyspark.sql import functions as sf

    result = f"STRUCT<document: {plan.document_ddl}, rescued: {RESCUED}, unreadable: BOOLEAN, is_doubtful: BOOLEAN>"
    typed = sf.arrow_udf(_typed(plan.schema.to_json(), dict(plan.pins)), result)
    names = ("document", "rescued", "unreadable", "is_doubtful")
    return (
        df.withColumn("__typed", typed(sf.col("after")))
        .withColumns({name: sf.col(f"__typed.{name}") for name in names})
        .drop("__typed")
    )


def _typed(schema_json: str, pins: Pins) -> Callable[[pa.Array], pa.Array]:
    def typed(texts: pa.Array) -> pa.Array:
        return decoder_of(schema_json, tuple(pins.items())).typed(texts).with_doubts()

    return typed


@functools.lru_cache(maxsize=16)
def decoder_of(schema_json: str, pins: tuple[tuple[tuple[str, ...], Pin], ...]) -> decoding.Decoder:
    """A process's decoder for one schema, with what it learned in earlier batches."""
    return decoding.Decoder(DocumentSchema.from_json(schema_json), dict(pins))


def decoder_of_plan(plan: Plan) -> decoding.Decoder:
    """A process's decoder for a plan; only one thread may use it at a time."""
    return decoder_of(plan.schema.to_json(), tuple(plan.pins.items()))


# --- inspecting documents -------------------------------------------------------------------------------------

INFERENCE_DDL = "inference STRING"


@dataclass(frozen=True)
class Inference:
    """What inspecting documents found.

    `shape` covers the documents that were inspected. `low` is the least order value of all rows, `refused` the number
    of texts that are not strictly valid JSON, `also` the number of rows that fulfil each condition. `is_cut`: there
    were more documents to inspect than requested, so `shape` is incomplete.
    """

    shape: Shape = field(default_factory=Shape)
    low: str | None = None
    refused: int = 0
    also: tuple[int, ...] = ()
    is_cut: bool = False

    def with_other(self, other: Inference) -> Inference:
        """Both combined."""
        shape = Shape()
        shape.add(self.shape)
        shape.add(other.shape)
        return Inference(
            shape=shape,
            low=min((part.low for part in (self, other) if part.low is not None), default=None),
            refused=self.refused + other.refused,
            also=tuple(map(sum, itertools.zip_longest(self.also, other.also, fillvalue=0))),
            is_cut=self.is_cut or other.is_cut,
        )

    def to_batch(self) -> pa.RecordBatch:
        """One row of `INFERENCE_DDL`."""
        return pa.RecordBatch.from_pydict({"inference": [msgspec.json.encode(self).decode()]})

    @staticmethod
    def of_row(row: Any) -> Inference:
        """The inverse of `to_batch`, from a row with access by name."""
        return msgspec.json.decode(row["inference"], type=Inference)


def is_new(plan: Plan, texts: pa.Array) -> tuple[pa.BooleanArray, pa.BooleanArray]:
    """Which documents the plan's schema may not hold (false positives are possible), and which texts are not strictly
    valid JSON.
    """
    typed_texts = decoder_of_plan(plan).typed(texts, decoding.Detail.MARKS)
    return typed_texts.new, typed_texts.refused


def shape(texts: pa.Array, marks: pa.Array, values: FieldValues) -> Shape:
    """The shape of these documents, each with its mark, in the layout of the options."""
    result = Shape()
    for text, mark in zip(texts.to_pylist(), marks.to_pylist()):
        exact.observed(result, text, mark, values=values)
    return result


def inference(
    plan: Plan, *, everything: bool = False, most: int | None = None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow` over texts, marks, order values, and conditions: one row of `INFERENCE_DDL` per partition.

    Documents that fit the plan's schema are not inspected unless `everything` is true; at most the first `most` of a
    partition are.
    """
    schema_json, pins = plan.schema.to_json(), tuple(plan.pins.items())
    values = plan.schema.naming.values

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        result, count = Inference(), 0
        for batch in batches:
            texts, marks, orders, *conditions = batch.columns
            if everything:
                new, refused = texts.is_valid(), decoding.refused(texts)
            else:
                typed_texts = decoder_of(schema_json, pins).typed(texts, decoding.Detail.MARKS)
                new, refused = typed_texts.new, typed_texts.refused
            count += new.true_count
            is_cut = most is not None and count > most
            new_shape = Shape() if is_cut else shape(texts.filter(new), marks.filter(new), values)
            low = min((order for order in orders.to_pylist() if order is not None), default=None)
            also = tuple(condition.true_count for condition in conditions)
            result = result.with_other(Inference(new_shape, low, refused.true_count, also, is_cut))
        yield result.to_batch()

    return look


def new_marks(plan: Plan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow` over texts and their marks: the marks of documents that the plan's schema may not hold."""
    schema_json, pins = plan.schema.to_json(), tuple(plan.pins.items())

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            texts, marks, *_ = batch.columns
            new = decoder_of(schema_json, pins).typed(texts, decoding.Detail.MARKS).new
            yield pa.RecordBatch.from_arrays([marks.filter(new)], names=["mark"])

    return look
