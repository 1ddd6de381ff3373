"""The gate: checks the expectations of a gold table's new version before readers can see it.

    judged      expectations about rows on the changed rows, those about the table on the table as it would be
    noted       one row per expectation and run in `ops/expectations`, with the library's own result
    refused     if a critical one fails: nothing is published, and the last good version stays

Readers cannot see a candidate: its rows become visible by the one commit that follows, so that a run that is killed in between publishes
nothing. It is enough to check changed rows because the other rows met the same expectation when they came: the commit names the suite, and
what was not met. For another suite, and for expectations that were not met, the whole table is checked.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.expectations import suite as suites
from cdc_core.expectations.suite import Expectation, Suite
from cdc_core.properties import types as values
from cdc_core.settings.parse import Settings
from pipelines import clock
from pipelines.delta import ops_tables, query_execution
from pipelines.delta import tables as delta
from pipelines.gold import great_expectations as library
from pipelines.gold.candidate import Audit, Candidate
from pipelines.settings import file as settings_file

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("at_ms", pa.int64()),
        ("table", pa.string()),
        ("expectation", pa.string()),
        ("columns", pa.list_(pa.string())),
        ("severity", pa.string()),
        ("is_met", pa.bool_()),
        ("is_published", pa.bool_()),
        ("judged", pa.string()),
        ("rows", pa.int64()),
        ("unexpected", pa.int64()),
        ("examples", pa.list_(pa.string())),
        ("observed", pa.string()),
        ("failure", pa.string()),
        ("suite", pa.string()),
        ("result", pa.string()),
        ("name", pa.string()),
    ]
)
"""`judged` is `changed` or `whole`, `examples` are keys of rows that do not meet it, `result` is Great Expectations' JSON.
`name` is the pipeline's, as several may share a lakehouse; null in rows of earlier versions."""

ENDINGS = (".json", ".yml", ".yaml")


def read(settings: Settings) -> tuple[suites.Suite, ...]:
    """The suites in the folder of the settings; none without such a setting.

    Raises `SettingsError` with the mistakes of all files, also types and arguments that the library does not know.
    """
    if settings.gold.expectations is None:
        return ()
    folder = Path(settings.gold.expectations)
    if not os.path.isdir(folder):
        hint = "it must contain one YAML or JSON file per table"
        raise errors.SettingsError(
            errors.Problem("gold.expectations", f"there is no folder {folder}, or it cannot be looked into", hint)
        )
    problems: list[errors.Problem] = []
    by_table: dict[str, suites.Suite] = {}
    for path in settings_file.below(folder, *ENDINGS):
        try:
            suite = suites.parse(settings_file.document(path), name=path.stem, where=str(path))
        except errors.SettingsError as error:
            problems += error.problems
            continue
        if suite.table in by_table:
            problems.append(errors.Problem(suite.where, f"{by_table[suite.table].where} is already about {suite.table}"))
        by_table.setdefault(suite.table, suite)
        problems += library.mistakes(suite)
    if problems:
        raise errors.SettingsError(problems)
    return tuple(by_table.values())


def check_tables(
    table_suites: Sequence[suites.Suite],
    *,
    known: Sequence[str],
    is_captured: Callable[[str], bool],
    histories: Collection[str],
) -> None:
    """Raise `SettingsError` for suites of tables that cannot exist, and of histories, which are not checked."""
    problems = [
        errors.Problem(suite.where, f"{suite.table} is a history, which expectations do not check", "use a model over it")
        for suite in table_suites
        if suite.table in histories
    ]
    problems += [
        errors.Problem(
            suite.where,
            f"{suite.table} is neither a collection nor a model",
            values.did_you_mean(suite.table, known) or f"known are {', '.join(known[:10])}",
        )
        for suite in table_suites
        if suite.table not in (*known, *histories) and not is_captured(suite.table)
    ]
    if problems:
        raise errors.SettingsError(problems)


def check_views(table_suites: Sequence[suites.Suite], *, views: Collection[str]) -> None:
    """Raise `SettingsError` for critical expectations of views in a catalog: readers see their rows before any check."""
    problems = [
        errors.Problem(
            expectation.where,
            f"{suite.table} is a view: its readers see new rows at once, so it cannot be held back",
            "use materialized='table', or severity: warning or info",
        )
        for suite in table_suites
        if suite.table in views
        for expectation in suite.expectations
        if expectation.severity is suites.Severity.CRITICAL
    ]
    if problems:
        raise errors.SettingsError(problems)


