"""The recorded cases of Tar, spoilt ones, and cases of another size in the recorded layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.model_loaders.networks.llama import Llama
from fastar_nodes.model_loaders.networks.ta_tok import TATok
from fastar_nodes.tools.parity import tar as parity_tar
from fastar_nodes.tools.parity.cases import judge
from safetensors.torch import load_file, save_file
from tar_files import DTOK, TA_TOK, detokenizer_state, tiny_ta_tok

FOLDER = Path(__file__).with_name("tar")


@torch.no_grad()
def verdicts(folder: Path) -> dict[str, str]:
    """Case to ok, FAIL or not yet."""
    return {outcome.name: outcome.verdict for outcome in map(judge, parity_tar.cases(folder))}


def spoil(path: Path, name: str, add: float = 3e-4) -> None:
    data = load_file(path)
    flat = data[name].view(-1)
    flat[-1] = flat[-1] + (1 if not flat.is_floating_point() else add)
    save_file(data, path)


def test_all_recorded_cases_agree() -> None:
    found = verdicts(FOLDER)
    assert set(found.values()) == {"ok"} and len(found) == 8
    assert sum(name.startswith("tar/sampling_filter.") for name in found) == 7 and "tar/simvq_bottleneck" in found


@pytest.mark.parametrize(
    "name",
    [
        "emb",
        "projected_z",
        "indices",
        "regularized_z",
        "output",
        "codes_entry",
        "codes_decoded",
        "sd.out_linear.weight",
    ],
)
def test_a_changed_number_fails_its_case_alone(tmp_path: Path, name: str) -> None:
    shutil.copytree(FOLDER, tmp_path / "tar")
    spoil(tmp_path / "tar" / "simvq_bottleneck.safetensors", name, 0.01 if name.startswith("sd.") else 3e-4)
    assert [case for case, verdict in verdicts(tmp_path / "tar").items() if verdict == "FAIL"] == [
        "tar/simvq_bottleneck"
    ]


def test_a_changed_filter_fails_its_case_alone(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "tar")
    spoil(tmp_path / "tar" / "sampling_filter.safetensors", "probs_t1.0_k10_p1.0")
    assert [case for case, verdict in verdicts(tmp_path / "tar").items() if verdict == "FAIL"] == [
        "tar/sampling_filter.t1.0_k10_p1.0"
    ]


# ------------------------------------------------------------------------------------- other sizes, same layout


@torch.no_grad()
def detokenizer(folder: Path) -> None:
    """A grid of 3 x 3 behind 5 condition rows: what the plain, uncached network says of it."""
    config = replace(DTOK, absolute=5 + 9 - 1)
    about = {
        "dim": 16,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 20,
        "cond_dim": 24,
        "cls_token_num": 5,
        "max_seq_len": 9,
    }
    save_file(detokenizer_state(config), folder / "ar_tiny_state.safetensors", metadata={"config": json.dumps(about)})
    net = Llama(config)
    net.load_state_dict(detokenizer_state(config))
    g = torch.Generator().manual_seed(1)
    cond, idx = torch.randn(2, 5, 24, generator=g), torch.randint(20, (2, 9), generator=g)

    def logits(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = features.shape[1]
        x = torch.cat([net.prefix(features), net.embed(tokens)], 1)
        return net(x, torch.arange(-rows, tokens.shape[1]), net.positions(3, rows))[:, rows - 1 :]

    greedy = idx[:, :0]
    for _ in range(9):
        both = logits(torch.cat([cond, cond * 0]), torch.cat([greedy, greedy]))[:, -1]
        greedy = torch.cat([greedy, (both[2:] + 2.5 * (both[:2] - both[2:])).argmax(-1, keepdim=True)], 1)
    io = {
        "cond": cond,
        "cond4": cond[:, :2],
        "idx": idx,
        "logits_full": logits(cond, idx[:, :-1]),
        "logits_full_uncond": logits(cond * 0, idx[:, :-1]),
        "logits_full_cond4": logits(cond[:, :2], idx[:, :-1]),
        "greedy_cfg2.5": greedy,
    }
    save_file(
        {k: v.clone(memory_format=torch.contiguous_format) for k, v in io.items()}, folder / "ar_tiny_io.safetensors"
    )


def test_a_detokenizer_of_another_size(tmp_path: Path) -> None:
    detokenizer(tmp_path)
    names = ["greedy_cfg2.5", "logits_full", "logits_full_cond4", "logits_full_uncond"]
    assert verdicts(tmp_path) == {f"tar/ar_tiny.{name}": "ok" for name in names}
    for name in names:
        detokenizer(tmp_path)
        spoil(tmp_path / "ar_tiny_io.safetensors", name)
        assert [case for case, verdict in verdicts(tmp_path).items() if verdict == "FAIL"] == [f"tar/ar_tiny.{name}"]


@torch.no_grad()
def test_ta_tok_and_vq_of_another_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = tiny_ta_tok()
    save_file(net.state_dict(), tmp_path / "tatok_tiny_state.safetensors")
    (tmp_path / "tiny_siglip").mkdir()
    (tmp_path / "tiny_siglip" / "config.json").write_text(json.dumps({"vision_config": {"num_attention_heads": 3}}))
    # Pictures are as large as the patches cover, which is what is assumed where nothing says more.
    img = torch.rand(2, 3, 15, 15)
    net = TATok(replace(TA_TOK, input_size=15))
    net.load_state_dict(tiny_ta_tok().state_dict())
    io: dict[str, torch.Tensor] = {"img": img, "img_big": torch.rand(1, 3, 20, 31), "hidden_m2": net.encode(img)}
    io["indices_big"] = net.codes(io["img_big"])
    for pool in (1, 2):
        codes = net.codes(img, pool)
        io |= {
            f"indices_ps{pool}": codes,
            f"vq_feats_ps{pool}": net.pooled(img, pool),
            f"rec_ps{pool}": net.features(codes),
        }
        io[f"decoded_from_indices_ps{pool}"] = net.features(codes)
    save_file(
        {k: v.clone(memory_format=torch.contiguous_format) for k, v in io.items()},
        tmp_path / "tatok_tiny_io.safetensors",
    )
    vq = VQAutoencoder(VQConfig(ch=32, ch_mult=(1, 1), blocks=1, z_channels=8, codes=20))
    save_file(vq.state_dict(), tmp_path / "vq_tiny_state.safetensors")
    x = torch.rand(1, 3, 8, 12)
    quant, indices = vq.encode(x)
    save_file(
        {
            "x": x,
            "prequant": vq.features(x),
            "indices": indices,
            "quant": quant,
            "decoded": vq.decode(quant),
            "rand_codes": indices.clone(),
            "rand_entry": quant.clone(),
            "rand_decoded": vq.decode_codes(indices),
        },
        tmp_path / "vq_tiny_io.safetensors",
    )
    expected = [
        *(f"tatok_tiny.{way}.pool{p}" for p in (1, 2) for way in ("encode", "decode")),
        "tatok_tiny.encode.resized",
    ]
    expected += ["vq_tiny.encode", "vq_tiny.decode"]
    assert verdicts(tmp_path) == {f"tar/{name}": "ok" for name in expected}
    spoil(tmp_path / "tatok_tiny_io.safetensors", "rec_ps2")
    spoil(tmp_path / "vq_tiny_io.safetensors", "prequant")
    wrong = {name for name, verdict in verdicts(tmp_path).items() if verdict == "FAIL"}
    assert wrong == {"tar/vq_tiny.encode", "tar/tatok_tiny.decode.pool2"}


def test_damaged_and_missing_files_fail_alone(tmp_path: Path) -> None:
    detokenizer(tmp_path)
    (tmp_path / "ar_tiny_state.safetensors").unlink()
    data = (FOLDER / "simvq_bottleneck.safetensors").read_bytes()
    (tmp_path / "simvq_bottleneck.safetensors").write_bytes(data[: len(data) // 2])
    shutil.copy(FOLDER / "sampling_filter.safetensors", tmp_path)
    found = verdicts(tmp_path)
    wrong = {name for name, verdict in found.items() if verdict == "FAIL"}
    assert wrong == {"tar/ar_tiny_io", "tar/simvq_bottleneck"} and len(found) == 9
