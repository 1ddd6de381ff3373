"""Literals and identifiers in SQL: Spark's parser returns the original text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_core.sql.names import identifier, literal
from cdc_core.tables import layout as tables
from pipelines.delta.writer import Writer
from tests.harness import made_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIECES = (
    *("${env:HOME}", "${spark.app.name}", "${system:user.dir}", "${", "$", "}", "$$", "\\${x}", "\\u0024{env:HOME}"),
    *(
        "'",
        '"',
        "`",
        "\\",
        "\\\\",
        "\\'",
        "''",
        "\\n",
        "\\u0041",
        "\\101",
        "\\%",
        "%",
        "_",
        "\\x41",
        "\\U0001F642",
        "{{",
        "--",
        "/*",
    ),
    *(
        "\n",
        "\r",
        "\t",
        "\0",
        "\x1a",
        "\x7f",
        "\x85",
        "\u2028",
        "\ufeff",
        "ü",
        "ß",
        "🙂",
        "e\u0301",
        "\ud83d",
        "\udc00",
        "a",
        " ",
    ),
)
"""Texts with a meaning for some parser, and plain characters."""


@pytest.fixture(params=[True, False], ids=["substituting", "plain"])
def substituting(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """A session with variable substitution, as a platform may provide it, and one without."""
    name = "spark.sql.variable.substitute"
    before = spark.conf.get(name)
    spark.conf.set(name, str(request.param).lower())
    yield spark
    spark.conf.set(name, before or "true")


def texts(count: int) -> list[str]:
    chosen = random.Random(2)
    return [*PIECES, *("".join(chosen.choices(PIECES, k=chosen.randint(0, 8))) for _ in range(count))]


def test_literals(substituting: SparkSession) -> None:
    """A literal is the text, whatever it contains; half of a surrogate pair becomes U+FFFD."""
    found = texts(400)
    row = substituting.sql(f"SELECT array({', '.join(map(literal, found))}) AS texts").first()
    expected = ["".join("\ufffd" if "\ud800" <= each <= "\udfff" else each for each in text) for text in found]
    assert row.texts == expected


def test_identifiers(spark: SparkSession) -> None:
    """An identifier is the name, whatever it contains."""
    found = list(dict.fromkeys(text for text in texts(60) if text.isprintable() and text.strip() and text.isascii()))
    columns = ", ".join(f"{number} AS {identifier(name)}" for number, name in enumerate(found))
    assert spark.sql(f"SELECT {columns}").columns == found


@pytest.mark.parametrize("folder", ("🙂", "𠮷野家" * 9 + "🙂 🙂"))
def test_a_table_may_lie_below_characters_that_java_counts_twice(spark: SparkSession, tmp_path: Path, folder: str) -> None:
    """Delta replaces the clustering in the text of a statement, at another place than it is at behind such characters."""
    table, columns = tables.TableRef.at(str(tmp_path / folder / "table")), ("key", "other")
    made_tables.by_statement(spark, table, columns="`key` STRING, `other` INT", cluster_by=columns)
    with Writer.claim(spark, table).released() as writer:
        writer.replace(spark.createDataFrame([("a", 1)], "key STRING, other INT"), to=1, properties={}, cluster_by=columns)
    [detail] = spark.sql(f"DESCRIBE DETAIL {table}").collect()
    assert detail.clusteringColumns == [*columns]
    assert spark.table(str(table)).collect() == [("a", 1)]
