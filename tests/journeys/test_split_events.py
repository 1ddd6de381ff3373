"""Events above 16 MB from a server that can split them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.demo import embedded_mongodb
from pipelines.mongodb import client as mongodb
from tests.conftest import StartServer
from tests.harness import newer_mongodb
from tests.harness.captures import check_numbers, once, pipeline, rows


@pytest.mark.timeout(300)
def test_a_large_event_is_put_together_again(spark: Any, start_mongodb: StartServer, lakehouse: Path) -> None:
    """The update of a 10 MB document with pre-image is one complete event. The capture continues after it, also if the document has been
    deleted."""
    server = start_mongodb(embedded_mongodb.ServerOptions(binary=newer_mongodb.binary()))
    more = {
        "capture.mode": "change_streams_update_full_with_pre_image",
        "cursor.oversize.handling.mode": "split",
    }
    found = pipeline(server.uri, lakehouse, "shop", **more)
    with contextlib.closing(mongodb.client(server.uri)) as client:
        assert tuple(client.server_info()["versionArray"][:3]) >= (6, 0, 9)
        client.shop.create_collection("large", changeStreamPreAndPostImages={"enabled": True})
        client.shop.large.insert_one({"_id": 1, "version": 0, "pad": "x" * 10_000_000})
        once(spark, found)
        client.shop.large.update_one({"_id": 1}, {"$set": {"version": 1}})
        once(spark, found)
        client.shop.large.insert_one({"_id": 2})
        client.shop.large.delete_one({"_id": 1})
        once(spark, found)
    landed = rows(spark, found)
    check_numbers(landed)
    landed = [row for row in landed if row.kind == "change"]
    assert [(row.op, row.key) for row in landed] == [("u", "1"), ("c", "2"), ("d", "1")]
    update = landed[0]
    assert (json.loads(update.before)["version"], json.loads(update.after)["version"]) == (0, 1)
    assert len(update.before) > 10_000_000 and len(update.after) > 10_000_000
    assert json.loads(update.updateDescription.updatedFields) == {"version": 1}
