"""The folder for files that live as long as a process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError

from cdc_core import errors
from pipelines.spark import failures as spark_failures
from pipelines.spark import scratch

GONE = 2**22 + 1
"""Linux has no process with such a number."""


def test_what_gone_processes_left_goes_but_for_their_last_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error that ended a process may name its log. Files of running processes also stay on systems without /proc."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "exists", lambda path: not path.is_relative_to("/proc") and os.path.exists(path))
    mine = scratch.folder()
    kept = {
        mine / name for name in (f"spark-{os.getpid()}.log", f"packages-{os.getpid()}.zip", "delta-jars-4-123456789012.txt")
    }
    logs = [mine / f"spark-{GONE + number}.log" for number in range(scratch.KEPT_LOGS + 2)]
    for at, each in enumerate((*kept, *logs, mine / f"chunk-a-{GONE}.arrow")):
        each.touch()
        os.utime(each, (at, at))
    folders = [mine / f"spark-{number}.tmp" for number in (os.getpid(), GONE)]
    for each in folders:
        (each / "more").mkdir(parents=True)
    assert scratch.folder() == mine
    assert {*mine.iterdir()} == {*kept, *logs[2:], folders[0]}


def test_a_temporary_folder_that_was_removed_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A service continues, and starts another JVM there; an error that names the JVM's log is told, and is no second error."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed" / "while it ran"))
    assert isinstance(spark_failures.translated(Py4JNetworkError()), errors.SparkLost)
    assert scratch.folder().is_dir()


@pytest.mark.parametrize("kind", ["a file", "a link to nothing"])
def test_a_temporary_folder_that_is_none_any_more_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Something else took its place while a service ran."""
    place = tmp_path / "place"
    place.touch() if kind == "a file" else place.symlink_to(tmp_path / "nothing")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with pytest.raises(errors.DecisionNeeded, match="set TMPDIR"):
        scratch.folder()
