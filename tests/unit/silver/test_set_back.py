"""After an older copy of bronze is restored, events in batches with reused numbers are still applied."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pytest

from cdc_core import errors
from cdc_core.bronze import columns as bronze
from cdc_core.gold import cut as times
from cdc_core.tables import layout as tables
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.delta import live_files, local_log, ops_tables, stored_files
from pipelines.delta.writer import Writer
from pipelines.gold import history, history_position
from pipelines.operations import cut
from pipelines.silver import set_back
from tests.harness import bronze_rows, without_spark
from tests.harness.folder_store import Folder
from tests.harness.without_spark import SPARK, Hop


@pytest.fixture
def hop(tmp_path: Path) -> Iterator[Hop]:
    """Batches 1 and 2 are in the copy, 3 and 4 came later; `u` has events only in the first."""
    with without_spark.running():
        made = Hop(tmp_path / "lake")
        made.append((1, bson.encode({"_id": 1})), collection="u")
        for key in (2, 3, 4):
            append(made, key)
            if key == 2:
                shutil.copytree(tmp_path / "lake", tmp_path / "copy")
        yield made


def append(hop: Hop, key: int, *, collection: str = "t") -> None:
    """Appends a batch, which silver applies."""
    hop.append((key, bson.encode({"_id": key})), collection=collection)
    hop.silver()


def bring_back(hop: Hop, *layers: str, copy: str = "copy", batch: int = 2) -> None:
    """Restores the layers from the copy; the capture continues from there."""
    root = Path(hop.settings.lakehouse.root or "")
    for layer in layers:
        shutil.rmtree(root / layer)
        shutil.copytree(root.parent / copy / layer, root / layer)
    hop._batch = batch


def keys(hop: Hop, collection: str = "t") -> set[int]:
    table = hop.layout.silver(bronze_rows.DB, collection)
    live = live_files.LiveFiles(Path(table.path or ""))
    assert live.move_to(local_log.newest_version(live.folder) or 0)
    return set(live.rows(live.files())["_id"].to_pylist())


def position(hop: Hop, collection: str = "t") -> registry.SilverPosition:
    return registry.silver_position(SPARK, hop.layout.silver(bronze_rows.DB, collection))


def test_silver_goes_back_to_the_last_batch_that_both_have(hop: Hop, caplog: pytest.LogCaptureFixture) -> None:
    """Silver then gets a new origin, which gold follows; it goes back only once."""
    before = position(hop)
    bring_back(hop, "bronze")
    hop.silver()
    after = position(hop)
    assert (before.to, after.to) == (4, 2) and after.origin != before.origin
    assert "applying everything after batch 2 again" in caplog.text
    for key in (13, 14, 15):
        append(hop, key)
    assert keys(hop) == {2, 3, 4, 13, 14, 15}
    assert position(hop).origin == after.origin and caplog.text.count("was restored") == 1


def test_a_collection_that_all_batches_had_nothing_of_is_looked_through_again(hop: Hop) -> None:
    """The other collections were up to date with batches that this bronze does not have."""
    bring_back(hop, "bronze")
    append(hop, 13, collection="u")
    append(hop, 14)
    assert keys(hop, "u") == {1, 13} and keys(hop) == {2, 3, 4, 14}


def test_what_a_service_saw_in_the_end_goes_with_the_bronze_in_which_it_saw_it(hop: Hop, tmp_path: Path) -> None:
    """A batch without the collection's events counts as applied. Its number may come again with events."""
    running = hop.silver_run()
    hop.append((5, bson.encode({"_id": 5})))
    running.run_round()
    shutil.copytree(tmp_path / "lake", tmp_path / "later")
    hop.append((6, bson.encode({"_id": 6})), collection="tmp.agg_out.1")
    running.run_round()
    running.close()
    assert position(hop).settled == registry.CaughtUp.at(6, dict(running.positions.known))
    bring_back(hop, "bronze", copy="later", batch=5)
    append(hop, 16, collection="u")
    assert keys(hop, "u") == {1, 16}


