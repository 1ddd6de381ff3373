"""Spark's settings for a lakehouse in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pipelines.spark import conf as spark_conf
from pipelines.spark import jvm, stores
from pipelines.spark import session as sparks


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[stores.ObjectStore]:
    """The stores that sessions were started for."""
    found: list[stores.ObjectStore] = []
    monkeypatch.setattr(sparks, "_active", lambda: None)
    monkeypatch.setattr(sparks, "is_given", lambda: False)
    monkeypatch.setattr(sparks, "_apply", lambda *_: None)
    monkeypatch.setattr(jvm, "launch", lambda *_, store, **__: found.append(store))
    return found


@pytest.mark.parametrize(
    ("conf", "named"),
    (
        ({}, {"spark.delta.logStore.file.impl", "spark.delta.logStore.s3a.impl"}),
        ({stores.LOG_STORE_OF_ALL: "a.LogStore"}, set()),
    ),
)
def test_a_log_store_for_all_schemes_stands_alone(launched: list[Any], conf: dict[str, str], named: set[str]) -> None:
    """Delta does not start if one is also set for a scheme."""
    sparks.session("shop", conf=conf, root="s3a://lake/house")
    assert set(launched[0].log_stores()) == named
    assert launched[0].packages == stores.of("s3a://lake/house").packages


@pytest.mark.parametrize("settings", (spark_conf.LOCAL, spark_conf.CAPTURE), ids=("silver", "capture"))
def test_what_is_uploaded_fits_into_memory(settings: Mapping[str, str]) -> None:
    """Each task on 32 cores writes a file: the blocks in upload and the one being filled, in as much direct memory as heap."""
    conf = stores.of("s3a://lake/house").conf
    block = int(conf.get("spark.hadoop.fs.s3a.multipart.size", "64M").removesuffix("M"))
    blocks = int(conf.get("spark.hadoop.fs.s3a.fast.upload.active.blocks", "4")) + 1
    assert 5 <= block, "S3 takes no smaller part"
    assert 32 * blocks * block <= 1024 * int(settings["spark.driver.memory"].removesuffix("g"))
