"""SQL models over gold, computed from changes in the tables that they refer to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkException

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta import maintenance, query_execution, table_history
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import current, model_changes, models
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from tests.harness import bronze_rows, gold_shop, sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.journey  # minutes on a slow machine

TOTALS = """\
{{ config(materialized='incremental', unique_key='customer') }}
SELECT o.customer, c.city, sum(o.amount) AS total, count(*) AS orders
FROM {{ ref('cases.orders', key='customer') }} AS o
LEFT JOIN {{ ref('cases.customers', key='_id') }} AS c ON c._id = o.customer
GROUP BY o.customer, c.city
HAVING sum(o.amount) > 0
"""
BIG = "{{ config(materialized='view') }}\nSELECT * FROM {{ ref('totals') }} WHERE total > 10;\n"
CITIES = "SELECT city, sum(total) AS total FROM {{ ref('big') }} GROUP BY city\n"
DESCRIBED = """\
version: 2
models:
  - name: totals
    description: What each customer's orders cost.
    columns:
      - {name: total, description: The sum of the orders.}
"""


MakeShop = Callable[..., gold_shop.Shop]


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> MakeShop:
    return lambda **files: gold_shop.made(spark, tmp_path, files)


def anew(made: gold_shop.Shop) -> set[tuple[Any, ...]]:
    """The rows of the complete query of `totals` over the current gold tables."""
    layout = delta.layout(made.settings.lakehouse)
    text = TOTALS.partition("\n")[2]
    for name in ("orders", "customers"):
        key = {"orders": "customer", "customers": "_id"}[name]
        text = text.replace(f"{{{{ ref('cases.{name}', key='{key}') }}}}", str(layout.gold("cases", name)))
    return {tuple(row) for row in made.spark.sql(text).collect()}


def test_models_follow_their_tables(shop: MakeShop) -> None:
    """An incremental model recomputes the keys that changed, from their old and new rows; other models are computed completely; without a
    change nothing is computed.
    """
    made = shop(totals=TOTALS, big=BIG, cities=CITIES)

    def held() -> int:
        """The number of cached sets of rows, except those of Delta's logs."""
        names = [rdd.name() or "" for rdd in made.spark.sparkContext._jsc.getPersistentRDDs().values()]
        return sum("Delta" not in name for name in names)

    before = held()
    (made.folder / "models.yml").write_text(DESCRIBED)
    assert [each.would.split()[0] for each in models.check(made.spark, made.settings)] == ["wait", "wait", "wait"]
    assert set(made.run().values()) == {"waits"}

    made.change("customers", {"_id": 1, "city": "Graz"}, {"_id": 2, "city": "Lyon"})
    made.change("orders", *({"_id": n, "customer": n % 3, "amount": n} for n in range(12)))
    (made.folder / "typed.sql").write_text("SELECT * FROM {{ ref('cases.ordes') }}")
    assert {each.name: each.would for each in models.check(made.spark, made.settings)}["typed"] == (
        "wait for cases.ordes (did you mean cases.orders?), which gold does not hold yet"
    )
    (made.folder / "typed.sql").unlink()
    assert made.run() == {"totals": "whole", "big": "view", "cities": "whole"}
    assert made.rows("totals") == anew(made) == {(0, None, 18, 4), (1, "Graz", 22, 4), (2, "Lyon", 26, 4)}
    assert made.rows("cities") == {(None, 18), ("Graz", 22), ("Lyon", 26)}
    assert made.run() == {"totals": "nothing", "big": "view", "cities": "nothing"}
    table = delta.layout(made.settings.lakehouse).model("totals")
    said = {row.col_name: row.comment for row in made.spark.sql(f"DESCRIBE {table}").collect()}
    assert said["total"] == "The sum of the orders." and not said["orders"]
    detail = made.spark.sql(f"DESCRIBE DETAIL {table}").first()
    assert detail is not None and detail.description == "What each customer's orders cost."

    made.change("orders", {"_id": 5, "customer": 1, "amount": 5}, {"_id": 12, "customer": None, "amount": 3})
    would = {each.name: each.would for each in models.check(made.spark, made.settings)}
    assert "keys that changed" in would["totals"] and "whole" in would["cities"]
    assert made.run() == {"totals": "changed", "big": "view", "cities": "whole"}
    assert made.rows("totals") == anew(made)
    made.change("orders", gone=(1, 4, 7, 10, 5))
    made.change("customers", {"_id": 2, "city": "Bergen"})
    assert made.run()["totals"] == "changed"
    assert made.rows("totals") == anew(made) == {(None, None, 3, 1), (0, None, 18, 4), (2, "Bergen", 21, 3)}
    assert held() <= before, "rows that were computed on the way stay in memory"


