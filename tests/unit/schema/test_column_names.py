"""Column names: adjusted, valid in Delta, unique."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from cdc_core.properties import unwrap as unwrap_options
from cdc_core.schema import names as column_names
from tests.harness import pace

NAMING = column_names.ColumnNaming()


@hypothesis.given(st.text(max_size=300))
def test_every_name_is_fit(name: str) -> None:
    """No name is empty, too long, or contains characters that Delta refuses."""
    fit = column_names.fit(name)
    assert 0 < len(fit) <= column_names.MAX_LENGTH
    assert not set(fit) & set(" ,;{}()\n\t=")


def test_names_that_meet_get_numbers() -> None:
    """If two names differ only in case, the later one gets a suffix; so does a reserved name at the top level."""
    taken = column_names.UsedNames(["name", "NAME_2", *NAMING.reserved])
    assert column_names.top_level(("Name",), used_names=taken, naming=NAMING) == "Name_3"
    assert column_names.top_level(("__Key",), used_names=taken, naming=NAMING) == "__Key_2"
    assert column_names.nested("__key", used_names=column_names.UsedNames(), naming=NAMING) == "__key"


def test_flattened_names_are_adjusted_part_by_part() -> None:
    naming = column_names.ColumnNaming(
        flatten=True, delimiter="-", fields=unwrap_options.FieldNames(unwrap_options.FieldNameAdjustment.AVRO)
    )
    assert column_names.top_level(("a.b", "1c"), used_names=column_names.UsedNames(), naming=naming) == "a_b-_1c"


def test_options_decide_the_naming() -> None:
    """The SMT's options decide how columns are laid out, and which names are reserved."""
    given = {"flatten.struct": "true", "add.fields": "op", "array.encoding": "document"}
    options = unwrap_options.parse(given)
    naming = column_names.ColumnNaming.of(options)
    assert naming.flatten and naming.values.arrays_as_documents
    assert "__op" in naming.reserved
    assert column_names.ColumnNaming.from_json(naming.to_json()).to_json() == naming.to_json()


@pytest.mark.parametrize(
    "names",
    [
        *(
            ("adı", "adi"),
            ("µg", "μg"),
            ("ſ", "s"),
            ("K", "k"),
            ("İ", "i"),
            ("İsim", "i\u0307sim"),
            ("ΣΑΣ", "σας"),
            ("ǅ", "ǆ"),
            ("\U00010400", "\U00010428"),
        ),
        *(("_Metadata", "_metadata"), ("a", "A")),
    ],
)
def test_names_that_spark_takes_for_one_are_told_apart(names: tuple[str, str]) -> None:
    """Spark compares names by upper case, then lower case: more names are equal to it than those with the same lower case."""
    taken = column_names.UsedNames()
    first, second = (column_names.top_level((name,), used_names=taken, naming=NAMING) for name in names)
    assert second == (f"{names[1]}_2" if first == names[0] else f"{names[1]}_3")
    assert column_names.without_case("straße") != column_names.without_case("strasse")


def test_names_of_statements_are_not_given_to_documents() -> None:
    """Names that statements over the table, Spark or Delta use."""
    for name in ("_metadata", "__action", "__guard", "__gone", "__row", "__GONE", "__held", "__is_new"):
        given = column_names.top_level((name,), used_names=column_names.UsedNames(NAMING.reserved), naming=NAMING)
        assert given == f"{name}_2"


def test_thousands_of_names_that_meet_in_one_are_numbered_at_once() -> None:
    """The search for a free number begins after the last one: otherwise names that consist of blanks and braces only would take minutes."""
    taken = column_names.UsedNames(["_", "__3"])
    with pace.within(1):
        assert [taken.unique("_") for _ in range(4000)] == [f"__{number}" for number in (2, *range(4, 4003))]
        assert [taken.unique(name) for name in ("a", "A", "a_2", "A", "a_2")] == ["a", "A_2", "a_2_2", "A_3", "a_2_3"]


def test_names_of_ascii_are_compared_like_others() -> None:
    """Names in ASCII, which are most, take a shorter way to the same key."""
    text = "".join(map(chr, range(128)))
    assert column_names.without_case(text) + "ß" == column_names.without_case(text + "ß")
