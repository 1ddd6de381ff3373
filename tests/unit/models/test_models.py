"""How a model's file is read, and in which order models run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_core import errors
from cdc_core.expectations import suite
from cdc_core.models import graph, sql_model
from pipelines.demo import quality
from pipelines.settings import file as settings_file


def test_a_file_is_a_query_cut_at_its_references() -> None:
    """Config and comments are removed, references are found with their keys, and lines keep their numbers."""
    text = (
        "{{ config(materialized='incremental',\n          unique_key=['a', 'b']) }}\n"
        "SELECT * {# FROM {{ ref('no.table') }} #}\nFROM {{ ref('shop.orders', key=['x', 'y']) }} o JOIN {{ref(\"other\")}} p;\n"
    )
    found = sql_model.parse("daily", text, where="daily.sql")
    assert (found.materialized, found.unique_key) == (sql_model.Materialization.INCREMENTAL, ("a", "b"))
    assert found.refs == (sql_model.Ref("shop.orders", ("x", "y")), sql_model.Ref("other"))
    assert found.query(lambda ref: f"<{ref.name}>") == "\n\nSELECT * \nFROM <shop.orders> o JOIN <other> p"
    assert sql_model.parse("daily", text, where="elsewhere.sql").digest == found.digest
    assert sql_model.parse("daily", text.replace("o JOIN", "o  JOIN"), where="daily.sql").digest != found.digest


REFUSED = {
    "SELECT {{ reff('a') }}": "m.sql:1: there is no reff(…) here (did you mean ref?)",
    "SELECT * FROM ${ref('a')}": "m.sql:1: this cannot be read (known are {{ ref('…') }} and {{ config(…) }})",
    "SELECT\n{% if x %} 1": "m.sql:2: this cannot be read (known are {{ ref('…') }} and {{ config(…) }})",
    "SELECT {{ ref('a', 'b') }}": "m.sql:1: ref takes one name (ref('database.collection') or ref('model'))",
    "SELECT {{ ref(name) }}": "m.sql:1: this cannot be read (known are {{ ref('…') }} and {{ config(…) }})",
    "{{ config(materialised='view') }} SELECT 1": "m.sql:1: config has no materialised (did you mean materialized?)",
    "{{ config(materialized='tabel') }} SELECT 1": (
        "m.sql:1: materialized is one of table, view, incremental, found tabel (did you mean table?)"
    ),
    "{{ config(materialized='view') }}\n-- nothing\n": "m.sql: there is no query in it",
    "{{ config(unique_key='a') }} SELECT 1 AS a": "m.sql: unique_key is for materialized='incremental' (remove it, or set materialized='incremental')",
    "{{ config(materialized='incremental') }} SELECT * FROM {{ ref('b.c', key='a') }}": (
        "m.sql: an incremental model needs a unique_key (config(…, unique_key='column'))"
    ),
    "{{ config(materialized='incremental', unique_key='a') }} SELECT * FROM {{ ref('b.c') }}": (
        "m.sql: an incremental model needs a ref with key='…', to find the keys that changed (ref('b.c', key='the column that holds a'))"
    ),
    "{{ config(materialized='incremental', unique_key='a') }} SELECT * FROM {{ ref('b.c', key=['a', 'b']) }}": (
        "m.sql: ref('b.c') has 2 key columns, unique_key has 1 (they must match, in the same order)"
    ),
    "{{ config(materialized='incremental', unique_key='a') }}\nSELECT a, (1) FROM {{ ref('b.c', key='a') }}\nlimit /* top */\n10 OFFSET 5": (
        "m.sql:3: LIMIT selects among the keys, so the rows of one a cannot be computed separately (use materialized='table')"
    ),
    "SELECT 1 AS a;\n-- and\nSELECT 2 AS a": (
        "m.sql:1: a semicolon ends the query here, and a model is one query (split it into two models)"
    ),
    "SELECT (1) AS a -- (\nFROM x) JOIN (SELECT ')' AS b": "m.sql:2: unmatched )",
}


@pytest.mark.parametrize("text", REFUSED)
def test_mistakes_are_named_with_their_line(text: str) -> None:
    """Each message says what is expected, often with the nearest name."""
    with pytest.raises(errors.SettingsError) as refused:
        sql_model.parse("m", text, where="m.sql")
    assert str(refused.value) == REFUSED[text]


def test_a_limit_within_a_key_is_no_mistake() -> None:
    """In parentheses it may be that of a lateral subquery. Other materializations may have any, and text is no limit."""
    query = (
        "SELECT a, 'LIMIT 1' AS limit FROM {{ ref('b.c', key='a') }} o, LATERAL (SELECT n FROM t WHERE o.a = t.a LIMIT 1)"
    )
    incremental = "{{ config(materialized='incremental', unique_key='a') }} "
    assert sql_model.parse("m", incremental + query + " LIMIT ALL -- LIMIT 2", where="m.sql").names == ("b.c",)
    assert sql_model.parse("m", "SELECT * FROM {{ ref('b.c') }} LIMIT 10", where="m.sql").names == ("b.c",)


def test_what_only_closes_a_tag_is_text() -> None:
    """JSON may end with }}, as in dbt; variables of other languages are left for Spark to refuse."""
    text = "SELECT from_json(note, '{\"a\":{\"b\":1}}') AS a, '%} #} ${x}' AS b FROM {{ ref('c.d') }}"
    assert sql_model.parse("m", text, where="m.sql").query(lambda ref: ref.name) == text.replace("{{ ref('c.d') }}", "c.d")


def test_tags_in_comments_and_strings_of_sql_are_text() -> None:
    """A commented reference is no dependency, and one in a string is text. A comment after the final semicolon is ignored."""
    quiet = """-- it's {{ ref('a') }}\n/* ; {{ config(materialized='view') }} */ SELECT 'it''s {{ x }} \\'' AS `;a)`, r'\\' AS b, "{% y %}"\nFROM """
    found = sql_model.parse(
        "m", f"{quiet}{{{{ ref('c.d') }}}} -- {{{{ ref('e') }}}};\n ;;\n/* done; */ -- really;\n", where="m.sql"
    )
    assert (found.names, found.materialized) == (("c.d",), sql_model.Materialization.TABLE)
    assert found.query(lambda ref: ref.name).rstrip() == f"{quiet}c.d -- {{{{ ref('e') }}}};"


def test_the_configuration_may_follow_the_final_semicolon() -> None:
    """The query ends at the semicolon, also where a configuration and comments come after it."""
    tail = "; -- done;\n{{ config(materialized='view') }}\n/* ; */\n"
    model = sql_model.parse("m", f"SELECT * FROM {{{{ ref('a.b') }}}} o{tail}", where="m.sql")
    assert model.query(lambda ref: ref.name).rstrip() == "SELECT * FROM a.b o"
    assert model.materialized is sql_model.Materialization.VIEW


@pytest.mark.parametrize("last", ["'a; -- b'", "`;/**/`", '"x;"', "'a' -- b; -- c"])
def test_what_looks_like_the_end_of_a_query_in_its_last_string_is_text(last: str) -> None:
    """Only a semicolon outside strings and comments ends the query."""
    for end in ("", "; -- done;\n"):
        found = sql_model.parse("m", f"SELECT * FROM {{{{ ref('c.d') }}}} WHERE a = {last}\n{end}", where="m.sql")
        assert found.parts[-1] == f" WHERE a = {last}\n"


def test_a_comment_of_sql_is_as_long_as_spark_takes_it() -> None:
    """One in brackets may contain others, and a backslash continues a simple one on the next line."""
    quiet = "/* {{ ref('a') }} /* one; */ {{ ref('b') }} ) ; */ SELECT 1 -- {{ ref('c') }} \\\n {{ ref('d') }};\nFROM "
    found = sql_model.parse("m", f"{quiet}{{{{ ref('e.f') }}}}; /* /**/ ; */ -- \\\n done", where="m.sql")
    assert found.parts == (quiet, sql_model.Ref("e.f"), "")
    with pytest.raises(errors.SettingsError, match="there is no query in it"):
        sql_model.parse("m", "/* /* SELECT */ 1 */ -- \\\n 2", where="m.sql")


def test_what_looks_like_a_comment_in_a_string_is_text() -> None:
    """The text between two of them would be lost, and the query would be another one."""
    query = "SELECT regexp_replace(a, '{#', '') AS `{#b#}`, regexp_replace(a, '#}', '') AS c -- {# #}\nFROM t"
    assert sql_model.parse("m", "{# don't #}" + query, where="m.sql").parts == (query,)


def models(**texts: str) -> list[sql_model.Model]:
    return [sql_model.parse(name, text, where=f"{name}.sql") for name, text in texts.items()]


def order(*found: sql_model.Model) -> list[str]:
    known = ("shop.orders", "shop.customers")
    ordered = graph.ordered(found, collections=known, is_captured=lambda name: name == "shop.new")
    if ordered.problems:
        raise errors.SettingsError(list(ordered.problems))
    return [each.name for each in ordered.models]


def test_models_come_after_what_they_refer_to() -> None:
    """Models without a dependency are in the order of their names. A captured collection that does not exist yet may be referenced."""
    found = models(
        c="SELECT * FROM {{ ref('b') }} JOIN {{ ref('shop.orders') }}",
        b="SELECT * FROM {{ ref('d') }}",
        a="SELECT 1",
        d="SELECT * FROM {{ ref('shop.new') }}",
    )
    assert order(*found) == ["a", "d", "b", "c"]


def test_circles_and_references_to_nothing_are_refused_by_name() -> None:
    """All invalid references are reported at once, and a cycle in the direction of its references."""
    with pytest.raises(errors.SettingsError) as refused:
        order(*models(a="SELECT * FROM {{ ref('c') }}", b="SELECT * FROM {{ ref('a') }}", c="SELECT * FROM {{ ref('b') }}"))
    assert str(refused.value) == "a.sql: the models refer to each other in a cycle: a → c → b → a"
    with pytest.raises(errors.SettingsError) as refused:
        order(*models(a="SELECT * FROM {{ ref('a') }}"))
    assert "in a cycle: a → a" in str(refused.value)
    with pytest.raises(errors.SettingsError) as refused:
        order(*models(a="SELECT * FROM {{ ref('shop.ordres') }} JOIN {{ ref('totals') }}"))
    assert str(refused.value).splitlines() == [
        "a.sql: ref('shop.ordres') refers to nothing: there is no captured collection of this name (did you mean shop.orders?)",
        "a.sql: ref('totals') refers to nothing: there is no model of this name (known are a, shop.customers, shop.orders)",
    ]


def test_what_is_wrong_in_one_model_stops_those_that_refer_to_it_and_no_other() -> None:
    """All mistakes are reported. A model that refers to an unreadable one is not a mistake, and waits."""
    found = models(
        a="SELECT * FROM {{ ref('b') }}",
        b="SELECT * FROM {{ ref('a') }}",
        behind_a="SELECT * FROM {{ ref('a') }}",
        good="SELECT * FROM {{ ref('shop.orders') }}",
        behind_good="SELECT * FROM {{ ref('good') }}",
        lost="SELECT * FROM {{ ref('nothing') }}",
        behind_lost="SELECT * FROM {{ ref('behind_unread') }} JOIN {{ ref('lost') }}",
        behind_unread="SELECT * FROM {{ ref('unread') }}",
        Two="SELECT 1",
        two="SELECT 2",
        orders="SELECT 3",
        Unread="SELECT 4",
    )
    ordered = graph.ordered(
        found,
        collections=("shop.orders",),
        is_captured=lambda name: False,
        unread=("unread",),
        table_owners={"orders": "shop.orders"},
    )
    assert [each.name for each in ordered.models] == ["good", "behind_good"]
    assert [each.path for each in ordered.problems] == ["orders.sql", "two.sql", "lost.sql", "a.sql"]


def test_descriptions_name_models_that_are_there() -> None:
    """A YAML file as in dbt describes models and columns; other keys are refused."""
    found = models(a="SELECT 1 AS n")
    told = {"version": 2, "models": [{"name": "a", "description": "One.", "columns": [{"name": "n", "description": "It."}]}]}
    (described,) = sql_model.described(found, told, where="m.yml")
    assert (described.description, described.columns) == ("One.", (("n", "It."),))
    wrong = {"models": [{"name": "b"}, {"name": "a", "tests": []}, {"name": ["a"]}]}
    with pytest.raises(errors.SettingsError) as refused:
        sql_model.described(found, wrong, where="m.yml")
    assert str(refused.value).splitlines() == [
        "m.yml: models[0].name: there is no model b (known are a)",
        "m.yml: models[1].tests: there is no such key (expectations lie in the folder gold.expectations)",
        "m.yml: models[2].name: a name is expected, found a list",
    ]


def test_of_two_models_with_one_name_none_is_lost_beside_descriptions() -> None:
    """Two files in different folders: they are refused, also if a file of descriptions names the model."""
    found = [sql_model.parse("a", f"SELECT {number} AS n", where=f"{number}/a.sql") for number in (1, 2)]
    described = sql_model.described(found, {"models": [{"name": "a", "description": "One."}]}, where="m.yml")
    assert [each.where for each in described] == ["1/a.sql", "2/a.sql"]
    ordered = graph.ordered(described, collections=(), is_captured=lambda name: False)
    assert [str(each) for each in ordered.problems] == [
        "2/a.sql: the model 1/a.sql already has this name (rename one of the files)"
    ]


def test_the_example_models_and_suites_are_valid() -> None:
    """The examples in conf/ and in the demo are valid, refer to collections of the shop, and each suite is of a model."""
    root = Path(__file__).resolve().parents[3] / "conf"
    files = {str(path.relative_to(root)): path.read_text() for path in (*root.rglob("*.sql"), *root.rglob("models/*.yml"))}
    for texts in (files, quality.FILES):
        found = [sql_model.parse(Path(name).stem, text, where=name) for name, text in texts.items() if name.endswith(".sql")]
        assert len(graph.ordered(found, collections=("shop.orders",), is_captured=lambda name: False).models) == len(found)
    suites = [*root.glob("expectations/*.yml")]
    assert {path.stem for path in suites} == {Path(name).stem for name in files if name.endswith(".sql")}
    for path in suites:
        assert suite.parse(settings_file.document(path), name=path.stem, where=path.name).expectations
