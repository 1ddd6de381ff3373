"""A replica set with a lagging secondary: a chunk is as new as its time says, and cannot be rolled back."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from pipelines.demo import embedded_mongodb
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from tests.harness.captures import until


@contextlib.contextmanager
def member(folder: Path, port: int) -> Iterator[str]:
    """Another mongod of the embedded server's replica set."""
    folder.mkdir()
    command = [str(embedded_mongodb.find()), "--dbpath", str(folder), "--port", str(port), "--bind_ip", "127.0.0.1"]
    command += ["--replSet", embedded_mongodb.REPLICA_SET, "--wiredTigerCacheSizeGB", "0.25", "--oplogSize", "64"]
    command += ["--nounixsocket", "--setParameter", "enableTestCommands=1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture
def hosts(start_mongodb: Any, tmp_path: Path) -> Iterator[list[str]]:
    """A primary, and a secondary that stopped applying writes after the first document of the capped collection."""
    server = start_mongodb(embedded_mongodb.ServerOptions(oplog_mb=64))
    with member(tmp_path / "second", embedded_mongodb._free_port()) as second, contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(mongodb.client(server.uri)))
        config = first.admin.command("replSetGetConfig")["config"]
        config["members"].append({"_id": 1, "host": second, "priority": 0, "votes": 0})
        config["version"] += 1
        first.admin.command("replSetReconfig", config)
        first.shop.create_collection("ring", capped=True, size=100_000)
        first.shop.ring.insert_one({"_id": 1, "v": "old"})
        direct = stack.enter_context(contextlib.closing(mongodb.client(f"mongodb://{second}/?directConnection=true")))
        read = direct.shop.get_collection("ring", read_preference=ReadPreference.SECONDARY_PREFERRED)
        until(lambda: direct.admin.command("hello").get("secondary") and read.find_one({"_id": 1}))
        entered = direct.admin.command("configureFailPoint", "rsSyncApplyStop", mode="alwaysOn")["count"]
        # It would still apply the batch for which it is waiting.
        direct.admin.command("waitForFailPoint", "rsSyncApplyStop", timesEntered=entered + 1, maxTimeMS=60_000)
        first.shop.ring.update_one({"_id": 1}, {"$set": {"v": "new"}})
        first.shop.ring.insert_one({"_id": 2, "v": "new"})
        assert read.find_one({"_id": 1}) == {"_id": 1, "v": "old"}
        yield [server.address, second]


def test_a_capped_collection_is_read_from_the_primary(hosts: list[str]) -> None:
    """Without snapshot reads a secondary's documents would be labelled with a time that it has not reached."""
    uri = f"mongodb://{','.join(hosts)}/?replicaSet={embedded_mongodb.REPLICA_SET}&readPreference=secondaryPreferred"
    with contextlib.closing(mongodb.client(uri)) as client:
        after = mongodb_server.operation_time(client)
        until(lambda: len(client.nodes) == 2)
        (ring,) = catalog.collections(client, ["shop"])
        chunks = list(snapshot_read.read_chunk(client, ring, snapshot_read.IdRange(), after=after, fetch_size=1))
        assert [bson.decode(raw)["v"] for chunk in chunks for raw in chunk.documents] == ["new", "new"]
        assert all(chunk.at >= after for chunk in chunks)


def test_a_repair_calls_no_document_gone_that_a_secondary_does_not_have_yet(hosts: list[str]) -> None:
    """A document that is newer than the repair's first chunk is looked up at the time of the second one, and a lagging server is waited
    for.
    """
    uri = f"mongodb://{','.join(hosts)}/?replicaSet={embedded_mongodb.REPLICA_SET}&readPreference=secondary"
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(mongodb.client(uri)))
        behind = stack.enter_context(contextlib.closing(mongodb.client(f"mongodb://{hosts[1]}/?directConnection=true")))
        until(lambda: len(client.nodes) == 2)
        (ring,) = catalog.collections(client, ["shop"])
        (at,) = {
            chunk.at for chunk in snapshot_read.read_chunk(client, ring, snapshot_read.IdRange(), after=Timestamp(1, 1))
        }
        stopped = {"configureFailPoint": "rsSyncApplyStop", "mode": "off"}
        going_on = threading.Timer(1, behind.admin.command, [stopped])
        going_on.start()
        stack.callback(going_on.join)
        assert len(snapshot_read.existing_ids(client, ring, {"_id": 2}, after=at)) == 1


def test_a_capped_collection_is_read_when_no_election_can_take_back_what_it_holds(start_mongodb: Any) -> None:
    """Other collections get this from snapshot reads. No event would report a document that was rolled back."""
    server = start_mongodb(embedded_mongodb.ServerOptions(parameters={"enableTestCommands": 1}))
    with contextlib.ExitStack() as stack:
        client, other = (stack.enter_context(contextlib.closing(mongodb.client(server.uri))) for _ in range(2))
        client.shop.create_collection("ring", capped=True, size=100_000)
        (ring,) = catalog.collections(client, ["shop"])
        other.admin.command("configureFailPoint", "disableSnapshotting", mode="alwaysOn")
        client.shop.get_collection("ring", write_concern=WriteConcern(w=1)).insert_one({"_id": 1})
        is_safe = threading.Event()

        def go_on() -> None:
            is_safe.set()
            other.admin.command("configureFailPoint", "disableSnapshotting", mode="off")
            other.shop.others.insert_one({})

        going_on = threading.Timer(0.5, go_on)
        going_on.start()
        stack.callback(going_on.join)
        (chunk,) = snapshot_read.read_chunk(client, ring, snapshot_read.IdRange(), after=Timestamp(1, 1))
        assert is_safe.is_set() and len(chunk.documents) == 1
