"""Replies of `find`, `aggregate` and `getMore` that stay bytes: a batch that becomes objects costs ten times as much."""

from __future__ import annotations

import struct
from typing import Any

import pymongo
from bson import decode
from bson.codec_options import CodecOptions, DatetimeConversion

from cdc_core.extended_json import raw_bson

EXACT: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
LENIENT: CodecOptions[dict[str, Any]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, unicode_decode_error_handler="replace"
)
"""For replies that quote what a user wrote (validators, views, filters) and of which that part is not looked at."""

_int32 = struct.Struct("<i").unpack_from


def drained(
    connection: pymongo.MongoClient[Any], db: str, command: dict[str, Any], *, codec_options: CodecOptions[Any], **more: Any
) -> list[Any]:
    """All documents of a command's cursor: of few documents, or small ones.

    Of a collection of any name: the driver's `Collection` refuses some that a server has, `a..b` for one.
    """
    # The cursor goes on with the codec of its database, and not with that of the command.
    database = connection.get_database(db, codec_options=codec_options)
    return list(database.cursor_command(command, codec_options=codec_options, **more))


def split_batch(reply: bytes, name: bytes) -> tuple[list[bytes], dict[str, Any]]:
    """The raw documents of a cursor reply's batch, and the rest of its `cursor` document, decoded."""
    cursor = raw_bson.find(reply, b"cursor")
    array = raw_bson.find(reply, name, cursor.start)
    documents: list[bytes] = []
    append, index = documents.append, reply.index
    at, stop = array.start + 4, array.end - 1
    # The inner loop of the capture: of each element of the array only its name, which ends with a zero byte, and the length
    # of its document are looked at.
    while at < stop:
        at = index(b"\0", at + 1) + 1
        following = at + _int32(reply, at)[0]
        append(reply[at:following])
        at = following
    # Without the batch's array, its type byte and its name the rest is a document again, small enough to decode.
    before = array.start - len(name) - 2
    rest = reply[cursor.start + 4 : before] + reply[array.end : cursor.end]
    return documents, decode((len(rest) + 4).to_bytes(4, "little") + rest, EXACT)
