"""When a commit is retried and what ends it, with an in-memory history instead of Spark."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from grpc import StatusCode
from pyspark.errors import AnalysisException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from cdc_core import errors
from cdc_core.tables import claims
from cdc_core.tables.layout import TableRef
from pipelines.delta import direct_log, fenced_commits, ops_tables, query_execution, table_errors, table_history, upsert
from pipelines.delta.fenced_commits import CommitPosition, FencedCommits
from pipelines.delta.local_log import Commit
from pipelines.delta.log_actions import Fence
from pipelines.delta.statement_commits import StatementCommits

TABLE = TableRef.at("/lake/t")


class ConcurrentAppendException(AnalysisException):
    """Has the class name of Delta's exception, which identifies a conflict."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Commit]]:
    """The table's commits, oldest first; retries do not wait."""
    commits: list[Commit] = [Commit(0, 0, None)]
    monkeypatch.setattr(table_history, "commits", lambda _, __, *, limit: [*reversed(commits)][:limit])
    monkeypatch.setattr("pipelines.delta.fenced_commits.time", SimpleNamespace(sleep=lambda _: None))
    yield commits


@pytest.fixture
def writer(log: list[Commit]) -> FencedCommits:
    return FencedCommits(None, TABLE, identity=claims.WriterIdentity("w", "host", 1, ""), base=log[-1])  # type: ignore[arg-type]


POSITION = CommitPosition(7)


def committed_after(refusals: int, error: Callable[[], Exception], log: list[Commit]) -> Callable[..., int]:
    """Commits onto the newest version, after this many refusals by commits of others."""
    left = iter(range(refusals))

    def commit(fence: Fence) -> int:
        version = log[-1].version + 1
        if next(left, None) is not None:
            log.append(Commit(version, 0, None))
            raise error()
        assert fence.base == version - 1
        log.append(Commit(version, 0, claims.parsed(fence.metadata)))
        return version

    return commit


def test_an_errand_is_not_carried_to_the_next_writer() -> None:
    """Another writer's claim after `medallion maintain` must not have its errand: it would tell others that this writer ends within a
    minute."""
    passing = claims.parsed(claims.WriterIdentity("w", "host", 1, "", "medallion maintain").metadata(now_ms=0, to=7))
    assert passing and passing["errand"] and fenced_commits.carried({**passing, "batch": 7}) == {"batch": 7}


@pytest.mark.parametrize("refusals", (0, 3, table_errors.COMMIT_ATTEMPTS - 1))
def test_the_direct_log_is_tried_again_on_the_newest_version(
    writer: FencedCommits, log: list[Commit], refusals: int
) -> None:
    """The retry commits on top of what others committed in between."""
    assert writer.commit(committed_after(refusals, direct_log.VersionTaken, log), POSITION) == refusals + 1
    assert (writer.version, writer.metadata["to"]) == (refusals + 1, 7)


def test_a_statement_is_tried_again_with_a_new_fence(writer: FencedCommits, log: list[Commit]) -> None:
    """The fence is the last version that was read, plus one."""
    fences: list[int] = []
    commit = committed_after(2, lambda: ConcurrentAppendException("others came first"), log)

    def statement(fence: Fence) -> None:
        fences.append(int(fence.options["txnVersion"]))
        commit(fence)

    assert writer.commit(statement, POSITION, is_statement=True) == 3
    assert fences == [1, 2, 3]


