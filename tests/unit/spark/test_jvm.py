"""What the JVM of a session is started with, without one."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from pipelines.spark import delta_jars, jvm, stores


class Started(Exception):
    """Where a JVM would be started."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that gives the settings on the command line of the JVM that `launch` would start."""
    from pyspark import java_gateway

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))

    def launch_gateway(conf: Any, popen_kwargs: Any) -> None:
        raise Started(dict(conf.getAll()))

    monkeypatch.setattr(java_gateway, "launch_gateway", launch_gateway)

    def start(defaults: str = "", *, catalog: str | None = None, **conf: str) -> dict[str, str]:
        (tmp_path / "spark-defaults.conf").write_text(defaults)
        chosen = {name.replace("__", "."): value for name, value in conf.items()}
        with pytest.raises(Started) as said:
            jvm.launch("test", master=None, conf=chosen, store=stores.of(None), hadoop={}, profile={}, catalog=catalog)
        found: dict[str, str] = said.value.args[0]
        return found

    return start


def test_a_secret_of_the_defaults_stands_on_no_command_line(started: Any) -> None:
    shown = started("spark.hadoop.fs.s3a.secret.key hidden\nspark.ssl.keyPassword hidden\nspark.driver.memory 700m\n")
    assert shown["spark.driver.memory"] == "700m" and "hidden" not in str(shown)


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]", "yarn", "spark://host:7077"])
def test_executors_of_a_cluster_reach_the_driver(started: Any, master: str) -> None:
    shown = started(f"spark.master {master}\n")
    assert ("spark.driver.host" in shown) == ("spark.driver.bindAddress" in shown) == master.startswith("local")


def test_a_catalog_that_is_not_there_or_would_be_forgotten_is_refused(started: Any) -> None:
    for catalog in ("spark_catalog", "main"):
        with pytest.raises(errors.SettingsError, match=r"lakehouse\.catalog: .*--conf"):
            jvm.launch("test", master=None, conf={}, store=stores.of(None), hadoop={}, profile={}, catalog=catalog)
    assert started(catalog="spark_catalog", spark__sql__catalogImplementation="hive")
    assert started(catalog="main", spark__sql__catalog__main="io.unitycatalog.spark.UCSingleCatalog")


def test_a_folder_of_somebody_else_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / f"medallion-{os.getuid()}"
    mine.mkdir()
    mine.chmod(0o777)
    assert stat.S_IMODE(jvm.scratch().stat().st_mode) == 0o700
    mine.rmdir()
    (tmp_path / "planted").mkdir()
    mine.symlink_to(tmp_path / "planted")
    with pytest.raises(errors.DecisionNeeded, match="TMPDIR"):
        jvm.scratch()


def test_a_home_that_may_not_be_looked_into_remembers_no_jars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As below a service's ProtectHome; the packages then go below the cache."""

    read = Path.read_text

    def refused(path: Path, *arguments: Any, **named: Any) -> str:
        if path.is_relative_to(tmp_path):
            raise PermissionError(13, "Permission denied")
        return read(path, *arguments, **named)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with delta_jars.settings((), ()) as settings:
        assert settings["spark.jars.packages"] and settings["spark.jars.ivy"].startswith(str(tmp_path))
