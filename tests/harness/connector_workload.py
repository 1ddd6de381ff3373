"""The scripted workload whose events were recorded from the real connector. Its phases, in order:

    base     collections, and the documents that the steps change
    types    inserts of every BSON type, in fields and arrays and at the root
    ids      inserts of every type of `_id`
    changes  updates, replacements, deletes, transactions, collections that come and go
    signal   a signal in the source, and an insert after it

`tests/cases/envelopes` holds the connector's events, except those of `probe`. Most documents belong to one step: the step's
name is their `_id`, and the names of its cases begin with it.
"""

from __future__ import annotations

import datetime
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bson
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from pymongo import DeleteOne, InsertOne, MongoClient, ReplaceOne, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.database import Database
from pymongo.errors import WriteError

Document = dict[str, Any]

CODEC: CodecOptions[Document] = CodecOptions(
    uuid_representation=UuidRepresentation.STANDARD, datetime_conversion=DatetimeConversion.DATETIME_MS
)

REFUSED_IDS = frozenset({"regex", "array", "doc_dollar_key"})
"""The `_id`s that the server refuses."""


@dataclass(frozen=True)
class Workload:
    """The phases, over the database `name`. With `images` all collections but three store pre- and post-images.

    `client` does not retry writes, so that its transaction numbers start at 1; `retrying` does.
    """

    client: MongoClient[Document]
    retrying: MongoClient[Document]
    name: str
    images: bool = False

    @property
    def db(self) -> Database[Document]:
        return self.client.get_database(self.name, codec_options=CODEC)

    def base(self) -> None:
        """Create the collections, and the documents that later phases change."""
        images = {"changeStreamPreAndPostImages": {"enabled": True}} if self.images else {}
        for name in ("types", "tset", "ids", "ops", "excl", "other", "probe"):
            self.db.create_collection(name, **images)
        for name in ("nopre", "Dotted.Coll.name", "sp ace-é"):
            self.db.create_collection(name)
        self.db.ops.insert_many([{"_id": case, **document()} for case in (*UPDATES, *OTHERS)])
        self.db.tset.insert_many([{"_id": case, "v": "before", "keep": 1} for case in VALUES])
        kept = ("nopre_update", "nopre_unset", "nopre_delete", "nopre_replace")
        self.db.nopre.insert_many([{"_id": case, **document()} for case in kept])
        self.db.excl.insert_many([{"_id": case, **document()} for case in (*LISTED, "excl_delete", "excl_replace")])
        self.db.other.insert_one({"_id": "o1", "v": 1})

    def types(self) -> None:
        for case, value in VALUES.items():
            self.db.types.insert_one({"_id": case, "v": value})
        for case, elements in RAW.items():
            self.db.types.insert_one(_raw_document(case, *elements))
        for case, whole in WHOLE.items():
            self.db.types.insert_one({"_id": case, **whole})

    def ids(self) -> None:
        for case, value in IDS.items():
            try:
                self.db.ids.insert_one({"_id": value, "label": case, "n": 1})
                assert case not in REFUSED_IDS
            except WriteError:
                assert case in REFUSED_IDS

    def changes(self, settle: Callable[[], None]) -> None:
        """Calls `settle` before updated documents change again: by then the connector must have looked them up."""
        for case, value in VALUES.items():
            self.db.tset.update_one({"_id": case}, _set({"v": value}))
        for case, update in UPDATES.items():
            self.db.ops.update_one({"_id": case}, update)
        self._single_documents()
        self._many_documents()
        self._again()
        with self.client.start_session() as session:
            self._transactions(session)
        self._update("ops", "txn_aborted", {"n": 58})
        self._without_images()
        self._listed_fields()
        self.db["Dotted.Coll.name"].insert_one({"_id": 1, "v": 1})
        self.db["sp ace-é"].insert_one({"_id": 1, "v": 1})
        self.db.other.insert_one({"_id": "o2", "v": 1})
        self._ids(settle)
        self._collections()
        self.db.probe.insert_one({"_id": 1})

    def signal(self) -> None:
        data = {"data-collections": [f"{self.name}.ops", f"{self.name}.other"], "type": "incremental"}
        self.db.signals.insert_one({"_id": "sig1", "type": "execute-snapshot", "data": data})
        self.db.other.insert_one({"_id": "o9", "v": 1})

    def _update(self, collection: str, case: str, fields: Document, session: ClientSession | None = None) -> None:
        self.db[collection].update_one({"_id": case}, _set(fields), session=session)

    def _single_documents(self) -> None:
        ops = self.db.ops
        ops.replace_one({"_id": "replace_one"}, {"name": "New", "list": [1, 2]})
        ops.replace_one({"_id": "replace_one_same"}, {"_id": "replace_one_same", **document()})
        ops.replace_one({"_id": "replace_one_smaller"}, {})
        ops.replace_one({"_id": "replace_upsert_new"}, {"x": 1}, upsert=True)
        ops.delete_one({"_id": "delete_one"})
        ops.find_one_and_update({"_id": "find_one_and_update"}, _set({"n": 7}))
        ops.find_one_and_replace({"_id": "find_one_and_replace"}, {"n": 7})
        ops.find_one_and_delete({"_id": "find_one_and_delete"})
        ops.update_one({"_id": "upsert_new"}, {"$set": {"a": 1}, "$setOnInsert": {"b": 2}}, upsert=True)
        ops.update_one({"_id": "upsert_existing"}, {"$set": {"a": 1}, "$setOnInsert": {"b": 2}}, upsert=True)
        some = [{"i.sku": {"$in": ["s0", "s2"]}}]
        ops.update_one({"_id": "array_filters"}, _set({"items.$[i].qty": 99}), array_filters=some)
        ops.update_one({"_id": "positional_operator", "items.sku": "s1"}, _set({"items.$.qty": 42}))

    def _many_documents(self) -> None:
        ops = self.db.ops
        ops.bulk_write(
            [
                UpdateOne({"_id": "bulk_update"}, _set({"n": 3})),
                ReplaceOne({"_id": "bulk_replace"}, {"n": 4}),
                DeleteOne({"_id": "bulk_delete"}),
                InsertOne({"_id": "bulk_insert", "n": 1}),
            ]
        )
        ops.update_many({"_id": {"$regex": "^update_many"}}, _set({"n": 8}))
        ops.delete_many({"_id": {"$regex": "^delete_many"}})
        ops.insert_many([{"_id": f"im{number}", "i": number} for number in range(3)])

    def _again(self) -> None:
        """Delete a document after its update, insert one again after its delete, and update with and without retryable writes."""
        self._update("ops", "racy_update_then_delete", {"n": 8})
        self.db.ops.delete_one({"_id": "racy_update_then_delete"})
        self.db.ops.delete_one({"_id": "delete_then_reinsert"})
        self.db.ops.insert_one({"_id": "delete_then_reinsert", "again": True})
        self._update("ops", "implicit_session_update", {"n": 8})
        self.retrying[self.name].ops.update_one({"_id": "retryable_update"}, _set({"n": 8}))

    def _transactions(self, session: ClientSession) -> None:
        ops, other = self.db.ops, self.db.other
        with session.start_transaction():
            self._update("ops", "txn_single", {"n": 50}, session)
        with session.start_transaction():
            ops.insert_one({"_id": "txn_ins", "n": 1}, session=session)
            self._update("ops", "txn_mixed_update", {"n": 51}, session)
            other.insert_one({"_id": "txn_other", "v": 1}, session=session)
            ops.delete_one({"_id": "txn_mixed_delete"}, session=session)
            self._update("other", "o1", {"v": 2}, session)
        with session.start_transaction():
            self._update("ops", "txn_update_then_delete", {"n": 52, "addr.zip": "x"}, session)
            ops.delete_one({"_id": "txn_update_then_delete"}, session=session)
        with session.start_transaction():
            self._update("ops", "txn_update_twice", {"n": 53}, session)
            self._update("ops", "txn_update_twice", {"n": 54}, session)
        with session.start_transaction():
            ops.replace_one({"_id": "txn_replace_then_update"}, {"n": 1}, session=session)
            self._update("ops", "txn_replace_then_update", {"n": 2}, session)
        with session.start_transaction():
            ops.insert_one({"_id": "txn_ephemeral", "n": 1}, session=session)
            ops.delete_one({"_id": "txn_ephemeral"}, session=session)
        session.start_transaction()
        self._update("ops", "txn_aborted", {"n": 55}, session)
        session.abort_transaction()
        with session.start_transaction():
            self._update("ops", "txn_second_a", {"n": 56}, session)
            self._update("ops", "txn_second_b", {"n": 57}, session)

    def _without_images(self) -> None:
        nopre = self.db.nopre
        nopre.insert_one({"_id": "nopre_insert", "n": 1})
        self._update("nopre", "nopre_update", {"n": 2})
        nopre.update_one({"_id": "nopre_unset"}, {"$unset": {"old": ""}})
        nopre.replace_one({"_id": "nopre_replace"}, {"n": 2})
        nopre.delete_one({"_id": "nopre_delete"})

    def _listed_fields(self) -> None:
        excl = self.db.excl
        excl.insert_one({"_id": "excl_insert", **document()})
        for case, update in LISTED.items():
            excl.update_one({"_id": case}, update)
        excl.replace_one({"_id": "excl_replace"}, document())
        excl.delete_one({"_id": "excl_delete"})

    def _ids(self, settle: Callable[[], None]) -> None:
        labels = [label for label in IDS if label not in REFUSED_IDS]
        for label in labels:
            self.db.ids.update_one({"label": label}, _set({"n": 2}))
        settle()
        for label in labels:
            self.db.ids.replace_one({"label": label}, {"label": label, "n": 3})
        for label in labels:
            self.db.ids.delete_one({"label": label})

    def _collections(self) -> None:
        """Cause events without a document: create an index, and create, rename and drop a collection."""
        self.db.other.create_index("v")
        self.db.ddl.insert_one({"_id": 1, "v": 1})
        self.db.ddl.rename("ddl2")
        self.db.ddl2.insert_one({"_id": 2, "v": 1})
        self.db.ddl2.drop()
        self.db.ddl2.insert_one({"_id": 3, "v": 1})


