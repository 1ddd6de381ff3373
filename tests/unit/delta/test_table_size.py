"""The size of a table, and the contents of its folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core.tables.layout import TableRef
from pipelines.delta import tables as delta


def test_a_folder_is_gone_through_only_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks for the size of each table, and a month's log has millions of files. A writer's temporary files may vanish
    meanwhile."""
    rows = [SimpleNamespace(numFiles=1, sizeInBytes=10)]
    spark: Any = SimpleNamespace(sql=lambda _: SimpleNamespace(collect=lambda: rows))
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "a.parquet").write_bytes(b"x" * 10)
    (tmp_path / "_delta_log" / f"{0:020}.json").write_bytes(b"x" * 5)
    gone, lstat = tmp_path / "_delta_log" / ".1.tmp", os.lstat
    gone.touch()

    def looked_at(path: str) -> os.stat_result:
        gone.unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(delta.os, "lstat", looked_at)
    assert delta.size(spark, TableRef.at(str(tmp_path))) == delta.TableSize(1, 10, None)
    assert gone.exists()
    assert delta.size(spark, TableRef.at(str(tmp_path)), stored=True) == delta.TableSize(1, 10, 15)


def test_tables_are_found_where_a_layer_is_a_link_to_another_disk(tmp_path: Path) -> None:
    """Otherwise `repair` would miss files that are lost on the other disk."""
    root = tmp_path / "lakehouse"
    (root / "gold" / "shop" / "orders" / "_delta_log").mkdir(parents=True)
    (tmp_path / "disk" / "shop" / "orders" / "_delta_log").mkdir(parents=True)
    (root / "silver").symlink_to(tmp_path / "disk")
    (root / "gold" / "again").symlink_to(root)
    assert delta.tables_below(root) == [root / layer / "shop" / "orders" for layer in ("gold", "silver")]


def test_a_size_in_the_logs_checksum_needs_no_statement(tmp_path: Path) -> None:
    """The page shows thousands of tables."""
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / f"{0:020}.json").write_text("{}")
    (tmp_path / "_delta_log" / f"{0:020}.crc").write_text('{"numFiles": 3, "tableSizeBytes": 30}')
    spark: Any = None
    assert delta.size(spark, TableRef.at(str(tmp_path))) == delta.TableSize(3, 30, None)
