"""How a command starts Spark: the profile of its JVM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from cdc_core import errors
from jobs.commands import application
from jobs.commands.options import SettingsFile
from pipelines.delta import local_log
from pipelines.spark import conf as spark_conf
from pipelines.spark import session as sparks

MEGABYTE = 1 << 20


def _profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, *, bronze_bytes: int | None, is_service: bool
) -> Mapping[str, str] | None:
    """The profile that a command asks for, with a bronze of that size; None is a bronze that does not exist yet."""
    path = folder / "shop.yml"
    path.write_text(
        f"name: shop\nlakehouse: {{root: {folder}/lakehouse}}\nsource: {{mongodb.connection.string: mongodb://127.0.0.1}}\n"
    )
    if bronze_bytes is not None:
        log = folder / "lakehouse" / "bronze" / "shop" / "_delta_log"
        log.mkdir(parents=True)
        (log / f"{0:020}.json").write_text("{}")
        (log / f"{0:020}.crc").write_text(json.dumps({"numFiles": 1, "tableSizeBytes": bronze_bytes}))
    asked: dict[str, Any] = {}
    monkeypatch.setattr(sparks, "session", lambda _, **options: asked.update(options))
    file = SettingsFile(path, None, None, None, {})
    application.session(file, file.load(), verb, is_service=is_service)
    profile: Mapping[str, str] | None = asked["profile"]
    return profile


@pytest.mark.parametrize(
    ("bronze_bytes", "is_service", "expected"),
    [
        (None, False, spark_conf.SHORT_RUN),
        (200 * MEGABYTE, False, spark_conf.SHORT_RUN),
        (5000 * MEGABYTE, False, {}),
        (200 * MEGABYTE, True, {}),
    ],
)
def test_a_run_over_little_does_not_wait_for_the_optimizing_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bronze_bytes: int | None, is_service: bool, expected: Mapping[str, str]
) -> None:
    """It pays off after about two million documents: services and larger runs use it."""
    assert _profile(tmp_path, monkeypatch, "silver", bronze_bytes=bronze_bytes, is_service=is_service) == expected


def test_a_run_over_what_cannot_be_measured_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_log, "folder", lambda table: None)
    profile = _profile(tmp_path, monkeypatch, "silver", bronze_bytes=5000 * MEGABYTE, is_service=False)
    assert profile == spark_conf.SHORT_RUN


def test_a_capture_has_a_profile_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs little memory, whatever the size of bronze."""
    assert _profile(tmp_path, monkeypatch, "capture", bronze_bytes=None, is_service=False) == spark_conf.CAPTURE


@pytest.mark.parametrize("given", [(None, ""), ("", None)])
def test_an_option_of_an_empty_variable_is_no_place(tmp_path: Path, given: tuple[str | None, str | None]) -> None:
    """Otherwise the command would use the tables that the settings file names."""
    catalog, root = given
    with pytest.raises(click.UsageError, match="must not be empty"):
        SettingsFile(tmp_path / "shop.yml", catalog, None, root, {}).load()


@pytest.mark.parametrize("root", ["~/lake", "$HOME/lake", "a:b/c", "s3a:/lake", "https://lake"])
def test_an_option_that_is_no_folder_or_url_is_no_place(tmp_path: Path, root: str) -> None:
    """`--root=~/lake` is not expanded by the shell, and would create a folder named `~` in the working directory."""
    with pytest.raises(click.UsageError, match="--root "):
        SettingsFile(tmp_path / "shop.yml", None, None, root, {}).load()


def test_an_option_with_a_login_is_refused_without_it(tmp_path: Path) -> None:
    """The path of a table is in every message, and Hadoop takes no login from it."""
    with pytest.raises(click.UsageError, match="--root s3a://AKIA:…@lake: credentials are not part of a URL"):
        SettingsFile(tmp_path / "shop.yml", None, None, "s3a://AKIA:hunter2@lake", {}).load()


def test_an_option_that_no_schema_can_begin_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="--schema-prefix dev.eu_: letters, digits and _ are expected"):
        SettingsFile(tmp_path / "shop.yml", "main", "dev.eu_", None, {}).load()


@pytest.mark.parametrize(
    "place", ["root: '${env:NO_LAKE}/shop'", "catalog: '${env:NO_CATALOG}', schema_prefix: a_", "root: ~/lake"]
)
def test_an_option_stands_for_a_place_that_this_deployment_does_not_have(tmp_path: Path, place: str) -> None:
    """The file's variables are those of other deployments: only the place that is used has to be one."""
    path = tmp_path / "shop.yml"
    path.write_text(f"name: shop\nlakehouse: {{{place}}}\nsource: {{mongodb.connection.string: mongodb://127.0.0.1}}\n")
    below = SettingsFile(path, None, None, str(tmp_path), {}).load().lakehouse
    assert (below.root, below.catalog, below.schema_prefix) == (str(tmp_path), None, "")
    inside = SettingsFile(path, "main", "dev_", None, {}).load().lakehouse
    assert (inside.root, inside.catalog, inside.schema_prefix) == (None, "main", "dev_")
    with pytest.raises(errors.SettingsError, match="lakehouse"):
        SettingsFile(path, None, None, None, {}).load()


def test_a_folder_of_this_machine_needs_no_settings_of_a_store(tmp_path: Path) -> None:
    """The file may be that of a deployment with a bucket, whose credentials this machine does not have."""
    path = tmp_path / "shop.yml"
    store = "{fs.s3a.endpoint: http://store, fs.s3a.secret.key: '${env:NO_KEY}'}"
    path.write_text(
        f"name: shop\nlakehouse: {{root: s3a://lake, store: {store}}}\nsource: {{mongodb.connection.string: mongodb://127.0.0.1}}\n"
    )
    assert not SettingsFile(path, None, None, str(tmp_path), {}).load().lakehouse.store
    assert len(SettingsFile(path, None, None, "s3a://other", {}).load().lakehouse.store) == 2