def test_a_table_that_could_not_be_set_back_at_once_is_later(hop: Hop) -> None:
    """Another writer may hold the table, while the other tables already follow the present bronze."""
    bring_back(hop, "bronze")
    other = Writer.claim(SPARK, hop.silver_table)
    hop.append((13, bson.encode({"_id": 13})))
    with pytest.raises(errors.TableOwned):
        hop.silver()
    other.release()
    append(hop, 14)
    append(hop, 15)
    assert keys(hop) == {2, 3, 4, 13, 14, 15}


def test_a_service_ends_where_a_copy_is_brought_back_under_it(hop: Hop) -> None:
    """The next service goes back, even if bronze has more commits than before."""
    running = hop.silver_run()
    running.run_round()
    bring_back(hop, "bronze")
    for key in (13, 14, 15):
        hop.append((key, bson.encode({"_id": key})))
    with pytest.raises(errors.CommitConflict, match="was restored"):
        running.run_round()
    running.close()
    hop.silver()
    assert keys(hop) == {2, 3, 4, 13, 14, 15}


def test_of_another_bronze_a_table_stays_as_it_is(hop: Hop) -> None:
    """The new bronze has none of the batches that the table was made from: somebody must decide."""
    before = position(hop)
    bring_back(hop, "bronze")
    hop.log = "two"
    with pytest.raises(errors.CollectionsFailed, match="another bronze"):
        append(hop, 13)
    assert position(hop) == before


def test_where_the_tables_history_does_not_reach_back_all_is_applied(hop: Hop, caplog: pytest.LogCaptureFixture) -> None:
    """For example where older commits are of a version that did not record bronze's identity."""
    bring_back(hop, "bronze")
    log = Path(hop.silver_table.path or "") / "_delta_log"
    for path in sorted(log.glob("*.json"))[:-1]:
        path.write_text(path.read_text().replace("bronze", "unsaid"))
    hop.silver()
    assert "applying everything after batch 0 again" in caplog.text
    assert position(hop).to == 2 and keys(hop) == {2, 3, 4}


@pytest.mark.parametrize(("taken", "left", "is_lost"), [(4, 5, True), (4, 2, False), (2, 5, False)])
def test_a_copy_of_silver_asks_for_what_was_trimmed_since(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, taken: int, left: int, is_lost: bool
) -> None:
    """Bronze lacks events that the copy has not applied: its documents would silently stay outdated, whatever gold has."""
    monkeypatch.setattr(bronze_log, "trimmed_to", lambda *_: taken)
    monkeypatch.setattr(bronze_log, "first_batches", lambda *_: {(bronze_rows.DB, "t"): left})
    monkeypatch.setattr(bronze_log, "is_whole", lambda *_: False)
    append(hop, 5)
    bring_back(hop, "silver", "ops", batch=5)
    if is_lost:
        with pytest.raises(errors.DecisionNeeded, match="execute-snapshot"):
            append(hop, 6)
    else:
        append(hop, 6)
    assert position(hop).to == (2 if is_lost else 6)


