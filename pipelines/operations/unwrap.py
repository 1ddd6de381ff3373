"""Unwraps a file of change events into a file of records: `medallion unwrap`, to try options without Spark or a server.

Each input line gives one output line. Input: JSON that `cdc_core.unwrap.change_event` reads. Output: `{"key": …, "value": …, "headers":
[[name, value], …]}`, `{"dropped": true}`, or the unchanged record if it is no change event. The lines of one collection form one table:
the file is read twice, first for the schema, then for the records.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import os
import pathlib
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Protocol

import orjson

from cdc_core import errors
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.properties.unwrap import UnwrapOptions
from cdc_core.unwrap import new_document_state, printed_records
from cdc_core.unwrap.change_event import Json
from cdc_core.unwrap.new_document_state import DroppedRecord, ExtractedRecord, UnchangedRecord
from pipelines import output_file

STANDARD_STREAM = "-"
Name = str | os.PathLike[str]
_SMT_NAMES = tuple(class_name.rpartition(".")[2] for class_name in unwrap_options.CLASSES)
_Result = ExtractedRecord | UnchangedRecord | DroppedRecord


class _Sink(Protocol):
    """A binary output."""

    def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True)
class UnwrapSummary:
    """How many lines were unwrapped, and how."""

    lines: int = 0
    rows: int = 0
    deletes: int = 0
    dropped: int = 0
    unchanged: int = 0
    rescued: int = 0
    collections: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = f"{_counted(self.rows, 'row')}, {_counted(self.deletes, 'delete')}, {self.dropped} dropped"
        rescued = f"{_counted(self.rescued, 'row')} with rescued values"
        return f"{_counted(self.lines, 'line')}: {counts}, {self.unchanged} unchanged; {rescued}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def run(options_path: Name, in_path: Name, out_path: Name) -> UnwrapSummary:
    """Write the rows of the events in `in_path` to `out_path`; `-` is standard input or output, `.gz` is compressed.

    The options are a JSON object with the SMT's options, or a connector's whole JSON. The output appears whole or not at all: running
    it again is safe. Raises `SettingsError` if the options are wrong, a file cannot be opened, or a line is not JSON (with file and
    line).
    """
    options = load_options(options_path)
    events = os.fspath(in_path)
    with _readable(events) as path, _writable(os.fspath(out_path)) as out:
        tables = printed_records.RecordTables()
        for _, _, result in _results(path, events, options):
            tables.see(result)
        return _written(_results(path, events, options), tables, out)


def load_options(path: Name) -> UnwrapOptions:
    """The options in a file: an object of options, or the unwrap transformation of a connector's JSON."""
    name = os.fspath(path)
    options = _json(_read(name), name)
    if not isinstance(options, dict):
        raise errors.SettingsError(errors.Problem(name, "expected a JSON object with the options"))
    return unwrap_options.parse(_of_connector(options), where=name)


def _of_connector(connector: Mapping[str, object]) -> Mapping[str, object]:
    config = connector.get("config")
    properties = config if isinstance(config, dict) else connector
    aliases = unwrap_options.aliases(properties)
    types = {alias: str(properties.get(f"transforms.{alias}.type", _SMT_NAMES[0])) for alias in aliases}
    smt_aliases = [alias for alias, type_ in types.items() if type_.endswith(_SMT_NAMES)]
    starts = [f"transforms.{alias}." for alias in smt_aliases]
    options = {
        name.removeprefix(start): value for start in starts for name, value in properties.items() if name.startswith(start)
    }
    has_transforms = any(name.startswith("transforms.") and name.count(".") > 1 for name in properties)
    return options if options or has_transforms or "connector.class" in properties else properties


