"""The import of a Debezium connector's JSON or `.properties`: a valid settings file without secrets, or a list of all mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import javaproperties
import pytest

from cdc_core import errors
from cdc_core.properties import source as properties
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.settings import debezium_import
from cdc_core.settings import parse as settings
from jobs import command_line
from pipelines.channels import kafka
from pipelines.settings import debezium_import as debezium_connector
from pipelines.settings import file as settings_file

CASES = Path(__file__).resolve().parents[2] / "cases" / "debezium_import"
TAKEN = sorted(file for file in (CASES / "taken").iterdir() if file.suffix in (".json", ".properties"))
REFUSED = sorted((CASES / "refused").glob("*.json"))
SMALLEST = {"topic.prefix": "shop", "mongodb.connection.string": "mongodb://host"}


def imported(connector: Any) -> debezium_import.ConnectorImport:
    """The import of a connector; the strict parser accepts its settings."""
    found = debezium_import.imported(connector, root="lake")
    assert settings.parse(found.document)
    return found


def loaded(text: str) -> object:
    """The content of a settings file with this text."""
    return settings_file._constructed(settings_file._composed(text, "x"), "x")


def notes(**given: Any) -> dict[str, str]:
    found = imported({**SMALLEST, **{name.replace("__", "."): value for name, value in given.items()}})
    return {note.name: note.why for note in found.notes}


def source_of(**given: Any) -> Any:
    return imported({**SMALLEST, **{name.replace("__", "."): value for name, value in given.items()}}).document["source"]


@pytest.mark.parametrize("file", TAKEN, ids=lambda file: file.stem)
def test_connectors(file: Path) -> None:
    """The settings file is exactly the one beside the case, and the strict loader accepts it."""
    found = debezium_connector.read(file, root="./lakehouse")
    assert found.text == file.with_suffix(".yml").read_text(encoding="utf-8")
    assert "hunter2" not in found.text
    assert settings_file.load(file.with_suffix(".yml")).lakehouse.root == "./lakehouse"


@pytest.mark.parametrize("file", REFUSED, ids=lambda file: file.stem)
def test_refused_connectors(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All mistakes are reported at once, each with the connector's name of the property; the exit code is 2."""
    assert command_line.main(["import-debezium", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"medallion: {file.with_suffix('.txt').read_text(encoding='utf-8')}"
    assert not shown.out and "hunter2" not in shown.err


def test_an_alias_may_have_a_dot() -> None:
    """Kafka Connect takes it, and it is no other alias that `transforms` does not list."""
    found = imported(
        {
            **SMALLEST,
            "transforms": "my.alias",
            "transforms.my.alias.type": unwrap_options.CLASSES[0],
            "transforms.my.alias.add.fields": "op",
        }
    )
    assert not found.notes and found.document["silver"] == {"defaults": {"add.fields": "op"}}


@pytest.mark.parametrize("file", TAKEN, ids=lambda file: file.stem)
def test_every_property_is_taken_or_named(file: Path) -> None:
    """Every property of a connector is in the settings, or a note says why not."""
    text = file.read_text(encoding="utf-8")
    connector: Any = json.loads(text) if file.suffix == ".json" else javaproperties.loads(text)
    found = imported(connector)
    taken: Any = found.document
    noted = {note.name for note in found.notes}
    for given, value in connector.get("config", connector).items():
        name = given if given in noted else given.removeprefix("debezium.source.").removeprefix("debezium.")
        today = properties.RENAMED.get(name, name).removeprefix("transforms.unwrap.")
        is_named = name in noted or name.startswith("transforms.") and name.rpartition(".")[0] in noted
        is_taken = today in taken["source"] or today in taken.get("silver", {}).get("defaults", {})
        plain = ("topic.prefix", "mongodb.name", "transforms", "transforms.unwrap.type")
        assert is_taken or is_named or name in plain or value == "", name


@pytest.mark.parametrize(
    ("given", "written", "variable"),
    [
        ("mongodb://joe:pw@host/", "mongodb://joe:${env:MONGODB_PASSWORD}@host/", "MONGODB_PASSWORD"),
        ("mongodb+srv://joe:pw@host/?a=b", "mongodb+srv://joe:${env:MONGODB_PASSWORD}@host/?a=b", "MONGODB_PASSWORD"),
        ("mongodb://joe:p@pw@host/", "mongodb://joe:${env:MONGODB_PASSWORD}@host/", "MONGODB_PASSWORD"),
        ("mongodb://joe:pw/pw@host/", "mongodb://joe:${env:MONGODB_PASSWORD}@host/", "MONGODB_PASSWORD"),
        ("mongodb://joe:pw/p?w@h:1/?a=b", "mongodb://joe:${env:MONGODB_PASSWORD}@h:1/?a=b", "MONGODB_PASSWORD"),
        ("mongodb://joe:pw@h/pw@[::1]:1,h/d?a=b", "mongodb://joe:${env:MONGODB_PASSWORD}@[::1]:1,h/d?a=b", "MONGODB_PASSWORD"),
        ("mongodb://joe:pw@h/d?appName=a@b", "mongodb://joe:${env:MONGODB_PASSWORD}@h/d?appName=a@b", "MONGODB_PASSWORD"),
        ("mongodb://joe:pw:pw@h1,h2/db", "mongodb://joe:${env:MONGODB_PASSWORD}@h1,h2/db", "MONGODB_PASSWORD"),
        ("mongodb://joe:${env:OURS}@host/", "mongodb://joe:${env:OURS}@host/", "OURS"),
        ("mongodb://joe:${env:A}pw@host/", "mongodb://joe:${env:MONGODB_PASSWORD}@host/", "MONGODB_PASSWORD"),
        ("mongodb://joe:${file:/a/b:pw}@host/", "mongodb://joe:${env:MONGODB_PASSWORD}@host/", "MONGODB_PASSWORD"),
        ("mongodb://${file:/a:u}:${env:PASS}@host/", "mongodb://${env:MONGODB_USER}:${env:PASS}@host/", "MONGODB_USER"),
        ("${file:/a/b:pw}", "${env:MONGODB_URI}", "MONGODB_URI"),
        ("mongodb://${file:/a/b:pw}/", "${env:MONGODB_URI}", "MONGODB_URI"),
        ("mongodb://h/?proxyPassword=pw&tls=true", "mongodb://h/?proxyPassword=${env:MONGODB_PROXY_PASSWORD}&tls=true", "MONGODB_PROXY_PASSWORD"),
        ("mongodb://h/?proxyPassword=pw;tls=true", "mongodb://h/?proxyPassword=${env:MONGODB_PROXY_PASSWORD};tls=true", "MONGODB_PROXY_PASSWORD"),
        (
            "mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:pw",
            "mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:${env:AWS_SESSION_TOKEN}",
            "AWS_SESSION_TOKEN",
        ),
    ],
)  # fmt: skip
def test_secrets_in_the_connection_string(given: str, written: str, variable: str) -> None:
    """Wherever a connection string contains a secret, a variable replaces it and is listed. The secret is nowhere."""
    found = imported({**SMALLEST, "mongodb.connection.string": given})
    document: Any = found.document
    assert document["source"]["mongodb.connection.string"] == written
    assert variable in [each.name for each in found.variables]
    assert "pw" not in repr(found)


def test_user_and_password_of_their_own() -> None:
    """A literal `mongodb.password` becomes a variable. Credentials in the connection string take precedence over both."""
    source = source_of(mongodb__user="joe", mongodb__password="hunter2")
    assert (source["mongodb.user"], source["mongodb.password"]) == ("joe", "${env:MONGODB_PASSWORD}")
    assert source_of(mongodb__user="joe", mongodb__password="${env:OURS}")["mongodb.password"] == "${env:OURS}"
    assert source_of(mongodb__user="${secrets:a/b:user}")["mongodb.user"] == "${env:MONGODB_USER}"
    given = {
        **SMALLEST,
        "mongodb.connection.string": "mongodb://a:x@h",
        "mongodb.user": "joe",
        "mongodb.password": "hunter2",
    }
    both: Any = imported(given).document
    assert set(both["source"]) == {"mongodb.connection.string"}


def test_hosts_of_older_versions() -> None:
    """`mongodb.hosts` becomes a connection string, a direct one if members are not to be discovered."""

    def uri(hosts: str, **more: str) -> str:
        given = {"mongodb.name": "shop", "mongodb.hosts": hosts, **{k.replace("__", "."): v for k, v in more.items()}}
        document: Any = imported(given).document
        return str(document["source"]["mongodb.connection.string"])

    assert uri("rs0/a:27017, b") == "mongodb://a:27017,b/?replicaSet=rs0"
    assert uri("a") == "mongodb://a/"
    assert uri("rs0/a,b", mongodb__members__auto__discover="false") == "mongodb://a/?replicaSet=rs0&directConnection=true"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_json_in_utf_16_is_no_file_of_properties(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PowerShell writes it, as in `curl … > connector.json`."""
    path = tmp_path / "connector.json"
    path.write_bytes(json.dumps(SMALLEST).encode(encoding))
    assert command_line.main(["import-debezium", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "save it as UTF-8" in shown and ".properties" not in shown


def test_what_stands_beside_the_config_is_named() -> None:
    """Kafka Connect refuses it there; it would be lost in silence. What its REST API answers is no property."""
    around = {"name": "shop", "tasks": [{"connector": "shop", "task": 0}], "type": "source"}
    found = imported({**around, "config": SMALLEST, "collection.exclude.list": "shop.secrets"})
    assert [note.name for note in found.notes] == ["collection.exclude.list"]


@pytest.mark.parametrize("name", ["ssl.keystore.key", "ssl.keystore.certificate.chain", "ssl.truststore.certificates"])
def test_a_private_key_of_javas_client_is_in_no_file(name: str) -> None:
    """Only the Java client has these options: the client here would refuse them, and one of them is a secret."""
    given = {"signal__enabled__channels": "source,kafka", "signal__kafka__bootstrap__servers": "b:9092"}
    pem = {f"signal.consumer.{name}": "-----BEGIN PRIVATE KEY----- hidden"}
    assert "hidden" not in repr(source_of(**given, **pem)) and ".pem" in notes(**given, **pem)[f"signal.consumer.{name}"]


@pytest.mark.parametrize(("older", "today"), properties.RENAMED.items())
def test_older_names(older: str, today: str) -> None:
    """An older name is translated and noted. If today's name is given too, it takes precedence."""
    value = {"errors.retry.delay.max.ms": "400", "errors.retry.delay.initial.ms": "400"}.get(today, "5")
    value = "a.b.c" if today.endswith(".list") else value
    key = {older.replace(".", "__"): value}
    assert str(source_of(**key)[today]) == value
    assert notes(**key)[older] == f"its name is {today} now"
    both = {**key, today.replace(".", "__"): value}
    assert notes(**both)[older] == f"{today} stands beside it, and wins"


def test_options_of_kafkas_clients() -> None:
    """They are copied, a password as a variable. Those that only the Java client has are noted."""
    given = {
        "signal__enabled__channels": "source,kafka",
        "signal__kafka__bootstrap__servers": "broker:9092",
        "signal__consumer__security__protocol": "SASL_SSL",
        "signal__consumer__sasl__password": "hidden",
        "signal__consumer__sasl__jaas__config": "org.apache… required password=hidden;",
    }
    assert source_of(**given)["signal.consumer.security.protocol"] == "SASL_SSL"
    assert source_of(**given)["signal.consumer.sasl.password"] == "${env:KAFKA_SASL_PASSWORD}"
    assert "sasl.username" in notes(**given)["signal.consumer.sasl.jaas.config"]
    sink = source_of(notification__enabled__channels="sink", notification__sink__topic__name="told")
    assert sink["producer.override.bootstrap.servers"] == "${env:KAFKA_BOOTSTRAP_SERVERS}"


@pytest.mark.parametrize(
    "option", ["max.request.size", "buffer.memory", "max.block.ms", "send.buffer.bytes", "ssl.protocol"]
)
def test_an_import_has_no_option_that_the_client_would_refuse(option: str) -> None:
    """A connector has them for Kafka Connect's producer, such as `max.request.size`; with one of them no capture would start."""
    sink = {
        "notification.enabled.channels": "sink",
        "notification.sink.topic.name": "told",
        "producer.override.bootstrap.servers": "127.0.0.1:1",
    }
    found = imported({**SMALLEST, **sink, f"producer.override.{option}": "1"})
    assert f"producer.override.{option}" in [note.name for note in found.notes]
    kafka.library().Producer(kafka.producer_options(settings.parse(found.document)))


@pytest.mark.parametrize("module", ["plain.PlainLoginModule", "scram.ScramLoginModule"])
def test_a_login_of_javas_client_becomes_one_of_librdkafka(module: str) -> None:
    """Without user and password `medallion check` refuses the settings. An option that stands beside the login wins."""
    jaas = f'org.apache.kafka.common.security.{module} required username="r\\"1" password="hidden";'
    given = {"signal__enabled__channels": "source,kafka", "signal__kafka__bootstrap__servers": "b:9092"}
    name = "signal.consumer.sasl.jaas.config"
    for start in ("signal__consumer__sasl", "producer__override__sasl"):
        found = source_of(**given, **{f"{start}__jaas__config": jaas})
        start = start.replace("__", ".")
        assert found[f"{start}.username"] == 'r"1' and found[f"{start}.password"] == "${env:KAFKA_SASL_PASSWORD}"
    assert notes(**given, signal__consumer__sasl__jaas__config=jaas)[name] == "it is sasl.username and sasl.password now"
    beside = {"signal__consumer__sasl__username": "own", "signal__consumer__sasl__jaas__config": jaas}
    assert source_of(**given, **beside)["signal.consumer.sasl.username"] == "own"
    secret = jaas.replace('r\\"1', "${file:/secrets:user}")
    assert source_of(**given, signal__consumer__sasl__jaas__config=secret)["signal.consumer.sasl.username"] == (
        "${env:KAFKA_SASL_USERNAME}"
    )


TRANSLATED = {*debezium_import.OLDER, "transforms", "mongodb.hosts"}


@pytest.mark.parametrize("name", [name for name in properties.FOREIGN if "*" not in name and name not in TRANSLATED])
def test_properties_without_a_meaning_here_are_named(name: str) -> None:
    """Each property without a meaning here is noted with the reason, and does not stop the import."""
    value = "io.debezium.connector.mongodb.MongoDbConnector" if name == "connector.class" else "x"
    assert notes(**{name.replace(".", "__"): value})[name] == properties.FOREIGN[name]


SHOWN: dict[str, str] = {}
"""Values of all options of the transformation, as in `docs/unwrap.md`."""
for _options in re.findall(
    r"```json options\n(.*?)```", (CASES.parents[2] / "docs" / "unwrap.md").read_text("utf-8"), re.DOTALL
):
    SHOWN.update(json.loads(_options))


@pytest.mark.parametrize("name", unwrap_options.NAMES)
def test_options_of_the_transformation(name: str) -> None:
    """Each option of ExtractNewDocumentState is copied to `silver.defaults`, or noted with the reason."""
    type_ = {"transforms.x.type": unwrap_options.CLASSES[0]}
    own = {} if name == "type" else {f"transforms.x.{name}": SHOWN[name]}
    found = imported({**SMALLEST, "transforms": "x", **type_, **own})
    silver: Any = found.document.get("silver", {"defaults": {}})
    assert (name in silver["defaults"]) is (name not in unwrap_options.IGNORED)
    assert (f"transforms.x.{name}" in [note.name for note in found.notes]) is (
        name in unwrap_options.IGNORED and name != "type"
    )


def test_a_connector_is_found_in_what_holds_it(tmp_path: Path) -> None:
    """As Kafka Connect's REST API answers with `?expand=info`, and as Strimzi's resource; another connector's class is refused."""

    def text_of(document: object) -> str:
        (tmp_path / "x.json").write_text(json.dumps(document))
        return debezium_connector.read(tmp_path / "x.json", root="lake").text

    config = {"connector.class": "io.debezium.connector.mongodb.MongoDbConnector", **SMALLEST}
    info = {"shop": {"info": {"name": "shop", "config": config, "tasks": [], "type": "source"}}}
    spec = {"class": config["connector.class"], "tasksMax": 1, "config": SMALLEST}
    resource = {"apiVersion": "kafka.strimzi.io/v1beta2", "kind": "KafkaConnector", "metadata": {"name": "x"}, "spec": spec}
    assert text_of(info) == text_of(resource) == text_of(config)
    with pytest.raises(errors.SettingsError):
        text_of({**resource, "spec": {**spec, "class": "io.debezium.connector.mysql.MySqlConnector"}})
    with pytest.raises(errors.SettingsError, match=r"x\.json: it has the connectors shop, b"):  # nothing else of it is told
        text_of({**info, "b": info["shop"]})


@pytest.mark.parametrize("connector", ["x", [], None, 5, {"config": []}])
def test_what_is_no_connector(connector: Any) -> None:
    with pytest.raises(errors.SettingsError):
        debezium_import.imported(connector, root="lake")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings are written to stdout or into a new file, notes and variables to stderr. Another file is never overwritten."""
    connector = CASES / "taken" / "today.json"
    expected = connector.with_suffix(".yml").read_text(encoding="utf-8")
    assert command_line.main(["import-debezium", str(connector)]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected
    assert "set MONGODB_PASSWORD: the password" in shown.err and "hunter2" not in shown.err
    out = tmp_path / "shop.yml"
    for _ in range(2):
        assert command_line.main(["import-debezium", str(connector), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == expected
    assert command_line.main(["import-debezium", str(connector), "--out", str(out), "--root", "other"]) == 2
    assert "the file already exists" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("root", ["~/lake", "$HOME/lake", "s3a:bucket", "https://bucket"])
def test_a_root_that_no_command_takes_is_not_written(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings would be refused at their first use."""
    connector = str(CASES / "taken" / "today.json")
    assert command_line.main(["import-debezium", connector, f"--root={root}"]) == 2
    shown = capsys.readouterr()
    assert not shown.out and f"--root {root}: " in shown.err
    for reference in ("${env:LAKE}", "${env:HOME}/lake", "s3a://${env:BUCKET}/lake"):
        assert command_line.main(["import-debezium", connector, f"--root={reference}"]) == 0


def test_the_command_writes_into_what_is_no_file() -> None:
    """A pipe or a device is written without reading it first. If it has no room, the error is temporary."""
    connector = str(CASES / "taken" / "today.json")
    assert command_line.main(["import-debezium", connector, "--out", "/dev/null"]) == 0
    assert command_line.main(["import-debezium", connector, "--out", "/dev/full"]) == 75


@pytest.mark.parametrize("text", ['{"a": hunter2}', "", "\ufeff[", '{"a":1'])
def test_what_is_not_json(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error has line and column, and no content of the file."""
    path = tmp_path / "connector.json"
    path.write_text(text, encoding="utf-8")
    assert command_line.main(["import-debezium", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "not JSON" in shown and "hunter2" not in shown


@pytest.mark.parametrize("suffix", [".json", ".properties"])
def test_a_byte_order_mark_belongs_to_no_key(suffix: str, tmp_path: Path) -> None:
    """Some editors write one."""
    given = {"topic.prefix": "shop", "mongodb.connection.string": "mongodb://h"}
    plain, marked = tmp_path / f"plain{suffix}", tmp_path / f"marked{suffix}"
    text = json.dumps(given) if suffix == ".json" else "".join(f"{name}={value}\n" for name, value in given.items())
    plain.write_text(text)
    marked.write_text(text, encoding="utf-8-sig")
    assert debezium_connector._connector(marked) == debezium_connector._connector(plain) == given


def test_java_properties_may_be_latin_1(tmp_path: Path) -> None:
    """Kafka Connect reads them so."""
    path = tmp_path / "connector.properties"
    for encoding in ("latin-1", "utf-8"):
        path.write_bytes("# Größe\ncollection.include.list=shop.größe\n".encode(encoding))
        assert debezium_connector._connector(path) == {"collection.include.list": "shop.größe"}


@pytest.mark.parametrize("content", [b"topic.prefix=\\u12", "topic.prefix=a".encode("utf-16")])
def test_what_is_no_file_of_properties(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "connector.properties"
    path.write_bytes(content)
    assert command_line.main(["import-debezium", str(path)]) == 2
    assert "not valid Java properties" in capsys.readouterr().err
    path = path.rename(path.with_suffix(".txt"))
    assert command_line.main(["import-debezium", str(path)]) == 2
    hint = "it is UTF-16" if b"\0" in content else "must have the extension .properties"
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["yes", "09", "1e3", "0x10", "2020-01-01", "null", "~", "a: b", "# no", "1_000", "on", "é\u2028", "1:30", "<<", "="],
)
def test_texts_stay_texts(text: str) -> None:
    """Text that YAML would read as another type is quoted."""
    written = settings_file.rendered({"a": text, "b": True, "c": 5})
    assert loaded(written) == {"a": text, "b": True, "c": 5}


@pytest.mark.parametrize("end", ("\n", "\r", "\x85", "\u2028", "\x00", "\x1b", "\ud800"))
def test_a_remark_stays_a_comment(end: str) -> None:
    """Whatever line breaks or invalid characters it contains, the remark adds no key, and the file can be written and read."""
    written = settings_file.rendered({"a": "b"}, after=[f"the server cannot be asked for (?<!x){end}a: c"])
    assert loaded(written.encode().decode()) == {"a": "b"}


def test_no_terminal_obeys_a_connector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Notes show names of properties with control characters escaped."""
    path = tmp_path / "connector.properties"
    lines = ["topic.prefix=t", "mongodb.connection.string=mongodb://h", "transforms=a", "transforms.a.type=\\u001b[2J"]
    path.write_text("\n".join(lines))
    assert command_line.main(["import-debezium", str(path)]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and "\\x1b[2J" in shown.err


def test_the_example_of_the_documents() -> None:
    """docs/settings.md shows a connector and exactly the settings file that it becomes."""
    text = (CASES.parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    shown = re.search(r"```json connector.json\n(.*?)```.*?```yaml imported\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    found = debezium_connector.settings_text(json.loads(shown[1]), root="./lakehouse", where="connector.json")
    assert found.text == shown[2]
