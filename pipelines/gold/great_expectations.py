"""Great Expectations over Spark: the one module that imports it.

It gives results alone: no project folder, no telemetry, no progress bars, and no more of the rows than a few examples
come to this process. One suite is judged at a time, because the library keeps its project in a global.
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
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from cdc_core import errors
from cdc_core.expectations import suite as suites
from cdc_core.properties import types as values
from cdc_core.sql.names import identifier
from pipelines.gold import queries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EXAMPLES = 10
_READ = frozenset(".`*")
"""What of a column's name Spark reads as its own where it is not quoted."""
_CLASS = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception))(?=:|$)", re.MULTILINE)
_CONDITION = re.compile(r"(?:Error|Exception): \[([A-Z_]+(?:\.[A-Z_]+)*)\]")
_OF_SPARK = re.compile(
    r"\b(?:Py4JJavaError|Py4JNetworkError|SparkConnectGrpcException|connect\.\w*(?:Spark|Unknown)Exception)\b"
)
_SQL_STATE = re.compile(r"SQLSTATE: (\w\w)")

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class ExpectationResult:
    """How one expectation fared: of `rows` looked at, `unexpected` did not meet it; `examples` are keys of some of them.

    `observed` is what was found of a whole table, `failure` the class of what was raised instead of a result, `result`
    what the library says, as JSON. `passes`: what was raised lies in the machine, and the same rows may be judged the next time.
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
    """Whether each row meets the expectation, or fails it, by itself."""
    with _library():
        from great_expectations.expectations import expectation as kinds
        from great_expectations.expectations.registry import get_expectation_impl

        kind = get_expectation_impl(expectation.type)
    maps = (kinds.ColumnMapExpectation, kinds.ColumnPairMapExpectation, kinds.MulticolumnMapExpectation)
    is_map = issubclass(kind, maps) and expectation.type not in suites.ABOUT_THE_TABLE
    return is_map and not expectation.is_part_about


def mistakes(suite: suites.Suite) -> Iterator[errors.Problem]:
    """What the library does not know, or does not take, in a suite."""
    with _library():
        import great_expectations.exceptions as raised
        from great_expectations.expectations.registry import list_registered_expectation_implementations

        for each in suite.expectations:
            try:
                _configured(each)
            except raised.ExpectationNotFoundError:
                hint = values.did_you_mean(each.type, list_registered_expectation_implementations())
                yield errors.Problem(each.where, f"there is no expectation {each.type}", hint)
            except Exception as error:  # of the validation library that it is built with
                details = getattr(error, "errors", None)
                for found in details() if callable(details) else [{"loc": (), "msg": type(error).__name__}]:
                    name = ".".join(str(part) for part in found["loc"] if part != "__root__")
                    yield errors.Problem(f"{each.where}.kwargs{'.' + name if name else ''}", f"{each.type}: {found['msg']}")


def judged(df: DataFrame, expectations: Sequence[suites.Expectation], *, keys: Sequence[str]) -> list[ExpectationResult]:
    """The result of each expectation over the rows of `df`, in their order. Aggregates of all are computed in one pass, but for those of
    columns whose name Spark would read as more than one, as the library gives it: a field of a struct, or all columns. They are judged by
    copies."""
    copies = {name: f"__copy_{number}" for number, name in enumerate(df.columns) if not _READ.isdisjoint(name)}
    is_copied = [not copies.keys().isdisjoint(each.columns) for each in expectations]
    copied = df.withColumns({copy: F.col(identifier(name)) for name, copy in copies.items()}) if any(is_copied) else df
    of_copies = iter(_judged(copied, [each.over(copies) for each, chosen in zip(expectations, is_copied) if chosen], keys))
    of_others = iter(_judged(df, [each for each, chosen in zip(expectations, is_copied) if not chosen], keys))
    found = [next(of_copies if chosen else of_others) for chosen in is_copied]
    for reply, each in zip(found, expectations):
        reply["expectation_config"]["kwargs"] |= each.kwargs
    return [_result(reply, keys) for reply in found]


def _judged(df: DataFrame, expectations: Sequence[suites.Expectation], keys: Sequence[str]) -> list[dict[str, Any]]:
    """What the library says of each expectation."""
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
        wanted = {"result_format": "SUMMARY", "partial_unexpected_count": EXAMPLES}
        if keys:
            # Examples are named by their keys, and never by their values: a message must hold nothing of a document.
            wanted["unexpected_index_column_names"] = list(keys)
        found = batch.validate(
            gx.ExpectationSuite(
                name="candidate", expectations=[_configured(each, n) for n, each in enumerate(expectations)]
            ),
            result_format=wanted,
        )
        configs = ((each.expectation_config, each) for each in found.results)
        by_place = {config.meta["place"]: each.to_json_dict() for config, each in configs if config is not None}
        return [by_place[place] for place in range(len(expectations))]


def unjudged(expectation: suites.Expectation, why: str) -> ExpectationResult:
    """The result of an expectation that there is nothing to judge by: it is not met."""
    reply = {"success": False, "expectation_config": {"type": expectation.type, "kwargs": dict(expectation.kwargs)}}
    return ExpectationResult(False, None, None, (), None, why, json.dumps({**reply, "exception_info": why}, default=str))


def _configured(each: suites.Expectation, place: int = 0) -> Any:
    """The library's expectation; `place` finds its result again, which come in another order."""
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
    from great_expectations.expectations.metadata_types import FailureSeverity

    configured = ExpectationConfiguration(
        type=each.type,
        kwargs=dict(each.kwargs),
        severity=FailureSeverity(each.severity.value),
        meta={"place": place},
    )
    return configured.to_domain_obj()


