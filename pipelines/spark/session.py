"""The Spark session: taken where a platform gives one, built quietly where none does.

The only module that starts Spark. Where `spark-submit`, Databricks or Spark Connect gives a session, that one
is used as it is; on a plain machine a small local one is built, with Delta's jars resolved by Delta's own pip
support. Spark's log goes to a file (`log_file()`), so that a terminal shows what the commands say and nothing
else.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cdc_core import errors
from pipelines.delta import log_store
from pipelines.spark import stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
JAVA_NEEDED = 17
EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

END_SECONDS = 2.0
"""So long a JVM whose connections broke may take to end."""
GRACE_SECONDS = 4.0
"""So long what runs may take to end by itself; then its jobs are cancelled, each so many seconds again."""
IDLE_SECONDS = 1.0

# What a session must say for its tables to be right, wherever it came from.
MEANING: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.variable.substitute": "false",  # no document, name or path has its `${…}` replaced by what the process knows
}
# Spark compiles Java all the time, its own parser's included. With HotSpot's thresholds the optimizing compiler takes a third of
# two cores' time, mostly for methods that run a few thousand times: it gets those that run more.
_COMPILER = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=20000 -XX:Tier4MinInvocationThreshold=4000 "
    "-XX:Tier4CompileThreshold=60000"
)
# A batch's rows live for seconds. With half of the memory for what is young they are gone before they count as old, of which a
# collection takes a third of a second.
_COLLECTOR = "-XX:+UseParallelGC -XX:NewRatio=1"
_COLLECTORS = re.compile(r"-XX:\+Use\w+GC\b")
NEEDED = {"spark.sql.session.timeZone"}
"""Without these of `MEANING` values would be wrong; the others have the same meaning on every platform that refuses them."""
SINGLE_DRIVER = "spark.medallion.lakehouse.singleDriver"
"""The setting `lakehouse.single_driver`, as a session carries it."""
# What makes a session of one machine quick.
LOCAL: Mapping[str, str] = {
    "spark.sql.extensions": EXTENSION,
    "spark.sql.catalog.spark_catalog": CATALOG,
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    # A batch of silver runs some 140 different plans: of the default's 100 classes none would be there for the next batch.
    "spark.sql.codegen.cache.maxEntries": "1000",
    "spark.sql.shuffle.partitions": str(max(2, min(8, os.cpu_count() or 2))),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": f"-Xss4m -XX:-UsePerfData {_COLLECTOR} {_COMPILER}",
}
# For a run of a minute or two: half the CPU time at the start (13 s, not 26, to the second commit), slower after.
# The one compiler alone would get a cache of 48 MB, which a few wide tables fill: the JVM then crawls, and may end.
BRIEF: Mapping[str, str] = {
    "spark.driver.extraJavaOptions": (
        f"{LOCAL['spark.driver.extraJavaOptions']} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    )
}

# A capture commits and reads snapshots' chunks, two of twice `commit.max.bytes` at a time: its JVM needs less memory than silver's,
# begins as quickly as it can, and gives back what a snapshot took.
CAPTURE: Mapping[str, str] = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": (
        f"-Xss4m -XX:-UsePerfData -XX:+UseSerialGC -XX:MaxHeapFreeRatio=40 {_COMPILER} "
        "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=128m"
    ),
}


def session(
    name: str,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    root: str | None = None,
    profile: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session with Delta for the application `name` and a lakehouse below `root`.

    A session that is there already, or that the platform gives, is taken; `master` and what of `conf` belongs
    to the start of an application then have no effect. Otherwise one is built for `master` (all cores of this
    machine by default), with `profile`, such as `CAPTURE`, with what the store of `root` needs, `SPARK_CONF_DIR/spark-defaults.conf` where that variable is set,
    and `conf`, each over what comes before it. Times are UTC in either case.

    Raises SettingsError where Spark is not installed or a given one lacks Delta, DecisionNeeded where Java is
    missing or too old, Temporary where Delta's jars could not be downloaded.
    """
    wanted = dict(conf or {})
    store = stores.of(root)
    spark = _active() or (
        _given(name, store) if _is_given() else _local(name, master=master, conf=wanted, store=store, profile=profile or {})
    )
    _apply(spark, {**MEANING, **wanted})
    return spark


