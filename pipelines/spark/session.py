"""The Spark session: taken where a platform gives one, built quietly where none does.

Where `spark-submit`, Databricks or Spark Connect gives a session, that one is used as it is; on a plain machine a small
local one is built (`jvm`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cdc_core import errors
from pipelines.spark import conf as spark_conf
from pipelines.spark import jvm, log_store, scratch, stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

GRACE_SECONDS = 4.0
"""How long running jobs may take to end by themselves; then they are cancelled, each so many seconds again."""

IDLE_SECONDS = 1.0


def session(
    name: str,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    root: str | None = None,
    hadoop: Mapping[str, str] | None = None,
    profile: Mapping[str, str] | None = None,
    catalog: str | None = None,
) -> SparkSession:
    """A session with Delta for the application `name` and a lakehouse below `root`.

    A session that is there already, or that the platform gives, is taken; `master` and what of `conf` belongs
    to the start of an application then have no effect. Otherwise one is built for `master` (all cores of this
    machine by default), with `profile`, such as `CAPTURE`, with what the store of `root` needs,
    `SPARK_CONF_DIR/spark-defaults.conf` where that variable is set, and `conf`, each over what comes before it. Times
    are UTC in either case. `hadoop` are settings of the root's file system, as `spark.hadoop.…`; they may be secrets,
    and stand on no command line.

    Raises SettingsError where Spark is not installed, a given one lacks Delta, or one that is built would not have
    `catalog`, DecisionNeeded where Java is missing or too old, Temporary where Delta's jars could not be downloaded.
    """
    wanted = dict(conf or {})
    store = stores.of(root)
    if stores.LOG_STORE_OF_ALL in {**spark_conf.defaults(), **wanted}:
        store = store.without_log_stores()
    given = _active() or (_given(name, store, hadoop or {}) if is_given() else None)
    spark = given or jvm.launch(
        name, master=master, conf=wanted, store=store, hadoop=hadoop or {}, profile=profile or {}, catalog=catalog
    )
    _CHOSEN.clear()
    _CHOSEN.update(wanted if given else {})
    # Databricks knows tables by their paths in any catalog, and its own is where its users' other tables are.
    by_path = spark_conf.BY_PATH if root is not None and not is_databricks() else {}
    _apply(spark, {**spark_conf.REQUIRED, **by_path, **wanted})
    return spark


def lazily(start: Callable[[], SparkSession]) -> SparkSession:
    """A session that `start` makes at its first use: a run that finds nothing to do needs none."""
    return cast("SparkSession", _Lazy(start))


class _Lazy:
    """Stands for a session that may never be needed."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._starting = threading.Lock()
        self._session: SparkSession | None = None

    def __getattr__(self, name: str) -> Any:
        with self._starting:
            if self._session is None:
                self._session = self._start()
        return getattr(self._session, name)


def is_started(spark: SparkSession) -> bool:
    """Whether there is a session by now; one that is made `lazily` may not be needed."""
    return not isinstance(spark, _Lazy) or spark._session is not None


def sessions(spark: SparkSession) -> Callable[[], SparkSession]:
    """A factory of sessions of `spark`'s application, each with settings of its own.

    Over Spark Connect that is a second session of the server that `SPARK_REMOTE` names; where another way led to the server,
    there is no telling how to make one, and the factory returns `spark` itself.
    """
    # Asked once: a server of Spark Connect ends the session of an application whose threads have sessions of their own.
    carried = functools.cache(lambda: _carried(spark))

    def fresh() -> SparkSession:
        if is_shared(spark):
            return spark
        new = spark.newSession() if is_classic(spark) else _connect_session()
        if not (is_classic(spark) or is_databricks()):
            _ship_packages(new)  # over Spark Connect they belong to the session that they were given to
        _apply(new, carried())
        return new

    return fresh


def is_open(spark: SparkSession) -> bool:
    """Whether a session can be used: a server of Spark Connect ends one that nobody used for an hour."""
    return is_classic(spark) or _setting(spark, "spark.sql.session.timeZone") is not None


def _carried(spark: SparkSession) -> dict[str, str]:
    """The settings that all sessions of an application share."""
    found = {key: _setting(spark, key) for key in (*spark_conf.REQUIRED, *spark_conf.BY_PATH, spark_conf.SINGLE_DRIVER)}
    return {key: value for key, value in found.items() if value is not None} | _CHOSEN


