"""Records all resume tokens of a database's collections from a raw change stream, independently of the project.

    python -m tests.harness.recorder URI --database shop --collections customers,orders --out tokens.jsonl

It shares only the server with the project. It writes `ready` to stdout when its stream is open. After SIGTERM it reads up to the time
of the signal, so that the file has all earlier changes. Each line of the file is `[token, operation, collection, seconds, increment]`,
in stream order.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bson import Timestamp
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

DOCUMENT_CHANGES = ("insert", "update", "replace", "delete")


def record(uri: str, *, database: str, collections: Sequence[str], out: Path, stopped: threading.Event) -> int:
    """Record until `stopped` is set and the stream has passed that time; returns the number of tokens."""
    pipeline = [
        {"$match": {"ns.coll": {"$in": list(collections)}, "operationType": {"$in": list(DOCUMENT_CHANGES)}}},
        {"$project": {"ns": 1, "operationType": 1, "clusterTime": 1}},
    ]
    raw = CodecOptions(document_class=RawBSONDocument, datetime_conversion=DatetimeConversion.DATETIME_MS)
    count = 0
    with MongoClient(uri, retryReads=True) as client, out.open("a", buffering=1) as file:  # others read it meanwhile
        db = client.get_database(database, codec_options=raw)
        end: Timestamp | None = None
        with db.watch(pipeline, max_await_time_ms=200, show_expanded_events=True) as stream:
            print("ready", flush=True)
            while True:
                if end is None and stopped.is_set():
                    end = client.admin.command("ping")["operationTime"]
                event = stream.try_next()
                if event is not None:
                    file.write(_line(event))
                    count += 1
                elif end is not None and _reached(stream.resume_token["_data"], end):
                    return count
    return count


def _line(event: Any) -> str:
    time = event["clusterTime"]
    return json.dumps([event["_id"]["_data"], event["operationType"], event["ns"]["coll"], time.time, time.inc]) + "\n"


def _reached(token: str, end: Timestamp) -> bool:
    """Whether the token's cluster time, which is in its first digits, is at or after `end`."""
    return (int(token[2:10], 16), int(token[10:18], 16)) >= (end.time, end.inc)


def tokens(path: Path) -> list[str]:
    """The tokens of a recording, in stream order."""
    return [json.loads(line)[0] for line in path.read_text().rstrip("\n").split("\n")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.recorder", description=__doc__.splitlines()[0])
    parser.add_argument("uri")
    parser.add_argument("--database", required=True)
    parser.add_argument("--collections", required=True, type=lambda text: text.split(","))
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args(argv)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    print(
        record(
            arguments.uri,
            database=arguments.database,
            collections=arguments.collections,
            out=arguments.out,
            stopped=stopped,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
