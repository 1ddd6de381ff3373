"""A settings file: what is accepted, what is refused with which message, and what is never shown."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import json
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.properties import source as properties
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.properties.source import CaptureMode, SnapshotMode, describe_foreign
from cdc_core.properties.types import Reference
from cdc_core.settings import parse as settings
from pipelines.gold import expectations as gold_expectations
from pipelines.gold import models as gold_models
from pipelines.settings import file as settings_file

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "cases" / "settings"
REFUSED = sorted((CASES / "refused").glob("*.yml"))

SMALLEST: dict[str, Any] = {
    "name": "shop",
    "lakehouse": {"root": "lake"},
    "source": {"mongodb.connection.string": "mongodb://localhost"},
}


def parsed(**sections: Any) -> settings.Settings:
    """The settings of the smallest document with these sections; `source` is merged into its own."""
    source = {**SMALLEST["source"], **sections.pop("source", {})}
    return settings.parse({**SMALLEST, **sections, "source": source})


def problems(**sections: Any) -> list[str]:
    with pytest.raises(errors.SettingsError) as caught:
        parsed(**sections)
    return [str(problem) for problem in caught.value.problems]


STORE = {"fs.s3a.endpoint": "https://s3.example.com", "fs.s3a.path.style.access": True, "fs.s3a.secret.key": "${env:KEY}"}
STORE["fs.azure.sas.token.provider.type"] = "org.example.Provider"


def test_a_prefix_may_be_the_empty_one() -> None:
    """It is the default, and a template writes it out."""
    given = {"name": "shop", "source": {"mongodb.connection.string": "mongodb://one"}}
    found = settings.parse({**given, "lakehouse": {"catalog": "main", "schema_prefix": ""}}).lakehouse
    assert found == settings.Lakehouse(catalog="main")


@pytest.mark.parametrize(
    "sections",
    [
        {"lakehouse": {"root": "a\0b"}},
        {"lakehouse": {"root": "${env:HOME}/\0"}},
        {"gold": {"models": "a\0b"}},
        {"source": {"metrics.address": "\0"}},
        {"source": {"mongodb.connection.string": "mongodb://a\0b"}},
    ],
)
def test_a_text_has_no_null_character(sections: dict[str, Any]) -> None:
    """YAML and JSON can write it, and the system raises an error of its own for a path or a host with it."""
    (problem,) = problems(**sections)
    assert "without the character U+0000 is expected" in problem


def test_a_store_is_named_with_its_credentials_as_references() -> None:
    """Hadoop's settings of the store are read. A literal credential is refused, and not shown."""
    loaded = parsed(lakehouse={"root": "s3a://b/lake", "store": STORE})
    assert {name: str(each) for name, each in loaded.lakehouse.store.items()} == {
        **STORE,
        "fs.s3a.path.style.access": "true",
    }
    wrong = {"fs.s3a.secret.key": "hunter2", "fs.s3a.access.key": "AKIA", "fs.azure.account.key.a.dfs": "x", "spark.x": "y"}
    wrong["fs.azure.sas.c.a.blob.core.windows.net"] = "?sv=1&sig=hunter2"
    with pytest.raises(errors.SettingsError) as refused:
        parsed(lakehouse={"root": "s3a://b/lake", "store": wrong})
    assert [each.path for each in refused.value.problems] == [f"lakehouse.store.{name}" for name in wrong]
    assert "hunter2" not in str(refused.value) and "AKIA" not in str(refused.value)


