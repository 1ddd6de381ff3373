"""One entry of an include or exclude list: what it matches here, and its form for the server's filter.

Debezium's rules: an entry is a regular expression that matches the whole name, upper and lower case alike; in
literal mode it is the name. Three dialects meet: Java's, in which lists are written, Python's, which decides
here, and PCRE, in which the server filters. ``\\Q…\\E`` and ``\\uXXXX`` of Java are translated; what else
Python cannot read is refused when settings are. What Python and PCRE might read differently is never sent to
the server, which then lets everything pass, and the predicate here decides alone.

Case is folded for all letters in entries that are names, for ASCII letters in the other ones; ``\\w``,
``\\d``, ``\\s`` and ``\\b`` mean ASCII, as in Java and PCRE.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cdc_core.properties import types as values


@dataclass(frozen=True)
class Pattern:
    """One entry; `text` is a regular expression in Python's dialect."""

    text: str

    def matches(self, name: str) -> bool:
        """Whether the whole name is meant."""
        return self._regex.fullmatch(name.translate(_ALONE) if self._is_name else name) is not None

    @functools.cached_property
    def literal(self) -> str | None:
        """The one name that is meant, in whatever case; None for a real regular expression."""
        return _ESCAPED.sub(r"\1", self.text) if _PLAIN.fullmatch(self.text) else None

    @property
    def server_text(self) -> str | None:
        """The same in PCRE, with the option ``i``, neither anchored nor grouped; None where that is not
        certain.
        """
        # Too many events from the server are dropped here; one too few would be lost without a trace.
        return self.text if self._is_name or _PORTABLE.fullmatch(self.text) else None

    def by_database(self) -> tuple[tuple[str, Pattern], ...] | None:
        """An entry over ``database.collection`` as databases, each with the collections in it.

        None where an entry leaves the database open, as ``shop.*`` does: it matches ``shopping.orders``.
        """
        # What the two dialects may read differently is not cut apart either: its parts would go to the server.
        if self.server_text is None:
            return None
        pairs = [_pinned(alternative) for alternative in values.split_top_level(self.text, "|")]
        known = tuple(pair for pair in pairs if pair is not None)
        return known if len(known) == len(pairs) else None

    @functools.cached_property
    def _is_name(self) -> bool:
        """Whether it is a name in which a dot may stand for any sign."""
        return _NAME.fullmatch(self.text) is not None

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        # In a real expression `\w` and its like mean ASCII, as in Java; a name has none of them, and all of its letters
        # are folded.
        if self._is_name:
            return re.compile(self.text.translate(_ALONE), re.IGNORECASE)
        return re.compile(self.text, re.IGNORECASE | re.ASCII)


def regex(entry: str) -> Pattern:
    """An entry of Debezium's lists in regex mode; raises `values.InvalidValue` where Python cannot read it."""
    pattern = Pattern(_JAVA.sub(_translated, entry))
    with warnings.catch_warnings():
        # Python only warns of what a later version will read differently: here that is a list which may one day match
        # other collections.
        warnings.simplefilter("error")
        try:
            pattern._regex  # noqa: B018 - compiled once, here, so that a mistake shows when settings are read
        except (re.error, OverflowError, RecursionError, FutureWarning, DeprecationWarning) as error:
            raise values.InvalidValue("a regular expression", str(error)) from None
    return pattern


def literal(entry: str) -> Pattern:
    """The entry of a list in literal mode."""
    return Pattern(_escaped(entry))


def any_of(entries: Sequence[Pattern]) -> Callable[[str], bool]:
    """Whether a name is meant by one of the entries; those that are names are looked for at once, for they may be thousands."""
    texts = [each.text for each in entries if each._is_name]
    others = [each for each in entries if not each._is_name]
    names = re.compile("|".join(texts).translate(_ALONE), re.IGNORECASE) if texts else None

    def is_meant(name: str) -> bool:
        is_named = names is not None and names.fullmatch(name.translate(_ALONE)) is not None
        return is_named or any(each.matches(name) for each in others)

    return is_meant


