"""The options with which a session's JVM is started, without starting one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.errors import IllegalArgumentException

from cdc_core import errors
from pipelines.spark import conf as spark_conf
from pipelines.spark import delta_jars, jvm, log_store, scratch, stores
from pipelines.spark import failures as spark_failures
from pipelines.spark import session as sparks


class Started(Exception):
    """Raised instead of starting a JVM."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that returns the settings on the command line of the JVM that `launch` would start."""
    from pyspark import java_gateway

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))

    def launch_gateway(conf: Any, popen_kwargs: Any) -> None:
        raise Started(dict(conf.getAll()))

    monkeypatch.setattr(java_gateway, "launch_gateway", launch_gateway)

    def start(defaults: str = "", *, catalog: str | None = None, **conf: str) -> dict[str, str]:
        (tmp_path / "spark-defaults.conf").write_text(defaults)
        chosen = {name.replace("__", "."): value for name, value in conf.items()}
        with pytest.raises(Started) as said:
            jvm.launch("test", master=None, conf=chosen, store=stores.of(None), hadoop={}, profile={}, catalog=catalog)
        found: dict[str, str] = said.value.args[0]
        return found

    return start


def test_a_secret_of_the_defaults_stands_on_no_command_line(started: Any) -> None:
    shown = started("spark.hadoop.fs.s3a.secret.key hidden\nspark.ssl.keyPassword hidden\nspark.driver.memory 700m\n")
    assert shown["spark.driver.memory"] == "700m" and "hidden" not in str(shown)


def test_the_defaults_are_read_as_spark_reads_them(started: Any) -> None:
    """The format is that of Java's properties: three separators, comments, entries of several lines, and escapes."""
    shown = started(
        "# spark.a 1\n  ! spark.a 1 \\\nspark.my.c:http://host:1\nspark.my.d = a=b \nspark.my.e\ta \\\n    b,\\\r\n  c\n"
        "spark.my.f (?i)pass\\\\w\nspark.my.g\\:h \\u00e4\\\\\nspark.my.i\nspark.my.j  :  a#b\n\nspark.my.k last\\"
    )
    assert "spark.a" not in shown and {name[9:]: shown[name] for name in shown if name.startswith("spark.my.")} == {
        "c": "http://host:1",
        "d": "a=b",
        "e": "a b,c",
        "f": r"(?i)pass\w",
        "g:h": "ä\\",
        "j": "a#b",
        "k": "last",
    }


def test_defaults_that_spark_refuses_are_a_mistake_in_their_file(started: Any) -> None:
    with pytest.raises(errors.SettingsError, match=r"spark-defaults\.conf: .*\\users.*write a backslash as"):
        started(r"spark.my.folder C:\users")


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]", "yarn", "spark://host:7077"])
def test_executors_of_a_cluster_reach_the_driver(started: Any, master: str) -> None:
    shown = started(f"spark.master {master}\n")
    assert ("spark.driver.host" in shown) == ("spark.driver.bindAddress" in shown) == master.startswith("local")


