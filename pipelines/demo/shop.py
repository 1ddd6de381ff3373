"""The demo's workload: operations of a shop on a real MongoDB.

Step n depends only on n and the stored documents, so that the next run continues after the last step. Its number is in a database of
its own, which the pipeline does not capture.
"""

from __future__ import annotations

import itertools
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any

import bson
from bson.raw_bson import RawBSONDocument

if TYPE_CHECKING:
    from pymongo import MongoClient
    from pymongo.client_session import ClientSession
    from pymongo.database import Database

    Client = MongoClient[dict[str, Any]]
    Shop = Database[dict[str, Any]]

DATABASE = "shop"
COLLECTIONS = ("customers", "orders", "products", "lost_and_found")
DIARY = ("shop_diary", "steps")
PAUSE_SECONDS = 0.02
"""Between two steps."""

CUSTOMERS, PRODUCTS, ORDERS = 400, 120, 800
OPENED = datetime(2024, 3, 1, 8, tzinfo=UTC)

_FIRST = ("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Femi", "Greta", "Hiro", "Inés", "Jonas", "Kavya", "Łukasz")
_LAST = ("Almeida", "Berg", "Castellanos", "Dubois", "Eriksen", "Fontana", "Grimaldi", "Haddad", "Ibarra", "Jensen")
_CITIES = (("Lisbon", "1000"), ("Bergen", "5003"), ("Lyon", "69001"), ("Graz", "8010"), ("Gdańsk", "80-001"))
_WORDS = ("oak", "linen", "brass", "cork", "slate", "wool", "copper", "willow", "amber", "indigo")
_THINGS = ("lamp", "chair", "kettle", "blanket", "clock", "basket", "mirror", "desk", "vase", "stool")
_TAGS = ("regular", "newsletter", "wholesale", "gift", "local")
_STATUS = ("paid", "packed", "shipped", "delivered")


def stock(client: Client) -> None:
    """Insert the shop's first documents, unless they exist."""
    shop = client[DATABASE]
    if shop["orders"].estimated_document_count():
        return
    random = Random("stock")
    documents: dict[str, list[Any]] = {
        "products": [_product(random, number) for number in range(PRODUCTS)],
        "customers": [_customer(random, number) for number in range(CUSTOMERS)],
        "lost_and_found": [*_odd_things(random)],
        "orders": [_order(random, number, _any(random, CUSTOMERS)) for number in range(ORDERS)],
    }

    def insert(session: ClientSession) -> None:
        for name, collection_documents in documents.items():
            shop[name].insert_many(collection_documents, session=session)

    # One transaction: the next run could not complete what a killed one has begun.
    with client.start_session() as session:
        session.with_transaction(insert)


def open_for_business(client: Client, *, stop: threading.Event, each: Callable[[str], None]) -> None:
    """Run steps until `stop` is set; calls `each` with the name of each step."""
    diary = client[DIARY[0]][DIARY[1]]
    entry = diary.find_one({"_id": DATABASE}) or {}
    for step in itertools.count(int(entry.get("step", 0))):
        if stop.wait(PAUSE_SECONDS):
            break
        # Recorded before: a step that inserts a document cannot run twice, and one that a kill cuts off may be skipped.
        diary.replace_one({"_id": DATABASE}, {"step": step + 1}, upsert=True)
        each(_play(client, step))


def close(client: Client) -> str:
    """Write a last document; returns its event's cluster time as 16 hex digits, the beginning of its `sequence`."""
    with client.start_session() as session:
        orders = client[DATABASE]["orders"].estimated_document_count()
        till = {"orders": orders, "counted": datetime.now(UTC)}
        client[DATABASE]["lost_and_found"].replace_one({"_id": "the till"}, till, upsert=True, session=session)
        cluster_time = session.operation_time
    assert cluster_time is not None
    return f"{cluster_time.time:08x}{cluster_time.inc:08x}"


def _play(client: Client, step: int) -> str:
    random = Random(step)
    shop = client[DATABASE]
    action = random.choices(_ACTIONS, weights=[weight for weight, _ in _WEIGHED])[0]
    action(shop, random, step)
    return action.__name__.strip("_").replace("_", " ")


def _new_customer(shop: Shop, random: Random, step: int) -> None:
    shop["customers"].insert_one(_customer(random, CUSTOMERS + step))


def _new_address(shop: Shop, random: Random, step: int) -> None:
    city, code = random.choice(_CITIES)
    address = {"address.city": city, "address.postcode": code, "address.since": _time(step)}
    shop["customers"].update_one({"_id": _customer_id(_any(random, CUSTOMERS))}, {"$set": address})


