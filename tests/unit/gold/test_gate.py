"""What the gate does with expectations that could not be evaluated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdc_core import errors
from cdc_core.expectations import suite as suites
from pipelines.gold import expectations
from pipelines.gold.candidate import Candidate

ANY = cast("Any", None)
LOST = "py4j.protocol.Py4JJavaError: An error occurred while calling o7.collect.\n: org.apache.spark.SparkException: Job aborted: a task was lost\n"
CAST = f"{LOST}Caused by: SparkNumberFormatException: [CAST_INVALID_INPUT] … SQLSTATE: 22018\n"
RAISED = "\nThe above exception was the direct cause of the following exception:\n\ngreat_expectations.exceptions.MetricResolutionError: …"


@pytest.mark.parametrize(
    ("replies", "raised"),
    [
        ([LOST], errors.Unjudged),
        (["py4j.protocol.Py4JNetworkError: Answer from Java side is empty"], errors.Unjudged),
        ([CAST], errors.GateFailed),
        (["pyspark.errors.exceptions.captured.AnalysisException: [UNRESOLVED_COLUMN] …"], errors.GateFailed),
        (["TypeError: …"], errors.GateFailed),
        ([LOST, None], errors.GateFailed),
    ],
    ids=["task", "jvm", "rows", "column", "arguments", "beside one that is not met"],
)
def test_what_could_not_be_judged_for_now_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, replies: list[str | None], raised: type[Exception]
) -> None:
    """As a verdict it would keep the table behind until its next change, and a scheduler would not retry. Nothing is published in either
    case."""

    def judged(*_: Any, **__: Any) -> list[expectations.library.ExpectationResult]:
        infos = [
            {} if text is None else {"m": {"raised_exception": True, "exception_traceback": text + RAISED}}
            for text in replies
        ]
        return [expectations.library._result({"success": False, "exception_info": info}, ()) for info in infos]

    monkeypatch.setattr(expectations.library, "judged", lambda frame, some, keys: judged() if some else [])
    monkeypatch.setattr(expectations.Gate, "_note", lambda *_, **__: None)
    found = [
        {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n", "notes": n}} for n in range(len(replies))
    ]
    suite = suites.parse({"expectations": found}, name="totals", where="totals.yml")
    candidate = Candidate("totals", ANY, cast("Any", lambda names: SimpleNamespace(columns=["n"])))
    with pytest.raises(errors.MedallionError) as refused:
        expectations.Gate(ANY, {"totals": suite})(ANY, candidate)
    assert type(refused.value) is raised
    assert str(refused.value).startswith("totals: the new version is not published, the last good one (if any) stays")
