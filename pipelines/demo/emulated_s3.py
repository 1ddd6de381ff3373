"""An S3 emulator in this process, in memory, for the demo and the tests. It supports conditional requests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cdc_core import errors

KEYS = {"AWS_ACCESS_KEY_ID": "emulated", "AWS_SECRET_ACCESS_KEY": "emulated"}
"""The emulator accepts any keys."""

Application = Callable[[dict[str, Any], Any], Any]


@dataclass(frozen=True)
class EmulatedS3:
    """A running emulator."""

    url: str

    @property
    def store(self) -> Mapping[str, str]:
        """The settings of S3A for `lakehouse.store`, without the keys."""
        return {
            "fs.s3a.endpoint": self.url,
            "fs.s3a.endpoint.region": "us-east-1",
            "fs.s3a.path.style.access": "true",
            "fs.s3a.connection.ssl.enabled": "false",
        }

    @property
    def hadoop(self) -> Mapping[str, str]:
        """The same as Spark settings, with the keys."""
        keys = {"fs.s3a.access.key": KEYS["AWS_ACCESS_KEY_ID"], "fs.s3a.secret.key": KEYS["AWS_SECRET_ACCESS_KEY"]}
        return {f"spark.hadoop.{name}": value for name, value in {**self.store, **keys}.items()}


@contextlib.contextmanager
def running(bucket: str, around: Callable[[Application], Application] = lambda emulator: emulator) -> Iterator[EmulatedS3]:
    """Run an emulator with one bucket until the block ends; `around` wraps its WSGI application.

    Raises `SettingsError` if the emulator is not installed.
    """
    try:
        import boto3  # type: ignore[import-untyped]
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server
    except ImportError:
        raise errors.SettingsError("the S3 emulator is not installed: pip install 'mongo-medallion[demo]'") from None

    server = make_server("127.0.0.1", 0, around(DomainDispatcherApplication(create_backend_app)), threaded=True)
    server.log = lambda *_: None  # type: ignore[method-assign]
    emulated = EmulatedS3(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        keys = {name.lower(): value for name, value in KEYS.items()}
        boto3.client("s3", endpoint_url=emulated.url, region_name="us-east-1", **keys).create_bucket(Bucket=bucket)
        yield emulated
    finally:
        server.shutdown()
        thread.join()
