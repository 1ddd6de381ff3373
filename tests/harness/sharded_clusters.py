"""A sharded cluster: a config server, two shards and a router of one server each; tests can add shards."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bson.binary import Binary
from bson.int64 import Int64

from pipelines.demo import embedded_mongodb
from tests.harness import replica_sets, routers

RESHARDS_AT_ONCE = ("--setParameter", "reshardingMinimumOperationDurationMillis=0")

MAJORITY = {"writeConcern": {"w": "majority"}}


@dataclass
class ShardedCluster:
    """A cluster that runs during a block. Shard `a` is the primary shard of every database.

    Commands that only a mongos accepts are replaced by the internal commands that a mongos sends to other servers.
    """

    folder: Path
    oplog_mb: int = 64
    shards: dict[str, replica_sets.ReplicaSet] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> ShardedCluster:
        with self._stack:
            self.config = self._stack.enter_context(self._of_one("config", "--configsvr"))
            self.add_shard("a")
            self.add_shard("b")
            # A shard without data: one with data would wait for itself in a transaction.
            able = routers.able(embedded_mongodb.find(), self.folder)
            self._router = self.add_shard("r", binary=able).members[0]
            self._a = self.shards["a"].members[0]
            self.uri = self._stack.enter_context(routers.Router(self._router.address, self._a.address)).uri
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add_shard(self, name: str, *, binary: Path | None = None) -> replica_sets.ReplicaSet:
        shard = self.shards[name] = self._stack.enter_context(self._of_one(name, "--shardsvr", binary=binary))
        self._config({"_configsvrAddShard": f"{name}/{shard.members[0].address}", "name": name})
        return shard

    def _of_one(self, name: str, role: str, *, binary: Path | None = None) -> replica_sets.ReplicaSet:
        arguments = (role, *RESHARDS_AT_ONCE, "--syncdelay", "2")
        return replica_sets.ReplicaSet(self.folder, name, 1, arguments, binary, self.oplog_mb)

    def make_database(self, db: str) -> None:
        self._config({"_configsvrCreateDatabase": db, "primaryShardId": "a"})

    def shard_collection(self, db: str, name: str, key: Mapping[str, Any]) -> None:
        self._on_primary(db, {"_shardsvrCreateCollection": name, "shardKey": dict(key)})

    def move(self, namespace: str, to: str, **bounds: Any) -> None:
        """Move the part of a collection from `min` (to `max`) to another shard."""
        self._config({"_configsvrMoveRange": namespace, "toShard": to, **bounds})

    def drop(self, db: str, name: str) -> None:
        self._on_primary(db, {"_shardsvrDropCollection": name})

    def drop_database(self, db: str) -> None:
        self._on_primary(db, {"_shardsvrDropDatabase": 1})

    def rename(self, db: str, name: str, to: str, *, drop_target: bool = False) -> None:
        self._on_primary(db, {"_shardsvrRenameCollection": name, "to": f"{db}.{to}", "dropTarget": drop_target})

    def reshard(self, db: str, name: str, key: Mapping[str, Any]) -> None:
        self._on_primary("admin", {"_shardsvrReshardCollection": f"{db}.{name}", "key": dict(key)}, of=db)

    def change_shard_key(self, namespace: str, before: str, after: str, **documents: Any) -> None:
        """Delete `deleted` from one shard and insert `inserted` on another in one transaction: a mongos' update of a shard key."""
        db, _, name = namespace.partition(".")
        in_transaction = {"lsid": {"id": Binary(uuid.uuid4().bytes, 4)}, "txnNumber": Int64(1), "autocommit": False}
        begun = {**in_transaction, "startTransaction": True}
        coordinator, other = (self.shards[each].members[0].address for each in (before, after))
        versions = [{"shardVersion": self._version_of(namespace, each)} for each in (before, after)]
        deletes = [{"q": documents["deleted"], "limit": 1}]
        routers.asked(coordinator, {"delete": name, "deletes": deletes, **begun, **versions[0], "coordinator": True}, db=db)
        routers.asked(other, {"insert": name, "documents": [documents["inserted"]], **begun, **versions[1]}, db=db)
        participants = [{"shardId": before}, {"shardId": after}]
        routers.asked(
            coordinator, {"coordinateCommitTransaction": 1, "participants": participants, **in_transaction, **MAJORITY}
        )

    def _version_of(self, namespace: str, shard: str) -> dict[str, Any]:
        """The shard version that a router sends to a shard with commands on a collection."""
        with self.config.members[0].client() as client:
            found = client.config.collections.find_one({"_id": namespace})
            newest = client.config.chunks.find_one({"uuid": found["uuid"], "shard": shard}, sort={"lastmod": -1})
        return {"t": found["timestamp"], "e": found["lastmodEpoch"], "v": newest["lastmod"]}

    def _config(self, command: Mapping[str, Any]) -> dict[str, Any]:
        return self.config.members[0].command({**command, **MAJORITY})

    def _on_primary(self, db: str, command: Mapping[str, Any], *, of: str | None = None) -> dict[str, Any]:
        with self.config.members[0].client() as client:
            version = client.config.databases.find_one({"_id": of or db})["version"]
        return self._a.command({**command, "databaseVersion": version, **MAJORITY}, db=db)
