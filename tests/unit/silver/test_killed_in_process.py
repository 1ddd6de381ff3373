"""A process may be killed at any step of a batch without a query: the next run completes it.

`tests/spark/silver/test_in_process.py` tests this with Delta's own transactions.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import pytest

from pipelines.bronze import quarantine_table
from pipelines.delta import live_files, maintenance, owners
from pipelines.delta.writer import Writer
from tests.harness import bronze_rows, oracle, statements, without_spark
from tests.harness.layers import killed_at, plain
from tests.harness.without_spark import Hop, Log

STATEMENTS = [
    (Writer, "define"),
    (Writer, "replace_arrow"),
    (Writer, "compact_files"),
    (live_files.LiveFiles, "places"),
]
CASES = [*((layer, *each) for layer in ("silver", "gold") for each in STATEMENTS), ("silver", quarantine_table, "append")]


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    """A table of four documents, where two files already are too many."""
    with without_spark.running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "MANY_FILES", 1)
        patch.setattr(maintenance, "_surplus_files", lambda writer: len(writer.live.files()))
        found = Hop(tmp_path)
        bronze = Log(found)
        bronze.append({"t": [{"op": "c", "key": key, "at": 10 + key, "after": {"_id": key, "n": 0}} for key in range(4)]})
        found.run()
        new = {"op": "u", "key": 1, "at": 20, "after": {"_id": 1, "n": 1, "new": "x"}}
        bad = {"op": "u", "key": 3, "at": 23, "text": "{"}
        bronze.append(
            {"t": [new, {"op": "d", "key": 2, "at": 21}, {"op": "c", "key": 7, "at": 22, "after": {"_id": 7}}, bad]}
        )
        yield found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("layer", "owner", "name"), CASES, ids=[f"{layer} {name}" for layer, _, name in CASES])
def test_killed_at_any_step_it_goes_on(hop: Hop, layer: str, owner: Any, name: str, after: bool) -> None:
    """Leaves new columns without rows, remembered deletes, facts about a quarantined event, or a data file that no commit names."""
    if layer == "gold":
        hop.silver()
    killed_at(getattr(hop, layer), owner, name, after=after)
    hop.run()
    rows = sorted(oracle.read(hop.gold_table.path or "").to_pylist(), key=lambda row: row["_id"])
    expected = [{"_id": 0, "n": 0}, {"_id": 1, "n": 1, "new": "x"}, {"_id": 3, "n": 0}, {"_id": 7}]
    assert [plain({name: row[name] for name in row if name != "__key"}) for row in rows] == expected
    held = quarantine_table.HeldEvents.of(without_spark.SPARK, hop.layout.quarantine("cases", "t"))
    assert held is not None and (held.count(), held.keys()) == (1, {"3"})


class Killed(BaseException):
    """Ends a run, like SIGKILL: what it still writes is undone."""


def kill(act: Callable[[], object], root: Path, statement: statements.Statement, nth: int) -> bool:
    """Whether `act` was killed before the statement ran for the nth time: the folder is as it was then."""
    copy = root.with_name("killed")

    def strike() -> None:
        shutil.copytree(root, copy)
        raise Killed

    with statements.armed(statement, nth, strike):
        try:
            act()
        except Killed:
            pass
    if not copy.exists():
        return False
    shutil.rmtree(root)
    copy.rename(root)
    owners.HELD.clear()
    return True


def drawn(draws: random.Random, batch: int) -> tuple[object, bytes | None]:
    """A change of one of a few documents, which get more fields from batch to batch."""
    key = draws.randrange(9)
    values: dict[str, Any] = {
        "a": draws.randrange(99),
        "b": "x" * draws.randrange(9),
        "c": {"d": [1.5], "e": None},
        "f": [{"g": 1}],
    }
    fields = {name: values[name] for name in "abcf"[: 1 + batch] if draws.random() < 0.7}
    return key, None if draws.random() < 0.2 else bson.encode({"_id": key, **fields})


def content(hop: Hop) -> dict[str, list[str]]:
    """The rows of each table; a remembered delete may be there twice."""
    rows = {}
    for kind in ("silver", "gold", "history", "deletes"):
        path = Path(getattr(hop.layout, kind)(bronze_rows.DB, "t").path or "")
        found = map(repr, oracle.read(path).to_pylist()) if (path / "_delta_log").exists() else ()
        rows[kind] = sorted(set(found) if kind == "deletes" else found)
    return rows


DELETES = ("tombstone", "drop", "rewrite", "rewrite-with-tombstone")


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a statement of a generator that nobody reads on
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_statement_it_goes_on(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is killed at up to three statements of those that earlier ones ran; then its tables are those of undisturbed runs."""
    draws = random.Random(seed)
    monkeypatch.setattr(maintenance, "MANY_FILES", draws.choice([1, 1000]))
    monkeypatch.setattr(maintenance, "_surplus_files", lambda writer: len(writer.live.files()))
    monkeypatch.setattr(maintenance, "_optimize", lambda writer: None)
    options = {"delete.tombstone.handling.mode": draws.choice(DELETES), "history": True, "keep.document": seed % 2 == 0}
    kills = 0
    with without_spark.running():
        undisturbed, killed = (Hop(tmp_path / name, **options) for name in ("undisturbed", "disturbed"))
        ran: dict[str, set[statements.Statement]] = {"silver": set(), "gold": set()}
        for batch in range(4):
            changes = [drawn(draws, batch) for _ in range(draws.choice([1, 5, 20]))]
            for hop in (undisturbed, killed):
                hop.append(*changes)
            undisturbed.run()
            for name, known in ran.items():
                for statement in draws.choices(sorted(known), k=3) if known else ():
                    kills += kill(getattr(killed, name), tmp_path / "disturbed", statement, draws.choice([1, 1, 2]))
                with statements.recorded(known):
                    getattr(killed, name)()
            assert content(killed) == content(undisturbed)
    assert kills > 3
