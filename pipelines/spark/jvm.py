"""The JVM of this process: started quietly on a plain machine, ended with its process, and whether it is gone.

Spark's log goes to a file (`log_file()`), so that a terminal shows what the commands say and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core import errors
from pipelines.spark import conf as spark_conf
from pipelines.spark import delta_jars, log_store, scratch, stores

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]

JAVA_NEEDED = 17
CLASS_ARCHIVE = Path(sys.prefix, "share", "mongo-medallion", "spark-classes.jsa")
"""Where the classes that Spark loads are archived, for JVMs of this environment (`operations.class_archive`)."""

ARCHIVING, _SHARED = "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="
_OF_ARCHIVES = (ARCHIVING, _SHARED, "-Xshare:", "-XX:AOT")
"""Options about class archives. Where somebody gave one, none is added: a JVM with two archives does not start, nor does one that is
told `on` with an archive that does not fit."""
_CLASS_PATH = "spark.driver.extraClassPath"
END_SECONDS = 2.0
"""How long a JVM whose connections broke may take to end."""
KILLED_SECONDS = 10.0
"""How long one that was killed is waited for: a large one gives its memory back before it is gone."""


def launch(
    name: str,
    *,
    master: str | None,
    conf: Mapping[str, str],
    store: stores.ObjectStore,
    hadoop: Mapping[str, str],
    profile: Mapping[str, str],
    catalog: str | None,
) -> SparkSession:
    """A session on a JVM of its own, with Delta's jars and what `store` needs; its log is `log_file()`.

    `profile` is over what every session of one machine has, and below what the user chose. `hadoop` may hold secrets: the
    JVM gets it when it runs, and not on its command line, which every user of the machine sees; so it is with what a
    user chose that may be one. Raises `SettingsError` where the settings do not give `catalog`.
    """
    import pyspark
    from pyspark.sql import SparkSession

    from pipelines.spark import jvm_names

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # PySpark brings its Spark; one of another version that `SPARK_HOME` names does not understand it, or has no Delta for it.
    named = Path(os.environ.get("SPARK_HOME", ""), "jars").glob(f"spark-core_*-{pyspark.__version__}*.jar")
    if (brought := Path(pyspark.__file__).parent / "jars").is_dir() and not any(named):
        os.environ["SPARK_HOME"] = str(brought.parent)
    if not is_installed():
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    chosen = {**store.conf, **spark_conf.defaults(), **conf}
    packages = (*store.packages, *filter(None, chosen.pop("spark.jars.packages", "").split(",")))
    given = [jar for jar in chosen.pop("spark.jars", "").split(",") if jar]
    chosen["spark.master"] = master or chosen.get("spark.master", "local[*]")
    with delta_jars.settings(packages, store.excludes) as resolved:
        settings = _settings(name, chosen, given, resolved, profile)
        spark_conf.check_catalog(catalog, settings)
        _folder().mkdir(exist_ok=True)
        atexit.register(_end, os.getpid())
        context = _context(settings, hadoop)
        _end_without_traceback(context)
        jvm_names.remember(context._jvm)
        spark = SparkSession.builder.getOrCreate()
        delta_jars.remember(spark, packages, given)
    return spark


def _settings(
    name: str, chosen: Mapping[str, str], given: Sequence[str], resolved: Mapping[str, str], profile: Mapping[str, str]
) -> dict[str, str]:
    """What the JVM is started with: what a user chose is over everything else, but for where Spark keeps its files."""
    # Executors elsewhere would have to have the jar of our local file system before anything else.
    is_alone = re.fullmatch(r"local(\[.*\])?", chosen["spark.master"]) is not None and os.pathsep not in str(
        log_store.FILES_JAR
    )
    settings = {
        **spark_conf.LOCAL,
        **(spark_conf.LOOPBACK if chosen["spark.master"].startswith("local") else {}),
        **(log_store.FILE_SYSTEM if is_alone else {}),
        **spark_conf.REQUIRED,
        **profile,
        "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir(), "medallion-no-warehouse")),
        **resolved,
        "spark.jars": ",".join([str(log_store.JAR), *given, *filter(None, [resolved.get("spark.jars")])]),
        **chosen,
        "spark.app.name": name,
    }
    if is_alone:
        paths = [str(log_store.FILES_JAR), *filter(None, [chosen.get(_CLASS_PATH)])]
        settings[_CLASS_PATH] = os.pathsep.join(paths)
    # Spark and its JVM leave nothing behind: what they write lies in a folder that goes with this process.
    settings = {"spark.local.dir": str(_folder()), **settings}
    java = spark_conf.startable(settings["spark.driver.extraJavaOptions"])
    given = (java, settings.get("spark.driver.defaultJavaOptions", ""), spark_conf.of_environment())
    java = _with_classes(java, given)
    settings["spark.driver.extraJavaOptions"] = f'"-Djava.io.tmpdir={_folder()}" {spark_conf.LANGUAGE} {java}'
    return settings


def _with_classes(java: str, given: Sequence[str]) -> str:
    """A JVM's options with the archive of this environment, where there is one, and none of all that are `given` is of archives."""
    # A path with the separator of paths would be two archives, with which a JVM does not start.
    is_usable = CLASS_ARCHIVE.is_file() and os.pathsep not in str(CLASS_ARCHIVE)
    if not is_usable or any(own in each for own in _OF_ARCHIVES for each in given):
        return java
    return f'"{_SHARED}{CLASS_ARCHIVE}" {java}'


