"""The papers' files: what they hold, that every cell of them runs, and our figures beside the papers'."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_papers
from fastar_nodes import conditions
from fastar_nodes.bench import paper as papers
from fastar_nodes.bench.folder import Folder
from fastar_nodes.bench.spec import expand, read_table
from fastar_nodes.bench.store import Store
from fastar_nodes.cli import options
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub, text

ROOT = Path(__file__).parents[2]
NAMES = ("cspd", "fasthybrid", "lazymar", "mulosd", "par")

tomllib = pytest.importorskip("tomllib")


def path_of(name):
    return ROOT / "bench" / "papers" / f"{name}.toml"


def paper_of(name):
    return papers.paper_of(read_table(path_of(name)))


def cells_of(table):
    """Rows of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tiny_papers.write_models(tmp_path_factory.mktemp("papers"))


@pytest.fixture
def tiny(models, monkeypatch):
    """Tiny models in the place of the catalogue's."""
    monkeypatch.setattr(options, "find_file", tiny_papers.finder(models))
    monkeypatch.setattr(text, "load_text_encoder", lambda *_: tiny_papers.TextEncoder())


OPTIONS = "--images 1 --batch 1 --threads 1 --dtype fp32 --device cpu"


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_of_every_paper_runs(name, tiny, cli, tmp_path):
    tiny_papers.with_few_steps(path_of(name), tmp_path / "paper.json")
    (tmp_path / "prompts.txt").write_text("a red boat\na blue cat\n")
    prompts = "--prompts prompts.txt" if name == "mulosd" else ""
    answer = cli(f"sweep paper.json {OPTIONS} {prompts} --out drawn")
    assert answer.code == 0, answer.err

    paper = paper_of(name)
    for sweep, spec in paper.sweeps.items():
        store = Store(tmp_path / "drawn" / sweep)
        assert len(store.cells()) == len(expand(spec)), "no two cells are the same"
        assert all(len(store.shards(cell)) == 1 for cell in store.cells())

    # Every row that can be run has an image, and its times; every other one the reason.
    printed = answer.out[answer.out.index(f"# {paper.paper}") :].split("\n## ")[1:]
    assert len(printed) == len(paper.tables)
    for table, shown in zip(paper.tables, printed, strict=True):
        head, *rows = cells_of(shown)
        for row, cells in zip(table.rows, rows, strict=True):
            found = dict(zip(head, cells, strict=True))
            assert found.get("not run", "") == row.skipped
            assert found.get("images", "") == ("" if row.skipped else "1"), row
            for title in ("s / image", "speed-up", "passes"):
                if f"{title}, here" in found:
                    assert bool(found[f"{title}, here"]) != bool(row.skipped), (row, title)
