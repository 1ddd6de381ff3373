"""Replies of `find`, `aggregate` and `getMore` as bytes: decoding a batch takes ten times as long."""

from __future__ import annotations

import struct
from typing import Any

import pymongo
from bson import decode
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS, RawBSONDocument

from cdc_core.extended_json import raw_bson

EXACT: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
LENIENT: CodecOptions[dict[str, Any]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, unicode_decode_error_handler="replace"
)
"""For replies that contain users' text (validators, views, filters), which is not used."""

RAW: CodecOptions[RawBSONDocument] = DEFAULT_RAW_BSON_OPTIONS.with_options(unicode_decode_error_handler="replace")
"""For replies whose documents stay bytes. The text of an error may quote a document or a name that is not UTF-8."""

NAMES: CodecOptions[dict[str, Any]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, unicode_decode_error_handler="surrogateescape"
)
"""For replies with names, which the server does not check: bytes that are not UTF-8 become lone surrogates, so that names stay
different."""

_int32 = struct.Struct("<i").unpack_from


def drained(
    connection: pymongo.MongoClient[Any], db: str, command: dict[str, Any], *, codec_options: CodecOptions[Any], **more: Any
) -> list[Any]:
    """All documents of a command's cursor, which should be few or small.

    Works for any collection name: the driver's `Collection` refuses some, such as `a..b`.
    """
    # The cursor uses the codec of its database for later batches, and not that of the command.
    database = connection.get_database(db, codec_options=codec_options)
    return list(database.cursor_command(command, codec_options=codec_options, **more))


def split_batch(reply: bytes, name: bytes) -> tuple[list[bytes], dict[str, Any]]:
    """The raw documents of a cursor reply's batch, and the rest of its `cursor` document, decoded."""
    cursor = raw_bson.find(reply, b"cursor")
    array = raw_bson.find(reply, name, cursor.start)
    documents: list[bytes] = []
    append, index = documents.append, reply.index
    offset, stop = array.start + 4, array.end - 1
    # The inner loop of the capture: it reads only each element's name, which ends with a zero byte, and its document's length.
    while offset < stop:
        offset = index(b"\0", offset + 1) + 1
        end = offset + _int32(reply, offset)[0]
        append(reply[offset:end])
        offset = end
    # Without the batch's array, type byte and name, the rest is a document, small enough to decode.
    head_end = array.start - len(name) - 2
    rest = reply[cursor.start + 4 : head_end] + reply[array.end : cursor.end]
    return documents, decode((len(rest) + 4).to_bytes(4, "little") + rest, EXACT)
