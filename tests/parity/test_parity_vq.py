"""The recorded cases of the VQ tokenizer, spoilt ones, and cases of another size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fastar_nodes.model_loaders.autoencoders import load_vq
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.tools.parity import vq as parity_vq
from fastar_nodes.tools.parity.cases import judge
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).with_name("vq")


@torch.no_grad()
def verdicts(folder: Path) -> dict[str, str]:
    """Case to ok, FAIL or why."""
    return {outcome.name: outcome.verdict for outcome in map(judge, parity_vq.cases(folder))}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER, tmp_path / "vq")
    return tmp_path / "vq"


def test_all_recorded_cases_agree() -> None:
    names = ["vq8_tiny.decode", "vq8_tiny.encode", "keys.vq_16", "keys.vq_8"]
    assert verdicts(FOLDER) == {f"llamagen/{name}": "ok" for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "spoilt"),
    [
        ("decode_3x5", "decode"),
        ("zq_4x4", "decode"),
        ("post_quant_4x4", "decode"),
        ("indices_4x4", "decode"),
        ("enc_h", "encode"),
        ("enc_indices", "encode"),
        ("recon", "encode"),
    ],
)
def test_a_changed_number_fails_its_case_alone(copy: Path, tensor: str, spoilt: str) -> None:
    data = load_file(copy / "vq8_tiny_io.safetensors")
    flat = data[tensor].view(-1)
    flat[7] = (flat[7] + 1) % 64 if tensor.startswith(("ind", "enc_ind")) else flat[7] + 3e-4
    save_file(data, copy / "vq8_tiny_io.safetensors")
    found = verdicts(copy)
    assert [name for name, verdict in found.items() if verdict == "FAIL"] == [f"llamagen/vq8_tiny.{spoilt}"]


@pytest.mark.slow
def test_other_weights_fail(copy: Path) -> None:
    state = load_file(copy / "vq8_tiny.safetensors")
    state["decoder.mid.1.proj_out.weight"] += 0.05
    state["encoder.conv_blocks.0.downsample.conv.weight"] = state["encoder.conv_blocks.0.downsample.conv.weight"].flip(
        2
    )
    save_file(state, copy / "vq8_tiny.safetensors")
    found = verdicts(copy)
    assert found["llamagen/vq8_tiny.decode"] == found["llamagen/vq8_tiny.encode"] == "FAIL"


def test_damaged_and_missing_files_fail_alone(copy: Path) -> None:
    listed = json.loads((copy / "keys_vq_8.json").read_text())
    listed["keys"]["quant_conv.bias"] = [9]
    listed["total_elements"] += 1
    (copy / "keys_vq_8.json").write_text(json.dumps(listed))
    (copy / "vq8_tiny.safetensors").unlink()
    data = (copy / "vq8_tiny_io.safetensors").read_bytes()
    (copy / "vq9_io.safetensors").write_bytes(data[: len(data) // 2])
    assert verdicts(copy) == {
        "llamagen/vq8_tiny": "FAIL",
        "llamagen/vq9": "FAIL",
        "llamagen/keys.vq_16": "ok",
        "llamagen/keys.vq_8": "FAIL",
    }


@torch.no_grad()
def test_cases_of_another_size_are_read_from_their_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = VQAutoencoder(VQConfig(ch=32, ch_mult=(1, 2), blocks=1, z_channels=16, codes=20, code_channels=4))
    save_file(net.state_dict(), tmp_path / "vq2.safetensors")
    net, codes = load_vq(tmp_path / "vq2.safetensors").net, torch.randint(20, (3, 14))
    save_file(
        {"indices_2x7": codes, "decode_2x7": net.decode_codes(codes.view(3, 2, 7))}, tmp_path / "vq2_io.safetensors"
    )
    assert verdicts(tmp_path) == {"llamagen/vq2.decode": "ok"}
