"""Whether two commits of one version exclude each other, on a disk whose file system this process sees."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_core import errors
from pipelines.delta import store_exclusion
from pipelines.spark import log_store
from pipelines.spark import session as sparks


@pytest.fixture(autouse=True)
def own_log_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparks, "is_classic", lambda _: True)
    monkeypatch.setattr(store_exclusion, "_log_store", lambda *_: log_store.LOCAL)
    monkeypatch.setattr(store_exclusion, "_PROVEN", set())


def test_a_disk_with_hard_links_is_proven_and_left_as_it_was(tmp_path: Path) -> None:
    """The table's folder need not exist yet."""
    spark: Any = None
    store_exclusion.check(spark, f"file://{tmp_path}/lake/bronze")
    assert not list(tmp_path.iterdir())


def test_a_disk_without_hard_links_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mounted bucket has no hard links, and the second of two commits would replace the first."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "link", refused)
    spark: Any = None
    with pytest.raises(errors.ConcurrentWritesUnsafe, match="no hard links"):
        store_exclusion.check(spark, f"{tmp_path}/lake/bronze")
    assert not list(tmp_path.iterdir())


def test_a_bucket_under_the_scheme_of_aws_is_told_spark_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside EMR no Spark has a file system for `s3://`, so neither a log store nor a single driver would help."""
    spark: Any = SimpleNamespace(conf={})
    monkeypatch.setattr(store_exclusion, "_log_store", lambda *_: "")
    with pytest.raises(
        errors.ConcurrentWritesUnsafe, match=r"Write s3a:// in lakehouse.root; only on EMR.*single_driver: true"
    ):
        store_exclusion.prove(spark, "s3://company-lake/shop/bronze/shop")
