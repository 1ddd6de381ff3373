"""Silver and gold over a bronze that a test writes."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from pipelines.bronze import registry
from pipelines.delta import live_files, local_log
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import run as gold
from pipelines.silver import run as silver
from tests.harness import bronze_rows, oracle, sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


CASES = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((Path(__file__).parents[1] / "cases" / "silver").glob("*.yml"))
}


STEPS = max(len(case["batches"]) for case in CASES.values())


Row = dict[str, Any]


def pipeline(
    root: Path, collections: dict[str, Any] | None = None, *, name: str = "hand", **silver_defaults: Any
) -> settings.Settings:
    """Settings of a pipeline whose bronze a test writes."""
    return settings.parse(
        {
            "name": name,
            "lakehouse": {"root": str(root)},
            "source": {"mongodb.connection.string": "${env:NOWHERE}"},
            "silver": {
                "defaults": silver_defaults,
                "collections": {f"{bronze_rows.DB}.{name}": value for name, value in (collections or {}).items()},
            },
        }
    )


class Hop:
    """A lakehouse whose bronze a test writes, with silver and gold."""

    def __init__(self, spark: SparkSession, chosen: settings.Settings, *, log: str | None = None) -> None:
        self.spark = spark
        self.settings = chosen
        self.layout = delta.layout(chosen.lakehouse)
        self.bronze = bronze_rows.Log(spark, self.layout.bronze(chosen.name), log)

    def run(self) -> None:
        """Run silver, then gold."""
        self.silver()
        self.gold()

    def silver(self) -> silver.SilverResult:
        return silver.run(self.spark, self.settings, sessions=sessions.kept(self.spark))

    def gold(self) -> gold.GoldResult:
        return gold.run(self.spark, self.settings, sessions=sessions.kept(self.spark))

    def silver_table(self, collection: str) -> tables.TableRef:
        return self.layout.silver(bronze_rows.DB, collection)

    def gold_table(self, collection: str) -> tables.TableRef:
        return self.layout.gold(bronze_rows.DB, collection)

    def rows(self, collection: str) -> list[Row]:
        """Silver's rows by key, as cases state them: without nulls and internal columns, with sequences as seconds."""
        return [_silver_row(row) for row in table_rows(self.spark, self.silver_table(collection))]

    def documents(self, collection: str) -> list[Row]:
        """Gold's rows by key, without nulls."""
        table = self.gold_table(collection)
        if not delta.exists(self.spark, table):
            return []
        # By delta-rs if it sees the table, because a Spark query takes many times as long.
        folder = local_log.folder(table)
        found = rows_by_spark(self.spark, table) if folder is None else oracle.rows(oracle.read(str(folder)), by="__key")
        return [plain(row) for row in found]

    def copied(self, root: Path) -> Hop:
        """A copy of the lakehouse in another folder, so that the tests of a file share one setup."""
        shutil.copytree(str(self.layout.root), root, dirs_exist_ok=True)
        other = copy.copy(self)
        other.settings = dataclasses.replace(
            self.settings, lakehouse=dataclasses.replace(self.settings.lakehouse, root=str(root))
        )
        other.layout = delta.layout(other.settings.lakehouse)
        table = other.layout.bronze(other.settings.name)
        other.bronze = dataclasses.replace(self.bronze, spark=self.spark, table=table, rows=[*self.bronze.rows])
        return other


def table_rows(spark: SparkSession, table: tables.TableRef) -> list[Row]:
    """A table's rows by key, without a Spark query if this process sees the table.

    Delta-rs cannot read silver's tables, because it does not support type widening.
    """
    folder = local_log.folder(table)
    live = None if folder is None else live_files.LiveFiles(folder)
    if live is None or not live.move_to_newest():
        return rows_by_spark(spark, table)
    return oracle.rows(live.rows(live.files()), by="__key")


def rows_by_spark(spark: SparkSession, table: tables.TableRef) -> list[Row]:
    return [row.asDict(recursive=True) for row in spark.table(str(table)).orderBy("__key").collect()]


def plain(value: Any) -> Any:
    """A value without null fields."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    return [plain(item) for item in value] if isinstance(value, list) else value


def _silver_row(row: Row) -> Row:
    found = plain(row)
    del found["__batch"]
    found["__sequence"] = bronze_rows.second(found["__sequence"])
    if not found.pop("__incomplete"):
        assert "__known" not in found or found["__deleted"]
    else:
        found["__incomplete"] = True
    found.pop("__known", None)
    if "__document" in found:
        found["__document"] = True
    return found


def with_cases(hop: Hop, step: int, names: Iterable[str]) -> None:
    """Append the events of the cases at one step as one batch; each case is a collection."""
    hop.bronze.append({name: (CASES[name]["batches"][step : step + 1] or [[]])[0] for name in names})


def expected(case: dict[str, Any], rows: list[Row]) -> list[Row]:
    """The rows for comparison with a case: without the sequences that it does not state."""
    is_open = [("__sequence" not in row) for row in case["silver"]]
    return [
        {name: value for name, value in row.items() if not (name == "__sequence" and free)}
        for row, free in zip(rows, is_open, strict=True)
    ]


def document(key: int, at: int, op: str = "u", /, **fields: Any) -> Row:
    return {"op": op, "key": key, "at": at, "after": {"_id": key, **fields}}


class Killed(BaseException):
    """Raised where a process would be killed."""


def killing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool, call: int = 1) -> None:
    """Let the process die in the `call`-th call of the function, right before it runs or right after it."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1, 1_000_000))

    def dying(*args: Any, **named: Any) -> Any:
        if next(calls) != call:
            return real(*args, **named)
        if after:
            real(*args, **named)
        raise Killed

    monkeypatch.setattr(owner, name, dying)


def killed_at(act: Callable[[], object], owner: Any, name: str, *, after: bool) -> None:
    """Call `act`, which must die in the first call of the function, as in `killing`."""
    with pytest.MonkeyPatch.context() as patch:
        killing(patch, owner, name, after=after)
        with pytest.raises(Killed):
            act()


def forget_claims(hop: Hop) -> None:
    """Release the claims that a killed run left behind: its successor runs in the same process, and may take them over."""
    for known in registry.read(hop.spark, hop.settings).namespaces:
        for table in (hop.layout.silver(known.db, known.collection), hop.layout.gold(known.db, known.collection)):
            if delta.exists(hop.spark, table):
                Writer.claim(hop.spark, table, take_over=True).release()


def lose(spark: SparkSession, table: tables.TableRef, number: int = 0) -> str:
    """Delete one data file of the table's newest version, and return its name."""
    files = sorted(delta.data_files(spark, table) or [], key=lambda file: (file.between("batch") or (0, 0), file.name))
    (Path(table.path or "") / files[number].name).unlink()
    return files[number].name