# --- values ----------------------------------------------------------------------------------------------------------


def document() -> Document:
    """The document that most steps change."""
    return {
        "name": "Tim",
        "n": 1,
        "long": Int64(5),
        "big": Int64(2**40),
        "dbl": 1.5,
        "flag": True,
        "created": _utc(2020, 1, 27, 10, 47, 12, 311000),
        "price": Decimal128("9.99"),
        "addr": {"street": "Main", "zip": "12345", "geo": {"lat": 1.5, "lon": -2.5}},
        "arr": ["a", "b", "c", "d", "e"],
        "nums": [1, 2, 3, 4, 5],
        "items": [{"sku": "s0", "qty": 0}, {"sku": "s1", "qty": 1}, {"sku": "s2", "qty": 2}],
        "old": "x",
        "nul": None,
    }


def _set(fields: Document) -> Document:
    return {"$set": fields}


def _utc(*parts: int) -> datetime.datetime:
    return datetime.datetime(*parts, tzinfo=datetime.UTC)  # type: ignore[misc,arg-type]


def _object_id(number: int) -> ObjectId:
    return ObjectId(f"5f00000000000000{number:08x}")


Element = tuple[int, str, bytes]
"""A BSON field: type, name, and the bytes of its value."""


def _raw_document(id_: str, *elements: Element) -> RawBSONDocument:
    """A document with fields that drivers cannot write."""
    return RawBSONDocument(_length_before(bson.encode({"_id": id_})[4:-1] + _joined(elements) + b"\0"))