def lazily(start: Callable[[], SparkSession]) -> SparkSession:
    """A session that `start` makes as soon as something is asked of it: a run that finds nothing to do needs none."""
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

    def fresh() -> SparkSession:
        new = spark.newSession() if is_classic(spark) else _connect_session()
        if new is None:
            return spark
        _apply(new, _carried(spark))
        return new

    return fresh


def _carried(spark: SparkSession) -> dict[str, str]:
    """What every session of an application says alike."""
    found = {key: spark.conf.get(key, None) for key in (*MEANING, SINGLE_DRIVER)}
    return {key: value for key, value in found.items() if value is not None}


def _connect_session() -> SparkSession | None:
    url = os.environ.get("SPARK_REMOTE")
    if not url or url.startswith("local"):
        return None
    from pyspark.sql import SparkSession

    return SparkSession.builder.remote(url).create()


def is_databricks() -> bool:
    """Whether the platform is Databricks, which commits to its stores by itself."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def is_classic(spark: SparkSession) -> bool:
    """Whether the session runs in this application's own JVM, not over Spark Connect."""
    from pyspark.sql.utils import is_remote

    return not is_remote() and hasattr(spark, "_jsparkSession")


def stop() -> None:
    """Stops the session of this process and its JVM; nothing where there is none or a platform gave it."""
    spark = _active()
    if spark is None or _is_given():
        return
    gateway = getattr(spark.sparkContext, "_gateway", None)
    spark.stop()
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None:
        return
    from pyspark import SparkContext

    gateway.shutdown()
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    SparkContext._gateway = None
    SparkContext._jvm = None


def is_gone() -> bool:
    """Whether the JVM of this process' session ended by itself: killed, or out of memory."""
    try:
        from py4j.protocol import Py4JError
        from pyspark import SparkContext
    except ImportError:
        return False
    gateway = SparkContext._gateway
    if gateway is None:
        return False
    process = getattr(gateway, "proc", None)
    if process is not None:
        # Its connections break a moment before the process is seen to have ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_SECONDS)
        return process.poll() is not None
    try:
        gateway.jvm.System.currentTimeMillis()
    except (OSError, Py4JError):
        return True
    return False


def forget() -> None:
    """Let go of a session whose JVM is gone, so that the next `session` starts another; one that answers no more is ended first."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    abandon()
    with contextlib.suppress(Exception):  # nobody answers any more
        SparkContext._gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


_CANCELLED = threading.Event()


def is_cancelling() -> bool:
    """Whether jobs of this process were cancelled because it is to end: what fails from then on is no fault of its table."""
    return _CANCELLED.is_set()


@contextlib.contextmanager
def cancelling(spark: SparkSession, stop: threading.Event) -> Iterator[threading.Event]:
    """When `stop` is set and the block has not ended `GRACE_SECONDS` later, its Spark jobs are cancelled, so that it ends.

    What a cancelled statement leads to is then no error: a statement commits or it does not, and the next start does it again.
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
        log.info("what was still being done was left, and is done at the next start (%s)", type(error).__name__)
    finally:
        ended.set()


