"""The driver's options that the settings give, and their precedence."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pymongo
import pytest
from dns import resolver
from pymongo import errors as driver
from pymongo.read_preferences import ReadPreference

from cdc_core import errors
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as sources
from pipelines.mongodb import failures as mongodb_failures
from tests.harness.sources import source


def options(**given: Any) -> dict[str, Any]:
    """The driver's options for these properties; `__` stands for the dots of a name."""
    return dict(sources.connection(source({name.replace("__", "."): value for name, value in given.items()})).options)


def test_times() -> None:
    """Each timeout has the connector's default and the driver's option of its kind; 0 is no limit, and not the driver's default."""
    assert options() == {
        "connectTimeoutMS": 10_000,
        "serverSelectionTimeoutMS": 30_000,
        "socketTimeoutMS": 0,
        "heartbeatFrequencyMS": 10_000,
    }
    given = options(
        mongodb__connect__timeout__ms="0",
        mongodb__server__selection__timeout__ms="5",
        mongodb__socket__timeout__ms="7",
        mongodb__heartbeat__frequency__ms="600",
    )
    assert given == {
        "connectTimeoutMS": 0,
        "serverSelectionTimeoutMS": 5,
        "socketTimeoutMS": 7,
        "heartbeatFrequencyMS": 600,
    }
    with contextlib.closing(sources.connection(source({"mongodb.connect.timeout.ms": "0"})).client()) as client:
        pool = client.options.pool_options
        assert (pool.connect_timeout, pool.socket_timeout) == (None, None)
    # The connector accepts any value; this driver checks a server at most twice a second.
    assert options(mongodb__heartbeat__frequency__ms="1")["heartbeatFrequencyMS"] == 500


def test_times_that_the_driver_refuses() -> None:
    """The connector takes any time. Java's longest, which many give for no limit, ended a start with a mistake in the connection string."""
    names = ("connect__timeout", "server__selection__timeout", "socket__timeout", "heartbeat__frequency")
    for longest in (2**31 - 1, 10**12):
        given = {f"mongodb__{name}__ms": str(longest) for name in names}
        chosen = sources.connection(source({name.replace("__", "."): value for name, value in given.items()}))
        assert set(chosen.options.values()) == {999_999_999}
        chosen.client().close()


def test_user_and_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are resolved for the driver only. Credentials in the connection string take precedence."""
    monkeypatch.setenv("PW", "hunter2")
    given = {"mongodb__user": "joe", "mongodb__password": "${env:PW}", "mongodb__authsource": "shop"}
    found = options(**given)
    assert (found["username"], found["password"], found["authSource"]) == ("joe", "hunter2", "shop")
    assert options(mongodb__user="joe")["authSource"] == "admin"
    other = options(mongodb__connection__string="mongodb://ann:${env:PW}@host/", **given)
    assert not {"username", "password", "authSource"} & set(other)
    connection = sources.connection(source({"mongodb.user": "joe", "mongodb.password": "${env:PW}"}))
    assert "hunter2" not in repr(connection)
    assert pickle.loads(pickle.dumps(connection)) == connection


@pytest.mark.parametrize(
    ("mechanism", "authsource"), [("MONGODB-AWS", "$external"), ("PLAIN", "$external"), ("SCRAM-SHA-256", "admin")]
)
def test_the_users_of_a_mechanism_may_be_outside_of_the_databases(
    mechanism: str, authsource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of `mongodb.authsource` is no choice of the settings: with it the string counted as invalid, or the login failed."""
    monkeypatch.setenv("PW", "hunter2")
    given = {"mongodb.user": "joe", "mongodb.password": "${env:PW}"}
    given["mongodb.connection.string"] = f"mongodb://host/?authMechanism={mechanism}"

    def used(more: dict[str, Any]) -> Any:
        with contextlib.closing(sources.connection(source(given | more)).client()) as client:
            return client.options.pool_options._credentials

    assert used({}).source == authsource
    assert used({"mongodb.authsource": "$external"}).source == "$external"


