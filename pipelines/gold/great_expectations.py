"""Great Expectations over Spark: the only module that imports it.

Without a project folder, telemetry or progress bars; of the rows only a few examples come to this process. One suite is checked at a time,
because the library keeps its context in a global.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.expectations import suite as suites
from cdc_core.properties import types as values
from cdc_core.sql.names import identifier
from pipelines.gold import queries

EXAMPLES = 10
_READ = frozenset(".`*")
"""Characters of column names that Spark interprets in unquoted names."""
_CLASS = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception))(?=:|$)", re.MULTILINE)
_CONDITION = re.compile(r"(?:Error|Exception): \[([A-Z_]+(?:\.[A-Z_]+)*)\]")
_OF_SPARK = re.compile(
    r"\b(?:Py4JJavaError|Py4JNetworkError|SparkConnectGrpcException|connect\.\w*(?:Spark|Unknown)Exception)\b"
)
_SQL_STATE = re.compile(r"SQLSTATE: (\w\w)")

_one_at_a_time = threading.Lock()
"""Warnings, like the state of the library, belong to the process."""


@dataclass(frozen=True)
class ExpectationResult:
    """The result of one expectation: of `rows` rows, `unexpected` did not meet it; `examples` are keys of some of these.

    `observed` is the observed value of a whole table, as JSON; `failure` the class of an exception raised instead of a result; `result` the
    library's result, as JSON. `passes`: the exception is Spark's and not due to the rows, so that a check may succeed the next time.
    """

    is_met: bool
    rows: int | None
    unexpected: int | None
    examples: tuple[str, ...]
    observed: str | None
    failure: str | None
    result: str
    passes: bool = False


def is_about_rows(expectation: suites.Expectation) -> bool:
    """Whether each row meets or fails the expectation independently of other rows."""
    with _library():
        from great_expectations.expectations import expectation as kinds
        from great_expectations.expectations.registry import get_expectation_impl

        kind = get_expectation_impl(expectation.type)
    maps = (kinds.ColumnMapExpectation, kinds.ColumnPairMapExpectation, kinds.MulticolumnMapExpectation)
    is_map = issubclass(kind, maps) and expectation.type not in suites.TABLE_EXPECTATIONS
    return is_map and not expectation.is_partial


def mistakes(suite: suites.Suite) -> Iterator[errors.Problem]:
    """The types and arguments in a suite that the library does not know or accept."""
    with _library():
        import great_expectations.exceptions as raised
        from great_expectations.expectations.registry import list_registered_expectation_implementations

        for expectation in suite.expectations:
            try:
                _configured(expectation)
            except raised.ExpectationNotFoundError:
                hint = values.did_you_mean(expectation.type, list_registered_expectation_implementations())
                yield errors.Problem(expectation.where, f"there is no expectation {expectation.type}", hint)
            except Exception as error:  # pydantic's, of either major version
                details = getattr(error, "errors", None)
                for detail in details() if callable(details) else [{"loc": (), "msg": type(error).__name__}]:
                    name = ".".join(str(part) for part in detail["loc"] if part != "__root__")
                    yield errors.Problem(
                        f"{expectation.where}.kwargs{'.' + name if name else ''}", f"{expectation.type}: {detail['msg']}"
                    )


def judged(df: DataFrame, expectations: Sequence[suites.Expectation], *, keys: Sequence[str]) -> list[ExpectationResult]:
    """The results of the expectations over the rows of `df`, in order, with all aggregates computed in one pass.

    The library does not quote names, so that Spark would take `a.b` for a field and `*` for all columns: such columns are checked as copies
    with plain names, in a pass of their own.
    """
    copies = {name: f"__copy_{number}" for number, name in enumerate(df.columns) if not _READ.isdisjoint(name)}
    are_copies = [not copies.keys().isdisjoint(each.columns) for each in expectations]
    with_copies = df.withColumns({copy: F.col(identifier(name)) for name, copy in copies.items()}) if any(are_copies) else df
    of_copies = iter(
        _judged(with_copies, [each.with_columns(copies) for each, is_copy in zip(expectations, are_copies) if is_copy], keys)
    )
    of_others = iter(_judged(df, [each for each, is_copy in zip(expectations, are_copies) if not is_copy], keys))
    replies = [next(of_copies if is_copy else of_others) for is_copy in are_copies]
    for reply, each in zip(replies, expectations):
        reply["expectation_config"]["kwargs"] |= each.kwargs
    return [_result(reply, keys) for reply in replies]


def _judged(df: DataFrame, expectations: Sequence[suites.Expectation], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The library's result of each expectation, as a dict."""
    if not expectations:
        return []
    with _library():
        import great_expectations as gx
        from great_expectations.data_context.types.base import ProgressBarsConfig

        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        context.enable_analytics(enable=False)
        source = context.data_sources.add_spark("gold", persist=False)
        asset = source.add_dataframe_asset("candidate")
        batch = asset.add_batch_definition_whole_dataframe("candidate").get_batch(batch_parameters={"dataframe": df})
        result_format = {"result_format": "SUMMARY", "partial_unexpected_count": EXAMPLES}
        if keys:
            # Examples are identified by keys and never by values: messages must not contain document data.
            result_format["unexpected_index_column_names"] = list(keys)
        validation = batch.validate(
            gx.ExpectationSuite(
                name="candidate", expectations=[_configured(each, place) for place, each in enumerate(expectations)]
            ),
            result_format=result_format,
        )
        configs = ((result.expectation_config, result) for result in validation.results)
        by_place = {config.meta["place"]: result.to_json_dict() for config, result in configs if config is not None}
        return [by_place[place] for place in range(len(expectations))]