def abandon() -> None:
    """End the JVM that this process started, whatever it is at: each call that waits for it fails, and every commit is in its
    table or not."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()
        process.wait()


def submitter() -> int | None:
    """The process of the spark-submit that started this one and holds its session, if there is one."""
    return os.getppid() if os.environ.get("PYSPARK_GATEWAY_PORT") else None


def _folder() -> Path:
    """Where Spark and its JVM keep what they need while this process lives."""
    return _scratch() / f"spark-{os.getpid()}.tmp"


def _end(owner: int) -> None:
    """End the JVM with this process, and remove what it left: every commit that counts is in a table by now."""
    if os.getpid() == owner:
        abandon()
        shutil.rmtree(_folder(), ignore_errors=True)


def log_file() -> Path:
    """The file that holds the log of the Spark that this process starts."""
    return _scratch() / f"spark-{os.getpid()}.log"


def _active() -> SparkSession | None:
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise errors.SettingsError(
            "Spark is not installed here: pip install 'mongo-medallion[spark]' (on Databricks it is there)"
        ) from None
    # A thread that Spark's did not start has no active session, though the process has one.
    return SparkSession.getActiveSession() or (SparkSession._instantiatedSession if _has_context() else None)


def _has_context() -> bool:
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def _is_given() -> bool:
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


def _given(name: str, store: stores.Store) -> SparkSession:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName(name).getOrCreate()
    if is_classic(spark) and not is_databricks():
        _check_delta(spark)
        _add_log_store(spark, store)
        spark.sparkContext.setLogLevel("ERROR")
    if not is_databricks():
        _ship_packages(spark)
    return spark


def _add_log_store(spark: SparkSession, store: stores.Store) -> None:
    """Give a driver that was started by somebody else our log stores, before Delta opens a table; what it names itself stays."""
    wanted = {name: value for name, value in store.conf.items() if name.startswith("spark.delta.logStore.")}
    context: Any = spark.sparkContext
    loader = context._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    with contextlib.suppress(Exception):  # another Spark may load classes in another way: then its own log store stays
        loader.addURL(context._jvm.java.net.URL(log_store.JAR.resolve().as_uri()))
        for name, value in wanted.items():
            context._jvm.java.lang.Class.forName(value, False, loader)
            if not context._jsc.sc().conf().contains(name):
                context._jsc.sc().conf().set(name, value)


def _ship_packages(spark: SparkSession) -> None:
    """Gives the executors the packages of a plain checkout; those of an installed wheel they have."""
    if _is_installed():
        return
    archive = _scratch() / f"packages-{os.getpid()}.zip"
    with zipfile.ZipFile(archive, "w") as packages:
        for package in ("cdc_core", "pipelines"):
            for file in sorted((ROOT / package).rglob("*.py")):
                packages.write(file, file.relative_to(ROOT))
    if is_classic(spark):
        spark.sparkContext.addPyFile(str(archive))
    else:
        spark.addArtifacts(str(archive), pyfile=True)


def _is_installed() -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(ROOT.parts)


def is_local(spark: SparkSession) -> bool:
    """Whether driver and executors are one process."""
    return is_classic(spark) and spark.sparkContext.master.startswith("local[")


def _check_delta(spark: SparkSession) -> None:
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        jvm.java.lang.Class.forName(EXTENSION, False, loader)
    except Exception:
        present = False
    else:
        present = True
    if not present or EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
        missing = "jar" if not present else "session extension"
        raise errors.SettingsError(
            f"this Spark has no Delta ({missing} missing): "
            "spark-submit --properties-file conf/spark-defaults.conf names what it needs"
        )


def _local(
    name: str, *, master: str | None, conf: Mapping[str, str], store: stores.Store, profile: Mapping[str, str]
) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if not _is_installed():
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    chosen = {**store.conf, **_defaults(), **conf}
    packages = (*store.packages, *filter(None, chosen.pop("spark.jars.packages", "").split(",")))
    given = [jar for jar in chosen.pop("spark.jars", "").split(",") if jar]
    with _jars(packages, store.excludes) as jars:
        settings = {
            **LOCAL,
            **MEANING,
            **profile,
            "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir(), "medallion-no-warehouse")),
            **jars,
            "spark.jars": ",".join([str(log_store.JAR), *given, *filter(None, [jars.get("spark.jars")])]),
            **chosen,
            "spark.master": master or chosen.get("spark.master", "local[*]"),
            "spark.app.name": name,
        }
        _folder().mkdir(exist_ok=True)
        settings = {"spark.local.dir": str(_folder()), **settings}
        java = f"-Djava.io.tmpdir={_folder()} {_startable(settings['spark.driver.extraJavaOptions'])}"
        settings["spark.driver.extraJavaOptions"] = java
        atexit.register(_end, os.getpid())
        spark_conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        with log_file().open("wb") as said:
            try:
                gateway = launch_gateway(spark_conf, _Launch(stdout=said, stderr=said))
            except (PySparkRuntimeError, OSError) as error:
                raise _why_not() from error
        with _interrupts_as_they_are():
            context = SparkContext(conf=SparkConf(loadDefaults=False).setAll(list(settings.items())), gateway=gateway)
        _end_without_traceback(context)
        spark = SparkSession.builder.getOrCreate()
        _remember_jars(spark, packages, given)
    return spark


def _defaults() -> dict[str, str]:
    """The settings of `SPARK_CONF_DIR/spark-defaults.conf`; none where the variable is not set."""
    folder = os.environ.get("SPARK_CONF_DIR")
    if not folder or not Path(folder, "spark-defaults.conf").is_file():
        return {}
    lines = Path(folder, "spark-defaults.conf").read_text(encoding="utf-8").splitlines()
    pairs = (
        re.split(r"[\s=]+", line.strip(), maxsplit=1) for line in lines if line.strip() and not line.strip().startswith("#")
    )
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _startable(options: str) -> str:
    """A JVM's options without a collector where the environment names one, as it does in many containers: a JVM that is given
    two does not start."""
    environment = " ".join(os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"))
    if not _COLLECTORS.search(environment):
        return options
    return _COLLECTORS.sub("", options)


@contextlib.contextmanager
def _interrupts_as_they_are() -> Iterator[None]:
    """Takes back PySpark's own handler of Ctrl-C, which cancels every job: what an interrupt means, commands say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_without_traceback(context: Any) -> None:
    """The server of accumulators shows a traceback for each connection that the JVM's end breaks: the command says it in a line."""

    def told(request: object, address: object) -> None:
        log.debug("a connection of accumulators broke", exc_info=True)

    with contextlib.suppress(AttributeError):
        context._accumulatorServer.handle_error = told


