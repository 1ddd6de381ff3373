"""The jars of the log stores match their sources."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from pipelines.spark import delta_jars, log_store
from tests.harness import log_store_jars


@pytest.mark.parametrize("jar", log_store_jars.SOURCES, ids=lambda jar: jar.stem)
def test_a_jar_was_built_from_the_sources_beside_it(jar: Path) -> None:
    """The manifest has the digest of the sources. With a JDK the classes are compiled again, and must be the same."""
    with zipfile.ZipFile(jar) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert f"Source-SHA-256: {log_store_jars.digest(jar)[:48]}".encode() in held.pop("META-INF/MANIFEST.MF")
    delta = [Path(each) for each in delta_jars.resolved_jars() if "delta-storage" in each]
    if shutil.which("javac") and delta:
        assert log_store_jars.classes(jar, [*log_store_jars.spark_jars(), *delta]) == held
    assert {Path(name).stem.partition("$")[0] for name in held} == {source.stem for source in log_store_jars.SOURCES[jar]}


def test_the_classes_that_settings_name_are_in_the_jars() -> None:
    named = {log_store.LOCAL, log_store.CONDITIONAL_PUT, *log_store.CHECKSUMS.values(), *log_store.FILE_SYSTEM.values()}
    assert {each.rpartition(".")[2] for each in named} == {
        source.stem for sources in log_store_jars.SOURCES.values() for source in sources
    }
