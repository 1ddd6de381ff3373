"""MongoDB clients: for a connection string, and for a single server of its deployment."""

from __future__ import annotations

import functools
import logging
import re
import ssl
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pymongo
from pymongo import common
from pymongo import errors as driver
from pymongo.read_preferences import ReadPreference
from pymongo.topology_description import TOPOLOGY_TYPE

from cdc_core import errors
from cdc_core.properties import types as values

log = logging.getLogger(__name__)

Client = pymongo.MongoClient[dict[str, Any]]
APP_NAME = "mongo-medallion"


def client(uri: str, *, is_known: bool = False, **options: Any) -> pymongo.MongoClient[dict[str, Any]]:
    """A client for a connection string; raises `SettingsError` for one that cannot be used.

    Raises `SourceUnreachable` where the SRV record of mongodb+srv:// cannot be looked up now. A record that does not exist is a
    `SettingsError`, unless this process has found it before, or another one has (`is_known`).
    """
    try:
        with warnings.catch_warnings(record=True) as driver_warnings:  # The driver's warnings quote the values.
            warnings.simplefilter("always")
            mongo_client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(uri, **{"appname": APP_NAME, **options})
        # Another thread's warnings are recorded too, such as that of a file which was never closed.
        if any(issubclass(each.category, UserWarning) for each in driver_warnings):
            _warn_of_ignored(left_out(uri))
        # The host exists: from now on, a failed lookup of its name is an outage.
        _looked_up.add(_host(uri))
        return mongo_client
    except (driver.ConfigurationError, driver.InvalidURI, ValueError, TypeError) as error:
        if uri.startswith("mongodb+srv://"):
            # Not a `SettingsError`: a capture continues when the name server answers again.
            if _is_lookup(error, is_known=is_known or _host(uri) in _looked_up):
                raise errors.SourceUnreachable(
                    f"{_PATH}: the SRV lookup failed ({type(error.__cause__).__name__}); check that the name server is reachable"
                ) from None
            if _is_lookup(error, is_known=True):
                hint = "check its spelling, or write mongodb:// with the names of the servers"
                raise errors.SettingsError(errors.Problem(_PATH, "its host has no SRV record", hint)) from None
        if isinstance(error.__context__, ssl.SSLError):
            raise _unreadable_certificates(uri, options, error.__context__) from None
        # `from None`: the driver's error quotes the string with its password.
        raise _unusable(uri, options) from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, ssl.SSLError) as error:
        raise _unreadable_certificates(uri, options, error) from error


_PATH = "source.mongodb.connection.string"

_looked_up: set[str] = set()
"""The hosts of the connection strings for which this process has created clients."""


def _is_lookup(error: Exception, *, is_known: bool) -> bool:
    """Whether the name server failed; its answer that the name does not exist counts only where the host is known."""
    # Imported here, because only mongodb+srv:// needs dnspython.
    from dns import exception, resolver

    is_answer = isinstance(error.__cause__, (resolver.NXDOMAIN, resolver.NoAnswer))
    return isinstance(error.__cause__, (exception.DNSException, OSError)) and (is_known or not is_answer)


def _host(uri: str) -> str:
    return re.split(r"[/?]", _behind_login(uri), maxsplit=1)[0]


def _behind_login(uri: str) -> str:
    """Hosts, database and options of a connection string."""
    address = uri.partition("://")[2]
    return address[len(values.login(address)) :].removeprefix("@")


def _unusable(uri: str, options: Mapping[str, Any]) -> errors.SettingsError:
    """The error for a connection string or an option, without the driver's text, which quotes the password."""
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme not in ("mongodb", "mongodb+srv"):
        return errors.SettingsError(errors.Problem(_PATH, "it must begin with mongodb:// or mongodb+srv://"))
    bad_options = [*left_out(uri), *(name for name, value in options.items() if not _is_valid(name, value))]
    if bad_options:
        return errors.SettingsError(errors.Problem(_PATH, f"the value of {', '.join(bad_options)} is not valid"))
    if options.get("username") and not options.get("password") and "@" not in uri:
        return errors.SettingsError(errors.Problem("source.mongodb.password", "it is expected beside mongodb.user"))
    hint = "its form is mongodb://host:27017,host:27017/?replicaSet=rs0"
    if "@" in uri:
        hint = "in user name and password, percent-encode / : @ ? # [ ] and %: write p%40ss for p@ss"
    if scheme == "mongodb+srv":
        hint += "; mongodb+srv:// takes one host name, and no port"
    return errors.SettingsError(errors.Problem(_PATH, "not a valid connection string", hint))


_OF_FILES = ("tlscafile", "tlscertificatekeyfile", "tlscrlfile")


def _unreadable_certificates(uri: str, options: Mapping[str, Any], error: OSError) -> errors.SettingsError:
    """The error for files of certificates that the driver cannot load: OpenSSL's says neither which, nor why in words for people."""
    files = {name: file for name, file in {**uri_options(uri), **options}.items() if name.lower() in _OF_FILES}
    if error.filename is None:
        what, why = (
            ", ".join(f"{name} {file}" for name, file in files.items()),
            "it has no certificate, or its key or password is wrong",
        )
    else:
        what, why = str(error.filename), str(error.strerror)
    hint = "PEM files are expected; the file of a client holds its certificate and its key"
    return errors.SettingsError(errors.Problem("source.mongodb.ssl", f"{what}: {why}", hint))


def has_user(connection: pymongo.MongoClient[Any]) -> bool:
    """Whether a client logs in."""
    return connection.options.pool_options._credentials is not None


