"""The class archive. That a JVM maps it is tested in `tests/spark/spark/test_spark_session.py`."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cdc_core import errors
from pipelines.operations import class_archive
from pipelines.spark import jvm
from pipelines.spark import session as sparks


def test_what_killed_makers_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each leaves 200 MB. The file of a running process stays, and so does the archive."""
    monkeypatch.setattr(jvm, "CLASS_ARCHIVE", tmp_path / "spark-classes.jsa")
    alive, gone = tmp_path / f"spark-classes.{os.getppid()}", tmp_path / "spark-classes.999999999"
    for each in (jvm.CLASS_ARCHIVE, alive, gone):
        each.touch()

    def failing(*given: object, **named: object) -> None:
        raise RuntimeError("no Spark here")

    monkeypatch.setattr(sparks, "session", failing)
    with pytest.raises(RuntimeError):
        class_archive.make()
    assert sorted(tmp_path.iterdir()) == sorted([jvm.CLASS_ARCHIVE, alive])


def test_an_archive_that_is_not_written_yet_gets_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A JVM writes it when it ends, which on a busy machine may take longer than the wait; no JVM maps an incomplete one."""
    monkeypatch.setattr(jvm, "CLASS_ARCHIVE", tmp_path / "spark-classes.jsa")

    def stop(seconds: float) -> bool:
        (tmp_path / f"spark-classes.{os.getpid()}").write_bytes(b"half")
        return False

    monkeypatch.setattr(sparks, "session", lambda *_, **__: None)
    monkeypatch.setattr(class_archive, "_use", lambda *_: None)
    monkeypatch.setattr(sparks, "stop", stop)
    with pytest.raises(errors.Temporary, match="300 s"):
        class_archive.make()
    assert not [*tmp_path.iterdir()]


def test_a_store_of_its_own_answers_what_s3a_asks() -> None:
    """The requests that load S3A's classes: an object of one byte, an empty list, and a write."""
    with class_archive._answering() as url:

        def answer(method: str, path: str) -> bytes:
            request = urllib.request.Request(f"{url}/lake{path}", method=method, data=b"1" if method == "PUT" else None)
            with urllib.request.urlopen(request, timeout=30) as response:
                assert response.headers["ETag"] and response.headers["Last-Modified"]
                return bytes(response.read())

        assert (answer("HEAD", "/file"), answer("GET", "/file"), answer("PUT", "/file"), answer("DELETE", "/file")) == (
            b"",
            b"1",
            b"",
            b"",
        )
        assert ElementTree.fromstring(answer("GET", "?list-type=2")).findtext("{*}KeyCount") == "0"