def test_the_python_of_the_tasks_is_the_one_that_is_set(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`spark-submit` takes the setting before the variable. PySpark itself only reads the variable."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    started()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    monkeypatch.setenv("PYSPARK_PYTHON", "/of/the/variable")
    started()
    assert os.environ["PYSPARK_PYTHON"] == "/of/the/variable"
    started("spark.pyspark.python /of/the/setting\n")
    assert os.environ["PYSPARK_PYTHON"] == "/of/the/setting"


def test_a_catalog_that_is_not_there_or_would_be_forgotten_is_refused(started: Any) -> None:
    for catalog in ("spark_catalog", "main"):
        with pytest.raises(errors.SettingsError, match=r"lakehouse\.catalog: .*--conf"):
            jvm.launch("test", master=None, conf={}, store=stores.of(None), hadoop={}, profile={}, catalog=catalog)
    assert started(catalog="spark_catalog", spark__sql__catalogImplementation="hive")
    assert started(catalog="main", spark__sql__catalog__main="io.unitycatalog.spark.UCSingleCatalog")


@pytest.mark.parametrize("folder", ["plain", "with a space", "with:colon", "none"])
def test_the_archive_of_classes_is_named_where_a_jvm_can_take_it(
    started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    """A JVM would not start with a path of two parts, or with other options for archives."""
    archive = tmp_path / folder / "spark-classes.jsa"
    if folder != "none":
        archive.parent.mkdir()
        archive.touch()
    monkeypatch.setattr(jvm, "CLASS_ARCHIVE", archive)
    is_named = f'"-XX:SharedArchiveFile={archive}"' in started()["spark.driver.extraJavaOptions"]
    assert is_named == (folder in ("plain", "with a space"))
    for own in ("-XX:SharedArchiveFile=/mine.jsa", "-XX:ArchiveClassesAtExit=/new.jsa", "-Xshare:on", "-XX:AOTCache=/mine"):
        for name in ("spark__driver__extraJavaOptions", "spark__driver__defaultJavaOptions"):
            assert str(archive) not in started(**{name: own})["spark.driver.extraJavaOptions"]
        for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS"):
            with monkeypatch.context() as environment:
                environment.setenv(name, own)
                assert str(archive) not in started()["spark.driver.extraJavaOptions"]


def test_a_folder_of_somebody_else_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / f"medallion-{os.getuid()}"
    mine.mkdir()
    mine.chmod(0o777)
    assert stat.S_IMODE(scratch.folder().stat().st_mode) == 0o700
    mine.rmdir()
    (tmp_path / "planted").mkdir()
    mine.symlink_to(tmp_path / "planted")
    with pytest.raises(errors.DecisionNeeded, match="TMPDIR"):
        scratch.folder()
    mine.unlink()
    mine.touch()
    with pytest.raises(errors.DecisionNeeded, match="TMPDIR"):
        scratch.folder()


def test_the_log_of_the_jvm_before_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A service starts another JVM, and has logged the name of the log of the one that ended."""
    from pyspark import java_gateway

    def start(line: str) -> None:
        def launch_gateway(conf: Any, popen_kwargs: Any) -> None:
            popen_kwargs["stdout"].write(line.encode())
            raise OSError

        monkeypatch.setattr(java_gateway, "launch_gateway", launch_gateway)
        with pytest.raises(errors.DecisionNeeded):
            jvm._context({}, {})

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for line in ("first", "second", "third"):
        start(line)
    assert jvm.log_file().read_text() == "third"
    assert [each.read_text() for each in scratch.folder().glob("*.log") if each != jvm.log_file()] == ["second"]


def test_what_a_lost_jvm_had_spilled_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process lives on, for months, with one JVM after the other."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    for name in ("_gateway", "_jvm", "_active_spark_context"):
        monkeypatch.setattr(SparkContext, name, None)
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spilled = jvm._folder() / "blockmgr-1" / "shuffle_0_0_0.data"
    spilled.parent.mkdir(parents=True)
    spilled.touch()
    jvm.forget()
    assert not spilled.exists() and scratch.folder().is_dir()


def test_the_temporary_folder_is_locked_while_the_process_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """systemd-tmpfiles removes what is older than ten days, except below a folder that it cannot lock exclusively."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        cleaner = os.open(scratch.folder(), os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(cleaner)
        scratch.folder().rmdir()  # a folder that someone removed is created and locked again


def test_a_home_that_may_not_be_looked_into_remembers_no_jars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with a service's ProtectHome; the packages then go to the temporary folder."""

    read = Path.read_text

    def refused(path: Path, *arguments: Any, **named: Any) -> str:
        if path.is_relative_to(tmp_path):
            raise PermissionError(13, "Permission denied")
        return read(path, *arguments, **named)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with delta_jars.settings((), ()) as settings:
        assert settings["spark.jars.packages"] and settings["spark.jars.ivy"].startswith(str(tmp_path))


def test_a_user_without_a_home_has_the_jars_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container whose user is in no database."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert delta_jars.downloaded_megabytes() == 0
    with delta_jars.settings((), ()) as settings:
        assert settings["spark.jars.ivy"].startswith(str(tmp_path))


def test_jars_below_a_home_with_a_space_are_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spark names them by URLs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jar = tmp_path / "my home" / "io.delta_delta-storage-100%25.jar"
    jar.parent.mkdir()
    jar.touch()
    conf = {"spark.jars.packages": "io.delta:delta-spark", "spark.jars": ",".join([log_store.JAR.as_uri(), jar.as_uri()])}
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf))
    delta_jars.remember(spark, (), ())
    assert delta_jars.resolved_jars() == [str(jar)]


