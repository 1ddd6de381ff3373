"""What the settings make of a connection: the driver's options, and who wins."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pymongo import errors as driver

from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as sources
from tests.sources import source


def options(**given: Any) -> dict[str, Any]:
    """The driver's options; `__` stands for the dots of a property's name."""
    return dict(sources.connection(source({name.replace("__", "."): value for name, value in given.items()})).options)


def test_times() -> None:
    """Each timeout has the connector's default, is the driver's option of its kind, and 0 leaves it out."""
    assert options() == {"connectTimeoutMS": 10_000, "serverSelectionTimeoutMS": 30_000, "heartbeatFrequencyMS": 10_000}
    given = options(
        mongodb__connect__timeout__ms="0",
        mongodb__server__selection__timeout__ms="5",
        mongodb__socket__timeout__ms="7",
        mongodb__heartbeat__frequency__ms="600",
    )
    assert given == {"serverSelectionTimeoutMS": 5, "socketTimeoutMS": 7, "heartbeatFrequencyMS": 600}


def test_user_and_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are resolved for the driver alone; credentials in the connection string win."""
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


def test_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mongodb.ssl.*` are the driver's TLS options, when TLS is on; what the connection string says wins."""
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


def test_a_missing_right_is_told_without_the_command() -> None:
    """Which command was refused is told by its name: a change stream's is longer than a screen."""
    said = "not authorized on shop to execute command { aggregate: 1, pipeline: [ { $changeStream: {} } ], lsid: 1 }"
    told = mongodb.translated(driver.OperationFailure(said, 13), "opening the change stream")
    assert "(error 13: not authorized on shop to execute command aggregate);" in str(told)
