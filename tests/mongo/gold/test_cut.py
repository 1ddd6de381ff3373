"""All gold tables at one cluster time of a real server, with complete transactions."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from cdc_core import errors
from cdc_core.settings import parse as settings
from pipelines import run as layers
from pipelines.capture import heartbeats
from pipelines.capture import service as capture
from pipelines.delta import owners
from pipelines.delta import tables as delta
from pipelines.delta.writer import Writer
from pipelines.gold import run as gold
from pipelines.operations import cut, cut_requests
from pipelines.silver import run as silver
from tests.harness import captures

if TYPE_CHECKING:
    from pymongo import MongoClient
    from pymongo.database import Database
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.journey  # minutes on a slow machine

ACCOUNTS, AMOUNT = 8, 100
COLLECTIONS = ("checking", "savings")
TOTALS = "SELECT 'all' AS which, c.n + s.n AS n FROM (SELECT sum(balance) AS n FROM {{{{ ref('{0}.checking') }}}}) AS c CROSS JOIN (SELECT sum(balance) AS n FROM {{{{ ref('{0}.savings') }}}}) AS s"


def transfer(mongo: MongoClient[Any], database: Database[Any], random: Random) -> str:
    """Move money between several documents of both collections in one transaction; returns its cluster time as `--as-of` takes it."""
    with mongo.start_session() as session:
        with session.start_transaction():
            for _ in range(random.randint(1, 3)):
                amount = random.randint(1, 20)
                for collection, sign in zip(random.sample(COLLECTIONS, 2), (1, -1)):
                    chosen = {"_id": random.randrange(ACCOUNTS)}
                    database[collection].update_one(chosen, {"$inc": {"balance": sign * amount}}, session=session)
        at = session.operation_time
        assert at is not None
        return f"{at.time}:{at.inc}"


def test_every_cut_shows_transactions_whole(
    spark: SparkSession,
    mongo: MongoClient[Any],
    mongodb_uri: str,
    database: Database[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Money moves between two collections during a snapshot and after it, and commits split transactions. At every cut the sum over
    both collections, and in a model, is unchanged.
    """
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "total.sql").write_text(TOTALS.format(database.name))
    chosen = settings.parse(
        {
            "name": "cuts",
            "lakehouse": {"root": str(tmp_path / "lakehouse")},
            "source": {
                "mongodb.connection.string": mongodb_uri,
                "collection.include.list": rf"{database.name}\..*",
                "capture.mode": "change_streams",
                "max.batch.size": 23,
            },
            "silver": {"defaults": {"history": True}},
            "gold": {"models": str(tmp_path / "models")},
        }
    )
    for collection in COLLECTIONS:
        database[collection].insert_many([{"_id": number, "balance": AMOUNT} for number in range(ACCOUNTS)])
    random = Random("transfers")
    beside = threading.Thread(target=lambda: [transfer(mongo, database, random) for _ in range(25)])
    beside.start()
    capture.run(spark, chosen, once=True)
    beside.join()
    times = [transfer(mongo, database, random) for _ in range(40)]
    capture.run(spark, chosen, once=True)
    layout = delta.layout(chosen.lakehouse)
    bronze = layout.bronze(chosen.name)
    split = spark.sql(
        f"SELECT left(sequence, 16) FROM {bronze} WHERE kind = 'change' GROUP BY 1 HAVING count(DISTINCT batch) > 1"
    ).count()
    assert split > 0, "no commit split a transaction"
    with pytest.raises(errors.Temporary, match="which is before 4294967295:"):
        cut.run(spark, chosen, as_of="4294967295:1")

    made = [cut.run(spark, chosen, as_of=asked) for asked in (times[20], "now")]
    with pytest.raises(errors.DecisionNeeded, match="silver or a history is already past .* medallion cut show --as-of"):
        cut.run(spark, chosen, as_of=times[20])
    assert made[0].batch < made[1].batch and made[0].until <= made[1].time
    assert cut.read(spark, chosen) == made[::-1]
    for each in made:
        assert (each.documents, each.missing) == (cut.EXACT, ())
        names = {f"{database.name}.{name}{ending}" for name in COLLECTIONS for ending in ("", "_history")}
        assert {table.name for table in each.tables} == {"total", *names}
        held = {
            table.name: spark.sql(f"SELECT * FROM {table.identifier} VERSION AS OF {table.version}") for table in each.tables
        }
        assert held["total"].collect()[0].n == 2 * ACCOUNTS * AMOUNT
        rows = [row.balance for name in COLLECTIONS for row in held[f"{database.name}.{name}"].collect()]
        assert (len(rows), sum(rows)) == (2 * ACCOUNTS, 2 * ACCOUNTS * AMOUNT)
    counted = {row.table: row["rows"] for row in spark.sql(made[1].sql).collect() if "history" not in row.table}
    assert counted == {"total": 1, **{f"{database.name}.{name}": ACCOUNTS for name in COLLECTIONS}}
    monkeypatch.setattr(cut, "NEAR", 2)  # fewer than the number of batches that one cluster time may span
    for asked in (*times[::4], "now"):
        past = cut.past(spark, chosen, as_of=asked)
        balances = [row.balance for table in past.tables for row in spark.sql(table.relation).collect()]
        assert (len(balances), sum(balances), past.missing) == (2 * ACCOUNTS, 2 * ACCOUNTS * AMOUNT, ())
        assert {row["rows"] for row in spark.sql(past.sql).collect()} == {ACCOUNTS}
    with pytest.raises(errors.DecisionNeeded, match="bronze begins after 5:1"):
        cut.past(spark, chosen, as_of="5:1")
    with pytest.raises(errors.Temporary, match="which is before 4294967295:1"):
        cut.past(spark, chosen, as_of="4294967295:1")
    # Only one collection changes: the tables of the other one do not change, and are valid for the new time, too.
    database.checking.update_one({"_id": 0}, {"$set": {"note": "alone"}})
    capture.run(spark, chosen, once=True)
    silver.run(spark, chosen)
    before = cut.past(spark, chosen, as_of="now")
    gold.run(spark, chosen)
    after = cut.past(spark, chosen, as_of="now")
    assert before.time <= made[1].time < after.time
    rows = [row for table in after.tables for row in spark.sql(table.relation).collect()]
    assert sorted(row.note for row in rows if "note" in row and row.note) == ["alone"] and len(rows) == 2 * ACCOUNTS
    newest = {(row["_id"], name, row["balance"]) for name in COLLECTIONS for row in database[name].find()}
    live = {
        (row["_id"], name, row["balance"])
        for name in COLLECTIONS
        for row in spark.table(str(layout.gold(database.name, name))).collect()
    }
    assert live == newest


