"""Which namespaces are captured, the pipeline that the server gets, and when a stream counts as another one."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdc_core import errors
from cdc_core.properties import types as values
from cdc_core.properties.source import CaptureScope
from cdc_core.stream import cursor_pipeline, filters, patterns
from tests.harness.sources import source

CASES = Path(__file__).resolve().parents[2] / "cases" / "filters"


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=case["about"]) for case in json.loads((CASES / name).read_text())]


def namespaces(case: dict[str, Any], side: str) -> list[tuple[str, str]]:
    return [(db, collection) for db, _, collection in (name.partition(".") for name in case[side])]


@pytest.mark.parametrize("case", cases("namespaces.json"))
def test_lists(case: dict[str, Any]) -> None:
    """Include and exclude lists have Debezium's meaning."""
    filter_ = filters.of(source(case["source"]))
    assert [ns for ns in namespaces(case, "in") if not filter_.includes(*ns)] == []
    assert [ns for ns in namespaces(case, "out") if filter_.includes(*ns)] == []
    assert len(filter_.left_to_client()) == case.get("left_to_client", 0)


@pytest.mark.parametrize("case", cases("scopes.json"))
def test_scopes(case: dict[str, Any]) -> None:
    """A stream is the narrowest that contains everything in the lists."""
    assert str(filters.stream_scope(source(case["source"]), databases=case.get("databases", ()))) == case["scope"]


@pytest.mark.parametrize("text", ["(", "a)", "[a", "*a", "a{2,1}", "(?<name>a)", r"\p{L}", "[a--b]", "(?iu)a"])
def test_unreadable_patterns_are_refused(text: str) -> None:
    """Text that Python cannot compile as a regular expression, or warns about, is refused."""
    with pytest.raises(values.InvalidValue):
        patterns.regex(text)


