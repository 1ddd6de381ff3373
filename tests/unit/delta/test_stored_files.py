"""Local copies of a table in a store follow the store, whatever happened to it since the last look.

The store here is a folder; `tests/journeys/test_object_store.py` uses a real one.
"""

from __future__ import annotations

import contextvars
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.delta import live_files, local_log, stored_files, table_definition, table_files
from pipelines.delta.stored_files import CopiedLog
from tests.harness.folder_store import Folder

SCHEMA = {"type": "struct", "fields": [{"name": "__key", "type": "string", "nullable": True, "metadata": {}}]}
METADATA = {"metaData": {"schemaString": json.dumps(SCHEMA), "partitionColumns": [], "configuration": {"a": "b"}}}


class Table:
    """A table in the store, and this process' copy of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.files = Folder(self.folder, folder / "copies")
        self.log = CopiedLog(self.files)
        self.copies = self.log.folder
        stored_files._COPIED[self.copies] = self.log

    def own_commit(self, version: int, *actions: dict[str, Any], is_kept: bool = True) -> None:
        """A commit of this process, which its log store keeps if `is_kept`."""
        self.commit(version, *actions)
        name = table_files.commit_name(version)
        if is_kept:
            self.files.own[name] = (self.folder / name).read_bytes()
        status = (self.folder / name).stat()
        stored_files.note_commit(self.copies, version, status.st_mtime_ns // 1000, status.st_size)

    def commit(self, version: int, *actions: dict[str, Any], said: str | None = None) -> None:
        path = self.folder / "_delta_log" / f"{version:020}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        info = {"commitInfo": {"operation": "WRITE", "userMetadata": said}}
        path.write_text("".join(json.dumps(each) + "\n" for each in [info, *actions]))

    def file(self, *keys: str) -> dict[str, Any]:
        name = f"part {'-'.join(keys)}.parquet"
        pq.write_table(pa.table({"__key": [*keys]}), self.folder / name)
        size = (self.folder / name).stat().st_size
        return {"add": {"path": name.replace(" ", "%20"), "size": size, "stats": json.dumps({"numRecords": len(keys)})}}

    def checkpoint(self, version: int) -> None:
        held = pa.array([{name: METADATA["metaData"][name] for name in ("schemaString", "partitionColumns")}])
        pq.write_table(pa.table({"metaData": held}), self.folder / "_delta_log" / f"{version:020}.checkpoint.parquet")
        (self.folder / "_delta_log" / "_last_checkpoint").write_text(json.dumps({"version": version}))

    def newest(self) -> int | None:
        stored_files.follow(self.copies)
        return local_log.newest_version(self.copies)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    yield made
    del stored_files._COPIED[made.copies]


def test_a_table_is_followed_from_before_it_is_there(table: Table) -> None:
    assert table.newest() is None and not local_log.exists(table.copies)
    for version in range(3):
        table.commit(version, METADATA)
        assert table.newest() == version and local_log.exists(table.copies)
    assert table_definition.properties(table.copies) == {"a": "b"}
    asked = len(table.files.asked)
    assert table.newest() == 2 and len(table.files.asked) == asked, "no commit is copied twice"


def test_questions_that_are_asked_together_look_once(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later questions see what was committed in the meantime."""
    looks: list[Path] = []
    follow = CopiedLog.follow
    monkeypatch.setattr(CopiedLog, "follow", lambda self: looks.append(self.folder) or follow(self))
    table.commit(0, METADATA)
    with stored_files.one_look():
        assert table.newest() == 0
        table.commit(1, METADATA)
        with stored_files.one_look():
            assert table.newest() == 0
        assert table.newest() == 0 and len(looks) == 1
    assert table.newest() == 1 and len(looks) == 2


