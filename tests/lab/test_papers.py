"""The papers' files: what they hold, that every cell of them runs, and our figures beside the papers'."""

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path

import fidelity
import made_sweeps
import numpy as np
import pytest
import tiny_papers
import torch
from fastar_nodes.cli import options
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps import paper_files
from fastar_nodes.lab.sweeps.features import WEIGHTS, open_reference, resized
from fastar_nodes.lab.sweeps.measures import Means, Result, evaluate, latest
from fastar_nodes.lab.sweeps.records import Shard, shard_key
from fastar_nodes.lab.sweeps.spec import expand, read_table
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.model_loaders.llamagen import text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = ("cspd", "fasthybrid", "gtr", "lazymar", "mulosd", "par")

tomllib = pytest.importorskip("tomllib")


def path_of(name):
    return ROOT / "lab" / "papers" / f"{name}.toml"


def paper_of(name):
    return paper_files.paper_of(read_table(path_of(name)))


def cells_of(table):
    """Rows of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tiny_papers.write_models(tmp_path_factory.mktemp("papers"))


@pytest.fixture
def tiny(models, monkeypatch):
    """Tiny models in the place of the catalogue's; their files by id."""
    monkeypatch.setattr(options, "find_file", tiny_papers.finder(models))
    monkeypatch.setattr(text, "load_text_encoder", lambda *_: tiny_papers.TextEncoder())
    return models


OPTIONS = "--images 1 --batch 1 --threads 1 --dtype fp32 --device cpu"


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_of_every_paper_runs(name, tiny, lab, tmp_path):
    tiny_papers.with_few_steps(path_of(name), tmp_path / "paper.json")
    (tmp_path / "prompts.txt").write_text("a red boat\na blue cat\n")
    prompts = "--prompts prompts.txt" if name == "mulosd" else ""
    answer = lab(f"sweep paper.json {OPTIONS} {prompts} --out drawn")
    assert answer.code == 0, answer.err

    paper = paper_of(name)
    for name, spec in paper.sweeps.items():
        store = Store(tmp_path / "drawn" / name)
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


def refuse_downloads(monkeypatch):
    def fetch(entry, *_):
        raise AssertionError(f"{entry.id} was to be downloaded")

    monkeypatch.setattr(hub, "_fetch", fetch)


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_of_every_paper_needs_no_file(name, lab, tmp_path, monkeypatch):
    """Every cell is listed, with the megabytes of its images, by hand for one of each size."""
    refuse_downloads(monkeypatch)
    answer = lab("sweep", path_of(name), "--dry-run", "--models", tmp_path / "none", "--device", "cpu")
    assert answer.code == 0, answer.err
    assert not (tmp_path / "none").exists()

    sweeps = paper_of(name).sweeps
    parts = answer.out.split(" is not on this machine")
    assert len(parts) == len(sweeps) + 1
    sides = {"mar": 256, "384": 384, "4x": 384, "16x": 384, "256": 256, "512": 512, "1024": 1024}
    for part, spec in zip(parts, sweeps.values(), strict=False):
        _, *rows = [row for row in cells_of(part) if not row[0].startswith("-")]
        assert len(rows) == len(expand(spec))
        side = sides[spec.model.partition("-")[0] if spec.model.startswith("mar") else spec.model.rpartition("-")[2]]
        assert {row[-1] for row in rows} == {f"{spec.images * side**2 * 3 / 1e6:,.0f}"}


@pytest.mark.parametrize("name", NAMES)
def test_models_are_in_the_catalogue(name):
    """The sweeps name no file that only one machine has."""
    families = ("mar", "llamagen", "dtok", "tar")
    ids = {entry.id for family in families for entry in hub.entries(family)}
    for spec in paper_of(name).sweeps.values():
        assert {spec.model, spec.draft, spec.tar} <= ids | {"auto"}