def test_a_machine_without_a_temporary_folder_is_told_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a read-only root."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(errors.DecisionNeeded, match="TMPDIR"):
        scratch.folder()


def test_a_machine_whose_temporary_folders_are_full_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A service that ended because its disk is full is started again, and would be left to a person there."""

    def full(descriptor: int, content: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere", str(tmp_path)])
    with monkeypatch.context() as disk, pytest.raises(errors.StorageExhausted):
        disk.setattr(os, "write", full)
        scratch.folder()
    assert not [*tmp_path.iterdir()]


def test_no_jvm_starts_on_a_full_disk(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not end where it cannot write the file with its port: PySpark waited for it for ever, also when there was room again."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("wb"))
    with pytest.raises(OSError) as said:
        started()
    assert type(spark_failures.translated(said.value)) is errors.StorageExhausted


def test_a_temporary_folder_without_programs_is_refused(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardened machines mount /tmp with noexec. Documents came into the tables, and each query of Spark failed with advice to try again."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NODEV | os.ST_NOEXEC))
    with pytest.raises(errors.DecisionNeeded, match=rf"{tmp_path}.* noexec.* set TMPDIR"):
        started()
    assert started(spark__driver__extraJavaOptions="-Djava.io.tmpdir=/var/lib/medallion"), "a folder of the user's own"


def test_java_is_started_for_any_temporary_folder_with_its_own_spark(
    started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder with a blank, and a `SPARK_HOME` of another Spark."""
    import pyspark

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    (tmp_path / "a b").mkdir()
    monkeypatch.setenv("SPARK_HOME", "/opt/another")
    options = started()["spark.driver.extraJavaOptions"]
    assert options.startswith(f'"-Djava.io.tmpdir={tmp_path}/a b/medallion-')
    assert os.environ["SPARK_HOME"] == os.path.dirname(pyspark.__file__)


def test_whatever_somebody_sets_a_jvm_has_the_digits_0_to_9(started: Any) -> None:
    """With user options, and with our properties for spark-submit: in a locale with other digits Delta would not find its commits again."""
    for given in ({}, {"spark__driver__extraJavaOptions": "-Dmine=1"}):
        assert spark_conf.LANGUAGE in started(**given)["spark.driver.extraJavaOptions"]
    properties = (jvm.ROOT / "conf" / "spark-defaults.conf").read_text(encoding="utf-8")
    assert re.search(rf"^spark\.driver\.defaultJavaOptions +{spark_conf.LANGUAGE}$", properties, re.MULTILINE)


@pytest.mark.parametrize("own", ["a.Extension", "a.Extension,b.Extension"])
def test_extensions_of_somebody_stand_beside_that_of_delta(started: Any, own: str) -> None:
    """For functions in SQL models, for example. Without its own extension Delta refuses every statement."""
    assert started(f"spark.sql.extensions {own}")["spark.sql.extensions"] == f"{spark_conf.EXTENSION},{own}"
    properties = (jvm.ROOT / "conf" / "spark-defaults.conf").read_text(encoding="utf-8")
    assert started(properties)["spark.sql.extensions"] == spark_conf.EXTENSION


