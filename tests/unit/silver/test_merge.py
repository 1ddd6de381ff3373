"""The clauses of silver's MERGE."""

from __future__ import annotations

from cdc_core.silver import merge


def statement(**named: object) -> str:
    made = merge.SilverMerge(["_id", "__incomplete", "__known", "__sequence", "__batch"], **named)  # type: ignore[arg-type]
    return made.merge().render("t", "s")


def test_only_documents() -> None:
    """A range of whole documents needs two clauses, and the bounds of its keys."""
    lines = statement(keys=[("1", "it's")]).splitlines()
    assert lines[0].endswith(r"t.`__key` = s.`__key` AND (t.`__key` BETWEEN '1' AND 'it\u0027s')")
    assert [line.split(" THEN ")[0] for line in lines[1:]] == [
        "WHEN MATCHED AND s.`__guard` >= coalesce(t.`__known`, t.`__sequence`)",
        "WHEN NOT MATCHED",
    ]


def test_every_clause_is_guarded() -> None:
    """In every combination a newer row is kept, and a removed row is not inserted."""
    text = statement(removes=True, marks_deleted=True, has_incomplete=True, is_late=True)
    matched = [line for line in text.splitlines() if line.startswith("WHEN MATCHED")]
    assert len(matched) == 4
    assert all("> t.`__sequence`" in line or "> coalesce(t.`__known`" in line for line in matched)
    assert "WHEN NOT MATCHED AND s.`__action` <> 'remove' THEN INSERT" in text


def test_an_update_after_a_delete_that_left_its_row() -> None:
    """The row becomes that of another document of this key, of which nothing is known."""
    made = merge.SilverMerge(["_id", "__deleted", "__incomplete", "__known", "__sequence", "__batch"], has_incomplete=True)
    line = next(line for line in made.merge().render("t", "s").splitlines() if "AND s.`__incomplete` AND" in f"AND {line}")
    assert "`__deleted` = false" in line
    assert "`__known` = CASE WHEN coalesce(t.`__deleted`, false) THEN '' ELSE" in line
