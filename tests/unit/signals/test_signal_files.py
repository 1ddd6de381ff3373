"""The signal file: others append lines while handled ones are removed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.channels import signals

APPENDING = """
import sys
for number in range(int(sys.argv[2])):
    with open(sys.argv[1], "a") as file:
        file.write('{"id": "%d", "type": "log", "data": {"message": "%s"}}\\n' % (number, "x" * (number % 50)))
"""


def test_lines_that_are_appended_meanwhile_are_heeded_once(tmp_path: Path) -> None:
    """Another process appends all the time, without a lock: no line is lost or read twice, and at the end the file is empty."""
    path, many = tmp_path / "signals", 500
    path.touch()
    channel, heard = signals.FileChannel(path), []
    with subprocess.Popen([sys.executable, "-c", APPENDING, str(path), str(many)]) as appending:
        while appending.poll() is None or path.read_text().strip():
            for received in channel.poll():
                heard.append(received.signal.id)
                channel.handled(received)
    assert heard == [str(number) for number in range(many)]
    assert path.read_text().strip() == ""


def test_a_line_that_is_half_written_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last line counts once it is JSON or another line follows. An invalid line is logged without its text."""
    path = tmp_path / "signals"
    channel = signals.FileChannel(path)
    path.write_text('no json, secret\n{"id": "1", "type": "log", "data": {}')
    assert channel.poll() == []
    with path.open("a") as file:
        file.write("}")
    (received,) = channel.poll()
    assert channel.poll() == []
    path.write_text(path.read_text() + "\n" + json.dumps({"id": "2", "type": "log"}))
    assert [each.signal.id for each in channel.poll()] == ["2"]
    channel.handled(received)
    assert json.loads(path.read_text())["id"] == "2"
    assert "skipping" in caplog.text and "secret" not in caplog.text


LINE = '{"id": "1", "type": "log", "data": {}}\n'


def test_a_handled_line_that_a_kill_left_is_not_returned_again(tmp_path: Path) -> None:
    """Bronze holds its mark. The same line counts again once the file has changed, also where a copy keeps its times."""
    path, template = tmp_path / "signals", tmp_path / "template"
    template.write_text(LINE)
    shutil.copy2(template, path)
    marks = [received.mark for received in signals.FileChannel(path).poll()]
    restarted = signals.FileChannel(path, set(marks))
    assert restarted.poll() == []
    assert path.read_text().strip() == ""
    shutil.copy2(template, path)
    assert [received.signal.id for received in signals.FileChannel(path, set(marks)).poll()] == ["1"]


def test_equal_lines_have_marks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "signals"
    path.write_text(LINE * 2)
    first, second = (received.mark for received in signals.FileChannel(path).poll())
    assert [received.mark for received in signals.FileChannel(path, {first}).poll()] == [second]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_told_once_and_left_as_it_is(
    tmp_path: Path, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows PowerShell writes such files with `>`."""
    path, content = tmp_path / "signals", LINE.encode(encoding)
    path.write_bytes(content)
    channel = signals.FileChannel(path)
    assert channel.poll() == [] and channel.poll() == []
    (message,) = caplog.messages
    assert "UTF-16" in message and "UTF-8" in message
    assert path.read_bytes() == content
    path.write_text(LINE)
    assert [received.signal.id for received in channel.poll()] == ["1"]