def test_a_look_may_be_at_one_table_alone(table: Table, tmp_path: Path) -> None:
    """A round of a layer reads the table that it is made from at one version, also in its threads, and looks at its own tables each
    time."""
    other = Table(tmp_path / "other")
    for each in (table, other):
        each.commit(0, METADATA)
    with stored_files.one_look_at(table.copies), ThreadPoolExecutor(1) as pool:
        for version in (0, 1):
            with stored_files.one_look():
                assert (table.newest(), other.newest()) == (0, version)
                other.commit(version + 1, METADATA)
                assert other.newest() == version
            table.commit(version + 1, METADATA)
        assert pool.submit(contextvars.copy_context().run, table.newest).result() == 0
        assert pool.submit(table.newest).result() == 2, "in another context"
    table.commit(3, METADATA)
    with stored_files.one_look_at(None):
        assert table.newest() == 3
        table.commit(4, METADATA)
        assert table.newest() == 4
    del stored_files._COPIED[other.copies]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests to the store so far, each with the version or the name of its file."""
    made: list[str] = []
    for name in ("is_file", "status", "download"):
        method = getattr(Folder, name)

        def counted(self: Folder, file: str, *rest: Any, _name: str = name, _method: Any = method) -> Any:
            made.append(f"{_name} {Path(file).stem.lstrip('0') or 0}")
            return _method(self, file, *rest)

        monkeypatch.setattr(Folder, name, counted)
    return made


def test_a_commit_of_its_own_needs_no_request(table: Table, requests: list[str]) -> None:
    """Its log store has what it wrote, and Delta its status. The next look is whether another process has committed since."""
    table.commit(0, METADATA)
    live = live_files.LiveFiles(table.copies)
    assert table.newest() == 0 and live.move_to(0)
    for version in (1, 2):
        requests.clear()
        table.own_commit(version, table.file(f"{version}"))
        assert live.move_to(version) and len(live.files()) == version and not requests
        assert table.newest() == version and requests == [f"status {version}", f"is_file {version + 1}"]
    table.commit(3, METADATA)
    requests.clear()
    assert table.newest() == 3 and requests == ["status 2", "is_file 3", "status 3", "download 3", "is_file 4"]


def test_the_files_of_a_version_that_was_looked_at_need_no_request(table: Table, requests: list[str]) -> None:
    """Each reader of a table has its own `LiveFiles`, which begin at the version that the look has found. One that it has not found is
    looked for."""
    table.commit(0, METADATA)
    assert live_files.LiveFiles(table.copies).move_to(0), "nothing was looked at before"
    for version in (1, 2):
        table.commit(version, table.file(f"{version}"))
    assert table.newest() == 2
    requests.clear()
    for version in range(3):
        live = live_files.LiveFiles(table.copies)
        assert live.move_to(version) and len(live.files()) == version and not requests
    table.commit(3, METADATA)
    assert live_files.LiveFiles(table.copies).move_to(3) and requests


def test_a_commit_of_its_own_that_no_log_store_keeps_is_one_request(table: Table, requests: list[str]) -> None:
    """Its size is known, and that it is there."""
    table.commit(0, METADATA)
    assert table.newest() == 0
    requests.clear()
    table.own_commit(1, METADATA, is_kept=False)
    assert local_log.newest_version(table.copies) == 1 and requests == ["download 1"]


def test_a_commit_of_its_own_counts_only_as_the_next_one(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a log has no holes, none before the table was read, and none that grow for ever in a process that only writes."""
    table.commit(0, METADATA)
    table.own_commit(1, METADATA)
    assert local_log.newest_version(table.copies) is None, "the table was not read yet"
    assert table.newest() == 1
    table.commit(2, METADATA)
    table.own_commit(3, METADATA)
    assert local_log.newest_version(table.copies) == 1 and table.newest() == 3
    stored_files.note_commit(table.folder, 4, 0, 0)  # a table's own folder has no copies
    monkeypatch.setattr(stored_files, "OLD_COMMITS", 5)
    for version in range(4, 10):
        table.own_commit(version, METADATA)
    assert local_log.newest_version(table.copies) == 5 and table.newest() == 9
    shutil.rmtree(table.folder)
    assert table.newest() is None, "a table that is removed behind it is gone"


def test_another_tables_commit_is_none_of_its_own(table: Table) -> None:
    """The table was made again in the meantime, with a commit of this number that follows on the new table's commits."""
    table.commit(0, METADATA)
    live = live_files.LiveFiles(table.copies)
    assert table.newest() == 0 and live.move_to(0)
    table.own_commit(1, METADATA, table.file("own"))
    assert live.move_to(1)
    for version, key in enumerate("abc"):
        table.commit(version, METADATA, table.file(key), said="another's")
    assert table.newest() == 2 and live.move_to(2)
    assert live.rows(live.files())["__key"].to_pylist() == ["a", "b", "c"]


