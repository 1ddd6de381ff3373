from __future__ import annotations

import json
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
from bson.code import Code

from cdc_core.bronze import columns
from cdc_core.bronze import event_rows as events
from cdc_core.extended_json import raw_bson
from cdc_core.properties import types as values
from cdc_core.signals import signal as signals
from cdc_core.stream import patterns
from pipelines.channels import signals as channels
from pipelines.delta.local_log import Commit
from tests.harness import pace

NAMESPACES = ("shop.orders", "shop.stock", "other.orders")


@pytest.mark.parametrize(
    ("data", "chosen"),
    [
        ({"data-collections": ["shop.orders"]}, ("shop.orders",)),
        ({"data-collections": ["shop\\..*"]}, ("shop.orders", "shop.stock")),
        ({"data-collections": [".*orders", "nothing"], "type": "BLOCKING"}, ("shop.orders", "other.orders")),
        ({"data-collections": "SHOP.stock"}, ("shop.stock",)),
        ({"data-collections": ["shop.stock"], "additional-conditions": None, "type": None}, ("shop.stock",)),
        ({"data-collections": ["shop.stock"], "additional-condition": "", "sent-by": "ops"}, ("shop.stock",)),
    ],
)
def test_collections_are_regular_expressions(data: dict[str, object], chosen: tuple[str, ...]) -> None:
    request = signals.request(signals.Signal("1", "execute-snapshot", data))
    assert request.chosen(NAMESPACES) == chosen


def test_many_expressions_are_compared_with_many_names_together() -> None:
    """Each with each, a thousand with five thousand take half a minute, in which the capture commits nothing."""
    names = [f"tenant_{number % 200}.orders_{number}" for number in range(2000)]
    expressions = [rf"tenant_{number}\..*[0-9]+" for number in range(400)]
    misspelt = [f"tenant_{number}.ordrs" for number in range(800)]
    conditions = [{"data-collection": text, "filter": json.dumps({"a": text})} for text in expressions]
    data = {"data-collections": [*misspelt, *expressions[:300]], "additional-conditions": conditions}
    request = signals.request(signals.Signal("1", "execute-snapshot", data))
    with pace.within(2):
        assert request.chosen(names) == tuple(names)
        assert request.without_match(names) == (*misspelt, *expressions[200:])
        assert request.filters(names) == {name: json.dumps({"a": rf"{name.split('.')[0]}\..*[0-9]+"}) for name in names}


def test_names_of_collections_are_not_searched() -> None:
    """Thousands of names, of which each is a collection, take seconds when each is searched among all."""
    names = [f"tenant_{number % 200}.orders_{number}" for number in range(2000)]
    request = signals.request(signals.Signal("1", "execute-snapshot", {"data-collections": [*names, "shop.misspelt"]}))
    with pace.within(0.3):
        assert request.without_match(names) == ("shop.misspelt",)


