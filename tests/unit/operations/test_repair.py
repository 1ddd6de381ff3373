from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pytest

from cdc_core import errors
from cdc_core.bronze import repair
from cdc_core.tables import layout as tables
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.delta.local_log import Commit
from pipelines.operations import repair as tables_repair
from pipelines.spark import parallel
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop


@pytest.mark.parametrize(
    ("files", "missing", "gone"),
    [
        ({"a": (1, 1), "b": (2, 2), "c": (3, 3)}, ["b"], ("b", "c")),
        ({"a": (1, 1), "b": (2, 2)}, [], ()),
        ({"a": (1, 1), "b": (2, 2)}, ["b"], ("b",)),
        ({"a": (1, 4), "b": (5, 9), "c": (8, 8)}, ["c"], ("b", "c")),  # the compacted file begins earlier, and goes whole
        ({"a": (1, 1), "b": None}, ["a"], ("a", "b")),
        ({"a": (1, 1), "b": None}, ["b"], ("a", "b")),
    ],
)
def test_bronze_ends_before_the_first_missing_batch(
    files: dict[str, tuple[int, int] | None], missing: list[str], gone: tuple[str, ...]
) -> None:
    """All files from there on are removed, and so are files with unknown batches."""
    assert repair.rewound(files, missing) == gone


def test_what_was_mended_is_told_beside_what_could_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this run reports which rows are lost: the next one finds no missing file in that table."""

    def one(spark: Any, table: tables.TableRef, names: Any, **given: object) -> tables_repair.RepairResult:
        if table == hop.bronze:
            raise errors.TableOwned("process 7 writes it")
        return tables_repair.RepairResult(table.label, ("part-0",), 1, "the contents of these files are lost", 5)

    with without_spark.running():
        hop = Hop(tmp_path)
        without_spark.create(SPARK, hop.layout.ops("schemas"), columns="`a` STRING")
        without_spark.create(SPARK, hop.layout.ops("cuts"), columns="`a` STRING")
        monkeypatch.setattr(tables_repair, "_table", one)
        failures = parallel.Failures()
        found = tables_repair.run(SPARK, hop.settings, failures=failures)
    assert [Path(each.table).name for each in found] == ["cuts", "schemas"]
    assert [type(each) for each in failures.by_name.values()] == [errors.TableOwned]


def test_what_lies_beside_the_layers_is_not_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a copy of a lakehouse, or a link to one: its silver would lose the missing files but keep its position."""
    with without_spark.running():
        hop = Hop(tmp_path / "lake")
        root = Path(hop.settings.lakehouse.root or "")
        for place in (root / "copy" / "silver" / "shop" / "a", tmp_path / "other" / "silver" / "shop" / "a"):
            without_spark.create(SPARK, tables.TableRef.at(str(place)), columns="`a` STRING")
        (root / "link").symlink_to(tmp_path / "other")
        looked: list[str] = []
        monkeypatch.setattr(tables_repair, "_table", lambda spark, table, *_, **__: looked.append(table.path))
        tables_repair.run(SPARK, hop.settings, failures=parallel.Failures())
    assert looked == [hop.bronze.path]


def test_tables_that_cannot_be_seen_are_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether their files are missing: a folder without permission, the link to a disk that is not mounted, or no table at all."""

    def scandir(place: Any) -> Any:
        if Path(place).name == "ops":
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return listed(place)

    with without_spark.running():
        hop = Hop(tmp_path)
        root = Path(hop.settings.lakehouse.root or "")
        without_spark.create(SPARK, hop.layout.ops("cuts"), columns="`a` STRING")
        (root / "gold").symlink_to(tmp_path / "unmounted")
        (root / "silver").mkdir()
        (root / "silver" / "shop").symlink_to(tmp_path / "unmounted")
        listed = os.scandir
        monkeypatch.setattr(os, "scandir", scandir)
        failures = parallel.Failures()
        assert tables_repair.run(SPARK, hop.settings, failures=failures) == []
        monkeypatch.undo()
        assert {name: errors.code(error) for name, error in failures.by_name.items()} == {
            str(root / "ops"): errors.DecisionNeeded.exit_code,
            str(root / "gold"): errors.DecisionNeeded.exit_code,
            str(root / "silver" / "shop"): errors.DecisionNeeded.exit_code,
        }
        shutil.rmtree(root)
        with pytest.raises(errors.DecisionNeeded, match="there are no tables"):
            tables_repair.run(SPARK, hop.settings, failures=parallel.Failures())


def test_folders_of_others_need_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mount point has a `lost+found`, which only its administrator may list: no repair would ever succeed."""

    def scandir(place: Any) -> Any:
        if Path(place).name in ("lost+found", "private"):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return listed(place)

    with without_spark.running():
        hop = Hop(tmp_path)
        root = Path(hop.settings.lakehouse.root or "")
        for name in ("lost+found", "private", "silver/lost+found"):
            (root / name).mkdir(parents=True)
        listed = os.scandir
        monkeypatch.setattr(os, "scandir", scandir)
        failures = parallel.Failures()
        assert tables_repair.run(SPARK, hop.settings, failures=failures) == []
        assert not failures.by_name


@pytest.mark.parametrize("kind", ["part-*", "deletion_vector_*"])
def test_files_of_zeros_are_missing(tmp_path: Path, kind: str) -> None:
    """A power failure may leave them with the length of the log. The error of a read names this command, which found nothing to repair."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop.append((1, bson.encode({"_id": 1})), (2, bson.encode({"_id": 2})))
        hop.silver()
        hop.append((1, bson.encode({"_id": 1, "a": 1})))
        hop.silver()
        assert all(file.is_there for file in delta.data_files(SPARK, hop.silver_table) or [])
        for file in Path(hop.silver_table.path or "").glob(kind):
            file.write_bytes(bytes(file.stat().st_size))
        assert not all(file.is_there for file in delta.data_files(SPARK, hop.silver_table) or [])


def test_schemas_go_all_together() -> None:
    """With an older schema a field could be taken for another one; silver refuses a table without any schema."""
    files: Any = ["one", "another"]
    assert tables_repair._plan(files, files[:1], ("ops", "schemas"))[0] == files


def test_what_is_left_of_bronze_keeps_the_settings_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start continues from there, and reports again what those settings left out."""
    own = {"writer": "w", "log": "one"}
    commits = [
        Commit(number, 0, said)
        for number, said in (
            (9, {**own, "batch": 7, "released": True}),  # a repair of an earlier version
            (8, {**own, "batch": 7, "stream": "new", "fields": [["shop.a.x"], []]}),
            (7, {**own, "batch": 5, "stream": "old", "fields": [[], []]}),
            (6, {**own, "batch": 4, "stream": "older"}),
        )
    ]
    monkeypatch.setattr(table_history, "newest_first", lambda *_: iter(commits))
    writer: Any = SimpleNamespace(spark=None, table=None, metadata={**(commits[0].metadata or {}), "to": "8201"})
    gone: Any = [SimpleNamespace(between=lambda _: (6, 7))]
    said = {"batch": 7, "log": "one", "stream": "old", "fields": [[], []]}
    assert tables_repair._position(writer, ("bronze", "shop"), gone) == ("8201", said)
    unknown: Any = [SimpleNamespace(between=lambda _: None)]
    assert tables_repair._position(writer, ("bronze", "shop"), unknown) == ("8201", {"batch": 7, "log": "one"})
