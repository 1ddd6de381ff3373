"""The JVM of this process: started on a plain machine, ended with its process, and tested for whether it is gone.

Spark's log goes to a file (`log_file()`), so that a terminal shows only the output of the commands.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import re
import select
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
"""The class archive for JVMs of this environment, with the classes that Spark loads (`operations.class_archive`)."""

ARCHIVING, _SHARED = "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="
_ARCHIVE_OPTIONS = (ARCHIVING, _SHARED, "-Xshare:", "-XX:AOT")
"""JVM options about class archives. Where a user gave one, no archive is added: a JVM does not start with two archives, or with
`-Xshare:on` and an archive that does not fit."""
_CLASS_PATH = "spark.driver.extraClassPath"
START_BYTES = 1 << 20
"""What a JVM writes into the folder of temporary files while it starts, or more."""
END_SECONDS = 2.0
"""The time in which a JVM answers, and in which it may end after its connections broke."""
KILLED_SECONDS = 10.0
"""The time to wait for the end of a killed JVM: a large one takes long to free its memory."""


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
    """Start a JVM with a session, Delta's jars, and the packages and settings of `store`; its log is `log_file()`.

    `profile` overrides the settings of every local session; those of the user override `profile`. `hadoop`, and other settings that may be
    secrets, reach the JVM when it runs, and are not on its command line, which every user of the machine can read. Raises as
    `session.session`.
    """
    import pyspark
    from pyspark.sql import SparkSession

    from pipelines.spark import jvm_names

    # PySpark includes its own Spark. A Spark of another version in `SPARK_HOME` does not work with it or with this Delta.
    core_jars = Path(os.environ.get("SPARK_HOME", ""), "jars").glob(f"spark-core_*-{pyspark.__version__}*.jar")
    if (bundled_jars := Path(pyspark.__file__).parent / "jars").is_dir() and not any(core_jars):
        os.environ["SPARK_HOME"] = str(bundled_jars.parent)
    if not is_installed():
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    user_settings = {**store.conf, **spark_conf.defaults(), **conf}
    # PySpark only reads the variable; it is `spark-submit` that knows the setting, which comes first there, too.
    tasks_python = user_settings.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    os.environ["PYSPARK_PYTHON"] = tasks_python or sys.executable
    packages = (*store.packages, *filter(None, user_settings.pop("spark.jars.packages", "").split(",")))
    user_jars = [jar for jar in user_settings.pop("spark.jars", "").split(",") if jar]
    user_settings["spark.master"] = master or user_settings.get("spark.master", "local[*]")
    with delta_jars.settings(packages, store.excludes) as jar_settings:
        settings = _settings(name, user_settings, user_jars, jar_settings, profile)
        spark_conf.check_catalog(catalog, settings)
        _folder().mkdir(exist_ok=True)
        _check_room(_folder())
        atexit.register(_end, os.getpid())
        context = _context(settings, hadoop)
        _end_without_traceback(context)
        jvm_names.remember(context._jvm)
        _check_session_settings(context, user_settings)
        spark = SparkSession.builder.getOrCreate()
        delta_jars.remember(spark, packages, user_jars)
    return spark


def _settings(
    name: str, user_settings: Mapping[str, str], jars: Sequence[str], resolved: Mapping[str, str], profile: Mapping[str, str]
) -> dict[str, str]:
    """The settings of a new JVM. Those of the user, in `user_settings`, override all others but the application's name."""
    # Executors on other machines would need the jar of the local file system before all other jars.
    is_alone = re.fullmatch(r"local(\[.*\])?", user_settings["spark.master"]) is not None and os.pathsep not in str(
        log_store.FILES_JAR
    )
    settings = {
        **spark_conf.LOCAL,
        **(spark_conf.LOOPBACK if user_settings["spark.master"].startswith("local") else {}),
        **(log_store.FILE_SYSTEM if is_alone else {}),
        **spark_conf.REQUIRED,
        **profile,
        "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir(), "medallion-no-warehouse")),
        **resolved,
        "spark.jars": ",".join([str(log_store.JAR), *jars, *filter(None, [resolved.get("spark.jars")])]),
        **user_settings,
        "spark.app.name": name,
    }
    if spark_conf.EXTENSION not in settings["spark.sql.extensions"]:  # those of the user come on top
        settings["spark.sql.extensions"] = f"{spark_conf.EXTENSION},{settings['spark.sql.extensions']}"
    if is_alone:
        paths = [str(log_store.FILES_JAR), *filter(None, [user_settings.get(_CLASS_PATH)])]
        settings[_CLASS_PATH] = os.pathsep.join(paths)
    # Files of Spark and its JVM are in a folder that is removed at the end of this process.
    settings = {"spark.local.dir": str(_folder()), **settings}
    java = spark_conf.startable(settings["spark.driver.extraJavaOptions"])
    option_texts = (java, settings.get("spark.driver.defaultJavaOptions", ""), spark_conf.of_environment())
    if "-Djava.io.tmpdir=" not in java:
        _check_executable(_folder().parent)
    java = _with_class_archive(java, option_texts)
    settings["spark.driver.extraJavaOptions"] = f'"-Djava.io.tmpdir={_folder()}" {spark_conf.LANGUAGE} {java}'
    return settings


