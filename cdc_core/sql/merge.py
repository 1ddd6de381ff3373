"""A MERGE as data: the statement itself, and the rows that it would leave, for writers that replace files instead.

Its conditions and values are SQL over `t`, the table, and `s`, the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_core.sql.names import identifier

_CHOICE, _HELD, _GIVEN = "__choice", "__held", "__given"
_STAYS, _NOTHING = -1, -2


@dataclass(frozen=True)
class Clause:
    """What happens to a matched row, or to an unmatched source row: its columns get `values`, or it is deleted (None)."""

    values: Mapping[str, str] | None
    when: str = ""
    is_matched: bool = True

    def render(self) -> str:
        """`WHEN …`, as in the statement."""
        condition = f"WHEN {'' if self.is_matched else 'NOT '}MATCHED{f' AND {self.when}' if self.when else ''}"
        if self.values is None:
            return f"{condition} THEN DELETE"
        if self.is_matched:
            assigned = ", ".join(f"t.{identifier(name)} = {value}" for name, value in self.values.items())
            return f"{condition} THEN UPDATE SET {assigned}"
        return (
            f"{condition} THEN INSERT ({', '.join(map(identifier, self.values))}) VALUES ({', '.join(self.values.values())})"
        )


def from_source(names: Iterable[str]) -> dict[str, str]:
    """These columns with the source's values."""
    return {name: f"s.{identifier(name)}" for name in names}


def replacing(columns: Sequence[str]) -> tuple[Clause, ...]:
    """Clauses that replace the table's row with the source's, or delete it if `__gone` is true."""
    return (
        Clause(None, "s.`__gone`"),
        Clause(from_source(columns)),
        Clause(from_source(columns), "NOT s.`__gone`", is_matched=False),
    )


@dataclass(frozen=True)
class Merge:
    """Rows match `on` a condition; the first applicable clause decides what happens to them.

    `pruning` is SQL over `t` that is true for all matching rows; it allows skipping files.
    """

    on: str
    clauses: Sequence[Clause]
    pruning: str = ""

    def render(self, target: str, source: str) -> str:
        """The statement for a table and a source, given by their names in SQL."""
        condition = f"{self.on} AND ({self.pruning})" if self.pruning else self.on
        clauses = "\n".join(clause.render() for clause in self.clauses)
        return f"MERGE INTO {target} AS t USING {source} AS s ON {condition}\n{clauses}"

    def outcome(self, table_rows: DataFrame, source: DataFrame) -> DataFrame:
        """The rows that the statement would leave of `table_rows`, a part of a table with all rows that match the source.

        Fields of structs are matched by name, as in the statement.
        """
        source_rows = table_rows.limit(0).unionByName(source, allowMissingColumns=True)
        joined = (
            table_rows.withColumn(_HELD, F.lit(True))
            .alias("t")
            .join(source_rows.withColumn(_GIVEN, F.lit(True)).alias("s"), F.expr(self.on), "full")
        )
        with_choice = joined.withColumn(_CHOICE, self._choice())
        delete_clauses = [number for number, clause in enumerate(self.clauses) if clause.values is None]
        remaining = with_choice.where(~F.col(_CHOICE).isin([_NOTHING, *delete_clauses]))
        return remaining.select(*(self._value(name).alias(name) for name in table_rows.columns))

    def _choice(self) -> Column:
        """The number of the clause that applies."""
        is_held, is_given = f"coalesce(t.{_HELD}, false)", f"coalesce(s.{_GIVEN}, false)"
        cases = [
            f"WHEN {is_given} AND {'' if clause.is_matched else 'NOT '}{is_held}"
            f"{f' AND ({clause.when})' if clause.when else ''} THEN {number}"
            for number, clause in enumerate(self.clauses)
        ]
        return F.expr(f"CASE {' '.join(cases)} WHEN {is_held} THEN {_STAYS} ELSE {_NOTHING} END")

    def _value(self, name: str) -> Column:
        current_value = f"t.{identifier(name)}"
        cases = [
            f"WHEN {number} THEN {clause.values.get(name, current_value)}"
            for number, clause in enumerate(self.clauses)
            if clause.values is not None
        ]
        return F.expr(f"CASE {_CHOICE} {' '.join(cases)} ELSE {current_value} END")
