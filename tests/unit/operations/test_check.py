"""The findings of `medallion check` before anything is created."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from bson.timestamp import Timestamp
from pyspark.errors import AnalysisException

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from jobs.commands import application
from pipelines.mongodb import catalog
from pipelines.mongodb import server as mongodb_server
from pipelines.operations import check, findings
from tests.harness import layers, without_spark

WRONG, FINE = findings.CheckVerdict.WRONG, findings.CheckVerdict.FINE
SOURCE = {"mongodb.connection.string": "mongodb://127.0.0.1:1/"}


@pytest.mark.parametrize("below", ["", "/lakehouse"])
@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_a_root_that_is_a_file_is_to_be_mended(tmp_path: Path, scheme: str, below: str) -> None:
    """As a path and as a URL, and also if the root is below a file. A command that is started anyway does not fail with a bug."""
    (tmp_path / "file").touch()
    chosen = layers.pipeline(tmp_path)
    for name, verdict in (("file", WRONG), ("new", FINE)):
        root = f"{scheme}{tmp_path}/{name}{below}"
        placed = dataclasses.replace(chosen, lakehouse=dataclasses.replace(chosen.lakehouse, root=root))
        [found] = check._lakehouse(placed, None)
        told = (f"{tmp_path}/file is not a folder", "choose another lakehouse.root") if verdict is WRONG else (root, "")
        assert (found.verdict, found.found, found.mend) == (verdict, *told)
        application._profile(placed, is_service=False)


def test_the_files_of_gold_are_read(tmp_path: Path) -> None:
    """A mistyped folder, or a mistake in a model, refuses a service at its start: it is known before."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "totals.sql").write_text("SELECT 1 AS one")
    gold = {"models": str(tmp_path / "models"), "expectations": str(tmp_path / "none")}
    placed = settings.parse({"name": "shop", "lakehouse": {"root": str(tmp_path)}, "source": SOURCE, "gold": gold})
    fine, wrong = check._gold(placed)
    assert (fine.about, fine.verdict) == ("models", FINE) and fine.found.startswith("1 in ")
    assert (wrong.about, wrong.verdict) == ("expectations", WRONG) and f"there is no folder {tmp_path}/none" in wrong.found
    with pytest.raises(errors.SettingsError, match="1 problem to fix"):
        check.refuse([fine, wrong])
    (tmp_path / "models" / "totals.sql").write_text("SELECT {{ nothing }}")
    [wrong, _] = check._gold(placed)
    assert wrong.verdict is WRONG and "totals.sql" in wrong.found
    assert not [*check._gold(dataclasses.replace(placed, gold=settings.GoldSettings()))]


def test_what_a_person_must_mend_is_not_tried_again() -> None:
    """A scheduler repeats a temporary error. Beside one that stays it would do so for ever, whichever `check` found first."""
    found = [findings.wrong(name, error) for name, error in {
        "store": errors.StoreUnreachable("no answer"), "expectations": errors.SettingsError("no folder"), "change stream": errors.AccessRefused("no"),
    }.items()]  # fmt: skip
    for chosen, expected in (
        (found, errors.AccessRefused),
        (found[:2], errors.SettingsError),
        (found[:1], errors.StoreUnreachable),
    ):
        with pytest.raises(expected, match="store"):
            check.refuse(chosen)


def test_models_that_refer_to_nothing_or_to_each_other_are_told(tmp_path: Path) -> None:
    """Without the tables: whether a collection that is not captured has one is not known here, and is no mistake."""
    for name, refers in (("one", "two"), ("two", "one"), ("three", "tow"), ("four", "shop.orders")):
        (tmp_path / f"{name}.sql").write_text(f"SELECT * FROM {{{{ ref('{refers}') }}}}")
    source = SOURCE | {"collection.include.list": "shop.items"}
    placed = settings.parse(
        {"name": "shop", "lakehouse": {"root": str(tmp_path)}, "source": source, "gold": {"models": str(tmp_path)}}
    )
    unknown, cycle = check._gold(placed)
    assert (unknown.verdict, cycle.verdict) == (WRONG, WRONG)
    assert "three.sql: ref('tow') refers to nothing: there is no model of this name" in unknown.found
    assert cycle.found.endswith("one.sql: the models refer to each other in a cycle: one → two → one")
    for name in ("one", "three"):
        (tmp_path / f"{name}.sql").write_text("SELECT 1 AS one")
    [fine] = check._gold(placed)
    assert fine.verdict is FINE and fine.found.startswith("4 in ")


