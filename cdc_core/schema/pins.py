"""The column types that the settings pin: dotted path to type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cdc_core import errors
from cdc_core.schema.column_types import DECIMAL, ColumnType, Decimal, Scalar

_MAP = re.compile(r"map(?:\s*<\s*(?:string\s*,)?\s*(.+?)\s*>)?", re.IGNORECASE)
_PINS: Mapping[str, Scalar] = {
    "int": Scalar.INT,
    "bigint": Scalar.BIGINT,
    "double": Scalar.DOUBLE,
    "string": Scalar.TEXT,
    "boolean": Scalar.BOOLEAN,
    "timestamp": Scalar.TIMESTAMP,
    "binary": Scalar.BINARY,
}


@dataclass(frozen=True)
class Pin:
    """The setting of one path: a type, or a map whose values have this type (None: the type that is seen)."""

    type: Scalar | Decimal | None
    is_map: bool = False


Pins = Mapping[tuple[str, ...], Pin]


def parse_pins(pins: Mapping[str, str], *, where: str = "schema") -> Pins:
    """The pins in a collection's settings (dotted path -> type). Raises `SettingsError` with all mistakes.

    Types: `int`, `bigint`, `double`, `string` (any value; values other than text as JSON), `boolean`, `timestamp`,
    `binary`, `decimal(p,s)`, `map`, `map<type>`. Paths go through arrays: `items.price` is the price of each item.
    """
    pins_by_path: dict[tuple[str, ...], Pin] = {}
    problems = []
    for path, text in pins.items():
        try:
            pins_by_path[tuple(path.split("."))] = _pin(str(text).strip())
        except ValueError as error:
            is_cut = text.count("(") > text.count(")")
            hint = "put the type in quotes: between braces a comma ends the value" if is_cut else ""
            problems.append(errors.Problem(f"{where}.{path}", str(error), hint))
    if problems:
        raise errors.SettingsError(problems)
    return pins_by_path


def without_effect(pins: Pins) -> Iterator[tuple[str, str]]:
    """The paths that another pin leaves without effect, each with the path of the other one, which is above it.

    A type has no fields. In a map only the values can be pinned, at `*`, and only once: `map<int>` pins them too.
    """
    for path in pins:
        for length in range(1, len(path)):
            pin = pins.get(path[:length])
            if pin is not None and not (pin.is_map and pin.type is None and path[length] == "*"):
                yield ".".join(path), ".".join(path[:length])
                break


def _pin(text: str) -> Pin:
    if match_ := _MAP.fullmatch(text):
        value = _pin(match_[1]) if match_[1] else Pin(None)
        if value.is_map:
            raise ValueError(f"a map of maps is pinned as map at its own path and with a type at path.*, not as {text!r}")
        return replace(value, is_map=True)
    if match_ := DECIMAL.fullmatch(text):
        precision, scale = int(match_[1]), int(match_[2])
        if not 1 <= precision <= 38 or scale > precision:
            raise ValueError(f"{text} is no decimal: 1 to 38 digits are expected, the scale among them")
        return Pin(Decimal(precision, scale))
    if text.lower() not in _PINS:
        raise ValueError(f"one of {', '.join(_PINS)}, decimal(p,s), map, map<type> is expected, not {text!r}")
    return Pin(_PINS[text.lower()])


def widens(type_: ColumnType, pin: Scalar | Decimal) -> bool:
    """Whether Delta can widen the type in place to the pinned one."""
    match (type_, pin):
        case (Scalar.INT, Scalar.BIGINT | Scalar.DOUBLE):
            return True
        case (Scalar.INT, Decimal(precision, scale)):
            # An INT has up to 10 integer digits, and Delta requires room for all of them.
            return precision - scale >= 10
        case (Scalar.BIGINT, Decimal(precision, scale)):
            # Delta requires 20 integer digits for a BIGINT, one more than its largest value has.
            return precision - scale >= 20
        # Both are STRING in Spark, so nothing is rewritten.
        case (Scalar.STRING, Scalar.TEXT):
            return True
        case (Decimal(precision, scale), Decimal(wider_precision, wider_scale)):
            holds = wider_scale >= scale and wider_precision - wider_scale >= precision - scale
            return holds and (wider_precision, wider_scale) != (precision, scale)
        case _:
            return False