def test_a_table_that_was_made_again_is_another_one(table: Table) -> None:
    for version in range(3):
        table.commit(version, METADATA)
    live = live_files.LiveFiles(table.copies)
    assert table.newest() == 2 and live.move_to(2)
    shutil.rmtree(table.folder)
    for version in range(5):
        table.commit(version, METADATA, *([table.file("x")] if version == 1 else []))
    assert table.newest() == 4 and live.move_to(4)
    assert [each["path"] for each in live.files()] == ["part%20x.parquet"]
    shutil.rmtree(table.folder)
    assert table.newest() is None


def test_a_version_that_is_looked_for_may_be_another_tables(table: Table) -> None:
    """This is only seen when its commits are read."""
    table.commit(0, METADATA)
    table.commit(1, table.file("a"))
    live = live_files.LiveFiles(table.copies)
    assert live.move_to_newest() and live.version == 1
    shutil.rmtree(table.folder)
    table.commit(0, METADATA)
    for version, key in enumerate("bcd"):
        table.commit(version, METADATA, table.file(key))
    assert live.move_to(2)
    assert live.rows(live.files())["__key"].to_pylist() == ["b", "c", "d"]


def test_a_long_log_begins_at_its_checkpoint(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(30):
        table.commit(version, METADATA)
    table.checkpoint(20)
    assert table.newest() == 29
    assert not (table.copies / "_delta_log" / f"{19:020}.json").exists()
    monkeypatch.setattr(stored_files, "KEPT_COMMITS", 5)
    assert [each.version for each in local_log.commits(table.copies)] == [*range(29, 14, -1)], "as far as is bearable"
    monkeypatch.setattr(stored_files, "OLD_COMMITS", 8)
    table.checkpoint(28)
    assert table.newest() == 29 and table_definition.properties(table.copies) == {"a": "b"}
    held = sorted(path.name for path in (table.copies / "_delta_log").glob("*.json"))
    assert held[0] == f"{23:020}.json", "what is long past goes"
    assert not (table.copies / "_delta_log" / f"{20:020}.checkpoint.parquet").exists()


@pytest.mark.parametrize("noted", ['{"version": 3}', "{", '{"version": 3, "sizeInBytes": 1}'])
def test_a_log_that_begins_otherwise_is_left_to_delta(table: Table, noted: str) -> None:
    table.commit(3, METADATA)
    (table.folder / "_delta_log" / "_last_checkpoint").write_text(noted)  # a multi-part checkpoint, or truncated
    with pytest.raises(OSError):
        table.newest()
    (table.folder / "_delta_log" / "_last_checkpoint").unlink()
    with pytest.raises(OSError):
        table.newest()


def test_rows_are_read_from_copies_made_when_they_are_needed(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.commit(0, METADATA)
    table.commit(1, table.file("a", "b"), table.file("c"))
    live = live_files.LiveFiles(table.copies)
    assert live.move_to_newest() and live.version == 1
    assert not any(name.endswith(".parquet") for name in table.files.asked)
    assert [numbers for _, numbers in live.places("__key", ["b", "c"])] == [[1], [0]]
    assert live.rows(live.files())["__key"].to_pylist() == ["a", "b", "c"]
    assert sorted(table.files.asked)[-2:] == ["part a-b.parquet", "part c.parquet"]
    table.commit(2, table.file("d"))
    assert live.move_to(2), "a version that is newer than the last look"
    monkeypatch.setattr(stored_files, "FETCH_BYTES", 10)
    with pytest.raises(OSError):
        live.places("__key", ["d"])


def test_a_file_that_is_gone_or_another_one_is_no_copy(table: Table) -> None:
    table.commit(0, METADATA)
    added = table.file("a")
    added["add"]["size"] += 1
    table.commit(1, added, {"add": {**added["add"], "path": "s3a://elsewhere/b.parquet"}})
    live = live_files.LiveFiles(table.copies)
    assert live.move_to(1)
    for each in live.files():
        with pytest.raises(OSError):
            live.rows([each])
    assert not list(table.copies.glob("*.parquet*"))


def test_no_copy_lies_outside_of_the_copies(tmp_path: Path) -> None:
    """Who may write to a store chooses the paths in its log, which must not write to the reader's disk."""
    files = Folder(tmp_path / "far" / "store", tmp_path / "copies")
    files.source.mkdir(parents=True)
    planted = tmp_path / "far" / "planted"
    for each in (planted, planted.with_name("planted.0-1")):
        each.write_text("x")
    for name in ("../planted", "below/../../planted", str(planted)):
        for fetch in (files.fetch, lambda name: files.fetch_range(name, 0, 1)):
            with pytest.raises(FileNotFoundError):
                fetch(name)
    assert not files.asked and {*tmp_path.iterdir()} == {tmp_path / "far"}


def test_copies_are_held_in_bounds(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.commit(0, METADATA)
    table.commit(1, *(table.file(f"{n}") for n in range(9)))
    live = live_files.LiveFiles(table.copies)
    assert live.move_to(1)
    size = live.files()[0]["size"]
    monkeypatch.setattr(stored_files, "_HELD", stored_files._HeldCopies())
    monkeypatch.setattr(stored_files, "HELD_BYTES", 3 * size + 10)
    for each in live.files():
        live.rows([each])
    assert len(list(table.copies.glob("*.parquet"))) == 3
    assert table.newest() == 1, "the log is not among them"
    monkeypatch.setattr(stored_files, "HELD_BYTES", 10)
    (table.copies / "large.parquet").write_bytes(bytes(11))
    stored_files._HELD.add(table.copies / "large.parquet")  # like a commit of many documents that was written here
    assert not list(table.copies.glob("*.parquet"))


def test_a_table_on_this_disk_is_never_copied(tmp_path: Path) -> None:
    assert stored_files.place(None, str(tmp_path)) is None  # type: ignore[arg-type]
    stored_files.follow(tmp_path)
    stored_files.bring(tmp_path, [("a", 1)])
    assert stored_files.commit_path(tmp_path, 1) == tmp_path / "_delta_log" / f"{1:020}.json"


def test_an_outage_between_two_requests_leaves_the_copy_what_it_was(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.commit(0, METADATA)
    assert table.newest() == 0
    draft = table.files.draft("part.parquet")
    draft.write_bytes(b"of a commit that is under way")
    table.commit(1, METADATA)

    def away(*_: Any) -> None:
        raise OSError(5, "away")

    with monkeypatch.context() as outage:
        outage.setattr(Folder, "download", away)
        with pytest.raises(OSError):
            table.newest()
    (table.copies / "kept").write_text("")
    assert table.newest() == 1 and (table.copies / "kept").exists(), "the same table, which is not copied anew"
    shutil.rmtree(table.folder)
    assert table.newest() is None and draft.exists()


def test_copies_of_an_earlier_process_are_no_table(table: Table) -> None:
    for version in range(3):
        table.commit(version, METADATA)
    shutil.copytree(table.folder, table.copies)  # as an earlier process with this process' number leaves it
    shutil.rmtree(table.folder)
    assert table.newest() is None and not local_log.exists(table.copies)
    table.commit(0, {"metaData": {**METADATA["metaData"], "configuration": {"a": "another"}}})
    assert table.newest() == 0 and [each.version for each in local_log.commits(table.copies)] == [0]
    assert table_definition.properties(table.copies) == {"a": "another"}


def test_a_commit_that_was_copied_by_itself_hides_no_later_ones(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(12):
        table.commit(version, METADATA)
    table.checkpoint(10)
    assert local_log.commit(table.copies, 4) is not None
    assert len(table.files.asked) == 1, "one that is asked for by itself takes no log with it"
    assert table.newest() == 11
    assert stored_files.commit_path(table.copies, 7).exists()
    monkeypatch.setattr(stored_files, "KEPT_COMMITS", 2)
    assert not stored_files.commit_path(table.copies, 3).exists(), "on the way through all of them"
    assert local_log.commit(table.copies, 3) is not None
    assert local_log.commit(table.copies, 12) is None
    local_log._NEWEST[table.copies] = 7  # as set by a thread that looked before the log was copied anew
    assert local_log.newest_version(table.copies) == 11


def test_each_process_has_copies_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted container keeps its temporary folder, and its process has the same number."""
    monkeypatch.setattr(stored_files.scratch, "folder", lambda: tmp_path)
    stored_files._root.cache_clear()
    first = stored_files._root(1)
    first.mkdir()
    stored_files._root.cache_clear()
    assert stored_files._root(1) != first and not first.exists()
    stored_files._root.cache_clear()


def test_a_full_disk_here_is_none_in_the_store(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    out = SimpleNamespace(write=lambda content: written.append(bytes(content)), close=lambda: None)
    table.files.__dict__["created"] = lambda name: out
    table.files.write("a.bin", b"whole")
    assert table.files.read("a.bin", 1, 3) == b"hol"

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    table.files.write("b.bin", b"whole")
    assert written == [b"whole", b"whole"]
    assert not (table.copies / "b.bin").exists() and not table.files.draft("b.bin").exists()
