"""Helper processes: their answers, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import command_line
from pipelines import helper_processes

REPOSITORY = Path(__file__).parents[2]
SCRIPT = f"import sys; sys.path[0] = {str(REPOSITORY)!r}; from pipelines import helper_processes as own; "


def echoed(given: Any, columns: pa.RecordBatch | None) -> tuple[Any, pa.RecordBatch | None]:
    """Runs in a helper process."""
    print("a library's word")
    if given == "raise":
        raise ValueError(given)
    if given == "sleep":
        time.sleep(60)
    return (os.getpid(), given), columns


class BrokenPickle:
    """An object that can be pickled and not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def broken_pickle(_: Any, columns: pa.RecordBatch | None) -> tuple[Any, pa.RecordBatch | None]:
    """Runs in a helper process."""
    return BrokenPickle(), columns


@pytest.fixture
def helper() -> Iterator[helper_processes.HelperProcess]:
    made = helper_processes.HelperProcess()
    yield made
    made.close()


def pid_of(helper: helper_processes.HelperProcess) -> int:
    helper.start()
    assert helper._process is not None
    return helper._process.pid


def is_there(pid: int) -> bool:
    ends = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < ends:
        time.sleep(0.05)
    return Path(f"/proc/{pid}").exists()


def test_a_helper_answers_one_call_after_the_other(helper: helper_processes.HelperProcess) -> None:
    wide = pa.RecordBatch.from_pydict({"text": ["x" * 3_000_000, None], "list": [[1, 2], []]})
    for columns in (None, wide, wide.slice(1), wide.slice(0, 0)):
        (pid, given), answer = helper.call(echoed, {"a": (1, b"b")}, columns)
        assert (pid, given) == (pid_of(helper), {"a": (1, b"b")})
        assert answer == columns