@pytest.mark.parametrize("file", REFUSED, ids=lambda file: file.stem)
def test_refused_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All mistakes of a file are reported at once, each with its line, its key, and what is expected."""
    monkeypatch.chdir(file.parent)
    with pytest.raises(errors.SettingsError) as caught:
        settings_file.load(file.name)
    assert str(caught.value) == file.with_suffix(".txt").read_text().rstrip("\n")
    assert caught.value.exit_code == 2
    assert "hunter2" not in str(caught.value)


def test_values_as_a_connector_holds_them() -> None:
    """Strings may be numbers and booleans, lists may be comma-separated, and only true and false are booleans."""
    loaded = settings_file.load(CASES / "accepted" / "connector_strings.yml")
    source = loaded.source
    assert loaded.name == "no"
    assert loaded.lakehouse == settings.Lakehouse(catalog="main", schema_prefix="shop_")
    assert (source.max_batch_size, source.mongodb_ssl_enabled) == (2048, True)
    assert source.capture_mode is CaptureMode.UPDATE_FULL
    assert source.snapshot_mode is SnapshotMode.NO_DATA
    assert source.collection_include_list == (r"shop\.a{1,2}", "shop.b")
    assert loaded.warnings == (
        "source.tombstones.on.delete has no effect: tables need no tombstones",
        "silver.collections.mall.x: the filters of source do not capture it",
    )


@pytest.mark.parametrize("value", [",", " , ,", [""], [" ", ""]])
@pytest.mark.parametrize("name", ["database.include.list", "collection.include.list", "snapshot.include.collection.list"])
@pytest.mark.parametrize("mode", ["regex", "literal"])
def test_a_list_of_nothing_but_separators_is_refused(name: str, value: object, mode: str) -> None:
    """Read as no list, it would capture everything. Without any text the setting is as if it were not set."""
    (problem,) = problems(source={name: value, "filters.match.mode": mode})
    assert problem.startswith(f"source.{name}: a comma-separated list ")
    assert problem.endswith("(name at least one entry, or leave the setting out)")
    assert parsed(source={name: "", "filters.match.mode": mode}) == parsed(source={"filters.match.mode": mode})


@pytest.mark.parametrize("mode", ["regex", "literal"])
def test_a_list_of_snapshots_that_cannot_be_read_is_refused(mode: str) -> None:
    """Its entries are regular expressions in both modes."""
    source = {"snapshot.include.collection.list": "shop.(a", "filters.match.mode": mode}
    (problem,) = problems(source=source)
    assert problem.startswith("source.snapshot.include.collection.list: a regular expression is expected, found shop.(a")


@pytest.mark.parametrize(
    ("unwrap", "instead"),
    [
        ({"delete.tombstone.handling.mode": "rewrite-with-tombstone"}, "rewrite"),
        ({"delete.handling.mode": "rewrite", "drop.tombstones": "false"}, "rewrite"),
        ({"drop.tombstones": "false"}, "drop"),
        ({"delete.tombstone.handling.mode": "tombstone"}, None),
        ({"delete.handling.mode": "none", "drop.tombstones": "false"}, None),
    ],
)
def test_a_delete_that_only_a_tombstone_would_complete(unwrap: dict[str, str], instead: str | None) -> None:
    """Without tombstones the connector keeps the row in these modes, and a table removes it: a warning says so."""
    loaded = parsed(source={"tombstones.on.delete": "false"}, silver={"defaults": unwrap, "collections": {"shop.a": {}}})
    found = [warning for warning in loaded.warnings if warning.startswith("silver")]
    assert found == (
        []
        if instead is None
        else [
            "silver.defaults: a delete removes the row, also beside source.tombstones.on.delete: false "
            f"(delete.tombstone.handling.mode: {instead} keeps it)"
        ]
    )
    assert not [warning for warning in parsed(silver={"defaults": unwrap}).warnings if warning.startswith("silver")]


@pytest.mark.parametrize("mode", ["change_streams", "change_streams_with_pre_image", "change_streams_update_full"])
def test_updates_without_anything_to_apply_them_to(mode: str) -> None:
    """A collection that keeps no documents stays as it was at its inserts, which nothing else would say before the first update."""
    silver = {
        "defaults": {"keep.document": False},
        "collections": {"shop.a": {"keep.document": True}, "shop.b": {"history": True}, "shop.c": {}},
    }
    found = [each for each in parsed(source={"capture.mode": mode}, silver=silver).warnings if "keep.document" in each]
    said = f"keep.document: updates of capture.mode: {mode} are not applied without it, and make their rows incomplete"
    paths = ("silver.defaults", "silver.collections.shop.b")
    assert found == ([] if mode.endswith("full") else [f"{path}.{said}" for path in paths])


def test_a_pinned_type_is_over_a_field_of_any_map() -> None:
    """`schema` of a collection overrides `map.fields` of the defaults: it gives the type of the map's values, or another type."""
    own = settings.CollectionSettings(map_fields=("a", "b", "c"), schema={"a": "map<double>", "b": "string"})
    assert own.pins == settings.parse_pins({"a": "map<double>", "b": "string", "c": "map"})


@pytest.mark.parametrize(
    ("section", "where", "message"),
    [
        ({"schema": {"a.b": "int", "a": "string"}}, "schema.a.b", "a is pinned to string (remove one of them)"),
        ({"schema": {"m": "map<int>", "m.*": "bigint"}}, "schema.m.*", "m is pinned to map<int> (remove one of them)"),
        (
            {"schema": {"m": "map", "m.*": "int", "m.*.x": "int"}},
            "schema.m.*.x",
            "m.* is pinned to int (remove one of them)",
        ),
        (
            {"schema": {"m": "map", "m.x.y": "int"}},
            "schema.m.x.y",
            "m is pinned to map (remove one of them, or pin the map's values, as m.*)",
        ),
        ({"map.fields": "a.b", "schema": {"a": "string"}}, "map.fields", "a is pinned to string (remove one of them)"),
    ],
)
def test_contradictory_pins_are_refused(section: dict[str, Any], where: str, message: str) -> None:
    """One of them would have no effect, and nothing would say so."""
    for silver in ({"defaults": section}, {"collections": {"shop.orders": section}}):
        path = "silver.defaults" if "defaults" in silver else "silver.collections.shop.orders"
        (problem,) = problems(silver=silver)
        assert problem.startswith(f"{path}.{where}: ")
        assert problem.endswith(f" cannot be pinned, because {message}")


