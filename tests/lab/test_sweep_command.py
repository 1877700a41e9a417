"""The command sweep on tiny models in place of the built-in ones."""

import json
import re
import shlex

import numpy as np
import pytest
import torch
import yaml
from fastar_nodes.cli.main import Parser
from fastar_nodes.lab.sweeps.spec import expand, read_spec
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.sweep import arguments

pytestmark = pytest.mark.slow

FEW = {"steps": 4, "diffusion_steps": 4, "fasthybrid.lookahead": 2, "zipar.window": [2, 3]}
SPEC = {"samplers": ["mar", "fasthybrid", "llamagen", "zipar"], "images": 5, "batch": 2, "set": FEW}


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """No variables of torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def spec(tmp_path):
    def write(**more):
        path = tmp_path / "spec.json"
        path.write_text(json.dumps({**SPEC, **more}))
        return path

    return write


def rows(table: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][1:]


def test_a_sweep_over_two_families(lab, tiny_demo, spec, tmp_path):
    answer = lab("sweep", spec(), "--out", "sweep")
    assert answer.code == 0, answer.err
    store = Store(tmp_path / "sweep")
    assert [r[1] for r in rows(answer.out)] == ["5"] * 5
    names = ["MAR", "FastHybrid", "LlamaGen", "ZipAR, window 2", "ZipAR, window 3"]
    assert [r[0].partition(" (")[0] for r in rows(answer.out)] == names
    mar, fast, llamagen, *zipar = store.cells()
    assert (fast.baseline, zipar[0].baseline, mar.baseline) == (mar.id, llamagen.id, None)
    assert all(set(store.times(cell)) == {0, 2, 4} for cell in store.cells())
    assert store.times(mar)[0]["machine"].endswith(f"torch {torch.__version__}")
    again = lab("sweep", spec(), "--out", "sweep")
    assert again.out == answer.out and "15 of 15 shards are finished already" in again.err


def test_torchruns_variables_split_the_shards(lab, tiny_demo, spec, tmp_path, monkeypatch):
    alone = lab("sweep", spec(), "--out", "alone").out
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    answer = lab("sweep", spec(), "--out", "sweep")
    # The second of three ranges of two cells on the MAR, the first and the last of three cells on the LlamaGen.
    assert answer.out == "" and len(list((tmp_path / "sweep").rglob("shard-*.npz"))) == 2 + 3 + 3
    monkeypatch.setenv("RANK", "0")
    assert lab("sweep", spec(), "--out", "sweep").out == alone


def test_prompts_alternate_and_do_not_depend_on_the_shard(lab, tmp_path):
    """Tar's codes are written by its language model."""
    entries = {"model": "demo-dtok-low", "samplers": ["zipar"], "images": 4, "prompts": ["a cat", "a boat"]}
    entries["set"] = {"window": 1, "prompt.temperature": 0.9}
    pictures = {}
    for batch in (2, 4):
        (tmp_path / "spec.json").write_text(json.dumps({**entries, "batch": batch}))
        answer = lab("sweep", "spec.json", "--out", f"sweep{batch}", "--png")
        assert answer.code == 0, answer.err
        store = Store(tmp_path / f"sweep{batch}")
        (cell,) = store.cells()
        assert store.labels(cell, store.shards(cell)[0]).tolist() == ["a cat", "a boat"] * (batch // 2)
        pictures[batch] = np.concatenate([store.pictures(cell, s) for s in store.shards(cell)])
        assert len(list((tmp_path / f"sweep{batch}" / "export" / cell.id).iterdir())) == 4
    assert np.abs(pictures[2].astype(int) - pictures[4]).max() <= 1 and len({p.tobytes() for p in pictures[2]}) == 4


def test_a_dry_run_draws_nothing(lab, tiny_demo, spec, tmp_path):
    answer = lab("sweep", spec(), "--dry-run")
    assert answer.code == 0 and [p.name for p in tmp_path.iterdir()] == ["spec.json"]
    assert [row[2:4] for row in rows(answer.out)] == [["5", "3"]] * 5
    lab("sweep", spec(), "--out", "sweep")
    before = sorted((tmp_path / "sweep").rglob("*"))
    answer = lab("sweep", spec(), "--out", "sweep", "--dry-run")
    # 5 images in shards of 2: the last one holds a single image.
    assert "15 shards are finished already" in answer.out and sorted((tmp_path / "sweep").rglob("*")) == before


def test_a_sweep_says_that_its_folder_is_new(lab, tiny_demo, spec, tmp_path):
    """A folder that was moved would otherwise be made again without a word."""
    told = f"a new sweep begins in {tmp_path / 'sweep'}"
    assert told in lab("sweep", spec(), "--out", "sweep").err
    assert told not in lab("sweep", spec(), "--out", "sweep").err
    (tmp_path / "sweep").rename(tmp_path / "moved")
    assert told in lab("sweep", spec(), "--out", "sweep").err


def test_threads_are_those_of_the_folders_first_run(lab, tiny_demo, spec, tmp_path):
    before = lab("sweep", spec(), "--out", "sweep", "--threads", 2).out
    torch.set_num_threads(1)
    answer = lab("sweep", spec(), "--out", "sweep")
    assert answer.out == before and "15 of 15" in answer.err and torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", ["x", -5, 10**30, True, None])
def test_absurd_threads_of_a_strangers_folder_are_refused(lab, sentence, tiny_demo, spec, tmp_path, threads):
    lab("sweep", spec(), "--out", "sweep", "--images", 1)
    path = tmp_path / "sweep" / "manifest.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "numerics": {**found["numerics"], "threads": threads}}))
    assert "give --threads" in sentence(lab("sweep", spec(), "--out", "sweep"))


# What an entry of the file must not be is in tests/lab/test_sweep_spec.py.
BAD = [
    ("images", {}, "--images -1"),
    ("images", {}, "--images 0"),
    ("images", {}, "--images x"),
    ("batch", {}, "--batch 0"),
    ("seed", {}, "--seed -1"),
    ("threads", {"threads": 1000000}, ""),
    ("device", {}, "--device cuda:99"),
    ("workers", {}, "--workers 2"),
    ("unicorn", {"labels": ["unicorn"]}, ""),
    ("prompts", {"prompts": ["a cat"], "samplers": ["llamagen"], "set": {}}, ""),
    ("none.safetensors", {"model": "none.safetensors"}, ""),
]


@pytest.mark.parametrize("named, more, line", BAD, ids=str)
def test_bad_input_is_refused_before_anything_is_drawn(lab, sentence, tiny_demo, spec, tmp_path, named, more, line):
    spec(**more)
    assert named in sentence(lab(f"sweep spec.json --out sweep {line}"))
    assert not (tmp_path / "sweep").exists()


def test_a_missing_folder_or_file_is_refused(lab, sentence, spec, tmp_path, monkeypatch):
    spec()
    (tmp_path / "file").write_text("")
    for line in ("spec.json", "none.toml --out x", "spec.json --out file"):
        sentence(lab(f"sweep {line}"))
    for name, value in (("RANK", "x"), ("RANK", "3"), ("WORLD_SIZE", "")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert f"{name} {value!r}" in sentence(lab("sweep spec.json --out x"))


def test_the_examples_are_accepted(root):
    """Files as they are, and the sweep commands in them without their variables."""
    folder = root / "docs" / "examples"
    named = []
    for path in sorted(folder.iterdir()):
        whole = path.read_text(encoding="utf-8")
        assert path.suffix != ".yaml" or isinstance(yaml.safe_load(whole), dict)
        text = whole.replace("\\\n", " ").replace("\n#         ", " ")
        for found in re.findall(r"python -m fastar_nodes.lab sweep ([^\n]*)", text):
            parser = Parser("sweep")
            arguments(parser)
            asked = parser.parse_args(shlex.split(found.split("'")[0]))
            assert asked.out and int(asked.images) >= 2000
            named.append(path.name)
    assert {*named} == {"demo.toml", "slurm.sh", "skypilot.yaml"}
    pytest.importorskip("tomllib")
    assert len(expand(read_spec(folder / "demo.toml"))) == 12