_CHOSEN: dict[str, str] = {}
"""Settings asked for on a session that was given: sessions that are made beside it get them, too. One that this process builds has them of its application."""


def is_shared(spark: SparkSession) -> bool:
    """Whether `sessions` gives out `spark` itself."""
    return not is_classic(spark) and (os.environ.get("SPARK_REMOTE") or "local").startswith("local")


def _connect_session() -> SparkSession:
    from pyspark.sql import SparkSession

    new = SparkSession.builder.remote(os.environ["SPARK_REMOTE"]).create()
    _close_at_exit(new)
    return new


def _close_at_exit(spark: SparkSession) -> None:
    """Close a Connect session while the process's threads still run.

    PySpark does it when the object is collected, which at the end of a process may wait for ever: gRPC waits for a call
    whose thread the interpreter has stopped.
    """
    client: Any = spark.client

    def close() -> None:
        with contextlib.suppress(Exception):  # the server may be gone
            client.close()

    atexit.register(close)


def is_databricks() -> bool:
    """Whether the platform is Databricks, which commits to its stores by itself."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def is_classic(spark: SparkSession) -> bool:
    """Whether the session runs in this application's own JVM, not over Spark Connect."""
    from pyspark.sql.utils import is_remote

    return not is_remote() and hasattr(spark, "_jsparkSession")


def stop(seconds: float = 10) -> bool:
    """Stops the session of this process and its JVM, which may take so long: whether it has ended; nothing where there is none or a
    platform gave it."""
    spark = _active()
    if spark is None or is_given():
        return False
    gateway = getattr(spark.sparkContext, "_gateway", None)
    spark.stop()
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None:
        return False
    from pyspark import SparkContext

    gateway.shutdown()
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=seconds)
    SparkContext._gateway = None
    SparkContext._jvm = None
    return process.poll() is not None


_CANCELLED = threading.Event()


def is_cancelling() -> bool:
    """Whether jobs of this process were cancelled because it is to end: what fails from then on is no fault of its table."""
    return _CANCELLED.is_set()


@contextlib.contextmanager
def cancelling(spark: SparkSession, stop: threading.Event) -> Iterator[threading.Event]:
    """When `stop` is set and the block has not ended `GRACE_SECONDS` later, its Spark jobs are cancelled, so that it ends.

    What a cancelled statement leads to is then no error: a statement commits or it does not, and the next start does it
    again.
    """
    ended, cancelled = threading.Event(), _CANCELLED
    cancelled.clear()

    def cancel() -> None:
        while not (stop.wait(IDLE_SECONDS) or ended.is_set()):
            pass
        while not ended.wait(GRACE_SECONDS) and is_started(spark) and is_classic(spark):
            cancelled.set()
            with contextlib.suppress(Exception):  # the session may end meanwhile
                spark.sparkContext.cancelAllJobs()

    threading.Thread(target=cancel, name="medallion-cancel", daemon=True).start()
    try:
        yield cancelled
    except Exception as error:
        if not cancelled.is_set():
            raise
        log.info("unfinished work was abandoned; the next start repeats it (%s)", type(error).__name__)
    finally:
        ended.set()


def submitter() -> int | None:
    """The process of the spark-submit that started this one and holds its session, if there is one."""
    return os.getppid() if os.environ.get("PYSPARK_GATEWAY_PORT") else None


def _active() -> SparkSession | None:
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise errors.SettingsError(
            "Spark is not installed: pip install 'mongo-medallion[spark]' (Databricks provides it)"
        ) from None
    # A thread that Spark did not start has no active session, though the process has one.
    return SparkSession.getActiveSession() or (SparkSession._instantiatedSession if _has_context() else None)


def _has_context() -> bool:
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def is_given() -> bool:
    """Whether spark-submit, Databricks or a Spark Connect server holds the session for us."""
    return any(
        os.environ.get(name)
        for name in (
            "PYSPARK_GATEWAY_PORT",
            "DATABRICKS_RUNTIME_VERSION",
            "SPARK_REMOTE",
            "SPARK_CONNECT_MODE_ENABLED",
        )
    )