@pytest.mark.parametrize("is_statement", (False, True))
def test_a_commit_that_never_comes_first_is_given_up(writer: FencedCommits, log: list[Commit], is_statement: bool) -> None:
    """After the last attempt nothing is in the table."""
    tries: list[int] = []

    def refused(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise ConcurrentAppendException("others came first") if is_statement else direct_log.VersionTaken

    with pytest.raises(errors.CommitConflict, match=f"{table_errors.COMMIT_ATTEMPTS} times"):
        writer.commit(refused, POSITION, is_statement=is_statement)
    assert len(tries) == table_errors.COMMIT_ATTEMPTS
    assert writer.version == 0


def test_an_alter_that_comes_late_ends_no_successor(log: list[Commit], monkeypatch: pytest.MonkeyPatch) -> None:
    """ALTER has no fence. If a process stalls for longer than its lease, its ALTER may commit after the claim of its successor. The
    successor must not take this commit for another claim and stop, too."""
    said_by_session: dict[str, str] = {}

    @contextlib.contextmanager
    def session_confs(_: object, confs: Mapping[str, str]) -> Iterator[None]:
        said_by_session.update(confs)
        yield

    def statement(_: str) -> Mock:
        metadata = claims.parsed(said_by_session.get("spark.databricks.delta.commitInfo.userMetadata"))
        log.append(Commit(log[-1].version + 1, 0, metadata))
        return Mock()

    monkeypatch.setattr(query_execution, "session_confs", session_confs)
    old, new = (
        StatementCommits(Mock(sql=statement), TABLE, identity=claims.WriterIdentity(name, "host", 1, ""), base=log[-1])
        for name in ("old", "new")
    )
    looks: list[Callable[[], object]] = [
        old.check_ownership,
        lambda: new.commit(committed_after(0, Exception, log), POSITION),
    ]
    monkeypatch.setattr(old, "check_ownership", lambda: looks.pop()())
    with pytest.raises(errors.OwnershipLost):
        old.alter("ADD COLUMNS (m BIGINT)")
    assert new.commit(committed_after(1, direct_log.VersionTaken, log), POSITION) == len(log) - 1
    assert [commit.metadata and commit.metadata["writer"] for commit in log] == [None, "new", None, None, "new"]


def test_a_table_that_was_made_again_is_not_this_writers(log: list[Commit], tmp_path: Path) -> None:
    """A new table may have the same version, onto which a commit would succeed. A table that was restored from a copy is the same table."""
    identity = claims.WriterIdentity("w", "host", 1, "")
    writer = FencedCommits(None, TableRef.at(str(tmp_path)), identity=identity, base=log[-1])  # type: ignore[arg-type]
    (tmp_path / "_delta_log").mkdir()

    def write(version: int, metadata: str) -> int:
        path = tmp_path / "_delta_log" / f"{version:020}.json"
        path.write_text(json.dumps({"commitInfo": {"userMetadata": metadata}}) + "\n")
        return version

    def commit(fence: Fence) -> int:
        log.append(Commit(fence.base + 1, 0, claims.parsed(fence.metadata)))
        return write(fence.base + 1, fence.metadata)

    assert writer.commit(commit, POSITION) == 1
    write(1, json.dumps(writer.metadata))
    assert writer.commit(commit, POSITION) == 2
    write(2, json.dumps({**writer.metadata, "writer": "another"}))
    with pytest.raises(errors.OwnershipLost):
        writer.commit(commit, POSITION)
    assert [each.version for each in log] == [0, 1, 2]


@pytest.mark.parametrize(
    "made_again",
    (
        [Commit(0, 0, None)],
        [Commit(0, 0, None), Commit(1, 0, {"writer": "another"})],
        [Commit(0, 0, None), Commit(1, 0, {"writer": "another"}), Commit(2, 0, None)],
        [Commit(0, 0, None), Commit(1, 0, None), Commit(2, 0, None), Commit(3, 0, None)],
    ),
)
def test_a_statement_does_not_go_into_a_table_that_was_made_again(
    writer: FencedCommits, log: list[Commit], made_again: list[Commit]
) -> None:
    """In a catalog the table's name then refers to another table, at any version, whose newest commit may be a compaction."""
    writer.commit(lambda fence: log.append(Commit(1, 0, claims.parsed(fence.metadata))), POSITION, is_statement=True)
    log[:] = made_again
    with pytest.raises(errors.CommitConflict, match="made again"):
        writer.commit(lambda _: log.append(Commit(len(log), 0, None)), POSITION, is_statement=True)
    assert log == made_again


@pytest.mark.parametrize("is_answered", (True, False))
def test_a_statement_that_ran_on_restored_rows_is_not_followed(
    writer: FencedCommits, log: list[Commit], is_answered: bool
) -> None:
    """Delta runs a statement on the newest version, also on that of a RESTORE after the writer's look: the position is not that of its
    rows."""
    writer.commit(committed_after(0, Exception, log), POSITION)

    def statement(fence: Fence) -> None:
        log.extend([Commit(2, 0, None, restored=0), Commit(3, 0, claims.parsed(fence.metadata))])
        if not is_answered:
            raise ConcurrentAppendException("of a retry after the commit")

    for _ in range(2):
        with pytest.raises(errors.CommitConflict, match="restored"):
            writer.commit(statement, POSITION, is_statement=True)
    assert len(log) == 4 and writer.version == 1


def test_an_error_after_the_commit_is_its_answer(writer: FencedCommits, log: list[Commit]) -> None:
    """The log shows that the commit exists: it is not repeated."""
    commit = committed_after(0, direct_log.VersionTaken, log)

    def then_fails(fence: Fence) -> int:
        commit(fence)
        raise direct_log.VersionTaken

    assert writer.commit(then_fails, POSITION) == 1
    assert len(log) == 2


@pytest.mark.parametrize("is_statement", (False, True))
@pytest.mark.parametrize(
    "look_up", (AnalysisException("the store does not answer"), errors.StorageExhausted("full"), OSError())
)
def test_a_commit_that_cannot_be_looked_up_is_unknown(
    writer: FencedCommits, log: list[Commit], monkeypatch: pytest.MonkeyPatch, look_up: Exception, is_statement: bool
) -> None:
    """The store may have taken the commit, but neither its answer nor the log could be read: the commit must not count as refused."""

    def unreadable(*_: object) -> Any:
        raise look_up

    def then_fails(*_: object, **__: object) -> int:
        log.append(Commit(1, 0, {}))
        monkeypatch.setattr(table_history, "since", unreadable)
        raise AnalysisException("the store does not answer")

    with pytest.raises(errors.CommitUnknown) as unknown:
        writer.commit(then_fails, POSITION, is_statement=is_statement)
    assert not isinstance(unknown.value, fenced_commits.REFUSED)
    with pytest.raises(errors.CommitUnknown):
        writer.refuse_unanswered()


def test_a_server_of_spark_connect_that_is_gone_gave_no_answer(writer: FencedCommits, log: list[Commit]) -> None:
    """The server may still complete the request: this process commits nothing after it."""

    def breaks(*_: object) -> None:
        raise SparkConnectGrpcException("connection reset", grpc_status_code=StatusCode.UNAVAILABLE)

    with pytest.raises(SparkConnectGrpcException):
        writer.commit(breaks, POSITION, is_statement=True)
    with pytest.raises(errors.CommitUnknown):
        writer.refuse_unanswered()


def test_a_store_that_did_not_answer_may_still_commit(writer: FencedCommits, log: list[Commit]) -> None:
    """A PUT that timed out may take effect after the log was read. Were the rows committed again on top of it, they would be there twice."""
    late: list[str] = []

    class SocketTimeoutException(AnalysisException):
        """Has the class name of Java's exception."""

    def times_out(fence: Fence) -> int:
        late.append(fence.metadata)
        raise SocketTimeoutException("Read timed out")

    with pytest.raises(errors.StoreUnreachable):
        writer.commit(times_out, POSITION)
    log.append(Commit(1, 0, claims.parsed(late[0])))
    with pytest.raises(errors.CommitUnknown):
        writer.commit(committed_after(1, direct_log.VersionTaken, log), POSITION)
    writer.settle()
    assert (len(log), writer.version, writer.metadata["to"]) == (2, 1, 7)


def test_a_commit_without_answer_lets_no_other_follow(writer: FencedCommits) -> None:
    """It is unknown whether the commit exists until the log is read again."""

    def interrupted(_: Fence) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.commit(interrupted, POSITION)
    with pytest.raises(errors.CommitUnknown):
        writer.refuse_unanswered()


def test_a_commit_that_lands_while_its_writer_gives_the_table_back_is_its_last(log: list[Commit]) -> None:
    """After an interrupt its statement may still run, and commit after the log was read: the release then must not state the position
    before it. Until the log is read nothing else is committed, because the caller does not know that its rows are in the table."""
    writer = StatementCommits(Mock(), TABLE, identity=claims.WriterIdentity("w", "host", 1, ""), base=log[-1])
    under_way: list[str] = []

    def interrupted(fence: Fence) -> int:
        under_way.append(fence.metadata)
        raise KeyboardInterrupt

    def marked(_: object, fence: Fence) -> int:
        while under_way:
            log.append(Commit(log[-1].version + 1, 0, claims.parsed(under_way.pop())))
        if fence.base != log[-1].version:
            raise direct_log.VersionTaken
        log.append(Commit(fence.base + 1, 0, claims.parsed(fence.metadata)))
        return fence.base + 1

    writer.direct = Mock(commit=marked)
    for to in (7, 8):
        with pytest.raises(KeyboardInterrupt):
            writer.commit(interrupted, CommitPosition(to, {"batch": 3}))
        if to == 7:
            log.append(Commit(1, 0, claims.parsed(under_way.pop())))
            writer.check_ownership()
            with pytest.raises(errors.CommitUnknown):
                writer.mark(to=9)
            writer.settle()
    writer.release()
    assert [(at.metadata or {}).get("to") for at in log] == [None, 7, 8, 8]
    assert log[-1].metadata and (log[-1].metadata["batch"], log[-1].metadata["released"]) == (3, True)


def test_an_upsert_that_needs_a_merge_leaves_the_writer_as_it_was(writer: FencedCommits) -> None:
    """It is refused before the log is read."""

    def needs_merge(_: Fence) -> int:
        raise upsert.NeedsMerge

    with pytest.raises(upsert.NeedsMerge):
        writer.commit(needs_merge, POSITION)
    writer.refuse_unanswered()
    assert writer.version == 0


def test_a_claim_of_another_writer_ends_it(writer: FencedCommits, log: list[Commit]) -> None:
    """A newer commit names another writer."""
    log.append(Commit(1, 0, {"writer": "other"}))
    with pytest.raises(errors.OwnershipLost):
        writer.commit(lambda _: None, POSITION, is_statement=True)


def test_a_fact_that_is_refused_each_time_is_not_waited_for_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last wait would be six seconds for nothing."""
    waits: list[float] = []
    monkeypatch.setattr("pipelines.delta.ops_tables.time", SimpleNamespace(sleep=waits.append))

    class Refusing:
        def append(self, _: object) -> None:
            raise ConcurrentAppendException("others came first")

    with pytest.raises(errors.CommitConflict):
        ops_tables._appended(Refusing(), None, TABLE)  # type: ignore[arg-type]
    assert len(waits) == table_errors.COMMIT_ATTEMPTS - 1
