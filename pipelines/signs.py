"""Escapes control characters, which names of collections, fields and keys may contain."""


def escaped(text: str) -> str:
    """The text with all characters escaped that are not printable, line breaks included."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
