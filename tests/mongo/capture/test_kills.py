"""A capture that is killed at any statement goes on where it was: each event is in bronze once, and each document of the snapshot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS

from cdc_core.extended_json import keys
from tests.harness import captures, oracle, processes, recorder, workload


def test_killed_at_any_statement_it_goes_on(tmp_path: Path, mongodb_uri: str, database: Any) -> None:
    """Compares bronze with an independent recording of the stream, and the last row of each key with the collections."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name)
    command = ["-m", "tests.harness.killed_captures", mongodb_uri, "--database", database.name, "--root", tmp_path / "lake"]
    with pipeline.recorder() as recording:
        recording.start()
        processes.until(lambda: "ready" in recording.said, seconds=60, what="the recorder", alive=[recording])
        said = subprocess.run([sys.executable, *command], cwd=processes.PROJECT, capture_output=True, text=True, timeout=300)
        recording.terminate()
        assert recording.wait(60) == 0, recording.said
    assert said.returncode == 0, said.stderr[-3000:]
    table = Path(captures.table(captures.pipeline(mongodb_uri, tmp_path / "lake", database.name)).path or "")
    first = oracle.first_token(table)
    assert oracle.bronze_tokens(table) == [token for token in recorder.tokens(pipeline.recording) if token > first]
    rows = [row for row in oracle.read(table).to_pylist() if row["kind"] in ("change", "snapshot")]
    last = {(row["collection"], row["key"]): row["op"] for row in sorted(rows, key=lambda row: str(row["sequence"]))}
    for name in workload.COLLECTIONS:
        documents = database.get_collection(name, codec_options=DEFAULT_RAW_BSON_OPTIONS).find()
        expected = {keys.canonical_raw(bytes(document.raw)) for document in documents}
        assert {key for (collection, key), op in last.items() if collection == name and op != "d"} == expected
