"""Captures of a sharded cluster, whose shards report events twice, in another order, or late.

Without Spark, because silver and gold do not depend on the shards.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from cdc_core.extended_json import keys
from cdc_core.snapshot import state as snapshot_state
from pipelines.mongodb import catalog, snapshot_read
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import failures as mongodb_failures
from pipelines.mongodb import server as mongodb_server
from tests.harness import captured, captures, sharded_clusters


def begin(cluster: sharded_clusters.ShardedCluster) -> None:
    """Create a collection `orders` with 500 documents on each of two shards, all with a state of 0."""
    cluster.make_database("shop")
    cluster.shard_collection("shop", "orders", {"region": 1})
    cluster.move("shop.orders", "b", min={"region": 500})
    with contextlib.closing(mongodb.client(cluster.uri)) as client:
        client.shop.orders.insert_many([{"_id": number, "region": number, "state": 0} for number in range(1000)])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[sharded_clusters.ShardedCluster]:
    with sharded_clusters.ShardedCluster(tmp_path) as found:
        begin(found)
        yield found


@pytest.mark.timeout(300)
def test_rows_come_to_what_the_source_holds(cluster: sharded_clusters.ShardedCluster, tmp_path: Path) -> None:
    """Snapshot and stream together give the documents of the source, with orphans, documents and ranges that move, a shard that joins,
    another shard key, a rename, and a database that is dropped and created again."""
    found = captures.pipeline(cluster.uri, tmp_path, "shop")
    with contextlib.closing(mongodb.client(cluster.uri)) as client:
        orders, rows = client.shop.orders, []
        stream = captured.Stream(found, client, mongodb_server.operation_time(client))

        def check(name: str = "orders") -> None:
            source = {keys.canonical(each["_id"]): each for each in client.shop[name].find()}
            # After a read of all shards, from which the router knows their times.
            stream.read(mongodb_server.operation_time(client))
            assert captured.documents([*rows, *stream.table], name) == source

        # Moved documents stay on their old shard as orphans for minutes, and are no documents of the collection.
        cluster.move("shop.orders", "b", min={"region": 300}, max={"region": 500})
        for number in range(100):
            orders.update_one({"_id": number * 7}, {"$inc": {"state": 1}})
            orders.delete_one({"_id": number * 7 + 1})
            at = {"_id": 700 + number, "region": 700 + number}
            cluster.change_shard_key("shop.orders", "b", "a", deleted=at, inserted={"_id": at["_id"], "region": number})
            if number == 50:
                rows = captured.snapshot_rows(found, client, after=mongodb_server.operation_time(client))
        for number in range(10, 100):
            inserted = {"_id": number, "region": number + 600}
            cluster.change_shard_key("shop.orders", "a", "b", deleted={"_id": number, "region": number}, inserted=inserted)
        check()
        cluster.add_shard("c")
        cluster.move("shop.orders", "c", min={"region": 900})
        orders.insert_many([{"_id": 2000 + number, "region": 890 + number} for number in range(20)])
        check()
        (before,) = catalog.collections(client, ["shop"])
        cluster.reshard("shop", "orders", {"_id": 1})
        orders.update_many({}, {"$set": {"is_resharded": True}})
        check()
        # Resharding causes no event: a chunk that was planned before it must not be read from the new collection.
        with pytest.raises(mongodb_failures.CollectionChanged):
            list(
                snapshot_read.read_chunk(
                    client, before, snapshot_read.IdRange(), after=mongodb_server.operation_time(client)
                )
            )
        cluster.rename("shop", "orders", "renamed")
        client.shop.renamed.update_many({}, {"$set": {"is_renamed": True}})
        stream.read(mongodb_server.operation_time(client))
        renames = [each for each in stream.table if each["kind"] == "schema_change" and "rename" in each["payload"]]
        heartbeats = [json.loads(each["payload"]) for each in stream.table if each["kind"] == "heartbeat"]
        planned = [each.missing for each in snapshot_state.states(each for each in heartbeats if "snapshot" in each)]
        assert len(renames) > 1 and planned == [()] * (len(renames) - 1) + [("shop.renamed",)]
        cluster.drop_database("shop")
        cluster.make_database("shop")
        client.shop.again.insert_many([{"_id": number} for number in range(10)])
        check("again")
        stream.close()


@pytest.mark.timeout(300)
def test_a_position_that_the_shards_lost_is_noticed_at_the_start(tmp_path: Path) -> None:
    """A mongos reports it only after a shard has answered, and not in its first reply."""
    with sharded_clusters.ShardedCluster(tmp_path, oplog_mb=4) as cluster:
        begin(cluster)
        found = captures.pipeline(cluster.uri, tmp_path, "shop")
        with contextlib.closing(mongodb.client(cluster.uri)) as client:
            start = mongodb_server.operation_time(client)
            captured.Stream(found, client, start).close()
            end = time.monotonic() + 120
            while first_of_oplog(cluster) <= start:
                assert time.monotonic() < end
                client.shop.orders.update_many(
                    {"region": {"$lt": 300}}, {"$set": {"padding": "x" * 10_000, "at": time.time()}}
                )
            for _ in range(5):
                with pytest.raises(errors.PositionLost):
                    captured.Stream(found, client, start)


def first_of_oplog(cluster: sharded_clusters.ShardedCluster) -> Any:
    with cluster.shards["a"].members[0].client() as client:
        return client.local["oplog.rs"].find_one(sort={"$natural": 1})["ts"]