def test_names_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may name thousands of collections, among thousands: one by one, each with each, that takes many seconds."""
    named = signals.request(signals.Signal("1", "execute-snapshot", {"data-collections": [*NAMESPACES]}))
    monkeypatch.setattr(patterns.Pattern, "matches", None)
    assert named.chosen(NAMESPACES) == tuple(NAMESPACES) and not named.without_match(NAMESPACES)


@pytest.mark.parametrize("name", ("shop.orders", "shop.a.b", "shop.a+b", "shop.$x", "shop.it's (new), {2,3}", "shop.a,b"))
def test_the_advised_command_reads_one_collection_anew(name: str) -> None:
    """Pasted into a shell, it selects these collections and no others."""
    verb, type_, *options = shlex.split(signals.snapshot_command(name, "shop.stock"))[1:]
    assert (verb, type_, set(options[::2])) == ("signal", "execute-snapshot", {"--data-collections"})
    chosen = [each for option in options[1::2] for each in values.split_top_level(option, ",")]
    request = signals.request(signals.Signal("1", type_, {"data-collections": chosen}))
    known = [name, name.replace(".", "_").replace("_", ".", 1), "shop.a", "shop.aab", "shop.b", "shop.stock"]
    assert set(request.chosen(known)) == {name, "shop.stock"}


def test_a_document_of_the_source_is_a_signal() -> None:
    """Its data is a document or its JSON text, in the field data or payload."""
    data = {"data-collections": ["shop.orders"]}
    for given in (
        {"data": data},
        {"payload": data},
        {"data": json.dumps(data)},
        {"data": None, "payload": json.dumps(data)},
    ):
        found = signals.from_document({"_id": "x", "type": "execute-snapshot", **given})
        assert found == signals.Signal("x", "execute-snapshot", data, "source")
    assert signals.from_document({"_id": 5, "type": "pause-snapshot", "data": ""}).data == {}


def test_a_text_of_the_type_code_is_a_text() -> None:
    """An error that is not a refusal would end the capture at this signal, at each of its starts."""
    request = signals.request(signals.Signal("1", "execute-snapshot", {"data-collections": Code("shop.orders")}))
    assert request.chosen(NAMESPACES) == ("shop.orders",) and not request.without_match(NAMESPACES)


def test_conditions_are_filters_of_collections() -> None:
    conditions = [
        {"data-collection": "shop.orders", "filter": '{"state": {"$eq": "new"}}'},
        {"data-collection": "shop\\..*", "filter": {"a": 1}},
    ]
    data = {"data-collections": [".*"], "additional-conditions": conditions}
    request = signals.request(signals.Signal("1", "execute-snapshot", data))
    assert request.filters(NAMESPACES) == {"shop.orders": '{"state": {"$eq": "new"}}', "shop.stock": '{"a": 1}'}


@pytest.mark.parametrize(
    ("type_", "data", "said"),
    [
        ("execute-snapshots", {}, "execute-snapshot"),
        ("execute-snapshot", {}, "data-collections is missing"),
        ("execute-snapshot", {"data-collections": None}, "data-collections is missing"),
        ("execute-snapshot", {"data-collections": ["("]}, "no regular expression that can be used here: missing"),
        ("execute-snapshot", {"data-collections": ["(?iu)a.b"]}, "no regular expression that can be used here: .*flag u"),
        ("log", {}, "message is missing"),
        ("pause-snapshot", {"type": "blocking"}, "neither stopped nor paused"),
        ("stop-snapshot", {"type": "BLOCKING", "data-collections": ["a.b"]}, "neither stopped nor paused"),
        ("execute-snapshot", {"data-collections": ["a.b"], "type": "full"}, "incremental or blocking"),
        ("execute-snapshot", {"data-collections": ["a.b"], "surrogate-key": "x"}, "surrogate-key"),
        ("execute-snapshot", {"data-collections": ["a.b"], "additional-condition": "{}"}, "mean additional-conditions"),
        ("stop-snapshot", {"data-collection": ["a.b"]}, "did you mean data-collections"),
        (
            "execute-snapshot",
            {"data-collections": ["a.b"], "additional-conditions": [{"filter": "{}"}]},
            "additional-conditions",
        ),
        (
            "execute-snapshot",
            {"data-collections": ["a.b"], "additional-conditions": [{"data-collection": "a.b", "filter": "{x"}]},
            "is no Extended JSON",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(type_: str, data: dict[str, object], said: str) -> None:
    with pytest.raises(signals.SignalRefused, match=said):
        signals.request(signals.Signal("1", type_, data))


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"id": "1"}', '{"id": "1", "type": "log", "data": "x"}'])
def test_lines_that_are_no_signals_are_refused(text: str) -> None:
    with pytest.raises(signals.SignalRefused):
        signals.from_json(text, channel="file")


def test_a_file_forgets_what_was_handled_and_keeps_what_came_meanwhile(tmp_path: Path) -> None:
    """A line is returned once and removed once handled; an incomplete line is waited for."""
    path = tmp_path / "signals.txt"
    channel = channels.FileChannel(path)
    assert channel.poll() == []
    line = '{"id": "1", "type": "log", "data": {"message": "m"}}'
    path.write_text(f"{line}\nbroken\n{line}\n" + '{"id": "2", "type')
    found = channel.poll()
    assert [each.signal.id for each in found] == ["1", "1"]
    assert channel.poll() == []
    channel.handled(found[0])
    assert path.read_text().splitlines() == [line, '{"id": "2", "type']
    with path.open("a") as out:
        out.write('": "log"}\n')
    path.write_text(f'{line}\n{{"id": "2", "type": "log"}}\n')
    channel.handled(found[1])
    assert [each.signal.id for each in channel.poll()] == ["2"]


def test_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    """Windows editors and shells write one; the first signal must not be skipped."""
    path = tmp_path / "signals.txt"
    path.write_text('{"id": "a", "type": "log"}\n{"id": "b", "type": "log"}\n', encoding="utf-8-sig")
    channel = channels.FileChannel(path)
    found = channel.poll()
    assert [each.signal.id for each in found] == ["a", "b"]
    for each in found:
        channel.handled(each)
    assert channel.poll() == [] and not path.read_bytes().strip()


def test_a_file_that_is_gone_or_cannot_be_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it is gone, there is nothing to remove. If it is read-only, its signals would be repeated at each start, so they are not read."""
    path = tmp_path / "signals.txt"
    line = '{"id": "1", "type": "log"}'
    path.write_text(f"{line}\n")
    channel = channels.FileChannel(path)
    (received,) = channel.poll()
    path.unlink()
    channel.handled(received)
    path.write_text(f"{line}\n")
    (received,) = channel.poll()
    with monkeypatch.context() as mounted:
        mounted.setattr(Path, "open", _refused)
        channel.handled(received)
    assert channel.poll() == [] and "cannot be removed" in caplog.text
    monkeypatch.setattr("os.access", lambda *_: False)
    assert channels.FileChannel(path).poll() == [] and "are not read" in caplog.text


def _refused(*_: object, **__: object) -> None:
    raise PermissionError(13, "Read-only file system")


