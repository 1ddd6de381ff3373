"""What a user gives the server to evaluate, as Extended JSON: a find filter, the stages of an aggregation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bson import json_util


def loads(text: str) -> Any:
    """A filter or stages from their JSON; raises what `json_util.loads` raises for a text that is none."""
    return json.loads(text, object_hook=_value)


def _value(fields: Mapping[str, Any]) -> Any:
    # Of a `$regex` the driver makes the value that it is alone; the operators beside it would be gone.
    is_one_of_several = "$regex" in fields and not fields.keys() <= {"$regex", "$options"}
    return fields if is_one_of_several else json_util.object_hook(fields)