def uri_options(uri: str) -> dict[str, str]:
    """The options of a connection string."""
    options = (part.partition("=") for part in _split_options(_behind_login(uri).partition("?")[2]) if "=" in part)
    return {name: value for name, _, value in options if name.isalnum()}


def _split_options(query: str) -> list[str]:
    """The options of a connection string, each as ``name=value``, from the text after its `?`."""
    # The driver accepts either separator, and refuses a mixture.
    return [part for part in re.split("[&;]", query) if part]


def left_out(uri: str) -> tuple[str, ...]:
    """The options of a connection string that the driver ignores: unknown ones, and those with an invalid value."""
    return tuple(name for name, value in uri_options(uri).items() if not _is_valid(name, value))


@functools.lru_cache
def _warn_of_ignored(names: tuple[str, ...]) -> None:
    """Warn of ignored options, once per process."""
    log.warning(
        "source.mongodb.connection.string: ignoring options that are unknown or have an invalid value: %s",
        ", ".join(names) or "an option",
    )


def _is_valid(name: str, value: object) -> bool:
    try:
        common.validate(name, value)
    except Exception:
        return False
    return True


CLOSE_SECONDS = 2.0


def close(connection: pymongo.MongoClient[Any]) -> None:
    """Close a client and its sessions on the server, within `CLOSE_SECONDS`."""
    # The driver's `close` sends a command to end the sessions, which waits for an unreachable server until its timeouts.
    closing = threading.Thread(target=connection.close, name="mongodb-close", daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)


def is_router(connection: pymongo.MongoClient[Any]) -> bool:
    """Whether the servers that the driver has found are mongos; unlike its `is_mongos` this does not wait for a primary."""
    servers = connection.topology_description.server_descriptions().values()
    return any(server.server_type_name == "Mongos" for server in servers)


def pinned(connection: pymongo.MongoClient[Any], preference: Any) -> pymongo.MongoClient[Any] | None:
    """A client of one server for a cursor, to be closed by the caller; None where the driver always chooses the same one.

    Commands on it need `preference` as well: a single member of a replica set answers with any, and a mongos passes it to the shards.
    """
    # A direct connection has one server, whose name in its replica set may not be reachable, for example through a forwarded port. A
    # load balancer has one address, where servers refuse other clients.
    if connection.topology_description.topology_type in (TOPOLOGY_TYPE.Single, TOPOLOGY_TYPE.LoadBalanced):
        return None
    if preference == ReadPreference.PRIMARY and len(connection.nodes) < 2:
        return None
    hello = connection.admin.command("hello", read_preference=preference)
    # The driver finds the one primary of a replica set by itself. With several mongos, a cursor lives on one of them.
    if preference == ReadPreference.PRIMARY and hello.get("setName"):
        return None
    return _direct(connection, hello.get("me") or "{}:{}".format(*sorted(connection.nodes)[0]))


SEED_TIMEOUT_MS = 2000


def seeds(connection: pymongo.MongoClient[Any]) -> Iterator[pymongo.MongoClient[Any]]:
    """A client of each server that the connection string names, whatever replica set it is of; closed after its turn.

    It waits no longer than `SEED_TIMEOUT_MS` for its server.
    """
    for host, port in sorted(connection._seeds):
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        client = _direct(connection, server, serverSelectionTimeoutMS=SEED_TIMEOUT_MS)
        try:
            yield client
        finally:
            close(client)


def _direct(connection: pymongo.MongoClient[Any], host: str, **own: Any) -> pymongo.MongoClient[Any]:
    """A client of one server with the options of another client: credentials, TLS and timeouts, also of its connection string."""
    # Uses private attributes of the driver, which cannot copy a client.
    arguments = dict(connection._init_kwargs)
    uri = arguments.pop("host", None)
    uri = uri[0] if isinstance(uri, (list, tuple)) and uri else uri
    options = {name: value for name, value in arguments.items() if name not in ("port", *_OF_A_SET)} | own
    client_options = connection.options
    if isinstance(uri, str) and uri.startswith("mongodb+srv://"):
        # A mongodb:// address: TLS and authSource, which the SRV and TXT records set, must be options.
        options.setdefault("tls", client_options.pool_options._ssl_context is not None)
    if client_options.pool_options._credentials is not None and client_options.pool_options._credentials.source:
        options.setdefault("authSource", client_options.pool_options._credentials.source)
    with warnings.catch_warnings():  # They quote values, and `client` has told the options.
        warnings.simplefilter("ignore")
        return pymongo.MongoClient(direct_uri(uri if isinstance(uri, str) else "", host), directConnection=True, **options)


_OF_A_SET = (
    "directConnection", "replicaSet", "readPreference", "readPreferenceTags", "maxStalenessSeconds", "loadBalanced",
    "srvMaxHosts", "srvServiceName", "localThresholdMS",
)  # fmt: skip


def direct_uri(uri: str, host: str) -> str:
    """A connection string with one server in place of its hosts, without the options that choose among several."""
    rest = uri.partition("://")[2]
    path = re.search(r"[/?]", rest)
    authority, options = (rest[: path.start()], rest[path.start() :]) if path else (rest, "")
    credentials = authority.rpartition("@")[0]
    database, _, query = options.lstrip("/").partition("?")
    set_options = {name.lower() for name in _OF_A_SET}
    remaining = [part for part in _split_options(query) if part.partition("=")[0].lower() not in set_options]
    return f"mongodb://{credentials and credentials + '@'}{host}/{database}{'?' if remaining else ''}{'&'.join(remaining)}"
