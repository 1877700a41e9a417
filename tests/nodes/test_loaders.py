"""Loader nodes: files to sockets, menus, and downloads that a stranger's graph asks for."""

import json
from dataclasses import replace
from pathlib import Path

import fake_comfy
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.checkpoint import read_metadata
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder
from fastar_nodes.model_loaders.networks.llama import Llama
from fastar_nodes.nodes import conditioning, host, loaders, samplers
from tar_files import language_model, tiny_ta_tok
from tiny import DRAWER, a_prompt, dropped, random, sample
from tiny_files import GPT_SIZE, READER, VQ_SIZE, save
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
    monkeypatch.setattr(host, "folders", lambda *kinds: [written])
    names = sorted(p.relative_to(written).as_posix() for p in written.rglob("*.safetensors"))
    monkeypatch.setattr(host, "local_files", lambda *kinds: names)


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
    (LLAMAGEN, "dtype"): [{"dtype": "int4"}],
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
def test_what_a_loader_refuses(folder, node, field, changes):
    with pytest.raises(UserError, match=f"^{field}: ") as problem:
        if node is loaders.LoadTar:
            node.execute(**dropped(node, **changes))
        else:
            load(node, **changes)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("choice", ["demo", "demo-draft", "demo-llamagen", "demo-llamagen-low", "demo-par"])
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
    # When ComfyUI lists nodes, it copies lists from their elements.
    assert [*decoders] == type(decoders)(x for x in decoders)


def test_a_finished_download_leaves_the_menu_and_stays_valid(folder, monkeypatch):
    entry = next(e for e in hub.entries("mar") if e.id == "mar-base")
    assert entry.label in [*options(loaders.LoadMAR, "checkpoint")]
    monkeypatch.setattr(host, "local_files", lambda *kinds: [entry.file])
    assert entry.label not in [*options(loaders.LoadMAR, "checkpoint")]
    assert entry.label in options(loaders.LoadMAR, "checkpoint")


# Texts that look like an entry of the menu.
FORGED = ("mar-huge (download 12 kB)", "mar-huge (already on your disk)", "mar-huge (download 3.77 GB", "mar-huge")
FORGED += (" mar-huge (download 3.77 GB)", "tar-7b (already on your disk)", "kl16", "../../etc/passwd", "/etc/passwd")
FORGED += ("", 5, None, [], ["demo"], {"demo": 1}, b"x")


@pytest.mark.parametrize("text", FORGED, ids=repr)
def test_a_choice_is_exactly_an_entry_of_the_menu(folder, monkeypatch, text):
    monkeypatch.setattr(hub, "resolve", lambda *a, **k: pytest.fail("a file was looked for"))
    for node, widget in (
        *((node, "checkpoint") for node in loaders.NODES),
        (loaders.LoadMAR, "decoder"),
        (DTOK, "ta_tok"),
        (conditioning.TextPrompt, "encoder"),
        (conditioning.ImageToCodes, "ta_tok"),
    ):
        assert text not in options(node, widget)  # what ComfyUI checks before a run
        more = {"image": torch.zeros(1, 8, 8, 3)} if node is conditioning.ImageToCodes else {}
        with pytest.raises(UserError, match=f"^{widget}: "):  # what arrives over a link
            node.execute(**more, **dropped(node, **{widget: text, "allow_download": True}))


@pytest.fixture
def downloads(folder, monkeypatch) -> list[str]:
    """Entries that would be downloaded."""
    asked: list[str] = []

    def download(repo, file, *a, **k):
        asked.append(f"{repo}/{file}")
        raise UserError("checkpoint: downloads end here")

    monkeypatch.setattr(hub, "download", download)
    monkeypatch.setattr(host, "local_files", lambda *kinds: [])
    return asked


LARGE = [
    (loaders.LoadMAR, "checkpoint", "mar-huge"),
    (loaders.LoadTar, "checkpoint", "tar-7b"),
    (loaders.LoadTarDetokenizer, "checkpoint", "ar-dtok-1024"),
    (loaders.LoadHybrid, "checkpoint", "harmon-1.5b"),
    (loaders.LoadLlamaGen, "checkpoint", "par-xl-4x"),  # of unknown size
    (loaders.LoadJanus, "checkpoint", "janus-pro-1b"),
    (conditioning.TextPrompt, "encoder", "flan-t5-xl"),
    (conditioning.ImageToCodes, "ta_tok", "ta-tok"),
]


@pytest.mark.parametrize("node, widget, name", LARGE)
def test_a_large_download_begins_only_where_the_graph_allows_it(downloads, node, widget, name):
    choice = next(c for c in options(node, widget) if c.startswith(f"{name} ("))
    entry = next(e for e in hub._catalogue() if e.id == name)
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
    assert loaders.hub.readable_size(entry.size) in said if entry.size else "unknown" in said
    assert len(downloads) == 1


def test_parts_that_are_chosen_automatically_need_the_same_permission(folder, monkeypatch):
    monkeypatch.setattr(hub, "download", lambda *a, **k: pytest.fail("it was downloaded"))
    with pytest.raises(UserError, match="^decoder: .*vq16.*allow_download"):
        load(LLAMAGEN, decoder="auto")
