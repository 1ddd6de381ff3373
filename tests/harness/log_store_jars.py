"""Builds the jars of the log stores and of the local file system: `python -m tests.harness.log_store_jars`.

Needs a JDK of version 17 or later. The same sources give the same jars, byte for byte, which a test compares.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pipelines.spark import log_store

_FOLDER = log_store.JAR.parent
SOURCES = {
    log_store.JAR: sorted([*_FOLDER.glob("*LogStore.java"), _FOLDER / "ChecksumFileManager.java"]),
    log_store.FILES_JAR: sorted(_FOLDER.glob("InProcess*.java")),
}
"""The sources of each jar."""
EPOCH = (1980, 1, 1, 0, 0, 0)


_SPARK_JARS = ("hadoop-client-api-", "scala-library-", "slf4j-api-", "spark-common-utils_", "spark-sql_")


def spark_jars() -> list[Path]:
    """The jars of the installed Spark that the sources are compiled against."""
    import pyspark

    folder = Path(pyspark.__file__).parent / "jars"
    return [jar for jar in sorted(folder.iterdir()) if jar.name.startswith(_SPARK_JARS)]


def digest(jar: Path) -> str:
    """The SHA-256 of a jar's sources, in hexadecimal; the jar's manifest has its first 48 digits."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES[jar])).hexdigest()


def classes(jar: Path, needed: Sequence[Path]) -> dict[str, bytes]:
    """The compiled classes of a jar, by their path in it; `needed` is the class path with the jars of Spark and Delta."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["javac", "--release", "17", "-proc:none", "-g:none", "-cp", ":".join(map(str, needed)), "-d", folder]
        subprocess.run([*command, *map(str, SOURCES[jar])], check=True)
        return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(Path(folder).rglob("*.class"))}


def write(jar: Path, compiled: dict[str, bytes]) -> None:
    """Write a jar: a manifest with the sources' digest, and the classes."""
    manifest = f"Manifest-Version: 1.0\r\nSource-SHA-256: {digest(jar)[:48]}\r\n\r\n"
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"META-INF/MANIFEST.MF": manifest.encode(), **compiled}.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content, zipfile.ZIP_DEFLATED)


def main() -> None:
    """Build all jars, against the installed Spark and the Delta that was resolved last."""
    from pipelines.spark import delta_jars

    delta = [Path(jar) for jar in delta_jars.resolved_jars() if "delta-storage" in jar]
    if not delta:
        sys.exit("start a session once, so that Delta's jars are on this machine: medallion demo")
    for jar in SOURCES:
        write(jar, classes(jar, [*spark_jars(), *delta]))


if __name__ == "__main__":
    main()
