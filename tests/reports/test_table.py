"""Text of others in tables and texts: a label from a stranger's PNG adds no image, link, tag, code, cell or line."""

import csv
import html
import io
import re

import pytest
from fastar_nodes.reports.record import Report, to_csv, to_table, to_text
from fastar_nodes.reports.sweep import Cell
from fastar_nodes.reports.table import literal, markdown
from fastar_nodes.runs.advice_text import advice_table
from fastar_nodes.runs.choice import choose
from fastar_nodes.runs.measured import AdviceSettings, Measured
from fastar_nodes.sweeps.store import CellStore
from fastar_nodes.sweeps.sweep import Axis, Sweep, sweep_table

# What a stranger writes, and what a table shows for it, by hand:
# character references of &, <, >, |, `, \, [, ], *, ~ and so on.
HOSTILE = {
    "![a](http://one.example/a.png)": "!&#91;a&#93;(http&#58;//one.example/a.png)",
    "[a](javascript:alert(1))": "&#91;a&#93;(javascript:alert(1))",
    '<img src="http://two.example/b.png">': '&#60;img src="http&#58;//two.example/b.png"&#62;',
    "<script>x</script>": "&#60;script&#62;x&#60;/script&#62;",
    "<https://three.example>": "&#60;https&#58;//three.example&#62;",
    "https://four.example/x": "https&#58;//four.example/x",
    "WWW.five.example": "WWW&#46;five.example",
    "someone@six.example": "someone&#64;six.example",
    "[[open|https://seven.example]]": "&#91;&#91;open&#124;https&#58;//seven.example&#93;&#93;",
    "a | b": "a &#124; b",
    "a \\| b": "a &#92;&#124; b",
    "`code`": "&#96;code&#96;",
    "```\nblock": "&#96;&#96;&#96; block",
    "two\nlines\r\nand\u2028more": "two lines  and more",
    "**bold** ~~gone~~": "&#42;&#42;bold&#42;&#42; &#126;&#126;gone&#126;&#126;",
    "__init__": "&#95;&#95;init&#95;&#95;",
    "# heading": "&#35; heading",
    "- item": "&#45; item",
    "&lt;b&gt;": "&#38;lt;b&#38;gt;",
    "\x1b[2Jred": "&#91;2Jred",
}
# What stands in tables every day stays readable.
USUAL = [
    "steps",
    "fasthybrid: preset=fast, threshold=0.9",
    "FastHybrid + LazyMAR",
    "1.90x",
    "-1",
    "97 %",
    "a, b; c (d)",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_others_is_shown_as_it_is(text):
    shown = literal(text)
    assert shown == HOSTILE[text]
    # Whoever shows it, as HTML or as Markdown, decodes the references to what was written.
    written = "".join(c if c.isprintable() else " " for c in text).strip()
    assert html.unescape(shown) == written
    assert not re.search(r"[<>|`\\\[\]]|://|www\.", shown, re.IGNORECASE)


@pytest.mark.parametrize("text", USUAL)
def test_usual_names_stay_readable(text):
    assert literal(text) == text


def test_a_long_text_is_shortened():
    assert literal("x" * 10_000_000) == "x" * 197 + "..."
    assert literal("ab" * 10, 8) == "ababa..."


def a_run(name: str) -> Report:
    about = {"mode": name}
    return Report(name, name, about, 1, 1, name, 1.0, {name: 0.5}, {"transformer_passes": 3}, note=name)


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, by GFM's rule: every line is a row, every | ends a cell."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


@pytest.mark.parametrize("text", HOSTILE)
def test_it_stays_in_its_cell_in_every_table(text, tmp_path):
    shown = HOSTILE[text]
    assert cells(markdown([["head", "x"], [text, "1"]]))[2] == [shown, "1"]
    assert cells(to_table([a_run(text)], [text]))[2][0] == shown
    report = a_run("mar")
    sweep = Sweep("t", CellStore(tmp_path), Axis("mode", (text,)), Axis("", ("",)), (1,), (Cell(0, 0, 1, "k", report),))
    assert cells(sweep_table(sweep))[2][0] == shown
    failed = Measured(choose("mar", {}), problem=f"model: {text}")
    said = advice_table("answer", [failed], AdviceSettings()).splitlines()
    assert said[-1] == f"mar was not run: model: {literal(f'x {text}')[2:]}"


@pytest.mark.parametrize("text", HOSTILE)
def test_it_stays_in_its_line_in_a_report_as_text(text):
    lines, shown = to_text(a_run(text)).splitlines(), HOSTILE[text]
    assert lines == [
        f"{shown} on {shown}, 1 image, seed 1",
        f"seconds: 1.00 (one run) on {shown}",
        f"  {shown}: 0.500 s",
        "transformer passes: 3",
        f"note: {shown}",
        f"settings: mode={shown}",
    ]


@pytest.mark.parametrize("name", ['=HYPERLINK("http://a.example")', "+1", "-1+1", "@SUM(A1)"])
def test_a_spreadsheet_computes_no_name(name):
    row = list(csv.reader(io.StringIO(to_csv(a_run(name)))))[1]
    assert row[0] == f"'{name}"
    assert list(csv.reader(io.StringIO(to_csv(a_run("plain - one")))))[1][0] == "plain - one"