def _given(name: str, store: stores.ObjectStore, hadoop: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName(name).getOrCreate()
    if not (is_classic(spark) or is_databricks()):
        _close_at_exit(spark)
    if is_classic(spark) and not is_databricks():
        _check_delta(spark)
        _add_log_store(spark, store)
        configuration: Any = spark.sparkContext._jsc
        for key, value in hadoop.items():
            configuration.hadoopConfiguration().set(key.removeprefix("spark.hadoop."), value)
        spark.sparkContext.setLogLevel("ERROR")
    elif hadoop:
        log.warning("lakehouse.store has no effect on a Spark that runs elsewhere: configure the store in that Spark")
    if not is_databricks():
        _ship_packages(spark)
    return spark


def _add_log_store(spark: SparkSession, store: stores.ObjectStore) -> None:
    """Give a driver that was started by somebody else our log stores, and who writes checksums in the store, before Delta opens a
    table; what it names itself stays."""
    context: Any = spark.sparkContext
    if context._jsc.sc().conf().contains(stores.LOG_STORE_OF_ALL):
        return
    loader = context._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    with contextlib.suppress(Exception):  # another Spark may load classes in another way: then its own log store stays
        loader.addURL(context._jvm.java.net.URL(log_store.JAR.resolve().as_uri()))
        for name, value in {**store.log_stores(), **store.checksums()}.items():
            context._jvm.java.lang.Class.forName(value, False, loader)
            if not context._jsc.sc().conf().contains(name):
                context._jsc.sc().conf().set(name, value)
                if name.startswith("spark.sql."):  # for this session, which has its own by now
                    spark.conf.set(name, value)


def _ship_packages(spark: SparkSession) -> None:
    """Gives the executors the packages of a plain checkout; those of an installed wheel they have."""
    if jvm.is_installed():
        return
    if is_classic(spark):
        spark.sparkContext.addPyFile(str(_packages()))
    else:
        spark.addArtifacts(str(_packages()), pyfile=True)


@functools.cache
def _packages() -> Path:
    """An archive of the checkout's packages, written once: sessions may be made by threads side by side."""
    archive = scratch.folder() / f"packages-{os.getpid()}.zip"
    with zipfile.ZipFile(archive, "w") as packages:
        for package in ("cdc_core", "pipelines"):
            for file in sorted((jvm.ROOT / package).rglob("*.py")):
                packages.write(file, file.relative_to(jvm.ROOT))
    return archive


def is_local(spark: SparkSession) -> bool:
    """Whether driver and executors are one process."""
    return is_classic(spark) and spark.sparkContext.master.startswith("local[")


def _check_delta(spark: SparkSession) -> None:
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        jvm.java.lang.Class.forName(spark_conf.EXTENSION, False, loader)
    except Exception:
        present = False
    else:
        present = True
    if not present or spark_conf.EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
        missing = "jar" if not present else "session extension"
        raise errors.SettingsError(
            f"this Spark has no Delta ({missing} missing): use spark-submit --properties-file conf/spark-defaults.conf"
        )


def _apply(spark: SparkSession, conf: Mapping[str, str]) -> None:
    """Set what a running session lets one set, and take out what is `OF_OTHERS`; what it has already stays."""
    from pyspark.errors import PySparkException

    for key, value in conf.items():
        if _setting(spark, key) == value:
            continue
        # Serverless compute refuses settings that it decides on itself, as this project would.
        with contextlib.suppress(PySparkException) if key not in spark_conf.MUST_BE_ACCEPTED else contextlib.nullcontext():
            # Spark knows Delta's own only when something of Delta was used.
            if key in (*spark_conf.REQUIRED, spark_conf.SINGLE_DRIVER) or spark.conf.isModifiable(key):
                spark.conf.set(key, value)
    with contextlib.suppress(PySparkException):
        for key in spark.conf.getAll:
            if key.startswith(spark_conf.OF_OTHERS):
                spark.conf.unset(key)


def _setting(spark: SparkSession, name: str) -> str | None:
    """What the session says of a setting; None where it has none, or tells nothing about it."""
    from pyspark.errors import PySparkException

    with contextlib.suppress(PySparkException):
        return spark.conf.get(name, None)
    return None
