"""The MERGE that brings reduced, typed rows into a collection's table.

A source row has the table's columns, `__guard` and `__action` (`cdc_core.silver.reduce`). A clause only applies if the
source row's event is newer than what the table's row contains or knows of. So a late delete removes no newer row, a
statement can be repeated, and ranges can be applied in any order. Only late batches need that
(`pipelines.silver.ranges._is_late`); newer ones replace rows without a MERGE where possible. In these a source row with
the table's sequence is of a later event, and replaces or removes the row, as it would without a MERGE.
`pipelines.silver.deletes` keeps late events from restoring deleted documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cdc_core.silver import reduce
from cdc_core.sql import merge as sql_merge
from cdc_core.sql.names import identifier, literal


@dataclass(frozen=True)
class SilverMerge:
    """One MERGE of reduced rows.

    `columns` are the table's, in the source too; `added` those of them that come from `add.fields`. `removes`,
    `marks_deleted` and `has_incomplete` say which rows besides documents may occur; `keys` are ranges that cover all
    keys.
    """

    columns: Sequence[str]
    added: Sequence[str] = ()
    removes: bool = False
    marks_deleted: bool = False
    has_incomplete: bool = False
    is_late: bool = False
    keys: Sequence[tuple[str, str]] = ()

    def merge(self) -> sql_merge.Merge:
        """The statement as data."""
        spans = (f"t.`__key` BETWEEN {literal(low)} AND {literal(high)}" for low, high in self.keys)
        return sql_merge.Merge("t.`__key` = s.`__key`", tuple(self._clauses()), pruning=" OR ".join(spans))

    def _clauses(self) -> Iterator[sql_merge.Clause]:
        is_newer = "s.`__sequence` > t.`__sequence`"
        is_document = f"s.`__action` = {literal(reduce.Action.DOCUMENT.value)} AND "
        only_documents = not (self.removes or self.has_incomplete)
        after = ">" if self.is_late else ">="
        if self.removes:
            is_removed = f"s.`__action` = {literal(reduce.Action.REMOVE.value)}"
            yield sql_merge.Clause(None, f"{is_removed} AND s.`__sequence` {after} t.`__sequence`")
        # `__known` is the sequence of the row's document, if `__sequence` is that of a later event.
        holds_older = f"s.`__guard` {after} coalesce(t.`__known`, t.`__sequence`)"
        if self.marks_deleted and not self.is_late:
            holds_older += " AND s.`__guard` <> ''"  # it is empty for a delete that brings no document
        yield sql_merge.Clause(self._document(), f"{'' if only_documents else is_document}{holds_older}")
        # The first matching clause applies. The next ones are for rows whose document is newer than the source's, while
        # the source knows of a later event: only the marks change.
        known = {"__known": "coalesce(t.`__known`, t.`__sequence`)"}
        if self.marks_deleted:
            deleted_columns = {"__deleted": "true", "__incomplete": "false", **known}
            yield sql_merge.Clause(
                deleted_columns | sql_merge.from_source((*self.added, "__sequence", "__batch")),
                f"s.`__deleted` AND {is_newer}",
            )
        if self.has_incomplete:
            incomplete_columns = {"__incomplete": "true", **known}
            if "__deleted" in self.columns:  # an update after a delete belongs to another document of this key
                incomplete_columns["__known"] = (
                    f"CASE WHEN coalesce(t.`__deleted`, false) THEN '' ELSE {known['__known']} END"
                )
                incomplete_columns["__deleted"] = "false"
            yield sql_merge.Clause(
                incomplete_columns | sql_merge.from_source(("__sequence", "__batch")), f"s.`__incomplete` AND {is_newer}"
            )
        is_kept = f"s.`__action` <> {literal(reduce.Action.REMOVE.value)}" if self.removes else ""
        yield sql_merge.Clause(sql_merge.from_source(self.columns), is_kept, is_matched=False)

    def _document(self) -> dict[str, str]:
        """The values for a newer document; a row that knows of a later event stays incomplete or deleted, with that
        event's sequence.
        """
        if not self.is_late:
            return sql_merge.from_source(self.columns)
        is_older = "s.`__sequence` < t.`__sequence`"
        values = {
            "__sequence": "greatest(s.`__sequence`, t.`__sequence`)",
            "__incomplete": f"(s.`__incomplete` OR {is_older})",
            "__known": f"coalesce(s.`__known`, CASE WHEN {is_older} THEN s.`__guard` END)",
        }
        if "__deleted" in self.columns:
            stays = f"({is_older} AND coalesce(t.`__deleted`, false))"
            values |= {
                name: f"CASE WHEN {stays} THEN t.{identifier(name)} ELSE s.{identifier(name)} END" for name in self.added
            }
            values["__deleted"] = f"(s.`__deleted` OR {stays})"
            values["__incomplete"] = f"(s.`__incomplete` OR {is_older}) AND NOT {stays}"
        return sql_merge.from_source(self.columns) | {name: value for name, value in values.items() if name in self.columns}


HAS_NO_BASE = "(coalesce(`__incomplete`, false) AND coalesce(`__known`, '') = '')"
"""SQL on a silver table: no document of the row was ever known."""
