"""Values written as text: lists, ranges, words, and what is refused."""

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports.values import MOST_VALUES, parse_values
from hypothesis import given, settings
from hypothesis import strategies as st

LISTS = {"0.8, 0.95, 0.99": "0.8 0.95 0.99", "0.8..1 x 5": "0.8 0.85 0.9 0.95 1", "4..8": "4 5 6 7 8"}
LISTS |= {"8..4": "8 7 6 5 4", "exact, balanced; fast\nfast": "exact balanced fast", "-1..1x3": "-1 0 1"}
LISTS |= {"1, 2..4 X 2": "1 2 4", "100..100": "100"}


@pytest.mark.parametrize(("text", "expected"), LISTS.items())
def test_lists_and_ranges(text, expected):
    assert parse_values(text, "x_values") == tuple(expected.split())


def test_settings_of_whole_numbers_get_whole_numbers():
    assert parse_values("1..8 x 4", "x", whole=True) == ("1", "3", "6", "8")
    assert parse_values("1..8 x 4", "x") == ("1", "3.333333", "5.666667", "8")


@given(st.decimals(-1000, 1000, places=3), st.decimals(-1000, 1000, places=3), st.integers(2, MOST_VALUES))
def test_a_range_has_its_ends_and_even_steps(low, high, count):
    if low == high:
        return
    values = [float(v) for v in parse_values(f"{low}..{high} x {count}", "x")]
    assert values[0] == float(low) and values[-1] == float(high)
    step = (float(high) - float(low)) / (count - 1)
    if abs(step) > 1e-5:
        assert len(values) == count
        assert all(abs(b - a - step) <= 2.1e-6 for a, b in zip(values, values[1:], strict=False))


@given(st.text(max_size=60))
@settings(max_examples=300)
def test_any_text_gives_values_or_one_sentence(text):
    try:
        values = parse_values(text, "x_values")
    except UserError as problem:
        assert str(problem).startswith("x_values: ") and "\n" not in str(problem)
    else:
        assert 0 < len(values) <= MOST_VALUES and len(set(values)) == len(values)


@pytest.mark.parametrize(
    "text",
    ["", " , ", "1..", "..2", "a..b", "0.5..1", "1..2 x 0", "1..9 x 1", "1..2 x 999999999", "1..1000",
     "nan..1 x 2", "1..1e99 x 2", "x" * 5000, ",".join(map(str, range(300))), "1..2..3 x 4"],
)  # fmt: skip
def test_what_is_no_list_is_refused(text):
    with pytest.raises(UserError, match="^x_values: "):
        parse_values(text, "x_values")