def test_pins_that_do_not_contradict_each_other() -> None:
    """A map's values are pinned at `*`, and flattened documents by their paths."""
    pins = {"m": "map", "m.*": "map", "m.*.*": "int", "a.b": "int", "a.c": "string", "ab": "int"}
    silver = parsed(silver={"defaults": {"flatten.struct": True, "schema": pins, "map.fields": "x,m"}}).silver
    assert silver.defaults.pins == settings.parse_pins({**pins, "x": "map"})


def test_an_inherited_pin_yields_to_a_contradictory_one() -> None:
    """What a collection sets itself takes precedence, as with every other key."""
    defaults = {"schema": {"a": "string", "b.c": "int", "d": "int"}, "map.fields": "m,n"}
    own = {"schema": {"a.x": "int", "b": "string", "m.k": "int"}}
    silver = parsed(silver={"defaults": defaults, "collections": {"shop.orders": own}}).silver
    expected = settings.parse_pins({**own["schema"], "d": "int", "n": "map"})
    assert silver.for_collection("shop.orders").pins == expected


def test_collections_override_defaults_key_by_key() -> None:
    """A collection inherits all keys that it does not set; an unlisted one inherits all of them."""
    silver = settings_file.load(CASES / "accepted" / "connector_strings.yml").silver
    own, defaults = silver.for_collection("shop.a"), silver.for_collection("shop.unlisted")
    assert own.unwrap == dataclasses.replace(defaults.unwrap, flatten_struct=True)
    assert [each.name for each in own.unwrap.add_fields] == ["__op", "__source_ts_ms"]
    assert own.schema == {"total": "decimal(18,2)", "n": "bigint"}
    assert (own.history, defaults.history) == (True, False)
    assert (own.map_fields, silver.for_collection("mall.x").map_fields) == (("a.b", "c"), ())
    assert silver.for_collection("mall.x").on_conflict is settings.OnConflict.RETYPE
    assert silver.for_collection("mall.x").keep_document is False


def test_a_collections_key_without_a_value_is_not_set() -> None:
    """It is inherited, as `schema` is; an empty list or text is a value. A mistake in the defaults is still reported once."""
    shared = {
        "history": True,
        "map.fields": "m",
        "schema": {"a": "int"},
        "add.fields": "op",
        "delete.tombstone.handling.mode": "rewrite",
    }
    own = {"shop.none": dict.fromkeys(shared), "shop.empty": {"map.fields": [], "add.fields": ""}}
    silver = parsed(silver={"defaults": shared, "collections": own}).silver
    assert silver.for_collection("shop.none") == silver.defaults
    empty = silver.for_collection("shop.empty")
    assert (empty.history, empty.map_fields, empty.unwrap.add_fields) == (True, (), ())
    mistaken = {"defaults": {"history": "perhaps", "flatten.struct": "perhaps"}}
    nulls = {"shop.a": {"history": None, "flatten.struct": None}}
    assert len(problems(silver={**mistaken, "collections": nulls})) == 2


def test_a_collection_without_keys_is_like_any_other() -> None:
    """`shop.none:` alone sets nothing, as `silver:` does; another value is reported with the section's path."""
    own = {"shop.none": None, "silver.defaults": {}}
    found = parsed(
        silver={"defaults": {"keep.document": False}, "collections": own}, source={"capture.mode": "change_streams"}
    )
    assert found.silver.for_collection("shop.none") == found.silver.defaults
    assert [each.partition(":")[0] for each in found.warnings] == ["silver.defaults.keep.document"]
    expected = "silver.collections.shop.none: a mapping is expected, found"
    for value, kind in ((True, "true"), (3, "3"), ("x", "a text"), ([{}], "a list")):
        assert problems(silver={"collections": {"shop.none": value}}) == [f"{expected} {kind}"]


@pytest.mark.parametrize(
    ("own", "mode", "adjustment"),
    [
        ({"delete.handling.mode": "drop"}, "drop", "none"),
        ({"sanitize.field.names": True}, "rewrite", "avro"),
        ({"delete.handling.mode": None}, "rewrite", "none"),
        ({"delete.handling.mode": "drop", "delete.tombstone.handling.mode": "tombstone"}, "tombstone", "none"),
    ],
)
def test_a_collections_older_option_is_over_an_inherited_one(own: dict[str, Any], mode: str, adjustment: str) -> None:
    """Today's name takes precedence if both are given together, but an inherited one does not override what the collection sets itself."""
    shared = {"delete.tombstone.handling.mode": "rewrite", "field.name.adjustment.mode": "none"}
    unwrap = parsed(silver={"defaults": shared, "collections": {"shop.x": own}}).silver.for_collection("shop.x").unwrap
    assert unwrap.delete_tombstone_handling_mode.value == mode
    assert unwrap.field_names.adjustment.value == adjustment