@dataclass
class Gate(Audit):
    """The audit by expectations: it checks each candidate by the suite of its table."""

    settings: Settings
    suites: Mapping[str, Suite]
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @staticmethod
    def of(settings: Settings) -> Gate:
        """The gate with the suites of the settings' folder."""
        return Gate(settings, {each.table: each for each in read(settings)})

    def judges(self, name: str) -> bool:
        """Whether there is a suite for the table of this name."""
        return name in self.suites

    def __call__(self, spark: SparkSession, candidate: Candidate) -> Mapping[str, object]:
        """Check a candidate, note the results, and return metadata for its commit.

        Raises `GateFailed` if a critical expectation is not met, `Unjudged` if critical ones could not be checked this time and no other
        failed, and `SettingsError` if one is about a column that the table lacks; a warning about such a column is not met.
        """
        suite = self.suites.get(candidate.name)
        if suite is None:
            return {}
        changed = None if candidate.changed is None else _with_rescued(suite, candidate.changed)
        # Planning the whole table takes a second, and most suites are about rows.
        columns = (_with_rescued(suite, candidate.whole(None)) if changed is None else changed).columns
        missing_columns = list(suites.missing_columns(suite, columns, table=candidate.name))
        problems = [problem for each, problem in missing_columns if each.severity is suites.Severity.CRITICAL]
        if problems:
            raise errors.SettingsError(problems)
        outcomes = {
            id(each): (library.unjudged(each, f"no column {', '.join(each.columns)}"), "whole")
            for each, _ in missing_columns
        }
        checkable = [each for each in suite.expectations if id(each) not in outcomes]
        about_rows = [each for each in checkable if changed is not None and self._was_met(suite, each, candidate.live)]
        # Expectations about the whole table (a count, a unique column) depend on all rows, also on removed ones.
        about_table = [each for each in checkable if each not in about_rows]
        if changed is not None and about_rows:
            by_rows = library.judged(changed, about_rows, keys=candidate.keys)
            outcomes |= {id(each): (result, "changed") for each, result in zip(about_rows, by_rows)}
        if about_table:
            with _whole(candidate, suite, about_table, columns) as rows:
                by_table = library.judged(rows, about_table, keys=candidate.keys)
            outcomes |= {id(each): (result, "whole") for each, result in zip(about_table, by_table)}
        results = [_Outcome(each, *outcomes[id(each)]) for each in suite.expectations]
        failed = [each for each in results if each.is_critical_failure]
        # Noted before a refusal is raised: its message refers to these rows.
        self._note(spark, candidate.name, suite, results, is_published=not failed)
        if failed:
            raise _refusal(candidate.name, failed)
        return {
            "suite": suite.digest,
            "expectations": {
                "run": self.run,
                "unmet": sum(not each.judged.is_met for each in results),
                "not_met": [place for place, each in enumerate(results) if not each.judged.is_met],
            },
        }

    @staticmethod
    def _was_met(suite: Suite, expectation: Expectation, live: Mapping[str, object]) -> bool:
        """Whether each row of the last good version has met an expectation, so that only changed rows need a check.

        False after any change of the suite, and for a warning that was not met: the rows that did not meet it may still exist.
        """
        live_results = live.get("expectations")
        not_met = live_results.get("not_met") if isinstance(live_results, Mapping) else None
        if live.get("suite") != suite.digest or not isinstance(not_met, list):
            return False
        return suite.expectations.index(expectation) not in not_met and library.is_about_rows(expectation)

    def _note(
        self, spark: SparkSession, table: str, suite: Suite, results: Sequence[_Outcome], *, is_published: bool
    ) -> None:
        at_ms = clock.now_ms()
        rows = [
            {
                "run": self.run,
                "at_ms": at_ms,
                "table": table,
                "expectation": outcome.expectation.type,
                "columns": list(outcome.expectation.columns),
                "severity": outcome.expectation.severity.value,
                "is_met": outcome.judged.is_met,
                "is_published": is_published,
                "judged": outcome.kind,
                "rows": outcome.judged.rows,
                "unexpected": outcome.judged.unexpected,
                "examples": list(outcome.judged.examples),
                "observed": outcome.judged.observed,
                "failure": outcome.judged.failure,
                "suite": suite.digest,
                "result": outcome.judged.result,
                "name": self.settings.name,
            }
            for outcome in results
        ]
        ops_tables.note(spark, delta.layout(self.settings.lakehouse).ops("expectations"), rows, SCHEMA)


@contextmanager
def _whole(
    candidate: Candidate, suite: Suite, expectations: Sequence[Expectation], columns: Sequence[str]
) -> Iterator[DataFrame]:
    """All rows with the columns that the expectations read, computed once: the library reads them once per figure.

    As they are without keys. Such rows are computed already, or are a view, for which a failing query is a result of the check.
    """
    names = suites.columns_read(expectations, columns)
    if not names or not candidate.keys:
        yield _with_rescued(suite, candidate.whole(None))
        return
    with query_execution.held(_with_rescued(suite, candidate.whole({*names, *candidate.keys}))) as narrow:
        yield narrow


def _with_rescued(suite: Suite, rows: DataFrame) -> DataFrame:
    """The rows with `__rescued` if an expectation names it: a table gets the column with its first rescued value; before, it is null."""
    if "__rescued" in rows.columns or not any("__rescued" in each.columns for each in suite.expectations):
        return rows
    return rows.withColumn("__rescued", F.lit(None).cast("string"))


@dataclass(frozen=True)
class _Outcome:
    """One expectation with its result, and whether the `changed` rows or the `whole` table were checked."""

    expectation: suites.Expectation
    judged: library.ExpectationResult
    kind: str

    @property
    def is_critical_failure(self) -> bool:
        return not self.judged.is_met and self.expectation.severity is suites.Severity.CRITICAL


def _refusal(table: str, failed: Sequence[_Outcome]) -> errors.MedallionError:
    """The error for expectations that were not met, with counts and keys but no values; `Unjudged` if only Spark failed."""
    kind = errors.Unjudged if all(outcome.judged.passes for outcome in failed) else errors.GateFailed
    lines = [
        f"{table}: the new version is not published, the last good one (if any) stays; ops/expectations has the results"
    ]
    for outcome in failed:
        result = outcome.judged
        if result.failure is not None:
            reason = f"could not be checked ({result.failure})"
        elif result.unexpected is not None:
            among = "changed rows" if outcome.kind == "changed" else "rows"
            keys = f", for example with the keys {'; '.join(result.examples[:5])}" if result.examples else ""
            reason = f"{result.unexpected} of {result.rows} {among} do not meet it{keys}"
        else:
            reason = "the table does not meet it" + (f", found {result.observed}" if _is_number(result.observed) else "")
        lines.append(f"  {outcome.expectation.label}: {reason}")
    return kind("\n".join(lines))


def _is_number(text: str | None) -> bool:
    """Whether an observed value is a number, and so not text of a document."""
    try:
        float(text or "")
    except ValueError:
        return False
    return True
