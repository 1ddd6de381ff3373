"""Infers the shape of a batch's documents, for documents that Spark reads and for those of this process.

Both give the same result: they use the same marks of documents, and the same first documents.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_core.schema import evolution
from cdc_core.schema.shape import Shape
from cdc_core.typed import decoding
from cdc_core.typed import plan as typed

BEGINNING = 1000
"""The number of first documents that give a collection its first schema. Where more documents than this show something new, the first of
them are inferred from before the others."""

_LARGE_BYTES = 2**21
"""The bytes of the first documents above which few of them are inferred from, and the others decoded by what these gave."""

FEW = 100
"""The size of a sample from all parts of a batch: where it shows nothing new, the other documents seldom do."""

_DECODER_BYTES = 200
"""The bytes of documents whose inference takes as long as one column of a new decoder."""

_PART = 20
"""How many times those bytes are decoded at once: if a field begins in a part, all documents after it in the part take the exact path."""


class Documents(Protocol):
    """A batch's documents."""

    def first(self, plan: typed.Plan) -> typed.Inference:
        """The inference from the first `BEGINNING` documents."""

    def first_in_order(self) -> Documents | None:
        """The same first documents, where they can be read by `next_new` and are large enough for that to take less time."""

    def new(self, plan: typed.Plan, also: Mapping[str, str], *, most: int | None) -> typed.Inference:
        """The inference from all documents that the plan's schema does not cover.

        Where there are more than `most` of these, the inference may be cut (`is_cut`). `also` are conditions, as SQL by name, whose rows
        are counted.
        """

    def first_new(self, plan: typed.Plan, count: int) -> typed.Inference:
        """The inference from the first `count` documents that the plan's schema does not cover, after `new` was cut with the same plan."""

    def next_new(self, plan: typed.Plan) -> typed.Inference | None:
        """The inference from the next documents in order that the plan's schema does not cover; None after the last ones.

        Afterwards `new` looks at those alone. The plan of each call must hold what the calls before have inferred.
        """

    def start_over(self) -> None:
        """Look at all documents again, as if `next_new` had not been called."""


@dataclass(frozen=True)
class SparkDocuments:
    """The documents in the column `after` of `df`, ordered by its column `sequence`.

    For a `small` batch all documents count as the first ones, which saves the search for them.
    """

    df: DataFrame
    small: bool = False

    def first(self, plan: typed.Plan) -> typed.Inference:
        return self._look(self.df if self.small else self._beginning(), plan, everything=True)

    def first_in_order(self) -> Documents | None:
        return None  # each look is a query

    def new(self, plan: typed.Plan, also: Mapping[str, str], *, most: int | None) -> typed.Inference:
        return self._look(self.df, plan, also, most=most)

    def first_new(self, plan: typed.Plan, count: int) -> typed.Inference:
        marks = self._given(self.df).mapInArrow(typed.new_marks(plan), "mark STRING")
        return self._look(_up_to(self.df, _MARK, last=_last(marks, "mark", count)), plan)

    def next_new(self, plan: typed.Plan) -> typed.Inference | None:
        return None  # each look is a query

    def start_over(self) -> None:
        """There is nothing to take back."""

    def _beginning(self) -> DataFrame:
        """About the first `BEGINNING` rows: all up to a mark. Sorts by place first, and computes digests of few rows."""
        df = self.df
        for by in (_PLACE, _MARK):
            df = _up_to(df, by, last=_last(df, by, BEGINNING))
        return df

    def _look(
        self,
        df: DataFrame,
        plan: typed.Plan,
        also: Mapping[str, str] = {},
        *,
        everything: bool = False,
        most: int | None = None,
    ) -> typed.Inference:
        look = typed.inference(plan, everything=everything, most=most)
        rows = self._given(df, also).mapInArrow(look, typed.INFERENCE_DDL).collect()
        return functools.reduce(typed.Inference.with_other, map(typed.Inference.of_row, rows), typed.Inference())

    def _given(self, df: DataFrame, also: Mapping[str, str] = {}) -> DataFrame:
        conditions = [f"({condition}) AS also_{number}" for number, condition in enumerate(also.values())]
        return df.selectExpr("after AS text", f"{_MARK} AS mark", f"{_PLACE} AS place", *conditions)


_PLACE = "sequence"
"""SQL of a row's place in the order."""

_MARK = f"concat({_PLACE}, '/', hex(xxhash64(after)))"
"""SQL of a document's mark, which sorts by place. It ends with a digest, because rows of a snapshot's chunk share their place."""


def _last(df: DataFrame, by: str, count: int) -> str | None:
    """The greatest of the first `count` values of an expression; None without rows."""
    greatest: str | None = df.selectExpr(f"{by} AS by").orderBy("by").limit(count).agg(F.max("by")).first()[0]
    return greatest


def _up_to(df: DataFrame, by: str, *, last: str | None) -> DataFrame:
    return df if last is None else df.where(F.expr(by) <= F.lit(last))


