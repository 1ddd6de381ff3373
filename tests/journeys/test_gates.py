"""Gates with expectations: runs that are killed between the audit and the commit, and two runs at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import oracle, processes

KILLS = 4
DONE, REFUSED, TEMPORARY = 0, 3, 75
TOTALS = """\
{{{{ config(materialized='incremental', unique_key='customer') }}}}
SELECT customer, sum(amount) AS total FROM {{{{ ref('{0}.orders', key='customer') }}}} GROUP BY customer
"""
SUITE = """\
expectations:
  - type: expect_column_values_to_be_between
    kwargs: {column: total, min_value: 0}
"""

Rows = frozenset[tuple[Any, ...]]


class Reader(threading.Thread):
    """Reads a table repeatedly without Spark, and keeps each state that it sees."""

    def __init__(self, table: Path) -> None:
        super().__init__()
        self.table, self.seen, self.stop = table, set[Rows](), threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.05):
            self.seen.add(rows(self.table))

    def __enter__(self) -> Reader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.join()


def rows(table: Path) -> Rows:
    found = oracle.read(table, columns=["customer", "total"])
    return frozenset(zip(found["customer"].to_pylist(), map(int, found["total"].to_pylist())))


@pytest.mark.timeout(1800)
def test_readers_see_the_old_version_or_the_new_one(tmp_path: Path, mongodb_uri: str, database: Any) -> None:
    """A refused candidate is never seen. A run that is killed as soon as its verdict is recorded has published nothing or everything.
    Two runs at once publish one version."""
    for name, text in {"models/totals.sql": TOTALS.format(database.name), "expectations/totals.yml": SUITE}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    folders = ", ".join(f"{name}: {tmp_path / name}" for name in ("models", "expectations"))
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings(gold=f"{{{folders}}}")
    totals, results = pipeline.model("totals"), pipeline.root / "ops" / "expectations"
    database.orders.insert_many([{"_id": n, "customer": n % 2, "amount": 5} for n in range(4)])
    run = pipeline.command("run", "--once")
    assert run.run(300) == DONE, run.said[-3000:]
    old = rows(totals)
    assert old == {(0, 10), (1, 10)}

    with Reader(totals) as reader:
        database.orders.insert_one({"_id": 4, "customer": 1, "amount": -100})
        assert run.run(300) == REFUSED
        said = run.said
        assert "totals: the new version is not published" in said
        assert "expect_column_values_to_be_between of total: 1 of 1 changed rows do not meet it" in said
        assert "with the keys 1" in said
        assert reader.seen == {old}

        database.orders.insert_one({"_id": 5, "customer": 1, "amount": 200})
        new = frozenset({(0, 10), (1, 110)})
        for name in ("capture", "silver"):
            layer = pipeline.command(name, "--once")
            assert layer.run(300) == DONE, layer.said[-3000:]
        between, gold = 0, pipeline.command("gold")
        with gold:
            for number in range(KILLS):
                before = processes.version(results)
                gold.start()
                _until_noted(results, before, gold)
                (gold.kill, gold.kill_alone)[number % 2]()
                time.sleep(1)  # a JVM without its process finishes what it has begun
                assert rows(totals) in (old, new)
                between += rows(totals) == old
                if rows(totals) == new:
                    break
        assert between, "no kill came between the audit and the commit"

        two = [pipeline.command("gold", log=f"gold-{number}") for number in range(2)]
        with processes.all_killed(*two):
            for command in two:
                command.start()
            codes = [command.wait(300) for command in two]
        assert DONE in codes and set(codes) <= {DONE, REFUSED, TEMPORARY}, [command.said[-2000:] for command in two]
        assert rows(totals) == new
    assert reader.seen <= {old, new}
    assert oracle.compare(database.orders, pipeline.gold("orders")) == []


def _until_noted(results: Path, before: int, running: processes.Command) -> None:
    """Wait, almost without pauses, until the verdict is in its table: the commit that publishes follows within a second."""
    noted = results / "_delta_log" / f"{before + 1:020}.json"
    deadline = time.monotonic() + 120
    while not noted.exists():
        assert running.is_running and time.monotonic() < deadline, running.said[-3000:]
        time.sleep(0.002)