def test_an_entry_that_would_be_matched_for_years_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`re` would hold all threads of the process for that time, with no word."""
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.05)
    filter_ = filters.of(source({"collection.exclude.list": [SLOW]}))
    assert filter_.includes("shop", "orders")
    with pytest.raises(errors.SettingsError, match="takes too long to compare with shop.aaa"):
        filter_.includes("shop", "a" * 200)


SLOW = r"shop\.(?:(a+)\1*)+b"


@given(st.sampled_from(["{e}", "{1e<=2}", "{e<=1}", "{", "{}", "{,}", "{a", "[{e}]", r"\{e}", "{1}", "{1,}", "{,2}"]))
@example("(?i:K)[k-m]")
@example("é|ſ")
def test_names_are_matched_by_pythons_rules(text: str) -> None:
    """The package that has a time limit knows more operators: approximate matches, in braces."""
    names = [
        "shop",
        "shop{",
        "shop{e}",
        "shopp",
        "sho",
        "shop{}",
        "shop{a",
        "shoppp",
        "shope",
        "k",
        "\u212a",
        "É",
        "é",
        "ſ",
        "s",
    ]
    for pattern in (f"shop{text}", f"(shop{text})", text.lstrip("{")):
        expected = [name for name in names if re.fullmatch(pattern, name, re.IGNORECASE | re.ASCII)]
        assert list(filter(patterns.regex(pattern).matches, names)) == expected


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1))
def test_a_literal_matches_itself(name: str) -> None:
    """In literal mode every name matches itself, and the server can filter by it."""
    pattern = patterns.literal(name)
    assert pattern.matches(name)
    assert pattern.literal == name
    assert pattern.server_text is not None
    assert patterns.regex(pattern.text) == pattern


@given(st.text("ab.,|()[]{}\\^$*+?12-Q E", max_size=12), st.sampled_from(",|"))
def test_splitting_loses_nothing(text: str, separator: str) -> None:
    """The parts of a list, joined again, are the list."""
    assert separator.join(values.split_top_level(text, separator)) == text


def test_databases_of_an_entry_cover_it() -> None:
    """If an entry can be split by database, the parts match exactly the names that the entry matches."""
    parts = ["", "a", "b?", r"\.", ".*", "[^b]", "(a|b)", "|.*", "^", "$", "(^a)", "(^a|[^b])", r"(?<=a\.)b"]
    entries = map("".join, itertools.product(["a", "^a", "AB", "b*"], [r"\.", "[.]", "."], parts, parts))
    names = [*itertools.product(["a", "ab"], ["a", "b", "ab", "a.b"])]
    split, wrong = 0, []
    for pattern in map(patterns.regex, entries):
        if pairs := pattern.by_database():
            split += 1
            for db, collection in names:
                is_in_parts = any(db == pinned.lower() and rest.matches(collection) for pinned, rest in pairs)
                if is_in_parts != pattern.matches(f"{db}.{collection}"):
                    wrong.append((pattern.text, db, collection))
    assert split > 100 and wrong == []


def test_everything_needs_no_stage() -> None:
    """A pipeline without lists needs no stage."""
    assert filters.server_stages(filters.Filter()) == []


def test_skipped_operations_leave_the_other_events() -> None:
    """Skipping operations on documents never hides drops, renames or invalidates."""
    stages = filters.pipeline(source({"skipped.operations": "c,u"}))
    assert stages == [{"$match": {"operationType": {"$nin": ["insert", "replace", "update"]}}}]


def test_none_skips_nothing() -> None:
    """`none`, `t` and `r` hide no event of a stream."""
    assert filters.operations(source({"skipped.operations": "none,t,r"})) == filters.OPERATIONS


def test_long_lists_stay_below_the_servers_limit() -> None:
    """Thousands of collections become several regular expressions, each of which the server can compile."""
    names = [f"shop.collection_with_a_long_name_{number}" for number in range(3000)]
    text = json.dumps(filters.pipeline(source({"collection.include.list": names})))
    condition = json.loads(text)[0]["$match"]["$or"][1]
    regexes = [each["ns.coll"]["$regex"] for each in condition["$or"]]
    assert len(regexes) > 1
    assert max(map(len, regexes)) < 32_764


def test_the_condition_on_a_new_name_is_one_on_renames() -> None:
    """Also where the entry does not determine its database, and the server evaluates an expression: it need not look at other events."""
    (stage,) = filters.pipeline(source({"collection.include.list": "sh.*orders"}))
    *_, rename = stage["$match"]["$or"]
    assert rename.keys() == {"operationType", "to.db", "to.coll", "$expr"} and rename["operationType"] == "rename"


def test_one_entry_is_looked_for_in_the_oplog_and_more_in_events_alone() -> None:
    """Each is faster so: a field that no event has keeps the server from searching the oplog."""
    lists = (["shop.a"], ["shop.a", "shop.b"])
    assert ["medallionNoEvent" in str(filters.pipeline(source({"collection.include.list": each}))) for each in lists] == [
        False,
        True,
    ]


def test_names_of_long_lists_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching 2,000 names one by one took 5 ms per event if the server cannot decide, and 30 ms per database."""
    listed = filters.of(source({"collection.include.list": [f"tenant_{number}.orders" for number in range(2000)]}))
    assert listed.includes_database("Tenant_7")
    for name in ("matches", "by_database"):
        monkeypatch.setattr(patterns.Pattern, name, None)
    assert listed.includes("tenant_1999", "ORDERS") and not listed.includes("tenant_1999", "orders2")
    assert listed.includes_database("tenant_1999") and not listed.includes_database("tenant_2000")


