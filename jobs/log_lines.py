"""The log of a command: one line an event, on stderr. Only entry points configure it."""

from __future__ import annotations

import logging
import sys
import time

from pipelines.terminal import signs

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_LIBRARIES = {
    "py4j": logging.CRITICAL,
    "great_expectations": logging.CRITICAL,
    "pymongo": logging.WARNING,
    "pyspark": logging.WARNING,
    "SQLQueryContextLogger": logging.CRITICAL,
    "DataFrameQueryContextLogger": logging.CRITICAL,
}
"""py4j and PySpark log what they raise as well, with a traceback; Great Expectations what its results hold."""


def configure(*, level: int = logging.INFO) -> None:
    """Send every event of this process to stderr, one line each; libraries speak from warnings on, or not at all."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLine())
    handler.addFilter(_is_wanted)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name, least in _LIBRARIES.items():
        logging.getLogger(name).setLevel(least)
    logging.captureWarnings(True)


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether a line of a library is to be seen; some give single loggers of theirs a level of their own when they are
    imported."""
    return record.levelno >= _LIBRARIES.get(record.name.partition(".")[0], logging.NOTSET)


class LogLine(logging.Formatter):
    """`<UTC time> <level> <module> <event> key=value …`: what `extra` held comes as the pairs.

    A traceback is left to `--debug`; of an exception the line names the class.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = signs.escaped(record.getMessage())
        pairs = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info and record.exc_info[0]:
            pairs["error"] = record.exc_info[0].__name__
        words = [f"{name}={_value(value)}" for name, value in pairs.items()]
        level = record.levelname.lower()
        return " ".join([f"{moment}.{int(record.msecs):03d}Z", level, record.name, event, *words])


def _value(value: object) -> str:
    text = signs.escaped(str(value))
    return f'"{text}"' if " " in text or text == "" else text
