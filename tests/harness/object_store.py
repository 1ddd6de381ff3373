"""An S3 of the test's own on the loopback; it can be made to take no notice of conditional requests, or to refuse them.

`python -m tests.harness.object_store lake` runs one in a process of its own, tells its URL, and answers ``GET /requests`` with the
number of requests so far.
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
    """Where it listens, and what it was asked for: `requests` holds the method and path of each."""

    requests: list[tuple[str, str]] = field(default_factory=list)
    ignores_conditions: bool = False
    answers_conditions: str | None = None
    """The status that it answers a conditional request with instead of carrying it out."""
    emulated: EmulatedS3 = EmulatedS3("")

    @property
    def conf(self) -> dict[str, str]:
        """What Spark's S3A must know of it; the keys come from the environment."""
        return {f"spark.hadoop.{name}": value for name, value in self.emulated.store.items()}

    @property
    def options(self) -> list[str]:
        """The same as options of a command."""
        return [text for name, value in self.conf.items() for text in ("--conf", f"{name}={value}")]

    @property
    def readers(self) -> dict[str, str]:
        """What delta-rs and Polars must know of it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.emulated.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}

    def put(self, name: str) -> None:
        """An empty object of this name in the bucket `lake`; one that ends with a slash keeps a place for a folder."""
        request = urllib.request.Request(f"{self.emulated.url}/lake/{name}", method="PUT", data=b"")
        urllib.request.urlopen(request, timeout=30).close()

    def around(self, emulator: Application) -> Application:
        """The emulator, whose requests are noted."""

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
    """The same in another process, whose work is none of this one's."""
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
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line on the screen for each request
    with running(sys.argv[1]) as store:
        print(store.emulated.url, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
