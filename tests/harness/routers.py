"""A substitute for mongos: a mongod of a sharded cluster behind a proxy that makes it a router.

A shard's mongod contains the code of mongos, as commands like `clusterFind` and `clusterAggregate`. The proxy gives the driver's commands
these names, and removes from the server's `hello` that it is a member of a replica set. Routing, merging and the answers are the server's.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import bson

OP_REPLY, OP_QUERY, OP_MSG = 1, 2004, 2013

ROUTED = {
    "find": "clusterFind",
    "aggregate": "clusterAggregate",
    "getMore": "clusterGetMore",
    "insert": "clusterInsert",
    "update": "clusterUpdate",
    "delete": "clusterDelete",
    "commitTransaction": "clusterCommitTransaction",
    "abortTransaction": "clusterAbortTransaction",
}
"""Names of commands on mongos, and on a shard's mongod."""

OF_PRIMARY_SHARD = (
    "listCollections",
    "listDatabases",
    "listIndexes",
    "explain",
    "count",
    "distinct",
    "collMod",
    "createIndexes",
)
"""Commands that go to the primary shard, which all databases share."""

OF_MEMBERS = (
    "setName",
    "setVersion",
    "hosts",
    "primary",
    "me",
    "electionId",
    "lastWrite",
    "secondary",
    "topologyVersion",
    "isImplicitDefaultMajorityWC",
)
"""The fields of `hello` that a member of a replica set has, and a mongos has not."""


