"""Signs that a terminal would obey: names of collections, fields and keys may hold any."""


def escaped(text: str) -> str:
    """A text in which what a terminal would obey, or show as nothing, stands escaped; a line break, too."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