def test_stages_of_the_settings_stand_where_asked() -> None:
    """`cursor.pipeline` comes after, before or instead of the filters; the split always comes last."""
    given_ = {
        "database.include.list": "shop",
        "cursor.pipeline": '[{"$match": {"fullDocument.total": {"$gt": {"$numberLong": "5"}}}}]',
        "cursor.oversize.handling.mode": "split",
    }
    shapes = {
        order: [next(iter(stage)) for stage in filters.pipeline(source({**given_, "cursor.pipeline.order": order}))]
        for order in ("internal_first", "user_first", "user_only")
    }
    assert shapes == {
        "internal_first": ["$match", "$match", "$changeStreamSplitLargeEvent"],
        "user_first": ["$match", "$match", "$changeStreamSplitLargeEvent"],
        "user_only": ["$match", "$changeStreamSplitLargeEvent"],
    }
    first, second, _ = filters.pipeline(source({**given_, "cursor.pipeline.order": "user_first"}))
    assert "fullDocument.total" in first["$match"]["$or"][1]
    assert "$or" in second["$match"]


def test_images() -> None:
    """The capture mode decides which documents an update contains."""
    asked = {
        mode: (
            filters.full_document(source({"capture.mode": mode})),
            filters.full_document_before_change(source({"capture.mode": mode})),
        )
        for mode in ("change_streams", "change_streams_update_full", "change_streams_with_pre_image")
    }
    assert asked == {
        "change_streams": (None, None),
        "change_streams_update_full": ("updateLookup", None),
        "change_streams_with_pre_image": (None, "whenAvailable"),
    }
    assert filters.full_document(source({"capture.mode.full.update.type": "post_image"})) == "whenAvailable"


BASE = {"collection.include.list": "shop.a, shop.b"}


@pytest.mark.parametrize(
    "same",
    [
        {"collection.include.list": "shop\\.b,SHOP.a"},
        {"collection.include.list": ["shop.a", "shop.b", "shop.a"]},
        {**BASE, "snapshot.mode": "never", "max.batch.size": 5, "mongodb.user": "joe"},
        {**BASE, "field.exclude.list": "shop.a.x"},
        {**BASE, "cursor.oversize.skip.threshold": 5},
    ],
)
def test_the_same_stream_has_the_same_fingerprint(same: dict[str, Any]) -> None:
    """Spelling, order and settings without effect on the stream do not change its fingerprint."""
    assert filters.fingerprint(source(same)) == filters.fingerprint(source(BASE))


@pytest.mark.parametrize(
    "other",
    [
        {"collection.include.list": "shop.a"},
        {"collection.include.list": "shop.a,shop.b,mall.c"},
        {**BASE, "capture.mode": "change_streams"},
        {**BASE, "capture.mode": "change_streams_update_full_with_pre_image"},
        {**BASE, "capture.mode.full.update.type": "post_image"},
        {**BASE, "capture.scope": "deployment"},
        {**BASE, "cursor.pipeline": '[{"$project": {"fullDocument.x": 0}}]'},
        {**BASE, "skipped.operations": "d"},
        {**BASE, "signal.data.collection": "shop.signals"},
        {**BASE, "cursor.oversize.handling.mode": "split"},
        {**BASE, "cursor.oversize.handling.mode": "skip", "cursor.oversize.skip.threshold": 5},
    ],
)
def test_another_stream_has_another_fingerprint(other: dict[str, Any]) -> None:
    """Every setting that decides which events a stream has changes its fingerprint."""
    assert filters.fingerprint(source(other)) != filters.fingerprint(source(BASE))


def test_an_earlier_version_named_less_of_the_same_stream() -> None:
    """An upgrade does not change the stream.

    The removal of a stage that excludes neither events nor parts of documents brings nothing back.
    """

    def staged(unset: str) -> str:
        stages = f'[{{"$match": {{"x": 1}}}}, {{"$unset": "{unset}"}}]'
        return filters.fingerprint(source({**BASE, "skipped.operations": "d", "cursor.pipeline": stages}))

    now = staged("fullDocument.y")
    assert [len(filters.left_out(each)) for each in (now, staged("wallTime"))] == [3, 2]
    assert filters.is_same_stream(now.split("-")[0], now)
    assert not filters.is_same_stream(filters.fingerprint(source(BASE)), now)


