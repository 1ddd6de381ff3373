"""Translates pymongo's errors: into temporary ones, lost positions, and those that a person must resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pymongo import errors as driver

from cdc_core import errors

UNAUTHORIZED = 13
WHAT_TO_GRANT = "; `medallion check` lists what to grant"
AUTHENTICATION_FAILED = 18
ATLAS_REFUSED = 8000
"""Atlas' own code, of a proxy before its servers: for a wrong password, and for what a user or a small cluster may not do."""
CURSOR_NOT_FOUND = 43
INVALID_NAMESPACE = 73
INVALID_RESUME_TOKEN = 260
CHANGE_STREAM_FATAL = 280
CHANGE_STREAM_HISTORY_LOST = 286
ONLY_ON_REPLICA_SETS = 40573
AHEAD_OF_THE_SERVER = 72
"""The code of a read at a time that the server does not know yet: a secondary learns it from the primary, seconds later."""
TOKEN_REFUSED = (CHANGE_STREAM_FATAL, INVALID_RESUME_TOKEN)
"""The codes of a token that the server does not find, or does not accept."""
CURSOR_LOST = (CURSOR_NOT_FOUND, 175, 237)
"""The codes of a lost cursor: not found, its plan killed (the collection was dropped), killed."""

KILLED = frozenset({*CURSOR_LOST, 50, 11601, 206, 279})
"""The codes of a killed operation, also of one killed with its cursor, session or connection, or at its time limit."""

TRANSIENT = frozenset(
    {
        # The change stream specification's resumable errors, for a server that does not label them.
        *(6, 7, 63, 89, 91, 133, 150, 189, 234, 262, 9001, 10107, 11600, 11602, 13388, 13435, 13436),
        # Killed by an operator, or temporary (locks, time limits, conflicts, full pools, tickets): a capture must retry by itself.
        *KILLED,
        *(24, 46, 112, 134, 143, 145, 202, 216, 281, 282, 290, 314, 355, 365, 46841, 91331, 10045600),
        # Refused by an overloaded server.
        *(402, 407, 412, 433, 449, 450, 462),
        # Shards that are added or removed, chunks that move (250 and 272 end snapshot reads), routers that are out of date.
        *(70, 199, 203, 249, 250, 272, 343, 453, 56846),
        # The oplog overtook the cursor (136): the server reports a lost position when the stream is reopened. The keys that sign
        # cluster times are missing so far (211), or the directory of the user's roles does not answer (404).
        *(136, 211, 404),
    }
)
"""The codes of interrupted operations that can be retried; the one list for streams, chunks and everything else."""

_ABOUT_THE_STREAM = frozenset(
    {
        UNAUTHORIZED, AUTHENTICATION_FAILED, ONLY_ON_REPLICA_SETS, CHANGE_STREAM_FATAL, CHANGE_STREAM_HISTORY_LOST,
        INVALID_RESUME_TOKEN, ATLAS_REFUSED,
    }
)  # fmt: skip