def test_one_that_is_killed_is_gone_and_the_next_call_starts_another(helper: helper_processes.HelperProcess) -> None:
    def kill() -> None:
        time.sleep(0.5)
        os.kill(pid_of(helper), signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool, pytest.raises(helper_processes.HelperGone, match="-9"):
        pool.submit(kill)
        helper.call(echoed, "sleep")
    with pytest.raises(helper_processes.HelperGone):
        helper.call(echoed, "raise")
    before = pid_of(helper)
    os.kill(before, signal.SIGKILL)
    assert helper._process is not None
    helper._process.wait()
    (pid, _), _ = helper.call(echoed, "anew")
    assert pid not in (before, os.getpid())


def test_what_is_left_of_an_answer_is_none_to_the_next_call(helper: helper_processes.HelperProcess) -> None:
    with pytest.raises(helper_processes.HelperGone):
        helper.call(broken_pickle, None, pa.RecordBatch.from_pydict({"number": [1]}))
    (_, given), columns = helper.call(echoed, "next")
    assert (given, columns) == ("next", None)


def test_one_that_is_about_to_end_is_sent_nothing(
    helper: helper_processes.HelperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been idle for almost `IDLE_SECONDS`, and may end before it reads what it is sent."""
    before, first, second = pid_of(helper), helper.call(echoed, 1)[0], helper.call(echoed, 2)[0]
    monkeypatch.setattr(helper_processes, "IDLE_SECONDS", 0)
    (pid, given), _ = helper.call(echoed, 3)
    assert first == (before, 1) and second == (before, 2) and given == 3 and pid != before


def test_nobody_waits_for_an_answer_when_all_is_to_stop(helper: helper_processes.HelperProcess) -> None:
    stopped = threading.Event()
    pid = pid_of(helper)
    threading.Timer(0.3, stopped.set).start()
    with pytest.raises(helper_processes.HelperGone):
        helper.call(echoed, "sleep", stopped=stopped)
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_takes_nothing_is_gone(helper: helper_processes.HelperProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_processes, "TRANSFER_SECONDS", 1)
    os.kill(pid_of(helper), signal.SIGSTOP)
    with pytest.raises(helper_processes.HelperGone):
        helper.call(echoed, 1, pa.RecordBatch.from_pydict({"text": ["x" * 30_000_000]}))


def test_no_command_waits_for_one_that_hangs_at_its_end() -> None:
    """The threads of a layer that was stopped are joined when Python ends: for minutes, where one of them sends to a stopped helper."""
    pool = helper_processes.HelperProcesses(1)
    columns = pa.RecordBatch.from_pydict({"text": ["x" * 30_000_000]})
    with pool.borrowed(1) as (helper,), ThreadPoolExecutor(1) as threads:
        os.kill(pid_of(helper), signal.SIGSTOP)
        called = threads.submit(helper.call, echoed, 1, columns)
        time.sleep(0.5)
        assert command_line.main(["no-such-command"]) == 2
        with pytest.raises(helper_processes.HelperGone):
            called.result(20)
        (_, given), _ = helper.call(echoed, "next")
        assert given == "next"
    pool.close()


@pytest.mark.parametrize("executable", ["", "/no/such/python", "/bin/true"])
def test_one_that_cannot_be_started_is_gone(
    executable: str, monkeypatch: pytest.MonkeyPatch, helper: helper_processes.HelperProcess
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(helper_processes.HelperGone):
        helper.call(echoed, "a", pa.RecordBatch.from_pydict({"text": ["x" * 3_000_000]}))


def test_no_more_are_used_than_there_may_be() -> None:
    helpers = helper_processes.HelperProcesses(3)
    with helpers.borrowed(2) as some, helpers.borrowed(2) as others, helpers.borrowed(1) as none:
        assert (len(some), len(others), len(none)) == (2, 1, 0)
    with contextlib.suppress(ZeroDivisionError), helpers.borrowed(1):
        raise ZeroDivisionError
    with helpers.borrowed(5) as all_of_them:
        assert set(all_of_them) == {*some, *others}
        first = pid_of(all_of_them[0])
    helpers.close()
    assert not is_there(first)


def test_what_is_shared_is_done_once_and_in_order_whatever_becomes_of_helpers() -> None:
    """A task of a helper that is gone is done by this process; an error in this process ends all tasks."""
    done: list[int] = []
    has_begun = threading.Event()

    def here(task: int) -> tuple[str, int]:
        assert has_begun.wait(20)
        time.sleep(0.002)
        done.append(task)
        return "here", task

    def by_helper(helper: helper_processes.HelperProcess, task: int) -> tuple[str, int]:
        if task == 41:
            raise helper_processes.HelperGone
        has_begun.set()
        time.sleep(0.001)
        done.append(task)
        return "helper", task

    helpers = [helper_processes.HelperProcess(), helper_processes.HelperProcess()]
    listed = helper_processes.ListedTasks
    numbered = helper_processes.shared(listed(range(60)), here, by_helper, helpers)
    found = [each for number, each in numbered]
    assert [number for number, _ in numbered] == [task for _, task in found] == sorted(done) == [*range(60)]
    assert found[0] == ("here", 0) and found[59] == ("helper", 59) and found[41] == ("here", 41)
    assert helper_processes.shared(listed([1, 2]), here, by_helper, []) == [(0, ("here", 1)), (1, ("here", 2))]
    assert helper_processes.shared(listed([]), here, by_helper, helpers) == []
    with pytest.raises(IndexError):
        helper_processes.shared(listed([[1], []]), lambda task: task[0], lambda helper, task: task[1], helpers)


def end_of(begins: str, parent: str) -> int:
    """The exit code of a helper that gets no calls."""
    ours, theirs = socket.socketpair()
    script = f"{SCRIPT}{begins}; own.main({theirs.fileno()}, {parent})"
    with ours, theirs, subprocess.Popen([sys.executable, "-c", script], pass_fds=[theirs.fileno()]) as process:
        return process.wait(20)


def test_one_ends_when_it_has_nothing_to_do() -> None:
    assert end_of("own.IDLE_SECONDS = 0.1", "own.os.getppid()") == 0


def test_one_whose_parent_was_gone_before_it_began_ends() -> None:
    assert end_of("pass", "1 << 22") == 1


@pytest.mark.parametrize("is_busy", [False, True])
def test_none_outlives_a_process_that_is_killed(tmp_path: Path, is_busy: bool) -> None:
    """And a file in the working directory that shadows a standard module does not affect it."""
    (tmp_path / "pickle.py").write_text("raise SystemExit(3)")
    # `dict.fromkeys` of two keys unpacks like an answer: it shows that the helper has imported its modules and answers.
    asks = "assert helper.call(dict.fromkeys, ['answer', None]) == ('answer', None)"
    waits = "import functools, select; helper.call(functools.partial(select.select, [], []), [])" if is_busy else "input()"
    script = SCRIPT + f"helper = own.HelperProcess(); {asks}; print(helper._process.pid, flush=True); {waits}"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        beside = int(parent.stdout.readline())
        assert Path(f"/proc/{beside}").exists()
        time.sleep(0.2 if is_busy else 0)
        parent.kill()
    assert not is_there(beside)
