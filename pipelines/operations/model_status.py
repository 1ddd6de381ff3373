"""The state of each SQL model, from its file, its table's last commit and the tables that it refers to. Claims and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.models import sql_model
from cdc_core.settings.parse import Settings
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.gold import models
from pipelines.gold.candidate import no_audit
from pipelines.gold.model_inputs import ModelInputs
from pipelines.gold.model_table import ModelTable
from pipelines.operations import units
from pipelines.spark import failures as spark_failures


@dataclass(frozen=True)
class ModelStatus:
    """A model: `state` is `current`, `view`, `behind` (a run would make it again), `waits` (for a missing table) or `failed`.

    `age_seconds` is the time since its rows were made, None without any; `why` says why it is behind, waits or failed. A version that
    was refused by its expectations is not published: the model stays behind.
    """

    name: str
    state: str
    age_seconds: int | None = None
    why: str = ""

    @property
    def problem(self) -> str | None:
        """The state in words, None for a model that lacks nothing."""
        if self.state in ("current", "view"):
            return None
        made = "never made" if self.age_seconds is None else f"made {units.duration(self.age_seconds)} ago"
        return f"model {self.name}: {self.state}, {made}{f': {self.why}' if self.why else ''}"


def read(spark: SparkSession, settings: Settings, *, now_ms: int) -> tuple[ModelStatus, ...]:
    """The models in the order in which they are made, then the files with mistakes; nothing without `gold.models`."""
    if settings.gold.models is None:
        return ()
    try:
        order = models.ordered(spark, settings)
    except Exception as error:
        return (ModelStatus(settings.gold.models, "failed", why=errors.message_of(spark_failures.of_one(error))),)
    inputs = ModelInputs(spark, delta.layout(settings.lakehouse), {}, settings.name)
    wrong = (ModelStatus(each.path, "failed", why=each.message) for each in order.problems)
    return (*_statuses(spark, inputs, order.models, now_ms), *wrong)


def _statuses(
    spark: SparkSession, inputs: ModelInputs, found: tuple[sql_model.Model, ...], now_ms: int
) -> Iterator[ModelStatus]:
    for model in found:
        age: int | None = None
        try:
            table = inputs.layout.model(model.name)
            standing = table_history.standing(spark, table)
            if standing.position is not None and standing.metadata.get("to") is not None:
                age = max(0, now_ms - standing.position.timestamp_ms) // 1000
            missing = list(inputs.missing(model))
            if missing:
                yield ModelStatus(model.name, "waits", age, f"{', '.join(missing)}: not in gold yet")
            elif model.materialized is sql_model.Materialization.VIEW:
                inputs.note_view(model, model.name)  # none is made: no query is run here
                yield ModelStatus(model.name, "view")
            else:
                work = ModelTable(spark, model, inputs, no_audit).work()
                state = "current" if work.kind == "nothing" else "behind"
                yield ModelStatus(model.name, state, age, work.why)
        except Exception as error:
            yield ModelStatus(model.name, "failed", age, errors.message_of(spark_failures.of_one(error)))
