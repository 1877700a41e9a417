"""Loader nodes: files to sockets, menus, and downloads that a stranger's graph asks for."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import fake_comfy
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.model_loaders.files.checkpoint import read_metadata
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig, VQAutoencoder
from fastar_nodes.networks.llama import Llama
from fastar_nodes.networks.mar import MAR
from fastar_nodes.nodes import conditioning, host, loaders, samplers
from fastar_nodes.runs import loading
from tar_files import language_model, tiny_ta_tok
from tiny import DRAWER, a_prompt, dropped, random, sample
from tiny_files import GPT_SIZE, MAR_SIZE, READER, VQ_SIZE, save, write
from torch import nn


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: LlamaGens with and without their grid, a PAR, Tar and its parts, tokenizers."""
    folder = tmp_path_factory.mktemp("models")

    def add(stem: str, net: nn.Module, **metadata: object) -> None:
        save(folder / f"{stem}.safetensors", {"": net.state_dict()}, **metadata)

    add("plain", random(Llama(GPT_SIZE)), heads=2, grid=4, name="plain one")
    add("silent", random(Llama(GPT_SIZE)), heads=2)
    add("par", random(Llama(replace(GPT_SIZE, special=3))), heads=2, grid=4)
    net, reader, vq = random(Llama(replace(DRAWER, absolute=31))), tiny_ta_tok(READER), random(VQAutoencoder(VQ_SIZE))
    add("drawer", net, heads=2, grid=4, name="tiny drawer")
    add("silent-drawer", random(Llama(replace(DRAWER, absolute=79))), heads=2)
    add("reader", reader, name="tiny reader")
    add("wide", tiny_ta_tok(replace(READER, width=36)), name="wide reader")
    add("vq", vq, groups=4, name="tiny vq")
    add("other", random(VQAutoencoder(replace(VQ_SIZE, codes=30))), groups=4, name="other vq")
    language_model(folder / "tar")
    return folder


