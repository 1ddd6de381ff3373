"""The Spark session: that of the platform (spark-submit, Databricks or Spark Connect), else a small local one (`jvm`)."""

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
"""The time in which running jobs may end by themselves. Then they are cancelled, again after each such time."""

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
    """A session with Delta for the application `name` and a lakehouse below `root`. Its time zone is UTC.

    Takes the session of this process or of the platform if there is one; `master`, and static settings in `conf`, then have no effect.
    Otherwise starts one for `master` (by default all cores of this machine). Its settings come from `profile`, such as `conf.CAPTURE`, the
    store of `root`, `SPARK_CONF_DIR/spark-defaults.conf` where that variable is set, and `conf`, each overriding those before it.
    `hadoop` are settings of the root's file system, as `spark.hadoop.…`. They may be secrets, and are on no command line.

    Raises `SettingsError` where a given session lacks Delta, or a new one would not have `catalog`;
    `DecisionNeeded` where Java is missing or too old, or Spark refuses a setting; `Temporary` where Delta's jars could not be downloaded, or
    Spark does not start for another reason.
    """
    user_settings = dict(conf or {})
    store = stores.of(root)
    if stores.LOG_STORE_OF_ALL in {**spark_conf.defaults(), **user_settings}:
        store = store.without_log_stores()
    given_session = _active() or (_given(name, store, hadoop or {}) if is_given() else None)
    with _refusals():
        spark = given_session or jvm.launch(
            name, master=master, conf=user_settings, store=store, hadoop=hadoop or {}, profile=profile or {}, catalog=catalog
        )
    _CHOSEN.clear()
    _CHOSEN.update(user_settings if given_session else {})
    # Databricks resolves paths in any catalog, and its default catalog has its users' other tables.
    by_path = spark_conf.BY_PATH if root is not None and not is_databricks() else {}
    with _refusals():
        _apply(spark, {**spark_conf.REQUIRED, **by_path, **user_settings})
    return spark


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise what a new JVM says against its settings, such as too little memory for Spark, as `DecisionNeeded`, and other errors as
    `Temporary`: a port that is still in use, or a cluster that does not answer yet."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from pipelines.spark import failures as spark_failures

    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        java = getattr(error, "java_exception", None)
        words = str(error if java is None else java.getMessage() or java)
        reason = words.strip().partition("\n")[0]
        if spark_failures.class_name(error) == "ClassNotFoundException":  # its message is the name
            reason = f"there is no class {reason}"
        # Spark's own check of its metrics fails where a cluster's master could not be reached.
        is_setting = spark_failures.is_caused_by(error, _SETTINGS_ERRORS) and "MetricsSystem" not in words
        message = f"Spark did not start: {reason} (log: {jvm.log_file()})"
        again = "start again; if the error comes back, check spark.master and the other settings of --conf"
        failure = (
            errors.DecisionNeeded(f"{message}; {jvm.WHERE_SETTINGS_ARE}")
            if is_setting
            else errors.Temporary(f"{message}; {again}")
        )
        raise spark_failures.translated(error) or failure from error


_SETTINGS_ERRORS = (
    "ClassNotFoundException",
    "IllegalArgumentException",
    "SparkIllegalArgumentException",
    "NumberFormatException",
)
"""What Spark raises at its start for a setting that it refuses."""


def lazily(start: Callable[[], SparkSession]) -> SparkSession:
    """A session that `start` creates at its first use: a run that finds nothing to do needs none."""
    return cast("SparkSession", _Lazy(start))


class _Lazy:
    """A proxy of a session that may never be needed."""

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
    """Whether the session exists; one that is created `lazily` may not exist yet."""
    return not isinstance(spark, _Lazy) or spark._session is not None


def sessions(spark: SparkSession) -> Callable[[], SparkSession]:
    """A factory of sessions of `spark`'s application, each with its own settings.

    Over Spark Connect they are sessions of the server that `SPARK_REMOTE` names. Without that variable the factory returns `spark` itself.
    """
    # Read once, because a Spark Connect server closes `spark` when it is idle while threads use their own sessions.
    shared_settings = functools.cache(lambda: _carried(spark))

    def fresh() -> SparkSession:
        if is_shared(spark):
            return spark
        new_session = spark.newSession() if is_classic(spark) else _connect_session()
        if not (is_classic(spark) or is_databricks()):
            _ship_packages(new_session)  # over Spark Connect each session has its own packages
        _apply(new_session, shared_settings())
        return new_session

    return fresh


def is_open(spark: SparkSession) -> bool:
    """Whether a session can be used: a Spark Connect server closes one that was idle for an hour."""
    return is_classic(spark) or _setting(spark, "spark.sql.session.timeZone") is not None


def _carried(spark: SparkSession) -> dict[str, str]:
    """The settings that all sessions of an application share."""
    settings = {key: _setting(spark, key) for key in (*spark_conf.REQUIRED, *spark_conf.BY_PATH, spark_conf.SINGLE_DRIVER)}
    return {key: value for key, value in settings.items() if value is not None} | _CHOSEN


_CHOSEN: dict[str, str] = {}
"""The `conf` of a given session, which further sessions get, too. A session that this process starts has it in its application."""


