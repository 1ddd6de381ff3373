from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc_core import errors
from pipelines.spark import conf as spark_conf
from pipelines.spark import delta_jars, jvm, log_store
from pipelines.spark import session as sparks
from tests.harness import sessions

PROJECT = Path(__file__).parents[3]

# Starts a session, writes and reads a Delta table, runs Python on an executor, prints the number of rows, and stops.
WORKS = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from pipelines.spark import conf as spark_conf
from pipelines.spark import session as spark_sessions
from tests.harness import sessions
conf = {{**spark_conf.SHORT_RUN, **sessions.SMALL, **sessions.INTERPRETED}}
spark = spark_sessions.session("quiet", master="local[2]", conf=conf)
spark.range(3).write.format("delta").save(sys.argv[1])

def executed(batches):
    from cdc_core.extended_json import keys
    return batches

rows = spark.read.format("delta").load(sys.argv[1])
print(rows.mapInArrow(executed, "id BIGINT").count(), flush=True)
spark_sessions.stop()
"""

QUICK = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}
"""For tests that do not depend on the JVM's own options: without the optimizing compiler a start takes half the time."""


def python(program: str, *arguments: str, cwd: Path = PROJECT, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def is_running(pid: int) -> bool:
    status = Path("/proc", str(pid), "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_second_call_starts_no_second_application(spark: SparkSession) -> None:
    """The existing application is used, whatever session an earlier test left active."""
    assert sparks.session("another name").sparkContext is spark.sparkContext


def test_a_thread_that_asks_first_gets_the_same_session(spark: SparkSession) -> None:
    """Any thread may be the first to use a lazy session, and for Spark no session is active in such a thread."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(sparks.session, "another name").result().sparkContext is spark.sparkContext


def test_the_next_session_finds_deltas_jars(spark: SparkSession) -> None:
    """Otherwise every start would resolve the packages again, which takes a second or two."""
    assert any("delta-storage" in jar for jar in delta_jars.resolved_jars())


def test_a_jvm_maps_the_archive_of_this_environment(spark: SparkSession) -> None:
    """The JVM uses the class archive if there is one. It must be created again for another Java or Spark (`python -m
    pipelines.operations.class_archive`).
    """
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    mapped = Path(f"/proc/{gateway.proc.pid}/maps").read_text()
    assert (str(jvm.CLASS_ARCHIVE) in mapped) == jvm.CLASS_ARCHIVE.is_file()


def test_files_are_made_and_renamed_without_other_processes(spark: SparkSession, tmp_path: Path) -> None:
    """Files get the permissions that Hadoop asks for, and links are recognized."""
    hadoop, configuration = spark._jvm.org.apache.hadoop.fs, spark.sparkContext._jsc.hadoopConfiguration()
    files = hadoop.FileSystem.getLocal(configuration)
    context = hadoop.FileContext.getLocalFSFileContext(configuration)
    assert files.getClass().getName() == log_store.FILE_SYSTEM["spark.hadoop.fs.file.impl"]
    made, renamed, linked = (tmp_path / name for name in ("a b%20é", "renamed", "link"))
    files.create(hadoop.Path(f"{made}"), True).close()
    files.setPermission(hadoop.Path(f"{made}"), hadoop.permission.FsPermission("640"))
    assert made.stat().st_mode & 0o777 == 0o640
    options = spark.sparkContext._gateway.new_array(jvm.java_class(spark, "org.apache.hadoop.fs.Options$Rename"), 0)
    context.rename(hadoop.Path(f"{made}"), hadoop.Path(f"{renamed}"), options)
    linked.symlink_to(renamed)
    assert renamed.exists() and not made.exists()
    assert files.getFileLinkStatus(hadoop.Path(f"{linked}")).isSymlink()
    assert not files.getFileLinkStatus(hadoop.Path(f"{renamed}")).isSymlink()
    with pytest.raises(Exception, match="FileNotFoundException"):
        files.getFileLinkStatus(hadoop.Path(f"{made}"))


def test_times_are_utc(spark: SparkSession) -> None:
    """Timestamps are shown in UTC, whatever the machine's time zone."""
    assert spark.sql("SELECT string(timestamp_millis(0))").collect()[0][0] == "1970-01-01 00:00:00"


def test_a_sibling_session_has_settings_of_its_own(spark: SparkSession) -> None:
    """A setting of a session of the factory does not change the original session, and both have the required settings."""
    sibling = sparks.sessions(spark)()
    sibling.conf.set("spark.sql.shuffle.partitions", "77")
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    for key, value in spark_conf.REQUIRED.items():
        assert sibling.conf.get(key) == value


def test_files_can_ask_for_the_compiler_of_production(spark: SparkSession) -> None:
    """The tests' session interprets expressions; within `compiled` it and all new sessions compile them."""

    def found() -> list[set[str]]:
        return [{session.conf.get(name) for name in sessions.INTERPRETED} for session in (spark, sparks.sessions(spark)())]

    assert found() == [{"false", "NO_CODEGEN"}] * 2
    with sessions.compiled(spark):
        assert found() == [{"true", "FALLBACK"}] * 2
    assert found() == [{"false", "NO_CODEGEN"}] * 2


def test_executors_run_this_python(spark: SparkSession) -> None:
    """Executors run the driver's Python, not the first one on the PATH."""

    def which(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys

        list(batches)
        yield pa.RecordBatch.from_pydict({"path": [sys.executable]})

    assert spark.range(1).coalesce(1).mapInArrow(which, "path STRING").collect()[0][0] == sys.executable


def test_nothing_but_our_own_words_reaches_the_screen(tmp_path: Path) -> None:
    """From any working directory, starting, using and stopping Spark prints nothing, and leaves only its log in the temporary folder."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = python(WORKS, str(tmp_path / "table"), cwd=tmp_path, TMPDIR=str(scratch))
    out, err = process.communicate()
    assert (out, err, process.returncode) == ("3\n", "", 0)
    left = {path for path in scratch.rglob("*") if path.is_file() or not any(path.iterdir())}
    assert left == {scratch / f"medallion-{os.getuid()}" / f"spark-{process.pid}.log"}


OWN = """
import contextlib, signal, sys, threading, time
from pipelines.spark import conf as spark_conf
from pipelines.spark import failures, jvm
from pipelines.spark import session as spark_sessions

def started(name):
    spark = spark_sessions.session(name, master="local[1]", profile=spark_conf.CAPTURE)
    print(spark.sparkContext.getConf().get("spark.driver.memory"), spark.sparkContext._gateway.proc.pid, flush=True)
    return spark

spark = started("own")
sys.stdin.readline()
clock = spark._jvm.java.lang.System
def ask():
    with contextlib.suppress(Exception):
        clock.currentTimeMillis()
process = spark.sparkContext._gateway.proc
process.send_signal(signal.SIGSTOP)  # so that the question lies unread when the JVM ends, and the connection is reset
asking = threading.Thread(target=ask)
asking.start()
time.sleep(1)
process.kill()
asking.join()
try:
    spark.range(3).count()
except Exception as error:
    print(type(failures.translated(error)).__name__, flush=True)
    jvm.forget()
spark = started("again")
print(spark.range(3).count(), spark._jvm.java.util.Locale.getDefault().getLanguage(), flush=True)
time.sleep(300)
"""


@dataclass
class Owner:
    """A process with a user's settings for Spark. At each start of a JVM it prints the JVM's memory and PID."""

    process: subprocess.Popen[str]
    memory: str = ""
    jvm: int = 0

    def reads(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def started(self) -> None:
        self.memory, number = self.reads().split()
        self.jvm = int(number)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "spark-defaults.conf").write_text("spark.driver.memory 700m\nspark.driver.extraClassPath /nowhere/mine.jar\n")
    options = "-XX:+UseG1GC -Duser.language=ar -Duser.country=SA"
    with python(OWN, TMPDIR=str(folder), SPARK_CONF_DIR=str(folder), JAVA_TOOL_OPTIONS=options) as process:
        owner = Owner(process)
        owner.started()
        yield owner
        process.kill()


def test_what_a_user_chose_is_over_what_a_command_would_choose(own: Owner) -> None:
    """Memory and class path come from spark-defaults.conf and the garbage collector from the environment. A JVM with two collectors
    does not start.
    """
    assert own.memory == "700m"


def test_a_jvm_that_is_killed_is_told_and_another_one_can_be_started(own: Owner) -> None:
    """The kernel kills the process with the most memory: this is not a bug, and the same process can start another session.

    Nothing else is printed, even if the connection breaks during a call. The JVM uses the digits 0 to 9 in any locale, because Delta
    formats commit versions with them.
    """
    assert own.process.stdin is not None
    own.process.stdin.write("\n")
    own.process.stdin.flush()
    first = own.jvm
    assert own.reads() == "SparkLost"
    own.started()
    assert own.reads() == "3 en" and own.jvm != first


def test_the_jvm_leaves_sigterm_to_its_owner_and_ends_with_it(own: Owner) -> None:
    """SIGTERM to the whole process group does not end the JVM; it ends when its owner is killed. Nothing is printed."""
    os.kill(own.jvm, signal.SIGTERM)
    time.sleep(1)
    assert is_running(own.jvm)
    own.process.kill()
    deadline = time.monotonic() + 30
    while is_running(own.jvm) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(own.jvm)
    assert own.process.stderr is not None and own.process.stderr.read() == ""


def test_no_text_is_replaced_by_what_the_process_knows(spark: SparkSession) -> None:
    """`${…}` in a statement is plain text."""
    assert spark.sql("SELECT '${spark.app.name}'").first()[0] == "${spark.app.name}"


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("", "Spark needs Java 17 or later, but there is none in JAVA_HOME="),
        ("11.0.2", "Spark needs Java 17 or later, but this is Java 11: "),
    ],
)
def test_a_machine_without_the_right_java_is_told_how_to_get_it(tmp_path: Path, version: str, says: str) -> None:
    """A missing or too old Java is reported in one line that says how to install it."""
    java = tmp_path / "bin" / "java"
    if version:
        java.parent.mkdir()
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\nexit 1\n")
        java.chmod(0o755)
    program = """
from cdc_core import errors
from pipelines.spark import session as spark
try:
    spark.session("never")
except errors.DecisionNeeded as error:
    print(error)
"""
    process = python(program, JAVA_HOME=str(tmp_path))
    out, err = process.communicate()
    assert out.startswith(says) and "apt-get install openjdk-17" in out and out.count("\n") == 1
    assert err == ""


def test_a_value_that_the_session_refuses_is_told_at_once() -> None:
    """PySpark asked the session how to show its refusal, which was refused as well: a minute of recursion, and then a bug."""
    program = """
from cdc_core import errors
from pipelines.spark import session as spark
try:
    spark.session("never", conf={"spark.sql.shuffle.partitions": "abc"})
except errors.DecisionNeeded as error:
    print(error)
"""
    out, err = python(program).communicate()
    assert "spark.sql.shuffle.partitions" in out and "'int'" in out and out.count("\n") == 1
    assert err == ""


def submitted(job: Path, *options: str) -> list[str]:
    """What a job prints to stdout under spark-submit, started in its own folder."""
    home = subprocess.run(
        [sys.executable, "-m", "pyspark.find_spark_home"], capture_output=True, text=True, check=True
    ).stdout.strip()
    done = subprocess.run(
        [f"{home}/bin/spark-submit", "--conf", "spark.ui.enabled=false", *options, str(job)],
        capture_output=True,
        text=True,
        check=True,
        cwd=job.parent,
        env={**os.environ, **QUICK, "PYSPARK_PYTHON": sys.executable},
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("extension", "missing"), [("io.nobody.Extension", "jar"), ("org.apache.spark.sql.SparkSession", "session extension")]
)
def test_a_given_session_without_delta_is_told_which_file_names_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, extension: str, missing: str
) -> None:
    """If Delta's jar is not on the class path, or its extension is not configured, the session is refused in one line."""
    monkeypatch.setattr(sparks, "_active", lambda: None)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")  # under spark-submit the session is spark-submit's
    monkeypatch.setattr(spark_conf, "EXTENSION", extension)
    with pytest.raises(errors.SettingsError) as refused:
        sparks.session(spark.sparkContext.appName)
    assert str(refused.value) == (
        f"this Spark has no Delta ({missing} missing): use spark-submit --properties-file conf/spark-defaults.conf"
    )


@pytest.mark.journey
def test_spark_submit_without_delta_is_told_which_file_names_it(tmp_path: Path) -> None:
    """A spark-submit session without Delta is refused in one line."""
    job = tmp_path / "job.py"
    job.write_text(
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
        "from cdc_core import errors\n"
        "from pipelines.spark import session as spark\n"
        "try:\n    spark.session('job')\nexcept errors.SettingsError as error:\n    print(error)\n"
    )
    assert submitted(job, "--master", "local[1]") == [
        "this Spark has no Delta (jar missing): use spark-submit --properties-file conf/spark-defaults.conf"
    ]


@pytest.mark.journey
def test_executors_elsewhere_get_a_plain_checkout(tmp_path: Path) -> None:
    """Executors in other processes can import the packages of a job that runs from a checkout."""
    job = tmp_path / "job.py"
    job.write_text(f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from pipelines.spark import session as spark_sessions

def executed(batches):
    import pyarrow
    from cdc_core.extended_json import keys
    list(batches)
    yield pyarrow.RecordBatch.from_pydict({{"key": [keys.canonical(5.0)]}})

spark = spark_sessions.session("job")
print(spark.range(1).coalesce(1).mapInArrow(executed, "key STRING").collect()[0][0])
""")
    local = ("--conf", "spark.driver.bindAddress=127.0.0.1", "--conf", "spark.driver.host=127.0.0.1")
    defaults = ("--properties-file", str(PROJECT / "conf" / "spark-defaults.conf"))
    assert submitted(job, "--master", "local-cluster[1,1,1024]", *defaults, *local) == ["5"]


@pytest.mark.journey
def test_two_first_starts_share_one_download(tmp_path: Path) -> None:
    """On a machine without Delta's jars, two concurrent starts both succeed."""
    folder = tmp_path / "ivy"
    program = f"""
from pipelines.spark import session as spark
session = spark.session("first", master="local[1]", conf={{"spark.jars.ivy": {str(folder)!r}}})
print(session.range(3).count())
"""
    starts = [python(program, XDG_CACHE_HOME=str(tmp_path / "cache")) for _ in range(2)]
    assert [process.communicate() for process in starts] == [("3\n", "")] * 2


def test_ctrl_c_stays_the_commands(spark: SparkSession) -> None:
    """Starting Spark does not change the handler of Ctrl-C."""
    # A process that was started in the background ignores SIGINT.
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)
