"""Where tables are, and how their names are formed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta import tables as delta


def test_names_that_fit_keep_their_folder() -> None:
    """A folder has the percent-encoded name if it is at most as long as file systems allow."""
    assert tables.path_name("orders-1") == "orders-1"
    assert tables.path_name("a.b ~") == "a%2Eb%20%7E"
    assert tables.path_name("x" * 255) == "x" * 255


def test_a_collection_may_have_the_name_of_deltas_log() -> None:
    """Otherwise Delta and maintenance would take the folder above its table for a table, and find no table below it."""
    assert tables.path_name("_delta_log") == "%5Fdelta_log" != tables.path_name("%5Fdelta_log")
    assert tables.path_name("_delta_logs") == "_delta_logs"


def test_names_that_are_too_long_are_shortened_and_stay_apart() -> None:
    """The shortened name is the beginning and a digest of the whole name. The longest name of MongoDB fits in every folder and catalog."""
    names = ["ы" * 120, "ы" * 119 + "а", "漢" * 80, "x" * 256, "🙂" * 60]
    folders = [tables.path_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(len(folder.encode()) <= 255 and "~" in folder for folder in folders)
    assert folders[3] == "x" * 180 + "~85e62acd750c4eb56b7b6a1d66dca5bf", "the same in every version: the table is there"
    catalog = tables.Layout(catalog="main", schema_prefix="shop_")
    found = {str(catalog.silver("d" * 63, name)).rpartition(".")[2] for name in ("c" * 255, "c" * 254 + "d")}
    assert sorted(name[-33:-1] for name in found) == ["368b438e9a642734738b9e3de35331d0", "b954c5b656ce19b4f7291fd8f9e199f3"]
    assert all(len(name) <= 257 for name in found)
    shadows = [
        catalog.shadow("d" * 63, name).schema(layer) for name in ("c" * 190, "c" * 189 + "d") for layer in ("silver", "ops")
    ]
    assert len(set(shadows)) == 4 and all(len(each.rpartition(".")[2]) <= 257 for each in shadows)


def test_a_name_in_a_hive_catalog_has_no_hyphen() -> None:
    """Spark refuses hyphens in a Hive catalog; other catalogs allow them."""
    hive, unity = (tables.Layout(catalog=name, schema_prefix="shop_") for name in ("spark_catalog", "main"))
    assert str(hive.silver("my-shop", "order-items")) == "`spark_catalog`.`shop_silver`.`my_shop__order_items`"
    assert str(unity.silver("my-shop", "order-items")) == "`main`.`shop_silver`.`my-shop__order-items`"
    assert hive.shadow("my-shop", "orders").schema("ops") == "`spark_catalog`.`shop_rebuild_my_shop__orders_ops`"


def test_collisions_are_those_of_the_tables_names() -> None:
    """Collections collide in a catalog if their tables have one name. In Hive's, hyphens also collide; long names differ by their
    digests."""
    hive, unity = (tables.Layout(catalog=name) for name in ("hive_metastore", "main"))
    hyphen, dot, long = (
        [("a-b", "x"), ("a_b", "X")],
        [("a", "x.y"), ("a", "z"), ("a", "x_y")],
        [("a", "x" * 300 + end) for end in ".!"],
    )
    assert hive.collisions(hyphen) == [("a-b.x", "a_b.X", "hive_metastore.silver.a_b__X")]
    assert unity.collisions(hyphen) == unity.collisions(long) == []
    assert unity.collisions(dot) == [("a.x.y", "a.x_y", "main.silver.a__x_y")]


class Statements(list[str]):
    """A session that records the statements."""

    def sql(self, statement: str) -> None:
        self.append(statement)


def test_removing_a_shadow_drops_only_its_schemas_of_a_catalog() -> None:
    """A schema that has the catalog's name stays, too."""
    statements: Any = Statements()
    layout = tables.Layout(catalog="main", schema_prefix="shop_")
    delta.remove(statements, layout.shadow("db", "orders"))
    assert statements == [
        f"DROP SCHEMA IF EXISTS `main`.`shop_rebuild_db__orders_{layer}` CASCADE"
        for layer in ("silver", "quarantine", "ops")
    ]


def test_temporary_collections_of_mongodb_are_recognized() -> None:
    """`$out`, map-reduce and renames between databases use collections with reserved names."""
    temporary = ["tmp.agg_out.3f0c", "tmp.mr.a_1", "tmpQx3_1.renameCollection"]
    lasting = ["tmp", "tmp.orders", "my.tmp.agg_out.1", "tmpfiles"]
    assert [registry.Namespace("d", name).is_temporary for name in (*temporary, *lasting)] == [True] * 3 + [False] * 4


def test_collections_that_meet_in_one_name() -> None:
    """The first one found has the table. The other is refused by name, and still captured."""
    source = {"mongodb.connection.string": "${env:NOWHERE}", "collection.include.list": "a.*"}
    chosen = settings.parse({"name": "hand", "lakehouse": {"catalog": "main", "schema_prefix": "x_"}, "source": source})
    names = (("a", "x.y"), ("a", "x_y"), ("a", "z"), ("a", "X_Y"), ("b", "z"), ("a__b", "c"), ("b__c", "d"), ("b", "c__d"))
    found = registry.with_own_tables(chosen, [registry.Namespace(*each) for each in names])
    assert [str(each) for each in found.namespaces] == ["a.x.y", "a.z", "b.z", "a__b.c", "b__c.d"]
    assert [str(each) for each in found.refused] == ["a.x_y", "a.X_Y"]
    assert "which already belongs to a.x.y" in str(found.refused[registry.Namespace("a", "x_y")])


def test_collections_of_one_name_are_told_before_a_start() -> None:
    """Compares the names of tables as each kind of catalog forms them; folders are different for all names."""
    names = [("a", "x.y"), ("a", "x_y"), ("a", "x-y"), ("a", "z")]
    hive, unity, folder = tables.Layout(catalog="spark_catalog"), tables.Layout(catalog="main"), tables.Layout(root="/lake")
    first = ("a.x.y", "a.x_y", "main.silver.a__x_y")
    assert unity.collisions([*names, names[0]]) == [first] and folder.collisions(names) == []
    assert [second for _, second, _ in hive.collisions(names)] == ["a.x_y", "a.x-y"]


def test_one_error_for_several_collections() -> None:
    """A single error is passed on. Several give the worst exit code and every name; of a bug, nothing that may quote a document."""
    busy, full = errors.CommitConflict("a: try again"), errors.DecisionNeeded("b: decide")
    assert errors.together({"d.a": busy}) is busy
    both = errors.together({"d.a": busy, "d.b": full})
    assert str(both).startswith("2 failed; others, if any, did not:\n"), "there may be no others"
    assert (errors.code(both), "d.a" in str(both), "b: decide" in str(both)) == (3, True, True)
    bug = errors.together({"d.a": busy, "d.c": ValueError("secret")})
    assert (errors.code(bug), "secret" in str(bug)) == (1, False)


def test_only_a_relative_root_needs_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A service may outlive the folder that it was started from."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert delta.layout(settings.Lakehouse(root="/lake")).root == "/lake"
    assert delta.layout(settings.Lakehouse(catalog="main")).catalog == "main"
    with pytest.raises(errors.DecisionNeeded, match=r"lakehouse\.root: lake .*deleted"):
        delta.layout(settings.Lakehouse(root="lake"))
