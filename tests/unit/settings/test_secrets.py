"""References are resolved at the last moment."""

from __future__ import annotations

import pytest

from cdc_core import errors
from pipelines.settings import secrets

ENVIRONMENT = {
    "USER_NAME": "joe",
    "PW": "hunter2",
    "ODD": "p@ss:w/rd 1%",
    "ENCODED": "p%40ss",
    "TOKEN": "a+b/c==",
    "BOTH": "joe:p@ss:w/rd",
    "URI": "mongodb://a:b@c/",
}


def read_secret(scope: str, key: str) -> str:
    return {"shop/uri": "mongodb://x:y@z/", "shop/pw": "s3cret"}[f"{scope}/{key}"]


@pytest.mark.parametrize(
    ("reference", "resolved"),
    [
        ("mongodb://localhost/", "mongodb://localhost/"),
        ("${env:URI}", "mongodb://a:b@c/"),
        ("${secret:shop/uri}", "mongodb://x:y@z/"),
        (
            "mongodb://${env:USER_NAME}:${secret:shop/pw}@h/?a=${env:USER_NAME}",
            "mongodb://joe:s3cret@h/?a=joe",
        ),
        ("mongodb://joe:${env:ODD}@h/", "mongodb://joe:p%40ss%3Aw%2Frd%201%25@h/"),
        ("mongodb://joe:${env:ENCODED}@h/", "mongodb://joe:p%40ss@h/"),
        ("mongodb://${env:BOTH}@h/", "mongodb://joe:p%40ss%3Aw%2Frd@h/"),
        ("mongodb+srv://${env:USER_NAME}@h/", "mongodb+srv://joe@h/"),
        ("mongodb://${env:BOTH}:${env:PW}@h/", "mongodb://joe%3Ap%40ss%3Aw%2Frd:hunter2@h/"),
        ("mongodb://joe${env:BOTH}@h/", "mongodb://joejoe%3Ap%40ss%3Aw%2Frd@h/"),
        (
            "mongodb://h/?tlsCertificateKeyFilePassword=${env:ODD}&proxypassword=${env:ENCODED}&x=y",
            "mongodb://h/?tlsCertificateKeyFilePassword=p%40ss%3Aw%2Frd%201%25&proxypassword=p%40ss&x=y",
        ),
        (
            "mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:${env:TOKEN},A:b",
            "mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:a%2Bb%2Fc%3D%3D,A:b",
        ),
        ("mongodb://h/?x=${env:ODD}", "mongodb://h/?x=p@ss:w/rd 1%"),
        ("${env:ODD}", "p@ss:w/rd 1%"),
    ],
)
def test_references_are_resolved(reference: str, resolved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reference in a text is replaced, and credentials in a connection string are encoded once."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(secrets, "_databricks", read_secret)
    assert secrets.resolve(reference) == resolved


def test_all_missing_variables_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is unset or empty is an error of the settings, which says what to export."""
    monkeypatch.delenv("NOBODY", raising=False)
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(errors.SettingsError) as caught:
        secrets.resolve("mongodb://${env:NOBODY}:${env:EMPTY}@h/")
    assert [str(problem) for problem in caught.value.problems] == [
        "${env:NOBODY}: the variable NOBODY is not set (export NOBODY=…)",
        "${env:EMPTY}: the variable EMPTY is empty (export EMPTY=…)",
    ]


def test_the_environment_is_read_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the process' environment is read when a reference is resolved."""
    monkeypatch.setenv("MEDALLION_TEST_SECRET", "now")
    assert secrets.resolve("${env:MEDALLION_TEST_SECRET}") == "now"


def test_secret_scopes_elsewhere_explain_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside Databricks a secret scope is an error of the settings, which shows the other form."""
    monkeypatch.setitem(__import__("sys").modules, "databricks.sdk.runtime", None)
    with pytest.raises(errors.SettingsError, match=r"secret scopes only exist on Databricks.*\$\{env:NAME\}"):
        secrets.resolve("${secret:shop/uri}")


def test_a_secret_that_databricks_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error needs a decision, and names the scope and the key."""

    class Runtime:
        class dbutils:
            class secrets:
                @staticmethod
                def get(scope: str, key: str) -> str:
                    if key == "pw":
                        return "s3cret"
                    raise RuntimeError("no such key")

    monkeypatch.setitem(__import__("sys").modules, "databricks.sdk.runtime", Runtime)
    assert secrets.resolve("${secret:shop/pw}") == "s3cret"
    with pytest.raises(errors.AccessRefused, match="shop/nothing"):
        secrets.resolve("${secret:shop/nothing}")