def test_of_many_tables_that_went_back_bronze_is_read_once(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a trimmed bronze is a query over all of it: it was repeated for each of them."""
    positions = hop.silver_run().positions
    positions.look(bronze_log.newest(SPARK, hop.bronze))
    positions.read()
    bring_back(hop, "silver", "ops", batch=4)
    read: list[object] = []
    monkeypatch.setattr(bronze_log, "first_batches", lambda *_: read.append(_) or {})
    monkeypatch.setattr(bronze_log, "trimmed_to", lambda *_: 4)
    for _ in range(2):
        for namespace in positions.known:
            assert positions.reread(namespace) and len(read) == 1
    hop.append((5, bson.encode({"_id": 5})))
    positions.look(bronze_log.newest(SPARK, hop.bronze))
    assert positions.reread(namespace) and len(read) == 2, "as maintenance may have removed more"


@pytest.mark.parametrize(("taken", "left", "is_lost"), [(2, 2, True), (2, 3, True), (1, 2, False)])
def test_a_removed_table_asks_for_what_was_trimmed(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, taken: int, left: int, is_lost: bool
) -> None:
    """The remaining events may start with the batch up to which bronze was searched when the collection was found, here 2."""
    hop.gold()
    assert registry.searched(SPARK, hop.settings, registry.Namespace(bronze_rows.DB, "t"), log="one") == (0, 2)
    monkeypatch.setattr(registry, "searched", lambda *_, **__: (1, 2))
    monkeypatch.setattr(bronze_log, "trimmed_to", lambda *_: taken)
    monkeypatch.setattr(bronze_log, "first_batches", lambda *_: {(bronze_rows.DB, "t"): left})
    monkeypatch.setattr(bronze_log, "is_whole", lambda *_: False)
    shutil.rmtree(hop.silver_table.path or "")
    with pytest.raises(errors.DecisionNeeded, match="execute-snapshot") if is_lost else contextlib.nullcontext():
        append(hop, 5)
    assert position(hop).to == (0 if is_lost else 5)


@pytest.mark.parametrize(("taken", "left", "is_lost"), [(2, 5, False), (5, 6, True)])
def test_what_was_noted_of_another_bronze_says_nothing_of_what_was_trimmed(
    hop: Hop, monkeypatch: pytest.MonkeyPatch, taken: int, left: int, is_lost: bool
) -> None:
    """Bronze and silver are made anew, and `ops` is kept: that the collection was found in batch 2 of the old bronze must not make it look
    restored. If the table is removed later, the note from the new bronze counts."""
    for layer in ("bronze", "silver"):
        shutil.rmtree(Path(hop.settings.lakehouse.root or "") / layer)
    without_spark.create(SPARK, hop.bronze, columns=bronze.COLUMNS_DDL)
    hop.log, hop._batch = "two", 0
    for key in range(4):
        append(hop, key, collection="u")
    hop.append((5, bson.encode({"_id": 5})))
    if is_lost:
        hop.silver()
        shutil.rmtree(hop.silver_table.path or "")
    monkeypatch.setattr(bronze_log, "trimmed_to", lambda *_: taken)
    monkeypatch.setattr(bronze_log, "first_batches", lambda *_: {(bronze_rows.DB, "t"): left})
    monkeypatch.setattr(bronze_log, "is_whole", lambda *_: False)
    with pytest.raises(errors.DecisionNeeded, match="execute-snapshot") if is_lost else contextlib.nullcontext():
        append(hop, 6)
    assert position(hop).to == (0 if is_lost else 6)


@pytest.mark.parametrize("layers", [("bronze", "silver"), ("bronze",)])
def test_what_was_made_of_other_batches_is_made_anew(hop: Hop, layers: tuple[str, ...]) -> None:
    """Gold and a history are ahead of a silver that went back with bronze, and must notice it even when silver has passed them."""
    namespace, table = registry.Namespace(bronze_rows.DB, "t"), hop.layout.history(bronze_rows.DB, "t")
    hop.gold()
    silver_was = position(hop)
    without_spark.create(SPARK, table, columns=history.ENGINE_DDL)
    writer = Writer.claim(SPARK, table)
    writer.mark(to=4, extra=history_position.HistoryPosition(to=4, bronze=silver_was.bronze).extra)
    writer.release()
    bring_back(hop, *layers)
    for key in (13, 14, 15):
        append(hop, key)
    run = hop.gold_run()
    work = run._work(namespace)
    assert work is not None and work.is_rewrite
    assert run._history(namespace, {}).at.to == 0


def test_gold_waits_where_silver_has_not_gone_back_yet(hop: Hop) -> None:
    """A history with new batches under old numbers would count as up to date."""
    table = hop.layout.history(bronze_rows.DB, "t")
    hop.gold()
    without_spark.create(SPARK, table, columns=history.ENGINE_DDL)
    writer = Writer.claim(SPARK, table)
    writer.mark(
        to=4, extra=history_position.HistoryPosition(to=4, bronze=(position(hop).bronze or (0, ""))[:1] + ("earlier",)).extra
    )
    writer.release()
    bring_back(hop, "bronze")
    run, namespace = hop.gold_run(), registry.Namespace(bronze_rows.DB, "t")
    assert run._work(namespace) is None and run._waits_for_silver(table, namespace, position(hop))
    for key in (13, 14, 15):
        append(hop, key)
    assert not run._waits_for_silver(table, namespace, position(hop)) and run._history(namespace, {}).at.to == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_deletes_that_are_no_longer_remembered_are_remembered_again(
    hop: Hop, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_there: bool
) -> None:
    """Older copies of gold and `ops` are restored: silver has no rows of later deletes, which gold needs."""
    namespace = registry.Namespace(bronze_rows.DB, "t")
    if is_there:
        hop.append((4, None))
        hop.run()
        shutil.copytree(tmp_path / "lake", tmp_path / "later")
    hop.append((2, None))
    hop.silver()
    before, copy = position(hop), "later" if is_there else "copy"
    bring_back(hop, "ops", copy=copy, batch=before.to)
    assert hop.gold_run()._work(namespace) is None
    positions = hop.silver_run().positions
    positions.look(bronze_log.newest(SPARK, hop.bronze))
    positions.read()
    after = position(hop)
    assert (after.to, after.origin != before.origin) == (5 if is_there else 0, True)
    assert "ops/deletes" in caplog.text and caplog.text.count("was restored") == 1
    assert not registry.lacks_deletes(SPARK, hop.layout.deletes(*namespace), after)


def test_deletes_that_a_restore_took_away_are_remembered_again(hop: Hop) -> None:
    """RESTORE adds a commit, so that the table's version is no smaller than the one that silver knows."""
    namespace, folder = registry.Namespace(bronze_rows.DB, "t"), Path(hop.layout.deletes(bronze_rows.DB, "t").path or "")
    hop.append((4, None))
    hop.run()
    live = live_files.LiveFiles(folder)
    assert live.move_to_newest()
    version, files = live.version, live.files()
    hop.append((2, None))
    hop.silver()
    before = position(hop)
    assert live.move_to_newest() and not registry.lacks_deletes(SPARK, hop.layout.deletes(*namespace), before)
    removed = [{"remove": {"path": each["path"], "dataChange": True}} for each in live.files() if each not in files]
    said = {"operationParameters": {"version": str(version)}}
    without_spark.write(folder, live.version + 1, removed, "RESTORE", **said)
    assert hop.gold_run()._work(namespace) is None
    positions = hop.silver_run().positions
    positions.look(bronze_log.newest(SPARK, hop.bronze))
    positions.read()
    after = position(hop)
    assert (before.to, after.to, after.origin != before.origin) == (6, 5, True)
    assert not registry.lacks_deletes(SPARK, hop.layout.deletes(*namespace), after)


def test_what_a_snapshot_swept_is_swept_again_where_its_deletes_are_no_longer_remembered(tmp_path: Path) -> None:
    """The events of a document whose delete was lost are applied again, and of it the snapshot's end alone tells."""
    with without_spark.running():
        made = Hop(tmp_path / "lake")
        log = without_spark.Log(made)
        log.append({"t": [{"op": "c", "key": key, "at": 10 + key, "after": {"_id": key}} for key in (1, 2)]})
        made.silver()
        shutil.copytree(tmp_path / "lake", tmp_path / "copy")
        log.append({"t": [{"op": "r", "key": 1, "at": 60, "after": {"_id": 1}}, {"sweep": 60}]})
        made.silver()
        assert keys(made) == {1}
        bring_back(made, "ops", batch=2)
        made.silver()
        assert keys(made) == {1}
        # An event from before the snapshot that comes late is compared with the delete.
        log.append({"t": [{"op": "u", "key": 2, "at": 20, "after": {"_id": 2}}]})
        made.silver()
        assert keys(made) == {1}


def test_a_catalog_is_not_asked_for_deletes_that_there_are_none_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of silver would ask it once for each collection."""
    monkeypatch.setattr(local_log, "place", lambda *_: pytest.fail("a request"))
    deletes = tables.Layout(None, "spark_catalog").deletes("shop", "orders")
    assert not registry.lacks_deletes(SPARK, deletes, registry.SilverPosition(4))


def test_deletes_that_spark_appends_are_noticed_too(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over Spark Connect a lakehouse on a disk has no direct log, but this process reads the table's version."""
    append_rows = ops_tables.append_rows

    def by_spark(*given: Any, **named: Any) -> None:
        append_rows(*given, **named)

    monkeypatch.setattr(ops_tables, "append_rows", by_spark)
    hop.append((4, None))
    hop.silver()
    assert position(hop).deletes == registry.deletes_version(SPARK, hop.layout.deletes(bronze_rows.DB, "t")) == 1


def test_gold_that_has_published_looks_no_more_for_commits_of_bronze(hop: Hop) -> None:
    """With a commit per second, gold would look at each, and keep it in memory forever."""
    run, looked_for = hop.gold_run(), []
    for key in (15, 16, 17):
        append(hop, key)
        run.published()
        looked_for.append(len(run.lost))
    run.close()
    assert len({*looked_for}) == 1


def test_of_another_bronze_gold_stays_as_it_is_too(hop: Hop) -> None:
    """Gold waits for silver, which waits for a decision; even if silver saw more of the old bronze than gold was made from."""
    running = hop.silver_run()
    hop.append((5, bson.encode({"_id": 5})))
    running.run_round()
    hop.gold()
    hop.append((6, bson.encode({"_id": 6})), collection="u")
    running.run_round()
    running.close()
    bring_back(hop, "bronze")
    hop.log = "two"
    with pytest.raises(errors.CollectionsFailed, match="another bronze"):
        append(hop, 13)
    assert hop.gold_run()._work(registry.Namespace(bronze_rows.DB, "t")) is None


def test_of_another_bronze_a_history_shows_no_time(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query for a time of the new bronze would read versions that were made from the old one."""
    table = hop.layout.history(bronze_rows.DB, "t")
    held = [((f"{bronze_rows.DB}.t", table), history_position.HistoryPosition(to=4, log=hop.log))]
    monkeypatch.setattr(cut, "_reached", lambda *_: (None, hop._batch))
    hop.append((5, bson.encode({"_id": 5})), collection="u")
    assert cut._applied(SPARK, hop.settings, held) == 5
    bring_back(hop, "bronze")
    hop.log = "two"
    for key in (13, 14, 15):
        hop.append((key, bson.encode({"_id": key})), collection="u")
    assert cut._applied(SPARK, hop.settings, held) == 0


def test_of_another_bronze_a_cut_is_made_as_far_as_silver_refuses_it(hop: Hop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches with lower numbers than the old ones must not count as events that the capture has yet to commit."""
    bring_back(hop, "bronze")
    hop.log = "two"
    hop.append((13, bson.encode({"_id": 13})))
    boundary = times.CutBoundary(3, "a", "b")
    monkeypatch.setattr(cut, "_boundaries", lambda *_, at: [boundary])
    assert cut._chosen(SPARK, hop.settings, None) == boundary


def test_a_history_that_is_ahead_of_a_restored_silver_bounds_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot go back: the cut could never be recorded, and its error would ask for another attempt each time."""
    asked: list[int] = []
    with without_spark.running():
        hop = Hop(tmp_path / "lake", history=True)
        for key in (1, 2, 3):
            hop.append((key, bson.encode({"_id": key})))
            hop.run()
            if key == 1:
                shutil.copytree(tmp_path / "lake", tmp_path / "copy")
        bring_back(hop, "silver", batch=3)
        boundaries = [times.CutBoundary(batch, f"{batch:016x}", f"{batch + 1:016x}") for batch in (1, 2, 3)]
        monkeypatch.setattr(cut, "_boundaries", lambda *_, at: asked.append(at) or boundaries)
        assert position(hop).to == 1
        assert cut._chosen(SPARK, hop.settings, None).batch == 3
        with pytest.raises(errors.DecisionNeeded, match="silver or a history is already past"):
            cut._chosen(SPARK, hop.settings, boundaries[1].time)
    assert asked == [3, 3]


def test_of_a_bronze_without_a_name_silver_stays_as_it_is(hop: Hop, tmp_path: Path) -> None:
    """A capture created it and ended before its first heartbeat: the original may still be restored."""
    before, bronze_table = position(hop), hop.layout.bronze(hop.settings.name)
    root = Path(hop.settings.lakehouse.root or "")
    shutil.move(root / "bronze", tmp_path / "kept")
    without_spark.create(SPARK, bronze_table, columns=bronze.COLUMNS_DDL)
    Writer.claim(SPARK, bronze_table, newest_names=("batch", "log")).release()
    hop.silver()
    assert position(hop).to == before.to and position(hop).origin == before.origin


def test_a_commit_older_than_bronzes_log_is_shared(hop: Hop) -> None:
    """A quiet collection's last commit but one is older than the copy: silver goes back to that, and no further."""
    table, bronze_table = hop.layout.silver(bronze_rows.DB, "u"), hop.layout.bronze(hop.settings.name)
    append(hop, 5, collection="u")
    bring_back(hop, "bronze")
    hop.append((13, bson.encode({"_id": 13})))
    for path in sorted((Path(bronze_table.path or "") / "_delta_log").glob("*.json"))[:-1]:
        path.unlink()
    set_back.to_common_batch(SPARK, table, bronze_table, newest=None, take_over=False)
    assert position(hop, "u").to == 2


def test_a_table_goes_back_under_nobody_who_claimed_it_since(hop: Hop) -> None:
    """A take-over only applies to owners at the start of the run."""
    bring_back(hop, "bronze")
    service = hop.silver_run()
    service.take_over = service.positions.take_over = True
    time.sleep(0.002)  # the log counts milliseconds
    rival = Writer.claim(SPARK, hop.silver_table)
    service.run_round()
    assert [*map(type, service.failures.by_name.values())] == [errors.TableOwned] and position(hop).to == 4
    rival.release()
    assert service.positions.reread(registry.Namespace(bronze_rows.DB, "t")) and position(hop).to == 2
    service.close()


def test_deletes_in_a_store_that_an_older_copy_lacks_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two requests, not with a copy of the whole log: there is such a table for each collection."""
    table, lake = tables.TableRef.at("s3a://bucket/lake/ops/deletes/shop/t"), tmp_path / "store"
    copied = stored_files.CopiedLog(Folder(lake, tmp_path / "copies"))
    monkeypatch.setitem(stored_files._COPIED, copied.folder, copied)
    monkeypatch.setattr(stored_files, "place", lambda *_: copied.folder)

    def commit(version: int, operation: str = "WRITE", **said: object) -> None:
        without_spark.write(lake, version, [], operation, **said)

    def lacks(last: int) -> bool:
        shutil.rmtree(copied.folder, ignore_errors=True)
        copied.files.asked.clear()  # type: ignore[attr-defined]
        return registry.lacks_deletes(SPARK, table, registry.SilverPosition(deletes=last))

    (lake / "_delta_log").mkdir(parents=True)
    assert lacks(3)
    for version in range(5):
        commit(version)
    assert not lacks(4) and len(copied.files.asked) == 2  # type: ignore[attr-defined]
    assert not lacks(3) and lacks(5)
    commit(5, "RESTORE", operationParameters={"version": "2"})
    assert lacks(4) and not lacks(2)
    for version in range(4):
        (lake / "_delta_log" / f"{version:020}.json").unlink()
    assert not lacks(1)