def asking(filter_: object) -> dict[str, object]:
    """The data of a signal that requests a part of a collection."""
    return {"data-collections": ["a.b"], "additional-conditions": [{"data-collection": "a.b", "filter": filter_}]}


HOSTILE: dict[str, dict[str, object]] = {
    "object id": asking('{"_id": {"$oid": "nothex"}}'),
    "decimal": asking('{"n": {"$numberDecimal": "x"}}'),
    "date": asking('{"n": {"$date": 8640000000000000}}'),
    "integer in a filter": asking('{"n": 99999999999999999999}'),
    "long": asking('{"n": {"$numberLong": "99999999999999999999"}}'),
    "timestamp": asking('{"n": {"$timestamp": {"t": 1}}}'),
    "NUL in a name": asking('{"a\\u0000b": 1}'),
    "surrogate in a filter": asking('{"a": "\\ud800"}'),
    "levels of a filter": asking('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    "object as a filter": asking({"n": {"$oid": "nothex"}}),
    "no conditions": {"data-collections": ["a.b"], "additional-conditions": 5},
    "repetition": {"data-collections": ["a{99999999999}"]},
    "integer": {"data-collections": ["a.b"], "n": 99999999999999999999},
    "surrogate": {"data-collections": ["a.b"], "n": "\ud800"},
    "levels": {"data-collections": ["a.b"], "n": json.loads("[" * 300 + "]" * 300)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_parser_takes_is_refused_and_noted(name: str) -> None:
    """A mistyped or malicious signal does not end the capture: it is refused, and its row can be written."""
    signal = signals.from_json(json.dumps({"id": "a", "type": "execute-snapshot", "data": HOSTILE[name]}), channel="file")
    with pytest.raises(signals.SignalRefused) as refused:
        signals.request(signal)
    rows = events.EventRows("shop")
    rows.mark(events.OtherRow("token", columns.RowKind.SIGNAL, signal.payload(refused=str(refused.value), row="r")))
    assert json.loads(rows._payloads[0] or b"").items() >= {"id": "a", "row": "r"}.items()


def test_a_signal_whose_name_is_not_unicode_is_refused_and_noted() -> None:
    signal = signals.from_json('{"id": "a\\ud800", "type": "lo\\udfff", "data": {}}', channel="table")
    with pytest.raises(signals.SignalRefused, match="Unicode"):
        signals.request(signal)
    rows = events.EventRows("shop")
    rows.mark(events.OtherRow("token", columns.RowKind.SIGNAL, signal.payload(refused="\ud800")))
    assert json.loads(rows._payloads[0] or b"")["id"] == "a\\ud800"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"id": "a", "type": "log", "data": "' + "[" * 100_000 + '"}'])
def test_a_line_of_too_many_levels_is_refused(text: str, tmp_path: Path) -> None:
    """In a file it is skipped, and the lines around it are read."""
    with pytest.raises(signals.SignalRefused):
        signals.from_json(text, channel="file")
    path = tmp_path / "signals.txt"
    path.write_text("\n".join([json.dumps({"id": "1", "type": "log"}), text, json.dumps({"id": "2", "type": "log"}), ""]))
    assert [each.signal.id for each in channels.FileChannel(path).poll()] == ["1", "2"]


def test_a_look_that_fails_loses_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were read before the failure are returned by the next poll."""
    path = tmp_path / "signals.txt"
    path.write_text('{"id": "1", "type": "log"}\n{"id": "2", "type": "log"}\n')
    channel, read = channels.FileChannel(path), signals.from_json

    def failing(text: str, *, channel: str) -> signals.Signal:
        if '"2"' in text:
            raise MemoryError
        return read(text, channel=channel)

    with monkeypatch.context() as patched:
        patched.setattr(signals, "from_json", failing)
        with pytest.raises(MemoryError):
            channel.poll()
    assert [each.signal.id for each in channel.poll()] == ["1", "2"]


def test_signals_in_a_table_that_was_removed_meanwhile_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next signal makes it again, with the same version: it waited for another one, or for the next start."""
    rows = [{"row": str(number), "id": str(number), "type": "log", "data": '{"message": "x"}'} for number in (1, 2)]
    commits = iter([Commit(1, at_ms, {}, None) for at_ms in (1, 1, 9)])
    spark, contents = Mock(), iter([rows[:1], rows[1:]])
    spark.table().where().orderBy().toArrow().to_pylist = lambda: next(contents)
    monkeypatch.setattr(channels, "F", Mock())
    monkeypatch.setattr(channels.delta, "exists", lambda *_: True)
    monkeypatch.setattr(channels.table_history, "commits", lambda *_, **__: [next(commits)])
    channel = channels.TableChannel(spark, Mock(), "shop", set())
    assert [[each.signal.id for each in channel.poll()] for _ in range(3)] == [["1"], [], ["2"]]


def test_a_document_that_no_mapping_holds_is_refused() -> None:
    """A repeated field is ambiguous."""
    repeated = raw_bson.RepeatedFields((("_id", 1), ("type", "log"), ("type", "stop-snapshot")))
    with pytest.raises(signals.SignalRefused, match="more than once"):
        signals.from_document(repeated)
