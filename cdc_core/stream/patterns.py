"""One entry of an include or exclude list: what it matches here, and its form for the server's filter.

Debezium's rules: an entry is a regular expression that matches the whole name and ignores case; in literal mode it is
the name. Three dialects are involved: lists are written in Java's, this module matches with Python's, and the server
filters with PCRE. ``\\Q…\\E`` and ``\\uXXXX`` of Java are translated; anything else that Python cannot parse is refused
when settings are read. An entry that Python and PCRE might interpret differently is never sent to the server. The
server then lets everything pass, and only the predicate here filters.

In entries that are names the case of all letters is ignored, in other entries that of ASCII letters. ``\\w``, ``\\d``,
``\\s`` and ``\\b`` mean ASCII, as in Java and PCRE.

Entries that are no names are matched by the package `regex`, because a match by `re` has no time limit and stops all
threads of the process: `(a+)+` needs years for some names.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import regex as regexes

from cdc_core import errors
from cdc_core.properties import types as values

MATCH_SECONDS = 1.0
"""The most processor time for one name; a match usually takes some microseconds."""


@dataclass(frozen=True)
class Pattern:
    """One entry; `text` is a regular expression in Python's dialect."""

    text: str

    def matches(self, name: str) -> bool:
        """Whether the entry matches the whole name; raises `SettingsError` if that takes more than `MATCH_SECONDS`."""
        if self._is_name:
            return self._regex.fullmatch(name.translate(_ALONE)) is not None
        try:
            return self._limited.fullmatch(name, timeout=MATCH_SECONDS, concurrent=True) is not None
        except TimeoutError:
            message = f"the regular expression {self.text} takes too long to compare with {name}"
            hint = "it repeats something that is itself repeated, as (a+)+ does: write it without that"
            raise errors.SettingsError(errors.Problem("", message, hint)) from None

    @functools.cached_property
    def literal(self) -> str | None:
        """The single name that the entry matches, in any case; None for a real regular expression."""
        return _ESCAPED.sub(r"\1", self.text) if _PLAIN.fullmatch(self.text) else None

    @property
    def server_text(self) -> str | None:
        """The same in PCRE, for the option ``i``, without anchors and groups; None if that is not certain."""
        # An event too many from the server is dropped here; one that it does not send is lost.
        return self.text if self._is_name or _PORTABLE.fullmatch(self.text) else None

    def by_database(self) -> tuple[tuple[str, Pattern], ...] | None:
        """An entry over ``database.collection`` as pairs of a database and a pattern of its collections.

        None if an entry does not determine the database, as ``shop.*``, which matches ``shopping.orders``.
        """
        # The parts go to the server, so they must be portable too.
        if self.server_text is None:
            return None
        pairs = [_pinned(alternative) for alternative in values.split_top_level(self.text, "|")]
        pinned = tuple(pair for pair in pairs if pair is not None)
        return pinned if len(pinned) == len(pairs) else None

    @functools.cached_property
    def _is_name(self) -> bool:
        """Whether it is a name, in which a dot may stand for any character."""
        return _NAME.fullmatch(self.text) is not None

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        # In a real expression `\w` etc. mean ASCII, as in Java. A name has none of them, and ignores the case of all letters.
        if self._is_name:
            return re.compile(self.text.translate(_ALONE), re.IGNORECASE)
        return re.compile(self.text, re.IGNORECASE | re.ASCII)

    @functools.cached_property
    def _limited(self) -> regexes.Pattern[str]:
        """The same, with a time limit."""
        # A brace that repeats nothing is itself; `regex` would read an approximate match.
        text = _BRACE.sub(lambda match: match[1] or r"\{", self.text)
        return regexes.compile(text, regexes.IGNORECASE | regexes.ASCII)


@functools.lru_cache(maxsize=100_000)
def regex(entry: str) -> Pattern:
    """An entry of a list in regex mode; raises `values.InvalidValue` if Python cannot parse it."""
    pattern = Pattern(_JAVA.sub(_translated, entry))
    with warnings.catch_warnings():
        # Python warns about syntax that a later version reads differently: the list could then match other collections.
        warnings.simplefilter("error")
        try:
            pattern._regex  # noqa: B018 - compiled once, here, so that a mistake shows when settings are read
            pattern._is_name or pattern._limited  # noqa: B018
        except (
            re.error,
            regexes.error,
            ValueError,
            OverflowError,
            RecursionError,
            FutureWarning,
            DeprecationWarning,
        ) as error:
            wildcard = "; .* stands for any characters" if "nothing to repeat" in str(error) else ""
            # Java's flag u, which Python refuses beside its flag for ASCII, and not with `re.error`.
            unicode = "; leave out the flag u" if isinstance(error, ValueError) else ""
            raise values.InvalidValue("a regular expression", f"{error}{wildcard}{unicode}") from None
    return pattern


def literal(entry: str) -> Pattern:
    """An entry of a list in literal mode."""
    return Pattern(_escaped(entry))


