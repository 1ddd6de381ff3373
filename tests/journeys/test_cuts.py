"""Cuts during writes to the source, while the commands that make them are killed."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import oracle, processes

ACCOUNTS, AMOUNT = 40, 100
COLLECTIONS = ("checking", "savings")
TRANSFERS, ROUNDS = 200, 8
DONE, TEMPORARY = 0, 75


def transfer(mongo: Any, database: Any, rng: random.Random) -> None:
    """Move money between documents of both collections, and sometimes close an account, in one transaction."""
    with mongo.start_session() as session, session.start_transaction():
        for _ in range(rng.randint(1, 3)):
            amount = rng.randint(1, 20)
            for collection, sign in zip(rng.sample(COLLECTIONS, 2), (1, -1)):
                chosen = {"_id": rng.randrange(ACCOUNTS)}
                database[collection].update_one(chosen, {"$inc": {"balance": sign * amount}}, upsert=True, session=session)
        if rng.random() < 0.2:
            closed = database.savings.find_one_and_delete({"_id": rng.randrange(ACCOUNTS)}, session=session)
            if closed is not None:
                database.checking.update_one(
                    {"_id": rng.randrange(ACCOUNTS)}, {"$inc": {"balance": closed["balance"]}}, upsert=True, session=session
                )


class Transfers(threading.Thread):
    """Makes at least `TRANSFERS` transfers, with other writes between them, until it is stopped."""

    def __init__(self, mongo: Any, database: Any) -> None:
        super().__init__()
        self.mongo, self.database, self.made, self.stop = mongo, database, 0, threading.Event()

    def run(self) -> None:
        rng = random.Random("transfers")
        while self.made < TRANSFERS or not self.stop.is_set():
            self.database.noise.insert_many([{"n": rng.random()} for _ in range(rng.randint(1, 40))])
            transfer(self.mongo, self.database, rng)
            self.made += 1
            time.sleep(rng.uniform(0.1, 0.5))


def with_totals(tmp_path: Path, mongodb_uri: str, database: Any) -> processes.Pipeline:
    """A pipeline over both collections, filled with accounts, and with a model of their sum."""
    models = tmp_path / "models"
    models.mkdir()
    sides = " UNION ALL ".join(f"SELECT balance FROM {{{{ ref('{database.name}.{name}') }}}}" for name in COLLECTIONS)
    (models / "total.sql").write_text(f"SELECT 'all' AS which, sum(balance) AS n FROM ({sides})")
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings(
        source="  capture.mode: change_streams\n  max.batch.size: 29", gold=f"{{models: {models}}}"
    )
    for name in COLLECTIONS:
        database[name].insert_many([{"_id": number, "balance": AMOUNT} for number in range(ACCOUNTS)])
    return pipeline


@pytest.mark.timeout(2400)
def test_the_sum_is_the_same_at_every_cut(tmp_path: Path, mongodb_uri: str, mongo: Any, database: Any) -> None:
    """200 transfers under load, while the capture and the command that makes cuts are killed repeatedly: at each recorded cut the sum of
    both collections, and the model over them, are as at the beginning."""
    pipeline = with_totals(tmp_path, mongodb_uri, database)
    rng, transfers = random.Random("kills"), Transfers(mongo, database)
    capture, maker = pipeline.command("capture", "--continuous"), pipeline.command("gold", "--as-of", "now")
    kills = 0
    with processes.all_killed(capture, maker):
        capture.start()
        transfers.start()
        try:
            processes.until(lambda: processes.version(pipeline.bronze) > 3, seconds=120, what="bronze", alive=[capture])
            for number in range(ROUNDS):
                if number % 2:
                    assert maker.run(400) in (DONE, TEMPORARY), maker.said[-3000:]
                else:
                    maker.start()
                    time.sleep(rng.uniform(8, 30))
                    rng.choice((maker.kill, maker.kill_alone))()
                    kills += 1
                if number % 3 == 1:
                    rng.choice((capture.kill, capture.kill_alone))()
                    kills += 1
                    capture.start()
        finally:
            transfers.stop.set()
            transfers.join()
        # SIGTERM during its imports would end the last capture with another exit code: wait until it commits.
        seen = processes.version(pipeline.bronze)
        database.noise.insert_one({"n": 0})
        processes.until(lambda: processes.version(pipeline.bronze) > seen, seconds=120, what="a commit", alive=[capture])
        capture.terminate()
        assert capture.wait(60) == 0, capture.said[-3000:]
    assert transfers.made >= TRANSFERS and kills >= 6
    check_the_end(pipeline, database)


@pytest.mark.timeout(2400)
def test_the_sum_is_the_same_at_every_cut_beside_a_running_pipeline(
    tmp_path: Path, mongodb_uri: str, mongo: Any, database: Any
) -> None:
    """200 transfers under load during `medallion run`, which makes the requested cuts, and is killed while it makes some of them."""
    pipeline = with_totals(tmp_path, mongodb_uri, database)
    rng, transfers = random.Random("beside"), Transfers(mongo, database)
    running, asking = pipeline.command("run"), pipeline.command("gold", "--as-of", "now")
    kills, made = 0, 0
    with processes.all_killed(running, asking):
        running.start()
        transfers.start()
        try:
            for number in range(ROUNDS):
                wait_for_a_commit(pipeline.gold("savings"), running)
                if number % 3 == 2:
                    asking.start()
                    time.sleep(rng.uniform(8, 20))
                    rng.choice((running.kill, running.kill_alone))()
                    assert asking.wait(400) in (DONE, TEMPORARY), asking.said[-3000:]
                    kills += 1
                    running.start()
                    continue
                code = asking.run(400)
                assert code in (DONE, TEMPORARY), asking.said[-3000:]
                made += code == DONE
        finally:
            transfers.stop.set()
            transfers.join()
        assert asking.run(400) == DONE, asking.said[-3000:]
        running.terminate()
        assert running.wait(120) == 0, running.said[-3000:]
    assert transfers.made >= TRANSFERS and kills >= 2 and made >= 3
    check_the_end(pipeline, database)


def check_the_end(pipeline: processes.Pipeline, database: Any) -> None:
    """Capture and make a cut once more, undisturbed; then check every recorded cut, and that gold equals the source."""
    for name, options in (("capture", ("--once",)), ("gold", ("--as-of", "now"))):
        last = pipeline.command(name, *options, log=f"last-{name}")
        assert last.run(400) == 0, last.said[-3000:]
    check_cuts(pipeline)
    assert {name: oracle.compare(database[name], pipeline.gold(name)) for name in (*COLLECTIONS, "noise")} == {
        "checking": [],
        "savings": [],
        "noise": [],
    }


def wait_for_a_commit(table: Path, writer: processes.Command) -> None:
    """Wait until the table has a newer version than now."""
    seen = processes.version(table)
    processes.until(lambda: processes.version(table) > seen, seconds=240, what="a commit", alive=[writer])


def check_cuts(pipeline: processes.Pipeline) -> None:
    """Assert that at each cut the sum of both collections, and the model over them, are as at the beginning."""
    cuts = listed(pipeline)
    assert len(cuts) >= 3, "too few cuts were made to say anything"
    for cut in cuts:
        at = {table["name"]: table["version"] for table in cut["tables"]}
        assert not cut["missing"] and cut["documents"] == "exact"
        held = [
            amount
            for name in COLLECTIONS
            for amount in balances(pipeline.gold(name), at[f"{pipeline.database}.{name}"], "balance")
        ]
        assert sum(held) == 2 * ACCOUNTS * AMOUNT, cut["name"]
        assert balances(pipeline.model("total"), at["total"], "n") == [2 * ACCOUNTS * AMOUNT], cut["name"]


def listed(pipeline: processes.Pipeline) -> list[dict[str, Any]]:
    """The cuts that `medallion cut list` shows."""
    shown = pipeline.command("cut", "list", "--json", log="cuts")
    assert shown.run(120) == 0, shown.said[-3000:]
    (line,) = [line for line in shown.said.splitlines() if line.startswith("[{")]
    return list(json.loads(line))


def balances(table: Path, version: int, column: str) -> list[int]:
    """One column of a table at a version, read without Spark."""
    return [int(found) for found in oracle.read(table, columns=[column], version=version)[column].to_pylist()]
