"""An S3 of the test's own on the loopback; it can be made to take no notice of conditional requests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


@dataclass
class ObjectStore:
    """Where it listens, and what it was asked for: `requests` holds the method and path of each."""

    url: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    ignores_conditions: bool = False

    @property
    def conf(self) -> dict[str, str]:
        """What Spark's S3A must know of it; the keys come from the environment."""
        return {
            "spark.hadoop.fs.s3a.endpoint": self.url,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.connection.ssl.enabled": "false",
        }

    @property
    def options(self) -> list[str]:
        """The same as options of a command."""
        return [text for name, value in self.conf.items() for text in ("--conf", f"{name}={value}")]

    @property
    def readers(self) -> dict[str, str]:
        """What delta-rs and Polars must know of it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}


Application = Callable[[dict[str, Any], Any], Any]


@contextlib.contextmanager
def running(bucket: str) -> Iterator[ObjectStore]:
    """An emulated S3 with one bucket, until the block ends."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    emulator: Application = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start: Any) -> Any:
        store.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        if store.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        return emulator(environ, start)

    server = make_server("127.0.0.1", 0, application, threaded=True)
    server.log = lambda *_: None  # type: ignore[method-assign]
    store = ObjectStore(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=store.url, **keys).create_bucket(Bucket=bucket)
        yield store
    finally:
        server.shutdown()
        thread.join()