def any_of(entries: Sequence[Pattern]) -> Callable[[str], bool]:
    """A predicate: whether one of the entries matches a name.

    There may be thousands of entries: names are one expression, and portable entries another, which is a hundred times faster.
    """
    texts = [entry.text for entry in entries if entry._is_name]
    names = re.compile("|".join(texts).translate(_ALONE), re.IGNORECASE) if texts else None
    other_entries = [entry for entry in entries if not entry._is_name]
    # Others may refer to their groups by number, or begin with flags.
    portable_texts = [entry.text for entry in other_entries if entry.server_text is not None]
    joined = [Pattern("|".join(f"(?:{text})" for text in portable_texts))] if portable_texts else []
    joined += [entry for entry in other_entries if entry.server_text is None]

    def is_meant(name: str) -> bool:
        if names is not None and names.fullmatch(name.translate(_ALONE)) is not None:
            return True
        try:
            return any(entry.matches(name) for entry in joined)
        except errors.SettingsError:  # Together they take too long: the error is to name the one that does.
            return any(entry.matches(name) for entry in other_entries)

    return is_meant


def matched(entries: Sequence[Pattern], names: Iterable[str]) -> Iterator[tuple[Pattern, list[str]]]:
    """The entries that match one of the names, in order, each with those that it matches."""
    # By parts, each over the names that the whole matches: there may be thousands of both, of which most do not meet.
    matched_names = [*filter(any_of(entries), names)]
    if matched_names and len(entries) == 1:
        yield entries[0], matched_names
    elif matched_names:
        size = -(-len(entries) // 16)
        for start in range(0, len(entries), size):
            yield from matched(entries[start : start + size], matched_names)


def without_match(entries: Iterable[Pattern], names: Sequence[str]) -> tuple[Pattern, ...]:
    """The entries that match none of the names."""
    # An entry that is one of the names needs no search: usually most of thousands are.
    known = frozenset(map(folded, names))
    others = [entry for entry in entries if not (entry._is_name and folded(_ESCAPED.sub(r"\1", entry.text)) in known)]
    found = {entry for entry, _names in matched(others, names)}
    return tuple(entry for entry in others if entry not in found)


def folded(name: str) -> str:
    """The name in lower case, character by character; two names that the server treats as one give the same text.

    `str.lower` turns one letter into two characters (İ), and `casefold` makes two names equal (straße, strasse).
    """
    return "".join(sign.lower() if len(sign.lower()) == 1 else sign for sign in name)


def as_sent(text: str) -> str:
    """A server's text as it is sent: each letter beyond ASCII as a class of the letters that are equal to it here.

    Servers have other versions of Unicode: MongoDB 6.0 does not know the capitals of Georgian and Cherokee. An
    apostrophe or a control character is written as a code, because the server cannot use it in its own search of the
    oplog (error 9).
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
    db, dot, collection = match.groups()
    # A bare dot matches any character: `shop.orders` is a database and a collection only if the rest is plain.
    if dot == "." and not _PLAIN_WITHOUT_DOTS.fullmatch(collection):
        return None
    # These see the name of the database, which the rest does not have when it is matched by itself.
    if _LOOKS_BACK.match(collection):
        return None
    return _ESCAPED.sub(r"\1", db), Pattern(collection)


_ALONE = str.maketrans("İı", "\ue000\ue001")
"""Letters that only Python treats as i are mapped to characters without case."""
_META = frozenset("\\^$.|?*+()[]{}")
_JAVA = re.compile(r"\\Q(.*?)(?:\\E|\Z)|\\u([0-9a-fA-F]{4})|\{,([0-9]+)\}|(\\.|.)", re.DOTALL)
_BRACE = re.compile(r"(\\.)|\{(?!(?:[0-9]+(?:,[0-9]*)?|,[0-9]*)\})", re.DOTALL)
_SIGN = re.compile(r"\\?(.)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_PLAIN_SIGN = r"[^\\^$.|?*+()\[\]{}]"
_PLAIN = re.compile(rf"(?:{_PLAIN_SIGN}|\\[^0-9A-Za-z])*")
_NAME = re.compile(rf"(?:{_PLAIN_SIGN}|\\[^0-9A-Za-z]|\.)*")
_PLAIN_WITHOUT_DOTS = re.compile(rf"(?:{_PLAIN_SIGN}|\\[^0-9A-Za-z.])+")
_DATABASE = re.compile(rf"\^?((?:{_PLAIN_SIGN}|\\[^0-9A-Za-z.])+)(\\\.|\[\.\]|\.)((?![?*+{{]).+?)(?:(?<!\\)\$)?", re.DOTALL)
_LOOKS_BACK = re.compile(r"(?:\\.|\[\^?(?:\\.|[^\]\\])+\]|[^\\\[])*?(?:\^|\(\?<)", re.DOTALL)
_PORTABLE = re.compile(
    r"""(?: [^\\\[\](){}?*+\x00-\x1f\x7f-\U0010ffff]        # a sign that is no operator, or one of . ^ $ |
          | \\[dDwWsSbB] | \\[^0-9A-Za-z]                   # a class, or an escaped sign
          | \[\^?(?:[^\[\]\\^&~|\x00-\x1f\x7f-\U0010ffff] | \\[dDwWsS] | \\[^0-9A-Za-z])+\]
          | \((?!\?) | \(\?: | \(\?<?[=!] | \)
          | (?:[*+?] | \{[0-9]+(?:,[0-9]*)?\}) \?? (?![*+?{])
        )*""",
    re.VERBOSE,
)
