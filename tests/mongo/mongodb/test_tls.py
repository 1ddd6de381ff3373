"""TLS and X.509 with a server that uses its own certificate authority."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from cdc_core import errors
from cdc_core.settings import parse as settings
from pipelines.demo import embedded_mongodb
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import connection as source
from pipelines.mongodb import server as mongodb_server
from tests.harness.protected_mongodb import ProtectedMongoDB


@dataclass(frozen=True)
class Secured:
    """A server with plain and encrypted connections and authentication, and the files of its authority."""

    server: embedded_mongodb.EmbeddedMongoDB
    ca: Path
    certificate: Path
    """A client's certificate; the server knows it as a user with read access to `shop`."""

    @property
    def address(self) -> str:
        return f"localhost:{self.server.port}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    authority, folder = trustme.CA(), tmp_path_factory.mktemp("secured")
    ca, own, mine = (folder / f"{name}.pem" for name in ("ca", "server", "client"))
    authority.cert_pem.write_to_path(str(ca))
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(own))
    issued = authority.issue_cert("reader@example.org", common_name="reader", organization_unit_name="readers")
    issued.private_key_and_cert_chain_pem.write_to_path(str(mine))
    tls = ["--tlsMode", "preferTLS", "--tlsCertificateKeyFile", str(own), "--tlsCAFile", str(ca)]
    mechanisms = {"authenticationMechanisms": "SCRAM-SHA-256,MONGODB-X509"}
    options = embedded_mongodb.ServerOptions(
        parameters=mechanisms, arguments=[*tls, "--tlsAllowConnectionsWithoutCertificates"]
    )
    role = [{"role": "read", "db": "shop"}]
    with ProtectedMongoDB(folder / "mongodb", options) as server:
        with contextlib.closing(mongodb.client(server.uri)) as root:
            root.shop.orders.insert_one({"_id": 1})
            root.admin.command("createUser", "reader", pwd="r", roles=role)
            root["$external"].command("createUser", _subject(issued), roles=role)
        yield Secured(server, ca, mine)


def _subject(issued: trustme.LeafCert) -> str:
    """The certificate's subject as the server writes it."""
    from cryptography import x509

    parsed = x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes())
    return parsed.subject.rfc4514_string()


def read(uri: str, *, patience_ms: int = 5000, **properties: Any) -> list[int]:
    """The `_id` values that a pipeline's connection reads."""
    found = settings.parse(
        {
            "name": "shop",
            "lakehouse": {"root": "lake"},
            "source": {"mongodb.connection.string": uri, "collection.include.list": "shop.orders", **properties},
        }
    )
    with contextlib.closing(source.connection(found.source).client(serverSelectionTimeoutMS=patience_ms)) as client:
        mongodb_server.check_suitable(mongodb_server.server_info(client))
        return [document["_id"] for document in client.shop.orders.find()]


def test_a_password_over_tls_and_a_certificate_instead_of_one(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mongodb.ssl.*` with the authority's file, and MONGODB-X509 with the client's certificate."""
    monkeypatch.setenv("READER", "r")
    tls = {"mongodb.ssl.enabled": True, "mongodb.ssl.ca.file": str(secured.ca)}
    password = {"mongodb.user": "reader", "mongodb.password": "${env:READER}", "mongodb.authsource": "admin"}
    assert read(f"mongodb://{secured.address}/?directConnection=true", **tls, **password) == [1]
    certificate = {"mongodb.ssl.certificate.key.file": str(secured.certificate)}
    x509 = f"mongodb://{secured.address}/?directConnection=true&authMechanism=MONGODB-X509"
    assert read(x509, **tls, **certificate) == [1]


def test_an_authority_that_is_not_known_is_refused_with_the_reason(secured: Secured) -> None:
    """The message names the certificate as the reason."""
    with pytest.raises(errors.MedallionError, match="(?i)certificate"):
        # The whole time passes, because another server with a valid certificate might appear.
        read(f"mongodb://{secured.address}/?directConnection=true", patience_ms=1500, **{"mongodb.ssl.enabled": True})
