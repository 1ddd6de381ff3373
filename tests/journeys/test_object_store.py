"""A lakehouse on S3: MongoDB to gold with the commands, kills, and stores without conditional requests."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars
import pytest

from tests.harness import object_store, processes

ROOT = "s3a://lake/house"


@pytest.fixture(scope="module")
def store() -> Iterator[object_store.ObjectStore]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in object_store.KEYS.items():
            patch.setenv(name, value)
        with object_store.running("lake") as found:
            yield found


def _gold(store: object_store.ObjectStore, database: str) -> dict[int, int]:
    frame = polars.read_delta(f"s3://lake/house/gold/{database}/orders", storage_options=store.readers)
    return dict(zip(frame["_id"].to_list(), frame["v"].to_list(), strict=True))


def _met(store: object_store.ObjectStore, requests: int, command: processes.Command) -> None:
    """Wait until the command has sent so many requests to the store."""
    wanted = len(store.requests) + requests
    processes.until(lambda: len(store.requests) >= wanted, seconds=300, what="requests", alive=[command])


@pytest.mark.timeout(1500)
def test_rounds_of_changes_and_a_kill_on_s3(
    store: object_store.ObjectStore, tmp_path: Path, mongodb_uri: str, database: Any
) -> None:
    """Gold on S3 equals the source after several rounds of changes and a kill of each layer."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()
    orders = database.orders
    orders.insert_many([{"_id": number, "v": 0} for number in range(50)])
    where = ("--root", ROOT, *store.options)
    for number in range(1, 4):
        for verb in ("capture", "silver", "gold"):
            command = pipeline.command(verb, "--once", *where)
            if number == 2:
                with command.start():
                    _met(store, 25, command)
                    command.kill()
            assert command.run(500) == 0, command.said[-3000:]
        assert _gold(store, database.name) == {each["_id"]: each["v"] for each in orders.find()}
        orders.update_many({"_id": {"$lt": 10 * number}}, {"$inc": {"v": 1}})
        orders.delete_one({"_id": 40 + number})
        orders.insert_one({"_id": 100 + number, "v": number})
    put = {path for method, path in store.requests if method == "PUT"}
    commits = {path for path in put if path.endswith(".json") and "/_delta_log/0" in path}
    without = {path for path in commits if f"{path.removesuffix('.json')}.crc" not in put}
    assert commits and len(without) <= 3, "each has a checksum, but where a kill came between them"
    assert not any(".crc." in path for path in put), "which is not written aside and renamed"


@pytest.mark.timeout(600)
def test_a_kill_before_the_first_commit_leaves_a_table_to_be_made(
    store: object_store.ObjectStore, tmp_path: Path, mongodb_uri: str, database: Any
) -> None:
    """Delta creates a marker for the log's folder before the first commit; if only the marker exists, the next start makes the table."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()
    database.orders.insert_one({"_id": 1})
    store.put(f"killed/bronze/{pipeline.name}/_delta_log/")
    command = pipeline.command("capture", "--once", "--root", "s3a://lake/killed", *store.options)
    assert command.run(400) == 0, command.said[-3000:]


LIST = """
import json, sys, urllib.request
from pipelines.spark import log_store, session as sparks

url, conf = sys.argv[1], json.loads(sys.argv[2])
spark = sparks.session("list", root="s3a://lake/long", conf=conf)
store = getattr(spark._jvm.io.mongomedallion.storage, log_store.CONDITIONAL_PUT.rpartition(".")[2])(spark._jsc.hadoopConfiguration())
path = spark._jvm.org.apache.hadoop.fs.Path

def count():
    return int(urllib.request.urlopen(url + "/requests").read())

def listed(version, most):
    before, names = count(), []
    found = store.listFrom(path(f"s3a://lake/long/_delta_log/{version:020}."), spark._jsc.hadoopConfiguration())
    while len(names) < most and found.hasNext():
        names.append(found.next().getPath().getName())
    return names, count() - before