@pytest.fixture
def folder(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's model folder."""
    monkeypatch.setattr(host.folders, "paths", lambda *kinds: [written])
    names = sorted(p.relative_to(written).as_posix() for p in written.rglob("*.safetensors"))
    monkeypatch.setattr(host.folders, "local_files", lambda *kinds: names)


def load(node, **changes):
    usual = {"checkpoint": "plain.safetensors", "decoder": "vq.safetensors"}
    if node is loaders.LoadTarDetokenizer:
        usual |= {"checkpoint": "drawer.safetensors", "ta_tok": "reader.safetensors", "dtype": "fp32"}
    return node.execute(**dropped(node, **{**usual, **changes})).result


def test_a_llamagen_and_its_decoder_are_loaded(folder):
    node = loaders.LoadLlamaGen
    model, vae = load(node)
    assert (model.model.name, model.model.grid, model.model.regions) == ("plain one", 4, 1) and model.vae is vae
    assert (vae.name, vae.latent_channels, vae.downscale_ratio) == ("tiny vq", 4, 2)
    assert load(node, checkpoint="par.safetensors")[0].model.regions == 4
    assert load(node, checkpoint="silent.safetensors", grid="8", dtype="bf16")[0].model.grid == 8
    assert sample(samplers.LlamaGenSampler, model=model)[0].shape == (2, 4, 4, 4)


def test_tar_from_files_to_pictures(folder):
    codes = a_prompt(loaders.LoadTar.execute("tar", "fp32", False).result[0])
    node = loaders.LoadTarDetokenizer
    model, vae = load(node)
    assert (model.model.name, model.model.grid, vae.name) == ("tiny drawer", 4, "tiny vq")
    fake_comfy.state.loaded.clear()
    samples, report = sample(samplers.LlamaGenSampler, model=model, condition=codes)
    assert samples.shape == (2, 4, 4, 4) and report.sampler == "tar" and report.model == "tiny drawer"
    # First TA-Tok, which may leave again, then the sampled model.
    reading, drawing = (patchers for patchers, _ in fake_comfy.state.loaded)
    assert reading == [model.parts["ta_tok"].patcher] and drawing == [model.patcher, vae.patcher]
    assert load(node, checkpoint="silent-drawer.safetensors", grid="8")[0].model.grid == 8


LLAMAGEN, DTOK = loaders.LoadLlamaGen, loaders.LoadTarDetokenizer


DEMO = {"checkpoint": "demo-hybrid", "decoder": "auto"}
REFUSED = {
    (LLAMAGEN, "grid"): [{"checkpoint": "silent.safetensors"}, {"grid": "7"}, {"grid": None}],
    (LLAMAGEN, "checkpoint"): [{"checkpoint": name} for name in ("vq.safetensors", 5, "gone.safetensors")],
    (LLAMAGEN, "decoder"): [{"decoder": "plain.safetensors"}, {"decoder": "other.safetensors"}],
    (LLAMAGEN, "dtype"): [{"dtype": "fp4"}],
    (LLAMAGEN, "speed"): [{"speed": "kernels"}],
    (loaders.LoadMAR, "weights"): [{"checkpoint": "demo", "decoder": "auto", "weights": w} for w in ("ema", "best")],
    (LLAMAGEN, "allow_download"): [{"allow_download": "yes"}],
    (DTOK, "ta_tok"): [{"ta_tok": f"{name}.safetensors"} for name in ("wide", "drawer", "gone")],
    (DTOK, "decoder"): [{"decoder": "other.safetensors"}],
    (DTOK, "checkpoint"): [{"checkpoint": "reader.safetensors"}],
    (DTOK, "grid"): [{"checkpoint": "silent-drawer.safetensors"}],
    (loaders.LoadTar, "checkpoint"): [{"checkpoint": "drawer.safetensors"}],
    (loaders.LoadHybrid, "size"): [{**DEMO, "size": "256"}],
    (loaders.LoadHybrid, "dtype"): [{**DEMO, "dtype": "fp16"}],
}


@pytest.mark.parametrize(
    "node, field, changes", [(*key, changes) for key, found in REFUSED.items() for changes in found]
)
@pytest.mark.fast_cases(every=3)
def test_what_a_loader_refuses(folder, node, field, changes):
    with pytest.raises(UserError, match=f"^{field}: ") as problem:
        if node is loaders.LoadTar:
            node.execute(**dropped(node, **changes))
        else:
            load(node, **changes)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("choice", ["demo", "demo-draft", "demo-llamagen", "demo-llamagen-low", "demo-par"])
@pytest.mark.fast_cases("demo", "demo-llamagen")
def test_loaders_hand_over_what_the_demos_files_recommend(choice, root):
    node, family = (loaders.LoadMAR, "mar") if choice in ("demo", "demo-draft") else (loaders.LoadLlamaGen, "llamagen")
    loaded = node.execute(**dropped(node, checkpoint=choice)).result[0]
    entry = next(e for e in hub.entries(family) if e.id == choice)
    stated = json.loads(read_metadata(root / entry.file)["defaults"])
    assert stated and {k: loaded.recommended[k] for k in stated} == stated


def options(node, widget: str) -> list[str]:
    return next(i.about["options"] for i in node.define_schema().inputs if i.id == widget)


def test_menus_show_what_is_here_and_then_the_downloads(folder):
    assert "tar" in options(loaders.LoadTar, "checkpoint")
    assert dropped(loaders.LoadTar)["checkpoint"] == "demo-tar"
    assert dropped(conditioning.ImageToCodes)["ta_tok"] == "demo-ta-tok"
    assert dropped(DTOK)["checkpoint"] == "demo-dtok"
    decoders = options(LLAMAGEN, "decoder")
    assert "auto" in decoders and any(c.startswith("vq16-c2i (download 288 MB") for c in decoders)
    assert type(decoders) is list  # which answers "in" truly


def test_a_finished_download_leaves_the_menu_and_stays_valid(folder, monkeypatch):
    entry = next(e for e in hub.entries("mar") if e.id == "mar-base")
    assert entry.label in options(loaders.LoadMAR, "checkpoint")
    monkeypatch.setattr(host.folders, "local_files", lambda *kinds: [entry.file])
    assert entry.label not in options(loaders.LoadMAR, "checkpoint")
    assert loaders.LoadMAR.validate_inputs(checkpoint=entry.label, decoder="auto") is True


# Nodes, their menus of files, and spellings of an entry and of a file that the menu does not show.
SPELLINGS = [
    (
        loaders.LoadMAR,
        "checkpoint",
        ("mar-base", "mar-base (download 832 MB)", "mar-base.safetensors", "x\\mar-base.safetensors"),
    ),
    (
        loaders.LoadMAR,
        "decoder",
        ("kl16", "kl16.ckpt", "kl16 (download 1 kB)", "sub/kl16.safetensors", "auto", "demo-kl"),
    ),
    (loaders.LoadHybrid, "checkpoint", ("harmon-0.5b", "Harmon-0_5B", "old\\harmon_1.5b.pth", "demo-hybrid")),
    (LLAMAGEN, "checkpoint", ("par-xl-4x", "c2i_B_256.pt", "deep\\plain.safetensors", "deep/plain.safetensors")),
    (LLAMAGEN, "decoder", ("vq16-t2i", "vq_ds16_c2i.pt", "vq.safetensors", "auto")),
    (DTOK, "checkpoint", ("ar-dtok-512", "ar_dtok_lp_256px.pth", "drawer.safetensors")),
    (DTOK, "ta_tok", ("ta-tok", "ta_tok.pth", "ta-tok (download)", "reader.safetensors", "auto")),
    (loaders.LoadTar, "checkpoint", ("tar-7b", "Tar-1.5B", "a\\Tar-1.5B", "tar", "demo-tar")),
    (loaders.LoadJanus, "checkpoint", ("janus-pro-1b", "janus-pro-1b (download 4.18 GB)", "Janus-Pro-7B")),
    (conditioning.TextPrompt, "encoder", ("flan-t5-xl", "flan-t5-xl (download 11.40 GB)", "x\\flan-t5-xl")),
    (conditioning.ImageToCodes, "ta_tok", ("ta-tok", "ta_tok.pth", "reader.safetensors", "demo-ta-tok")),
]


@pytest.mark.parametrize("node, widget, spellings", SPELLINGS, ids=lambda value: getattr(value, "__name__", None))
def test_graphs_travel(folder, written, node, widget, spellings):
    """Between before and after a download, versions, machines and systems; ComfyUI asks a node that names the input."""
    (written / "deep").mkdir(exist_ok=True)
    shutil.copy(written / "plain.safetensors", written / "deep")
    for choice in spellings:
        assert node.validate_inputs(**{widget: choice}) is True, choice
    # A connected value is not known yet; it is checked when the node runs.
    assert node.validate_inputs(**{widget: None}) is True


# What stands for no entry and no file, and what the message says.
FORGED = {
    "mar-huge (already on your disk)": "is not in",
    "mar-huge (download 3.77 GB": "is not in",
    "gone.safetensors": "is not in .*; put the file there, or choose a different file",
    "sub/tiny.safetensors": "is not in",
    "../../etc/passwd": "not the name of a file in a model folder",
    "/etc/passwd": "not the name of a file in a model folder",
    "C:\\secret.pt": "not the name of a file in a model folder",
    "": "not the name of a file",
}


@pytest.mark.parametrize("text", FORGED, ids=repr)
def test_what_stands_for_nothing_is_refused_before_the_run(folder, monkeypatch, text):
    monkeypatch.setattr(hub, "resolve", lambda *a, **k: pytest.fail("a file was looked for"))
    for node, widget, _ in SPELLINGS:
        said = node.validate_inputs(**{widget: text})
        assert isinstance(said, str) and re.search(FORGED[text], said), (node, said)
        more = {"image": torch.zeros(1, 8, 8, 3)} if node is conditioning.ImageToCodes else {}
        with pytest.raises(UserError, match=f"^{widget}: .*{FORGED[text]}"):  # what arrives over a link
            node.execute(**more, **dropped(node, **{widget: text, "allow_download": True}))


@pytest.mark.parametrize("value", [5, [], ["demo"], {"demo": 1}, b"x"], ids=repr)
def test_a_choice_that_is_no_text_is_refused(folder, value):
    for node, widget, _ in SPELLINGS:
        more = {"image": torch.zeros(1, 8, 8, 3)} if node is conditioning.ImageToCodes else {}
        with pytest.raises(UserError, match=f"^{widget}: it got a "):
            node.execute(**more, **dropped(node, **{widget: value, "allow_download": True}))


def test_validation_does_not_search_folders(folder, monkeypatch):
    """It runs on the server's thread, for every node of any graph."""
    monkeypatch.setattr(hub, "_below", lambda *_: pytest.fail("a folder was searched"))
    for node, widget, spellings in SPELLINGS:
        for choice in (*spellings, *FORGED):
            node.validate_inputs(**{widget: choice})


@pytest.fixture
def downloads(folder, monkeypatch) -> list[str]:
    """Entries that would be downloaded."""
    asked: list[str] = []

    def download(repo, file, *a, **k):
        asked.append(f"{repo}/{file}")
        raise UserError("checkpoint: downloads end here")

    monkeypatch.setattr(hub, "download", download)
    monkeypatch.setattr(host.folders, "local_files", lambda *kinds: [])
    return asked


LARGE = [
    (loaders.LoadMAR, "checkpoint", "mar-huge"),
    (loaders.LoadTar, "checkpoint", "tar-7b"),
    (loaders.LoadTarDetokenizer, "checkpoint", "ar-dtok-1024"),
    (loaders.LoadHybrid, "checkpoint", "harmon-1.5b"),
    (loaders.LoadLlamaGen, "checkpoint", "par-xl-4x"),  # of unknown size
    (loaders.LoadJanus, "checkpoint", "janus-pro-1b"),
    (loaders.LoadJanus, "checkpoint", "janus-4o-7b"),  # of which a note tells the least size
    (conditioning.TextPrompt, "encoder", "flan-t5-xl"),
    (conditioning.ImageToCodes, "ta_tok", "ta-tok"),
]


@pytest.mark.parametrize("node, widget, name", LARGE)
def test_a_large_download_begins_only_where_the_graph_allows_it(downloads, node, widget, name):
    choice = next(c for c in options(node, widget) if c.startswith(f"{name} ("))
    entry = next(e for e in hub.catalogue() if e.id == name)
    inputs = dropped(node, **{widget: choice})
    if node is conditioning.ImageToCodes:
        inputs["image"] = torch.zeros(1, 8, 8, 3)
    with pytest.raises(UserError, match=f"^{widget}: .*{name}.*{entry.repo}.*allow_download"):
        node.execute(**inputs)
    assert not downloads and not fake_comfy.state.said
    executed = type("Executed", (node,), {"hidden": type("Hidden", (), {"unique_id": "5"})})
    with pytest.raises(UserError, match="downloads end here"):
        executed.execute(**inputs | {"allow_download": True})
    # What, from where and how large stands on the node before the first byte.
    ((where, said),) = fake_comfy.state.said
    assert where == "5" and name in said and entry.repo in said
    assert (loaders.hub.readable_size(entry.size) if entry.size else entry.note or "size unknown") in said
    assert len(downloads) == 1


def test_parts_that_are_chosen_automatically_need_the_same_permission(folder, monkeypatch):
    monkeypatch.setattr(hub, "download", lambda *a, **k: pytest.fail("it was downloaded"))
    with pytest.raises(UserError, match="^decoder: .*vq16.*allow_download"):
        load(LLAMAGEN, decoder="auto")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    """A host that computes on a graphics card of a capability and keeps weights in main memory."""

    def install(*capability: int) -> None:
        fake_comfy.state.places.update(get_torch="cuda:0", text_encoder="cuda:0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return install


@pytest.mark.parametrize(
    "capability, llamagen, tar, mar",
    [((8, 0), "bf16", "bf16", "fp16"), ((7, 5), "fp16", "fp32", "fp16"), ((6, 1), "fp32", "fp32", "fp32")],
)
@pytest.mark.fast_cases("capability1-fp16-fp32-fp16")
def test_auto_chooses_the_dtype_for_the_device_that_computes(folder, card, capability, llamagen, tar, mar):
    """The weights are placed on the other device, the CPU, for which auto is fp32."""
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert next(load(LLAMAGEN)[0].model.net.parameters()).dtype == torch.float32
    card(*capability)
    for node, changes, wanted in (
        (LLAMAGEN, {}, llamagen),
        (DTOK, {"dtype": "auto"}, tar),
        (loaders.LoadMAR, {"checkpoint": "demo", "decoder": "auto"}, mar),
    ):
        model, vae = load(node, **changes)
        found = {weight.dtype for weight in model.model.net.parameters() if weight.ndim > 1}
        assert kinds[wanted] in found and (
            wanted == "fp32" or kinds["bf16" if wanted == "fp16" else "fp16"] not in found
        )
        assert {weight.device.type for weight in model.model.net.parameters()} == {"cpu"}
        assert next(vae.first_stage_model.parameters()).dtype == torch.float32
    loaded = loaders.LoadTar.execute("tar", "auto", False).result[0]
    assert next(loaded.model.net.parameters()).dtype == kinds[tar]


@pytest.mark.parametrize(
    "node", [loaders.LoadMAR, loaders.LoadLlamaGen, loaders.LoadTarDetokenizer, loaders.LoadHybrid]
)
@pytest.mark.fast_cases(1)
def test_a_compiled_model_is_checked_for_the_device_that_computes(folder, card, monkeypatch, node):
    asked = []
    monkeypatch.setattr(loading, "choose", lambda net, speed, device: asked.append((speed, str(device))))
    card(8, 0)
    demos = {loaders.LoadMAR: "demo", loaders.LoadHybrid: "demo-hybrid"}
    changes = {"checkpoint": demos[node], "decoder": "auto"} if node in demos else {}
    load(node, **changes, dtype="fp32", speed="compile")
    assert asked == [("compile", "cuda:0")]


def test_graphs_that_were_saved_with_compile_static_still_open(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(loading, "choose", lambda net, speed, device: asked.append(speed))
    load(loaders.LoadLlamaGen, dtype="fp32", speed="compile-static")
    assert asked == ["compile"]

    assert loaders.LoadLlamaGen.validate_inputs(speed="compile-static") is True
    assert loaders.LoadLlamaGen.validate_inputs(speed="fast") == "speed: 'fast' is not one of auto, plain, compile."


def test_vae_encode_scales_to_the_side_of_a_model_with_patches(tmp_path, monkeypatch):
    """4 x 4 tokens of 2 x 2 latents, each of 2 x 2 pixels: 16 pixels a side, and latents of 8 x 8."""
    size = replace(MAR_SIZE, tokens=16, channels=16)
    write(MAR(size), tmp_path / "patches.safetensors", 1, heads=2, patch=2, latent_scale=0.5)
    write(
        KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, groups=4)),
        tmp_path / "kl.safetensors",
        2,
        groups=4,
    )
    monkeypatch.setattr(host.folders, "paths", lambda *kinds: [tmp_path])
    monkeypatch.setattr(host.folders, "local_files", lambda *kinds: ["patches.safetensors", "kl.safetensors"])
    model, vae = load(loaders.LoadMAR, checkpoint="patches.safetensors", decoder="kl.safetensors", dtype="fp32")
    assert (model.model.patch, vae.downscale_ratio, vae.sizes) == (2, 2, ((16, 16),))
    start = vae.encode(torch.rand(1, 40, 30, 3))
    assert start.shape == (1, 4, 8, 8)
    mask = torch.zeros(1, 8, 8)
    mask[:, :, 4:] = 1
    changed, _ = sample(samplers.MARSampler, model=model, latent_image={"samples": start}, mask=mask)
    assert changed.shape == (2, 4, 8, 8)
    assert torch.equal(changed[:, :, :, :4], start[:, :, :, :4].expand(2, -1, -1, -1))
    assert vae.decode(changed).shape == (2, 16, 16, 3)
