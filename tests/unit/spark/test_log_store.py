"""The jars of the log stores match their sources."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from pipelines.spark import delta_jars, log_store
from pipelines.spark.log_store import build


@pytest.mark.parametrize("jar", build.SOURCES, ids=lambda jar: jar.stem)
def test_a_jar_was_built_from_the_sources_beside_it(jar: Path) -> None:
    """The manifest has the digest of the sources. With a JDK the classes are compiled again, and must be the same."""
    with zipfile.ZipFile(jar) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert f"Source-SHA-256: {build.digest(jar)[:48]}".encode() in held.pop("META-INF/MANIFEST.MF")
    delta = [Path(each) for each in delta_jars.resolved_jars() if "delta-storage" in each]
    if shutil.which("javac") and delta:
        assert build.classes(jar, [*build.spark_jars(), *delta]) == held
    assert {Path(name).stem.partition("$")[0] for name in held} == {source.stem for source in build.SOURCES[jar]}


def test_the_classes_that_settings_name_are_in_the_jars() -> None:
    named = {log_store.LOCAL, log_store.CONDITIONAL_PUT, *log_store.CHECKSUMS.values(), *log_store.FILE_SYSTEM.values()}
    assert {each.rpartition(".")[2] for each in named} == {
        source.stem for sources in build.SOURCES.values() for source in sources
    }
