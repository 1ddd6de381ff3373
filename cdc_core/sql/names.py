"""Names and texts as Spark SQL writes them: every identifier and every literal of this project comes from here."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\'$\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HALF = re.compile("[\ud800-\udfff]")


def identifier(*parts: str) -> str:
    """The parts as one SQL identifier, each of them quoted."""
    return ".".join(f"`{part.replace('`', '``')}`" for part in parts)


def literal(text: str) -> str:
    r"""The text as a Spark SQL string literal that no document, key or name can leave.

    All that Spark might read as its own is written by its number: quotes, backslashes, control characters, and `$`, because
    Spark puts the value of a variable for ``${…}`` into a statement before it parses it. Half a surrogate pair, which no
    UTF-8 text holds, becomes U+FFFD, as wherever documents are read.
    """
    return "'" + _SPECIAL.sub(_numbered, _HALF.sub("\ufffd", text)) + "'"


def _numbered(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