def test_settings_of_a_cell_are_those_of_its_row():
    """Of a few cells, by hand: shared settings, then the sweep's, then the cell's own."""
    cells = {}
    for name in ("fasthybrid", "cspd", "par", "lazymar"):
        for of, spec in paper_of(name).sweeps.items():
            for combination in expand(spec):
                cells[of, combination.title] = (spec, dict(combination.asked))

    spec, asked = cells["mar-huge", "FastHybrid"]
    assert (spec.model, spec.images, spec.batch) == ("mar-huge", 50000, 8)
    assert asked == {
        "steps": 64,
        "diffusion_steps": 100,
        "cfg": 3.2,
        "lookahead": 9,
        "threshold": 0.8,
        "guided_steps": 10,
    }
    spec, asked = cells["guidance", "MAR, d30"]
    assert spec.images == 10000 and asked == {"steps": 64, "diffusion_steps": 30, "cfg": 2.9}

    spec, asked = cells["huge-by-large-batch-8", "CSpD, 16 no align"]
    assert (spec.model, spec.draft, spec.images, spec.batch) == ("mar-huge", "mar-large", 64, 8)
    assert asked == {
        "steps": 256,
        "diffusion_steps": 100,
        "cfg": 3.2,
        "mode": "published",
        "draft_length": 16,
        "prefill_ratio": 0.05,
        "alignment": False,
    }
    spec, asked = cells["mar-huge", "LazyMAR, condition"]
    usual = {"steps": 64, "diffusion_steps": 100, "cfg": 3.2, "refresh_period": 9, "start_step": 5}
    assert (spec.images, spec.batch) == (50000, 128)
    assert asked == {**usual, "token_cache": False, "encoder_cache": False}
    assert cells["mar-huge", "LazyMAR, token"][1] == {**usual, "condition_cache": False, "head_cache": False}
    assert cells["mar-huge", "LazyMAR, unpredicted"][1] == {**usual, "selection": "decided"}
    assert cells["mar-huge", "LazyMAR, 32"][1] == {**usual, "steps": 32, "refresh_period": 5, "start_step": 4}
    spec, asked = cells["par-xxl-4x", "PAR"]
    assert spec.model == "par-xxl-4x" and asked == {"top_k": 0, "cfg": 1.435}


# A paper of one sweep whose figures are made here.
MADE = {
    "paper": "Made",
    "images": 4,
    "set": {"steps": 8},
    "not_measured": {"GenEval": "it needs a detector"},
    "notes": ["A note."],
    "sweeps": [
        {
            "name": "base",
            "samplers": ["mar", "mar:4", "cspd"],
            "set": {"mar:4.steps": 4, "cspd.draft_length": 2},
        }
    ],
    "tables": [
        {
            "title": "Table 1",
            "rows": [
                {"row": "MAR", "cell": "base/mar", "figures": {"fid": "2.32", "speedup": "1.00", "GenEval": "85.1"}},
                {"row": "MAR-4", "cell": "base/mar:4", "figures": {"fid": "2.47", "speedup": "1.96"}},
                {"row": "CSpD", "cell": "base/cspd", "figures": {"fid": "3.45", "acceptance": "0.30", "memory": "7"}},
                {"row": "DiT", "skipped": "not a model of this pack", "figures": {"fid": "2.27 ± 0.1"}},
            ],
        }
    ],
}


@pytest.fixture
def made(tmp_path):
    """The folder of the made paper: two shards of two images a cell, in 4, 1 and 2 seconds each."""
    folder = tmp_path / "made"
    store = Store(folder / "base")
    about = {"images": 4, "side": 8, "baseline": None}
    cells = [
        made_sweeps.cell("mar-0", "mar", {}, title="MAR", **about),
        made_sweeps.cell("mar-4", "mar", {"steps": 4}, title="MAR, 4", **about),
        made_sweeps.cell("cspd-0", "cspd", {}, title="CSpD", **about),
    ]
    store.write_manifest({"batch": 2}, cells)
    for cell, seconds in zip(cells, (4.0, 1.0, 2.0), strict=True):
        for first in (0, 2):
            counts = {"transformer_passes": 8, "accepted": 3, "rejected": 1} if cell.sampler == "cspd" else {}
            shard = Shard(shard_key(cell.key, first, 2), first, 2, "", counts=counts)
            times = {"seconds": seconds, "worker": "one", "peak_memory_bytes": (first + 3) << 20}
            images = made_sweeps.pictures(first, 2, 1.0, side=8)
            store.write_shard(cell, shard, images, np.arange(2), times)

    (folder / "paper.json").write_text(json.dumps(MADE))
    return folder


def test_our_figures_stand_beside_the_papers(made, lab):
    """By hand: 4 s for 2 images are 2 s an image; the cell "mar:4" is four times as fast as the sweep's first; 5 MiB is
    the larger peak; a figure against another cell is no paper's.
    """
    store = Store(made / "base")
    found = [
        Result("mar-4", "fid", "real.npz", 4, value=2.5),
        Result("mar-4", "fid", "mar-0", 4, value=9.9),
    ]
    store.append_results([asdict(result) for result in found])
    answer = lab("evaluate made")
    assert answer.code == 0 and "--reference" in answer.err
    assert answer.out.startswith("# Made\n\n## Table 1\n\n")

    head = ["row", "images", "FID, paper", "FID, here", "speed-up, paper", "speed-up, here", "GenEval, paper"]
    head += ["acceptance, paper", "acceptance, here", "memory, MB, paper", "memory, MB, here", "not run"]
    assert cells_of(answer.out) == [
        head,
        ["MAR", "4", "2.32", "", "1.00", "1.00", "85.1", "", "", "", "5", ""],
        ["MAR-4", "4", "2.47", "2.50", "1.96", "4.00", "", "", "", "", "5", ""],
        ["CSpD", "4", "3.45", "", "", "2.00", "", "0.30", "0.75", "7", "5", ""],
        ["DiT", "", "2.27 ± 0.1", "", "", "", "", "", "", "", "", "not a model of this pack"],
    ]
    assert answer.out.endswith("- GenEval is not measured here: it needs a detector.\n- A note.\n")