def _raw(*elements: Element) -> bytes:
    return _length_before(_joined(elements) + b"\0")


def _joined(elements: tuple[Element, ...]) -> bytes:
    return b"".join(bytes([kind]) + name.encode() + b"\0" + payload for kind, name, payload in elements)


def _length_before(body: bytes) -> bytes:
    return _int(len(body) + 4) + body


def _int(number: int) -> bytes:
    return struct.pack("<i", number)


def _text(text: str) -> bytes:
    return _int(len(text.encode()) + 1) + text.encode() + b"\0"


TEXT, DOCUMENT, ARRAY, UNDEFINED, POINTER, SYMBOL, SCOPED_CODE, INT = 0x02, 0x03, 0x04, 0x06, 0x0C, 0x0E, 0x0F, 0x10

RAW: dict[str, tuple[Element, ...]] = {
    "symbol": ((SYMBOL, "v", _text("sym")),),
    "undefined": ((UNDEFINED, "v", b""),),
    "dbpointer": ((POINTER, "v", _text("oracle.x") + _object_id(9).binary),),
    "doc_with_undefined": ((DOCUMENT, "v", _raw((UNDEFINED, "u", b""), (INT, "i", _int(1)))),),
    "doc_with_symbol": ((DOCUMENT, "v", _raw((SYMBOL, "u", _text("sym")), (INT, "i", _int(1)))),),
    "arr_symbol": ((ARRAY, "v", _raw((SYMBOL, "0", _text("sym")))),),
    "arr_undefined": ((ARRAY, "v", _raw((UNDEFINED, "0", b""), (INT, "1", _int(1)))),),
    "duplicate_field": ((INT, "v", _int(1)), (TEXT, "v", _text("second"))),
    "code_with_scope_raw": ((SCOPED_CODE, "v", _length_before(_text("f") + _raw((INT, "y", _int(1))))),),
}

