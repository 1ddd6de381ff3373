"""A MongoDB with users: only the administrator of its connection string has access."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from pathlib import Path

from pipelines.demo import embedded_mongodb
from pipelines.mongodb import client as mongodb


class ProtectedMongoDB(embedded_mongodb.EmbeddedMongoDB):
    """An embedded MongoDB that requires credentials: those of `uri`, an administrator's; `address` has none."""

    def __init__(self, data_dir: Path, options: embedded_mongodb.ServerOptions | None = None) -> None:
        key_file = data_dir / "keyfile"
        given = options or embedded_mongodb.ServerOptions()
        super().__init__(data_dir, replace(given, arguments=(*given.arguments, "--auth", "--keyFile", str(key_file))))
        self._password = data_dir / "password"
        if self._password.exists():
            return
        with embedded_mongodb.EmbeddedMongoDB(data_dir) as server:
            for path in (key_file, self._password):
                path.touch(mode=0o600)
                path.write_text(secrets.token_hex(16))
            with contextlib.closing(mongodb.client(server.uri)) as client:
                client.admin.command("createUser", "root", pwd=self._password.read_text(), roles=["root"])

    def _uri(self, query: str) -> str:
        return f"mongodb://root:{self._password.read_text()}@{self.address}/?{query}&authSource=admin"
