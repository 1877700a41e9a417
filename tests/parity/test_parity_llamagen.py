"""The recorded cases of LlamaGen, PAR and ZipAR, spoilt ones, and cases of another size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig
from fastar_nodes.tools.parity import llamagen as parity_llamagen
from fastar_nodes.tools.parity.cases import judge
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).with_name("llamagen")

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def verdicts(folder: Path) -> dict[str, str]:
    """Case to ok, FAIL or not yet."""
    return {outcome.name: outcome.verdict for outcome in map(judge, parity_llamagen.cases(folder))}


def copy(folder: Path, *names: str) -> Path:
    for name in names:
        shutil.copyfile(FOLDER / name, folder / name)
    return folder


def change(path: Path, **changes) -> None:
    """Rewrite tensors of a file: name (dots as __) to a function of the old one."""
    state = load_file(path)
    for name, new in changes.items():
        key = name.replace("__", ".")
        state[key] = new(state[key].clone())
    save_file(state, path)


def test_all_recorded_cases_agree():
    found = verdicts(FOLDER)
    assert set(found.values()) == {"ok"}, found
    kinds = {
        "c2i.greedy": 3,
        "t2i.greedy": 2,
        "par_4x.greedy": 3,
        "zipar_c2i": 12,
        "zipar_t2i": 9,
        "ziparmasked_c2i": 9,
        "ziparmasked_t2i": 6,
        "gpt_c2i_tiny": 4,
        "gpt_t2i_tiny": 5,
        "par_4x_tiny": 3,
        "sampler": 7,
        "keys": 10,
    }
    counted = {kind: sum(name.startswith(f"llamagen/{kind}") for name in found) for kind in kinds}
    assert counted == kinds
    assert sum(name.endswith(".sampled") for name in found) == 3 + 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "tensor", "case"),
    [
        ("gpt_c2i_tiny_io", "c2i__full_logits", "gpt_c2i_tiny.full_logits"),
        ("gpt_c2i_tiny_io", "c2i__l0_attn", "gpt_c2i_tiny.inside"),
        ("gpt_c2i_tiny_io", "c2i__cached_logits", "gpt_c2i_tiny.cached_logits"),
        ("gpt_c2i_tiny_io", "c2i__greedy__cfg4__tokens", "c2i.greedy.cfg4"),
    ],
)
def test_a_changed_number_fails_its_case(tmp_path, file, tensor, case):
    copy(tmp_path, "gpt_c2i_tiny.safetensors", "gpt_c2i_tiny_io.safetensors")

    def spoil(t):
        t.view(-1)[-1] += 1 if t.dtype == torch.int64 else 3e-4
        return t

    change(tmp_path / f"{file}.safetensors", **{tensor: spoil})
    found = verdicts(tmp_path)
    assert found[f"llamagen/{case}"] == "FAIL"
    assert len(found) == 8 and sum(v == "FAIL" for v in found.values()) <= 2  # full_logits are looked at twice


@pytest.mark.slow
def test_other_weights_fail(tmp_path):
    copy(tmp_path, "par_4x_tiny.safetensors", "par_4x_tiny_io.safetensors")
    change(tmp_path / "par_4x_tiny.safetensors", spe_tok_embeddings__special_embeddings__weight=lambda t: t.flip(0))
    found = verdicts(tmp_path)
    assert found["llamagen/par_4x_tiny.full_logits"] == found["llamagen/par_4x.greedy.cfg1"] == "FAIL"
    assert found["llamagen/par_4x_tiny.order"] == "ok"


def test_damaged_and_missing_files_fail_without_a_traceback(tmp_path):
    copy(
        tmp_path,
        "gpt_c2i_tiny_io.safetensors",
        "zipar_t2i_tiny_io.safetensors",
        "sampler_io.safetensors",
        "keys_c2i_B.json",
    )
    data = (tmp_path / "sampler_io.safetensors").read_bytes()
    (tmp_path / "sampler_io.safetensors").write_bytes(data[: len(data) // 2])
    keys = json.loads((tmp_path / "keys_c2i_B.json").read_text())
    keys["keys"]["norm.weight"] = [769]
    (tmp_path / "keys_c2i_B.json").write_text(json.dumps(keys))
    found = verdicts(tmp_path)
    assert set(found.values()) == {"FAIL"}
    assert {"llamagen/sampler", "llamagen/zipar_t2i_tiny", "llamagen/keys.c2i_B"} <= set(found)


def test_cases_of_another_size_are_read_from_their_own_tensors(tmp_path):
    """Three heads, one block, a 4 x 4 grid, 7 classes: only the logits, recorded here by the uncached pass."""
    net = Llama(LlamaConfig(24, 1, 3, 3, 40, 31, "class", 7)).requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.copy_(torch.randn(p.shape, generator=g) * 0.5)
    tokens, cond, places = torch.randint(31, (2, 16), generator=g), torch.tensor([6, 2]), net.positions(4, 1)
    table = torch.cat([torch.zeros(1, 4, 2), places.table[1:, :, 1::2].transpose(1, 2)])
    logits = net(torch.cat([net.prefix(cond), net.embed(tokens)], 1), torch.arange(-1, 16), places)
    save_file(net.state_dict(), tmp_path / "gpt_other.safetensors")
    io = {
        "cond": cond,
        "tokens": tokens,
        "freqs_cis": table,
        "c2i.full_logits": logits,
        "c2i.cached_logits": logits[:, :16].contiguous(),
    }
    save_file(io, tmp_path / "gpt_other_io.safetensors")
    assert verdicts(tmp_path) == {
        f"llamagen/gpt_other.{name}": "ok" for name in ("full_logits", "cached_logits", "inside")
    }
