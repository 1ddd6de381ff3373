"""What the start of a capture reads from bronze, without a query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cdc_core import errors
from cdc_core.snapshot.state import CollectionState, SnapshotState
from pipelines.bronze import log as bronze_log
from pipelines.capture.stream_opener import ExistingBronze
from pipelines.delta import local_log
from tests.harness import bronze_rows, damaged_files, without_spark
from tests.harness.without_spark import SPARK, Hop, NeedsSpark


def test_the_collections_of_few_rows_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with other settings needs them. A drop alone, or a heartbeat, gives no document."""
    with without_spark.running():
        hop = Hop(tmp_path)
        bronze = without_spark.Log(hop)
        assert bronze_log.captured_collections(SPARK, hop.bronze) == []
        row = {"op": "c", "key": 1, "at": 10, "after": {"_id": 1}}
        bronze.append({"t": [row], "b": [row | {"op": "r"}], "gone": [{"drop": 11}]})
        bronze.append({"t": [row | {"at": 12}], "read": [{"sweep": 13}]})
        assert bronze_log.captured_collections(SPARK, hop.bronze) == [(bronze_rows.DB, "b"), (bronze_rows.DB, "t")]
        monkeypatch.setattr(bronze_log, "FEW_ROWS", 3)
        with pytest.raises(NeedsSpark):
            bronze_log.captured_collections(SPARK, hop.bronze)


def test_a_transaction_that_has_ended_is_known(tmp_path: Path) -> None:
    """Only a transaction whose end is missing needs a query, which counts its events."""
    with without_spark.running():
        hop = Hop(tmp_path)

        def land(**statuses: str) -> None:
            """A file with these rows by their offsets: each is of a transaction, or a heartbeat if it has no status."""
            hop._batch += 1
            rows: list[dict[str, Any]] = []
            for name, status in statuses.items():
                place = {"resume_token": name, "offset": int(name[1:]), "batch": hop._batch, "ts_ms": 5}
                payload = json.dumps({"status": status, "id": name})
                rows.append(place | ({"kind": "transaction", "payload": payload} if status else {"kind": "heartbeat"}))
            hop.commit(rows)

        assert bronze_log.open_transaction(SPARK, hop.bronze) is None
        land(o1="BEGIN", o2="END", o3="")
        land(o4="")
        assert bronze_log.open_transaction(SPARK, hop.bronze) is None
        # Files that a compaction wrote may overlap.
        land(o5="END", o9="")
        land(o6="BEGIN", o7="")
        with pytest.raises(NeedsSpark):
            bronze_log.open_transaction(SPARK, hop.bronze)
        land(o8="END")
        assert bronze_log.open_transaction(SPARK, hop.bronze) is None


def test_a_restored_bronze_was_written_as_its_rows_say(tmp_path: Path) -> None:
    """It counts as captured with the settings and deployment of the restored version, whatever was committed after it: the events that
    those settings left out are missing again."""
    with without_spark.running():
        hop = Hop(tmp_path)
        folder = Path(hop.bronze.path or "")
        hop.append((1, b"\5\0\0\0\0"))
        end_at(hop, f"82{100:08X}000000012B0229296E04")
        for version, stream in ((3, "narrow"), (4, "wide")):
            said = {"writer": "by hand", "released": True, "batch": 1, "stream": stream, "replica_set": f"rs-{stream}"}
            said["event"] = f"event-{stream}"
            without_spark.write(folder, version, [], userMetadata=json.dumps(said))
        found = ExistingBronze.read(SPARK, hop.bronze, fingerprint="wide")
        assert (found.is_other_stream, found.replica_set, found.last_event) == (False, "rs-wide", "event-wide")
        without_spark.write(folder, 5, [], "RESTORE", operationParameters={"version": 3})
        found = ExistingBronze.read(SPARK, hop.bronze, fingerprint="wide")
        assert (found.is_other_stream, found.replica_set, found.last_event) == (True, "rs-narrow", "event-narrow")


@pytest.mark.parametrize("token", [None, "", "snapshot:1:2", "8265"])
def test_a_bronze_that_does_not_end_with_a_token_is_refused(tmp_path: Path, token: str | None) -> None:
    """Exit code 3, and what happened: another program wrote to the table. Without its position, events would be lost or come twice."""
    with without_spark.running():
        hop = Hop(tmp_path)
        end_at(hop, token)
        with pytest.raises(errors.DecisionNeeded, match=r"bronze.*batch 1, offset 1.*resume token.*Restore"):
            ExistingBronze.read(SPARK, hop.bronze, fingerprint="wide")


def end_at(hop: Hop, token: str | None) -> None:
    """Ends bronze with a heartbeat that has this token."""
    hop._batch, hop._offset = hop._batch + 1, hop._offset + 1
    place = {"resume_token": token, "offset": hop._offset, "batch": hop._batch, "ts_ms": 5}
    hop.commit([place | {"kind": "heartbeat", "payload": "{}"}])


def test_the_end_of_a_collection_whose_snapshot_failed_is_told(tmp_path: Path) -> None:
    """It is read together with the snapshots' heartbeats: a cut then no longer calls the collection incomplete."""
    with without_spark.running():
        hop = Hop(tmp_path)
        failed = SnapshotState("1", ("cases.t",)).advanced("cases.t", CollectionState(failed="why"))
        for offset, payload in enumerate((failed.begun(), failed.progress("cases.t")), 1):
            hop._batch, hop._offset = offset, offset
            place = {"resume_token": f"t{offset}", "offset": offset, "batch": offset, "ts_ms": 5}
            hop.commit([place | {"kind": "heartbeat", "payload": json.dumps(payload, separators=(",", ":"))}])
        hop.drop()
        assert bronze_log.gap_and_snapshot_heartbeats(SPARK, hop.bronze)[-1] == {"ended": "cases.t"}


def test_what_heartbeats_tell_is_read_without_the_rows_of_all_events(tmp_path: Path) -> None:
    """Even the tokens of a hundred million events take minutes to read, and each status needs a few heartbeats among them."""
    with without_spark.running():
        hop = Hop(tmp_path)
        hop._batch = 1
        plan = SnapshotState("1", ("cases.t",)).begun()
        # An event, and a row group without a snapshot, like nearly all row groups.
        rows = [{"kind": "heartbeat", "payload": json.dumps(plan, separators=(",", ":"))}, {"kind": "change"}]
        rows += [{"kind": "heartbeat", "payload": "{}"}, {"kind": "change"}]
        hop.commit([row | {"resume_token": f"t{at}", "offset": at, "batch": 1, "ts_ms": 5} for at, row in enumerate(rows)])
        (file,) = local_log.files(Path(hop.bronze.path or "")) or ()
        pq.write_table(pq.read_table(file.path), file.path, row_group_size=2)
        damaged_files.damage(file.path, lambda group, column: group == 1 or column == "resume_token")
        assert bronze_log.gap_and_snapshot_heartbeats(SPARK, hop.bronze) == [plan]
        with pytest.raises(NeedsSpark):  # reading it here fails, which leaves it to Spark
            bronze_log.first_token(SPARK, hop.bronze)
