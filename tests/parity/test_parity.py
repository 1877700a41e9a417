"""The recorded cases of every family agree, spoilt ones fail, and other sizes in the same layout work."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import PIL
import pytest
import torch
from fastar_nodes.lab.parity import cspd, hybrid, janus, janus_images, lazymar, llamagen, mar, mulosd, tar, vq
from fastar_nodes.lab.parity.cases import judge
from fastar_nodes.networks.llama import Llama
from janus_files import FOLDER as JANUS
from safetensors.torch import load_file, save_file
from tar_files import DTOK, TA_TOK, detokenizer_state, tiny_ta_tok

HERE = Path(__file__).parent


@torch.no_grad()
def verdicts(cases, folder: Path, only: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Case to ok, FAIL or not yet, of the cases whose names behind the family begin with one of ``only``."""
    chosen = (case for case in cases(folder) if case.name.partition("/")[2].startswith(only))
    return {outcome.name: outcome.verdict for outcome in map(judge, chosen)}


def failed(cases, folder: Path, *only: str) -> list[str]:
    return [name for name, verdict in verdicts(cases, folder, only or ("",)).items() if verdict == "FAIL"]


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


def agree(cases, folder: Path, kinds: tuple[str, ...]) -> None:
    """Recorded cases agree, and there is at least one whose name begins with each of ``kinds``."""
    found = verdicts(cases, folder, kinds)
    assert set(found.values()) == {"ok"}, found
    names = [name.partition("/")[2] for name in found]
    assert not [kind for kind in kinds if not any(name.startswith(kind) for name in names)]


def test_a_recorded_case_of_every_kind_of_llamagen_par_and_zipar_agrees():
    networks = ("gpt_c2i_tiny.inside", "gpt_t2i_tiny.cached_logits_masked", "par_4x_tiny", "keys.c2i_L", "sampler.")
    runs = ("c2i.greedy.cfg4_int20", "t2i.sampled", "par_4x.greedy.cfg4_int20", "par_4x.sampled")
    windowed = ("zipar_c2i_w2.greedy.cfg4_int20", "zipar_t2i_w2.sampled", "ziparmasked_t2i_w2.greedy.cfg4")
    agree(llamagen.cases, HERE / "llamagen", (*networks, *runs, *windowed))


@pytest.mark.slow
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
    assert verdicts(mulosd.cases, HERE / "llamagen") == {"llamagen/lantern_neighbours": "ok"}


# Cases, files, and a tensor of the last file to the cases that fail if its last number is another one.
GPT = ("llamagen/gpt_c2i_tiny.safetensors", "llamagen/gpt_c2i_tiny_io.safetensors")
SIMVQ, FILTER = ("tar/simvq_bottleneck.safetensors",), ("tar/sampling_filter.safetensors",)
TINY_VQ = ("vq/vq8_tiny.safetensors", "vq/vq8_tiny_io.safetensors")
SPOILT = [
    (llamagen, GPT, "c2i.cached_logits", ["llamagen/gpt_c2i_tiny.cached_logits"]),
    *((tar, SIMVQ, name, ["tar/simvq_bottleneck"]) for name in ("emb", "projected_z", "indices", "regularized_z")),
    *((tar, SIMVQ, name, ["tar/simvq_bottleneck"]) for name in ("output", "codes_entry", "codes_decoded")),
    (tar, SIMVQ, "sd.out_linear.weight", ["tar/simvq_bottleneck"]),
    (tar, FILTER, "probs_t1.0_k10_p1.0", ["tar/sampling_filter.t1.0_k10_p1.0"]),
    (vq, TINY_VQ, "decode_3x5", ["llamagen/vq8_tiny.decode"]),
    (vq, TINY_VQ, "recon", ["llamagen/vq8_tiny.encode"]),
    (mulosd, ("llamagen/lantern_neighbours.safetensors",), "codebook", ["llamagen/lantern_neighbours"]),
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
    ("module", "name", "key", "case"),
    [
        (llamagen, "llamagen/keys_c2i_B", "norm.weight", "llamagen/keys.c2i_B"),
        (vq, "vq/keys_vq_8", "quant_conv.bias", "llamagen/keys.vq_8"),
    ],
)
def test_another_shape_in_a_list_of_keys_fails(tmp_path, module, name, key, case):
    path = copied(HERE / f"{name}.json", tmp_path)
    listed = json.loads(path.read_text())
    listed["keys"][key] = [769]
    path.write_text(json.dumps(listed))
    assert verdicts(module.cases, tmp_path) == {case: "FAIL"}