def _result(reply: dict[str, Any], keys: Sequence[str]) -> ExpectationResult:
    found = reply.get("result") or {}
    examples = tuple(
        ", ".join(str(example.get(name)) for name in keys) for example in found.get("partial_unexpected_index_list") or ()
    )
    observed = found.get("observed_value")
    raised = reply.get("exception_info") or {}
    exception = _exception(raised)
    return ExpectationResult(
        is_met=bool(reply["success"]) and exception is None,
        rows=found.get("element_count"),
        unexpected=found.get("unexpected_count"),
        examples=examples,
        observed=None if observed is None else json.dumps(observed, default=str),
        failure=exception,
        result=json.dumps({**reply, "exception_info": exception}, default=str),
        passes=all(map(_passes, _tracebacks(raised))) and exception is not None,
    )


def _tracebacks(info: dict[str, Any]) -> list[str]:
    """Of what was raised instead of a result."""
    each = info.values() if "raised_exception" not in info else [info]
    raised = [one for one in each if isinstance(one, dict) and one.get("raised_exception")]
    return [str(one.get("exception_traceback") or "") for one in raised]


def _passes(traceback: str) -> bool:
    """Whether Spark failed, and over no rows: an executor was lost, a disk full. The library raises none of it itself."""
    return _OF_SPARK.search(traceback) is not None and queries.OF_ROWS.isdisjoint(_SQL_STATE.findall(traceback))


def _exception(info: dict[str, Any]) -> str | None:
    """What was raised instead of a result, without its text: that may hold values."""
    tracebacks = _tracebacks(info)
    if not tracebacks:
        return None
    traceback = tracebacks[0]
    # The last one is what ended it. Spark's conditions say more than its classes, and like these hold no values.
    return " ".join([*_CLASS.findall(traceback)[-1:], *_CONDITION.findall(traceback)[-1:]]) or "Exception"


@contextmanager
def _without_connect() -> Iterator[None]:
    """Hides `pyspark.sql.connect` from the import where gRPC is missing.

    PySpark takes a main module without a file (that of a worker process) for its own doctests, and ends the process
    there where the library only asks whether Connect's frames are to be had.
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
    """The library, with its warnings about itself silenced; a `SettingsError` where it is not installed."""
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