class LocalDocuments:
    """Documents of this process: texts with their `places` in the order."""

    def __init__(self, texts: pa.Array, places: pa.Array) -> None:
        self._all = self._left = pa.RecordBatch.from_arrays([texts, places], names=["text", "place"])
        """`_left`: the documents that the schema may not cover."""
        self._ordered: pa.RecordBatch | None = None
        self._next = 0
        """The position in `_ordered` of the next document that `next_new` looks at."""
        self._refused = 0
        """The number of texts among the others that are not strictly valid JSON."""

    def first(self, plan: typed.Plan) -> typed.Inference:
        batch = _beginning(self._left, BEGINNING)
        refused_count = decoding.refused(batch["text"]).true_count
        return typed.Inference(_shape(batch, plan), _low(batch), refused_count)

    def first_in_order(self) -> Documents | None:
        texts = self._left["text"]
        # By their average, because the search for the first ones takes time.
        if texts.nbytes * min(BEGINNING, len(texts)) <= _LARGE_BYTES * len(texts):
            return None
        return LocalDocuments(*_beginning(self._left, BEGINNING).columns)

    def first_unknown(self, plan: typed.Plan) -> typed.Inference:
        """The inference from those of the first documents that the plan's schema does not cover."""
        return LocalDocuments(*_beginning(self._left, BEGINNING).columns).new(plan, {}, most=None)

    def seem_known(self, plan: typed.Plan) -> bool:
        """Whether the plan's schema covers a sample of them, which saves the search for the first documents."""
        texts = self._left["text"]
        sample = texts.take(pa.array(range(0, len(texts), max(1, len(texts) // FEW)), pa.int64()))
        with _LOOKING:
            is_new, _ = typed.is_new(plan, sample)
        return not is_new.true_count

    def new(self, plan: typed.Plan, also: Mapping[str, str], *, most: int | None) -> typed.Inference:
        assert not also
        low = _low(self._all)
        with _LOOKING:
            is_new, is_refused = typed.is_new(plan, self._left["text"])
        refused_count = self._refused + is_refused.true_count
        self._left = self._left.filter(is_new)
        if most is not None and self._left.num_rows > most:
            return typed.Inference(low=low, refused=refused_count, is_cut=True)
        return typed.Inference(_shape(self._left, plan), low, refused_count)

    def first_new(self, plan: typed.Plan, count: int) -> typed.Inference:
        return typed.Inference(_shape(_beginning(self._left, count), plan))

    def next_new(self, plan: typed.Plan) -> typed.Inference | None:
        if self._ordered is None:
            self._ordered, self._left = _in_order(self._left), self._left.slice(0, 0)
        texts, new_rows, new_bytes = self._ordered["text"], [], 0
        # Inferring from documents by a decoder that does not know them costs no more than the next decoder.
        enough_bytes = _DECODER_BYTES * evolution.leaf_count(plan.schema.struct)
        most_rows = max(1, _PART * enough_bytes * len(texts) // max(1, texts.nbytes))
        with _LOOKING, decoding.without_collector():
            decoder = typed.decoder_of_plan(plan)
            while self._next < len(texts) and new_bytes <= enough_bytes:
                rows = self._ordered.slice(self._next, min(most_rows, decoder.portion(texts)))
                self._next += rows.num_rows
                typed_texts = decoder.part(rows["text"], decoding.Detail.MARKS)
                if typed_texts.new.true_count:
                    new_rows.append(rows.filter(typed_texts.new))
                    new_bytes += new_rows[-1]["text"].nbytes
                self._refused += pc.and_not(typed_texts.refused, typed_texts.new).true_count
        if not new_rows:
            return None
        self._left = pa.concat_batches([self._left, *new_rows])
        return typed.Inference(_shape(pa.concat_batches(new_rows), plan))

    def start_over(self) -> None:
        self._left, self._ordered, self._next, self._refused = self._all, None, 0, 0


_LOOKING = threading.Lock()
"""Collections with the same schema share their plan's decoder, which only one thread may use at a time."""

_SEED = 42


def _in_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The documents by their marks."""
    places = batch["place"]
    if not places.null_count and pc.all(pc.less(places[:-1], places[1:])).as_py():
        return batch
    return batch.take(pc.sort_indices(_marks(batch)))


def _beginning(batch: pa.RecordBatch, count: int) -> pa.RecordBatch:
    """About the first `count` documents, the same as `SparkDocuments` finds."""
    for by in (lambda rows: rows["place"], _marks):
        if batch.num_rows <= count:
            break
        values = by(batch)
        last = values[pc.partition_nth_indices(values, pivot=count - 1)[count - 1].as_py()]
        is_up_to = pc.less_equal(values, last)
        if is_up_to.true_count < batch.num_rows:  # copying texts is slow
            batch = batch.filter(is_up_to)
    return batch


def _marks(batch: pa.RecordBatch) -> pa.StringArray:
    # The same as `_MARK` in SQL. In slices: copies of all texts as Python's bytes would double the memory.
    texts = batch["text"].cast(pa.binary())
    slices = (texts.slice(start, BEGINNING).to_pylist() for start in range(0, batch.num_rows, BEGINNING))
    digests = (f"{_digest(text):X}" for text in itertools.chain.from_iterable(slices))
    return pa.array([f"{place}/{digest}" for place, digest in zip(batch["place"].to_pylist(), digests)], pa.string())


def _digest(text: bytes | None) -> int:
    """Spark's `xxhash64` as an unsigned number; the seed for a null."""
    return _SEED if text is None else xxhash.xxh64_intdigest(text, seed=_SEED)


def _shape(batch: pa.RecordBatch, plan: typed.Plan) -> Shape:
    batch = batch.filter(batch["text"].is_valid())
    return typed.shape(batch["text"], _marks(batch), plan.schema.naming.values)


def _low(batch: pa.RecordBatch) -> str | None:
    low: str | None = pc.min(batch["place"]).as_py()
    return low
