"""The exact path."""

from __future__ import annotations

import pyarrow as pa

from cdc_core.schema import cast, document_schema, evolution
from cdc_core.schema.shape import observe
from cdc_core.typed import exact


def test_rows_of_few_fields_cost_nothing_for_the_other_columns() -> None:
    """Of ten thousand columns a document mostly has few: making a value for each took most of the time."""
    schema, _ = evolution.join(
        document_schema.EMPTY, observe({"_id": 1, "in": {"a": 1}, **dict.fromkeys(map(str, range(500)), 1)})
    )
    assert cast.present({"_id": 2, "in": {"a": 5}, "new": 1}, schema) == ({"_id": 2, "in": {"a": 5}}, {"new": "1"})
    rows = exact.rows(pa.array(['{"_id":2,"7":"x"}', None, "{", "{}", '{"_id":3,"9":9}']), schema)
    assert rows.type == exact.result_type(schema)
    rows.validate(full=True)
    found = rows.to_pylist()
    assert [row and row["unreadable"] for row in found] == [False, None, True, False, False]
    blank = dict.fromkeys((name for name, _ in schema.table()))
    documents = [row and row["document"] for row in found]
    assert documents == [blank | {"_id": 2}, None, None, blank, blank | {"_id": 3, "9": 9}]
    assert [row and row["rescued"] for row in found] == [[("7", '"x"')], None, None, None, None]
