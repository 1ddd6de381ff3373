"""Temporary files that killed processes leave in a table's log."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core.tables import layout as tables
from pipelines.delta import checkpoint_writer, maintenance, query_execution


def test_old_drafts_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of checkpoints may have tens of megabytes. Recent drafts and files with final names stay."""
    log = tmp_path / "_delta_log"
    log.mkdir()
    monkeypatch.setattr(Path, "replace", lambda *_: None)  # as if the process is killed at this moment
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    for name in ("00000000000000000007.checkpoint.parquet", "_last_checkpoint"):
        with checkpoint_writer._replaced(log / name) as draft:
            draft.touch()
    monkeypatch.undo()
    (log / ".00000000000000000008.json.6c2b.tmp").touch()
    (log / "..00000000000000000007.checkpoint.parquet.6c2b.tmp.crc").touch()
    drafts = {*log.iterdir()}
    assert len(drafts) == 4
    named = {log / name for name in ("00000000000000000007.json", ".00000000000000000007.crc.crc", "x.tmp")}
    for each in (*drafts, *named):
        each.touch()
        os.utime(each, (1, 1))
    new = log / ".00000000000000000009.json.6c2b.tmp"
    new.touch()
    spark: Any = SimpleNamespace(sql=lambda _: SimpleNamespace(collect=list))
    monkeypatch.setattr(query_execution, "session_confs", lambda *_: contextlib.nullcontext())
    maintenance.vacuum(spark, tables.TableRef.at(str(tmp_path)))
    assert {*log.iterdir()} == {*named, new}