def test_evaluate_measures_every_sweep_of_a_paper(made, lab, tmp_path, monkeypatch, fake_fidelity):
    """FID by hand: the reference is one colour, so it is the squared distance of the means, and the variances."""
    np.savez(tmp_path / "real.npz", arr_0=np.zeros((4, 4, 4, 3), np.uint8))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    torch.save(fidelity.Inception.state(), tmp_path / "hub" / "checkpoints" / WEIGHTS)

    line = "evaluate made --reference real.npz --measures fid --resamples 10 --device cpu"
    refused = lab(line)
    assert refused.code == 2 and "--resize" in refused.err
    answer = lab(f"{line} --resize")
    assert answer.code == 0, answer.err

    small = resized(made_sweeps.pictures(0, 4, 1.0, side=8), (4, 4))
    colours = small.astype(float).mean((1, 2))
    distance = float(np.square(colours.mean(0)).sum() + colours.var(0, ddof=1).sum())
    (mar,) = (cells for cells in cells_of(answer.out[answer.out.index("# Made") :]) if cells[0] == "MAR")
    assert float(mar[3]) == pytest.approx(distance, abs=0.006)
    assert (
        "real.npz, at 4 x 4"
        in (made / "base" / "results").joinpath(next(p.name for p in (made / "base" / "results").iterdir())).read_text()
    )


def test_a_paper_is_measured_without_its_sweeps_that_have_no_plain_cell(made, lab, sentence):
    """CSpD's has sweeps of guidance and temperature, in which the acceptance alone counts."""
    cells = [made_sweeps.cell(f"cspd-{n}", "cspd", {}, 4, 8, title=f"CSpD, {n}", baseline=None) for n in (1, 2)]
    store = Store(made / "guidance")
    store.write_manifest({"batch": 4}, cells)
    for cell in cells:
        shard = Shard(shard_key(cell.key, 0, 4), 0, 4, "")
        store.write_shard(cell, shard, made_sweeps.pictures(0, 4, 1.0, side=8), np.arange(4), {})

    base = Store(made / "base")
    of_base = [dataclasses.replace(cell, baseline=None if cell.id == "mar-0" else "mar-0") for cell in base.cells()]
    base.write_manifest({"batch": 2}, of_base)

    guidance = {"name": "guidance", "samplers": ["cspd:1", "cspd:2"], "set": {"cspd:1.cfg": 1, "cspd:2.cfg": 2}}
    rows = [{"row": f"cfg {n}", "cell": f"guidance/cspd:{n}"} for n in (1, 2)]
    table = {"title": "Figure 13", "columns": ["acceptance", "fid"], "rows": rows}
    paper = {**MADE, "sweeps": [guidance, *MADE["sweeps"]], "tables": [table, *MADE["tables"]]}
    (made / "paper.json").write_text(json.dumps(paper))

    answer = lab("evaluate made --measures psnr --resamples 10 --device cpu")
    assert answer.code == 0, answer.err
    assert "guidance is not measured: measures: there is no cell of the unaccelerated sampler" in answer.err
    assert "MAR, 4: 1 measured" in answer.err and "CSpD: 1 measured" in answer.err
    assert answer.out.startswith("base\n\n| cell") and "# Made" in answer.out
    assert not list(store.results()) and len(list(base.results())) == 2

    base.write_manifest({"batch": 2}, [dataclasses.replace(cell, baseline=None) for cell in of_base])
    assert "no cell of the unaccelerated sampler" in sentence(lab("evaluate made --measures psnr --device cpu"))


def test_images_are_resized_without_antialiasing():
    """Bicubic by hand: halving takes the middle of each four with weights -3, 19, 19, -3 of 32 (a = -0.75)."""
    row = np.array([10, 20, 60, 80, 90, 30, 50, 70], np.uint8)
    pictures = np.repeat(np.broadcast_to(row[None, None, :, None], (1, 8, 8, 1)), 3, axis=3)
    small = resized(np.ascontiguousarray(pictures), (4, 4))
    inner = [(-3 * 20 + 19 * 60 + 19 * 80 - 3 * 90) / 32, (-3 * 80 + 19 * 90 + 19 * 30 - 3 * 50) / 32]
    assert small.shape == (1, 4, 4, 3)
    assert small[0, 2, 1:3, 0].tolist() == [round(value) for value in inner]
    assert resized(pictures, (8, 8)) is pictures