def test_pins_are_overridden_one_by_one() -> None:
    """A collection's pins are merged with those of the defaults."""
    silver = parsed(
        silver={
            "defaults": {"schema": {"a": "string", "b": "int"}},
            "collections": {"shop.x": {"schema": {"b": "decimal(10,2)"}}},
        }
    ).silver
    assert silver.for_collection("shop.x").schema == {"a": "string", "b": "decimal(10,2)"}


def test_a_mistake_in_the_defaults_is_reported_once() -> None:
    """Collections inherit the defaults, and not their mistakes."""
    found = problems(
        silver={
            "defaults": {"history": "perhaps", "flatten.struct": "perhaps", "schema": {"a": "text"}},
            "collections": {"shop.a": {}, "shop.b": {"history": True, "flatten.struct": True}},
        }
    )
    assert [each.partition(":")[0] for each in found] == [
        "silver.defaults.history",
        "silver.defaults.schema.a",
        "silver.defaults.flatten.struct",
    ]


def test_the_smallest_file_has_the_defaults() -> None:
    """Only the name, the place and the connection have no default."""
    source = settings_file.load(CASES / "accepted" / "smallest.yml").source
    assert source.mongodb_connection_string == Reference("${env:MONGODB_URI}")
    assert source.capture_mode is CaptureMode.UPDATE_FULL
    assert source.snapshot_mode is SnapshotMode.INITIAL
    assert source.max_batch_size == 100_000
    assert source.commit_max_bytes == 64 * 1024 * 1024
    assert source.commit_interval_ms == 1_000
    assert source.max_queue_size_in_bytes == 256 * 1024 * 1024
    assert source.heartbeat_interval_ms == 60_000


def test_a_queue_without_a_bound_has_the_usual_one() -> None:
    """0 is the connector's own default: a pasted configuration may have it."""
    source = {"mongodb.connection.string": "mongodb://one", "max.queue.size.in.bytes": "0"}
    found = settings.parse({"name": "shop", "lakehouse": {"root": "lake"}, "source": source})
    assert found.source.max_queue_size_in_bytes == 256 * 1024 * 1024
    assert [each for each in found.warnings if "0 is no limit in the connector" in each]


def test_the_example_is_accepted_without_a_warning() -> None:
    """conf/shop.yml is a valid settings file."""
    loaded = settings_file.load(ROOT / "conf" / "shop.yml")
    assert (loaded.name, loaded.warnings) == ("shop", ())
    assert loaded.lakehouse.root == "./lakehouse"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match="there is no such file"):
        settings_file.load(tmp_path / "nothing.yml")


def test_a_folder_and_a_binary_file(tmp_path: Path) -> None:
    """What cannot be read as text is refused in one line."""
    (tmp_path / "binary.yml").write_bytes(b"name: \xff\xfe")
    for path, words in ((tmp_path, "it cannot be read"), (tmp_path / "binary.yml", "not UTF-8 at byte 6")):
        with pytest.raises(errors.SettingsError, match=words):
            settings_file.load(path)


def test_a_file_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    """A partial file would be another file, which the next attempt refuses to overwrite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(errors.StorageExhausted, match="it cannot be written"):
            settings_file.write(tmp_path / "shop.yml", "# a line\n" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_root_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one folder is above it, in which gold's folders are searched. A container may have its settings there."""
    monkeypatch.chdir(tmp_path)
    assert settings_file._found("tmp", Path("/shop.yml")) == "/tmp"
    assert settings_file._found("no_such_folder", Path("/shop.yml")) == "no_such_folder"