class HistoryLost(Exception):
    """The oplog no longer holds the position (286), or the server refuses its token (280, 260)."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class SnapshotExpired(Exception):
    """A chunk must be read again, smaller: its time left the server's window of snapshot reads (239), precedes the collection (246), or
    is not known to the server yet (72), or its cursor was killed or took too long."""


class CollectionChanged(Exception):
    """The collection of a planned chunk was renamed, dropped, or created again."""


class ReadRefused(Exception):
    """The server refuses to read a collection, and would again; for example, a filter fails on a document.

    The message has the server's code, not its text, which may quote a document.
    """


@contextmanager
def translating(what: str) -> Iterator[None]:
    """Raise driver errors of the block as `translated`; `what` names the operation in the messages."""
    try:
        yield
    except driver.PyMongoError as error:
        raise translated(error, what) from error


def translated(error: driver.PyMongoError, what: str) -> BaseException:
    """The error of ours for a driver error, by class and code; the driver error itself where there is none."""
    code = getattr(error, "code", None)
    # First: this error has the code of a lost position, but no position is lost.
    if _spoils_tokens(error):
        return errors.SettingsError(
            errors.Problem(
                "source.cursor.pipeline",
                "its stages change _id, the event's resume token, without which the stream cannot be resumed; the "
                "position did not move",
                "do not change _id",
            )
        )
    match code:
        # AuthenticationFailed
        case 18:
            return errors.AccessRefused(
                f"{what}: the server refused the user name or password (error 18); check the secret and authSource"
            )
        # Unauthorized
        case 13:
            return errors.AccessRefused(
                f"{what}: the user lacks a privilege (error 13{_refused_command(error)}){WHAT_TO_GRANT}"
            )
        # AtlasError
        case 8000:
            advice = "" if _is_of_the_tier(error) else f"; check user name, password and privileges{WHAT_TO_GRANT}"
            return errors.AccessRefused(f"{what}: Atlas refused it (error 8000: {first_line(error)}){advice}")
        # $changeStream on a standalone server
        case 40573:
            return errors.SourceUnsuitable(
                f"{what}: this server is not a replica set, which change streams need; start mongod with --replSet and "
                "initiate it, or connect to the replica set"
            )
        # BSONObjectTooLarge
        case 10334:
            return errors.SourceUnsuitable(
                f"{what}: an event is larger than 16 MB (error 10334); nothing is lost. Set "
                "source.cursor.oversize.handling.mode to split (server 6.0.9 or later) or skip, and start again"
            )
        # ChangeStreamHistoryLost, ChangeStreamFatalError, InvalidResumeToken
        case 286 | 280 | 260:
            return HistoryLost(code)
        # SnapshotTooOld, SnapshotUnavailable
        case 239 | 246:
            return SnapshotExpired()
        # CollectionUUIDMismatch, NamespaceNotFound
        case 361 | 26:
            return CollectionChanged()
    if isinstance(error, driver.ServerSelectionTimeoutError):
        # During server selection the driver reports a wrong password as a server that does not answer.
        if _refused_at_handshake(error):
            return errors.AccessRefused(f"{what}: the server refused the user name or password; check the secret")
        return errors.SourceUnreachable(
            f"{what}: no server answered in time: {first_line(error)}; check that it is running, and in the connection string its host "
            "and its replicaSet"
        )
    if isinstance(error, driver.NotPrimaryError):
        return errors.SourceUnreachable(f"{what}: the server is no longer the primary")
    if isinstance(error, (driver.ConnectionFailure, driver.WaitQueueTimeoutError)):
        return errors.SourceUnreachable(f"{what}: the connection failed: {first_line(error)}")
    if is_resumable(error):
        return errors.SourceUnreachable(f"{what}: the server interrupted the operation (error {code}); start again")
    if isinstance(error, driver.ConfigurationError):
        if "Sessions are not supported" in str(error):  # every suitable server supports them, except during an election
            return errors.SourceUnreachable(f"{what}: the server is neither primary nor secondary at the moment")
        hint = (
            "check that the server is MongoDB 6.0 or later, that the options fit it, and that the host of "
            "mongodb+srv:// has an SRV record"
        )
        # An error about the connection string may quote it.
        reason = type(error).__name__ if isinstance(error, driver.InvalidURI) else first_line(error)
        message = f"{what}: the driver cannot use this server ({reason})"
        return errors.SettingsError(errors.Problem("source.mongodb.connection.string", message, hint))
    return error


def has_lost_connection(error: BaseException) -> bool:
    """Whether an error of ours was caused by a lost connection, and not by an error reply of the server."""
    return isinstance(error.__cause__, driver.ConnectionFailure)


def is_resumable(error: BaseException) -> bool:
    """Whether a change stream can be resumed after this error: a network error, a labelled one, or one of `TRANSIENT`."""
    if isinstance(error, (driver.ConnectionFailure, driver.CursorNotFound)):
        return True
    return isinstance(error, driver.OperationFailure) and (
        error.has_error_label("ResumableChangeStreamError") or error.code in TRANSIENT
    )


def is_about_an_event(error: BaseException) -> bool:
    """Whether the server failed at an event, and not at the stream; the events before it can be read one by one."""
    return isinstance(error, driver.OperationFailure) and error.code not in _ABOUT_THE_STREAM


def _spoils_tokens(error: BaseException) -> bool:
    """Whether the server reports a stage that changes an event's `_id`, which has the code of a lost position."""
    return isinstance(error, driver.OperationFailure) and "modified by the pipeline" in str(error)


