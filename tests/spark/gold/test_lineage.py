"""Queries of incremental models, of which Spark's plan tells whether the rows of one key depend on rows with others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cdc_core.models import lineage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS = {"orders": ("customer",), "clients": ("_id",)}

APART = (
    "SELECT o.customer AS k, c.city, sum(amount) FROM orders o LEFT JOIN clients c ON c._id = o.customer GROUP BY 1, 2 "
    "HAVING sum(amount) > 0",
    "SELECT o.customer AS k FROM orders o, clients c, cities t WHERE o.customer = c._id AND t.city = c.city",
    "SELECT o.customer AS k FROM cities t RIGHT JOIN orders o ON t.city = o.note",
    "WITH o AS (SELECT customer AS k, _id AS c FROM orders LEFT JOIN clients ON _id = customer) "
    "SELECT o.k, amount FROM o LEFT JOIN orders p ON p.customer = o.c",
    "SELECT a.customer AS k, b.amount FROM orders a JOIN orders b ON a.customer <=> b.customer AND a.amount < b.amount",
    "SELECT coalesce(c._id, o.customer) AS k, amount FROM orders o FULL JOIN clients c ON o.customer = c._id",
    "SELECT _id AS k, amount, city FROM (SELECT customer AS _id, amount FROM orders) FULL JOIN clients USING (_id)",
    "SELECT k FROM (SELECT customer AS k, rank() OVER (PARTITION BY customer ORDER BY amount) AS r FROM orders) WHERE r < 3",
    "SELECT customer AS k, note, sum(amount) FROM orders GROUP BY customer, ROLLUP(note)",
    "SELECT DISTINCT CAST(customer AS STRING) AS k FROM orders LATERAL VIEW explode(items) AS i",
    "SELECT customer AS k, amount FROM orders UNION ALL SELECT _id, 1 FROM clients",
    "WITH big AS (SELECT * FROM orders WHERE amount > 1) SELECT x.customer AS k FROM big x JOIN big y ON x.customer = y.customer",
    "SELECT _id AS k FROM clients c WHERE NOT EXISTS (SELECT 1 FROM orders o WHERE o.customer = c._id)",
    "SELECT customer AS k FROM orders WHERE customer IN (SELECT _id FROM clients) AND note NOT IN (SELECT city FROM cities)",
    "SELECT _id AS k, (SELECT amount FROM orders o WHERE o.customer = c._id ORDER BY amount LIMIT 1) AS least FROM clients c",
    "SELECT _id AS k, amount FROM clients c, LATERAL (SELECT amount FROM orders o WHERE o.customer = c._id LIMIT 2)",
    "SELECT upper(note) AS k, count(*) FROM (SELECT customer AS note FROM orders WHERE amount > 0) GROUP BY 1",
)
"""A full run gives the same rows of a key as one over the rows with this key."""

MIXED = {
    "SELECT o.customer AS k FROM orders o JOIN clients c ON c.city = o.note": "a join of two tables that have a key does not",
    "SELECT o.customer AS k FROM orders o LEFT JOIN clients c ON c._id = o.amount": "a join of two tables that have a key",
    "SELECT o.customer AS k FROM orders o LEFT JOIN clients c ON _id = customer JOIN orders p ON p.customer <=> c._id": "a join of two",
    "SELECT c._id AS k FROM orders o LEFT JOIN clients c ON c._id = o.customer": "a SELECT leaves out the key",
    "SELECT coalesce(c._id, c._id) AS k FROM orders o FULL JOIN clients c ON c._id = o.customer": "a SELECT leaves out the key",
    "SELECT o.customer AS k FROM cities t LEFT JOIN orders o ON t.city = o.note": "an outer join keeps rows of a table without",
    "SELECT customer AS k, rank() OVER (ORDER BY amount) AS r FROM orders": "a window is not partitioned by the key",
    "SELECT customer AS k, note, sum(amount) FROM orders GROUP BY CUBE(customer, note)": "an aggregate is not grouped by the key",
    "SELECT max(customer) AS k FROM orders": "an aggregate is not grouped by the key",
    "SELECT amount AS k, count(*) FROM orders GROUP BY 1": "an aggregate is not grouped by the key",
    "SELECT customer AS k FROM (SELECT * FROM orders ORDER BY amount LIMIT 3)": "LIMIT selects among the keys",
    "SELECT customer AS k FROM orders TABLESAMPLE (10 ROWS)": "LIMIT selects among the keys",
    "SELECT customer AS k FROM orders UNION ALL SELECT 7": "a part of UNION reads no table that has a key",
    "SELECT customer AS k, note FROM orders UNION ALL SELECT city, _id FROM clients": "the parts of UNION have their keys in",
    "SELECT customer AS k FROM orders WHERE amount > (SELECT avg(amount) FROM orders)": "an aggregate is not grouped by the key",
    "SELECT customer AS k FROM orders WHERE note = (SELECT city FROM clients)": "a SELECT leaves out the key",
    "SELECT customer AS k FROM orders WHERE note = (SELECT _id FROM clients)": "a subquery reads a table that has",
    "SELECT _id AS k FROM clients WHERE _id NOT IN (SELECT customer FROM orders)": "a subquery reads a table that has a key",
    "SELECT id AS k FROM cities c WHERE NOT EXISTS (SELECT 1 FROM orders o WHERE o.customer = c.id)": "a subquery reads a table",
    "SELECT CAST(customer AS INT) AS k FROM orders GROUP BY CAST(customer AS INT) HAVING count(*) > 1": "a condition follows",
    "SELECT x.k FROM (SELECT upper(customer) AS k FROM orders) x JOIN clients c ON c._id = x.k": "a join follows the function",
    "SELECT upper(customer) AS k FROM orders EXCEPT SELECT id FROM cities": "EXCEPT follows the function that makes the key",
    "SELECT id AS k FROM cities": "it does not come from a table that has a key",
    "SELECT amount AS k, customer FROM orders": "k is not the key column",
}
"""By what a row of one key depends on rows with others."""


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Iterator[SparkSession]:
    """Two tables with a key and one without, as views."""
    columns = {
        "orders": {"customer": "STRING", "amount": "INT", "note": "STRING", "items": "ARRAY<INT>"},
        "clients": {"_id": "STRING", "city": "STRING"},
        "cities": {"city": "STRING", "id": "STRING"},
    }
    for view, types in columns.items():
        nulls = ", ".join(f"CAST(NULL AS {type_}) AS {name}" for name, type_ in types.items())
        spark.sql(f"SELECT {nulls} WHERE false").createOrReplaceTempView(view)
    yield spark
    for view in columns:
        spark.catalog.dropTempView(view)


def check(spark: SparkSession, query: str) -> None:
    analysed = spark.sql(f"SELECT * FROM ({query})")._jdf.queryExecution().analyzed()
    lineage.check(json.loads(analysed.toJSON()), KEYS, ["k"])


@pytest.mark.parametrize("query", APART)
def test_a_query_that_keeps_keys_apart_is_accepted(tables: SparkSession, query: str) -> None:
    """Each of its operations compares, groups by or keeps the key."""
    check(tables, query)


@pytest.mark.parametrize(("query", "why"), MIXED.items())
def test_a_query_that_mixes_keys_is_refused(tables: SparkSession, query: str, why: str) -> None:
    """An incremental run would leave rows as they were that a full run changes."""
    with pytest.raises(lineage.Mixed, match=f"^{why}"):
        check(tables, query)