class Router:
    """Listens on its own port, and lets a mongod answer for all shards, as a mongos does."""

    def __init__(self, router: str, primary_shard: str) -> None:
        self._router = router
        self._addresses = {
            name: (each.rpartition(":")[0], int(each.rpartition(":")[2]))
            for name, each in (("router", router), ("shard", primary_shard))
        }
        self._listening = socket.create_server(("127.0.0.1", 0))

    @property
    def uri(self) -> str:
        return f"mongodb://127.0.0.1:{self._listening.getsockname()[1]}/"

    def __enter__(self) -> Router:
        threading.Thread(target=self._accept, name="router", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # `__exit__` closed the socket
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(near,), name="router", daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, contextlib.ExitStack() as stack:
            far = {name: stack.enter_context(socket.create_connection(each)) for name, each in self._addresses.items()}
            while (request := _message(near)) is not None:
                to, sent = _translated(request)
                far[to].sendall(sent)
                reply = _message(far[to])
                # A mongos then refreshes its routing table and retries; the commands of a mongod do not.
                if reply is not None and _is_stale(reply):
                    asked(self._router, {"flushRouterConfig": 1})
                    far[to].sendall(sent)
                    reply = _message(far[to])
                if reply is None:
                    return
                near.sendall(_as_of_router(reply, is_of_no_shard=b"\x10ping\0" in request))


def _is_stale(reply: bytes) -> bool:
    return b"\x10code\0\x4c\x34\0\0" in reply and b"StaleConfig" in reply


def asked(address: str, command: dict[str, Any], *, db: str = "admin") -> dict[str, Any]:
    """A server's answer to a command that is sent unchanged: a driver would add a session."""
    host, _, port = address.rpartition(":")
    body = bytes(5) + bson.encode({**command, "$db": db})
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(struct.pack("<iiii", 16 + len(body), 1, 0, OP_MSG) + body)
        answer = bson.decode((_message(connection) or b"")[21:])
    assert answer["ok"] == 1 and "writeErrors" not in answer, answer
    return answer


def _message(connection: socket.socket) -> bytes | None:
    head = _exactly(connection, 4)
    return None if head is None else head + (_exactly(connection, int.from_bytes(head, "little") - 4) or b"")


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            return None
        found += more
    return found


def _translated(request: bytes) -> tuple[str, bytes]:
    """Which server gets a request, `router` or `shard`, and the request in its form."""
    _, id_, to, code = struct.unpack_from("<iiii", request)
    if code != OP_MSG:
        return "router", request
    # The driver sends the command first, and its documents after it.
    end = 21 + int.from_bytes(request[21:25], "little")
    command, rest = request[21:end], request[end:]
    zero = command.index(b"\0", 5)
    name = command[5:zero].decode()
    if b"snapshot\0" in command and b"afterClusterTime\0" in command:
        command, zero = _at_one_time(command), len(name) + 5
    if name in ROUTED:
        if b"\x12txnNumber\0" in command and b"autocommit\0" not in command:
            # A retryable write: a mongod would not pass its transaction number on to the shards.
            fields = {key: value for key, value in bson.decode(command).items() if key not in ("txnNumber", "lsid")}
            command = bson.encode(fields)
            zero = command.index(b"\0", 5)
        command = _bson(command[4:5] + ROUTED[name].encode() + command[zero:-1])
    elif name == "serverStatus":
        # A mongos has no oplog.
        command = bson.encode({key: value for key, value in bson.decode(command).items() if key != "oplog"})
    body = request[16:21] + command + rest
    return ("shard" if name in OF_PRIMARY_SHARD else "router"), struct.pack("<iiii", 16 + len(body), id_, to, code) + body


def _at_one_time(command: bytes) -> bytes:
    """A snapshot read at one time for all shards: the latest cluster time that the client knows."""
    asked_for = bson.decode(command)
    after = asked_for["readConcern"].pop("afterClusterTime")
    asked_for["readConcern"]["atClusterTime"] = max(after, asked_for["$clusterTime"]["clusterTime"])
    return bson.encode(asked_for)


def _as_of_router(reply: bytes, *, is_of_no_shard: bool) -> bytes:
    """The reply as a mongos gives it: without a member's fields in `hello`, and with the cluster time instead of its own oplog's."""
    _, id_, to, code = struct.unpack_from("<iiii", reply)
    start = 21 if code == OP_MSG else 36
    if is_of_no_shard:
        said = bson.decode(reply[start:])
        said["operationTime"] = said["$clusterTime"]["clusterTime"]
    elif b"\x02setName\0" in reply and b"maxWireVersion" in reply:
        found = bson.decode(reply[start:])
        said = {**{key: value for key, value in found.items() if key not in OF_MEMBERS}, "msg": "isdbgrid"}
    else:
        return reply
    body = reply[16:start] + bson.encode(said)
    return struct.pack("<iiii", 16 + len(body), id_, to, code) + body


def _bson(fields: bytes) -> bytes:
    return (len(fields) + 5).to_bytes(4, "little") + fields + b"\0"


_ASKS_ITS_THREAD = "_ZNK5mongo31AuthzSessionExternalStateMongod22shouldIgnoreAuthChecksEv"
_YES = bytes.fromhex("b001c3")  # mov al, 1; ret


def able(mongod: Path, folder: Path) -> Path:
    """A patched copy of a mongod that can wait for events of several shards; needs `nm` and `readelf`.

    A mongod asks its current thread whether authorization is off, which not every thread can tell; a mongos asks its options. In the copy
    it is always off.
    """
    copy = folder / "mongod-as-router"
    shutil.copy(mongod, copy)
    with copy.open("r+b") as file:
        file.seek(_offset(mongod, _ASKS_ITS_THREAD))
        file.write(_YES)
    return copy


def _offset(binary: Path, symbol: str) -> int:
    """The offset of a function's code in the file."""

    def shown(*command: str) -> list[list[str]]:
        said = subprocess.run([*command, str(binary)], capture_output=True, text=True, check=True)
        return [line.split() for line in said.stdout.splitlines()]

    address = next(int(words[0], 16) for words in shown("nm", "-D") if words[-1] == symbol)
    segments: list[Any] = [
        [int(word, 16) for word in words[1:6]] for words in shown("readelf", "-lW") if words[:1] == ["LOAD"]
    ]
    return next(address - begins + offset for offset, begins, _, size, _ in segments if begins <= address < begins + size)