# Cases, a file without the weights beside it or half of a file,
# and the case that fails. tests/cli/test_verify.py has MAR's.
UNREADABLE = [
    (llamagen, "llamagen/zipar_t2i_tiny_io.safetensors", False, "llamagen/zipar_t2i_tiny"),
    (llamagen, "llamagen/sampler_io.safetensors", True, "llamagen/sampler"),
    (vq, "vq/vq8_tiny_io.safetensors", False, "llamagen/vq8_tiny"),
    (tar, "tar/simvq_bottleneck.safetensors", True, "tar/simvq_bottleneck"),
    (mulosd, "llamagen/lantern_neighbours.safetensors", True, "llamagen/lantern_neighbours"),
    (mulosd, "tar/mulosd_geometry.json", True, "tar/mulosd_geometry"),
    (hybrid, "harmon/hybrid_tables.safetensors", False, "hybrid/hybrid_tables"),
]


@pytest.mark.parametrize(("module", "file", "half", "case"), UNREADABLE)
def test_a_file_that_cannot_be_used_is_a_failed_case(tmp_path, module, file, half, case):
    copied(HERE / file, tmp_path, half)
    found = verdicts(module.cases, tmp_path)
    assert set(found.values()) == {"FAIL"} and any(name.startswith(case) for name in found), found


def of_cspd(folder: Path):
    return cspd.cases(folder, mar.MODEL, mar.MODEL_CONFIG)


@pytest.mark.parametrize("part", ["ratio", "again", pytest.param("run", marks=pytest.mark.slow)])
def test_ratios_draws_and_whole_runs_of_cspd_agree(part):
    """test_parity_cspd_temperature.py has a whole run that is not slow."""
    names = [f"cspd.{tag}.{part}" for tag in ("t1", "t42")]
    assert verdicts(of_cspd, HERE / "mar", tuple(names)) == {f"mar/{name}": "ok" for name in names}


def test_the_cases_of_cspd_are_complete_and_reject_some_drafts():
    names = {f"mar/cspd.{tag}.{part}" for tag in ("t1", "t42") for part in ("ratio", "again", "run")}
    assert {case.name for case in of_cspd(HERE / "mar")} == names
    data = load_file(HERE / "mar" / cspd.DATA)
    accepted = (data["t42.verify_prob_cat"] > data["t42.verify_guess_cat"]).float().mean()
    assert 0.5 < accepted < 0.9 and not (data["t1.verify_prob_cat"] > data["t1.verify_guess_cat"]).any()


