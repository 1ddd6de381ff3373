"""Shows names of collections, fields and keys: escapes the control characters that they may contain, and cuts long lists of them."""

from collections.abc import Sequence


def escaped(text: str) -> str:
    """The text with all characters escaped that are not printable, line breaks included."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def some(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many there are more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