@pytest.mark.parametrize("root", ["{}/file", "file:{}/file/lakehouse", "file://{}/file", "file", "./file/lakehouse"])
def test_a_root_that_is_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    """No command finds a table there, so that silver, gold and status would say that bronze is empty."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    settings_text = "name: shop\nlakehouse: {{root: '{}'}}\nsource: {{mongodb.connection.string: 'mongodb://h'}}\n"
    (tmp_path / "shop.yml").write_text(settings_text.format(root.format(tmp_path)))
    with pytest.raises(errors.SettingsError, match=r"lakehouse\.root: .*file is a file.*folder is expected"):
        settings_file.load(tmp_path / "shop.yml")
    (tmp_path / "file").unlink()
    assert settings_file.load(tmp_path / "shop.yml").lakehouse.root == root.format(tmp_path)


def test_a_folder_that_cannot_be_looked_at_is_not_found(tmp_path: Path) -> None:
    """Every command reads the settings, and most of them need no folder: it ended them with a bug."""
    (tmp_path / "shop.yml").write_text(
        "name: shop\nlakehouse: {root: l}\nsource: {mongodb.connection.string: 'mongodb://h'}\n"
        f"gold: {{models: {'x' * 300}, expectations: {'y' * 300}}}\n"
    )
    loaded = settings_file.load(tmp_path / "shop.yml")
    assert loaded.gold.models == "x" * 300
    with pytest.raises(errors.SettingsError, match=r"gold\.models: there is no folder"):
        gold_models.files(loaded)
    with pytest.raises(errors.SettingsError, match=r"gold\.expectations: there is no folder"):
        gold_expectations.read(loaded)


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its expectations, tables would be published unchecked."""
    (tmp_path / "suites").mkdir()
    assert settings_file.below(tmp_path / "none", ".yml") == []

    def refused(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    (tmp_path / "volume" / "lost+found" / "a.yml").touch()
    assert settings_file.below(tmp_path / "volume", ".yml") == []
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(errors.SettingsError, match=r"suites: it cannot be read: Permission denied"):
        settings_file.below(tmp_path / "suites", ".yml")


def test_a_catalog_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables in `lakehouse` are resolved when the file is read; the connection string stays a reference."""
    file = tmp_path / "shop.yml"
    file.write_text(
        "name: shop\nlakehouse: {catalog: '${env:CATALOG}', schema_prefix: '${env:TARGET}_'}\n"
        "source: {mongodb.connection.string: '${env:CATALOG}'}\n"
    )
    monkeypatch.setenv("CATALOG", "main")
    monkeypatch.setenv("TARGET", "dev")
    loaded = settings_file.load(file)
    assert loaded.lakehouse == settings.Lakehouse(catalog="main", schema_prefix="dev_")
    assert str(loaded.source.mongodb_connection_string) == "${env:CATALOG}"
    monkeypatch.setenv("TARGET", "dev.eu")
    with pytest.raises(errors.SettingsError, match=r"schema_prefix: letters, digits and _ are expected, found dev\.eu_"):
        settings_file.load(file)


@pytest.mark.parametrize(
    "uri",
    [
        "mongodb://joe:pw@host/",
        "mongodb+srv://joe:pw@host/",
        "mongodb://joe:p@ss@host/",
        "mongodb://joe:p/ss@host/",
        "mongodb://joe:p/s?ss@host/",
        "mongodb://joe:p@h/ss@host/",
        "mongodb://joe:${env:A}b@host/",
        "mongodb://${env:USER}:pw@host/",
        "mongodb://host/?tls=true&tlsCertificateKeyFilePassword=pw",
        "mongodb://host/?tls=true;tlsCertificateKeyFilePassword=pw",
        "mongodb://host/?authMechanismProperties=AWS_SESSION_TOKEN:pw",
    ],
)
def test_a_literal_password_is_refused(uri: str) -> None:
    """A password anywhere in a connection string is refused, and the message does not repeat it."""
    (problem,) = problems(source={"mongodb.connection.string": uri})
    assert "without a literal password" in problem
    assert "${env:NAME}" in problem
    assert "pw" not in problem
    assert "ss@" not in problem


@pytest.mark.parametrize(
    "uri",
    [
        "mongodb://host:27017,other:27018/?replicaSet=rs0",
        "mongodb://joe@host/?authMechanism=MONGODB-X509",
        "mongodb://host:27017/?appName=a@b:c",
        "mongodb://joe:${env:A}@host/",
        "mongodb://${env:A}:${secret:scope/key}@host:27017/",
        "mongodb+srv://${env:HOST}/?tlsCertificateKeyFilePassword=${env:A}",
        "mongodb://host/?tlsCertificateKeyFilePassword=${env:A};authMechanismProperties=AWS_SESSION_TOKEN:${env:B};tls=true",
        "${secret:scope/uri}",
    ],
)
def test_connection_strings_without_a_password(uri: str) -> None:
    """Hosts, options and references are kept as written."""
    assert str(parsed(source={"mongodb.connection.string": uri}).source.mongodb_connection_string) == uri


def test_nothing_printed_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed, formatted and pickled settings only contain references."""
    monkeypatch.setenv("PW", "hunter2")
    loaded = parsed(source={"mongodb.user": "joe", "mongodb.password": "${env:PW}"})
    for text in (repr(loaded), str(loaded), f"{loaded}", pickle.dumps(loaded).decode("latin-1")):
        assert "hunter2" not in text
        assert "${env:PW}" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("table: a\nkwargs: &k {column: a, again: *k}\n", ":2:9: not YAML: .*recursive.*within its own anchor"),
        ("table: a\nkwargs: {columns: &l [1, *l]}\n", ":2:19: not YAML: .*recursive.*within its own anchor"),
        (f"table: a\nn: {'9' * 5000}\n", ":2:4: not YAML: too many digits .put the value in quotes"),
    ],
)
def test_a_value_without_an_end_is_told_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    """A suite or a model's description could not be walked through, or written as JSON."""
    file = tmp_path / "suite.yml"
    file.write_text(text)
    with pytest.raises(errors.SettingsError, match=said):
        settings_file.document(file)