VALUES: dict[str, Any] = {
    "int32": 5,
    "int32_zero": 0,
    "int32_max": 2**31 - 1,
    "int32_min": -(2**31),
    "int64_small": Int64(5),
    "int64_zero": Int64(0),
    "int64_big": Int64(2**40),
    "int64_max": Int64(2**63 - 1),
    "int64_min": Int64(-(2**63)),
    "int64_2pow31": Int64(2**31),
    "int64_minus_2pow31_minus1": Int64(-(2**31) - 1),
    "double": 1.5,
    "double_integral": 1.0,
    "double_1e10": 1e10,
    "double_1e7": 1e7,
    "double_9999999": 9999999.0,
    "double_1e-3": 1e-3,
    "double_1e-4": 1e-4,
    "double_1e-5": 1e-5,
    "double_1e21": 1e21,
    "double_0.1": 0.1,
    "double_third": 1 / 3,
    "double_2e-3": 2e-3,
    "double_2.0E23": 2e23,
    "double_neg_zero": -0.0,
    "double_denorm_min": 5e-324,
    "double_max": 1.7976931348623157e308,
    "double_2pow53": float(2**53),
    "double_123456789.125": 123456789.125,
    "double_nan": float("nan"),
    "double_inf": float("inf"),
    "double_neg_inf": float("-inf"),
    "decimal": Decimal128("1.5"),
    "decimal_trailing": Decimal128("1.50"),
    "decimal_exp": Decimal128("1E+3"),
    "decimal_zero_exp": Decimal128("0E-10"),
    "decimal_neg_zero": Decimal128("-0"),
    "decimal_34": Decimal128("1234567890123456789012345678901234"),
    "decimal_small": Decimal128("1E-6176"),
    "decimal_0.000001": Decimal128("0.000001"),
    "decimal_0.0000001": Decimal128("0.0000001"),
    "decimal_nan": Decimal128("NaN"),
    "decimal_inf": Decimal128("Infinity"),
    "decimal_neg_inf": Decimal128("-Infinity"),
    "string": "abc",
    "string_empty": "",
    "string_number": "123",
    "string_space": "  a b ",
    "string_quotes": "a\"b\\c/d'e",
    "string_controls": "a\b\f\n\r\t\x01\x1f\x7fz",
    "string_nul": "a\0b",
    "string_latin": "é ß ñ",
    "string_combining": "e\u0301",
    "string_cjk": "漢字 カー",
    "string_emoji": "x😊y",
    "string_zwj_bom": "a\u200d\ufeffb",
    "string_2028": "a\u2028\u2029b",
    "string_nbsp": "a\u00a0b",
    "string_symbols": "€ + © ´ ^ ` <>&=",
    "string_modifier": "ʰ",
    "string_private": "\ue000",
    "string_json": '{"a": 1}',
    "string_arabic": "مرحبا",
    "string_unassigned": "\u0378",
    "bool_true": True,
    "bool_false": False,
    "null": None,
    "date": _utc(2020, 1, 27, 10, 47, 12, 311000),
    "date_no_ms": _utc(2020, 1, 27, 10, 47, 12),
    "date_300ms": _utc(2020, 1, 27, 10, 47, 12, 300000),
    "date_10ms": _utc(2020, 1, 27, 10, 47, 12, 10000),
    "date_epoch": _utc(1970, 1, 1),
    "date_minus_1ms": DatetimeMS(-1),
    "date_1960": _utc(1960, 5, 5, 1, 2, 3, 4000),
    "date_year1": _utc(1, 1, 1),
    "date_9999_end": DatetimeMS(253402300799999),
    "date_year_10000": DatetimeMS(253402300800000),
    "date_min": DatetimeMS(-(2**63)),
    "date_max": DatetimeMS(2**63 - 1),
    "timestamp": Timestamp(1580205633, 1),
    "timestamp_high_bit": Timestamp(2**31 + 5, 7),
    "timestamp_inc_high": Timestamp(1580205633, 2**32 - 1),
    "objectid": ObjectId("596e275826f08b2730779e1f"),
    "binary_0": Binary(bytes.fromhex("00ff10"), 0),
    "binary_1": Binary(b"fn", 1),
    "binary_2_old": Binary(b"old", 2),
    "binary_3_uuid_old": Binary(bytes(range(16)), 3),
    "binary_5_md5": Binary(bytes(range(16)), 5),
    "binary_80_user": Binary(b"user", 128),
    "binary_empty": Binary(b"", 0),
    "uuid": uuid.UUID("00112233-4455-6677-8899-aabbccddeeff"),
    "regex": Regex("^a.*b", "i"),
    "regex_all_options": Regex("p/q", "imsx"),
    "regex_no_options": Regex("x"),
    "code": Code("function(){return 1}"),
    "code_with_scope": Code("f", {"y": 1, "z": Int64(2)}),
    "minkey": MinKey(),
    "maxkey": MaxKey(),
    "dbref": DBRef("a2", 4, "b2"),
    "doc_empty": {},
    "doc_nested": {"a": 1, "b": {"c": "x", "d": {"e": 1.5}}},
    "doc_nested_null": {"a": None, "b": {"c": None}},
    "doc_with_empty": {"a": {}, "b": 1},
    "doc_all_empty": {"a": {"b": {}}},
    "doc_with_regex": {"r": Regex("x", "i")},
    "doc_with_oid_date": {
        "o": _object_id(1),
        "d": _utc(2020, 1, 1),
        "t": Timestamp(5, 6),
        "n": Int64(7),
        "dec": Decimal128("2.50"),
        "bin": Binary(b"ab", 0),
    },
    "doc_deep": {"a1": {"a2": {"a3": {"a4": {"a5": {"a6": 1}}}}}},
    "doc_strict_like_oid": {"$oid": "596e275826f08b2730779e1f"},
    "doc_strict_like_numberlong": {"$numberLong": "5"},
    "doc_strict_like_date": {"$date": 5},
    "doc_dollar_key": {"$foo": 1},
    "doc_dollar_key_second": {"a": 1, "$foo": 2},
    "doc_dotted_key": {"a.b": 1, "c": 2},
    "doc_numeric_keys": {"0": "x", "1": "y"},
    "doc_key_space": {"a b": 1, "é": 2, "1a": 3, "a-b": 4, "a::b": 5},
    "doc_key_empty": {"": 1},
    "doc_dup_avro": {"a-b": 1, "a.b": 2},
    "arr_empty": [],
    "arr_int": [1, 2, 3],
    "arr_int64": [Int64(1), Int64(2**40)],
    "arr_double": [1.5, 2.0],
    "arr_string": ["x", "y"],
    "arr_bool": [True, False],
    "arr_date": [_utc(2020, 1, 1)],
    "arr_date_timestamp": [_utc(2020, 1, 1), Timestamp(5, 6)],
    "arr_timestamp": [Timestamp(5, 6)],
    "arr_decimal": [Decimal128("1.5"), Decimal128("2")],
    "arr_oid": [_object_id(1)],
    "arr_binary": [Binary(b"a", 0), uuid.UUID(int=5)],
    "arr_string_null": ["x", None],
    "arr_null_string": [None, "x"],
    "arr_nulls": [None, None],
    "arr_one_null": [None],
    "arr_int_null": [1, None],
    "arr_null_int": [None, 1],
    "arr_date_null": [_utc(2020, 1, 1), None],
    "arr_bool_null": [True, None],
    "arr_int_double": [1, 2.5],
    "arr_int_int64": [1, Int64(2**40)],
    "arr_int_int64_small": [1, Int64(2)],
    "arr_int_string": [11, "abc"],
    "arr_string_oid": ["x", _object_id(1)],
    "arr_string_decimal": ["x", Decimal128("1.5")],
    "arr_string_code": ["x", Code("f")],
    "arr_regex": [Regex("x", "i")],
    "arr_code": [Code("f")],
    "arr_code_with_scope": [Code("f", {"y": 1})],
    "arr_minkey": [MinKey()],
    "arr_maxkey_int": [1, MaxKey()],
    "arr_nan": [1.5, float("nan"), float("inf")],
    "arr_nested": [[1, 2], [3]],
    "arr_nested_empty_first": [[], [1]],
    "arr_nested_empty_last": [[1], []],
    "arr_nested_empty_only": [[]],
    "arr_nested_two_empty": [[], []],
    "arr_nested_mixed_rows": [[1, 2], ["x"]],
    "arr_nested_mixed_in_row": [[1, "x"]],
    "arr_nested_equal_rows": [[1], [1]],
    "arr_nested_3": [[[1]]],
    "arr_nested_docs": [[{"k": 1}]],
    "arr_nested_docs_union": [[{"k": 1}, {"j": 1}]],
    "arr_nested_docs_rows_differ": [[{"k": 1}], [{"j": 1}]],
    "arr_nested_then_doc": [[1], {"b": 1}],
    "arr_nested_then_int": [[1], 2],
    "arr_int_then_nested": [2, [1]],
    "arr_nested_null_row": [[1], None],
    "arr_nested_null_first": [None, [1]],
    "arr_nested_heterogeneous": [[1, "aa", 3], [4, 5, "6"], [7.0, 8]],
    "arr_docs_same": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
    "arr_docs_identical": [{"a": 1}, {"a": 1}],
    "arr_docs_differ": [{"a": 1}, {"b": "c"}],
    "arr_docs_conflict": [{"a": 1}, {"a": "c"}],
    "arr_docs_null_int": [{"n": None}, {"n": 5}],
    "arr_docs_int_null": [{"n": 5}, {"n": None}],
    "arr_docs_null_string": [{"n": None}, {"n": "q"}],
    "arr_docs_int_long": [{"n": 1}, {"n": Int64(2**40)}],
    "arr_docs_int_double": [{"n": 1}, {"n": 2.5}],
    "arr_docs_date_null": [{"n": _utc(2020, 1, 1)}, {"n": None}],
    "arr_null_doc": [None, {"b": 1}],
    "arr_doc_null": [{"b": 1}, None],
    "arr_int_doc_int": [1, {"name": "doc"}, 2],
    "arr_doc_string": [{"a": 1}, "x"],
    "arr_string_doc": ["x", {"a": 1}],
    "arr_empty_doc": [{}],
    "arr_empty_doc_doc": [{}, {"b": 1}],
    "arr_doc_empty_doc": [{"b": 1}, {}],
    "arr_two_empty_docs": [{}, {}],
    "arr_docs_sub_differ": [{"q": {"x": 1}}, {"q": {"y": 2}}],
    "arr_docs_sub_superset_last": [{"q": {"x": 1}}, {"q": {"x": 1, "y": 2}}],
    "arr_docs_sub_superset_first": [{"q": {"x": 1, "y": 2}}, {"q": {"x": 1}}],
    "arr_docs_sub_empty_last": [{"q": {"x": 1}}, {"q": {}}],
    "arr_docs_sub_empty_first": [{"q": {}}, {"q": {"x": 1}}],
    "arr_docs_sub_string_doc": [{"q": "w"}, {"q": {"x": 1}}],
    "arr_docs_sub_doc_string": [{"q": {"x": 1}}, {"q": "w"}],
    "arr_docs_sub_doc_null": [{"q": {"x": 1}}, {"q": None}],
    "arr_docs_sub_null_doc": [{"q": None}, {"q": {"x": 1}}],
    "arr_docs_sub_missing": [{"q": {"x": 1}}, {"z": 1}],
    "arr_docs_sub_types_differ": [{"q": {"x": 1}}, {"q": {"x": "w"}}],
    "arr_docs_arr_empty_last": [{"w": [1]}, {"w": []}],
    "arr_docs_arr_empty_first": [{"w": []}, {"w": [1]}],
    "arr_docs_arr_string_empty": [{"w": ["x"]}, {"w": []}],
    "arr_docs_arr_types_differ": [{"w": [1]}, {"w": ["x"]}],
    "arr_docs_arr_docs_empty_last": [{"w": [{"k": 1}]}, {"w": []}],
    "arr_docs_arr_docs_empty_first": [{"w": []}, {"w": [{"k": 1}]}],
    "arr_docs_arr_docs_differ": [{"w": [{"k": 1}]}, {"w": [{"j": 1}]}],
    "arr_docs_arr_docs_union_one": [{"w": [{"k": 1}, {"j": 1}]}],
    "arr_docs_arr_null": [{"w": [1]}, {"w": None}],
    "arr_docs_arr_of_arr": [{"w": [[1], [2]]}],
    "arr_doc_with_empty_array": [{"f2": "v1", "f3": []}],
    "arr_doc_with_empty_doc": [{"f2": "v1", "f3": {}}],
    "arr_doc_with_regex": [{"r": Regex("x")}],
    "arr_doc_with_minkey": [{"r": MinKey()}],
    "arr_doc_nested_deep": [{"p": {"q": [{"r": {"s1": 1}}]}}],
    "arr_doc_field_order": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
    "arr_dotted_keys": [{"a.b": 1}, {"$c": 2}],
    "doc_array_inside": {"arr": [1, 2], "docs": [{"a": 1}, {"b": 2}]},
    "doc_array_mixed_inside": {"arr": [1, "x"]},
}