def is_shared(spark: SparkSession) -> bool:
    """Whether `sessions` returns `spark` itself."""
    return not is_classic(spark) and (os.environ.get("SPARK_REMOTE") or "local").startswith("local")


def _connect_session() -> SparkSession:
    from pyspark.sql import SparkSession

    new_session = SparkSession.builder.remote(os.environ["SPARK_REMOTE"]).create()
    _close_at_exit(new_session)
    return new_session


def _close_at_exit(spark: SparkSession) -> None:
    """Close a Spark Connect session at exit, while the process's threads still run.

    PySpark closes it when the object is garbage collected. At the end of a process this may hang: gRPC waits for a call whose thread the
    interpreter has stopped.
    """
    client: Any = spark.client

    def close() -> None:
        with contextlib.suppress(Exception):  # the server may be gone
            client.close()

    atexit.register(close)


def is_databricks() -> bool:
    """Whether the platform is Databricks, which commits to its stores itself."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def is_classic(spark: SparkSession) -> bool:
    """Whether the session has a JVM in this application, and not over Spark Connect."""
    from pyspark.sql.utils import is_remote

    return not is_remote() and hasattr(spark, "_jsparkSession")


def stop(seconds: float = 10) -> bool:
    """Stop the session of this process and its JVM, waiting up to `seconds`; whether the JVM has ended.

    Does nothing, and returns false, where there is no session or the platform gave it.
    """
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
"""Set while the jobs of a process that ends are cancelled; there is one command per process."""


def is_cancelling() -> bool:
    """Whether jobs of this process were cancelled because it is ending: an error after that is not the table's."""
    return _CANCELLED.is_set()


@contextlib.contextmanager
def cancelling(spark: SparkSession, stop: threading.Event) -> Iterator[threading.Event]:
    """Cancel the block's Spark jobs `GRACE_SECONDS` after `stop` is set, so that the block ends. Yields an event that is set then.

    Errors of the block are logged and suppressed after that: a cancelled statement commits or does not, and the next start repeats it.
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
    """The process number of the spark-submit that started this process and has its session; None without one."""
    return os.getppid() if os.environ.get("PYSPARK_GATEWAY_PORT") else None


def _active() -> SparkSession | None:
    from pyspark.sql import SparkSession

    # A new thread has no active session, although the process has one.
    return SparkSession.getActiveSession() or (SparkSession._instantiatedSession if _has_context() else None)


def _has_context() -> bool:
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def is_given() -> bool:
    """Whether spark-submit, Databricks or a Spark Connect server provides the session."""
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
    """Add the log stores, and the writer of checksums, to a driver that spark-submit started, before Delta opens a table.

    Settings that the driver already has stay.
    """
    context: Any = spark.sparkContext
    if context._jsc.sc().conf().contains(stores.LOG_STORE_OF_ALL):
        return
    loader = context._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    with contextlib.suppress(Exception):  # where another Spark loads classes differently, its own log store stays
        loader.addURL(context._jvm.java.net.URL(log_store.JAR.resolve().as_uri()))
        for name, value in {**store.log_stores(), **store.checksums()}.items():
            context._jvm.java.lang.Class.forName(value, False, loader)
            if not context._jsc.sc().conf().contains(name):
                context._jsc.sc().conf().set(name, value)
                if name.startswith("spark.sql."):  # the session has its own copy already
                    spark.conf.set(name, value)


def _ship_packages(spark: SparkSession) -> None:
    """Send the packages of a plain checkout to the executors; an installed wheel is already there."""
    if jvm.is_installed():
        return
    if is_classic(spark):
        spark.sparkContext.addPyFile(str(_packages()))
    else:
        spark.addArtifacts(str(_packages()), pyfile=True)


@functools.cache
def _packages() -> Path:
    """An archive of the checkout's packages, written once per process."""
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
        has_extension = False
    else:
        has_extension = True
    if not has_extension or spark_conf.EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
        missing_part = "jar" if not has_extension else "session extension"
        raise errors.SettingsError(
            f"this Spark has no Delta ({missing_part} missing): use spark-submit --properties-file conf/spark-defaults.conf"
        )


def _apply(spark: SparkSession, conf: Mapping[str, str]) -> None:
    """Set those settings that can be changed in a running session, and remove settings that begin with `OF_OTHERS`."""
    from pyspark.errors import PySparkException

    for key, value in conf.items():
        if _setting(spark, key) == value:
            continue
        # Serverless compute refuses settings that it sets itself, to the same values.
        with contextlib.suppress(PySparkException) if key not in spark_conf.MUST_BE_ACCEPTED else contextlib.nullcontext():
            # Spark knows Delta's settings, and that they are modifiable, only after the first use of Delta.
            if key in (*spark_conf.REQUIRED, spark_conf.SINGLE_DRIVER) or spark.conf.isModifiable(key):
                spark.conf.set(key, value)
    with contextlib.suppress(PySparkException):
        for key in spark.conf.getAll:
            if key.startswith(spark_conf.OF_OTHERS):
                spark.conf.unset(key)


def _setting(spark: SparkSession, name: str) -> str | None:
    """The session's value of a setting; None where it has none, or refuses to return it."""
    from pyspark.errors import PySparkException

    with contextlib.suppress(PySparkException):
        return spark.conf.get(name, None)
    return None