def _check_executable(folder: Path) -> None:
    """Raise `DecisionNeeded` where no library can be loaded from a folder: Spark unpacks Parquet's compression there at its first query."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise errors.DecisionNeeded(
            f"{folder} is on a file system that is mounted with noexec, and Spark loads libraries from there: set TMPDIR to a folder on "
            "another one"
        )


def _check_room(folder: Path) -> None:
    """Raise `OSError` on a full disk: a JVM that cannot write the file with its port does not end, and PySpark waits for it for ever."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(START_BYTES))
        file.flush()


def _with_class_archive(java: str, option_texts: Sequence[str]) -> str:
    """JVM options with the class archive of this environment, if there is one and none of the options `option_texts` is about archives."""
    # A path with the path separator would count as two archives, with which a JVM does not start.
    is_usable = CLASS_ARCHIVE.is_file() and os.pathsep not in str(CLASS_ARCHIVE)
    if not is_usable or any(option in options for option in _ARCHIVE_OPTIONS for options in option_texts):
        return java
    return f'"{_SHARED}{CLASS_ARCHIVE}" {java}'


def _context(settings: Mapping[str, str], hadoop: Mapping[str, str]) -> SparkContext:
    """Start a JVM with these settings; its SparkContext."""
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    hidden_names = set(filter(spark_conf.is_confidential, settings)) - set(log_store.FILE_SYSTEM)
    launch_conf = SparkConf(loadDefaults=False).setAll([item for item in settings.items() if item[0] not in hidden_names])
    with contextlib.suppress(FileNotFoundError):  # the log of a JVM that ended, which `SparkLost` names
        log_file().replace(log_file().with_name(f"spark-before-{os.getpid()}.log"))
    with log_file().open("wb") as output:
        launch = _Launch(stdout=output, stderr=output, cwd=_working_directory())
        try:
            gateway = launch_gateway(launch_conf, launch)
        except (PySparkRuntimeError, OSError) as error:
            raise _why_not(error) from error
        except BaseException:
            launch.kill()
            raise
        finally:
            launch.close()
    with _interrupts_as_they_are():
        # Without `spark.jars`: the JVM got it at its start, and has added the jars of the packages.
        runtime_settings = {name: value for name, value in settings.items() if name != "spark.jars"}
        full_conf = SparkConf(loadDefaults=False).setAll(list({**hadoop, **runtime_settings}.items()))
        return SparkContext(conf=full_conf, gateway=gateway)


def _check_session_settings(context: SparkContext, user_settings: Mapping[str, str]) -> None:
    """Let Spark refuse values, as of `spark.sql.shuffle.partitions=abc`, before there is a session.

    A session reads them at its first use. PySpark then asks it how to show the refusal, which is refused, too, a few hundred times over.
    """
    from pipelines.spark import jvm_names

    session_settings = jvm_names.known(context._jvm, "org.apache.spark.sql.internal.SQLConf")()
    for name, value in user_settings.items():
        session_settings.setConfString(name, value)


def _working_directory() -> str | None:
    """The JVM's working directory: None for that of this process, or another one where it was deleted, because no JVM starts there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return str(_folder())
    return None


def _folder() -> Path:
    """The folder of temporary files of Spark and its JVM."""
    return scratch.folder() / f"spark-{os.getpid()}.tmp"


def _end(owner: int) -> None:
    """End the JVM at the exit of the process `owner`, and remove its temporary files. A forked child does nothing."""
    if os.getpid() == owner:
        abandon()
        shutil.rmtree(_folder(), ignore_errors=True)


def log_file() -> Path:
    """The file with the log of this process's Spark."""
    return scratch.folder() / f"spark-{os.getpid()}.log"