def stream_error(error: driver.PyMongoError) -> BaseException:
    """The error that ends a change stream: as `translated`, or `SourceUnsuitable` where the server failed at an event or a stage."""
    translated_error = translated(error, "reading the change stream")
    if translated_error is not error or not isinstance(error, driver.OperationFailure):
        return translated_error
    name = (error.details or {}).get("codeName", "")
    return errors.SourceUnsuitable(
        f"reading the change stream: the server fails on an event (error {error.code} {name}); everything before "
        "it is captured. If source.cursor.pipeline is set, check whether a stage fails for some documents; "
        "otherwise check the server's log"
    )


@contextmanager
def translating_read(what: str) -> Iterator[None]:
    """As `translating`, for reads of one collection: all other errors of the server become `ReadRefused`."""
    try:
        with translating(what):
            yield
    except errors.AccessRefused as error:
        if not _is_of_the_tier(error.__cause__):
            raise
        raise ReadRefused("the server refuses to read it (error 8000: not allowed in this Atlas tier)") from error
    except driver.OperationFailure as error:
        if error.code == AHEAD_OF_THE_SERVER:
            raise SnapshotExpired from error
        raise ReadRefused(f"the server refuses to read it ({code_of(error)})") from error


@contextmanager
def translating_opening() -> Iterator[None]:
    """As `translating`, for opening a change stream: other errors are about its stages, or what it is opened on."""
    what = "opening the change stream"
    try:
        with translating(what):
            yield
    except errors.AccessRefused as error:
        if error.__cause__ is None or not _is_of_the_tier(error.__cause__):
            raise
        raise _stream_refused(what, error.__cause__) from error
    except (driver.OperationFailure, driver.InvalidName) as error:
        raise _stream_refused(what, error) from error


def _stream_refused(what: str, error: BaseException) -> errors.SourceUnsuitable:
    return errors.SourceUnsuitable(
        f"{what}: it is refused: {first_line(error)}; check source.cursor.pipeline and source.capture.target"
    )


def _is_of_the_tier(error: BaseException | None) -> bool:
    """Whether Atlas does not offer this, as `$where`, to a small cluster, whoever asks."""
    return getattr(error, "code", None) == ATLAS_REFUSED and "atlas tier" in str(error).lower()


def code_of(error: driver.OperationFailure) -> str:
    """The code of a server error and its name, without the text, which may quote documents."""
    name = (error.details or {}).get("codeName")
    return f"error {error.code}{f', {name}' if name and not str(name).startswith('Location') else ''}"


def _refused_at_handshake(error: driver.ServerSelectionTimeoutError) -> bool:
    details = getattr(error, "details", None)
    return bool(isinstance(details, Mapping) and details.get("code") in (AUTHENTICATION_FAILED, ATLAS_REFUSED))


def _refused_command(error: BaseException) -> str:
    """The names of the refused command and its database; the rest of the text holds filters and documents."""
    match = re.match(r"not authorized on (\S+) to execute command \{ (\w+):", str(error))
    return f": not authorized on {match[1]} to execute command {match[2]}" if match else ""


def first_line(error: BaseException) -> str:
    message = re.sub(r" \(configured timeouts: [^)]*\)", "", _safe(error).splitlines()[0])
    return re.split(r", full error: |, Timeout: |, Topology Description: ", message)[0][:300]


def _safe(error: BaseException) -> str:
    """The error's text, without the user name and password of a connection string."""
    return re.sub(r"//[^/@\s]+@", "//***@", str(error))