def test_an_at_sign_in_an_option_ends_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options before it take precedence as well, and the user of the properties logs in."""
    monkeypatch.setenv("PW", "hunter2")
    uri = "mongodb://host?tls=true&connectTimeoutMS=5&appName=team@shop"
    found = options(
        mongodb__connection__string=uri, mongodb__user="joe", mongodb__password="${env:PW}", mongodb__ssl__ca__file="ca"
    )
    assert (found["username"], found["tlsCAFile"], "connectTimeoutMS" in found) == ("joe", "ca", False)
    assert mongodb.uri_options("mongodb://joe:p?w=1@host/?tls=true") == {"tls": "true"}


def test_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mongodb.ssl.*` are the driver's TLS options if TLS is on. The connection string takes precedence."""
    monkeypatch.setenv("PW", "hunter2")
    given = {
        "mongodb__ssl__invalid__hostname__allowed": "true",
        "mongodb__ssl__ca__file": "/ca.pem",
        "mongodb__ssl__certificate__key__file": "/me.pem",
        "mongodb__ssl__certificate__key__file__password": "${env:PW}",
    }
    tls = {
        "tlsAllowInvalidHostnames": True,
        "tlsCAFile": "/ca.pem",
        "tlsCertificateKeyFile": "/me.pem",
        "tlsCertificateKeyFilePassword": "hunter2",
    }
    assert not {name for name in options(**given) if name.startswith("tls")}
    assert {**tls, "tls": True}.items() <= options(mongodb__ssl__enabled="true", **given).items()
    found = options(mongodb__connection__string="mongodb://h/?tls=true&tlsCAFile=/other.pem", **given)
    assert "tls" not in found and "tlsCAFile" not in found
    assert found["tlsCertificateKeyFile"] == "/me.pem"
    # The driver encrypts these by default: without the certificate of its authority it would refuse the server.
    found = options(mongodb__connection__string="mongodb+srv://h.cluster.example/", **given)
    assert tls.items() <= found.items()


@pytest.mark.parametrize("option", ["ca__file", "certificate__key__file"])
def test_certificates_that_cannot_be_loaded_are_told(tmp_path: Path, option: str) -> None:
    """A file that is missing was told as a bug, one without a certificate as a malformed connection string."""
    (tmp_path / "empty.pem").touch()
    for name, why in (
        ("none.pem", "No such file or directory"),
        ("empty.pem", "it has no certificate"),
        ("", "Is a directory"),
    ):
        file = tmp_path / name
        given = {"mongodb.ssl.enabled": "true", f"mongodb.ssl.{option.replace('__', '.')}": str(file)}
        with pytest.raises(errors.SettingsError, match=f"source.mongodb.ssl: .*{file}: {why}"):
            sources.connection(source(given)).client()


def test_a_user_without_a_password_is_told() -> None:
    """The connection string, which is right, was told as malformed."""
    with pytest.raises(errors.SettingsError, match="source.mongodb.password: it is expected beside mongodb.user"):
        sources.connection(source({"mongodb.user": "joe"})).client()


