"""The signal file: others append lines while handled ones are removed."""

from __future__ import annotations

import json
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
