"""Random documents of typical shapes as type-exact Extended JSON, the same for the same seed.

flat     a dozen short fields
nested   1 KB: ObjectIds, dates, int64, decimals, nested documents, an array of eight documents
wide     300 fields, one in twenty missing
sparse   thirty values, of them 25 of 900 names in a nested document, like the attributes of a shop's articles
mixed    deep, with one value in twenty of another type than the others at its path
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from typing import Any

POOL = 2000
"""Distinct documents; others repeat them under another `_id`."""

BASE_SECONDS = 1_700_000_000


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(string.ascii_letters, k=count))


def _object_id(rng: random.Random) -> dict[str, str]:
    return {"$oid": f"{rng.getrandbits(96):024x}"}


def _date(rng: random.Random) -> dict[str, Any]:
    return {"$date": {"$numberLong": str(BASE_SECONDS * 1000 + rng.randrange(10**10))}}


def _long(rng: random.Random) -> dict[str, str]:
    return {"$numberLong": str(rng.randrange(10**12))}


def _decimal(rng: random.Random) -> dict[str, str]:
    return {"$numberDecimal": f"{rng.randrange(1000)}.{rng.randrange(100):02}"}


def flat(rng: random.Random) -> dict[str, Any]:
    """A short document without nesting."""
    return {
        "number": rng.randrange(10**6),
        "name": _letters(rng, 12),
        "email": f"{_letters(rng, 8)}@example.org",
        "active": rng.random() < 0.5,
        "score": rng.random() * 100,
        "visits": _long(rng),
        "since": _date(rng),
        "country": rng.choice(["AT", "DE", "FR", "PL"]),
        "note": _letters(rng, 20) if rng.random() < 0.7 else None,
    }


def nested(rng: random.Random) -> dict[str, Any]:
    """A document of 1 KB, like a shop's order."""
    lines = [
        {"sku": _letters(rng, 6), "quantity": rng.randrange(10), "price": round(rng.random() * 100, 2)} for _ in range(8)
    ]
    return {
        "number": rng.randrange(10**6),
        "customer": _object_id(rng),
        "placed": _date(rng),
        "updated": _date(rng),
        "total": _decimal(rng),
        "points": _long(rng),
        "weight": rng.random() * 100,
        "paid": rng.random() < 0.5,
        "status": rng.choice(["new", "paid", "sent"]),
        "name": _letters(rng, 12),
        "email": f"{_letters(rng, 8)}@example.org",
        "note": _letters(rng, 20) if rng.random() < 0.7 else None,
        "address": {
            "street": _letters(rng, 10),
            "city": _letters(rng, 6),
            "zip": str(rng.randrange(99_999)),
            "place": {"lat": rng.random() * 90, "lon": rng.random() * 180},
        },
        "payment": {"kind": "card", "at": _date(rng), "amount": _decimal(rng), "reference": _object_id(rng)},
        "tags": [_letters(rng, 4) for _ in range(rng.randrange(4))],
        "lines": lines,
        "flags": {"gift": rng.random() < 0.1, "insured": rng.random() < 0.5, "level": rng.randrange(5)},
    }


def wide(rng: random.Random) -> dict[str, Any]:
    """A document of 300 fields."""
    kinds: list[Callable[[random.Random], Any]] = [
        lambda rng: rng.randrange(1000),
        lambda rng: rng.random(),
        lambda rng: _letters(rng, 12),
        _long,
        _date,
        lambda rng: rng.random() < 0.5,
    ]
    return {f"field_{number}": kinds[number % len(kinds)](rng) for number in range(300) if rng.random() < 0.95}


def sparse(rng: random.Random) -> dict[str, Any]:
    """A document with a few of many attributes."""
    kinds: list[Callable[[random.Random], Any]] = [
        lambda rng: rng.randrange(1000),
        lambda rng: rng.random(),
        lambda rng: _letters(rng, 12),
    ]
    names = sorted(rng.sample(range(900), 25))
    return {
        "name": _letters(rng, 12),
        "price": _decimal(rng),
        "since": _date(rng),
        "attributes": {f"attribute_{number}": kinds[number % len(kinds)](rng) for number in names},
        "stock": rng.randrange(100),
    }


def mixed(rng: random.Random) -> dict[str, Any]:
    """A deep document with some values of unexpected types."""

    def often(value: Any) -> Any:
        others = [rng.randrange(100), "a text", 2.5, _long(rng), _date(rng), [1, 2], {"a": 1}, True]
        return rng.choice(others) if rng.random() < 0.05 else value

    def level(depth: int) -> dict[str, Any]:
        inner = {"below": level(depth - 1)} if depth else {}
        return {
            "count": often(rng.randrange(100)),
            "title": often(_letters(rng, 10)),
            "at": often(_date(rng)),
            "list": [often(rng.random()) for _ in range(rng.randrange(3))],
            **inner,
        }

    return level(5)


SHAPES: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "flat": flat,
    "nested": nested,
    "wide": wide,
    "sparse": sparse,
    "mixed": mixed,
}