def folded(name: str) -> str:
    """The name in lower case, letter by letter: what is one name to the server is one text.

    `str.lower` makes two signs of one letter (İ), which the server would look for, and `casefold` one name of two (straße, strasse).
    """
    return "".join(sign.lower() if len(sign.lower()) == 1 else sign for sign in name)


def as_sent(text: str) -> str:
    """A server's text as it is sent: each letter beyond ASCII as a class of those that are one with it here.

    Servers know other versions of Unicode: to MongoDB 6.0 the capitals of Georgian and Cherokee are letters of their own. An
    apostrophe or a control character, which it cannot take into its own search of the oplog (error 9), is a code.
    """
    return text if text.isascii() and text.isprintable() and "'" not in text else _SIGN.sub(_sent, text)


def _sent(sign: re.Match[str]) -> str:
    return rf"\x{ord(sign[1]):02x}" if sign[1] == "'" or sign[1] < " " else _classes().get(sign[1], sign[0])


@functools.cache
def _classes() -> dict[str, str]:
    alike: dict[str, str] = {}
    for sign in (chr(code) for code in range(0x80, 0x1F000) if code not in _ALONE):
        capital = sign.upper() if len(sign.upper()) == 1 else sign
        alike[folded(capital)] = alike.get(folded(capital), "") + sign
    return {sign: f"[{signs}]" for signs in alike.values() if len(signs) > 1 for sign in signs}


def _escaped(name: str) -> str:
    return "".join(f"\\{sign}" if sign in _META else sign for sign in name)


def _translated(match: re.Match[str]) -> str:
    quoted, code, most, other = match.groups()
    if quoted is not None:
        return _escaped(quoted)
    if code is not None:
        return _escaped(chr(int(code, 16)))
    return f"{{0,{most}}}" if most is not None else other


def _pinned(alternative: str) -> tuple[str, Pattern] | None:
    match = _DATABASE.fullmatch(alternative)
    if not match:
        return None
    db, dot, rest = match.groups()
    # A bare dot stands for any sign: `shop.orders` is a database and a collection only where the rest is plain.
    if dot == "." and not _PLAIN_WITHOUT_DOTS.fullmatch(rest):
        return None
    return _ESCAPED.sub(r"\1", db), Pattern(rest)


_ALONE = str.maketrans("İı", "\ue000\ue001")
"""Letters that Python takes for i, and no server does, as signs without case."""
_META = frozenset("\\^$.|?*+()[]{}")
_JAVA = re.compile(r"\\Q(.*?)(?:\\E|\Z)|\\u([0-9a-fA-F]{4})|\{,([0-9]+)\}|(\\.|.)", re.DOTALL)
_SIGN = re.compile(r"\\?(.)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_PLAIN_SIGN = r"[^\\^$.|?*+()\[\]{}]"
_PLAIN = re.compile(rf"(?:{_PLAIN_SIGN}|\\[^0-9A-Za-z])*")
_NAME = re.compile(rf"(?:{_PLAIN_SIGN}|\\[^0-9A-Za-z]|\.)*")
_PLAIN_WITHOUT_DOTS = re.compile(rf"(?:{_PLAIN_SIGN}|\\[^0-9A-Za-z.])+")
_DATABASE = re.compile(rf"\^?((?:{_PLAIN_SIGN}|\\[^0-9A-Za-z.])+)(\\\.|\[\.\]|\.)((?![?*+{{]).+?)(?:(?<!\\)\$)?", re.DOTALL)
_PORTABLE = re.compile(
    r"""(?: [^\\\[\](){}?*+\x00-\x1f\x7f-\U0010ffff]        # a sign that is no operator, or one of . ^ $ |
          | \\[dDwWsSbB] | \\[^0-9A-Za-z]                   # a class, or an escaped sign
          | \[\^?(?:[^\[\]\\^&~|\x00-\x1f\x7f-\U0010ffff] | \\[dDwWsS] | \\[^0-9A-Za-z])+\]
          | \((?!\?) | \(\?: | \(\?<?[=!] | \)
          | (?:[*+?] | \{[0-9]+(?:,[0-9]*)?\}) \?? (?![*+?{])
        )*""",
    re.VERBOSE,
)