def test_a_stage_that_an_earlier_version_named_by_itself_is_not_gone() -> None:
    """It named all stages one by one: without this, the next change of the lists would report stages as removed that are still set."""
    changing, matching, other = {"$unset": "fullDocument.y"}, {"$match": {"x": 1}}, {"$match": {"x": 2}}

    def gone(before: list[Any], now: list[Any]) -> int:
        named = "".join(f"-stage_{filters.digest(each)[:12]}" for each in before)
        return len(filters.no_longer_left_out(f"0{named}", source({**BASE, "cursor.pipeline": json.dumps(now)})))

    assert gone([matching, changing], [matching, changing]) == gone([changing, matching], [changing, matching]) == 0
    assert gone([changing, other], [changing, matching]) == gone([other, changing], [changing]) == 1
    assert gone([matching], [changing, matching]) == 1


def test_what_a_server_is_told_of_letters_makes_no_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version sent no variants for upper and lower case."""
    named = source({"collection.include.list": "shop.café", "cursor.pipeline": '[{"$match": {"x": {"$regex": "é"}}}]'})
    now, sent = filters.fingerprint(named), filters.pipeline(named)
    assert ["[Éé]" in str(stage) for stage in sent] == [True, False]
    monkeypatch.setattr(patterns, "as_sent", lambda text: text)
    assert filters.fingerprint(named) == now


def test_what_no_server_takes_into_its_search_of_the_oplog_is_a_code() -> None:
    """Apostrophes and control characters are sent as codes, also after a backslash and in a class; the pattern matches the same names."""
    for text, name in ((patterns.literal("a'b\n").text, "a'b\n"), (r"a\\'\'b", r"a\''b"), ("[x']+\\\t", "x'\t")):
        sent = patterns.as_sent(text)
        assert sent.isprintable() and "'" not in sent and re.fullmatch(sent, name)


@pytest.mark.parametrize(
    "more",
    [
        {"collection.include.list": "shop\\.[é-ü]x, {}"},
        {"collection.exclude.list": "shop\\.[é-ü]x, {}", "database.include.list": "shop"},
        {
            "collection.include.list": "{}",
            "cursor.pipeline": '[{{"$match": {{"x": 1}}}}]',
            "cursor.pipeline.order": "user_only",
        },
    ],
)
def test_lists_that_are_applied_here_are_part_of_the_fingerprint(more: dict[str, str]) -> None:
    """The server's stages do not contain them: a collection that they exclude for a while would never be reported as incomplete."""

    def fingerprint(*names: str) -> str:
        given = {name: value.format(", ".join(names)) for name, value in more.items()}
        return filters.fingerprint(source({**given, "capture.scope": "deployment"}))

    assert fingerprint("(?i)shop.a", "shop.b") != fingerprint("(?i)shop.a", "shop.c")
    assert fingerprint("(?i)shop.a", "shop.b") == fingerprint("shop.b", "(?i)shop.a", "shop.b")


def test_named_collections() -> None:
    """The collections that the list names literally are known, so that a missing one can be reported."""
    filter_ = filters.of(source({"collection.include.list": "shop.orders, shop\\.tmp_.*, mall[.]a\\.b"}))
    assert filter_.named() == (("shop", "orders"), ("mall", "a.b"))


def test_snapshots_read_captured_collections_only() -> None:
    """`snapshot.include.collection.list` narrows what is captured and never widens it."""
    filter_ = filters.of(source({"database.include.list": "shop", "snapshot.include.collection.list": "shop.a,mall.b"}))
    assert filter_.is_snapshotted("shop", "a")
    assert not filter_.is_snapshotted("shop", "b")
    assert not filter_.is_snapshotted("mall", "b")


@pytest.mark.parametrize("mode", ["regex", "literal"])
def test_a_list_of_snapshots_always_has_regular_expressions(mode: str) -> None:
    """As in Debezium, `filters.match.mode` is for the lists of what is captured: the snapshot would read nothing otherwise."""
    given = {"filters.match.mode": mode, "snapshot.include.collection.list": r"shop\.(a|b{1,2})"}
    filter_ = filters.of(source({"database.include.list": "shop", **given}))
    assert [name for name in ("a", "bb", "c") if filter_.is_snapshotted("shop", name)] == ["a", "bb"]


