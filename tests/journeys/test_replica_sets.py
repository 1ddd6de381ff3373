"""Captures of a replica set of three members: elections, and a primary whose last writes are rolled back.

Without Spark, because silver and gold do not depend on the members.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pymongo
import pytest

from cdc_core import errors
from cdc_core.extended_json import keys
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server
from tests.harness import captured, captures, replica_sets

TESTED = ("--setParameter", "enableTestCommands=1")
QUICK = {"mongodb.heartbeat.frequency.ms": 500, "mongodb.connect.timeout.ms": 1000}


def replicating(members: list[replica_sets.Member], *, mode: str) -> None:
    """Set the fail point that stops replication on members: `alwaysOn` stops it, `off` resumes it."""
    for member in members:
        member.command("configureFailPoint", "stopReplProducer", mode=mode)


def documents(member: replica_sets.Member) -> dict[Any, Any]:
    """The documents of a member, primary or secondary; none while it does not answer."""
    with member.client(patience=5) as client, contextlib.suppress(pymongo.errors.PyMongoError):
        orders = client.shop.get_collection("orders", read_preference=pymongo.ReadPreference.SECONDARY_PREFERRED)
        return {each["_id"]: each for each in orders.find()}
    return {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("preference", ["primary", "secondary"])
def test_what_a_rollback_takes_back_is_never_captured(tmp_path: Path, preference: str) -> None:
    """Neither an open stream nor a snapshot reads writes that only the old primary has. Both continue with the new primary, and the stream
    also after another election."""
    with replica_sets.ReplicaSet(tmp_path, arguments=TESTED, settings={"electionTimeoutMillis": 4000}) as members:
        old, others = members.primary(), members.secondaries()
        found = captures.pipeline(f"{members.uri}&readPreference={preference}", tmp_path, "shop", **QUICK)
        with contextlib.closing(mongodb.client(members.uri, heartbeatFrequencyMS=500, connectTimeoutMS=1000)) as client:
            client.shop.orders.insert_many([{"_id": number, "state": "kept"} for number in range(50)])
            start = mongodb_server.operation_time(client)
            stream = captured.Stream(found, client, start)
            replicating(others, mode="alwaysOn")
            time.sleep(1)  # a fetch may be in progress
            with old.client() as alone:
                orders = alone.shop.get_collection("orders", write_concern=pymongo.WriteConcern(w=1))
                orders.insert_one({"_id": 100, "state": "lost"})
                orders.update_one({"_id": 1}, {"$set": {"state": "lost"}})
                orders.delete_one({"_id": 2})
            lost_at = mongodb_server.operation_time(client)
            rows: list[dict[str, Any]] = []

            def take_snapshot() -> None:
                while not rows:
                    # After these errors a `ChunkReader` reads again.
                    with contextlib.suppress(errors.SourceUnreachable, mongodb_failures.SnapshotExpired):
                        rows.extend(captured.snapshot_rows(found, client, after=lost_at))

            snapshot = threading.Thread(target=take_snapshot)
            snapshot.start()
            time.sleep(2)
            assert not rows
            old.signal(signal.SIGSTOP)
            replicating(others, mode="off")
            new = members.primary()
            assert new in others
            with new.client() as alone:
                orders = alone.shop.get_collection("orders", write_concern=pymongo.WriteConcern(w=1))
                orders.insert_one({"_id": 101, "state": "kept"})
                orders.update_one({"_id": 3}, {"$set": {"state": "kept, too"}})
            old.signal(signal.SIGCONT)
            captures.until(lambda: documents(old) == documents(new) != {}, 60)
            snapshot.join(60)
            with contextlib.suppress(pymongo.errors.PyMongoError):
                members.primary().command("replSetStepDown", 5, force=True)
            client.shop.orders.insert_one({"_id": 102, "state": "kept"})
            stream.read(mongodb_server.operation_time(client))
            stream.close()
            assert "lost" not in str([*rows, *stream.table])
            source = {keys.canonical(each["_id"]): each for each in client.shop.orders.find()}
            assert captured.documents([*rows, *stream.table], "orders") == source
            assert captured.documents(rows, "orders").keys() >= {str(number) for number in range(50)}
            tokens = [each["resume_token"] for each in stream.table]
            assert len(tokens) == len(set(tokens))
