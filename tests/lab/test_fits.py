"""What fits a graphics card: every entry of the catalogue, the bytes of recorded shapes, and the table of the docs."""

import json
import math
import re
from pathlib import Path

import pytest
from fastar_nodes.lab.work import fits
from fastar_nodes.lab.work.fits import drawing_entries, row
from fastar_nodes.runs.memory.fitting import GIB, Need, card_of, need, seconds

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tables.md"
ENTRIES = {entry.id: entry for entry in drawing_entries()}


def cells(text: str) -> list[str]:
    return [cell.strip() for cell in text.strip().strip("|").split("|")]


def test_every_entry_is_in_the_table():
    written = {cells(line)[0] for line in PAGE.read_text().splitlines() if line.startswith("|")}
    assert len(ENTRIES) > 25 and set(ENTRIES) <= written


def test_a_card_keeps_one_gibibyte_for_others():
    assert Need(5 * GIB, 2 * GIB).fits(8) and not Need(5 * GIB, 2 * GIB + 1).fits(8)
    assert Need(5 * GIB, 2 * GIB + 1).fits(12)


@pytest.mark.parametrize(("name", "keys"), [("llamagen-b-256", "c2i_B"), ("llamagen-l-384", "c2i_L")])
@pytest.mark.fast_cases(1)
def test_weights_are_those_of_the_released_shapes(name, keys):
    """Two bytes a weight; with 8 bits, one in the blocks, and a scale in fp32 for every output."""
    recorded = json.loads((ROOT / "tests" / "parity" / "llamagen" / f"keys_{keys}.json").read_text())
    shapes = recorded["keys"]
    whole = sum(math.prod(shape) for shape in shapes.values())
    blocks = [shape for key, shape in shapes.items() if key.startswith("layers.") and len(shape) == 2]
    assert need(ENTRIES[name], "bf16").weights == 2 * whole == 2 * recorded["total_elements"]
    saved = sum(math.prod(shape) - 4 * shape[0] for shape in blocks)
    assert need(ENTRIES[name], "int8").weights == 2 * whole - saved


def test_weights_of_a_nextstep_are_those_of_the_released_shapes():
    """Two bytes a weight, without the output layer for words; with 8 bits as above."""
    recorded = json.loads((ROOT / "tests" / "parity" / "nextstep" / "nextstep_keys_14b.json").read_text())["model"]
    shapes = {name: shape for name, shape in recorded.items() if name not in ("lm_head.weight", "gen_pos_embed")}
    whole = sum(math.prod(shape) for shape in shapes.values())
    blocks = [shape for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2]
    assert need(ENTRIES["nextstep-1.1"], "bf16").weights == 2 * whole
    saved = sum(math.prod(shape) - 4 * shape[0] for shape in blocks)
    assert need(ENTRIES["nextstep-1.1"], "int8").weights == 2 * whole - saved


def test_the_image_of_a_token_model_has_guidance():
    """LlamaGen-B: keys and values of 12 layers of width 768, for 256 tokens of both branches, in 16 bits."""
    keys_and_values = 2 * 12 * 768 * 256 * 2
    assert need(ENTRIES["llamagen-b-256"], "bf16").working > 2 * keys_and_values


@pytest.mark.parametrize("name", ["mar-base", "llamagen-b-256", "harmon-0.5b", "bitdance-14b-64x", "nextstep-1.1"])
@pytest.mark.fast_cases(1)
def test_the_page_has_the_figures_of_the_command(name):
    table = PAGE.read_text().split("<!-- figure fits: begin -->")[1].split("<!-- figure fits: end -->")[0]
    (written,) = (cells(line) for line in table.splitlines() if re.match(rf"\| *{name} *\|", line))
    assert written == row(ENTRIES[name])


def test_the_smallest_card_is_named(monkeypatch):
    needs = {"bf16": Need(9 * GIB, GIB), "int8": Need(5 * GIB, GIB), "int4": Need(4 * GIB, GIB)}
    needs["int4-g64"] = Need(3 * GIB, GIB)
    monkeypatch.setattr(fits, "need", lambda entry, dtype: needs[dtype])
    assert row(ENTRIES["mar-base"]) == ["mar-base", "10.74", "12", "6.44", "8", "", "", "", ""]
    assert row(ENTRIES["llamagen-b-256"])[5:] == ["5.37", "6", "4.29", "6"]
    assert fits.smallest_card(Need(23 * GIB, 1)) == "none"


def test_janus_7b_on_small_cards():
    """A card of 8 GB holds it in int4 and one of 6 GB in int4-g64, in seconds; in bf16 it streams for minutes."""
    entry = ENTRIES["janus-pro-7b"]
    needs = {dtype: need(entry, dtype) for dtype in ("bf16", "int8", "int4", "int4-g64")}
    assert [dtype for dtype, needed in needs.items() if needed.fits(8)] == ["int4", "int4-g64"]
    assert [dtype for dtype, needed in needs.items() if needed.fits(6)] == ["int4-g64"]

    card = card_of(8)
    assert (card.name, card.memory) == ("RTX 4060", 8) and card_of(7).rate == card_of(6).rate and card_of(4).memory == 4
    assert seconds(entry, "int4", card) < 20 and seconds(entry, "bf16", card) > 200
    assert seconds(entry, "int4-g64", card) < seconds(entry, "int4", card)
    assert seconds(ENTRIES["mar-base"], "bf16", card) is None
