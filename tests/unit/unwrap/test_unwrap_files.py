"""`medallion unwrap`: a file of events becomes a file of rows."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cdc_core import errors
from pipelines.operations import unwrap as unwrap_files

SOURCE = {"db": "d", "collection": "c"}
LINES = [
    {"key": {"id": "1"}, "value": {"op": "c", "after": '{"_id": 1, "v": 1}', "source": SOURCE}},
    {"key": {"id": "2"}, "value": {"op": "c", "after": '{"_id": 2, "v": "x"}', "source": SOURCE}},
    {"key": {"id": "1"}, "value": {"op": "d", "after": None, "source": SOURCE}},
    {"key": {"id": "1"}, "value": None},
    {"key": {"serverName": "dbz"}, "value": {"ts_ms": 5}},
    {"ts_ms": 5},
]
ROWS = [
    {"key": {"id": 1}, "value": {"_id": 1, "v": 1}, "headers": [["__op", "c"]]},
    {"key": {"id": 2}, "value": {"_id": 2, "__rescued": {"v": '"x"'}}, "headers": [["__op", "c"]]},
    {"key": {"id": 1}, "value": None, "headers": [["__op", "d"]]},
    {"dropped": True},
    {"key": {"serverName": "dbz"}, "value": {"ts_ms": 5}, "headers": []},
    {"key": None, "value": {"ts_ms": 5}, "headers": []},
]


@pytest.fixture
def options(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"transforms.unwrap.add.headers": "op"}))
    return path


def text(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def decoded(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def test_each_line_becomes_one_line(tmp_path: pathlib.Path, options: pathlib.Path) -> None:
    """Rows, deletes, dropped and unchanged records keep their order; the summary counts them."""
    (tmp_path / "in.jsonl").write_bytes(text(LINES) + b"\n")
    summary = unwrap_files.run(options, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert decoded((tmp_path / "out.jsonl").read_bytes()) == ROWS
    assert summary == unwrap_files.UnwrapSummary(
        lines=6, rows=2, deletes=1, dropped=1, unchanged=2, rescued=1, collections=("d.c",)
    )
    assert str(summary) == "6 lines: 2 rows, 1 delete, 1 dropped, 2 unchanged; 1 row with rescued values"
    assert str(unwrap_files.UnwrapSummary(lines=1, rows=1)).startswith("1 line: 1 row, 0 deletes, ")


def test_files_may_be_compressed(tmp_path: pathlib.Path, options: pathlib.Path) -> None:
    """The input's compression is recognized by its content, the output's by its name."""
    (tmp_path / "in").write_bytes(gzip.compress(text(LINES)))
    unwrap_files.run(str(options), str(tmp_path / "in"), str(tmp_path / "out.jsonl.gz"))
    assert decoded(gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes())) == ROWS


def test_a_pipe_is_read_and_written_as_a_file(tmp_path: pathlib.Path, options: pathlib.Path) -> None:
    """For example a shell's `<(…)`, which can only be read once, and `/dev/null`, which must not be replaced. A link is followed."""
    given, pipe, link, file = (tmp_path / name for name in ("in", "pipe", "link", "file"))
    os.mkfifo(given)
    os.mkfifo(pipe)
    link.symlink_to(file)
    file.write_bytes(b"old")
    file.chmod(0o600)  # the file contains documents: its owner decides who may read it
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    for out in (pipe, link):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(given.write_bytes, text(LINES))
            assert unwrap_files.run(str(options), str(given), str(out)).lines == len(LINES)
    assert decoded(reader.communicate(timeout=10)[0]) == decoded(file.read_bytes()) == ROWS
    assert pipe.is_fifo() and link.is_symlink() and file.stat().st_mode & 0o777 == 0o600