def lacks_local_folder() -> bool:
    """Whether this process's Spark has ended for want of a folder in `spark.local.dir`, which only its log says; not on a full disk, which
    is temporary."""
    log = log_file()
    text = log.read_text(errors="replace") if log.exists() else ""
    return "Failed to create any local dir" in text and "No space left" not in text


def is_installed() -> bool:
    """Whether the packages come from an installed wheel, which executors have too, and not from a checkout."""
    return not {"site-packages", "dist-packages"}.isdisjoint(ROOT.parts)


def is_gone() -> bool:
    """Whether the JVM of this process's session has ended or broke its connections: killed, or out of memory."""
    try:
        from pyspark import SparkContext
    except ImportError:
        return False
    gateway = SparkContext._gateway
    if gateway is None:
        return False
    process = getattr(gateway, "proc", None)
    if process is not None and process.poll() is not None:
        return True
    answers = _answers(gateway)
    if answers or process is None:
        return answers is False
    # The connections break shortly before the process ends.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_SECONDS)
    return process.poll() is not None


def _answers(gateway: Any) -> bool | None:
    """Whether a JVM answers; False where its connections are broken, None where it is silent for `END_SECONDS`."""
    from py4j.protocol import Py4JError

    answers: list[bool] = []

    def call() -> None:
        try:
            gateway.jvm.System.currentTimeMillis()
            answers.append(True)
        except (OSError, Py4JError):
            answers.append(False)

    # In a thread: a JVM that is stopped, or collects garbage, does not answer at all.
    thread = threading.Thread(target=call, name="medallion-jvm", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads
        thread.start()
        thread.join(END_SECONDS)
    return answers[0] if answers else None


def forget() -> None:
    """Forget a session whose JVM is gone, so that the next `session` starts another. Ends a JVM that does not answer."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    abandon()
    with contextlib.suppress(Exception):  # the JVM does not answer
        SparkContext._gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    shutil.rmtree(_folder(), ignore_errors=True)  # the rows that it had spilled; a service may lose a JVM each night


def abandon() -> None:
    """Kill the JVM that this process started. Calls that wait for it fail; each commit is in its table completely or not at all."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()
        # With a time limit: the wait holds a lock, on which a signal handler that kills the JVM, too, would block.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILLED_SECONDS)


@contextlib.contextmanager
def _interrupts_as_they_are() -> Iterator[None]:
    """Restore the handler of Ctrl-C after the block. PySpark replaces it by one that cancels all jobs; the commands have their own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end_without_traceback(context: Any) -> None:
    """Log at DEBUG the tracebacks that PySpark and Py4J print for each connection that breaks at the end of the JVM.

    Py4J logs to the root logger, also from the thread that reports unused objects to the JVM, which may run while the process ends. A
    caller that waits for an answer still gets the error as an exception.
    """

    def ignore(request: object, address: object) -> None:
        log.debug("a connection of accumulators broke", exc_info=True)

    with contextlib.suppress(AttributeError):
        context._accumulatorServer.handle_error = ignore
    logging.getLogger().addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """A filter of the root logger: false for Py4J's record that a connection broke, which is logged at DEBUG instead."""
    if record.msg != "Exception while sending command.":
        return True
    log.debug("a connection to the JVM broke", exc_info=record.exc_info)
    return False


class _Launch(dict[str, Any]):
    """Options of `Popen` for the JVM, which PySpark completes: `env` and `preexec_fn` are adapted here.

    The JVM ignores SIGINT, as PySpark sets it, and SIGTERM. A signal to the whole process group or service is then handled by Python, which
    ends the JVM by closing its input after the last commit. The JVM also ends when the Python process ends. The JVM reads file names
    outside of ASCII, and reports system errors in English, which `failures` compares.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._read, self._write = os.pipe()

    def kill(self) -> None:
        """Kill a JVM whose start was interrupted: PySpark has forgotten it, and it would run for ever."""
        if "preexec_fn" in self and select.select([self._read], [], [], 1)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(os.read(self._read, 20)), signal.SIGKILL)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "env":
            value = {**value, "LC_MESSAGES": "C"}
            if locale := value.pop("LC_ALL", ""):  # it would override LC_MESSAGES
                # In these locales Python uses UTF-8 by itself, but Java would find no file with a name outside of ASCII.
                value["LC_CTYPE"] = "C.UTF-8" if locale in ("C", "POSIX") else locale
        super().__setitem__(key, self._in_child(value) if key == "preexec_fn" else value)

    def _in_child(self, first: Callable[[], None]) -> Callable[[], None]:
        def prepare() -> None:
            first()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(self._write, str(os.getpid()).encode())  # Spark's scripts become the JVM, by exec

        return prepare


def java_class(spark: SparkSession, name: str) -> Any:
    """A class of the session's JVM by its full name, cached. A missing class gives an object that raises `TypeError` when it is called.

    `jvm.org.apache…` would ask the JVM for a class at each dot, which searches all of Spark's jars and takes milliseconds.
    """
    from pipelines.spark import jvm_names

    return jvm_names.known(spark._jvm, name)


_SCARCE = (
    os.strerror(errno.EAGAIN),
    os.strerror(errno.ENOMEM),
    "unable to create native thread",
    "insufficient memory for the Java Runtime",
)
"""What the system, a shell or a JVM says where it has no process, thread or memory left."""

_NO_REASON = re.compile(
    r"at |\.\.\. |WARNING: |\S.* VM warning: |(NOTE: )?Picked up |\[[^]]*\]\[(info|warning)"
    r"|Using Spark's default log4j profile|Setting default log level|To adjust logging level|\S+ \S+ (INFO|WARN) "
    r"|Error: Could not create the Java Virtual Machine|Error: A fatal exception has occurred"
)
"""The beginnings of lines in a JVM's output that are no reason why it ended: of a stack trace, warnings, what Java and Spark say at every
start, and what follows the reason."""

_NO_COMMAND = "CMD: bad array subscript"
"""The end of the line of Spark's script where Java printed no command; the reason is before it."""

_REFUSALS = ("Invalid ", "Unrecognized ", "Unsupported ", "Conflicting ", "Error: Invalid ", "Improperly ")
"""The beginnings of what Java says of its options."""

WHERE_SETTINGS_ARE = (
    "correct the settings of Spark: --conf, SPARK_CONF_DIR/spark-defaults.conf, or JVM options in the environment"
)
"""What to do where Spark or its JVM does not start with a setting."""


def _why_not(error: Exception) -> errors.MedallionError:
    """The error for a JVM that did not start: no processes or memory left, no Java, an old one, no jars; else the last line of its log."""
    output = log_file().read_text(errors="replace") if log_file().exists() else ""
    output = output.partition("\nUsage: spark-submit")[0]  # which follows the reason
    lines = [line.strip() for line in output.splitlines()]
    # First, because then Java cannot be asked for its version either.
    if scarcity := next((line for line in (str(error), *lines) if any(text in line for text in _SCARCE)), ""):
        return errors.Temporary(
            f"Spark did not start: {scarcity} (log: {log_file()}). The system has no memory or processes left: free some, raise "
            "this user's limits, or lower spark.driver.memory, and start again"
        )
    advice = (
        "install one (Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless) or set JAVA_HOME to the folder of one"
    )
    version = _java_version()
    if version is None:
        home = os.environ.get("JAVA_HOME")
        place = f"there is none in JAVA_HOME={home}" if home else "there is none"
        return errors.DecisionNeeded(f"Spark needs Java {JAVA_NEEDED} or later, but {place}: {advice}")
    if version < JAVA_NEEDED:
        return errors.DecisionNeeded(f"Spark needs Java {JAVA_NEEDED} or later, but this is Java {version}: {advice}")
    if "unresolved dependenc" in output or "FAILED DOWNLOADS" in output:
        return errors.Temporary(
            "Delta's jars could not be downloaded from Maven Central: the first start needs network access (log: "
            f"{log_file()})"
        )
    # Skips the lines of a stack trace below its message, and what Spark's script says where Java printed it no command.
    reasons = (line for line in reversed(lines) if line and not _NO_REASON.match(line) and not line.endswith(_NO_COMMAND))
    reason = next(reasons, "")
    if isinstance(error, OSError):
        reason = reason or error.strerror or type(error).__name__
    if not reason:
        return errors.SparkLost(
            f"Spark's JVM ended while it started, and its log says no reason ({log_file()}): something killed it, for example the "
            "system because memory was short. Start again"
        )
    remedy = WHERE_SETTINGS_ARE if reason.startswith(_REFUSALS) else "correct that, and start again"
    return errors.DecisionNeeded(f"Spark did not start: {reason} (log: {log_file()}); {remedy}")


def _java_version() -> int | None:
    """The feature version of the Java that Spark would use; None where there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return None
    try:
        version_text = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False, cwd=_working_directory()
        ).stderr
    except OSError:
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', version_text)
    return int(match.group(1)) if match else None
