"""`medallion check` with real servers: each problem that it finds, and what it says to do."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core import errors
from cdc_core.properties.source import Source
from cdc_core.settings import parse as settings
from pipelines.demo import embedded_mongodb
from pipelines.mongodb import catalog, connection
from pipelines.mongodb import client as mongodb
from pipelines.operations import check
from pipelines.operations.findings import CheckVerdict, Finding
from tests.harness import without_spark

if TYPE_CHECKING:
    from pymongo import MongoClient
    from pymongo.database import Database

Checked = Callable[..., dict[str, list[Finding]]]


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    """Runs the check of a pipeline; returns its findings by subject."""

    def run(uri: str, **source: str) -> dict[str, list[Finding]]:
        document = {
            "name": "checked",
            "lakehouse": {"root": str(tmp_path / "lakehouse")},
            "source": {
                "mongodb.connection.string": uri,
                **{name if "." in name else name.replace("_", "."): value for name, value in source.items()},
            },
        }
        found: dict[str, list[Finding]] = {}
        for finding in check.run(settings.parse(document)):
            found.setdefault(finding.about, []).append(finding)
        return found

    return run


def _wrong(found: dict[str, list[Finding]]) -> list[Finding]:
    return [each for findings in found.values() for each in findings if each.verdict is CheckVerdict.WRONG]


def test_a_good_source_has_nothing_to_mend(
    checked: Checked, database: Database[dict[str, Any]], mongodb_uri: str, tmp_path: Path
) -> None:
    """With a replica set and a collection to capture every check has a result, nothing is wrong, and nothing is created."""
    database["orders"].insert_one({"_id": 1})
    found = checked(mongodb_uri, database_include_list=database.name)
    assert _wrong(found) == []
    assert {"server", "collections", "change stream", "snapshot reads", "oplog"} <= set(found)
    assert found["collections"][-1].found == f"1 to capture: {database.name}.orders"
    assert not (tmp_path / "lakehouse").exists()
    check.refuse([each for findings in found.values() for each in findings])


def test_a_view_that_is_named_is_refused_by_name(
    checked: Checked, database: Database[dict[str, Any]], mongodb_uri: str
) -> None:
    """A view in the include list is wrong; one that only matches a pattern is a warning."""
    database["orders"].insert_one({"_id": 1})
    database.create_collection("recent", viewOn="orders", pipeline=[])
    named = checked(mongodb_uri, collection_include_list=f"{database.name}.recent")
    (finding,) = _wrong(named)
    assert f"{database.name}.recent is a view" in finding.found and isinstance(finding.error, errors.SourceUnsuitable)
    met = checked(mongodb_uri, database_include_list=database.name)
    assert _wrong(met) == []
    assert [each.verdict for each in met["collections"]] == [CheckVerdict.WARNING, CheckVerdict.FINE]


def test_a_history_in_the_place_of_a_collection_is_found(
    database: Database[dict[str, Any]], mongodb_uri: str, tmp_path: Path
) -> None:
    """The history of `orders` would be the table of a collection `orders_history`: gold would fail long after the capture began."""
    for name in ("orders", "orders_history"):
        database[name].insert_one({"_id": 1})
    source = {"mongodb.connection.string": mongodb_uri, "database.include.list": database.name}
    document = {"name": "checked", "lakehouse": {"root": str(tmp_path)}, "source": source}

    def wrong(*namespaces: str) -> list[str]:
        silver = {"collections": {namespace: {"history": True} for namespace in namespaces}}
        return [each.found for each in check.run(settings.parse({**document, "silver": silver})) if each.error]

    assert wrong(f"{database.name}.orders_history") == []
    (message,) = wrong(f"{database.name}.orders")
    assert f"the history of {database.name}.orders" in message and f"{database.name}.orders_history" in message


def test_a_time_series_collection_is_refused_by_name(
    checked: Checked, database: Database[dict[str, Any]], mongodb_uri: str
) -> None:
    """A time-series collection has no change stream."""
    database.create_collection("readings", timeseries={"timeField": "at"})
    (finding,) = _wrong(checked(mongodb_uri, collection_include_list=f"{database.name}.readings"))
    assert "time-series collection" in finding.found and finding.mend


def test_a_collection_that_does_not_exist_is_mentioned(
    checked: Checked, database: Database[dict[str, Any]], mongodb_uri: str
) -> None:
    """A name that nothing has is a warning: the collection may come later."""
    database["orders"].insert_one({"_id": 1})
    found = checked(mongodb_uri, collection_include_list=f"{database.name}.orders, {database.name}.Order")
    assert [(each.found, each.verdict) for each in found["collections"]] == [
        (f"{database.name}.Order does not exist", CheckVerdict.WARNING),
        (f"1 to capture: {database.name}.orders", CheckVerdict.FINE),
    ]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"cursor_pipeline": '[{"$match": {"$expr": {"$nope": 1}}}]'}, "Unrecognized expression '$nope'"),
        ({"capture_scope": "database", "capture_target": "two words"}, "cannot contain the character ' '"),
        ({"capture_scope": "database", "capture_target": "local"}, "internal local database"),
        ({"capture_scope": "collection", "capture_target": "shop.system.views"}, "internal shop.system.views collection"),
    ],
)
def test_a_stream_that_is_refused_is_told_with_the_reason(
    checked: Checked, mongodb_uri: str, asked: dict[str, str], reason: str
) -> None:
    """A stage, a database or a collection of which there is no change stream was called a bug, and ended the check."""
    (finding,) = _wrong(checked(mongodb_uri, **asked))
    assert (finding.about, type(finding.error)) == ("change stream", errors.SourceUnsuitable)
    assert reason in finding.found and "source.cursor.pipeline" in finding.found and "capture.target" in finding.found


@pytest.mark.parametrize(
    ("changed", "mode", "error", "says"),
    [
        (lambda token: token, "initial", None, "the oplog holds bronze's, of "),
        (lambda token: "8200000001" + token[10:], "initial", errors.PositionLost, "no longer holds the position of 1970"),
        (lambda token: "8200000001" + token[10:], "when_needed", None, "no longer holds the position of 1970"),
        (lambda token: "82ffffff00" + token[10:], "when_needed", errors.SourceUnsuitable, "behind bronze's position 2106"),
    ],
)
def test_the_position_of_bronze_is_tried(
    database: Database[dict[str, Any]],
    mongodb_uri: str,
    tmp_path: Path,
    changed: Callable[[str], str],
    mode: str,
    error: type[errors.MedallionError] | None,
    says: str,
) -> None:
    """After an outage, `check` says what the next start would: it can go on, takes a snapshot, or needs a decision. No Spark is started."""
    with database["orders"].watch() as stream:
        database["orders"].insert_one({"_id": 1})
        token = next(stream)["_id"]["_data"].lower()
    with without_spark.running():
        hop = without_spark.Hop(tmp_path)
        hop.commit([{"kind": "heartbeat", "resume_token": changed(token), "batch": 1, "offset": 1}])
        source = {
            "mongodb.connection.string": mongodb_uri,
            "database.include.list": database.name,
            "snapshot.mode": mode,
        }
        found = check.run(
            settings.parse({"name": hop.settings.name, "lakehouse": {"root": str(tmp_path)}, "source": source}),
            lambda: pytest.fail("Spark is started"),
        )
    (position,) = [each for each in found if each.about == "position"]
    assert says in position.found
    assert type(position.error) is (type(None) if error is None else error)
    assert position.verdict is (
        CheckVerdict.WRONG if error else CheckVerdict.WARNING if mode == "when_needed" else CheckVerdict.FINE
    )


def test_a_stream_of_one_collection_is_named(checked: Checked, database: Database[dict[str, Any]], mongodb_uri: str) -> None:
    """With `capture.scope: collection` the stream is that of the collection, not of its database."""
    database["orders"].insert_one({})
    found = checked(mongodb_uri, capture_scope="collection", capture_target=f"{database.name}.orders")
    assert [each.found for each in found["change stream"]] == [f"can be opened on the collection {database.name}.orders"]


def test_a_name_that_no_database_can_have_matches_nothing(checked: Checked, mongodb_uri: str) -> None:
    """The server refuses to list the collections of a database with such a long name; the check was a bug then."""
    found = checked(mongodb_uri, collection_include_list=f"{'d' * 70}.orders")
    assert _wrong(found) == []
    assert found["collections"][0].found == f"{'d' * 70}.orders does not exist"
    (finding,) = _wrong(checked(mongodb_uri, capture_scope="database", capture_target="d" * 70))
    assert (finding.about, type(finding.error)) == ("change stream", errors.SourceUnsuitable)


def test_a_regular_expression_that_is_read_literally_matches_nothing(checked: Checked, mongodb_uri: str) -> None:
    """With `filters.match.mode: literal` its backslash is a part of a name that no database can have."""
    found = checked(mongodb_uri, collection_include_list=r"shop\.orders", filters_match_mode="literal")
    assert _wrong(found) == []
    assert found["collections"][0].found == r"shop\.orders does not exist"


@pytest.mark.parametrize(("action", "verdict"), [("warn", CheckVerdict.WARNING), ("fail", CheckVerdict.WRONG)])
def test_what_ends_a_start_or_a_snapshot_is_told_before(
    checked: Checked, database: Database[dict[str, Any]], mongodb_uri: str, action: str, verdict: CheckVerdict
) -> None:
    """The problems are more collections than the limit, and a filter that the server refuses."""
    for name in ("orders", "stock"):
        database[name].insert_one({"_id": 1})
    filters = "snapshot.collection.filter.overrides"
    source = {
        "guardrail_collections_max": "1",
        "guardrail_collections_limit_action": action,
        filters: f"{database.name}.orders, {database.name}.stock",
        f"{filters}.{database.name}.orders": '{"a": {"$near": 1}}',
        f"{filters}.{database.name}.stock": '{"a": 1}',
    }
    found = checked(mongodb_uri, database_include_list=database.name, **source)
    assert [(each.found, each.verdict) for each in found["collections"][-1:]] == [
        ("2 are captured, but guardrail.collections.max is 1", verdict)
    ]
    (refused,) = found[f"snapshot of {database.name}.orders"]
    assert "the server refuses its filter" in refused.found and f"{filters}.{database.name}.orders" in refused.mend
    assert f"snapshot of {database.name}.stock" not in found


@pytest.mark.parametrize(
    ("asked", "about"),
    [
        ({"capture_mode": "change_streams_update_full_with_pre_image"}, "pre-images"),
        ({"capture_mode_full_update_type": "post_image"}, "post-images"),
    ],
)
def test_missing_images_come_with_the_command_that_turns_them_on(
    checked: Checked, database: Database[dict[str, Any]], mongodb_uri: str, asked: dict[str, str], about: str
) -> None:
    """A capture with pre- or post-images needs them on each collection, and the command in the message is correct."""
    database["orders"].insert_one({"_id": 1})
    source = {"database_include_list": database.name, **asked}
    (finding,) = _wrong(checked(mongodb_uri, **source))
    assert finding.about == about
    assert "collMod: 'orders', changeStreamPreAndPostImages: {enabled: true}" in finding.mend
    database.command({"collMod": "orders", "changeStreamPreAndPostImages": {"enabled": True}})
    assert _wrong(checked(mongodb_uri, **source)) == []


def test_an_unreachable_server_is_temporary(checked: Checked) -> None:
    """If nothing listens there is one finding, with exit code 75."""
    uri = f"mongodb://127.0.0.1:{embedded_mongodb._free_port()}/"
    found = checked(uri, mongodb_server_selection_timeout_ms="1000")
    (finding,) = _wrong(found)
    with pytest.raises(errors.SourceUnreachable) as raised:
        check.refuse([finding])
    assert raised.value.exit_code == 75


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """A server that is not a replica set."""
    folder, port = tmp_path / "standalone", embedded_mongodb._free_port()
    folder.mkdir()
    arguments = ["--dbpath", str(folder), "--port", str(port), "--bind_ip", "127.0.0.1", "--nounixsocket"]
    server = subprocess.Popen(
        [str(embedded_mongodb.find()), *arguments, "--logpath", str(folder / "log")], stdout=subprocess.DEVNULL
    )
    try:
        with contextlib.closing(mongodb.client(f"mongodb://127.0.0.1:{port}/")) as client:
            client.admin.command("ping")
        yield f"mongodb://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


def test_a_server_that_is_no_replica_set_is_unsuitable(checked: Checked, standalone: str) -> None:
    """Change streams need a replica set: exit code 3, and the message names the server's option."""
    named = f"{standalone}?replicaSet=rs0"
    for uri in (standalone, named):
        (finding,) = _wrong(checked(uri, mongodb_server_selection_timeout_ms="1000"))
        assert isinstance(finding.error, errors.SourceUnsuitable) and "replSet" in finding.found