def test_standard_streams_are_a_dash(monkeypatch: pytest.MonkeyPatch, options: pathlib.Path) -> None:
    """The command can be part of a shell pipe."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text(LINES))))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out))
    unwrap_files.run(options, "-", "-")
    assert decoded(out.getvalue()) == ROWS


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{bad\n", "this is not JSON"),
        (text([{"key": None, "value": {"op": "c", "after": "{bad", "source": {}}}]), "the event cannot be read"),
        (
            text([{"value": {"op": "c", "after": '{"a":' * 400 + "1" + "}" * 400, "source": SOURCE}}]),
            "the event cannot be read",
        ),
        (b"[" * 400 + b"]" * 400, "the record cannot be written"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_nothing_is_written(
    tmp_path: pathlib.Path, options: pathlib.Path, bad: bytes, message: str
) -> None:
    """An existing output is unchanged, and no temporary file is left."""
    (tmp_path / "in.jsonl").write_bytes(text(LINES) + bad)
    (tmp_path / "out.jsonl").write_text("before\n")
    with pytest.raises(errors.SettingsError, match=f"in.jsonl:7: {message}"):
        unwrap_files.run(options, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "before\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "options.json", "out.jsonl"]


@pytest.mark.parametrize(
    "damaged", [gzip.compress(b"{}\n" * 9)[:-9], b"\x1f\x8b\x08\x00 is no gzip"], ids=["cut off", "no gzip"]
)
def test_a_compressed_file_that_is_damaged_is_named(tmp_path: pathlib.Path, options: pathlib.Path, damaged: bytes) -> None:
    """The error is not mistaken for the end of the input."""
    (tmp_path / "in.gz").write_bytes(damaged)
    with pytest.raises(errors.SettingsError, match="in.gz: "):
        unwrap_files.run(options, tmp_path / "in.gz", tmp_path / "out")
    with pytest.raises(errors.SettingsError, match="in.gz: "):
        unwrap_files.run(tmp_path / "in.gz", options, tmp_path / "out")


def test_an_output_without_room_is_temporary(tmp_path: pathlib.Path, options: pathlib.Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(text(LINES))
    with pytest.raises(errors.StorageExhausted, match="/dev/full: No space left"):
        unwrap_files.run(options, tmp_path / "in.jsonl", "/dev/full")


def test_an_output_may_be_a_file_that_is_only_written_in_place(
    tmp_path: pathlib.Path, options: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is mounted into a container, to which no other file can be renamed."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EBUSY, "mounted")

    monkeypatch.setattr(pathlib.Path, "replace", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    (tmp_path / "in.jsonl").write_bytes(text(LINES))
    (tmp_path / "out").write_text("before\n")
    unwrap_files.run(options, tmp_path / "in.jsonl", tmp_path / "out")
    assert decoded((tmp_path / "out").read_bytes()) == ROWS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "options.json", "out"]


def test_an_output_that_is_a_folder_is_named(tmp_path: pathlib.Path, options: pathlib.Path) -> None:
    """Nothing is left beside it."""
    (tmp_path / "out").mkdir()
    with pytest.raises(errors.SettingsError, match="out: Is a directory"):
        unwrap_files.run(options, options, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["options.json", "out"]


@pytest.mark.parametrize("missing", ["options", "in", "out"])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: pathlib.Path, options: pathlib.Path, missing: str) -> None:
    """It is a mistake in the arguments."""
    (tmp_path / "in.jsonl").write_bytes(text(LINES))
    paths = {"options": options, "in": tmp_path / "in.jsonl", "out": tmp_path / "out.jsonl"}
    paths[missing] = tmp_path / "nowhere" / "file"
    with pytest.raises(errors.SettingsError, match="nowhere"):
        unwrap_files.run(paths["options"], paths["in"], paths["out"])


@pytest.mark.parametrize(
    ("written", "flat"),
    [
        ({}, False),
        ({"flatten.struct": "true"}, True),
        ({"transforms.u.flatten.struct": "true"}, True),
        (
            {
                "name": "shop",
                "config": {
                    "connector.class": "io.debezium.connector.mongodb.MongoDbConnector",
                    "transforms": "route,u",
                    "transforms.route.type": "org.apache.kafka.connect.transforms.RegexRouter",
                    "transforms.route.regex": ".*",
                    "transforms.u.type": "io.debezium.connector.mongodb.transforms.ExtractNewDocumentState",
                    "transforms.u.flatten.struct": "true",
                },
            },
            True,
        ),
        (
            {
                "transforms": "u",
                "transforms.u.type": "io.debezium.connector.mongodb.transforms.UnwrapFromMongoDbEnvelope",
                "transforms.u.flatten.struct": "true",
            },
            True,
        ),
        (
            {
                "transforms": "a.b",
                "transforms.a.b.type": "io.debezium.connector.mongodb.transforms.ExtractNewDocumentState",
                "transforms.a.b.flatten.struct": "true",
            },
            True,
        ),
        ({"connector.class": "x", "mongodb.connection.string": "y"}, False),
        ({"transforms": "u", "connector.class": "x"}, False),
    ],
)
def test_options_may_be_a_whole_connector(tmp_path: pathlib.Path, written: Any, flat: bool) -> None:
    """Only its unwrap transformation is used, whatever its name."""
    (tmp_path / "o.json").write_text(json.dumps(written))
    assert unwrap_files.load_options(tmp_path / "o.json").flatten_struct is flat


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: pathlib.Path, options: pathlib.Path) -> None:
    """Some editors write one before the options or the events. It is removed from an unchanged record too."""
    mark = b"\xef\xbb\xbf"
    options.write_bytes(mark + options.read_bytes())
    (tmp_path / "in.jsonl").write_bytes(mark + text([LINES[5], LINES[0]]))
    unwrap_files.run(options, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert decoded((tmp_path / "out.jsonl").read_bytes()) == [ROWS[5], ROWS[0]]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[]", "a JSON object with the options"),
        ("{", "not JSON"),
        ('{"flaten.struct": "true"}', "flatten.struct"),
        ('{"transforms": "u", "array.encoding": "document"}', "transforms: there is no such option"),
    ],
)
def test_wrong_options_are_refused_with_their_file(tmp_path: pathlib.Path, written: str, message: str) -> None:
    """Nothing is read or written."""
    (tmp_path / "o.json").write_text(written)
    with pytest.raises(errors.SettingsError, match=message) as refused:
        unwrap_files.load_options(tmp_path / "o.json")
    assert "o.json" in str(refused.value)