def _forgotten_phone(shop: Shop, random: Random, step: int) -> None:
    shop["customers"].update_one({"_id": _customer_id(_any(random, CUSTOMERS))}, {"$unset": {"phone": ""}})


def _tag_added(shop: Shop, random: Random, step: int) -> None:
    customer = {"_id": _customer_id(_any(random, CUSTOMERS))}
    shop["customers"].update_one(customer, {"$push": {"tags": random.choice(_TAGS)}})


def _tag_taken(shop: Shop, random: Random, step: int) -> None:
    customer = {"_id": _customer_id(_any(random, CUSTOMERS))}
    shop["customers"].update_one(customer, {"$pull": {"tags": random.choice(_TAGS)}})


def _customer_gone(shop: Shop, random: Random, step: int) -> None:
    shop["customers"].delete_one({"_id": _customer_id(_any(random, CUSTOMERS + step))})


def _order_placed(shop: Shop, random: Random, step: int) -> None:
    """One transaction over several documents: the order, the products' stock, the customer's number of orders."""
    customer = _any(random, CUSTOMERS)
    order = _order(random, ORDERS + step, customer)

    def buy(session: ClientSession) -> None:
        shop["orders"].insert_one(order, session=session)
        for line in order["lines"]:
            shop["products"].update_one({"_id": line["sku"]}, {"$inc": {"stock": -line["quantity"]}}, session=session)
        shop["customers"].update_one(
            {"_id": _customer_id(customer)},
            {"$inc": {"orders": 1}, "$set": {"last_order": order["placed"]}},
            session=session,
        )

    with shop.client.start_session() as session:
        session.with_transaction(buy)


def _order_moved_on(shop: Shop, random: Random, step: int) -> None:
    status = random.choice(_STATUS)
    change: dict[str, Any] = {"$set": {"status": status, f"history.{status}": _time(step)}}
    if status == "delivered":
        change["$unset"] = {"note": ""}
    shop["orders"].update_one({"_id": bson.Int64(1000 + _any(random, ORDERS + step))}, change)


def _line_added(shop: Shop, random: Random, step: int) -> None:
    line = _line(random)
    change = {"$push": {"lines": line}, "$inc": {"pieces": line["quantity"]}}
    shop["orders"].update_one({"_id": bson.Int64(1000 + _any(random, ORDERS + step))}, change)


def _line_taken(shop: Shop, random: Random, step: int) -> None:
    order = {"_id": bson.Int64(1000 + _any(random, ORDERS + step))}
    shop["orders"].update_one(order, {"$pull": {"lines": {"quantity": 1}}})


def _order_cancelled(shop: Shop, random: Random, step: int) -> None:
    shop["orders"].delete_one({"_id": bson.Int64(1000 + _any(random, ORDERS + step))})


def _product_described_anew(shop: Shop, random: Random, step: int) -> None:
    product = _product(random, _any(random, PRODUCTS)) | {"revised": _time(step)}
    if random.random() < 0.7:
        product["weight"] = "ask us"  # a number before: the column keeps its type, and the string is rescued
    shop["products"].replace_one({"_id": product["_id"]}, product, upsert=True)


def _product_discontinued(shop: Shop, random: Random, step: int) -> None:
    shop["products"].delete_one({"_id": _sku(_any(random, PRODUCTS))})


def _something_found(shop: Shop, random: Random, step: int) -> None:
    thing = random.choice(list(_odd_things(random)))
    shop["lost_and_found"].replace_one({"_id": thing["_id"]}, thing, upsert=True)


def _something_claimed(shop: Shop, random: Random, step: int) -> None:
    thing = random.choice(list(_odd_things(random)))
    shop["lost_and_found"].delete_one({"_id": thing["_id"]})


_WEIGHED: tuple[tuple[int, Callable[[Shop, Random, int], None]], ...] = (
    (10, _new_customer),
    (8, _new_address),
    (2, _forgotten_phone),
    (5, _tag_added),
    (3, _tag_taken),
    (1, _customer_gone),
    (18, _order_placed),
    (22, _order_moved_on),
    (6, _line_added),
    (3, _line_taken),
    (3, _order_cancelled),
    (5, _product_described_anew),
    (1, _product_discontinued),
    (2, _something_found),
    (1, _something_claimed),
)
_ACTIONS = [action for _, action in _WEIGHED]


def _customer(random: Random, number: int) -> dict[str, Any]:
    first, last = random.choice(_FIRST), random.choice(_LAST)
    city, code = random.choice(_CITIES)
    return {
        "_id": _customer_id(number),
        "name": {"first": first, "last": last},
        "email": f"{first}.{last}.{number}@example.com".lower(),
        "phone": f"+00 555 {number:05d}",
        "address": {"city": city, "postcode": code},
        "tags": random.sample(_TAGS, random.randint(0, 2)),
        "orders": 0,
        "since": _time(number),
    }


