"""Typing documents with helper processes gives the same rows as without them, even if helpers die."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from cdc_core.schema.pins import parse_pins
from cdc_core.typed.decoding import Decoder, TypedTexts
from pipelines import helper_processes
from pipelines.schema import batch_evolution, decoder_processes, looks


@pytest.fixture(autouse=True)
def two_helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[helper_processes.HelperProcesses]:
    """Two helpers on any machine, which get a few documents at a time."""
    helpers = helper_processes.HelperProcesses(2)
    monkeypatch.setattr(helper_processes, "cores", lambda: 2)
    monkeypatch.setattr(helper_processes, "DOCUMENTS", helpers)
    monkeypatch.setattr(helper_processes, "MANY_BYTES", 1)
    monkeypatch.setattr(helper_processes, "PART_BYTES", 50_000)
    monkeypatch.setattr("cdc_core.typed.decoding.SLICE", 20_000)
    yield helpers
    helpers.close()


def document(number: int, rng: random.Random) -> dict[str, Any]:
    odd: list[Any] = [None, True, "text", 5, 2**40, 1.5, {"$numberLong": "7"}, {"$oid": "x"}, [1, "a"], {"a": {"b": 1}}]
    usual = {
        "_id": {"$numberLong": str(number)},
        "name": "n" * rng.randrange(60),
        "lines": [{"sku": f"s{number}", "n": 2}] * 3,
    }
    return usual | ({rng.choice(["name", "lines", "new"]): rng.choice(odd)} if rng.random() < 0.1 else {})


def drawn(count: int, seed: int = 1) -> pa.Array:
    rng = random.Random(seed)
    texts: list[str | None] = [json.dumps(document(number, rng)) for number in range(count)]
    for number in rng.sample(range(count), count // 100):
        texts[number] = rng.choice(
            [None, "{", '{"_id": 1, "name": "a", "name": "b"}', '{"name": "\\ud800"}', '{"name": NaN}']
        )
    return pa.array(texts, pa.string())


def decoder() -> Decoder:
    usual = json.dumps({"_id": {"$numberLong": "1"}, "name": "n", "lines": [{"sku": "s", "n": 2}]})
    texts, places = pa.array([usual]), pa.array(["0" * 24])
    unknown = Decoder(batch_evolution.evolve(looks.LocalDocuments(texts, places)).schema)
    assert unknown.schema.fields
    return unknown


def is_same(one: TypedTexts, other: TypedTexts) -> bool:
    """`new` may mark documents beside a new one too, so only its presence is compared."""
    is_new = (one.new.true_count > 0) == (other.new.true_count > 0)
    return one.rows.equals(other.rows) and is_new and one.refused.equals(other.refused)


def pids(helpers: helper_processes.HelperProcesses) -> list[int]:
    return [each._process.pid for each in helpers._idle if each._process is not None]


def test_rows_are_what_this_process_makes_of_them(two_helpers: helper_processes.HelperProcesses) -> None:
    texts, alone, beside = drawn(10_000), decoder(), decoder()
    helper_processes.DOCUMENTS.start()
    for part in (texts, texts.slice(7, 5000), texts.slice(3, 1), texts.slice(0, 0)):
        assert is_same(decoder_processes.typed(beside, part), alone.typed(part))
    assert len(pids(two_helpers)) == 2


def test_each_schema_has_its_decoder() -> None:
    texts = drawn(5000)
    for pins in ({}, parse_pins({"name": "string"})):
        evolved = batch_evolution.evolve(looks.LocalDocuments(texts, texts)).schema
        assert is_same(decoder_processes.typed(Decoder(evolved, pins), texts), Decoder(evolved, pins).typed(texts))
        assert is_same(decoder_processes.typed(decoder(), texts), decoder().typed(texts))


def test_threads_take_turns() -> None:
    """Collections run concurrently: a thread that finds no free helper types its documents alone."""
    texts = [drawn(5000, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda each: decoder_processes.typed(decoder(), each), texts)]
    assert all(is_same(each, decoder().typed(part)) for each, part in zip(found, texts))


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_a_helper_that_is_killed_takes_nothing_with_it(
    seconds: float, two_helpers: helper_processes.HelperProcesses
) -> None:
    texts, alone = drawn(10_000), decoder().typed(drawn(10_000))
    helper_processes.DOCUMENTS.start()

    def kill(pids: list[int]) -> None:
        time.sleep(seconds)
        for each in pids:
            os.kill(each, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill, pids(two_helpers))
        assert is_same(decoder_processes.typed(decoder(), texts), alone)
        killed.result()
    assert is_same(decoder_processes.typed(decoder(), texts), alone)


def test_nobody_waits_for_a_helper_that_somebody_has_stopped(
    two_helpers: helper_processes.HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_processes, "PART_SECONDS", 0.5)
    texts = drawn(2000)
    decoder_processes.typed(decoder(), texts)
    for each in pids(two_helpers):
        os.kill(each, signal.SIGSTOP)
    assert is_same(decoder_processes.typed(decoder(), texts), decoder().typed(texts))


@pytest.mark.parametrize("executable", ["", "/no/such/python", "/bin/true", "/bin/cat"])
def test_where_none_can_be_started_this_process_types_all(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    texts = drawn(2000)
    helper_processes.DOCUMENTS.start()
    assert is_same(decoder_processes.typed(decoder(), texts), decoder().typed(texts))


def test_an_error_of_this_process_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = decoder()
    monkeypatch.setattr(beside, "part", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder_processes.typed(beside, drawn(2000))
    assert is_same(decoder_processes.typed(decoder(), drawn(2000)), decoder().typed(drawn(2000)))
