"""The state of models as `status` shows it: from tables alone, without a query."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import bson
import pytest

from pipelines.delta import local_log
from pipelines.delta import tables as delta
from pipelines.gold import models
from pipelines.gold.model_inputs import ModelInputs
from pipelines.operations import model_status
from tests.harness import without_spark
from tests.harness.without_spark import SPARK, Hop

TEXTS = {
    "a_totals": "SELECT * FROM {{ ref('cases.t') }}",
    "b_never": "SELECT * FROM {{ ref('a_totals') }}",
    "c_of_never": "SELECT * FROM {{ ref('b_never') }}",
    "d_view": "{{ config(materialized='view') }} SELECT * FROM {{ ref('cases.t') }}",
}


def test_a_model_that_is_behind_or_waits_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a gate refuses, or that waits for a table, must not look like one that is up to date."""
    monkeypatch.setattr(local_log, "size", lambda _: local_log.TableSize(1, 1))  # there are no checksum files
    folder = tmp_path / "models"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.sql").write_text(text)
    with without_spark.running():
        hop = Hop(tmp_path)
        settings = replace(hop.settings, gold=replace(hop.settings.gold, models=str(folder)))
        hop.append((1, bson.encode({"_id": 1})))
        hop.run()
        layout = delta.layout(settings.lakehouse)
        model = next(each for each in models.ordered(SPARK, settings).models if each.name == "a_totals")
        table = layout.model(model.name)
        without_spark.create(SPARK, table, columns="n BIGINT")
        made = {
            "to": ModelInputs(SPARK, layout, {}, settings.name).positions(model),
            "model": model.digest,
            "pipeline": settings.name,
        }
        place = local_log.folder(table)
        assert place is not None
        without_spark.write(place, 1, [], userMetadata=json.dumps(made | {"writer": "w"}))
        (commit, *_) = local_log.commits(place)
        now_ms = commit.timestamp_ms + 7000
        first = model_status.read(SPARK, settings, now_ms=now_ms)
        hop.append((2, bson.encode({"_id": 2})))
        hop.run()
        later = model_status.read(SPARK, settings, now_ms=now_ms)
        (folder / "e_wrong.sql").write_text("SELECT {{ nothing }}")
        *_, wrong = model_status.read(SPARK, settings, now_ms=now_ms)
    assert {each.name: (each.state, each.age_seconds) for each in first} == {
        "a_totals": ("current", 7),
        "b_never": ("behind", None),
        "c_of_never": ("waits", None),
        "d_view": ("view", None),
    }
    assert {each.name: each.state for each in later}["a_totals"] == "behind"
    assert [each.problem.split(":")[1] for each in later if each.problem] == [
        " behind, made 7 s ago",
        " behind, never made",
        " waits, never made",
    ]
    assert wrong.state == "failed" and "e_wrong.sql" in wrong.name
    assert model_status.read(SPARK, hop.settings, now_ms=now_ms) == ()
