"""The command `medallion`: reads arguments and settings, runs one pipeline, and returns an exit code.

    0   done
    2   settings or arguments are wrong
    3   a person must decide
    75  temporary, try again
    1   a bug
    130 stopped at once

A command's modules are imported when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cdc_core import errors
from jobs.commands import inspection, layers, operations, tools
from pipelines import signs

BUG, WRONG, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises nothing."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        return medallion.main(argv, prog_name="medallion", standalone_mode=False) or 0
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        return WRONG
    except errors.MedallionError as error:
        return _failed(argv, error)
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except Exception as error:
        if _is_of_interrupt(error):
            return _interrupted()
        medallion_error = _translated(error)
        if medallion_error is not None:
            return _failed(argv, medallion_error)
        _say(f"this is a bug: {type(error).__name__} {_place(error)}; use --debug to see the traceback")
        return _debugged(argv, BUG)
    finally:
        # A layer that was stopped may wait for one that hangs, and the process would wait for the layer.
        if "pipelines.helper_processes" in sys.modules:
            from pipelines import helper_processes

            helper_processes.kill_all()


def _open_streams() -> None:
    """Make the standard streams safe to use.

    Opens closed ones (`>&-`) on the null device, and lets stdout escape characters that its encoding lacks, as stderr does: a name or a
    table's frame must not end a command.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r+"))
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _piped(stream))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Pipe(io.FileIO):
    """A pipe or terminal that discards output once its reader has ended, as `head` does, or its window was closed."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return super().write(data)


def _piped(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The stream, over a `_Pipe` if it writes to a pipe or a terminal."""
    try:
        descriptor = stream.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode) or stream.isatty()
    except (OSError, ValueError):
        return stream
    if not is_pipe or isinstance(getattr(stream.buffer, "raw", None), _Pipe):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,  # `python -u` has no buffer, and this stream one
        write_through=stream.write_through,
    )


def _interrupted() -> int:
    _say("stopped at once; committed data is safe, the rest is read again at the next start")
    return INTERRUPTED


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Whether the error followed an interrupt, which ends Spark so that its calls fail."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _translated(error: Exception) -> errors.MedallionError | None:
    """Spark's error, translated; without Spark only a missing package, or a full disk, which the command's output met."""
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if "pyspark" not in sys.modules:
        is_full = isinstance(error, OSError) and error.errno in errors.FULL
        return errors.StorageExhausted("no space left for the output; free some space and start again") if is_full else None
    from pipelines.spark import failures as spark_failures

    return spark_failures.translated(error)


def _missing(error: ModuleNotFoundError) -> errors.MedallionError | None:
    """For a package that is not installed, what to install; None for a module of our own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "cdc_core", "jobs", "pipelines"):
        return None
    extra = "[spark]" if package in _OF_SPARK else ""
    provider = " (Databricks provides it)" if extra else ""
    return errors.DecisionNeeded(
        f"the Python package {package} is missing in {sys.prefix}: pip install 'mongo-medallion{extra}'{provider}"
    )


_OF_SPARK = frozenset({"pyspark", "py4j", "delta", "pandas"})
"""The packages of the extra `spark`."""


def job(verb: str, *options: str) -> None:
    """Run the command `verb` for a file under `jobs/`, with the process' arguments, and exit with its exit code."""
    code = main([verb, *options, *sys.argv[1:]])
    if code:
        sys.exit(code)


EXAMPLES = """\b
Examples:
  medallion demo                                see it work, with an embedded MongoDB
  medallion check   --config conf/shop.yml      check settings, server and privileges
  medallion run     --config conf/shop.yml      capture, silver and gold, until Ctrl-C
  medallion status  --config conf/shop.yml      position and lag of each layer
  medallion import-debezium connector.json      convert a Debezium connector's settings

\b
Exit codes: 0 done, 2 settings or arguments are wrong, 3 a person must decide,
75 temporary (try again), 1 a bug, 130 stopped at once.
"""


# In the order in which users need them; `--help` shows it.
COMMANDS: tuple[click.Command, ...] = (
    tools.demo,
    inspection.check,
    layers.capture,
    layers.silver,
    layers.gold,
    inspection.show_cut,
    inspection.check_models,
    layers.run,
    inspection.status,
    inspection.verify,
    operations.maintain,
    inspection.schema,
    operations.send_signal,
    operations.quarantine,
    operations.rebuild,
    operations.repair,
    tools.unwrap,
    tools.import_debezium,
)


class _InOrder(click.Group):
    """Lists commands in the order of `COMMANDS`, with their whole first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command.get_short_help_str(limit=200)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _show_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    from importlib import metadata

    if wanted:
        try:
            click.echo(f"mongo-medallion {metadata.version('mongo-medallion')}")
        except metadata.PackageNotFoundError:
            click.echo("mongo-medallion, from a checkout that is not installed")
        ctx.exit()


@click.group(
    cls=_InOrder,
    commands=COMMANDS,
    help="MongoDB change data capture into a Delta Lake medallion.\n\n"
    "A capture service appends every change event to one bronze table; silver applies them to one table per collection; "
    "gold contains the current documents for analysts. Each table stores its own position: any command can be killed "
    "and started again.",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def medallion() -> None:
    pass


def _say(message: str) -> None:
    text = "\n".join(map(signs.escaped, message.split("\n")))
    with contextlib.suppress(OSError):  # a closed terminal or a full disk must not change the exit code
        click.echo(f"medallion: {text}", err=True)


_GENERAL = (errors.MedallionError, errors.SettingsError, errors.DecisionNeeded, errors.Temporary, errors.CollectionsFailed)
"""Errors whose messages alone say what to do: for the others docs/operations.md has advice, under their names."""


def _failed(arguments: Sequence[str], error: errors.MedallionError) -> int:
    """Say what happened, with the error's name; returns the exit code."""
    name = "" if type(error) in _GENERAL else f" [{type(error).__name__}]"
    _say(f"{error}{name}")
    return _debugged(arguments, error.exit_code)


def _place(error: BaseException) -> str:
    """Where the project's code raised, as `at silver.py:123`; without the error's message, which may contain a document."""
    packages = [Path(__file__).resolve().parents[1] / name for name in ("cdc_core", "pipelines", "jobs")]
    frames = traceback.extract_tb(error.__traceback__)
    our_frames = [
        frame for frame in frames if any(Path(frame.filename).resolve().is_relative_to(package) for package in packages)
    ]
    last_frame = (our_frames or frames)[-1]
    return f"at {Path(last_frame.filename).name}:{last_frame.lineno}"


def _debugged(arguments: Sequence[str], code: int) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    return code


if __name__ == "__main__":
    sys.exit(main())