def test_a_file_of_aliases_is_read_at_once(tmp_path: Path) -> None:
    """Each doubles the paths to the first value: with thirty there are a thousand million."""
    file = tmp_path / "suite.yml"
    file.write_text("a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 31)))
    assert isinstance(settings_file.document(file), dict)


def test_a_json_file_may_escape_any_character(tmp_path: Path) -> None:
    """Including those that need two escapes; half of a surrogate pair is refused."""
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"\N{ROCKET}": ["é\N{GRINNING FACE}"]}))
    assert settings_file.document(file) == {"\N{ROCKET}": ["é\N{GRINNING FACE}"]}
    file.write_text('{"half": "\\ud83d"}')
    with pytest.raises(errors.SettingsError, match="not YAML"):
        settings_file.document(file)


@pytest.mark.parametrize(("text", "number"), [("0500", 500), ("08", 8), ("-010", -10), ("+7", 7), ("0", 0)])
def test_numbers_are_decimal(text: str, number: int, tmp_path: Path) -> None:
    """Leading zeros do not make a number octal, as they would in YAML 1.1."""
    file = tmp_path / "numbers.yml"
    file.write_text(f"number: {text}\n")
    assert settings_file.document(file) == {"number": number}


@pytest.mark.parametrize("each", properties.PROPERTIES, ids=lambda each: each.name)
def test_the_table_of_properties(each: properties.Property) -> None:
    """Each property has an attribute, a description, and a default that its type reads."""
    assert hasattr(parsed().source, each.attribute)
    assert each.doc.endswith(".")
    assert each.type.expected
    assert describe_foreign(each.name) is None
    if each.default_text:
        assert each.type.read(each.default_text) == each.default


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("value.converter.schemas.enable", "Kafka"),
        ("topic.naming.strategy", "tables are named"),
        ("transforms.unwrap.flatten.struct", "silver.defaults"),
        ("mongodb.ssl.keystore.password", "PEM"),
        ("internal.mongodb.allow.offset.invalidation", "internal"),
        ("producer.linger.ms", "Kafka"),
    ],
)
def test_properties_without_a_meaning_here(name: str, words: str) -> None:
    """A connector's property without a meaning here is refused with the reason, which an import can show."""
    assert words in (describe_foreign(name) or "")
    (problem,) = problems(source={name: "x"})
    assert words in problem


@pytest.mark.parametrize("name", ["capture.mode", "topic.prefix", "no.such.thing"])
def test_other_names_are_not_foreign(name: str) -> None:
    """Our properties and unknown names are not taken for Kafka's."""
    assert describe_foreign(name) is None