def _product(random: Random, number: int) -> dict[str, Any]:
    return {
        "_id": _sku(number),
        "title": f"{random.choice(_WORDS)} {random.choice(_THINGS)}",
        "price": bson.Decimal128(f"{random.randint(199, 19999) / 100:.2f}"),
        "stock": random.randint(5, 500),
        "weight": round(random.uniform(0.1, 20), 3),
        "size": {"width": random.randint(5, 200), "height": random.randint(5, 200)},
    }


def _order(random: Random, number: int, customer: int) -> dict[str, Any]:
    lines = [_line(random) for _ in range(random.randint(1, 4))]
    return {
        "_id": bson.Int64(1000 + number),
        "customer": _customer_id(customer),
        "placed": _time(number),
        "status": "new",
        "lines": lines,
        "pieces": sum(line["quantity"] for line in lines),
        "total": bson.Decimal128(f"{sum(line['quantity'] * line['price'] for line in lines):.2f}"),
        "note": random.choice(("", "please ring twice", "a gift: no bill in the box")),
    }


def _line(random: Random) -> dict[str, Any]:
    return {
        "sku": _sku(_any(random, PRODUCTS)),
        "quantity": random.randint(1, 5),
        "price": round(random.uniform(2, 200), 2),
    }


def _odd_things(random: Random) -> Iterator[dict[str, Any] | RawBSONDocument]:
    """Documents with every BSON type as a value, and `_id`s of many types."""
    moment = _time(random.randint(0, 5000))
    identities: tuple[Any, ...] = (
        bson.ObjectId(b"lostandfound"),
        "umbrella",
        7,
        bson.Int64(2**40),
        2.5,
        moment,
        bson.Binary.from_uuid(uuid.UUID(int=42)),
        {"shelf": 3, "place": "b"},
        bson.Decimal128("12.50"),
        True,
    )
    values = tuple(_every_type(random, moment).items())
    for place, identity in enumerate(identities):
        fields = dict(values[place::3])
        yield _with_old_types({"_id": identity, "shelf": random.randint(1, 9), **fields}, place)


def _every_type(random: Random, moment: datetime) -> dict[str, Any]:
    return {
        "double": random.uniform(-1, 1),
        "not_a_number": float("nan"),
        "string": random.choice(_WORDS),
        "document": {"inner": {"deep": random.randint(0, 9)}},
        "array": [random.randint(0, 9) for _ in range(3)],
        "mixed_array": [1, "two", {"three": 3}],
        "binary": bson.Binary(bytes(random.randrange(256) for _ in range(6))),
        "uuid": bson.Binary.from_uuid(uuid.UUID(int=random.getrandbits(128))),
        "object_id": bson.ObjectId(bytes(random.randrange(256) for _ in range(12))),
        "boolean": random.random() < 0.5,
        "date": moment,
        "nothing": None,
        "regex": bson.Regex("^lost", "i"),
        "reference": bson.DBRef("customers", _customer_id(_any(random, CUSTOMERS))),
        "code": bson.Code("function () { return 1; }"),
        "code_with_scope": bson.Code("function () { return x; }", {"x": 1}),
        "int32": random.randint(-(2**31), 2**31 - 1),
        "timestamp": bson.Timestamp(int(moment.timestamp()), 1),
        "int64": bson.Int64(random.randint(-(2**63), 2**63 - 1)),
        "decimal": bson.Decimal128(f"{random.randint(0, 10**9)}E-7"),
        "smallest": bson.MinKey(),
        "largest": bson.MaxKey(),
    }


def _with_old_types(document: dict[str, Any], place: int) -> RawBSONDocument:
    """The document with a value of a deprecated type that pymongo cannot encode: symbol, undefined or dbPointer."""
    text = struct.pack("<i", 4) + b"old\0"
    kind, name, value = (
        (b"\x0e", b"symbol\0", text),
        (b"\x06", b"undefined\0", b""),
        (b"\x0c", b"db_pointer\0", text + bytes(12)),
    )[place % 3]
    body = bson.encode(document)[4:-1] + kind + name + value + b"\0"
    return RawBSONDocument(struct.pack("<i", len(body) + 4) + body)


def _customer_id(number: int) -> bson.ObjectId:
    return bson.ObjectId(f"{number:024x}")


def _sku(number: int) -> str:
    return f"SKU-{number:04d}"


def _time(number: int) -> datetime:
    return OPENED + timedelta(minutes=7 * number)


def _any(random: Random, below: int) -> int:
    return random.randrange(below)