def _apply(spark: SparkSession, conf: Mapping[str, str]) -> None:
    """Sets what a running session lets one set, and leaves what it already says."""
    for key, value in conf.items():
        if spark.conf.get(key, None) == value:
            continue
        if key == SINGLE_DRIVER or spark.conf.isModifiable(key):
            # Serverless compute refuses settings that it decides on itself, as this project would.
            with contextlib.suppress(_refused()) if key not in NEEDED else contextlib.nullcontext():
                spark.conf.set(key, value)


def _refused() -> type[Exception]:
    from pyspark.errors import PySparkException

    return PySparkException


class _Launch(dict[str, Any]):
    """Options of the JVM's start. The JVM ignores SIGINT, as PySpark wants, and SIGTERM.

    A signal to the whole process group or service is then handled by the Python side, which ends the JVM by
    closing its input when the last commit is through; so does the end of the Python side, however it comes.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _ignoring_sigterm(value) if key == "preexec_fn" else value)


def _ignoring_sigterm(first: Callable[[], None]) -> Callable[[], None]:
    def prepare() -> None:
        first()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    return prepare


def _scratch() -> Path:
    """A folder of this user's for what lives as long as a process; what gone ones left is removed."""
    folder = Path(tempfile.gettempdir(), f"medallion-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for old in folder.glob("*-*.*"):
        number = old.stem.rpartition("-")[2]
        if number.isdigit() and not Path("/proc", number).exists():
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
    return folder


def _why_not() -> errors.MedallionError:
    """Why the JVM did not start, in one line: no Java, an old one, no jars; else the end of its log."""
    how = "install one (Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless) or set JAVA_HOME"
    version = _java_version()
    if version is None:
        return errors.DecisionNeeded(f"Spark needs Java {JAVA_NEEDED}, and there is none: {how}")
    if version < JAVA_NEEDED:
        return errors.DecisionNeeded(f"Spark needs Java {JAVA_NEEDED} or later, and this is Java {version}: {how}")
    told = log_file().read_text(errors="replace") if log_file().exists() else ""
    if "unresolved dependenc" in told or "FAILED DOWNLOADS" in told:
        return errors.Temporary(
            f"Delta's jars could not be downloaded from Maven Central: the first start needs the network (log: {log_file()})"
        )
    last = next((line.strip() for line in reversed(told.splitlines()) if line.strip()), "no output")
    return errors.DecisionNeeded(f"Spark did not start: {last} (log: {log_file()})")


def _java_version() -> int | None:
    """The feature version of the Java that Spark would take, None where there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return None
    try:
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr
    except OSError:
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', shown)
    return int(found.group(1)) if found else None


@contextlib.contextmanager
def _jars(packages: Sequence[str], excludes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Delta's jars and those of `packages` as this machine resolved them last, or the packages to resolve (some seconds more).

    Two processes that fill one Ivy cache break each other's downloads: the second waits, and finds the jars.
    """
    with contextlib.ExitStack() as stack:
        if not _jars_of_last_time(packages):
            stack.enter_context(_alone(_remembered_jars(()).with_suffix(".lock")))
        jars = _jars_of_last_time(packages)
        wanted = {"spark.jars.packages": ",".join([_delta_package(), *packages])}
        wanted["spark.jars.excludes"] = ",".join([*BROUGHT_BY_SPARK, *excludes])
        yield {"spark.jars": ",".join(jars)} if jars else wanted


def resolved_jars() -> list[str]:
    """Delta's jars as this machine resolved them last; none before its first session."""
    return _jars_of_last_time(())


# What Delta's packages name of these, Spark brings itself, and its own are loaded first: 70 of 87 MB to download in vain.
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
"""What is left of Delta's jars then: each that a session names is copied at its start."""


def downloaded_megabytes() -> float | None:
    """How much of Delta's jars a first start has fetched so far; None where they are there already."""
    if _jars_of_last_time(()):
        return None
    cache = next((folder for folder in Path.home().glob(".ivy2*/cache")), None)
    found = (file for file in cache.rglob("*.jar*") if file.is_file()) if cache is not None else ()
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in found) / 1e6
    return None


