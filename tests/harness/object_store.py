"""An emulated S3 on the loopback, which records its requests, and can be made to ignore or refuse conditional ones.

`python -m tests.harness.object_store lake` runs one as a process, prints its URL, and answers ``GET /requests`` with the number of
requests so far.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipelines.demo import emulated_s3
from pipelines.demo.emulated_s3 import KEYS, Application, EmulatedS3

__all__ = ["KEYS", "ObjectStore", "running"]


@dataclass
class ObjectStore:
    """A running store; `requests` lists the method and path of each request."""

    requests: list[tuple[str, str]] = field(default_factory=list)
    ignores_conditions: bool = False
    answers_conditions: str | None = None
    """If set, the status with which it refuses conditional requests."""
    conflicts: list[bool] = field(default_factory=list)
    """For each of the next conditional requests, which are answered with 409: whether it takes effect nevertheless."""
    emulated: EmulatedS3 = EmulatedS3("")

    @property
    def conf(self) -> dict[str, str]:
        """The settings with which Spark's S3A reaches it; the keys come from the environment."""
        return {f"spark.hadoop.{name}": value for name, value in self.emulated.store.items()}

    @property
    def options(self) -> list[str]:
        """The same as options of a command."""
        return [text for name, value in self.conf.items() for text in ("--conf", f"{name}={value}")]

    @property
    def readers(self) -> dict[str, str]:
        """The storage options with which delta-rs and Polars reach it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.emulated.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}

    def put(self, name: str) -> None:
        """Create an empty object in the bucket `lake`; a name that ends with a slash marks a folder."""
        request = urllib.request.Request(f"{self.emulated.url}/lake/{name}", method="PUT", data=b"")
        urllib.request.urlopen(request, timeout=30).close()

    def around(self, emulator: Application) -> Application:
        """The emulator, with its requests recorded."""

        def application(environ: dict[str, Any], start: Any) -> Any:
            if environ["PATH_INFO"] == "/requests":
                start("200 OK", [("Content-Type", "text/plain")])
                return [str(len(self.requests)).encode()]
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
            if self.ignores_conditions:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if self.answers_conditions is not None and "HTTP_IF_NONE_MATCH" in environ:
                start(self.answers_conditions, [("Content-Type", "application/xml")])
                return [b"<Error><Code>NotImplemented</Code><Message>If-None-Match</Message></Error>"]
            if self.conflicts and "HTTP_IF_NONE_MATCH" in environ:
                if self.conflicts.pop(0):
                    b"".join(emulator(environ, lambda *_: None))
                start("409 Conflict", [("Content-Type", "application/xml")])
                return [b"<Error><Code>ConditionalRequestConflict</Code><Message>If-None-Match</Message></Error>"]
            return emulator(environ, start)

        return application


@contextlib.contextmanager
def running(bucket: str) -> Iterator[ObjectStore]:
    """An emulated S3 with one bucket, until the block ends."""
    store = ObjectStore()
    with emulated_s3.running(bucket, store.around) as store.emulated:
        yield store


@contextlib.contextmanager
def elsewhere(bucket: str) -> Iterator[EmulatedS3]:
    """The same in another process, so that its work does not slow this one down."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.harness.object_store", bucket], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield EmulatedS3(process.stdout.readline().strip())
        finally:
            process.kill()


def count(store: EmulatedS3) -> int:
    """How many requests a store of `elsewhere` has answered."""
    with urllib.request.urlopen(f"{store.url}/requests", timeout=30) as answer:
        return int(answer.read())


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise it logs a line per request
    with running(sys.argv[1]) as store:
        print(store.emulated.url, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