@pytest.fixture
def lazymar_folder(tmp_path: Path) -> Path:
    """The recorded runs beside their model: the tiny MAR with every class row eight times and three
    more head blocks.
    """
    state = load_file(HERE / "mar" / mar.MODEL)
    for name, value in list(state.items()):
        if name.startswith(("encoder_pos", "decoder_pos")):
            state[name] = torch.cat([value[:, :8].repeat_interleave(8, 1), value[:, 8:]], 1)
        for j in range(3):
            if f"res_blocks.{j}." in name:
                value = value.clone()
                if "adaLN" in name:
                    value[2 * len(value) // 3 :] *= 0.02
                state[name.replace(f"res_blocks.{j}.", f"res_blocks.{j + 3}.")] = value
    save_file(state, tmp_path / lazymar.MODEL)
    copied(HERE / "mar" / mar.MODEL_CONFIG, tmp_path)
    copied(HERE / "mar" / "lazymar_runs.safetensors", tmp_path).rename(tmp_path / lazymar.DATA)
    return tmp_path


@pytest.mark.fast_cases("full")
@pytest.mark.parametrize("tag", ["full", "tokcache", "baseline"])
def test_choices_conditions_and_whole_runs_of_lazymar_agree(lazymar_folder, tag):
    """``full`` has all caches, ``tokcache`` all but the head's, ``baseline`` none."""
    parts = ("run",) if tag == "baseline" else ("chosen", "conditions", "run")
    names = (f"mar/lazymar.{tag}.{part}" for part in parts)
    assert verdicts(mar.cases, lazymar_folder, (f"lazymar.{tag}.",)) == dict.fromkeys(names, "ok")


@pytest.mark.parametrize("family", ["harmon", "unipic"])
@pytest.mark.slow
def test_all_recorded_cases_of_hybrids_agree(family):
    found = verdicts(hybrid.cases, HERE / family)
    odd = {name: verdict for name, verdict in found.items() if verdict != "ok"}
    lacking = ("qwen",) if importlib.util.find_spec("tokenizers") else ("qwen", "tiny")
    assert odd == {f"{family}/prompts.{name}": "not yet" for name in lacking} and len(found) > 25
    kinds = {name.partition("/")[2].split(".")[0] for name in found}
    assert kinds == {*"inside sample sample_official tables schedule pos_embed shapes prompts".split()}


def test_a_recorded_case_of_every_kind_of_janus_agrees():
    kinds = ("j1", "j2", "j3.cfg5", "j4.gumbel.cfg5_t0.7", "j4.uniform.cfg1_t1", "j5", "j7", "j8", "j9")
    agree(janus.cases, JANUS, kinds)


@pytest.mark.slow
def test_all_recorded_cases_of_janus_agree():
    found = verdicts(janus.cases, JANUS)
    assert set(found.values()) == {"ok"}, found
    kinds = {"j1": 1, "j2": 1, "j3": 2, "j4": 10, "j5": 3, "j6": 1, "j7": 1, "j8": 3, "j9": 1, "j10": 2, "j11": 2}
    counted = {kind: sum(name.split("/")[1].split(".")[0] == kind for name in found) for kind in kinds}
    assert counted == kinds and len(found) == sum(kinds.values()) + 2


# Recorded with Pillow 13. An older one scales an image with differences of one level.
recorded_scaling = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="needs Pillow 13")


@recorded_scaling
def test_a_recorded_case_of_every_kind_of_images_in_agrees():
    kinds = ("real_1", "tower", "input_3", "e3.prompt", "e5.prompt", "e1.cfg5_w5", "e2.cfg3_w1", "e4.cfg5_w5_t0.7")
    kinds += ("u1", "u3", "u4", "sample.t0.7")
    agree(janus_images.cases, HERE / "janus_images", kinds)


@recorded_scaling
@pytest.mark.slow
def test_all_recorded_cases_of_images_in_agree():
    found = verdicts(janus_images.cases, HERE / "janus_images")
    assert set(found.values()) == {"ok"}, found
    kinds = {"real": 4, "tower": 1, "input": 4, "e1": 5, "e2": 5, "e3": 5, "e4": 3, "e5": 2}
    kinds |= {"u": 5, "sample": 4, "batch": 1}
    counted = {kind: sum(name.split("/")[1].startswith(kind) for name in found) for kind in kinds}
    assert counted == kinds


@pytest.mark.parametrize(
    ("file", "name", "case"),
    [
        ("edit", "e1.cfg5_w5.logits", "e1.cfg5_w5"),
        ("edit", "e2.embeds", "e2.prompt"),
        ("edit", "codes_0", "input_0"),
        ("edit", "pixels", "input_3"),
        ("understand", "tower.aligned", "tower"),
        ("understand", "real_2.sample", "real_2"),
        ("understand", "u2.logits", "u2"),
    ],
)
@pytest.mark.fast_cases(1)
def test_a_changed_number_of_images_in_fails(tmp_path, file, name, case):
    shutil.copytree(HERE / "janus_images", tmp_path / "x")
    spoil(tmp_path / "x" / file / "io.safetensors", name)
    assert failed(janus_images.cases, tmp_path / "x", case) == [f"janus_images/{case}"]


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
        x = torch.cat([net.prefix(features), net.tok_embeddings(tokens)], 1)
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
    io = tmp_path / "ar_tiny_io.safetensors"
    whole = io.read_bytes()
    for name in names:
        io.write_bytes(whole)
        spoil(io, name)
        assert failed(tar.cases, tmp_path) == [f"tar/ar_tiny.{name}"]


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