def _context(settings: Mapping[str, str], hadoop: Mapping[str, str]) -> SparkContext:
    """The context of a JVM that is started now."""
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    hidden = set(filter(spark_conf.is_confidential, settings)) - set(log_store.FILE_SYSTEM)
    launch_conf = SparkConf(loadDefaults=False).setAll([each for each in settings.items() if each[0] not in hidden])
    with log_file().open("wb") as said:
        try:
            gateway = launch_gateway(launch_conf, _Launch(stdout=said, stderr=said, cwd=_working_directory()))
        except (PySparkRuntimeError, OSError) as error:
            raise _why_not(error) from error
    with _interrupts_as_they_are():
        # Not the jars: the JVM was given these, and has added those of the packages to them.
        rest = {name: value for name, value in settings.items() if name != "spark.jars"}
        whole = SparkConf(loadDefaults=False).setAll(list({**hadoop, **rest}.items()))
        return SparkContext(conf=whole, gateway=gateway)


def _working_directory() -> str | None:
    """Where the JVM is started: here, or where it keeps its files when this folder was removed, in which no JVM starts."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return str(_folder())
    return None


def _folder() -> Path:
    """Where Spark and its JVM keep what they need while this process lives."""
    return scratch.folder() / f"spark-{os.getpid()}.tmp"


def _end(owner: int) -> None:
    """End the JVM with this process, and remove what it left: every commit that counts is in a table by now."""
    if os.getpid() == owner:
        abandon()
        shutil.rmtree(_folder(), ignore_errors=True)


def log_file() -> Path:
    """The file that holds the log of the Spark that this process starts."""
    return scratch.folder() / f"spark-{os.getpid()}.log"


def is_installed() -> bool:
    """Whether this is an installed wheel, and no checkout: executors then have its packages, too."""
    return not {"site-packages", "dist-packages"}.isdisjoint(ROOT.parts)


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
    """Let go of a session whose JVM is gone, so that the next `session` starts another; a JVM that no longer answers is
    ended first."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    abandon()
    with contextlib.suppress(Exception):  # nobody answers any more
        SparkContext._gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def abandon() -> None:
    """End the JVM that this process started, whatever it is doing: calls that wait for it fail, and each commit is in
    its table as a whole or not at all."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()
        # Within a time, or it would hold a lock: who handles a signal that comes meanwhile ends the JVM, too, and would wait for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILLED_SECONDS)


@contextlib.contextmanager
def _interrupts_as_they_are() -> Iterator[None]:
    """Restore the handler of Ctrl-C that PySpark replaces by one that cancels every job: the commands decide what it
    does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_without_traceback(context: Any) -> None:
    """Log at DEBUG what PySpark and Py4J would print: a traceback for each connection that the end of the JVM breaks.

    Py4J writes its own to the root logger, also from the thread that tells the JVM of each object that is no longer used,
    which may be at work while the process ends. Whoever waits for an answer gets the error as an exception all the same.
    """

    def ignore(request: object, address: object) -> None:
        log.debug("a connection of accumulators broke", exc_info=True)

    with contextlib.suppress(AttributeError):
        context._accumulatorServer.handle_error = ignore
    logging.getLogger().addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record of the root logger is more than Py4J's word that a connection broke."""
    if record.msg != "Exception while sending command.":
        return True
    log.debug("a connection to the JVM broke", exc_info=record.exc_info)
    return False


