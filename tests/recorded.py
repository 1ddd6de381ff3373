"""What was recorded of the real connector and the real SMT, as the cases keep it: compressed lines of JSON."""

from __future__ import annotations

import collections
import json
import lzma
from pathlib import Path
from typing import Any


def by(field: str, path: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of a file by what their `field` says, each in the file's order."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            found[record[field]].append(record)
    return found