def test_what_was_compacted_is_no_change(shop: MakeShop) -> None:
    """After a compaction, and a VACUUM that removed the older files, a change of one key recomputes this key only; moved rows are not
    compared.
    """
    made = shop(totals=TOTALS)
    made.change("customers", {"_id": 1, "city": "Graz"}, {"_id": 2, "city": "Lyon"})
    made.change("orders", *({"_id": n, "customer": n % 3, "amount": n} for n in range(12)))
    assert made.run() == {"totals": "whole"}
    orders = delta.layout(made.settings.lakehouse).gold("cases", "orders")
    moved = made.spark.sql(f"OPTIMIZE {orders}").first()
    assert moved is not None and moved.metrics.numFilesRemoved > 1
    with query_execution.session_confs(made.spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        made.spark.sql(f"VACUUM {orders} RETAIN 0 HOURS").collect()
    made.change("orders", {"_id": 5, "customer": 1, "amount": 6})
    assert made.run() == {"totals": "changed"}
    assert made.rows("totals") == anew(made)


def test_a_model_that_takes_in_keys_all_the_time_stays_in_few_files(shop: MakeShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each MERGE adds a file and reads all existing ones. Models that refer to this one see no change in compacted files."""
    monkeypatch.setattr(maintenance, "MANY_FILES", 2)
    each = "{{ config(materialized='incremental', unique_key='_id') }} SELECT _id, amount FROM {{ ref('cases.orders', key='_id') }}"
    made = shop(each=each, of_each=each.replace("cases.orders", "each"))
    made.change("orders", {"_id": 0, "customer": 1, "amount": 0})
    made.run()
    for key in range(1, 5):
        made.change("orders", {"_id": key, "customer": 1, "amount": key})
        assert made.run() == {"each": "changed", "of_each": "changed"}
        assert made.rows("of_each") == {(number, number) for number in range(key + 1)}
        assert made.run() == {"each": "nothing", "of_each": "nothing"}
    assert delta.size(made.spark, delta.layout(made.settings.lakehouse).model("each")).files <= 2


def test_a_position_that_moves_alone_is_no_change(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position of a collection without events moves with batches of other collections, and models over it are not recomputed."""
    monkeypatch.setattr(registry, "IDLE_BATCHES", 1)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "cities.sql").write_text(
        "SELECT city, count(*) AS n FROM {{ ref('cases.customers') }} GROUP BY city"
    )
    chosen = settings.parse(
        {
            "name": "hand",
            "lakehouse": {"root": str(tmp_path / "lakehouse")},
            "source": {"mongodb.connection.string": "${env:NOWHERE}"},
            "gold": {"models": str(tmp_path / "models")},
        }
    )
    layout = delta.layout(chosen.lakehouse)
    log = bronze_rows.Log(spark, layout.bronze("hand"))

    def made(collection: str, at: int) -> str:
        """The effect on the model of one document in a collection."""
        log.append({collection: [{"op": "c", "key": at, "at": at, "after": {"_id": at, "city": "Graz"}}]})
        silver.run(spark, chosen, sessions=sessions.kept(spark))
        gold.run(spark, chosen, sessions=sessions.kept(spark))
        return models.run(spark, chosen).models[0].did

    assert made("customers", 1) == "whole"
    customers, before = layout.gold("cases", "customers"), []
    for at in (2, 3):
        before.append(table_history.standing(spark, customers).metadata["to"])
        assert made("orders", at) == "nothing"
    assert before[0] < before[1] < table_history.standing(spark, customers).metadata["to"]
    assert made("customers", 4) == "whole"


def test_a_query_that_fails_or_repeats_its_key_changes_nothing(shop: MakeShop) -> None:
    """The last good version stays, models that refer to it wait, and other models are computed. The error contains no values."""
    made = shop(
        each="{{ config(materialized='incremental', unique_key='c') }} "
        "SELECT customer AS c, _id FROM {{ ref('cases.orders', key='customer') }}",
        after="SELECT * FROM {{ ref('each') }}",
        other="SELECT count(*) AS n FROM {{ ref('cases.orders') }}",
        strays="{{ config(materialized='incremental', unique_key='n') }} "
        "SELECT upper(note) AS n, count(*) AS c FROM {{ ref('cases.orders', key='note') }} GROUP BY 1",
        casts="SELECT CAST(note AS INT) AS n FROM {{ ref('cases.orders') }}",
    )
    made.change("orders", {"_id": 1, "customer": 1, "note": "7"}, {"_id": 2, "customer": 2, "note": "8"})
    assert set(made.run().values()) == {"whole"}
    made.change("orders", {"_id": 3, "customer": 1, "note": "a secret"})
    with pytest.raises(errors.DecisionNeeded) as refused:
        made.run()
    assert "each.sql: unique_key c is not unique: 1 keys" in str(refused.value)
    assert "casts.sql: the query failed on these rows: CAST_INVALID_INPUT" in str(refused.value)
    assert "strays.sql: unique_key n has values that are not in ref('cases.orders', key='note')" in str(refused.value)
    assert "a secret" not in str(refused.value).lower()
    assert made.rows("each") == made.rows("after") == {(1, 1), (2, 2)}
    assert made.rows("strays") == {("7", 1), ("8", 1)}
    assert made.rows("other") == {(3,)}


def test_a_key_may_have_another_type_and_not_another_value(shop: MakeShop) -> None:
    """Spark compares '0007' and 7 as numbers. Rows of a key without documents stayed, because no key had exactly that value."""
    of = "{{{{ config(materialized='incremental', unique_key='c') }}}} SELECT {} AS c, count(*) AS n FROM {{{{ ref('cases.orders', key='customer') }}}} GROUP BY 1"
    made = shop(texts=of.format("CAST(customer AS STRING)"))
    made.change("orders", {"_id": 1, "customer": 1}, {"_id": 2, "customer": 2})
    assert made.run() == {"texts": "whole"}
    made.change("orders", {"_id": 1, "customer": 2})
    assert made.run() == {"texts": "changed"}
    assert made.rows("texts") == {("2", 2)}
    (made.folder / "padded.sql").write_text(of.format("lpad(CAST(customer AS STRING), 4, '0')"))
    with pytest.raises(errors.SettingsError, match=r"padded\.sql: unique_key c has values that are not in"):
        made.run()


def test_a_key_that_got_another_type_makes_the_model_whole(shop: MakeShop) -> None:
    """After `schema.on.conflict: retype` the numbers of a key are texts: '7' and '0007' were both taken for the former 7, and the model was
    refused in every run, for a key that its table did have."""
    made = shop(
        texts="{{ config(materialized='incremental', unique_key='c') }} SELECT CAST(customer AS STRING) AS c, count(*) AS n "
        "FROM {{ ref('cases.orders', key='customer') }} GROUP BY 1"
    )
    made.change("orders", {"_id": 1, "customer": 7}, {"_id": 2, "customer": 8})
    assert made.run() == {"texts": "whole"}
    table = delta.layout(made.settings.lakehouse).gold("cases", "orders")
    with Writer.claim(made.spark, table).released() as writer:
        rows = made.spark.sql(f"SELECT _id, CAST(customer AS STRING) AS customer, amount, note FROM {table}")
        padded = made.spark.createDataFrame([(3, "0007", None, None)], rows.schema)
        writer.overwrite(rows.unionByName(padded), to=99)
    assert made.run() == {"texts": "whole"}
    assert made.rows("texts") == {("7", 1), ("8", 1), ("0007", 1)}


@pytest.mark.parametrize("made_of", ["upper(note)", "CAST(note AS INT)"])
def test_a_key_that_is_made_of_several_keys_is_refused(shop: MakeShop, made_of: str) -> None:
    """A change of one of these keys recomputed the row without the documents of the others."""
    made = shop(
        counts=f"{{{{ config(materialized='incremental', unique_key='n') }}}} SELECT {made_of} AS n, count(*) AS c "
        "FROM {{ ref('cases.orders', key='note') }} WHERE note <> '' GROUP BY 1"
    )
    texts = ("A", "a") if "upper" in made_of else ("501", "0501")
    made.change("orders", {"_id": 1, "note": texts[0]}, {"_id": 2, "note": ""})
    assert made.run() == {"counts": "whole"}
    made.change("orders", {"_id": 1, "note": texts[1]}, {"_id": 3, "note": texts[0]})
    with pytest.raises(errors.SettingsError, match=r"counts\.sql: the rows of one n depend on documents of several"):
        made.run()
    (made.folder / "counts.sql").rename(made.folder / "others.sql")
    with pytest.raises(errors.SettingsError, match=r"others\.sql: the rows of one n depend on documents of several"):
        made.run()


def test_a_query_that_does_not_keep_keys_apart_is_refused_at_once(shop: MakeShop) -> None:
    """Each key has a row, so that the rows do not show it: a new document changed the places of others, which stayed as they were."""
    incremental = "{{ config(materialized='incremental', unique_key='k') }} "
    made = shop(
        Places=incremental
        + "SELECT _id AS k, rank() OVER (ORDER BY amount) AS place FROM {{ ref('cases.orders', key='_id') }}",
        types=incremental + "SELECT o.note AS k, c.city FROM {{ ref('cases.orders', key='note') }} AS o "
        "LEFT JOIN {{ ref('cases.customers', key='_id') }} AS c ON c._id = o.note",
    )
    made.change("orders", {"_id": 1, "amount": 1}, {"_id": 2, "amount": 2})
    made.change("customers", {"_id": 1})
    for act in (made.run, lambda: models.check(made.spark, made.settings)):
        with pytest.raises(errors.SettingsError) as refused:
            act()
        places, types = map(str, refused.value.problems)
        assert "the rows of one k cannot be computed separately: a window is not partitioned by the key (use mat" in places
        assert "the key _id of cases.customers is int, and that of cases.orders string: Spark takes different" in types


def test_a_key_without_a_row_takes_away_only_its_own(shop: MakeShop) -> None:
    """The key '0007', whose documents the query leaves out, became the number 7 when it changed, and the row of the key '7' was deleted."""
    made = shop(
        counts="{{ config(materialized='incremental', unique_key='n') }} SELECT CAST(note AS INT) AS n, count(*) AS c "
        "FROM {{ ref('cases.orders', key='note') }} WHERE amount > 0 GROUP BY 1"
    )
    left_out = {"_id": 2, "note": "0007"}
    made.change(
        "orders", {"_id": 1, "note": "7", "amount": 1}, left_out | {"amount": 0}, {"_id": 3, "note": "8", "amount": 1}
    )
    assert made.run() == {"counts": "whole"}
    made.change("orders", left_out | {"amount": -1})
    assert made.run() == {"counts": "changed"}
    assert made.rows("counts") == {(7, 1), (8, 1)}
    made.change(
        "orders", left_out | {"amount": -2}, {"_id": 1, "note": "7", "amount": 2}, {"_id": 3, "note": "8", "amount": 0}
    )
    assert made.run() == {"counts": "changed"}
    assert made.rows("counts") == {(7, 1)}


WRONG = {
    "typo": "SELEC 1",
    "two": "SELECT 1 AS a\n; DROP TABLE x",
    "drop": "DROP TABLE {{ ref('cases.orders') }}",
    "column": "SELECT o._id,\n o.amout FROM {{ ref('cases.orders') }} AS o",
    "count": "SELECT count(*), _id AS `an id` FROM {{ ref('cases.orders') }} GROUP BY _id",
    "void": "SELECT NULL AS nothing FROM {{ ref('cases.orders') }}",
    "key": "{{ config(materialized='incremental', unique_key='a') }} SELECT _id FROM {{ ref('cases.orders', key='customr') }}",
}


def test_what_is_wrong_with_a_query_is_said_with_its_place(shop: MakeShop) -> None:
    """Mistakes in all files are reported together, before anything is computed, and statements that are not queries have no effect. A run
    computes the models that do not depend on a mistake, and then reports the mistakes.
    """
    made = shop(**WRONG)
    (made.folder / "folder.sql").mkdir()
    (made.folder / "latin.sql").write_bytes("SELECT 'é'".encode("latin-1"))
    with pytest.raises(errors.SettingsError) as unread:
        models.check(made.spark, made.settings)
    said = [str(each).rpartition("/")[2] for each in unread.value.problems]
    assert said[:3] == [
        "folder.sql: it cannot be read: Is a directory",
        "latin.sql: not UTF-8 at byte 8",
        "two.sql:2: a semicolon ends the query here, and a model is one query (split it into two models)",
    ]
    assert {each.split(":")[0] for each in said[3:]} == {"drop.sql", "typo.sql"}  # the other mistakes need the table
    made.change("orders", {"_id": 1, "customer": 1, "amount": 1})
    others = {"good": "cases.orders", "behind_good": "good", "behind_two": "two", "lost": "nothing", "a": "b", "b": "a"}
    for name, of in others.items():
        (made.folder / f"{name}.sql").write_text(f"SELECT count(*) AS n FROM {{{{ ref('{of}') }}}}")
    with pytest.raises(errors.SettingsError) as refused:
        made.run()
    told = {Path(problem.path).name.split(":")[0] for problem in refused.value.problems}
    assert told == {*(f"{name}.sql" for name in (*WRONG, "folder", "latin", "lost", "a"))}
    assert made.rows("good") == made.rows("behind_good") == {(1,)}
    layout = delta.layout(made.settings.lakehouse)
    assert not any(delta.exists(made.spark, layout.model(name)) for name in ("behind_two", "two", "lost", "a", "b"))
    (made.folder / "two.sql").unlink()
    (made.folder / "folder.sql").rmdir()
    (made.folder / "latin.sql").unlink()
    for name in others:
        (made.folder / f"{name}.sql").unlink()
    with pytest.raises(errors.SettingsError) as refused:
        models.check(made.spark, made.settings)
    told = "\n".join(str(problem).removeprefix(f"{made.folder}/") for problem in refused.value.problems)
    for wanted in (
        "typo.sql:1: not a valid query: Syntax error at or near '",
        "drop.sql:1: not a valid query",
        "column.sql:2: ",
        "count.sql: a table cannot have a column with the name count(1) (name it: … AS name",
        "count.sql: a table cannot have a column with the name an id (",
        "void.sql: the column nothing has the type void (cast it to another one)",
        "key.sql: the model has no column a",
        "key.sql: key: cases.orders has no column customr (did you mean customer?)",
    ):
        assert wanted in told, told
    assert "`o`.`amout` cannot be resolved" in told and "`o`.`amount`" in told


def test_a_model_may_have_any_name(shop: MakeShop) -> None:
    """This includes names of columns, and the words of which positions consist: a change in such a model is noticed, and the models over
    it are computed.
    """
    made = shop(
        at="{{ config(materialized='view') }} SELECT sum(amount) AS total FROM {{ ref('cases.orders') }}",
        model="{{ config(materialized='view') }} SELECT total FROM {{ ref('at') }}",
        id="SELECT total FROM {{ ref('model') }}",
        after="SELECT total FROM {{ ref('id') }}",
        key="{{ config(materialized='incremental', unique_key='count') }} "
        "SELECT amount AS count, count(*) AS n FROM {{ ref('cases.orders', key='amount') }} GROUP BY amount",
    )
    made.change("orders", {"_id": 1, "customer": 1, "amount": 5})
    assert made.run() == {"at": "view", "model": "view", "id": "whole", "after": "whole", "key": "whole"}
    made.change("orders", {"_id": 1, "customer": 1, "amount": 6})
    assert made.run() == {"at": "view", "model": "view", "id": "whole", "after": "whole", "key": "changed"}
    assert made.rows("key") == {(6, 1)}
    assert made.rows("after") == {(6,)}
    (made.folder / "model.sql").write_text(
        "{{ config(materialized='view') }} SELECT 2 * total AS total FROM {{ ref('at') }}"
    )
    assert made.run()["id"] == "whole"
    assert made.rows("after") == {(12,)}


def test_a_table_that_holds_nothing_yet_is_waited_for(shop: MakeShop) -> None:
    """Gold ended between creating and filling the table, or has to write it again. A model over it would be empty and look complete."""
    made = shop(other="SELECT count(*) AS n FROM {{ ref('cases.orders') }}")
    layout = delta.layout(made.settings.lakehouse)
    orders = layout.gold("cases", "orders")
    delta.create(made.spark, orders, columns="_id INT, customer INT, amount INT, note STRING")
    assert made.run() == {"other": "waits"}
    Writer.claim(made.spark, orders).release()  # the state if the first rows could not be written
    assert made.run() == {"other": "waits"}
    made.change("orders", {"_id": 1, "customer": 1, "amount": 5})
    assert made.run() == {"other": "whole"}
    writer = Writer.claim(made.spark, orders)
    writer.mark(to=None)  # as a repair does; then gold writes the table again
    writer.release()
    assert made.run() == {"other": "waits"}
    assert made.rows("other") == {(1,)}


def test_a_table_that_becomes_a_view_is_not_left_behind(shop: MakeShop) -> None:
    """Readers would see the rows of the last run forever, so the run says what to remove."""
    made = shop(other="SELECT count(*) AS n FROM {{ ref('cases.orders') }}")
    made.change("orders", {"_id": 1, "customer": 1, "amount": 5})
    assert made.run() == {"other": "whole"}
    (made.folder / "other.sql").write_text(
        "{{ config(materialized='view') }} SELECT count(*) AS n FROM {{ ref('cases.orders') }}"
    )
    for act in (lambda: made.run(), lambda: models.check(made.spark, made.settings)):
        with pytest.raises(errors.SettingsError, match="it is a view now, but its former table still exists"):
            act()


def test_a_model_of_another_pipeline_is_not_overwritten(shop: MakeShop) -> None:
    """Pipelines that share a lakehouse also share the names of models: each would overwrite the other's rows in turn."""
    made = shop(other="SELECT count(*) AS n FROM {{ ref('cases.orders') }}")
    made.change("orders", {"_id": 1, "customer": 1, "amount": 5})
    assert made.run() == {"other": "whole"}
    made.settings = replace(made.settings, name="second")
    made.change("orders", {"_id": 2, "customer": 1, "amount": 5})
    for act in (lambda: made.run(), lambda: models.check(made.spark, made.settings)):
        with pytest.raises(errors.SettingsError, match="/models/other, which belongs to a model of the pipeline hand"):
            act()
    assert made.rows("other") == {(1,)}


def test_a_model_may_come_to_have_times_without_a_zone(shop: MakeShop) -> None:
    """Delta requires a table feature for them, and an older table would refuse every new version. A difference of a microsecond is a
    change.
    """
    times = "SELECT _id, CAST(timestamp_micros(amount) AS TIMESTAMP_NTZ) AS at FROM {{ ref('cases.orders') }}"
    last = "{{ config(materialized='incremental', unique_key='_id') }} SELECT _id, at FROM {{ ref('times', key='_id') }}"
    made = shop(times="SELECT _id, amount AS at FROM {{ ref('cases.orders') }}", last=last)
    made.change("orders", {"_id": 1, "amount": 5}, {"_id": 2, "amount": 7})
    assert made.run() == {"times": "whole", "last": "whole"}
    (made.folder / "times.sql").write_text(times)
    assert made.run() == {"times": "whole", "last": "whole"}
    made.change("orders", {"_id": 1, "amount": 6})
    assert made.run() == {"times": "whole", "last": "changed"}
    assert {(key, at.microsecond) for key, at in made.rows("last")} == {(1, 6), (2, 7)}


def test_a_failure_of_the_machine_is_tried_again(shop: MakeShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only errors in the rows are final; a query that could not be computed is retried."""
    made = shop(other="SELECT sum(amount) AS n FROM {{ ref('cases.orders') }}")
    made.change("orders", {"_id": 1, "customer": 1, "amount": 5})
    judged: dict[str, models.ModelVerdict] = {}
    with monkeypatch.context() as broken:
        lost = Mock(side_effect=PySparkException("Job aborted: a task was lost"))
        broken.setattr(query_execution, "materialized", lost)
        with pytest.raises(errors.Temporary, match="could not be computed"):
            made.run(judged=judged)
    assert made.run(judged=judged) == {"other": "whole"}


def test_what_changed_is_the_same_whoever_looks_for_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed keys are found by this process from the places of rows, by queries over the files of the log, and by queries only, as in a
    catalog. This holds for any type.
    """
    table = tables.TableRef.at(str(tmp_path / "a table, with signs"))
    delta.create(spark, table, columns="`k.1` INT, m MAP<STRING, INT>, at TIMESTAMP", properties=current.PROPERTIES)
    vectors = "SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    spark.sql(f"ALTER TABLE {table} {vectors}").collect()
    rows = "SELECT CAST(id AS INT), map('a', CAST(id % 7 AS INT)), timestamp_micros(id)"
    spark.sql(f"INSERT INTO {table} {rows} FROM range(0, 1000, 1, 2)").collect()
    before = table_history.version(spark, table)
    spark.sql(f"UPDATE {table} SET m = map('a', 9) WHERE `k.1` IN (3, 700)").collect()
    spark.sql(f"DELETE FROM {table} WHERE `k.1` = 5").collect()
    spark.sql(f"OPTIMIZE {table}").collect()
    spark.sql(f"ALTER TABLE {table} ADD COLUMNS (more STRING)").collect()
    spark.sql(f"UPDATE {table} SET at = timestamp_micros(4000001) WHERE `k.1` = 6").collect()
    spark.sql(f"INSERT INTO {table} VALUES (1000, NULL, NULL, 'x')").collect()
    after = table_history.version(spark, table)

    def changed() -> list[int]:
        found = model_changes.changed_keys(spark, table, before, after, ["k.1"])
        return sorted(row[0] for row in found.rows.collect())

    expected = [3, 3, 5, 6, 6, 700, 700, 1000]
    with monkeypatch.context() as here:
        here.setattr(model_changes, "_rows_of_files", None)
        assert changed() == expected
        # Of many rows the keys are not computed twice.
        for most, are_cheap in ((2000, True), (20, False)):
            here.setattr(model_changes, "CHEAP_ROWS", most)
            assert model_changes.changed_keys(spark, table, before, after, ["k.1"]).are_cheap is are_cheap
    monkeypatch.setattr(model_changes, "_few_rows", lambda *_: None)
    with monkeypatch.context() as named:
        named.setattr(model_changes, "_places", None)
        assert changed() == expected
    monkeypatch.setattr(model_changes, "_seen", lambda *_: None)
    assert changed() == expected