def test_a_missing_right_is_told_without_the_command() -> None:
    """The message names the refused command only: the command of a change stream is longer than a screen."""
    said = "not authorized on shop to execute command { aggregate: 1, pipeline: [ { $changeStream: {} } ], lsid: 1 }"
    told = mongodb_failures.translated(driver.OperationFailure(said, 13), "opening the change stream")
    assert "(error 13: not authorized on shop to execute command aggregate);" in str(told)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("mongodb://joe:Sec/ret9@h:27017/", "percent-encode"),
        ("mongodb://joe:Se@cret9@h:27017/shop", "percent-encode"),
        ("mongodb://joe:Sec%ret9@h", "percent-encode"),
        ("mongodb://joe:Sec?ret9@h:27017/shop", "percent-encode"),
        ("mongodb://joe:Sec:ret9@h:port/", "percent-encode"),
        ("mongodb://joe:p?Sec=ret9@h:27017/shop", "percent-encode"),
        ("mongodb://h:Sec/ret9", "its form is mongodb://host:27017"),
        ("mongodb://", "its form is mongodb://host:27017"),
        ("joe:Secret9@h", "must begin with mongodb://"),
        ("mongodb://h:1/?journal=Secret9&wTimeoutMS=Secret9", "journal, wTimeoutMS"),
    ],
)
def test_a_malformed_connection_string_is_told_without_its_parts(
    uri: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No part of a password or of a value is shown, whichever characters it contains."""
    told = caplog.text
    try:
        mongodb.client(uri).close()
        told = caplog.text
    except errors.SettingsError as error:
        told = str(error)
    assert said in told
    assert not {word for word in ("Sec", "ret9", "cret9") if word in told}


def test_options_that_the_driver_leaves_out_are_named_without_their_values(caplog: pytest.LogCaptureFixture) -> None:
    """An unknown option, or one with an invalid value, is logged."""
    mongodb.client("mongodb://h:1/?readPreference=Secret9&unheardOf=Secret9").close()
    assert "readPreference, unheardOf" in caplog.text and "Secret9" not in caplog.text


@pytest.mark.parametrize("code", sorted(mongodb_failures.TRANSIENT))
def test_what_the_server_interrupted_is_temporary(code: int) -> None:
    """These are the codes of the change streams' specification, of operations that an operator interrupts, and of passing conditions."""
    told = mongodb_failures.translated(driver.OperationFailure("interrupted", code), "reading a chunk")
    assert isinstance(told, errors.SourceUnreachable)
    assert {6, 24, 43, 50, 89, 134, 150, 202, 237, 262, 365, 11601} <= mongodb_failures.TRANSIENT


SRV = "mongodb+srv://joe:Sec%40cret9@db.cluster.example/shop"


def looking_up(monkeypatch: pytest.MonkeyPatch, answer: Exception | None) -> None:
    """Name servers that fail with `answer`, or know one host."""

    def resolve(name: str, record: str, **_: Any) -> Any:
        if answer is not None:
            raise answer
        if record == "TXT":
            raise resolver.NoAnswer
        return [SimpleNamespace(target=SimpleNamespace(to_text=lambda **_: "a.cluster.example"), port=27017)]

    def found(name: str, record: str, **more: Any) -> Any:
        hosts = resolve(name, record, **more)
        return type("Answer", (list,), {"rrset": SimpleNamespace(ttl=60)})(hosts)

    monkeypatch.setattr(resolver, "resolve", found)


@pytest.mark.parametrize("answer", [resolver.LifetimeTimeout(timeout=1, errors=[]), resolver.NoNameservers(), OSError(101)])
def test_a_name_server_that_fails_is_no_mistake_in_the_settings(monkeypatch: pytest.MonkeyPatch, answer: Exception) -> None:
    """The capture tries again, as when the network is down."""
    looking_up(monkeypatch, answer)
    with pytest.raises(errors.SourceUnreachable, match="the SRV lookup failed") as raised:
        mongodb.client(SRV)
    assert raised.value.exit_code == 75 and "cret9" not in str(raised.value)


@pytest.mark.parametrize("answer", [resolver.NXDOMAIN(), resolver.NoAnswer()])
def test_a_host_without_an_srv_record(monkeypatch: pytest.MonkeyPatch, answer: Exception) -> None:
    """At a first start it is a mistake in the settings. If the host had a record before, its name server is at fault."""
    monkeypatch.setattr(mongodb, "_looked_up", set())
    looking_up(monkeypatch, answer)
    with pytest.raises(errors.SettingsError) as raised:
        mongodb.client(SRV)
    # No advice about passwords: the string is valid.
    assert "its host has no SRV record (check its spelling" in str(raised.value) and "percent-encode" not in str(
        raised.value
    )
    with pytest.raises(errors.SourceUnreachable):
        mongodb.client(SRV, is_known=True)
    looking_up(monkeypatch, None)
    mongodb.client(SRV).close()
    looking_up(monkeypatch, answer)
    with pytest.raises(errors.SourceUnreachable):
        mongodb.client(SRV)
    with pytest.raises(errors.SettingsError):
        mongodb.client(SRV.replace("db.", "other."))


@pytest.mark.parametrize("wrong", ["mongodb+srv://h.cluster.example:27017/", "mongodb+srv://127.0.0.1/"])
def test_an_srv_string_that_cannot_be_one(wrong: str) -> None:
    """No name server is asked."""
    with pytest.raises(errors.SettingsError):
        mongodb.client(wrong, is_known=True)


@pytest.mark.parametrize("way", ["directConnection", "loadBalanced"])
def test_a_direct_connection_reads_the_server_that_it_names(way: str) -> None:
    """Its host may be a forwarded port, and the server's name in its replica set may be unreachable from here.

    Behind a load balancer a server refuses clients without that option.
    """
    client = mongodb.client(f"mongodb://h:1/?{way}=true&serverSelectionTimeoutMS=1")
    try:
        assert mongodb.pinned(client, ReadPreference.SECONDARY_PREFERRED) is None
    finally:
        client.close()


def test_options_of_the_connection_string_may_stand_between_semicolons() -> None:
    """As in the drivers: they override the properties, ignored ones are named, and a direct connection gets those that apply."""
    uri = "mongodb://h/?replicaSet=rs;tls=true;tlsCAFile=/other.pem;serverSelectionTimeoutMS=7;unheardOf=1"
    found = options(mongodb__connection__string=uri, mongodb__ssl__ca__file="/ca.pem", mongodb__ssl__enabled="true")
    assert not {"tls", "tlsCAFile", "serverSelectionTimeoutMS"} & set(found)
    assert mongodb.left_out("mongodb://h/?replicaSet=rs;unheardOf=1") == ("unheardOf",)
    there = "tls=true&tlsCAFile=/other.pem&serverSelectionTimeoutMS=7&unheardOf=1"
    assert mongodb.direct_uri(uri, "one:1") == f"mongodb://one:1/?{there}"


def test_a_warning_about_something_else_names_no_option(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python's warnings are recorded from every thread; only those of the driver about an option are told."""
    made, others = pymongo.MongoClient, [ResourceWarning("unclosed file"), UserWarning("unknown option")]
    mongodb._warn_of_ignored.cache_clear()

    def warning(uri: str, **given: Any) -> Any:
        warnings.warn(others.pop(0), stacklevel=1)
        return made(uri, connect=False, **given)

    monkeypatch.setattr(pymongo, "MongoClient", warning)
    for told in (0, 1):
        mongodb.client("mongodb://h/").close()
        assert len(caplog.messages) == told