def of_colour(parts):
    """2048 features, of which the first is the mean of an image, and logits."""
    pictures = np.concatenate(list(parts))
    features = np.zeros((len(pictures), 2048), np.float32)
    features[:, 0] = pictures.mean((1, 2, 3))
    return features, np.zeros((len(pictures), 4))


def test_fid_is_of_the_references_statistics(tmp_path):
    """By hand: against mean m and no variance the distance is (mean - m)^2 plus the variance."""
    store = made_sweeps.write(tmp_path / "sweep", images=16)
    mean = np.zeros(2048)
    mean[0] = 100.0
    images = np.zeros((4, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "real.npz", arr_0=images, mu=mean, sigma=np.zeros((2048, 2048)))
    means = Means(of_colour, open_reference(tmp_path / "real.npz"), resamples=10)

    found = latest(evaluate(store, ["fid"], means))["mar-0", "fid"]
    own = made_sweeps.pictures(0, 16, 0.0).astype(float).mean((1, 2, 3))
    assert found.value == pytest.approx((own.mean() - 100) ** 2 + own.var(ddof=1), rel=1e-4)


def statistics(path, of=0.0):
    """A file as that of MAR's evaluation: Inception's mean, ``of`` in the first place, and no variance."""
    mean = np.zeros(2048)
    mean[0] = of
    np.savez(path, mu=mean, sigma=np.zeros((2048, 2048)))
    return path


def test_statistics_alone_are_a_reference(tmp_path):
    """The same figure as with images beside them; the images' own size does not matter."""
    store = made_sweeps.write(tmp_path / "sweep", images=16)
    np.savez(
        tmp_path / "both.npz", arr_0=np.zeros((4, 16, 16, 3), np.uint8), **np.load(statistics(tmp_path / "s.npz", 9.0))
    )

    found = {}
    for name in ("both.npz", "s.npz"):
        means = Means(of_colour, open_reference(tmp_path / name), resamples=10)
        found[name] = latest(evaluate(store, ["fid"], means))["mar-0", "fid"]
    assert found["s.npz"].value == found["both.npz"].value > 0
    assert (found["s.npz"].against, found["both.npz"].against) == ("s.npz", "both.npz")


@pytest.mark.parametrize(
    "mean, covariance, says",
    [
        (np.zeros(64), np.zeros((64, 64)), "2048"),
        (np.full(2048, np.nan), np.zeros((2048, 2048)), "not finite"),
        (np.zeros(2048, int), np.zeros((2048, 2048)), "not finite"),
    ],
    ids=["size", "nan", "type"],
)
def test_statistics_that_are_not_inceptions_are_refused(tmp_path, mean, covariance, says):
    np.savez(tmp_path / "bad.npz", arr_0=np.zeros((2, 4, 4, 3), np.uint8), mu=mean, sigma=covariance)
    with pytest.raises(UserError, match=f"^reference: .*{says}"):
        open_reference(tmp_path / "bad.npz")


def test_a_folder_holds_the_sweeps_of_one_paper(made, lab, sentence, tmp_path):
    (tmp_path / "other.json").write_text(json.dumps({**MADE, "paper": "Another"}))
    assert "holds the sweeps of Made" in sentence(lab("sweep other.json --out made"))

    (made / "paper.json").write_text("[")
    assert "paper.json" in sentence(lab("evaluate made"))


def test_models_that_read_text_need_prompts(tiny, lab, tmp_path):
    """The remedy of the message works: a file of prompts."""
    table = read_table(tiny_papers.with_few_steps(path_of("mulosd"), tmp_path / "paper.json"))
    table["sweeps"] = [entry for entry in table["sweeps"] if entry["name"] == "tar-7b-512"]
    table["tables"] = [{"title": "One", "rows": [{"row": "MuLo-SD", "cell": "tar-7b-512/mulosd"}]}]
    (tmp_path / "one.json").write_text(json.dumps(table))
    refused = lab(f"sweep one.json {OPTIONS} --out drawn")
    assert refused.code == 2 and "give a file of prompts with --prompts" in refused.err

    (tmp_path / "prompts.txt").write_text("a red boat\n")
    answer = lab(f"sweep one.json {OPTIONS} --prompts prompts.txt --out drawn")
    assert answer.code == 0, answer.err
    assert cells_of(answer.out)[-1][:2] == ["MuLo-SD", "1"]
