"""A batch's documents and its collection's schema, looked at by the process that runs the job."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from cdc_core.properties.unwrap import UnwrapOptions
from cdc_core.schema import document_schema
from pipelines.schema import log as schemas


def test_collections_of_one_schema_are_looked_at_side_by_side() -> None:
    """Of tenants, whose collections are alike, in the threads of one service: each sees its own documents."""

    def names(tenant: int) -> list[set[str]]:
        found = []
        for turn in range(15):
            texts = [json.dumps({"_id": n, f"t{tenant}": {f"f{turn}_{n % 50}": n}}) for n in range(150)]
            places = pa.array([f"{n:024x}" for n in range(len(texts))])
            evolution = schemas.evolve_here(
                pa.array(texts), places, current=document_schema.EMPTY, options=UnwrapOptions(), pins={}
            )
            found.append(set(re.findall(r"f[0-9]+_[0-9]+", evolution.schema.to_json())))
        return found

    with ThreadPoolExecutor(4) as pool:
        for tenant, found in enumerate(pool.map(names, range(4))):
            for turn, seen in enumerate(found):
                assert seen == {f"f{turn}_{n}" for n in range(50)}, tenant
