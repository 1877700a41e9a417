"""docs/examples/merge_lora.py, which merges a LoRA of peft, on a tiny Janus."""

import json
import shutil
from pathlib import Path
from runpy import run_path

import pytest
import torch
from fastar_nodes.model_loaders.janus.loader import load_janus
from safetensors.torch import load_file, save_file

RANK, ALPHA = 2, 3.0
FIRST = "language_model.model.layers.0.self_attn.q_proj"
SECOND = "language_model.model.layers.0.mlp.down_proj"


@pytest.fixture
def merge(root):
    """Runs the script with the folders of the test."""
    script = root / "docs" / "examples" / "merge_lora.py"
    return lambda: run_path(str(script))["merge"](Path("Janus-Pro-1B"), Path("adapter"), Path("my-janus"))


@pytest.fixture
def model(root, tmp_path, monkeypatch):
    """The weights of a tiny Janus in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "tests" / "parity" / "janus" / "original", tmp_path / "Janus-Pro-1B")
    return load_file(tmp_path / "Janus-Pro-1B" / "model.safetensors")


def write_adapter(folder, model, names, **settings):
    """An adapter of peft with random matrices; gives them by the names of their layers."""
    draw = torch.Generator().manual_seed(5)
    made, file = {}, {}
    for name in names:
        rows, columns = model[f"{name}.weight"].shape if f"{name}.weight" in model else (2, 2)
        made[name] = torch.randn(RANK, columns, generator=draw), torch.randn(rows, RANK, generator=draw)
        for part, matrix in zip("AB", made[name], strict=True):
            file[f"base_model.model.{name}.lora_{part}.weight"] = matrix

    folder.mkdir()
    save_file(file, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_dora": False, "rank_pattern": {}, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return made


def test_the_script_merges_and_the_model_loads(merge, model, tmp_path):
    made = write_adapter(tmp_path / "adapter", model, (FIRST, SECOND))
    merge()

    merged = load_file(tmp_path / "my-janus" / "model.safetensors")
    assert {*merged} == {*model}
    for name, weight in model.items():
        expected = weight.float()
        if name.removesuffix(".weight") in made:
            down, up = made[name.removesuffix(".weight")]
            # Entry by entry: alpha / r times the sum over the rank.
            change = torch.stack([up[:, i, None] * down[None, i] for i in range(RANK)]).sum(0)
            expected = expected + ALPHA / RANK * change
        assert merged[name].dtype is weight.dtype
        assert torch.allclose(merged[name].float(), expected.to(weight.dtype).float(), rtol=2**-8, atol=1e-6)  # bf16
        assert torch.equal(merged[name], weight) == (name.removesuffix(".weight") not in made)

    before, after = (load_janus(tmp_path / folder, "fp32") for folder in ("Janus-Pro-1B", "my-janus"))
    states = before.net.state_dict(), after.net.state_dict()
    assert sum(not torch.equal(states[0][name], states[1][name]) for name in states[0]) == 2


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {FIRST: 4}}])
def test_the_script_refuses_other_kinds(merge, model, tmp_path, settings):
    write_adapter(tmp_path / "adapter", model, (FIRST,), **settings)
    with pytest.raises(SystemExit, match="merge_and_unload"):
        merge()
