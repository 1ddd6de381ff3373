"""Configures a command's log: one line per record on stderr. Only entry points call it."""

from __future__ import annotations

import logging
import sys
import time

from pipelines import signs
from pipelines.terminal.live_lines import PROGRESS

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_LIBRARIES = {
    "py4j": logging.CRITICAL,
    "great_expectations": logging.CRITICAL,
    "pymongo": logging.WARNING,
    "pyspark": logging.WARNING,
    "SQLQueryContextLogger": logging.CRITICAL,
    "DataFrameQueryContextLogger": logging.CRITICAL,
}
"""The minimum levels of libraries: py4j and PySpark also log the errors that they raise, with tracebacks; Great Expectations logs data."""


def configure(*, level: int = logging.INFO) -> None:
    """Log every record of this process to stderr, one line each, and those of libraries from their levels in `_LIBRARIES`.

    Long work shows its progress at any `level`.
    """
    handler = _Stderr()
    handler.setFormatter(LogLine())
    handler.addFilter(_is_wanted)
    handler.addFilter(lambda record: record.levelno >= level or record.msg == PROGRESS)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name, least_level in _LIBRARIES.items():
        logging.getLogger(name).setLevel(least_level)
    logging.captureWarnings(True)


class _Stderr(logging.StreamHandler):
    """Writes to the stderr of the moment: a live line replaces it while it is shown, so that log lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether a record is at its library's level; needed because some libraries set the levels of single loggers on import, and
    py4j also writes to the root logger.
    """
    if record.name == "root" and record.module == "java_gateway":  # py4j reports Ctrl-C there
        return False
    return record.levelno >= _LIBRARIES.get(record.name.partition(".")[0], logging.NOTSET)


class LogLine(logging.Formatter):
    """`<UTC time> <level> <module> <event> key=value …`, with the pairs from `extra`.

    Names the class of an exception; only `--debug` shows tracebacks.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = signs.escaped(record.getMessage())
        pairs = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info and record.exc_info[0]:
            pairs["error"] = record.exc_info[0].__name__
        words = [f"{name}={_value(value)}" for name, value in pairs.items()]
        level = record.levelname.lower()
        return " ".join([f"{moment}.{int(record.msecs):03d}Z", level, record.name, message, *words])


def _value(value: object) -> str:
    text = signs.escaped(str(value))
    if text and not {" ", '"'} & {*text}:
        return text
    return '"' + text.translate(_QUOTED) + '"'


_QUOTED = str.maketrans({'"': r"\"", "\\": r"\\"})
"""As readers of such pairs, for example Loki's `logfmt`, expect them between quotes."""