def test_options_of_the_smt_in_the_wrong_place() -> None:
    """The message of an unwrap option under `source` says where it belongs."""
    for name in unwrap_options.NAMES:
        (problem,) = problems(source={name: "x"})
        assert problem == f"source.{name}: it is an option of silver (put it under silver.defaults)"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"database.include.list": "a", "database.exclude.list": "b"},
            "does not stand beside database.include.list",
        ),
        ({"mongodb.password": "${env:PW}"}, "expected beside mongodb.password"),
        ({"topic.prefix": "mall"}, "the pipeline's name is expected, shop"),
        ({"collection.include.list": "orders"}, r"database.collection is expected, found orders (orders\..*)"),
        (
            {"collection.include.list": "orders", "filters.match.mode": "literal"},
            "database.collection is expected, found orders (database.include.list names whole databases)",
        ),
        (
            {"snapshot.collection.filter.overrides": "orders", "snapshot.collection.filter.overrides.orders": "{}"},
            "source.snapshot.collection.filter.overrides: database.collection is expected, found orders",
        ),
        (
            {"database.exclude.list": "a, ${env:LIST}"},
            "source.database.exclude.list: a comma-separated list of regular expressions without a reference is expected, "
            "found a, ${env:LIST} (only secrets may be references, and not ${env:LIST})",
        ),
        (
            {"database.include.list": "a, ${env:LIST}", "filters.match.mode": "literal"},
            "source.database.include.list: a comma-separated list without a reference is expected, found a, ${env:LIST}",
        ),
        (
            {"snapshot.include.collection.list": ["shop.a", "${secret:lists/of}"]},
            "source.snapshot.include.collection.list: a comma-separated list of regular expressions without a reference",
        ),
        (
            {"field.exclude.list": "${env:DB}.customers.email"},
            "source.field.exclude.list: a comma-separated list without a reference is expected, found ${env:DB}",
        ),
        (
            {"field.renames": "${env:DB}.customers.email:mail"},
            "source.field.renames: a comma-separated list without a reference is expected, found ${env:DB}",
        ),
        (
            {"signal.data.collection": "${env:DB}.signals"},
            "source.signal.data.collection: a collection, as database.collection without a reference is expected, found ${env:DB}",
        ),
        (
            {
                "snapshot.collection.filter.overrides": "${env:DB}.orders",
                "snapshot.collection.filter.overrides.${env:DB}.orders": "{}",
            },
            "source.snapshot.collection.filter.overrides: a comma-separated list without a reference is expected",
        ),
        ({"commit.max.bytes": 2**29}, "a whole number from 1 to 268435456 is expected"),
        ({"capture.scope": "database"}, "the name of a database is expected"),
        ({"cursor.oversize.handling.mode": "skip"}, "a size is expected"),
        ({"snapshot.mode": "custom"}, "an import path is expected"),
        ({"notification.enabled.channels": "sink"}, "a topic is expected"),
        ({"cursor.pipeline.order": "user_only"}, "expected beside cursor.pipeline.order"),
        ({"cursor.pipeline": "[{'$match': 1}]"}, "not JSON"),
        ({"cursor.pipeline": '[{"match": {}}]'}, "whose name starts with $"),
        ({"cursor.pipeline": [{1: 2}]}, "whose name starts with $"),
        ({"cursor.pipeline": [{"$unset": 5}]}, "$unset expects a field or a list of fields"),
        ({"cursor.pipeline": [{"$unset": ["a", 5]}]}, "$unset expects a field or a list of fields"),
        ({"cursor.pipeline": [{"$project": ["a"]}]}, "$project expects a document"),
        ({"cursor.pipeline": [{"$match": {"at": datetime.date(2026, 5, 1)}}]}, "date is not JSON serializable"),
        ({"cursor.pipeline": '[{"$match": {"at": {"$date": "2026-05-01"}}}]'}, "no Extended JSON: time data"),
        ({"cursor.pipeline": "[" * 100_000}, "not JSON"),
        (
            {
                "snapshot.collection.filter.overrides": "shop.a",
                "snapshot.collection.filter.overrides.shop.a": '{"customer": {"$oid": "5"}}',
            },
            "no Extended JSON: '5' is not a valid ObjectId",
        ),
        ({"signal.consumer.client.id": ["a"]}, "a text, ${env:NAME} or ${secret:scope/key} is expected"),
        *(
            (
                {f"signal.consumer.sasl.oauthbearer.{name}": "x"},
                "a reference: ${env:NAME} or ${secret:scope/key} is expected",
            )
            for name in ("client.secret", "assertion.private.key.pem", "assertion.private.key.passphrase")
        ),
        ({"snapshot.collection.filter.overrides": "shop.a"}, "shop.a has no filter"),
        ({"snapshot.collection.filter.overrides.shop.a": "{}"}, "the collection is not listed"),
        ({"field.exclude.list": "shop.orders"}, "database.collection.field is expected, found shop.orders"),
        (
            {"field.renames": "shop.orders.x"},
            "database.collection.field:name is expected, found shop.orders.x",
        ),
        ({"skipped.operations": "x"}, "a comma-separated list of c, u, d, t, r, none is expected"),
        ({"skipped.operations": "c,none"}, "none does not stand beside other operations"),
    ],
)
def test_settings_that_say_nothing_or_do_not_fit_together(given: dict[str, Any], words: str) -> None:
    """Settings that no server or client accepts, or that contradict or need each other, are refused."""
    assert any(words in problem for problem in problems(source=given)), problems(source=given)


def test_a_reference_names_no_collection_of_silver() -> None:
    """Nothing resolves it, and the settings below it would be for no collection."""
    (problem,) = problems(silver={"collections": {"${env:DB}.orders": {"history": True}}})
    assert problem == (
        "silver.collections.${env:DB}.orders: a collection, as database.collection, without a reference is expected "
        "(only secrets may be references, and not ${env:DB}.orders)"
    )


def test_an_option_of_a_kafka_client_without_a_value_is_left_out() -> None:
    """As for any other property; it does not become the string None."""
    given = parsed(source={"signal.consumer.client.id": None, "signal.consumer.fetch.min.bytes": 5}).source
    assert {name: str(value) for name, value in given.signal_consumer.items()} == {"fetch.min.bytes": "5"}


def test_warnings() -> None:
    """What is allowed but unwise is a warning."""
    warnings = parsed(
        source={
            "max.queue.size.in.bytes": 1024,
            "heartbeat.interval.ms": 0,
            "collection.include.list": r"shop\.[é-ü]",
            "capture.scope": "collection",
            "capture.target": "shop.é",
            "signal.data.collection": "shop.signals",
        },
        silver={"defaults": {"route.by.field": "x"}},
    ).warnings
    assert [warning.partition(" ")[0].rstrip(":") for warning in warnings] == [
        "source.collection.include.list",
        "source.signal.data.collection",
        "source.max.queue.size.in.bytes",
        "source.heartbeat.interval.ms",
        "silver.defaults.route.by.field",
    ]
    (alone,) = parsed(source={"capture.target": "shop.orders"}).warnings
    assert alone.startswith("source.capture.target has no effect")