def _written(
    results: Iterator[tuple[str, bytes, _Result]], tables: printed_records.RecordTables, out: _Sink
) -> UnwrapSummary:
    counts = dict.fromkeys(("lines", "rows", "deletes", "dropped", "unchanged", "rescued"), 0)
    collections: dict[str, None] = {}
    for where, line, result in results:
        counts["lines"] += 1
        match result:
            case ExtractedRecord():
                row = tables.row(result)
                collections.setdefault(result.collection)
                counts["deletes" if result.is_delete else "rows"] += 1
                counts["rescued"] += int(printed_records.RESCUED in (row.value or {}))
                out.write(_line(row.to_json(), where))
            case DroppedRecord():
                counts["dropped"] += 1
                out.write(b'{"dropped":true}\n')
            case _:
                counts["unchanged"] += 1
                out.write(_line(printed_records.passed(_json(line, where)), where))
    return UnwrapSummary(**counts, collections=tuple(name for name in collections if name))


def _line(record: Json, where: str) -> bytes:
    try:
        return orjson.dumps(record) + b"\n"
    except TypeError as error:
        raise errors.SettingsError(errors.Problem(where, f"the record cannot be written: {error}")) from error


def _results(path: pathlib.Path, shown: str, options: UnwrapOptions) -> Iterator[tuple[str, bytes, _Result]]:
    """Each line that is not blank, with its place (`file:line`) and its result."""
    with _foreign_errors(shown), _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{shown}:{number}", line, _result(line, f"{shown}:{number}", options)


def _result(line: bytes, where: str, options: UnwrapOptions) -> _Result:
    event = _json(line, where)
    try:
        return new_document_state.extracted(event, options=options)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise errors.SettingsError(errors.Problem(where, f"the event cannot be read: {why}")) from error


def _json(text: bytes, where: str) -> Json:
    try:
        # Some editors write a byte order mark at the beginning of a file.
        return orjson.loads(text.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise errors.SettingsError(errors.Problem(where, f"this is not JSON: {error}")) from error


# --- files -----------------------------------------------------------------------------------------------------------


def _read(path: str) -> bytes:
    with _readable(path) as real, _foreign_errors(path), _opened(real) as file:
        return file.read()


def _opened(path: pathlib.Path) -> io.BufferedIOBase:
    """The file, decompressed if its first bytes are gzip's."""
    with open(path, "rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_compressed else open(path, "rb")


@contextlib.contextmanager
def _readable(path: str) -> Iterator[pathlib.Path]:
    """A path that can be read twice: standard input or a pipe is copied to a temporary file."""
    if path != STANDARD_STREAM and not _is_stream(path):
        with _foreign_errors(path):
            open(path, "rb").close()
        yield pathlib.Path(path)
        return
    with tempfile.NamedTemporaryFile(prefix="medallion-unwrap-") as copy:
        if path == STANDARD_STREAM:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        else:
            with _foreign_errors(path), open(path, "rb") as stream:
                shutil.copyfileobj(stream, copy)
        copy.flush()
        yield pathlib.Path(copy.name)


def _is_stream(path: str) -> bool:
    """Whether a path exists and is not a file: a pipe, a terminal, `/dev/null`, a folder."""
    return os.path.exists(path) and not os.path.isfile(path)


@contextlib.contextmanager
def _writable(path: str) -> Iterator[_Sink]:
    """A file that `path` is replaced by after success; standard output gets the whole output then."""
    if path == STANDARD_STREAM:
        with tempfile.TemporaryFile(prefix="medallion-unwrap-") as file:
            yield file
            file.seek(0)
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    target = pathlib.Path(os.path.realpath(path))
    with _foreign_errors(path), output_file.replacing(target) as raw, _compressing(raw, target) as file:
        yield file


@contextlib.contextmanager
def _compressing(raw: IO[bytes], target: pathlib.Path) -> Iterator[_Sink]:
    if target.suffix != ".gz":
        yield raw
        return
    with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        yield file


@contextlib.contextmanager
def _foreign_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # the last two for a truncated or damaged compressed file
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        problem = errors.Problem(path, why)
        raise (errors.of_file(error, problem) if isinstance(error, OSError) else errors.SettingsError(problem)) from error
