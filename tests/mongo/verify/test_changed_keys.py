"""Changes after bronze's position, which a verification reads from the server."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.mongodb import document_keys
from pipelines.mongodb import server as mongodb_server


@pytest.mark.parametrize("how", ["$out", "dropTarget"])
def test_a_collection_that_another_one_replaced_is_not_the_one_that_bronze_knows(
    mongo: Any, database: Any, how: str
) -> None:
    """The only event about it has the other namespace. Otherwise each document would be reported as a difference."""
    for name in ("orders", "others"):
        database[name].insert_one({"_id": 1})
    with database.watch() as stream:
        stream.try_next()
        token = stream.resume_token["_data"]
    if how == "$out":
        list(database.others.aggregate([{"$out": "orders"}]))
    else:
        database.others.rename("orders", dropTarget=True)
    until = mongodb_server.operation_time(mongo)
    with pytest.raises(document_keys.NamespaceGone):
        document_keys.changed_keys(mongo, database.name, "orders", behind=token, until=until, limit=10)
    database.more.insert_one({"_id": 2})
    until = mongodb_server.operation_time(mongo)
    assert len(document_keys.changed_keys(mongo, database.name, "more", behind=token, until=until, limit=10)) == 1