WHOLE: dict[str, Document] = {
    "root_only_id": {},
    "root_many": {
        "name": "Sally",
        "phone": Int64(123),
        "active": True,
        "scores": [1.2, 3.4, 5.6],
        "address": {"street": "Morris Park Ave", "zipcode": "10462"},
    },
    "root_order": {"z": 1, "a": 2, "m": 3},
    "root_dollar": {"$x": 1, "y": 2},
    "root_dotted": {"a.b": 1, "c.d.e": 2},
    "root_dollar_dotted": {"$a.b": 1},
    "root_empty_name": {"": 1},
    "root_key_chars": {"a b": 1, "é": 2, "1a": 3, "a-b": 4, "a::b": 5, "a/b": 6, "_x": 7},
    "root_flatten_collision": {"a": {"b": 1}, "a_b": 2},
    "root_flatten_dot_collision": {"a": {"b": 1}, "a.b": 2},
    "root_flatten_mixed": {"a": {"b": {"c": 1, "e": {}}, "d": [1]}, "n": None, "x": [{"k": 1}]},
    "root_named_deleted": {"__deleted": "mine"},
    "root_named_op": {"__op": "mine", "op": "x"},
    "root_named_id": {"id": 77, "v": 1},
    "root_field_types_suffix": {"types": [{"a": 1}]},
    "root_field_s_suffix": {"s": [{"a": 1}]},
    "root_field_s_suffix_primitive": {"s": [1]},
    "root_field_types_suffix_doc": {"types": {"a": 1}},
    "root_nested_same_name": {"vv": {"vv": [{"a": 1}]}},
    "root_restaurant": {
        "address": {
            "building": "1007",
            "floor": {"level": 17, "description": "level 17"},
            "coord": [-73.856077, 40.848447],
            "street": "Morris Park Ave",
            "zipcode": "10462",
        },
        "borough": "Bronx",
        "cuisine": "Bakery",
        "grades": [
            {"date": DatetimeMS(1393804800000), "grade": "A", "score": 2},
            {"date": DatetimeMS(1378857600000), "grade": "A", "score": 6},
        ],
        "name": "Morris Park Bake Shop",
        "restaurant_id": "30075445",
    },
    "root_pipeline": {
        "pipeline": [
            {
                "stageId": 1,
                "componentList": [{"componentId": 1, "action": "deploy"}, {"componentId": 2, "action": "build"}],
            },
            {"stageId": 2, "componentList": [{"componentId": 3, "action": "deploy"}]},
        ],
    },
    "root_update_description_name": {"updateDescription": 1, "after": 2, "source": 3},
    "root_dup_after_avro": {"a-b": 1, "a_b": "two"},
    "root_array_and_v": {
        "items": [{"sku": "s1", "qty": 1, "price": 1.25}, {"sku": "s2", "qty": 2, "price": 2.0, "note": None}],
        "tags": ["a", "b"],
        "total": Int64(1000),
    },
}