listed(0, 1)  # whatever the file system asks when it is made
print("listed", json.dumps([listed(0, 3), listed(95, 100), listed(100, 1)]), flush=True)
sparks.stop()
"""


@pytest.mark.timeout(600)
def test_the_oldest_of_a_long_log_are_found_in_its_first_page(store: object_store.ObjectStore) -> None:
    """At each checkpoint Delta lists the oldest commits, to clean up; this takes a page or two, however long the log is."""
    names = [f"{version:020}.json" for version in range(100)]
    for name in names:
        store.put(f"long/_delta_log/{name}")
    conf = {**store.conf, "spark.hadoop.fs.s3a.paging.maximum": "10"}
    command = [sys.executable, "-c", LIST, store.emulated.url, json.dumps(conf)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True).stdout
    (first, asked), (last, _), (none, _) = json.loads(said.rpartition("listed ")[2].splitlines()[0])
    assert (first, last, none) == (names[:3], names[-5:], [])
    assert asked <= 3


CONFLICTS = """
import json, sys
from pipelines.spark import log_store, session as sparks

spark = sparks.session("conflicts", root="s3a://lake/met", conf=json.loads(sys.argv[1]))
hadoop = spark._jsc.hadoopConfiguration()
store = getattr(spark._jvm.io.mongomedallion.storage, log_store.CONDITIONAL_PUT.rpartition(".")[2])(hadoop)

def wins(name, line):
    lines = spark._jvm.java.util.ArrayList()
    lines.add(line)
    try:
        store.write(spark._jvm.org.apache.hadoop.fs.Path("s3a://lake/met/_delta_log/" + name), lines.iterator(), False, hadoop)
    except Exception as error:
        return error.java_exception.getClass().getSimpleName()
    return True

print("won", json.dumps([wins(name, line) for name, line in (("a", "1"), ("b", "1"), ("b", "2"))]), flush=True)
sparks.stop()
"""


@pytest.mark.timeout(600)
def test_a_commit_that_meets_another_request_is_decided_by_repeating_it(store: object_store.ObjectStore) -> None:
    """S3 answers 409 while another request for the object is at work, which may be an earlier try of the same commit."""
    store.conflicts[:] = [False, False, True]
    command = [sys.executable, "-c", CONFLICTS, json.dumps(store.conf)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True).stdout
    assert json.loads(said.rpartition("won ")[2].splitlines()[0]) == [True, True, "FileAlreadyExistsException"]
    assert not store.conflicts


RANGES = """
import json, random, shutil, sys
from pipelines.delta.stored_files import StoredFiles
from pipelines.spark import session as sparks
spark = sparks.session("ranges", root="s3a://lake/ranged", conf=json.loads(sys.argv[1]))
files, content = StoredFiles(spark, "s3a://lake/ranged"), random.Random(1).randbytes(3_000_000)
files.write("f", content)
shutil.rmtree(files.folder)
for start, size in ((0, 10), (1_000_000, 1_500_000), (2_999_990, 10), (0, 10)):
    assert files.fetch_range("f", start, size) == content[start:start + size]
sparks.stop()
"""


@pytest.mark.timeout(600)
def test_a_range_of_a_file_is_one_request(store: object_store.ObjectStore) -> None:
    """A range that is already stored locally needs no request."""
    command = [sys.executable, "-c", RANGES, json.dumps(store.conf)]
    subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    assert [method for method, path in store.requests if path.endswith("/ranged/f")] == ["PUT", *["GET"] * 3]


SERVICE = """
import json, sys, threading, urllib.request
from pipelines.bronze import log as bronze_log
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from pipelines.spark import parallel, session as sparks
from tests.harness import bronze_rows, layers

url, conf = sys.argv[1], json.loads(sys.argv[2])
spark = sparks.session("service", root="s3a://lake/service", conf=conf)
hop = layers.Hop(spark, layers.pipeline("s3a://lake/service"))
capture = bronze_log.BronzeLog.open(spark, hop.layout.bronze("captured"))
service = spark, hop.settings, False, parallel.Pool(spark, None), threading.Event()
silver_run, gold_run = silver._SilverRun(*service), gold._GoldRun(*service)
TOKEN = "826553F100000000002B022C0100296E04"
acts = {
    "bronze": lambda: capture.heartbeat({}, token=TOKEN, ts_ms=0),
    "silver": silver_run.run_round,
    "silver without news": silver_run.run_round,
    "gold": lambda: gold_run.published({f"{bronze_rows.DB}.t"}),
}

def asked():
    return int(urllib.request.urlopen(url + "/requests").read())

# The rows of the last batch are in the data files of two others.
for number, keys in enumerate((range(8), (0, 1, 2), (3, 4, 5), (0, 3))):
    hop.bronze.append({"t": [layers.document(key, 10 + number, v=number) for key in keys]})
    found = {}
    for name, act in acts.items():
        before = asked()
        act()
        found[name] = asked() - before