def test_a_server_of_another_replica_set_is_unsuitable(checked: Checked, mongodb_uri: str) -> None:
    """A wrong `replicaSet` is not temporary: exit code 3, and the message has both names. A server that does not answer may be of it."""
    uri, name = mongodb_uri.partition("?")[0], embedded_mongodb.REPLICA_SET
    (finding,) = _wrong(checked(f"{uri}?replicaSet=rs0", mongodb_server_selection_timeout_ms="1000"))
    assert isinstance(finding.error, errors.SourceUnsuitable) and name in finding.found and "rs0" in finding.found
    beside_another = uri.removesuffix("/") + f",127.0.0.1:{embedded_mongodb._free_port()}/?replicaSet=rs0"
    (finding,) = _wrong(checked(beside_another, mongodb_server_selection_timeout_ms="1000"))
    assert isinstance(finding.error, errors.SourceUnreachable)


def test_rights_and_passwords(checked: Checked, protected_mongodb: embedded_mongodb.EmbeddedMongoDB) -> None:
    """`read` on the database is sufficient. A wrong password and a missing right are distinguished, each with what to do."""
    with contextlib.closing(mongodb.client(protected_mongodb.uri)) as root:
        _stock(root)
    lists = {"collection_include_list": "shop.orders", "mongodb_authsource": "admin"}

    def uri(user: str, password: str, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("CHECK_URI", f"mongodb://{user}:{password}@{protected_mongodb.address}/?authSource=admin")
        return "${env:CHECK_URI}"

    with pytest.MonkeyPatch.context() as patch:
        reader = checked(uri("reader", "r", patch), **lists)
        assert _wrong(reader) == []
        assert [each.verdict for each in reader["oplog"]] == [CheckVerdict.WARNING]
        (wrong_password,) = _wrong(checked(uri("reader", "nope", patch), **lists))
        assert isinstance(wrong_password.error, errors.AccessRefused) and "password" in wrong_password.found
        elsewhere = _wrong(checked(uri("elsewhere", "e", patch), **lists))
        assert elsewhere and all(isinstance(each.error, errors.AccessRefused) for each in elsewhere)
        assert any("grantRolesToUser" in each.mend and "'shop'" in each.mend for each in elsewhere)
        assert [each.about for each in elsewhere if "collections" in each.about] == ["collections of shop"]
        # A user who sees no database is not told that its collections do not exist.
        unseen = checked(uri("elsewhere", "e", patch), collection_include_list="shop[.].*", mongodb_authsource="admin")
        assert "collections of shop" in unseen and "collections" not in unseen
        patch.setenv("CHECK_URI", f"mongodb://{protected_mongodb.address}/")
        nobody = _wrong(checked("${env:CHECK_URI}", **lists))
        assert nobody and all("names no user" in each.mend for each in nobody)
        assert not any("nope" in each.found + each.mend for each in (wrong_password, *elsewhere))
        # This user sees the names of all databases, and may only list the collections of the captured one.
        assert _wrong(checked(uri("monitor", "m", patch), **lists)) == []
        shop = source("${env:CHECK_URI}", **{"collection.include.list": "shop.orders"})
        with contextlib.closing(connection.connection(shop).client()) as monitor:
            assert {"shop", "unseen"} <= set(catalog.database_names(monitor))
            assert [each.namespace for each in connection.captured(shop, monitor)] == ["shop.orders"]


def source(uri: str, **given: str) -> Source:
    return settings.parse(
        {"name": "checked", "lakehouse": {"root": "/none"}, "source": {"mongodb.connection.string": uri, **given}}
    ).source


def _stock(root: MongoClient[dict[str, Any]]) -> None:
    root["shop"]["orders"].insert_one({"_id": 1})
    for user, password, db in (("reader", "r", "shop"), ("elsewhere", "e", "other")):
        root.admin.command("createUser", user, pwd=password, roles=[{"role": "read", "db": db}])
    root["unseen"]["things"].insert_one({"_id": 1})
    roles = [{"role": "read", "db": "shop"}, {"role": "clusterMonitor", "db": "admin"}]
    root.admin.command("createUser", "monitor", pwd="m", roles=roles)
