"""Rows that were added in vain are removed."""

from __future__ import annotations

from cdc_core.bronze import columns, event_rows


def test_rows_and_actions_added_in_vain_are_removed() -> None:
    """Removes rows and actions for their commit; earlier rows stay, and so does their token."""
    rows = event_rows.EventRows("shop")
    done: list[str] = []
    rows.mark(event_rows.OtherRow("8201", columns.RowKind.HEARTBEAT, {"n": 1}))
    rows.then.append(lambda: done.append("first"))
    held = rows.length
    rows.mark(event_rows.OtherRow("8202", columns.RowKind.SIGNAL, {"id": "1"}, "shop", "signals"))
    rows.then.append(lambda: done.append("second"))
    rows.cut(held)
    assert (len(rows), rows.token, rows.length) == (1, "8201", held)
    for act in rows.then:
        act()
    table = rows.table(batch=1, first_offset=0, ts_ms=0)
    assert done == ["first"] and table["payload"].to_pylist() == ['{"n":1}']