IDS: dict[str, Any] = {
    "objectid": ObjectId("596e275826f08b2730779e1f"),
    "int32": 1234,
    "int32_neg": -7,
    "int64_small": Int64(5000001),
    "int64_big": Int64(2147483657),
    "double": 12.34,
    "double_integral": 10.0,
    "double_1e21": 1e21,
    "double_nan": float("nan"),
    "double_inf": float("inf"),
    "string": "abc",
    "string_number": "123",
    "string_quotes": 'q"\\/é😊',
    "string_empty": "",
    "string_like_oid": "596e275826f08b2730779e1f",
    "date": DatetimeMS(1501232313123),
    "date_no_ms": DatetimeMS(1501232313000),
    "date_neg": DatetimeMS(-5),
    "date_far": DatetimeMS(253402300800000),
    "uuid": uuid.UUID("00112233-4455-6677-8899-aabbccddeeff"),
    "binary_0": Binary(b"\0\1\2", 0),
    "binary_3": Binary(bytes(range(16)), 3),
    "decimal": Decimal128("123.45678"),
    "decimal_exp": Decimal128("1E+3"),
    "bool_true": True,
    "bool_false": False,
    "null": None,
    "timestamp": Timestamp(1580205633, 1),
    "minkey": MinKey(),
    "maxkey": MaxKey(),
    "code": Code("f"),
    "doc": {"company": 32, "dept": "home improvement"},
    "doc_nested": {"a": {"b": Int64(5), "c": _utc(2020, 1, 1)}, "o": _object_id(3)},
    "doc_empty": {},
    "doc_with_array": {"a": [1, 2]},
    "doc_with_docs": {"a": [{"x": 1}, {"y": "z"}]},
    "doc_dotted_key": {"a.b": 1},
    "doc_dollar_key": {"$a": 1},
    "doc_named_id": {"id": 1, "_id": 2},
    "doc_mixed_array": {"a": [1, "x"]},
    "regex": Regex("x"),
    "array": [1],
}

