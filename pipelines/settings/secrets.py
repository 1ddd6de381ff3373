"""Resolves references to secrets, at the last moment. The only module that does.

`${env:NAME}` is an environment variable; `${secret:scope/key}` is a Databricks secret. Results go to the database driver or to
Spark, and must never be printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from cdc_core import errors
from cdc_core.properties import types as values


def resolve(reference: values.Reference | str) -> str:
    """The text with every reference replaced by its value.

    The value of a user or password in a connection string, or of both as `user:password`, is percent-encoded if it contains characters
    that are not allowed there (`p@ss`), and so is that of an option that is a secret; a value that is already encoded stays. Raises
    `SettingsError` with all variables that are not set and secrets that this machine cannot read, and `AccessRefused` for a secret that
    Databricks refuses.
    """
    template = reference if isinstance(reference, values.Reference) else values.Reference(reference)
    credentials = _credentials(template.parts())
    pieces: list[str] = []
    problems: list[errors.Problem] = []
    for index, (kind, text) in enumerate(template.parts()):
        try:
            value = _part(kind, text)
            if index in credentials:
                value = _percent_encoded(value, credentials[index])
            elif pieces and _SECRET_OPTION.search(pieces[-1]) and _UNENCODED.match(value):
                value = quote(value, safe="")
            pieces.append(value)
        except errors.SettingsError as error:
            problems.extend(error.problems)
    if problems:
        raise errors.SettingsError(problems)
    return "".join(pieces)


def _part(kind: str, text: str) -> str:
    match kind:
        case "":
            return text
        case "env":
            return _variable(text)
        case _:
            scope, _, key = text.partition("/")
            return _databricks(scope, key)


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value.strip():
        state = "empty" if name in os.environ else "not set"
        hint = f"export {name}=…"
        raise errors.SettingsError(errors.Problem(f"${{env:{name}}}", f"the variable {name} is {state}", hint))
    return value.strip()


def _databricks(scope: str, key: str) -> str:
    """The secret from Databricks' `dbutils`."""
    try:
        from databricks.sdk.runtime import dbutils
    except Exception as error:  # outside Databricks this import fails in many ways
        raise _no_secrets(scope, key) from error
    try:
        return str(dbutils.secrets.get(scope=scope, key=key))
    except Exception as error:  # errors of py4j and of the SDK have no common class
        message = f"${{secret:{scope}/{key}}}: the job cannot read this Databricks secret"
        raise errors.AccessRefused(
            f"{message}: the scope or the key does not exist, or READ on the scope is missing"
        ) from error


def _no_secrets(scope: str, key: str) -> errors.SettingsError:
    message = "secret scopes only exist on Databricks"
    hint = "use ${env:NAME} on this machine"
    return errors.SettingsError(errors.Problem(f"${{secret:{scope}/{key}}}", message, hint))


def _credentials(parts: Sequence[tuple[str, str]]) -> Mapping[int, int]:
    """The parts of a connection string that are references for user or password: those before the `@`.

    Each index has the number of colons that separate fields in its value: 1 if one reference is for both, as `user:password`.
    """
    if not parts or not parts[0][1].startswith(("mongodb://", "mongodb+srv://")):
        return {}
    end = max((index for index, (kind, text) in enumerate(parts) if not kind and "@" in text.partition("?")[0]), default=0)
    is_both = end == 2 and parts[0][1].endswith("//") and parts[2][1].startswith("@")
    return {index: int(is_both) for index in range(end) if parts[index][0]}


def _percent_encoded(text: str, colons: int) -> str:
    return ":".join(quote(field, safe="") if _UNFIT.search(field) else field for field in text.split(":", colons))


_UNFIT = re.compile(r"[^A-Za-z0-9._~!$&'()*+,;=%-]|%(?![0-9A-Fa-f]{2})")

_SECRET_OPTION = re.compile(rf"(?:[?&;](?:{'|'.join(values.SECRET_OPTIONS)})=|AWS_SESSION_TOKEN(?::|%3A))$", re.IGNORECASE)
"""What stands before the value of an option that is a secret."""

_UNENCODED = re.compile(r"(?!.*%[0-9A-Fa-f]{2}).*[^A-Za-z0-9._~-]", re.DOTALL)
"""A text with special characters, none of which is encoded, such as a token of AWS, which ends with `=`."""
