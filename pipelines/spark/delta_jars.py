"""Delta's jars: resolved once per machine by Ivy, and then cached, which saves seconds at each start."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pipelines.spark import log_store, scratch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextlib.contextmanager
def settings(packages: Sequence[str], excludes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Settings with the cached jars of Delta and `packages`; without them, with the packages, which Ivy resolves in some seconds.

    The first resolution holds a lock, because two processes that fill one Ivy cache break each other's downloads.
    """
    with contextlib.ExitStack() as stack:
        if not resolved_jars(packages):
            stack.enter_context(_locked(_jar_list(()).with_suffix(".lock")))
        jars = resolved_jars(packages)
        package_settings = {"spark.jars.packages": ",".join([_delta_package(), *packages])}
        package_settings["spark.jars.excludes"] = ",".join([*BROUGHT_BY_SPARK, *excludes])
        if not os.access(os.path.expanduser("~"), os.W_OK):
            # Ivy's default cache is in the home of the user database, which many services lack.
            package_settings["spark.jars.ivy"] = str(_jar_list(()).with_name("ivy"))
        yield {"spark.jars": ",".join(jars)} if jars else package_settings


# Dependencies of Delta that Spark includes, and loads first: 70 of 87 MB that need not be downloaded.
BROUGHT_BY_SPARK = (
    "com.fasterxml.jackson.core:*",
    "com.google.code.findbugs:*",
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.apache.logging.log4j:*",
    "org.apache.parquet:*",
    "org.roaringbitmap:RoaringBitmap",
    "org.slf4j:*",
)

NEEDED_JARS = ("io.delta_", "io.unitycatalog_", "com.fasterxml.jackson.datatype_")
"""The remaining jars of Delta's packages. A session copies each jar at its start."""


def downloaded_megabytes() -> float | None:
    """The megabytes of Delta's jars that a first start has downloaded so far; None where they are cached already."""
    if resolved_jars():
        return None
    with contextlib.suppress(OSError):
        cache = next(Path(os.path.expanduser("~")).glob(".ivy2*/cache"), None)
        files = (file for file in cache.rglob("*.jar*") if file.is_file()) if cache is not None else ()
        return sum(file.stat().st_size for file in files) / 1e6
    return None


def _delta_package() -> str:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    return configure_spark_with_delta_pip(SparkSession.Builder())._options["spark.jars.packages"]


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock of this machine during the block; where it cannot be opened, the block runs without it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def resolved_jars(packages: Sequence[str] = ()) -> list[str]:
    """The jars of Delta and `packages` as this machine resolved them last; empty before its first session."""
    try:
        lines = _jar_list(packages).read_text().splitlines()
        jars = [jar for jar in lines if packages or Path(jar).name.startswith(NEEDED_JARS)]
        return jars if all(Path(jar).exists() for jar in jars) else []
    except OSError:  # none are cached, or this user may not read them
        return []


def _jar_list(packages: Sequence[str]) -> Path:
    from importlib import metadata

    versions = f"{metadata.version('pyspark')}-{metadata.version('delta-spark')}"
    suffix = f"-{hashlib.sha256(','.join(packages).encode()).hexdigest()[:12]}" if packages else ""
    return _folder() / f"delta-jars-{versions}{suffix}.txt"


def _folder() -> Path:
    """The folder of the lists of jars, and of Ivy where it has no default: the temporary folder for a user without a writable home."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mongo-medallion")
    nearest = next((each for each in (cache_folder, *cache_folder.parents[:2]) if os.path.isdir(each)), None)
    return (
        cache_folder if nearest == cache_folder or nearest is not None and os.access(nearest, os.W_OK) else scratch.folder()
    )


def remember(spark: SparkSession, packages: Sequence[str], own_jars: Sequence[str]) -> None:
    """Cache the paths of the jars that a new session resolved from Delta's package and `packages`, without the `own_jars` ones."""
    conf = spark.sparkContext.getConf()
    if conf.get("spark.jars.packages") is None:
        return
    omitted_jars = {str(log_store.JAR), *own_jars}
    urls = (conf.get("spark.jars") or "").split(",")
    jars = [unquote(url.removeprefix("file://")) if url.startswith("file://") else url for url in urls if url]
    jars = [jar for jar in jars if jar not in omitted_jars]
    with contextlib.suppress(OSError):
        path = _jar_list(packages)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text("\n".join(jars))
        draft.replace(path)