@pytest.mark.parametrize("name", ["collection.exclude.list", "snapshot.include.collection.list"])
def test_a_list_that_can_match_no_collection_is_told(name: str) -> None:
    """As a connector takes it: it leaves nothing out, or reads no collection at all, which may be meant."""
    told = f"source.{name}: database.collection is expected, found orders, which matches no collection"
    assert told in parsed(source={name: r"shop\.a, orders"}).warnings


@pytest.mark.parametrize(
    "uri",
    [
        "mongodb://u:${env:PW}@${env:HOST}:${env:PORT}/?appName=me@corp",
        "mongodb://${env:H1}:${env:P1},${env:H2}:${env:P2}/?appName=a@b",
        "mongodb://h/?appName=a@b&",
        "mongodb://h/?${env:OPTIONS}&appName=a@b",
    ],
)
def test_what_is_no_login_is_no_literal_password(uri: str) -> None:
    """A port may be a reference, and an option may have an @."""
    assert str(parsed(source={"mongodb.connection.string": uri}).source.mongodb_connection_string) == uri


@pytest.mark.parametrize(("older", "name"), list(properties.RENAMED.items())[:5])
def test_an_older_name_leads_to_its_own_successor(older: str, name: str) -> None:
    """By likeness, `collection.blacklist` would lead to the include list."""
    (problem,) = problems(source={older: "shop.a"})
    assert problem == f"source.{older}: there is no such property (its name is {name} now)"


def test_a_star_within_a_fields_name_is_told() -> None:
    """Only alone it stands for a field: `ssn*` removes the field of this name, which there hardly is, and no other."""
    star = {"field.exclude.list": "s*.c.ssn*, s.c.*.a, *.*.b", "field.renames": "s.c.a.*x:y"}
    assert parsed(source=star).warnings == (
        "source.field.exclude.list: the * of s*.c.ssn* is part of a field's name; alone it stands for any one field",
        "source.field.renames: the * of s.c.a.*x:y is part of a field's name; alone it stands for any one field",
    )


@pytest.mark.parametrize(
    ("option", "beside", "without"),
    [
        ({"signal.file": "signals.txt"}, {"signal.enabled.channels": "source,file"}, "file in signal.enabled.channels"),
        (
            {"signal.data.collection": "a.b", "signal.enabled.channels": "table"},
            {"signal.enabled.channels": "source"},
            "source in ",
        ),
        (
            {"signal.kafka.topic": "t"},
            {"signal.enabled.channels": "kafka", "signal.kafka.bootstrap.servers": "h:1"},
            "kafka in ",
        ),
        (
            {"notification.sink.topic.name": "t"},
            {"notification.enabled.channels": "sink", "signal.kafka.bootstrap.servers": "h:1"},
            "sink in notification.enabled.channels",
        ),
        (
            {"cursor.oversize.skip.threshold": 5},
            {"cursor.oversize.handling.mode": "skip"},
            "cursor.oversize.handling.mode: skip",
        ),
        ({"guardrail.collections.limit.action": "fail"}, {"guardrail.collections.max": 5}, "guardrail.collections.max"),
        (
            {"capture.mode.full.update.type": "post_image", "capture.mode": "change_streams"},
            {"capture.mode": "change_streams_update_full"},
            "a capture.mode with full updates",
        ),
        ({"snapshot.mode.custom.name": "a:B"}, {"snapshot.mode": "custom"}, "snapshot.mode: custom"),
        (
            {"snapshot.mode.configuration.based.start.stream": True},
            {"snapshot.mode": "configuration_based"},
            "snapshot.mode: configuration_based",
        ),
        (
            {"snapshot.mode.configuration.based.snapshot.on.data.error": True},
            {"snapshot.mode": "configuration_based"},
            "snapshot.mode: configuration_based",
        ),
        ({"cursor.pipeline.order": "user_first"}, {"cursor.pipeline": [{"$match": {"a": 1}}]}, "cursor.pipeline"),
        (
            {"signal.kafka.groupId": "g"},
            {"signal.enabled.channels": "kafka", "signal.kafka.bootstrap.servers": "h:1"},
            "kafka in ",
        ),
    ],
)
def test_an_option_that_does_nothing_is_told(option: dict[str, Any], beside: dict[str, Any], without: str) -> None:
    """Signals in a file that no channel reads, say, would wait for ever, and nothing would show it."""
    (warning,) = parsed(source=option).warnings
    assert warning.startswith(f"source.{next(iter(option))} has no effect without {without}")
    assert not parsed(source=option | beside).warnings
