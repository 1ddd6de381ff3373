"""Replica sets of several servers, for elections, members that stop or lag, and writes that are rolled back."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymongo
from pymongo import errors as driver

from pipelines.demo import embedded_mongodb
from tests.harness import processes

PARAMETERS = {"diagnosticDataCollectionEnabled": "false", "periodicNoopIntervalSecs": 1}
"""An idle server writes a no-op to its oplog every second, instead of every ten."""


@dataclass
class Member:
    """One mongod of a replica set."""

    folder: Path
    set_name: str
    arguments: Sequence[str] = ()
    binary: Path | None = None
    oplog_mb: int = 64
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it with its existing data, on the same port as before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or processes.free_port()
        parameters = [word for name, value in PARAMETERS.items() for word in ("--setParameter", f"{name}={value}")]
        self.process = subprocess.Popen(
            [
                *(str(embedded_mongodb.find(self.binary)), "--replSet", self.set_name, "--port", str(self.port)),
                *("--dbpath", str(self.folder), "--logpath", str(self.folder / "mongod.log"), "--logappend"),
                *(
                    "--bind_ip",
                    "127.0.0.1",
                    "--nounixsocket",
                    "--wiredTigerCacheSizeGB",
                    "0.25",
                    "--oplogSize",
                    str(self.oplog_mb),
                ),
                *parameters,
                *self.arguments,
            ],
            stdout=subprocess.DEVNULL,
        )

    def signal(self, number: int) -> None:
        """Send it a signal: SIGSTOP pauses it, SIGCONT resumes it, SIGKILL ends it."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @contextlib.contextmanager
    def client(self, *, patience: float = 60) -> Iterator[pymongo.MongoClient[Any]]:
        """A client of this server alone, whose operations end after `patience` seconds."""
        with pymongo.MongoClient(self.address, directConnection=True, timeoutMS=1000 * patience) as client:
            yield client

    def command(self, *arguments: Any, db: str = "admin", patience: float = 60, **more: Any) -> dict[str, Any]:
        with self.client(patience=patience) as client:
            return client[db].command(*arguments, **more)


@dataclass
class ReplicaSet:
    """A replica set that runs during a block."""

    folder: Path
    name: str = "set"
    size: int = 3
    arguments: Sequence[str] = ()
    binary: Path | None = None
    oplog_mb: int = 64
    settings: dict[str, Any] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)

    @property
    def uri(self) -> str:
        """The connection string."""
        return f"mongodb://{','.join(each.address for each in self.members)}/?replicaSet={self.name}"

    def __enter__(self) -> ReplicaSet:
        self.members = [
            Member(self.folder / f"{self.name}-{number}", self.name, self.arguments, self.binary, self.oplog_mb)
            for number in range(self.size)
        ]
        for member in self.members:
            member.start()
        try:
            self._initiate()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def primary(self, seconds: float = 30) -> Member:
        """Wait for a member that accepts writes, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for member in self.members:
                with contextlib.suppress(driver.PyMongoError):
                    if member.process.poll() is None and member.command("hello", patience=2)["isWritablePrimary"]:
                        return member
            time.sleep(0.1)
        raise AssertionError("no primary")

    def secondaries(self) -> list[Member]:
        primary = self.primary()
        return [each for each in self.members if each is not primary]

    def _initiate(self) -> None:
        for each in self.members:
            each.command("ping")  # waits until it listens
        # The first member has the highest priority, so that a test knows the primary.
        members = [
            {"_id": number, "host": each.address, "priority": 2 if number == 0 else 1}
            for number, each in enumerate(self.members)
        ]
        is_config = {"configsvr": True} if "--configsvr" in self.arguments else {}
        settings = {
            "electionTimeoutMillis": 1000,
            "heartbeatIntervalMillis": 500,
            "catchUpTimeoutMillis": 0,
            **self.settings,
        }
        self.members[0].command("replSetInitiate", {"_id": self.name, "members": members, "settings": settings, **is_config})
        self.primary()

    def _end(self) -> None:
        for member in self.members:
            with contextlib.suppress(ProcessLookupError, AssertionError):
                member.signal(signal.SIGCONT)
            member.kill()
