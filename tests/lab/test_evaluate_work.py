"""Seconds and operations in the tables of evaluate."""

import json
from pathlib import Path

import pytest
import tiny_papers
import tiny_sweeps
from fastar_nodes.cli import options
from fastar_nodes.lab.sweeps import paper_files
from fastar_nodes.lab.sweeps.measures import read_results
from fastar_nodes.lab.sweeps.spec import read_table
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.work import Conditions, Models, Operations, sample
from fastar_nodes.model_loaders.catalogue import hub
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.slow

LAZYMAR = Path(__file__).parents[2] / "lab" / "papers" / "lazymar.toml"
SETTINGS = {"steps": 4, "diffusion_steps": 4, "lazymar.refresh_period": 3, "lazymar.start_step": 1}


@pytest.fixture
def drawn(tmp_path):
    """A sweep of MAR and LazyMAR, 4 images in shards of 2, and the entries that it was drawn from."""
    files = tiny_sweeps.write_files(tmp_path)
    entries = tiny_sweeps.table(files, samplers=["mar", "lazymar"], set=SETTINGS, images=4)
    store, _ = tiny_sweeps.finish(tmp_path / "sweep", entries)
    return store, entries


def rows_of(table):
    """Rows of a Markdown table without the line below its head, as column and entry."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_operations_are_those_of_pytorchs_own_counter(drawn):
    """An image's share of a shard, of matrix products and attention."""
    store, _ = drawn
    source = tiny_sweeps.source(store.spec())
    models = Models(store.spec(), source)
    conditions = Conditions(store.spec(), models)
    found = []
    for cell in store.cells():
        prepared = models.restore(cell)
        condition, _ = conditions.of(prepared.ready, 0, 2, {})
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # as products, which it knows
            sample(prepared, condition, cell.seed, 0)
        found.append(Operations(store, source).of(cell, store.shards(cell)[0]))
        assert found[-1] == counter.get_total_flops() / 2 > 0
    assert found[1] < found[0], "LazyMAR computes less than MAR"


def test_evaluate_shows_seconds_and_operations_beside_the_quality(drawn, lab):
    store, _ = drawn
    answer = lab("evaluate sweep --measures psnr,tflop --resamples 20 --device cpu")
    assert answer.code == 0, answer.err

    plain, lazy = rows_of(answer.out)
    seconds, speedup = "s / image, batch 2", "speed-up, batch 2"
    assert list(plain) == ["cell", "images", seconds, speedup, "PSNR, dB", "TFLOP / image"]
    assert float(plain[seconds]) > 0 and plain[speedup] == "" and lazy[speedup]
    assert plain["images"] == lazy["images"] == "4"

    counted = [result for result in read_results(store) if result.measure == "tflop"]
    count = Operations(store, tiny_sweeps.source(store.spec()))
    assert [r.value for r in counted] == [count.of(cell, store.shards(cell)[0]) for cell in store.cells()]
    assert [row["TFLOP / image"] for row in (plain, lazy)] == [f"{r.value / 1e12:.3g}" for r in counted]
    assert "TFLOP / image" in lab("table sweep").out


def test_evaluate_refuses_to_count_with_other_files_or_none(drawn, lab, sentence):
    _, entries = drawn
    file = Path(entries["model"])
    tiny_sweeps.write_mar(file, 9)
    line = "evaluate sweep --measures tflop --device cpu"
    assert "not those that the sweep began with" in sentence(lab(line))
    file.unlink()
    assert "there is no file" in sentence(lab(line))


def test_the_operations_stand_beside_lazymars(lab, sentence, tmp_path, monkeypatch):
    """Every row of the paper's tables that was run has a figure; where the model is not here, it is left out aloud."""
    (tmp_path / "models").mkdir()
    models = tiny_papers.write_models(tmp_path / "models")
    monkeypatch.setattr(options, "find_file", tiny_papers.finder(models))
    tiny_papers.with_few_steps(LAZYMAR, tmp_path / "paper.json")
    line = "--images 1 --batch 1 --threads 1 --dtype fp32 --device cpu"
    assert lab(f"sweep paper.json {line} --out drawn").code == 0

    assert "mar-base-ema is not on this machine" in sentence(
        lab("evaluate drawn --device cpu --models none --measures tflop")
    )
    answer = lab("evaluate drawn --device cpu --models none")
    assert answer.code == 0 and "tflop of mar-huge is left out: " in answer.err

    monkeypatch.setattr(hub, "absent", lambda *_: None)
    answer = lab("evaluate drawn --device cpu")
    assert answer.code == 0 and "left out" not in answer.err
    paper = paper_files.paper_of(read_table(LAZYMAR))
    shown = answer.out[answer.out.index(f"# {paper.paper}") :].split("\n## ")[1:]
    for table, text in zip(paper.tables, shown, strict=True):
        if "tflop" in table.columns:
            lines = "\n".join(part for part in text.splitlines() if part.startswith("|"))
            for row, cells in zip(table.rows, rows_of(lines), strict=True):
                assert bool(cells["TFLOP, here"]) != bool(row.skipped)
                assert cells["TFLOP, paper"] == row.figures.get("tflop", "")


def test_a_folder_without_its_spec_is_refused(drawn, lab, sentence, tmp_path):
    path = tmp_path / "sweep" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**manifest, "spec": None}), encoding="utf-8")
    assert "manifest.json" in sentence(lab("evaluate sweep --measures tflop --device cpu"))
    assert Store(tmp_path / "sweep").cells()
