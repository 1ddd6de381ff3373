"""Identifiers and literals of Spark SQL: the only place in the project that quotes them."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\'$\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HALF = re.compile("[\ud800-\udfff]")


def identifier(*parts: str) -> str:
    """The parts as one SQL identifier, each of them quoted."""
    return ".".join(f"`{part.replace('`', '``')}`" for part in parts)


def literal(text: str) -> str:
    """The text as a safe Spark SQL string literal.

    Characters that Spark may interpret are written by their number: quotes, backslashes, control characters, and `$`,
    because Spark substitutes variables such as ``${…}`` in a statement before it parses it. A lone surrogate, which
    UTF-8 cannot hold, becomes U+FFFD, as everywhere.
    """
    return "'" + _SPECIAL.sub(_numbered, _HALF.sub("\ufffd", text)) + "'"


def _numbered(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