def unjudged(expectation: suites.Expectation, why: str) -> ExpectationResult:
    """The result of an expectation that cannot be checked at all: not met."""
    reply = {"success": False, "expectation_config": {"type": expectation.type, "kwargs": dict(expectation.kwargs)}}
    return ExpectationResult(False, None, None, (), None, why, json.dumps({**reply, "exception_info": why}, default=str))


def _configured(each: suites.Expectation, place: int = 0) -> Any:
    """The library's object for an expectation; `place` identifies its result, as results come in another order."""
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
    from great_expectations.expectations.metadata_types import FailureSeverity

    configuration = ExpectationConfiguration(
        type=each.type,
        kwargs=dict(each.kwargs),
        severity=FailureSeverity(each.severity.value),
        meta={"place": place},
    )
    return configuration.to_domain_obj()


def _result(reply: dict[str, Any], keys: Sequence[str]) -> ExpectationResult:
    result = reply.get("result") or {}
    examples = tuple(
        ", ".join(str(example.get(name)) for name in keys) for example in result.get("partial_unexpected_index_list") or ()
    )
    observed = result.get("observed_value")
    exception_info = reply.get("exception_info") or {}
    exception = _exception(exception_info)
    return ExpectationResult(
        is_met=bool(reply["success"]) and exception is None,
        rows=result.get("element_count"),
        unexpected=result.get("unexpected_count"),
        examples=examples,
        observed=None if observed is None else json.dumps(observed, default=str),
        failure=exception,
        result=json.dumps({**reply, "exception_info": exception}, default=str),
        passes=all(map(_passes, _tracebacks(exception_info))) and exception is not None,
    )


def _tracebacks(info: dict[str, Any]) -> list[str]:
    """The tracebacks of exceptions raised instead of a result."""
    entries = info.values() if "raised_exception" not in info else [info]
    exceptions = [entry for entry in entries if isinstance(entry, dict) and entry.get("raised_exception")]
    return [str(entry.get("exception_traceback") or "") for entry in exceptions]


def _passes(traceback: str) -> bool:
    """Whether Spark failed for a reason other than the rows, such as a lost executor or a full disk."""
    return _OF_SPARK.search(traceback) is not None and queries.OF_ROWS.isdisjoint(_SQL_STATE.findall(traceback))


def _exception(info: dict[str, Any]) -> str | None:
    """The class of the exception raised instead of a result, with Spark's condition, and without its text, which may contain values."""
    tracebacks = _tracebacks(info)
    if not tracebacks:
        return None
    traceback = tracebacks[0]
    # The last exception of the traceback. Spark's conditions say more than its classes, and contain no values either.
    return " ".join([*_CLASS.findall(traceback)[-1:], *_CONDITION.findall(traceback)[-1:]]) or "Exception"


@contextmanager
def _without_connect() -> Iterator[None]:
    """Hides `pyspark.sql.connect` from the library's import if gRPC is missing.

    In a main module without a file (that of a worker process), PySpark takes the import for its own doctests and exits.
    """
    connect = "pyspark.sql.connect"
    if connect in sys.modules or importlib.util.find_spec("grpc") is not None:
        yield
        return
    sys.modules[connect] = None  # type: ignore[assignment]  # typeshed knows modules only; None bars an import
    try:
        yield
    finally:
        del sys.modules[connect]


@contextmanager
def _library() -> Iterator[None]:
    """A block that may import the library, one thread at a time and without its warnings; `SettingsError` if it is not installed."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _without_connect():
                import great_expectations  # noqa: F401
        except ImportError:
            message = "great-expectations is not installed"
            hint = "pip install 'mongo-medallion[quality]'"
            raise errors.SettingsError(errors.Problem("gold.expectations", message, hint)) from None
        yield
