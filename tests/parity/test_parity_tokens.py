"""The recorded cases of LlamaGen, PAR, ZipAR, Tar, MuLo-SD and the VQ tokenizer, spoilt ones, and cases of another size."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.model_loaders.autoencoders import load_vq
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig
from fastar_nodes.model_loaders.networks.ta_tok import TATok
from fastar_nodes.tools.parity import llamagen, mulosd, tar, vq
from fastar_nodes.tools.parity.cases import judge
from safetensors.torch import load_file, save_file
from tar_files import DTOK, TA_TOK, detokenizer_state, tiny_ta_tok

HERE = Path(__file__).parent

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def verdicts(cases, folder: Path) -> dict[str, str]:
    """Case to ok, FAIL or not yet."""
    return {outcome.name: outcome.verdict for outcome in map(judge, cases(folder))}


def failed(cases, folder: Path) -> list[str]:
    return [name for name, verdict in verdicts(cases, folder).items() if verdict == "FAIL"]


def copied(path: Path, target: Path, half: bool = False) -> Path:
    """A copy of a recorded file in a folder; ``half``: cut off in the middle."""
    data = path.read_bytes()
    (target / path.name).write_bytes(data[: len(data) // 2] if half else data)
    return target / path.name


def spoil(path: Path, name: str, add: float = 3e-4) -> None:
    data = load_file(path)
    flat = data[name].view(-1)
    flat[-1] = flat[-1] + (add if flat.is_floating_point() else 1)
    save_file(data, path)


def save(path: Path, tensors: dict[str, torch.Tensor], **more) -> None:
    save_file({k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}, path, **more)


# ------------------------------------------------------------------------------------------------ what was recorded


def test_all_recorded_cases_of_llamagen_par_and_zipar_agree():
    found = verdicts(llamagen.cases, HERE / "llamagen")
    assert set(found.values()) == {"ok"}, found
    kinds = {"c2i.greedy": 3, "t2i.greedy": 2, "par_4x.greedy": 3, "zipar_c2i": 12, "zipar_t2i": 9}
    kinds |= {"ziparmasked_c2i": 9, "ziparmasked_t2i": 6, "gpt_c2i_tiny": 4, "gpt_t2i_tiny": 5, "par_4x_tiny": 3}
    kinds |= {"sampler": 7, "keys": 10}
    assert {kind: sum(name.startswith(f"llamagen/{kind}") for name in found) for kind in kinds} == kinds
    assert sum(name.endswith(".sampled") for name in found) == 3 + 6


def test_all_recorded_cases_of_the_others_agree():
    found = verdicts(tar.cases, HERE / "tar")
    assert set(found.values()) == {"ok"} and len(found) == 8 and "tar/simvq_bottleneck" in found
    names = ["vq8_tiny.decode", "vq8_tiny.encode", "keys.vq_16", "keys.vq_8"]
    assert verdicts(vq.cases, HERE / "vq") == {f"llamagen/{name}": "ok" for name in names}
    assert verdicts(mulosd.cases, HERE / "tar") == {f"tar/mulosd_geometry.{i}": "ok" for i in range(8)}
    settings = ("off", "k8_d0.2", "k32_d0.4", "pp_k32_l3")
    names = ["nearest", *(f"case1.{how}.{setting}" for how in ("greedy", "sample") for setting in settings)]
    assert verdicts(mulosd.cases, HERE / "llamagen") == {f"llamagen/lantern_accept.{name}": "ok" for name in names}


# Cases, files, and a tensor of the last file to the cases that fail if its last number is another one.
GPT = ("llamagen/gpt_c2i_tiny.safetensors", "llamagen/gpt_c2i_tiny_io.safetensors")
SIMVQ, FILTER, LANTERN = ("tar/simvq_bottleneck.safetensors",), ("tar/sampling_filter.safetensors",), "lantern_accept"
TINY_VQ = ("vq/vq8_tiny.safetensors", "vq/vq8_tiny_io.safetensors")
SPOILT = [
    (llamagen, GPT, "c2i.l0_attn", ["llamagen/gpt_c2i_tiny.inside"]),
    (llamagen, GPT, "c2i.cached_logits", ["llamagen/gpt_c2i_tiny.cached_logits"]),
    (llamagen, GPT, "c2i.greedy.cfg4.tokens", ["llamagen/c2i.greedy.cfg4"]),
    *((tar, SIMVQ, name, ["tar/simvq_bottleneck"]) for name in ("emb", "projected_z", "indices", "regularized_z")),
    *((tar, SIMVQ, name, ["tar/simvq_bottleneck"]) for name in ("output", "codes_entry", "codes_decoded")),
    (tar, SIMVQ, "sd.out_linear.weight", ["tar/simvq_bottleneck"]),
    (tar, FILTER, "probs_t1.0_k10_p1.0", ["tar/sampling_filter.t1.0_k10_p1.0"]),
    *((vq, TINY_VQ, f"{name}_4x4", ["llamagen/vq8_tiny.decode"]) for name in ("zq", "post_quant", "indices")),
    (vq, TINY_VQ, "decode_3x5", ["llamagen/vq8_tiny.decode"]),
    *((vq, TINY_VQ, name, ["llamagen/vq8_tiny.encode"]) for name in ("enc_h", "enc_indices", "recon")),
    *(
        (mulosd, ("llamagen/lantern_accept_io.safetensors",), tensor, [f"llamagen/{LANTERN}.{name}"])
        for tensor, name in (
            ("case1.greedy.k32_d0.4.best", "case1.greedy.k32_d0.4"),
            ("case1.sample.off.next_p", "case1.sample.off"),
            ("case1.sample.k8_d0.2.best", "case1.sample.k8_d0.2"),
            ("codebook", "nearest"),
        )
    ),
]


@pytest.mark.parametrize(
    ("module", "files", "tensor", "cases"), SPOILT, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_changed_number_fails_its_case_alone(tmp_path, module, files, tensor, cases):
    for name in files:
        path = copied(HERE / name, tmp_path)
    spoil(path, tensor, 1.0 if module is mulosd else 0.01 if tensor.startswith("sd.") else 3e-4)
    assert failed(module.cases, tmp_path) == cases


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("R_X", lambda cells: cells[1:]),
        ("islands", lambda parts: parts[::-1]),
        ("waves", lambda parts: [*parts[:-1], [*parts[-1], 0]]),
        ("l", lambda radius: radius + 1),
        ("R_T", lambda cells: cells[1:]),
    ],
)
def test_a_changed_geometry_fails_its_case_alone(tmp_path, field, change):
    cases = json.loads((HERE / "tar" / "mulosd_geometry.json").read_text())
    cases[4][field] = change(cases[4][field])
    (tmp_path / "mulosd_geometry.json").write_text(json.dumps(cases))
    assert failed(mulosd.cases, tmp_path) == ["tar/mulosd_geometry.4"]


@pytest.mark.parametrize(
    ("module", "name", "tensor", "wrong"),
    [
        (llamagen, "llamagen/par_4x_tiny", "spe_tok_embeddings.special_embeddings.weight", "full_logits"),
        (vq, "vq/vq8_tiny", "decoder.mid.1.proj_out.weight", "decode"),
        (vq, "vq/vq8_tiny", "encoder.conv_blocks.0.downsample.conv.weight", "encode"),
    ],
)
def test_other_weights_fail(tmp_path, module, name, tensor, wrong):
    copied(HERE / f"{name}_io.safetensors", tmp_path)
    path = copied(HERE / f"{name}.safetensors", tmp_path)
    state = load_file(path)
    state[tensor] = state[tensor].flip(0) + 0.05
    save_file(state, path)
    assert f"llamagen/{path.stem}.{wrong}" in failed(module.cases, tmp_path)


def test_damaged_and_missing_files_fail_alone(tmp_path):
    """Halves of files, files without their weights, text in place of JSON, and other key lists."""
    folders = [tmp_path / name for name in ("gpt", "tar", "vq", "lantern", "other")]
    gpt, of_tar, of_vq, lantern, other = folders
    for folder in folders:
        folder.mkdir()
    for name in ("gpt_c2i_tiny_io.safetensors", "zipar_t2i_tiny_io.safetensors"):
        copied(HERE / "llamagen" / name, gpt)
    copied(HERE / "llamagen" / "sampler_io.safetensors", gpt, half=True)
    for path, key in (
        (HERE / "llamagen" / "keys_c2i_B.json", "norm.weight"),
        (HERE / "vq" / "keys_vq_8.json", "quant_conv.bias"),
    ):
        listed = json.loads(path.read_text())
        listed["keys"][key] = [769]
        (gpt if path.parent.name == "llamagen" else of_vq).joinpath(path.name).write_text(json.dumps(listed))
    found = verdicts(llamagen.cases, gpt)
    assert set(found.values()) == {"FAIL"}
    assert {"llamagen/sampler", "llamagen/zipar_t2i_tiny", "llamagen/keys.c2i_B"} <= set(found)
    copied(HERE / "vq" / "vq8_tiny_io.safetensors", of_vq)
    copied(HERE / "vq" / "vq8_tiny_io.safetensors", of_vq, half=True).rename(of_vq / "vq9_io.safetensors")
    copied(HERE / "vq" / "vq8_tiny_io.safetensors", of_vq)
    copied(HERE / "vq" / "keys_vq_16.json", of_vq)
    assert failed(vq.cases, of_vq) == [f"llamagen/{name}" for name in ("vq8_tiny", "vq9", "keys.vq_8")]
    detokenizer(of_tar)
    (of_tar / "ar_tiny_state.safetensors").unlink()
    copied(HERE / "tar" / "simvq_bottleneck.safetensors", of_tar, half=True)
    (of_tar / "full_size_shapes.json").write_text("[")
    copied(HERE / "tar" / "sampling_filter.safetensors", of_tar)
    assert set(failed(tar.cases, of_tar)) == {"tar/ar_tiny_io", "tar/simvq_bottleneck", "tar/keys"}
    assert len(verdicts(tar.cases, of_tar)) == 10
    copied(HERE / "llamagen" / "lantern_accept_io.safetensors", lantern, half=True)
    (lantern / "mulosd_geometry.json").write_text("[]")
    assert verdicts(mulosd.cases, lantern) == {"tar/mulosd_geometry": "FAIL", "llamagen/lantern_accept": "FAIL"}
    shutil.copyfile(HERE / "tar" / "README.md", other / "mulosd_geometry.json")
    save_file({"x": torch.zeros(1)}, other / "lantern_accept_io.safetensors")
    assert verdicts(mulosd.cases, other) == {"tar/mulosd_geometry": "FAIL", "llamagen/lantern_accept.nearest": "FAIL"}


# ------------------------------------------------------------------------------------- other sizes, same layout


@torch.no_grad()
def test_a_llamagen_of_another_size(tmp_path):
    """Three heads, one block, a 4 x 4 grid, 7 classes: only the logits, recorded here by the uncached pass."""
    net = Llama(LlamaConfig(24, 1, 3, 3, 40, 31, "class", 7)).requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.copy_(torch.randn(p.shape, generator=g) * 0.5)
    tokens, cond, places = torch.randint(31, (2, 16), generator=g), torch.tensor([6, 2]), net.positions(4, 1)
    table = torch.cat([torch.zeros(1, 4, 2), places.table[1:, :, 1::2].transpose(1, 2)])
    logits = net(torch.cat([net.prefix(cond), net.embed(tokens)], 1), torch.arange(-1, 16), places)
    save_file(net.state_dict(), tmp_path / "gpt_other.safetensors")
    io = {"cond": cond, "tokens": tokens, "freqs_cis": table}
    io |= {"c2i.full_logits": logits, "c2i.cached_logits": logits[:, :16]}
    save(tmp_path / "gpt_other_io.safetensors", io)
    names = ("full_logits", "cached_logits", "inside")
    assert verdicts(llamagen.cases, tmp_path) == {f"llamagen/gpt_other.{name}": "ok" for name in names}


@torch.no_grad()
def test_a_vq_tokenizer_of_another_size(tmp_path):
    torch.manual_seed(0)
    net = VQAutoencoder(VQConfig(ch=32, ch_mult=(1, 2), blocks=1, z_channels=16, codes=20, code_channels=4))
    save_file(net.state_dict(), tmp_path / "vq2.safetensors")
    net, codes = load_vq(tmp_path / "vq2.safetensors").net, torch.randint(20, (3, 14))
    save(tmp_path / "vq2_io.safetensors", {"indices_2x7": codes, "decode_2x7": net.decode_codes(codes.view(3, 2, 7))})
    assert verdicts(vq.cases, tmp_path) == {"llamagen/vq2.decode": "ok"}


@torch.no_grad()
def detokenizer(folder: Path) -> None:
    """A grid of 3 x 3 behind 5 condition rows: what the plain, uncached network says of it."""
    config = replace(DTOK, absolute=5 + 9 - 1)
    about = {"dim": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "cond_dim": 24}
    about |= {"cls_token_num": 5, "max_seq_len": 9}
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
    io = {"cond": cond, "cond4": cond[:, :2], "idx": idx, "greedy_cfg2.5": greedy}
    io |= {"logits_full": logits(cond, idx[:, :-1]), "logits_full_uncond": logits(cond * 0, idx[:, :-1])}
    save(folder / "ar_tiny_io.safetensors", io | {"logits_full_cond4": logits(cond[:, :2], idx[:, :-1])})


def test_a_detokenizer_of_another_size(tmp_path):
    detokenizer(tmp_path)
    names = ["greedy_cfg2.5", "logits_full", "logits_full_cond4", "logits_full_uncond"]
    assert verdicts(tar.cases, tmp_path) == {f"tar/ar_tiny.{name}": "ok" for name in names}
    for name in names:
        detokenizer(tmp_path)
        spoil(tmp_path / "ar_tiny_io.safetensors", name)
        assert failed(tar.cases, tmp_path) == [f"tar/ar_tiny.{name}"]


@torch.no_grad()
def test_variants_of_another_size(tmp_path):
    g = torch.Generator().manual_seed(2)
    idx = torch.randint(20, (2, 8), generator=g)
    codes = replace(DTOK, heads=4, kv_heads=4, condition="codes", condition_size=7)
    kinds = {
        "ar_tiny_gqa": (replace(DTOK, heads=4, kv_heads=2), torch.randn(2, 4, 24, generator=g)),
        "ar_tiny_indice": (codes, torch.randint(7, (2, 4), generator=g)),
    }
    for name, (config, cond) in kinds.items():
        state, net = detokenizer_state(config), Llama(config)
        net.load_state_dict(state)
        x = torch.cat([net.prefix(cond), net.embed(idx)], 1)
        logits = net(x, torch.arange(-4, 8), net.positions(3, 4))[:, 3:]
        own = {f"sd.{k}": v for k, v in state.items()}
        save(tmp_path / f"{name}.safetensors", {**own, "cond": cond, "idx": idx, "logits": logits})
    assert verdicts(tar.cases, tmp_path) == {"tar/ar_tiny_gqa": "ok", "tar/ar_tiny_indice": "ok"}
    spoil(tmp_path / "ar_tiny_gqa.safetensors", "logits")
    state = load_file(tmp_path / "ar_tiny_indice.safetensors")
    save_file({**state, "sd.extra": torch.ones(1)}, tmp_path / "ar_tiny_indice.safetensors")
    assert set(verdicts(tar.cases, tmp_path).values()) == {"FAIL"}


@torch.no_grad()
def test_ta_tok_and_vq_of_another_size(tmp_path):
    torch.manual_seed(0)
    save_file(tiny_ta_tok().state_dict(), tmp_path / "tatok_tiny_state.safetensors")
    (tmp_path / "tiny_siglip").mkdir()
    (tmp_path / "tiny_siglip" / "config.json").write_text(json.dumps({"vision_config": {"num_attention_heads": 3}}))
    # Pictures are as large as the patches cover, which is what is assumed where nothing says more.
    img = torch.rand(2, 3, 15, 15)
    net = TATok(replace(TA_TOK, input_size=15))
    net.load_state_dict(tiny_ta_tok().state_dict())
    io = {"img": img, "img_big": torch.rand(1, 3, 20, 31), "hidden_m2": net.encode(img)}
    io["indices_big"] = net.codes(io["img_big"])
    for pool in (1, 2):
        codes = net.codes(img, pool)
        io |= {f"indices_ps{pool}": codes, f"vq_feats_ps{pool}": net.pooled(img, pool)}
        io |= {f"rec_ps{pool}": net.features(codes), f"decoded_from_indices_ps{pool}": net.features(codes)}
    save(tmp_path / "tatok_tiny_io.safetensors", io)
    net = VQAutoencoder(VQConfig(ch=32, ch_mult=(1, 1), blocks=1, z_channels=8, codes=20))
    save_file(net.state_dict(), tmp_path / "vq_tiny_state.safetensors")
    x = torch.rand(1, 3, 8, 12)
    quant, indices = net.encode(x)
    io = {"x": x, "prequant": net.features(x), "indices": indices, "quant": quant, "decoded": net.decode(quant)}
    io |= {"rand_codes": indices, "rand_entry": quant, "rand_decoded": net.decode_codes(indices)}
    save(tmp_path / "vq_tiny_io.safetensors", io)
    expected = [f"tatok_tiny.{way}.pool{p}" for p in (1, 2) for way in ("encode", "decode")]
    expected += ["tatok_tiny.encode.resized", "vq_tiny.encode", "vq_tiny.decode"]
    assert verdicts(tar.cases, tmp_path) == {f"tar/{name}": "ok" for name in expected}
    spoil(tmp_path / "tatok_tiny_io.safetensors", "rec_ps2")
    spoil(tmp_path / "vq_tiny_io.safetensors", "prequant")
    assert set(failed(tar.cases, tmp_path)) == {"tar/vq_tiny.encode", "tar/tatok_tiny.decode.pool2"}


def test_key_lists(tmp_path):
    def shapes(state):
        return {k: [list(v.shape), "float32"] for k, v in state.items()}

    own = shapes(detokenizer_state(replace(DTOK, dim=384, heads=6, kv_heads=6)))
    args = {"n_head": 6, "max_seq_len": 16, "cls_token_num": 4}
    whole = shapes(tiny_ta_tok(replace(TA_TOK, width=768, encoder_heads=12)).state_dict())
    count, total = (sum(torch.Size(shape).numel() for shape, _ in s.values()) for s in (own, whole))
    listed = {
        "d": {"INFERRED_args": args, "params": count, "tensors": own},
        "ta_tok": {"params": total - 6, "tensors": whole},
    }
    (tmp_path / "full_size_shapes.json").write_text(json.dumps(listed))
    assert verdicts(tar.cases, tmp_path) == {"tar/keys.d": "ok", "tar/keys.ta_tok": "ok"}
    own["more"] = [[], "float32"]
    listed["d"]["params"] = count + 1
    whole["bottleneck.in_linear.bias"][0][0] += 1
    (tmp_path / "full_size_shapes.json").write_text(json.dumps(listed))
    assert verdicts(tar.cases, tmp_path) == {"tar/keys.d": "FAIL", "tar/keys.ta_tok": "FAIL"}