UPDATES: dict[str, Any] = {
    "update_set_top_level": _set({"name": "Sally"}),
    "update_set_new_field": _set({"extra": "new"}),
    "update_set_several": _set({"name": "Sally", "n": 2, "dbl": 2.5}),
    "update_set_same_value": _set({"name": "Tim"}),
    "update_set_int64_small": _set({"long": Int64(6)}),
    "update_set_int64_big": _set({"big": Int64(2**41)}),
    "update_set_date": _set({"created": _utc(2021, 1, 1)}),
    "update_set_decimal": _set({"price": Decimal128("10.00")}),
    "update_set_nan": _set({"dbl": float("nan")}),
    "update_set_infinity": _set({"dbl": float("inf")}),
    "update_set_null": _set({"name": None}),
    "update_set_type_change": _set({"n": "one"}),
    "update_set_doc_over_scalar": _set({"name": {"first": "T", "last": "M"}}),
    "update_set_scalar_over_doc": _set({"addr": "none"}),
    "update_set_nested_dotted": _set({"addr.zip": "99999"}),
    "update_set_nested_two_levels": _set({"addr.geo.lat": 9.5}),
    "update_set_nested_new_path": _set({"addr.extra.deep": 1}),
    "update_set_new_nested_root": _set({"fresh.deep.path": 1}),
    "update_set_whole_subdoc": _set({"addr": {"street": "Other"}}),
    "update_set_two_nested": _set({"addr.zip": "1", "addr.geo.lon": 2.5}),
    "update_set_empty_doc": _set({"addr": {}}),
    "update_set_empty_array": _set({"arr": []}),
    "update_set_array_whole": _set({"nums": [9, 8]}),
    "update_set_array_docs_whole": _set({"items": [{"sku": "z"}, {"qty": 1}]}),
    "update_set_mixed_array": _set({"nums": [1, "x"]}),
    "update_set_array_element": _set({"arr.1": "B"}),
    "update_set_array_element_beyond": _set({"arr.7": "H"}),
    "update_set_array_doc_field": _set({"items.1.qty": 11}),
    "update_set_numeric_key_on_doc": _set({"addr.0": "zero"}),
    "update_unset_top_level": {"$unset": {"old": ""}},
    "update_unset_two": {"$unset": {"old": "", "flag": ""}},
    "update_unset_nested_dotted": {"$unset": {"addr.zip": ""}},
    "update_unset_nested_last": {"$unset": {"addr.geo.lat": "", "addr.geo.lon": ""}},
    "update_unset_subdoc": {"$unset": {"addr": ""}},
    "update_unset_missing": {"$unset": {"nope": ""}},
    "update_unset_array_element": {"$unset": {"arr.1": ""}},
    "update_unset_array_doc_field": {"$unset": {"items.1.qty": ""}},
    "update_set_and_unset": {"$set": {"name": "Sally"}, "$unset": {"old": "", "addr.zip": ""}},
    "update_rename": {"$rename": {"old": "renamed"}},
    "update_rename_nested": {"$rename": {"addr.zip": "addr.postcode"}},
    "array_push": {"$push": {"arr": "f"}},
    "array_push_each": {"$push": {"arr": {"$each": ["f", "g"]}}},
    "array_push_doc": {"$push": {"items": {"sku": "s3", "qty": 3, "more": True}}},
    "array_push_new_field": {"$push": {"brandnew": 1}},
    "array_push_position": {"$push": {"arr": {"$each": ["0"], "$position": 0}}},
    "array_push_sort": {"$push": {"nums": {"$each": [0], "$sort": 1}}},
    "array_push_slice_last": {"$push": {"arr": {"$each": ["f"], "$slice": -3}}},
    "array_push_slice_first": {"$push": {"arr": {"$each": [], "$slice": 2}}},
    "array_pop_last": {"$pop": {"arr": 1}},
    "array_pop_first": {"$pop": {"arr": -1}},
    "array_pull": {"$pull": {"arr": "c"}},
    "array_pull_docs": {"$pull": {"items": {"qty": 1}}},
    "array_pull_last": {"$pull": {"arr": "e"}},
    "array_pull_all": {"$pullAll": {"nums": [1, 5]}},
    "array_add_to_set": {"$addToSet": {"arr": "z"}},
    "array_add_to_set_existing": {"$addToSet": {"arr": "a"}},
    "array_inc_all": {"$inc": {"nums.$[]": 10}},
    "array_inc_element": {"$inc": {"nums.2": 10}},
    "pipeline_slice_truncates": [{"$set": {"arr": {"$slice": ["$arr", 2]}}}],
    "pipeline_slice_truncates_two": [{"$set": {"arr": {"$slice": ["$arr", 2]}, "nums": {"$slice": ["$nums", 1]}}}],
    "pipeline_truncate_docs": [{"$set": {"items": {"$slice": ["$items", 1]}}}],
    "pipeline_truncate_and_set": [{"$set": {"arr": {"$slice": ["$arr", 2]}, "name": "Sally"}}, {"$unset": "old"}],
    "pipeline_truncate_and_change_element": [
        {"$set": {"arr": {"$concatArrays": [["X"], {"$slice": ["$arr", 1, 1]}]}}},
    ],
    "pipeline_truncate_nested": [{"$set": {"addr.list": [1, 2, 3]}}],
    "pipeline_truncate_to_empty": [{"$set": {"arr": {"$slice": ["$arr", 0, 1]}}}],
    "pipeline_set": [{"$set": {"total": {"$add": ["$n", 1]}}}],
    "pipeline_unset": [{"$unset": ["old", "addr.zip"]}],
    "pipeline_replace_with": [{"$replaceWith": {"name": "R", "n": 5}}],
    "pipeline_setfield_dotted": [{"$replaceWith": {"$setField": {"field": "x.y", "input": "$$ROOT", "value": 1}}}],
    "pipeline_setfield_dollar": [
        {"$replaceWith": {"$setField": {"field": {"$literal": "$z"}, "input": "$$ROOT", "value": 1}}},
    ],
    "update_inc": {"$inc": {"n": 5, "addr.geo.lat": 1}},
    "update_inc_to_int64": {"$inc": {"n": Int64(2**40)}},
    "update_mul": {"$mul": {"n": 3, "missing": 2}},
    "update_min": {"$min": {"n": 0, "dbl": 9.5}},
    "update_max": {"$max": {"n": 9, "dbl": 0.5}},
    "update_bit": {"$bit": {"n": {"or": 6}}},
    "update_set_unicode": _set({"name": "é😊\u2028"}),
    "update_set_binary": _set({"bin": Binary(b"\0\1", 0)}),
    "update_set_uuid": _set({"u": uuid.UUID(int=7)}),
    "update_set_regex": _set({"r": Regex("x", "i")}),
    "update_set_minkey": _set({"m": MinKey()}),
    "update_set_oid": _set({"o": _object_id(5)}),
    "update_set_timestamp": _set({"ts": Timestamp(5, 6)}),
    "update_collides_flat": _set({"addr.zip": "7", "addr_zip": "8"}),
}
"""Updates by case; each case has its own document in `ops`."""