def test_a_spark_of_the_same_version_is_the_one_that_is_named(
    started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may have additional jars, for a store or a cluster."""
    import pyspark

    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / f"spark-core_2.13-{pyspark.__version__}.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    started()
    assert os.environ["SPARK_HOME"] == str(tmp_path)


@pytest.mark.parametrize(("chosen", "given"), [("C", "C.UTF-8"), ("POSIX", "C.UTF-8"), ("de_DE.UTF-8", "de_DE.UTF-8")])
def test_java_knows_names_outside_ascii(chosen: str, given: str) -> None:
    options = jvm._Launch()
    options["env"] = {"LC_ALL": chosen}
    assert options["env"] == {"LC_CTYPE": given, "LC_MESSAGES": "C"}


def test_java_says_in_english_what_the_system_says() -> None:
    """A full disk is recognized by these words, whatever language the system uses."""
    options = jvm._Launch()
    options["env"] = {"LANG": "de_DE.UTF-8", "LC_MESSAGES": "de_DE.UTF-8"}
    assert options["env"] == {"LANG": "de_DE.UTF-8", "LC_MESSAGES": "C"}


SCARCE = (
    ("spark-submit: fork: retry: Resource temporarily unavailable", "Resource temporarily unavailable"),
    (
        "Error occurred during initialization of VM\njava.lang.OutOfMemoryError: unable to create native thread: possibly out of memory or "
        "process/resource limits reached\n\tat java.lang.Thread.start0(Native Method)",
        "unable to create native thread",
    ),
    (
        "#\n# There is insufficient memory for the Java Runtime Environment to continue.\n# /tmp/hs_err_pid7.log",
        "insufficient memory for the Java Runtime Environment",
    ),
)
"""What a shell and a JVM write where they get no process, thread or memory, and what of it is quoted."""


@pytest.mark.parametrize(("output", "quoted"), SCARCE)
def test_a_jvm_that_gets_no_memory_or_processes_is_tried_again(
    output: str, quoted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A service that starts a JVM after the one before was killed must not wait for a person."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    jvm.log_file().parent.mkdir(parents=True, exist_ok=True)
    jvm.log_file().write_text(output)
    told = jvm._why_not(EOFError())
    assert type(told) is errors.Temporary and quoted in str(told) and "\n" not in str(told)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_system_that_starts_no_process_is_quoted(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The JVM has written nothing then, and Java cannot be asked for its version: it is not missing."""
    refused = OSError(number, os.strerror(number))

    def refuse(*_: object, **__: object) -> NoReturn:
        raise refused

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", refuse)
    told = jvm._why_not(refused)
    assert type(told) is errors.Temporary and os.strerror(number) in str(told)


SAID_AT_EVERY_START = (
    "Picked up JAVA_TOOL_OPTIONS: -Xmx1g",
    "NOTE: Picked up JDK_JAVA_OPTIONS: -Xmx1g",
    "[0.159s][warning][cds,dynamic] Unable to use shared archive. The top archive failed to load: /x/spark-classes.jsa",
    "OpenJDK 64-Bit Server VM warning: Sharing is only supported for boot loader classes because bootstrap classpath has been appended",
    "WARNING: Using incubator modules: jdk.incubator.vector",
    "Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties",
    "26/11/30 07:36:32 WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address",
    'Setting default log level to "WARN".',
    "To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).",
)
"""The lines of a JVM that starts, in order. Which of them it wrote before it was killed depends on the moment."""


@pytest.mark.parametrize("output", ["", *("\n".join(SAID_AT_EVERY_START[:number]) for number in range(1, 10))])
def test_a_jvm_that_is_killed_while_it_starts_is_tried_again(
    output: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says no reason, and a person would find none to mend."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    jvm.log_file().parent.mkdir(parents=True, exist_ok=True)
    jvm.log_file().write_text(output)
    error = jvm._why_not(EOFError())
    assert type(error) is errors.SparkLost and str(jvm.log_file()) in str(error)


def test_the_cause_of_a_trace_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not its last line, which only counts further lines."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trace = 'Exception in thread "main" X: Too many open files\n\tat a.B.c(B.java:1)\nCaused by: Y: no more\n\t... 34 more\n'
    jvm.log_file().parent.mkdir(parents=True, exist_ok=True)
    jvm.log_file().write_text(trace)
    assert (
        str(jvm._why_not(EOFError()))
        == f"Spark did not start: Caused by: Y: no more (log: {jvm.log_file()}); correct that, and start again"
    )


@pytest.mark.parametrize(
    "after",
    [
        "Error: Could not create the Java Virtual Machine.\nError: A fatal exception has occurred. Program will exit.\n",
        "Error: Could not create the Java Virtual Machine.\n/usr/lib/spark/bin/spark-class: line 97: CMD: bad array subscript\n",
        "\nWARNING: Using incubator modules\nUsage: spark-submit [options] <app jar>\n\nOptions:\n  --queue QUEUE_NAME\n",
    ],
)
def test_an_option_that_java_or_spark_submit_refuses_is_quoted(
    after: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not the last of the lines after it, which only say that it ends, or how spark-submit is used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reason = "Invalid maximum heap size: -Xmx2 GB"
    output = f"{reason}\n{after}"
    jvm.log_file().parent.mkdir(parents=True, exist_ok=True)
    jvm.log_file().write_text(output)
    assert (
        str(jvm._why_not(EOFError())) == f"Spark did not start: {reason} (log: {jvm.log_file()}); {jvm.WHERE_SETTINGS_ARE}"
    )


def test_a_reason_of_the_script_that_starts_java_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its settings need not be the cause."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reason = "/usr/lib/spark/bin/spark-class: line 103: /usr/bin/java: Argument list too long"
    jvm.log_file().parent.mkdir(parents=True, exist_ok=True)
    jvm.log_file().write_text(f"{reason}\n")
    found = str(jvm._why_not(EOFError()))
    assert found == f"Spark did not start: {reason} (log: {jvm.log_file()}); correct that, and start again"


def test_an_interrupted_start_leaves_no_jvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PySpark keeps no reference to a JVM that does not answer yet; it stayed when Ctrl-C came while Spark started."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []

    def launch_gateway(conf: Any, popen_kwargs: Any) -> None:
        popen_kwargs["preexec_fn"] = lambda: None
        started.append(subprocess.Popen(["sleep", "60"], **popen_kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch_gateway)
    jvm.log_file().parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(KeyboardInterrupt):
        jvm._context({}, {})
    assert started[0].wait(5) == -signal.SIGKILL


class StartFailed(Py4JJavaError):
    """An error of Spark while it starts."""

    def __init__(self, name: str, message: str) -> None:
        self.java_exception = SimpleNamespace(
            getClass=lambda: SimpleNamespace(getSimpleName=lambda: name), getMessage=lambda: message
        )

    def __str__(self) -> str:
        return "An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext."


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        ("SparkIllegalArgumentException", "System memory 371720192 must be at least 471859200.", errors.DecisionNeeded),
        ("BindException", "Address already in use: Service 'sparkDriver' failed after 16 retries.", errors.Temporary),
        ("IllegalArgumentException", "requirement failed: on a running MetricsSystem", errors.Temporary),
        ("ClassNotFoundException", "there is no class foo", errors.DecisionNeeded),
    ],
)
def test_what_spark_says_against_a_start_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str, expected: type[errors.MedallionError]
) -> None:
    """The JVM starts, and Spark in it does not: `--conf spark.driver.memory=400m`, a port in use, a master that does not answer yet."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise StartFailed(name, f"{message.removeprefix('there is no class ')}\nmore")

    monkeypatch.setattr(sparks, "_active", lambda: None)
    monkeypatch.setattr(jvm, "launch", refuse)
    with pytest.raises(errors.MedallionError) as caught:
        sparks.session("test")
    assert type(caught.value) is expected
    assert str(caught.value).startswith(f"Spark did not start: {message} (log:")
    assert ("start again" if expected is errors.Temporary else jvm.WHERE_SETTINGS_ARE) in str(caught.value)


def test_a_jvm_without_a_local_folder_was_not_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spark exits where none of `spark.local.dir` can be written, and says so only in its log."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    jvm.log_file().write_text("26/01/01 ERROR DiskBlockManager: Failed to create any local dir.\n")
    error = spark_failures.translated(Py4JNetworkError("Answer from Java side is empty"))
    assert type(error) is errors.DecisionNeeded and "spark.local.dir" in str(error) and "SPARK_LOCAL_DIRS" in str(error)
    jvm.log_file().write_text("Failed to create any local dir.\nCaused by: java.io.IOException: No space left on device\n")
    assert isinstance(spark_failures.translated(Py4JNetworkError()), errors.SparkLost)  # temporary
    jvm.log_file().unlink()
    assert isinstance(spark_failures.translated(Py4JNetworkError()), errors.SparkLost)


def test_a_setting_that_a_given_session_refuses_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `spark-submit --conf spark.sql.shuffle.partitions=abc`: the session reads it when it is first used."""
    refusal = IllegalArgumentException("spark.sql.shuffle.partitions should be int, but was abc")
    monkeypatch.setattr(sparks, "_active", lambda: None)
    monkeypatch.setattr(jvm, "launch", lambda *_, **__: None)
    monkeypatch.setattr(sparks, "_apply", Mock(side_effect=refusal))
    with pytest.raises(errors.DecisionNeeded, match="should be int, but was abc"):
        sparks.session("test")


def test_a_jvm_starts_also_where_the_working_directory_was_removed(
    started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a service that outlives the release from which it was started."""
    assert jvm._working_directory() is None
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    started()
    there = jvm._working_directory()
    assert there is not None and Path(there).is_dir() and jvm._java_version() is not None


def test_a_signal_that_comes_while_a_killed_jvm_ends_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large JVM takes a while to end, and Ctrl-C may be pressed again. The second signal's handler must not wait for the first one's."""
    from pyspark import SparkContext

    with subprocess.Popen(["sleep", "30"]) as process:
        kill = process.kill
        again, ends = (threading.Timer(seconds, act) for seconds, act in ((0.1, interrupted), (0.3, kill)))
        monkeypatch.setattr(process, "kill", lambda: None)
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        with handling(signal.SIGUSR1, lambda *_: jvm.abandon()), handling(signal.SIGALRM, stands_still):
            signal.setitimer(signal.ITIMER_REAL, 2)
            again.start()
            ends.start()
            try:
                jvm.abandon()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                kill()
    assert process.returncode == -signal.SIGKILL


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def stands_still(*_: object) -> NoReturn:
    raise TimeoutError


@contextlib.contextmanager
def handling(number: signal.Signals, handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_jvm_that_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error asks whether the JVM is gone, and each of thousands of collections may have one. One that ends is waited for."""
    from py4j.protocol import Py4JNetworkError
    from pyspark import SparkContext

    monkeypatch.setattr(jvm, "END_SECONDS", 60.0)
    end = threading.Event()

    def broken() -> NoReturn:
        raise Py4JNetworkError

    def with_jvm(call: Callable[[], object], process: object) -> None:
        system = SimpleNamespace(currentTimeMillis=call)
        gateway = SimpleNamespace(proc=process, jvm=SimpleNamespace(System=system))
        monkeypatch.setattr(SparkContext, "_gateway", gateway)

    with subprocess.Popen(["sleep", "60"]) as process:
        began = time.monotonic()
        with_jvm(lambda: 5, process)
        assert not jvm.is_gone()
        with_jvm(broken, None)
        assert jvm.is_gone()
        threading.Timer(0.2, process.kill).start()
        with_jvm(broken, process)
        assert jvm.is_gone() and jvm.is_gone()
        assert time.monotonic() - began < 30
    monkeypatch.setattr(jvm, "END_SECONDS", 0.1)
    with_jvm(end.wait, None)
    assert not jvm.is_gone()
    end.set()