assert not silver_run.failures.by_name and not gold_run.failures.by_name
print("asked", json.dumps(found), flush=True)
sparks.stop()
"""


@pytest.mark.timeout(600)
def test_a_batch_of_a_running_service_is_a_few_requests(store: object_store.ObjectStore) -> None:
    """Each commit is its data file, its deletion vectors, a look whether the version before is there, and Delta's three. Before it come
    two for each table that others may have changed, and the one by which gold finds no deletes."""
    command = [sys.executable, "-c", SERVICE, store.emulated.url, json.dumps(store.conf)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True).stdout
    asked = json.loads(said.rpartition("asked ")[2].splitlines()[0])
    assert asked == {"bronze": 5, "silver": 8, "silver without news": 2, "gold": 11}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "reason"),
    (
        ({"ignores_conditions": True}, "takes no notice of If-None-Match"),
        ({"answers_conditions": "501 Not Implemented"}, "takes no conditional PUT"),
        ({"answers_conditions": "400 Bad Request"}, "takes no conditional PUT"),
    ),
)
def test_a_store_without_conditional_requests_is_refused(
    store: object_store.ObjectStore,
    tmp_path: Path,
    mongodb_uri: str,
    database: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    reason: str,
) -> None:
    """If the store ignores or refuses If-None-Match, nothing is written, the exit code is 3, and the message says what to do next."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()
    database.orders.insert_one({"_id": 1})
    for name, value in fault.items():
        monkeypatch.setattr(store, name, value)
    for verb in (("check",), ("capture", "--once")):
        command = pipeline.command(*verb, "--root", "s3a://lake/other", *store.options)
        assert command.run(400) == 3, command.said
        assert reason in command.said and "single_driver" in command.said
    assert not any(method == "PUT" and "_delta_log" in path for method, path in store.requests if "/other/" in path)


@pytest.mark.timeout(600)
def test_check_tries_the_store_that_the_settings_name(
    store: object_store.ObjectStore, tmp_path: Path, mongodb_uri: str, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings file names the store, and its keys as references. The check succeeds, and the keys appear in no output and no command
    line. A bucket that does not exist ends it with 75, and the message says what to check."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()
    database.orders.insert_one({"_id": 1})
    monkeypatch.setenv("LAKE_KEY", "AKIA-of-the-test")
    monkeypatch.setenv("LAKE_SECRET", "secret-of-the-test")
    keys = {"fs.s3a.access.key": "${env:LAKE_KEY}", "fs.s3a.secret.key": "${env:LAKE_SECRET}"}
    text = pipeline.settings.read_text()
    for root, code in (("s3a://lake/checked", 0), ("s3a://nowhere/checked", 75)):
        lakehouse = json.dumps({"root": root, "store": {**store.emulated.store, **keys}})
        pipeline.settings.write_text(text.replace(f"{{root: {pipeline.root}}}", lakehouse))
        command = pipeline.command("check", log=f"check-{code}")
        with command.start():
            lines: set[str] = set()
            while command.is_running:
                lines |= _command_lines()
                time.sleep(0.5)
            assert command.wait(400) == code, command.said
        assert "of-the-test" not in command.said and not any("of-the-test" in line for line in lines)
        assert ("refused the second of two commits" if code == 0 else "check the bucket's name") in command.said


def _command_lines() -> set[str]:
    """The command lines of all processes, which every user of the machine can read."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            found.add(path.read_bytes().decode(errors="replace"))
    return found


_ARCHIVED = """
import sys
from pathlib import Path
from pipelines.operations import class_archive
from pipelines.spark import jvm

jvm.CLASS_ARCHIVE = Path(sys.argv[1])
class_archive.make("s3a://lake/house")
"""


def test_an_archive_of_classes_has_those_that_reach_s3(tmp_path: Path) -> None:
    """Loading these classes takes a fifth of a command's processor time on S3; the archive is made without a store."""
    archive = tmp_path / "spark-classes.jsa"
    subprocess.run([sys.executable, "-c", _ARCHIVED, str(archive)], check=True, timeout=400)
    held = archive.read_bytes()
    assert b"org/apache/hadoop/fs/s3a/S3AFileSystem" in held
    assert b"software/amazon/awssdk/services/s3/model/PutObjectResponse" in held
