from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cdc_core import errors
from tests.harness import oracle, processes


def writers(pipeline: processes.Pipeline) -> list[int]:
    """The PID of the process that made each commit of the bronze table, in order."""
    found = []
    for file in sorted((pipeline.bronze / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in file.read_text().rstrip("\n").split("\n")]
        info = next(action["commitInfo"] for action in actions if "commitInfo" in action)
        found.append(json.loads(info.get("userMetadata") or "{}").get("process", 0))
    return found


def stray_files(pipeline: processes.Pipeline) -> set[str]:
    """Data files of the bronze table that no commit names."""
    log = "".join(file.read_text() for file in (pipeline.bronze / "_delta_log").glob("*.json"))
    return {file.name for file in pipeline.bronze.glob("*.parquet") if file.name not in log}


def inserted(database: Any, pipeline: processes.Pipeline, capture: processes.Command, count: int) -> None:
    """Insert documents and wait until bronze has them."""
    before = len(oracle.bronze_tokens(pipeline.bronze))
    database.orders.insert_many([{} for _ in range(count)])
    processes.until(
        lambda: len(oracle.bronze_tokens(pipeline.bronze)) >= before + count,
        seconds=120,
        what="the events in bronze",
        alive=[capture],
    )


@pytest.mark.journey
@pytest.mark.timeout(600)
def test_of_two_captures_one_writes(tmp_path: Path, mongodb_uri: str, database: Any) -> None:
    """A second capture is refused, and a paused one that was taken over stops; neither changes anything."""
    database.orders.insert_many([{} for _ in range(10)])
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()
    first = pipeline.command("capture", log="first")
    second = pipeline.command("capture", log="second")
    third = pipeline.command("capture", "--take-over", log="third")
    with processes.all_killed(first, second, third):
        first.start()
        processes.until(lambda: processes.version(pipeline.bronze) >= 2, seconds=120, what="bronze", alive=[first])
        inserted(database, pipeline, first, 5)
        time.sleep(1)

        before = len(writers(pipeline))
        assert second.run() == errors.TableOwned.exit_code
        assert f"process {first.pid}" in second.said and "Traceback" not in second.said.partition("medallion: ")[0]
        assert set(writers(pipeline)[before:]) <= {first.pid}

        first.signal_group(signal.SIGSTOP)
        paused_at = processes.version(pipeline.bronze)
        third.start()
        processes.until(
            lambda: processes.version(pipeline.bronze) > paused_at,
            seconds=120,
            what="the claim",
            alive=[third],
        )
        inserted(database, pipeline, third, 5)
        first.signal_group(signal.SIGCONT)
        inserted(database, pipeline, third, 5)
        assert first.wait(90) == errors.OwnershipLost.exit_code
        inserted(database, pipeline, third, 5)
        assert set(writers(pipeline)[paused_at + 1 :]) == {third.pid}

        begun = time.monotonic()
        third.terminate()
        assert third.wait(60) == 0
        assert time.monotonic() - begun < 20
    # Checked when no capture runs: a data file exists a moment before the commit that names it.
    assert stray_files(pipeline) == set()
    tokens = oracle.bronze_tokens(pipeline.bronze)
    assert len(tokens) == len(set(tokens)) == 20
    assert tokens == sorted(tokens)