def test_options_that_the_driver_leaves_out_are_told_without_their_values(tmp_path: Path) -> None:
    """With a mistyped `tls` option the connection would not be encrypted, and only the capture's log would show it."""
    source = {"mongodb.connection.string": "mongodb://127.0.0.1:1/?tls=Secret9&replicaSet=rs0&readPreferense=secondary"}
    quick = {"mongodb.server.selection.timeout.ms": 1}
    found = check.run(settings.parse({"name": "shop", "lakehouse": {"root": str(tmp_path)}, "source": source | quick}))
    warned = [each.found for each in found if each.verdict is findings.CheckVerdict.WARNING]
    assert warned == ["the connection string has options that are unknown or have an invalid value: tls, readPreferense"]


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("~/signals.txt", ["there is no folder ~ for signal.file, or it cannot be looked into"]),
        ("{}", ["signal.file is not a file that this user can read and write: {}"]),
        ("{}/signals.txt", []),
    ],
)
def test_a_file_of_signals_that_cannot_be_used_is_told(tmp_path: Path, file: str, found: list[str]) -> None:
    """A capture waits for a missing file in silence: it may come later."""
    source = SOURCE | {"signal.enabled.channels": "file", "signal.file": file.format(tmp_path)}
    chosen = settings.parse({"name": "shop", "lakehouse": {"root": str(tmp_path)}, "source": source}).source
    assert [each.found for each in check._signal_file(chosen)] == [each.format(tmp_path) for each in found]