class _Launch(dict[str, Any]):
    """Options of the JVM's start. The JVM ignores SIGINT, as PySpark wants, and SIGTERM, knows names outside ASCII, and says what the
    system says in English, by which `failures` knows it.

    A signal to the whole process group or service is then handled by the Python side, which ends the JVM by
    closing its input when the last commit is through; so does the end of the Python side, however it comes.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "env":
            value = {**value, "LC_MESSAGES": "C"}
            if signs := value.pop("LC_ALL", ""):  # it would be over the messages, too
                # Python takes UTF-8 there by itself; Java would find no folder of another name than an ASCII one.
                value["LC_CTYPE"] = "C.UTF-8" if signs in ("C", "POSIX") else signs
        super().__setitem__(key, _ignoring_sigterm(value) if key == "preexec_fn" else value)


def _ignoring_sigterm(first: Callable[[], None]) -> Callable[[], None]:
    def prepare() -> None:
        first()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    return prepare


def java_class(spark: SparkSession, name: str) -> Any:
    """A class of the session's JVM by its full name, looked up once: `jvm.org.apache…` asks for a class at each of its dots.

    Each such question looks through all of Spark's jars in vain, which takes milliseconds. Where there is no such
    class, what comes back raises `TypeError` when it is called.
    """
    from pipelines.spark import jvm_names

    return jvm_names.known(spark._jvm, name)


def _why_not(error: Exception) -> errors.MedallionError:
    """Why the JVM did not start, in one line: no Java, an old one, no jars; else the end of its log."""
    how = "install one (Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless) or set JAVA_HOME"
    version = _java_version()
    if version is None:
        return errors.DecisionNeeded(f"Spark needs Java {JAVA_NEEDED} or later, but there is none: {how}")
    if version < JAVA_NEEDED:
        return errors.DecisionNeeded(f"Spark needs Java {JAVA_NEEDED} or later, but this is Java {version}: {how}")
    output = log_file().read_text(errors="replace") if log_file().exists() else ""
    if "unresolved dependenc" in output or "FAILED DOWNLOADS" in output:
        return errors.Temporary(
            "Delta's jars could not be downloaded from Maven Central: the first start needs network access (log: "
            f"{log_file()})"
        )
    said = error.strerror if isinstance(error, OSError) else "no output"
    # Not the end of a trace, of which only its first words say something.
    lines = (line.strip() for line in reversed(output.splitlines()))
    last = next((line for line in lines if line and not line.startswith(("at ", "... "))), said)
    return errors.DecisionNeeded(f"Spark did not start: {last} (log: {log_file()})")


def _java_version() -> int | None:
    """The feature version of the Java that Spark would take, None where there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return None
    try:
        shown = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False, cwd=_working_directory()
        ).stderr
    except OSError:
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', shown)
    return int(found.group(1)) if found else None
