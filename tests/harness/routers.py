"""A mongos where there is none: a mongod of a sharded cluster that runs mongos's own commands, and speaks as one.

A shard's mongod has the code of mongos, for what it does itself in other shards' names: `clusterFind`, `clusterAggregate` and
their like. A proxy before it gives the driver's commands these names, and leaves out of its `hello` that it is a member of a
replica set. What it routes, merges and answers is the server's own doing.
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
"""What mongos calls a command, and a shard's mongod."""

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
"""What is asked of the shard that all databases have as their primary one."""

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
"""What a member of a replica set says in its `hello`, and a mongos does not."""


class Router:
    """Listens on a port of its own, and has a mongod answer as a mongos would, in the name of all shards."""

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
        with contextlib.suppress(OSError):  # closed: it is over
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
                # What a mongos does then is not in the commands: it forgets what it knows of the collection, and asks again.
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
    """A server's answer to a command as it is: a driver would give it a session of its own."""
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
    """A request as the mongod takes it, and whose it is."""
    _, id_, to, code = struct.unpack_from("<iiii", request)
    if code != OP_MSG:
        return "router", request
    # The driver sends the command first, and what it is about behind it.
    end = 21 + int.from_bytes(request[21:25], "little")
    command, rest = request[21:end], request[end:]
    zero = command.index(b"\0", 5)
    name = command[5:zero].decode()
    if b"snapshot\0" in command and b"afterClusterTime\0" in command:
        command, zero = _at_one_time(command), len(name) + 5
    if name in ROUTED:
        if b"\x12txnNumber\0" in command and b"autocommit\0" not in command:
            # A write that may be repeated: a mongod would keep its number for itself, and not hand it on.
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
    """A snapshot read at the time that the router chooses for all shards: the latest that it has heard of."""
    asked_for = bson.decode(command)
    after = asked_for["readConcern"].pop("afterClusterTime")
    asked_for["readConcern"]["atClusterTime"] = max(after, asked_for["$clusterTime"]["clusterTime"])
    return bson.encode(asked_for)


def _as_of_router(reply: bytes, *, is_of_no_shard: bool) -> bytes:
    """A reply; where a member of a replica set introduces itself, or says what time it is by its own oplog, as a mongos would."""
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
    """A copy of a mongod that may wait for events of several shards; made with `nm` and `readelf`.

    Whether authorization is off, a mongod asks the thread that it runs on, which not every one of them can tell; a mongos asks
    its options. This copy knows that it is off.
    """
    copy = folder / "mongod-as-router"
    shutil.copy(mongod, copy)
    with copy.open("r+b") as file:
        file.seek(_offset(mongod, _ASKS_ITS_THREAD))
        file.write(_YES)
    return copy


def _offset(binary: Path, symbol: str) -> int:
    """Where in the file a function's code begins."""

    def shown(*command: str) -> list[list[str]]:
        said = subprocess.run([*command, str(binary)], capture_output=True, text=True, check=True)
        return [line.split() for line in said.stdout.splitlines()]

    address = next(int(words[0], 16) for words in shown("nm", "-D") if words[-1] == symbol)
    segments: list[Any] = [
        [int(word, 16) for word in words[1:6]] for words in shown("readelf", "-lW") if words[:1] == ["LOAD"]
    ]
    return next(address - begins + offset for offset, begins, _, size, _ in segments if begins <= address < begins + size)