def test_a_folder_that_this_user_may_not_look_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another user, say. The error of the look ended the command, without the findings about anything else."""
    closed = tmp_path / "closed"
    closed.mkdir()
    look, is_allowed = os.stat, os.access

    def looked(path: Any, **options: Any) -> os.stat_result:
        if closed in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", looked)
    monkeypatch.setattr(os, "access", lambda path, mode: is_allowed(path, mode) and Path(path) != closed)
    found = check._folder(f"{closed}/lakehouse")
    assert found is not None and (found.verdict, found.found) == (WRONG, f"{closed} is not writable")
    told = {
        closed / "signals.txt": f"signal.file is not a file that this user can read and write: {closed}/signals.txt",
        closed / "a/signals.txt": f"there is no folder {closed}/a for signal.file, or it cannot be looked into",
    }
    for file, message in told.items():
        source = SOURCE | {"signal.enabled.channels": "file", "signal.file": str(file)}
        chosen = settings.parse({"name": "shop", "lakehouse": {"root": str(tmp_path)}, "source": source}).source
        assert [each.found for each in check._signal_file(chosen)] == [message]


@pytest.mark.parametrize(
    ("uri", "more", "is_told"),
    [
        ("mongodb://h/", {}, True),
        ("mongodb://h/?tls=true", {}, False),
        ("mongodb+srv://h.cluster.example/", {}, False),
        ("mongodb://h/", {"mongodb.ssl.enabled": True}, False),
    ],
)
def test_certificates_without_encryption_are_told(tmp_path: Path, uri: str, more: dict[str, Any], is_told: bool) -> None:
    """Who names a certificate expects an encrypted connection; a server that takes both kinds does not show that it is none."""
    source = {"mongodb.connection.string": uri, "mongodb.ssl.ca.file": "/ca.pem", **more}
    chosen = settings.parse({"name": "shop", "lakehouse": {"root": str(tmp_path)}, "source": source}).source
    found = [each.found for each in check._tls(chosen, uri)]
    assert found == ["the connection is not encrypted, although there is mongodb.ssl.ca.file"] * is_told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no attribute"),
        ("class Mine:\n", "IndentationError"),
        ("class Mine:\n    def __init__(self):\n        {}[0]\n", "KeyError"),
        ("class Mine:\n    should_stream = lambda self: True\n", "no method should_snapshot_data, should_snapshot_on_data"),
    ],
)
def test_a_custom_snapshot_mode_that_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    """Whatever its module raises is a mistake in the settings, and no bug; so is a method that its class lacks."""
    (tmp_path / "mode_of_ones_own.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mode_of_ones_own", raising=False)
    given = {"snapshot.mode": "custom", "snapshot.mode.custom.name": "mode_of_ones_own:Mine"}
    source = {"mongodb.connection.string": "mongodb://127.0.0.1:1/", **given}
    with pytest.raises(errors.SettingsError, match=says):
        check.run(settings.parse({"name": "shop", "lakehouse": {"root": str(tmp_path)}, "source": source}))


def test_a_table_of_another_program_in_bronzes_place_is_told(tmp_path: Path) -> None:
    """Each other command refuses it, with exit code 3. No Spark is started for the answer."""

    def started() -> Any:
        pytest.fail("Spark was started")

    chosen = layers.pipeline(tmp_path)
    assert [each.verdict for each in check._lakehouse(chosen, started)] == [FINE]
    without_spark.make_foreign(tables.Layout(str(tmp_path)).bronze(chosen.name))
    found = [*check._lakehouse(chosen, started)]
    assert [each.verdict for each in found] == [WRONG] and "did not create" in found[0].found
    with pytest.raises(errors.TableNotOurs, match="lakehouse"):
        check.refuse(found)


def test_a_catalog_is_asked_for_before_a_pipeline_runs(tmp_path: Path) -> None:
    """A catalog that a provided Spark lacks is reported, and so is a view in the place of bronze's table."""
    chosen = layers.pipeline(tmp_path)
    placed = dataclasses.replace(chosen, lakehouse=dataclasses.replace(chosen.lakehouse, root=None, catalog="main"))
    row = SimpleNamespace(key="view.catalogAndNamespace.numParts", value="2")
    for answer, says in (
        (AnalysisException("main", errorClass="REQUIRES_SINGLE_PART_NAMESPACE"), "no such catalog"),
        ([row], "table or view"),
    ):
        spark: Any = Mock(sql=Mock(side_effect=[answer] if isinstance(answer, Exception) else None))
        spark.sql.return_value.collect.return_value = answer
        [found] = check._lakehouse(placed, lambda given=spark: given)  # type: ignore[misc]
        assert found.verdict is WRONG and says in found.found


def test_a_collection_that_only_looks_like_one_is_named(tmp_path: Path) -> None:
    """Lists ignore case and settings of a collection do not: settings with another case would have no effect."""
    chosen = layers.pipeline(tmp_path, {"orders": {"history": True}, "Items": {"history": True}})
    source = dataclasses.replace(chosen.source, snapshot_collection_filter_overrides={"cases.ORDERS": "{}"})
    there = [catalog.SourceCollection("cases", name, None) for name in ("orders", "items")]
    nothing: Any = None
    found = check._collections(check.CheckedSource(dataclasses.replace(chosen, source=source), nothing, ["shop"], there, {}))
    assert [each.found for each in found] == [
        "cases.Items does not exist",
        "cases.ORDERS does not exist",
        "2 to capture: cases.orders, cases.items",
    ]