def test_a_running_pipeline_makes_the_cuts_it_is_asked_for(
    spark: SparkSession,
    mongo: MongoClient[Any],
    mongodb_uri: str,
    database: Database[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cuts are made while a writer runs, and contain its transactions completely; the pipeline continues, and errors go to the
    requester. Without a running pipeline the cut is made at once. An idle source causes no longer wait: the capture is asked how far
    it has read.
    """
    monkeypatch.setattr(heartbeats, "LEASE_EVERY_MS", 10**9)  # otherwise a lease renewal would show it, a minute later
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "total.sql").write_text(TOTALS.format(database.name))
    chosen = settings.parse(
        {
            "name": "beside",
            "lakehouse": {"root": str(tmp_path / "lakehouse")},
            "source": {
                "mongodb.connection.string": mongodb_uri,
                "collection.include.list": rf"{database.name}\..*",
                "capture.mode": "change_streams",
                "max.batch.size": 7,
                "commit.interval.ms": 200,
                "signal.poll.interval.ms": 200,
                "heartbeat.interval.ms": 0,
            },
            "gold": {"models": str(tmp_path / "models")},
        }
    )
    for collection in COLLECTIONS:
        database[collection].insert_many([{"_id": number, "balance": AMOUNT} for number in range(ACCOUNTS)])
    random, written, stop = Random("beside"), threading.Event(), threading.Event()

    def write() -> None:
        while not written.wait(0.05):
            transfer(mongo, database, random)

    def asked(as_of: str = "now") -> cut.Cut:
        return cut_requests.run(spark, chosen, as_of=as_of)

    writer = threading.Thread(target=write)
    ended: list[Any] = []
    beside = threading.Thread(target=lambda: ended.append(layers.run(spark, chosen, once=False, stop=stop)))
    layout = delta.layout(chosen.lakehouse)
    beside.start()
    try:
        writer.start()
        captures.until(lambda: owners.is_held(spark, layout.gold(database.name, "savings")), seconds=240)
        made = [asked() for _ in range(3)]
        with pytest.raises(errors.DecisionNeeded, match="silver or a history is already past"):
            asked("1700000000:1")
        written.set()
        writer.join()
        made.append(asked())  # the source is idle
        database.checking.insert_one({"_id": "behind", "balance": 0})
        gold_table = str(layout.gold(database.name, "checking"))
        captures.until(lambda: spark.table(gold_table).count() == ACCOUNTS + 1, seconds=120)
    finally:
        written.set()
        stop.set()
        beside.join(120)
    assert len({each.name for each in made}) >= 3 and cut.read(spark, chosen)[0].name == made[-1].name
    for each in made:
        held = {
            table.name: spark.sql(f"SELECT * FROM {table.identifier} VERSION AS OF {table.version}") for table in each.tables
        }
        balances = [row.balance for name in COLLECTIONS for row in held[f"{database.name}.{name}"].collect()]
        assert (sum(balances), each.missing, held["total"].collect()[0].n) == (1600, (), 1600), each
    assert ended and ended[0]["silver"].events > 2 * ACCOUNTS
    assert asked().tables  # made by this process

    # A pipeline that claims to serve requests and does not, and one that has ended.
    cut_requests._record(spark, chosen, cut_requests.SERVING)
    monkeypatch.setattr(cut_requests, "TAKE_SECONDS", 1.0)
    owner = Writer.claim(spark, layout.bronze(chosen.name), newest_names=("batch", "log"))
    with pytest.raises(errors.Temporary, match="did not take the request up"):
        asked()
    answers = {"id": "1", "name": "beside", "host": "elsewhere", "process": 1, "started": ""}
    assert not cut_requests._is_served(spark, chosen, answers)
    owner.release()
    assert not cut_requests._is_served(spark, chosen)
    states = [row["state"] for row in cut_requests._rows(spark, chosen)]
    assert states.count("made") == 4 and states.count("failed") == 1 and states.count("withdrawn") == 1
