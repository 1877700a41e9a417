"""Tables and summaries of the pages are what the code makes."""

from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.docs import blocks, headlines, models_table
from fastar_nodes.lab.work import fits

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_readme_has_the_table_of_models():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert blocks.with_block(readme, models_table.NAME, models_table.table()) == readme


def test_every_family_that_draws_is_in_the_table_of_models():
    named = {name for row in models_table.ROWS for name in row.entries}
    known = {entry.id: entry.family for entry in fits.drawing_entries()}
    assert named <= set(known)
    # De-tokenizers are downloads beside a language model.
    assert {known[name] for name in named} == set(known.values()) - {"dtok"}


def test_the_summaries_are_the_tables():
    """Every page has what ``lab headlines`` writes from docs/tables.md."""
    for path, text in headlines.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m fastar_nodes.lab headlines"


def test_a_summary_of_a_row_that_is_gone_is_an_error():
    tables = headlines.Tables(
        headlines.TABLES.read_text(encoding="utf-8").replace("| FastHybrid, balanced ", "| gone ")
    )
    with pytest.raises(UserError, match="^headlines: the figure .* has no row 'FastHybrid, balanced' with a column"):
        headlines.summary(tables)


def test_a_summary_takes_the_row_that_it_names():
    rows = "| batch | sampler | speed-up |\n|---|---|---|\n| 1 | MAR | |\n| 1 | PAR | 2.5x (2 to 3) |"
    text = f"<!-- figure a: begin -->\n{rows}\n<!-- figure a: end -->"
    assert headlines.Tables(text).cell("a", "1 | PAR", "speed-up") == "2.5x"