def test_what_is_set_for_a_collection_that_is_not_captured_does_nothing(tmp_path: Path) -> None:
    """Whether it exists or not, and whichever list excludes it."""
    chosen = layers.pipeline(tmp_path, {"orders": {"history": True}, "carts": {"history": True}})
    source = dataclasses.replace(
        chosen.source,
        database_exclude_list=("other",),
        collection_include_list=("cases.orders", "other.carts"),
        snapshot_collection_filter_overrides={"cases.items": "{}"},
    )
    there = [catalog.SourceCollection("cases", name, None) for name in ("orders", "items", "carts")]
    nothing: Any = None
    found = check._collections(check.CheckedSource(dataclasses.replace(chosen, source=source), nothing, ["shop"], there, {}))
    assert [each.found for each in found] == [
        "cases.carts is not captured, so its entries in silver.collections or snapshot.collection.filter.overrides have no effect",
        "cases.items is not captured, so its entries in silver.collections or snapshot.collection.filter.overrides have no effect",
        "other.carts is not captured, although an include list names it",
        "1 to capture: cases.orders",
    ]


def test_an_entry_that_lets_nothing_into_the_snapshot_is_named(tmp_path: Path) -> None:
    """With a mistyped entry the capture starts, but the collection's existing documents are never read."""
    chosen = layers.pipeline(tmp_path)
    source = dataclasses.replace(chosen.source, snapshot_include_collection_list=("cases.ordrs", r"cases\.i.*"))
    there = [catalog.SourceCollection("cases", name, None) for name in ("orders", "items")]
    nothing: Any = None
    found = check._collections(check.CheckedSource(dataclasses.replace(chosen, source=source), nothing, ["shop"], there, {}))
    assert [each.found for each in found if each.verdict is not FINE] == [
        "cases.ordrs in source.snapshot.include.collection.list matches no captured collection"
    ]


def test_a_field_that_is_left_out_of_no_collection_is_named(tmp_path: Path) -> None:
    """With a mistyped entry the field that it should remove is in every table, and nothing shows it."""
    chosen = layers.pipeline(tmp_path)
    lists = {
        "field_exclude_list": ("cases.ordrs.card", "CASES.Orders.card", "*.items.price", "cases.carts.at"),
        "field_renames": ("orders.card.number:card", "cases.items.name:title"),
    }
    there = [catalog.SourceCollection("cases", name, None) for name in ("orders", "items")]
    nothing: Any = None
    source = dataclasses.replace(chosen.source, **lists)
    found = check._collections(check.CheckedSource(dataclasses.replace(chosen, source=source), nothing, ["shop"], there, {}))
    assert [each.found for each in found if each.verdict is not FINE] == [
        "cases.ordrs.card in source.field.exclude.list matches no captured collection, so it changes nothing",
        "cases.carts.at in source.field.exclude.list matches no captured collection, so it changes nothing",
        "orders.card.number:card in source.field.renames matches no captured collection, so it changes nothing",
    ]


@pytest.mark.parametrize(("seconds", "is_future"), [(-1, False), (100, False), (86_500, True)])
def test_a_start_in_the_servers_future_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, is_future: bool
) -> None:
    """The first start refuses it, after `check` had found everything fine."""
    monkeypatch.setattr(mongodb_server, "operation_time", lambda _: Timestamp(100, 1))
    monkeypatch.setattr(catalog, "database_names", lambda _: [])
    chosen = layers.pipeline(tmp_path)
    source = dataclasses.replace(chosen.source, capture_start_op_time=seconds << 32)
    checked = check.CheckedSource(dataclasses.replace(chosen, source=source), Mock(), ["shop"], [], {})
    told = [(each.verdict, type(each.error)) for each in check._start(checked)]
    assert told == ([(WRONG, errors.SettingsError)] if is_future else [])
    assert check._start in check.QUESTIONS


def test_lists_that_match_nothing_are_told_beside_the_databases_that_there_are(tmp_path: Path) -> None:
    """A mistyped database name is seen at once."""
    chosen, nothing = layers.pipeline(tmp_path), Mock()
    [*_, found] = check._collections(check.CheckedSource(chosen, nothing, ["crm", "shop"], [], {}))
    assert found.found == "no existing collection matches the lists; the server has the databases crm, shop"
    [*_, found] = check._collections(check.CheckedSource(chosen, nothing, [], [], {}))
    assert found.found == "no existing collection matches the lists; this user sees no database"