OTHERS = """
    replace_one replace_one_same replace_one_smaller delete_one find_one_and_update find_one_and_replace
    find_one_and_delete upsert_existing array_filters positional_operator bulk_update bulk_replace bulk_delete
    update_many_1 update_many_2 delete_many_1 delete_many_2 racy_update_then_delete update_twice
    txn_update_then_delete txn_update_twice txn_replace_then_update txn_mixed_update txn_mixed_delete txn_aborted
    txn_single retryable_update delete_then_reinsert implicit_session_update txn_second_a txn_second_b
""".split()
"""The documents in `ops` that steps other than `UPDATES` change."""

LISTED: dict[str, Any] = {
    "excl_update_all": _set(
        {
            "name": "Sally",
            "addr.zip": "1",
            "addr.geo.lat": 5.5,
            "items.1.qty": 5,
            "items.2.sku": "zz",
            "arr.0": "A",
            "price": Decimal128("1"),
        },
    ),
    "excl_unset_all": {"$unset": {"name": "", "addr.zip": "", "items.0.qty": "", "old": ""}},
    "excl_unset_parent": {"$unset": {"addr": ""}},
    "excl_set_parent": _set({"addr": {"zip": "5", "street": "S", "geo": {"lat": 1.0, "lon": 2.0}}}),
    "excl_truncate": [{"$set": {"arr": {"$slice": ["$arr", 2]}, "items": {"$slice": ["$items", 1]}}}],
    "excl_push": {"$push": {"items": {"sku": "s9", "qty": 9}}},
    "excl_only_excluded": _set({"name": "Q"}),
}
"""Updates by case; each case has its own document in `excl`, whose fields some runs exclude or rename."""