def test_nothing_outside_the_scope_is_captured() -> None:
    """A snapshot of a collection without events in the stream would never be updated."""
    one = filters.of(source({"capture.scope": "collection", "capture.target": "shop.a.b"}))
    assert one.includes("shop", "a.b") and one.includes_database("shop")
    assert not one.includes("shop", "a") and not one.includes("mall", "a.b") and not one.includes_database("mall")
    all_of_one = filters.of(source({"capture.scope": "database", "capture.target": "shop"}))
    assert all_of_one.includes("shop", "a") and not all_of_one.includes("mall", "a")
    assert filters.of(source({"capture.scope": "deployment"})).includes("mall", "a")


def test_the_collection_of_signals() -> None:
    """The collection of signals is read, and only captured if the lists include it."""
    filter_ = filters.of(source({"database.include.list": "shop", "signal.data.collection": "ops.signals"}))
    assert filter_.is_signals("ops", "signals")
    assert not filter_.includes("ops", "signals")


def test_scopes_print_as_names() -> None:
    assert [
        str(filters.Scope(CaptureScope.DEPLOYMENT)),
        str(filters.Scope(CaptureScope.COLLECTION, "a", "b.c")),
    ] == [
        "deployment",
        "a.b.c",
    ]


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ([{"$unset": ["documentKey"]}], ["documentKey"]),
        ([{"$unset": "ns.coll"}], ["ns"]),
        ([{"$project": {"clusterTime": 0, "_id": 0}}], ["_id", "clusterTime"]),
        ([{"$project": {"fullDocument": 1, "ns": 1}}], ["operationType", "clusterTime", "documentKey"]),
        ([{"$project": {"_id": 1}}], ["operationType", "clusterTime", "ns", "documentKey"]),
        ([{"$set": {"operationType": "x", "ns": {"db": "y"}}}], ["operationType", "ns"]),
        ([{"$addFields": {"_id": "$documentKey._id"}}], ["_id"]),
        ([{"$replaceRoot": {"newRoot": "$fullDocument"}}], ["_id", "operationType", "clusterTime", "ns", "documentKey"]),
        ([{"$replaceWith": {"$mergeObjects": ["$$ROOT", {"clusterTime": 1}]}}], ["clusterTime"]),
        ([{"$match": {"ns.coll": "a"}}, {"$unset": "updateDescription"}], []),
        ([{"$project": {"fullDocument.secret": 0}}], []),
        ([{"$set": {"tag": 1, "documentKey": "$documentKey"}}], []),
        ([{"$replaceWith": {"$mergeObjects": ["$$ROOT", {"tag": 1}]}}], []),
    ],
)
def test_stages_that_spoil_events_are_named(stages: list[dict[str, Any]], named: list[str]) -> None:
    """A stage that removes or changes what an event needs is refused with the field's name."""
    found = cursor_pipeline.problems(stages)
    assert [problem.split(" takes ")[1].split(" ")[0] for problem in found] == named


@pytest.mark.parametrize(
    "stage", [{"$unset": 5}, {"$unset": None}, {"$unset": ["a", 5]}, {"$project": [1]}, {"$set": "a"}, {"$match": []}]
)
def test_a_stage_of_another_type_is_refused(stage: dict[str, Any]) -> None:
    """It is a mistake in the settings."""
    assert [problem.split(" expects ")[0] for problem in cursor_pipeline.problems([stage])] == list(stage)


def test_stages_that_a_change_stream_does_not_take_are_refused() -> None:
    """`$lookup` is refused, and so is the split, which has its own setting. A stream of partial updates needs `updateDescription`."""
    assert len(cursor_pipeline.problems([{"$lookup": {}}, {"$changeStreamSplitLargeEvent": {}}])) == 2
    assert len(cursor_pipeline.problems([{"$unset": "updateDescription"}], needs_description=True)) == 1
