"""The jar of the log stores is what its source says."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pyspark

from pipelines.delta import log_store
from pipelines.delta.log_store import build
from pipelines.spark import delta_jars


def test_the_jar_was_built_from_the_source_beside_it() -> None:
    """The manifest carries the digest of the sources; with a JDK the classes are compiled again, and are the same."""
    with zipfile.ZipFile(log_store.JAR) as jar:
        held = {name: jar.read(name) for name in jar.namelist()}
    assert f"Source-SHA-256: {build.digest()[:48]}".encode() in held.pop("META-INF/MANIFEST.MF")
    delta = [Path(each) for each in delta_jars.resolved_jars() if "delta-storage" in each]
    if shutil.which("javac") and delta:
        hadoop = Path(pyspark.__file__).parent.joinpath("jars").glob("hadoop-client-api-*.jar")
        assert build.classes([*hadoop, *delta]) == held
    assert {Path(name).stem for name in held} == {
        log_store.LOCAL.rpartition(".")[2],
        log_store.CONDITIONAL_PUT.rpartition(".")[2],
    }