def _delta_package() -> str:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    return configure_spark_with_delta_pip(SparkSession.Builder())._options["spark.jars.packages"]


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """What one process of this machine does at a time; where no lock can be had, it is done without."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _jars_of_last_time(packages: Sequence[str]) -> list[str]:
    remembered = _remembered_jars(packages)
    if not remembered.exists():
        return []
    jars = [jar for jar in remembered.read_text().splitlines() if packages or Path(jar).name.startswith(NEEDED_JARS)]
    return jars if all(Path(jar).exists() for jar in jars) else []


def _remembered_jars(packages: Sequence[str]) -> Path:
    from importlib import metadata

    versions = f"{metadata.version('pyspark')}-{metadata.version('delta-spark')}"
    more = f"-{hashlib.sha256(','.join(packages).encode()).hexdigest()[:12]}" if packages else ""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mongo-medallion", f"delta-jars-{versions}{more}.txt")


def _remember_jars(spark: SparkSession, packages: Sequence[str], given: Sequence[str]) -> None:
    conf = spark.sparkContext.getConf()
    if conf.get("spark.jars.packages") is None:
        return
    own = {str(log_store.JAR), *given}
    jars = [jar.removeprefix("file://") for jar in (conf.get("spark.jars") or "").split(",") if jar]
    jars = [jar for jar in jars if jar not in own]
    with contextlib.suppress(OSError):
        path = _remembered_jars(packages)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text("\n".join(jars))
        draft.replace(path)
