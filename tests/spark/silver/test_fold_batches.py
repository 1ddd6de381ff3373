"""The fold of partial updates as Spark runs it, over Arrow batches with the columns of a query."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_core.bronze import columns as bronze
from cdc_core.silver import reduce
from cdc_core.sql import arrow


def test_fold_batches_in_spark(spark: SparkSession) -> None:
    """Updates in any order are folded onto documents in an executor's process."""
    description = arrow.spark_type(bronze.UPDATE_DESCRIPTION)
    updates = spark.createDataFrame(
        [
            ("1", "2", ('{"a.b":5.0}', None, None, None)),
            ("1", "1", ('{"a":{"b":1}}', ["x"], [("c", 1)], None)),
            ("2", "1", ('{"a.b":{"$numberLong":"7"}}', None, None, '{"a.b":["a.b"]}')),
        ],
        f"key STRING, sequence STRING, updateDescription {description}",
    )
    bases = spark.createDataFrame([("1", '{"_id":1,"c":[1,2],"x":0}')], "key STRING, base STRING")
    collected = updates.groupBy("key").agg(F.collect_list(F.struct("sequence", "updateDescription")).alias("updates"))
    rows = collected.join(bases, "key", "left").select(F.col("key").alias("__key"), "base", "updates")
    folded = rows.mapInArrow(reduce.fold_rows, "__key STRING, document STRING, incomplete BOOLEAN")
    assert {tuple(row) for row in folded.collect()} == {
        ("1", '{"_id":1,"c":[1],"a":{"b":5.0}}', False),
        ("2", '{"a.b":{"$numberLong":"7"}}', True),
    }
