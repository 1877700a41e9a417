"""Nodes of Tar and MuLo-SD, without ComfyUI: loaders, prompts, pictures as codes, and the samplers that draw from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_comfy
import pytest
import torch
from fake_comfy import Interrupted, Progress
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder
from fastar_nodes.model_loaders.networks.llama import Llama
from fastar_nodes.model_loaders.networks.ta_tok import TATokModel
from fastar_nodes.model_loaders.networks.upsampler import UpSampler, UpSamplerConfig, initialise
from fastar_nodes.nodes import comparison, conditioning, host, loaders, previous, token_samplers
from fastar_nodes.samplers import presets
from fastar_nodes.samplers.conditioning import CodeCondition, from_ids
from fastar_nodes.samplers.settings import knobs
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings, MuLoSDSettings, TarPromptSettings, ZipARSettings
from fastar_nodes.samplers.tokens.tar import finish_prompt, tar_prompt
from qwen_reference import tiny_tar
from safetensors.torch import save_file
from tar_files import DTOK, OF_CODES, TA_TOK, language_model, tiny_ta_tok
from test_token_nodes import VQ_SIZE, a_model, random, tiny_vae

# Codes of the tiny language model, read by a TA-Tok of as many, drawn by de-tokenizers of two sizes.
READER = replace(OF_CODES, codes=20)
DRAWER = replace(DTOK, vocab=VQ_SIZE.codes)
GRIDS = {"large": 6, "small": 3}

pytestmark = pytest.mark.usefixtures("one_thread")


def drawer(size: str = "large", seed: int = 0, **changes) -> host.Loaded:
    """A de-tokenizer with its TA-Tok, as the loader makes it."""
    reader = TATokModel(tiny_ta_tok(READER), "tiny ta-tok")
    grid = GRIDS[size]
    net = random(Llama(replace(DRAWER, absolute=16 + grid**2 - 1)), seed)
    model = token_samplers.TokenModel(net, f"tiny {size}", grid, ta_tok=reader, **changes)
    return host.Loaded.of(model, tiny_vae(), {"ta_tok": host.Loaded.of(reader)})


def values(settings: type, **changes):
    return {name: default for name, (default, _) in knobs(settings).items()} | changes


def prompt(tar=None, text="a red boat", seed=3, images=2, **changes):
    loaded = host.Loaded.of(tiny_tar()) if tar is None else tar
    return conditioning.TarPrompt.execute(
        tar=loaded, text=text, seed=seed, images=images, **values(TarPromptSettings, **changes)
    ).result[0]


# ------------------------------------------------------------------------------------------------ prompts


def test_a_prompt_becomes_the_codes_that_a_script_gets():
    made = prompt(text="  a red boat\n")
    script = finish_prompt(tar_prompt(tiny_tar(), ["a red boat"] * 2, TarPromptSettings(), PairedDraws(3, range(2))))
    assert all(torch.equal(a, b) for a, b in zip(made.codes, script.condition.codes, strict=True))
    assert made.names == ("a red boat",) * 2 and made.size == 20 and [len(codes) for codes in made.codes] == [16, 16]
    assert not torch.equal(*made.codes) and torch.equal(prompt(images=1).codes[0], made.codes[0])
    assert [len(codes) for codes in prompt(detail="169").codes] == [4, 4]
    assert [(done, total) for done, total, _ in Progress.updates[:16]] == [(k + 1, 16) for k in range(16)]


def test_room_is_made_for_the_language_models_cache_and_cancel_stops_it():
    loaded = host.Loaded.of(tiny_tar())
    prompt(loaded, images=64)
    ((patchers, about),) = fake_comfy.state.loaded
    report = finish_prompt(
        tar_prompt(loaded.model, ["a red boat"] * 64, TarPromptSettings(), PairedDraws(3, range(64)))
    ).report
    assert (
        patchers == [loaded.patcher]
        and report.counts["cache_bytes"] < about["memory_required"] < 100 * report.counts["cache_bytes"]
    )
    fake_comfy.state.interrupt_at, fake_comfy.state.asked = 3, 0
    Progress.updates.clear()
    with pytest.raises(Interrupted):
        prompt(loaded)
    assert len(Progress.updates) == 3


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tar": 5}, "^tar: it got the number 5; connect the output of Load Tar"),
        ({"tar": a_model()}, "^tar: it got a TokenModel; connect the output of Load Tar"),
        ({"text": 5}, "^text: it got the number 5"),
        ({"text": "word " * 60}, "^text: the prompt takes 62 tokens .*shorten it"),
        ({"seed": -1}, "^seed: "),
        ({"images": 0}, "^images: "),
        ({"detail": "700"}, "^detail: "),
        ({"top_p": 2.0}, "^top_p: "),
    ],
)
def test_prompts_that_cannot_be(changes, words):
    with pytest.raises(UserError, match=words) as problem:
        prompt(**changes)
    assert "\n" not in str(problem.value) and not fake_comfy.state.loaded, (
        "something was loaded before the mistake was reported"
    )


def test_an_empty_prompt_and_marks_that_are_typed_are_text():
    assert len(prompt(text="", images=1).codes[0]) == 16
    assert len(prompt(text="<|im_end|> <I3>", images=1).codes[0]) == 16


# ------------------------------------------------------------------------------------------------ loaders


def write(
    path: Path, net: torch.nn.Module, prefixes: dict[str, torch.nn.Module] | None = None, **metadata: object
) -> None:
    state = dict(net.state_dict())
    for prefix, other in (prefixes or {}).items():
        state |= {prefix + name: t for name, t in other.state_dict().items()}
    about = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    save_file({k: t.contiguous() for k, t in state.items()}, path, about)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder: a language model, de-tokenizers with and without their parts, TA-Toks and tokenizers."""
    language_model(tmp_path / "tar")
    net, reader, vq = random(Llama(replace(DRAWER, absolute=31))), tiny_ta_tok(READER), random(VQAutoencoder(VQ_SIZE))
    write(tmp_path / "drawer.safetensors", net, heads=2, grid=4, name="tiny drawer")
    parts = {"ta_tok.": reader, "vq.": vq}
    write(tmp_path / "whole.safetensors", net, parts, heads=2, grid=4, name="whole drawer", groups=4)
    write(tmp_path / "silent.safetensors", random(Llama(replace(DRAWER, absolute=79))), heads=2)
    write(tmp_path / "reader.safetensors", reader, name="tiny reader")
    write(tmp_path / "wide.safetensors", tiny_ta_tok(replace(READER, width=36)), name="wide reader")
    write(
        tmp_path / "seer.safetensors",
        tiny_ta_tok(replace(TA_TOK, codes=20)),
        encoder_heads=3,
        input_size=16,
        name="seer",
    )
    write(tmp_path / "vq.safetensors", vq, groups=4, name="tiny vq")
    write(tmp_path / "other.safetensors", random(VQAutoencoder(replace(VQ_SIZE, codes=30))), groups=4, name="other vq")
    monkeypatch.setattr(host, "folders", lambda *kinds: [tmp_path])
    names = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(host, "local_files", lambda *kinds: names)
    monkeypatch.setattr(conditioning, "_ta_tok", host.ModelCache((host.device, host.offload_device)))
    return tmp_path


def load(
    checkpoint="drawer.safetensors", ta_tok="reader.safetensors", decoder="vq.safetensors", dtype="fp32", **changes
):
    return loaders.LoadTarDetokenizer.execute(
        checkpoint=checkpoint, ta_tok=ta_tok, decoder=decoder, dtype=dtype, **changes
    ).result


def draw(node, model, condition, seed=5, **changes):
    kind = {token_samplers.LlamaGenSampler: LlamaGenSettings, token_samplers.ZipARSampler: ZipARSettings}[node]
    done = node.execute(model=model, condition=condition, seed=seed, **values(kind, **changes))
    return done.result[0]["samples"], done.result[1]


def test_from_files_to_pictures(folder):
    tar = loaders.LoadTar.execute(checkpoint="tar", dtype="fp32").result[0]
    codes = prompt(tar)
    model, vae = load()
    assert (model.model.name, model.model.grid, vae.name) == ("tiny drawer", 4, "tiny vq")
    fake_comfy.state.loaded.clear()
    samples, report = draw(token_samplers.LlamaGenSampler, model, codes)
    assert samples.shape == (2, 4, 4, 4) and report.sampler == "tar" and report.model == "tiny drawer"
    # First TA-Tok, which may go again, then what draws.
    reading, drawing = (patchers for patchers, _ in fake_comfy.state.loaded)
    assert reading == [model.parts["ta_tok"].patcher] and drawing == [model.patcher, vae.patcher]
    whole, _ = load("whole.safetensors", "auto", "auto")
    assert whole.vae.name == "whole drawer" and torch.equal(
        draw(token_samplers.LlamaGenSampler, whole, codes)[0], samples
    )
    assert load("silent.safetensors", grid="8")[0].model.grid == 8


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"ta_tok": "wide.safetensors"}, "^ta_tok: wide reader has features of width 36, tiny drawer needs 24"),
        ({"decoder": "other.safetensors"}, "^decoder: other vq has 30 codes, tiny drawer writes 23"),
        ({"checkpoint": "reader.safetensors"}, "^checkpoint: reader.safetensors holds a TA-Tok"),
        ({"ta_tok": "drawer.safetensors"}, "^ta_tok: drawer.safetensors holds a Tar de-tokenizer"),
        ({"checkpoint": "silent.safetensors"}, "^grid: silent.safetensors does not say"),
        ({"grid": "8"}, "^grid: drawer.safetensors is for 4x4 tokens, not 8x8; choose auto"),
        ({"grid": "7"}, "^grid: '7' is none of auto"),
        ({"checkpoint": 5}, "^checkpoint: 5 is no file name"),
        ({"ta_tok": "gone.safetensors"}, "^ta_tok: "),
        ({"dtype": "int4"}, "^dtype: "),
    ],
)
def test_what_the_loader_refuses(folder, changes, words):
    with pytest.raises(UserError, match=words) as problem:
        load(**changes)
    assert "\n" not in str(problem.value)


def test_a_language_model_that_is_none(folder):
    with pytest.raises(UserError, match="^checkpoint: .*drawer"):
        loaders.LoadTar.execute(checkpoint="drawer.safetensors", dtype="auto")


def test_menus_show_what_is_here_and_stay_valid(folder):
    menu = {i.id: i.about for i in loaders.LoadTar.define_schema().inputs}["checkpoint"]
    assert "tar" in menu["options"] and menu["default"] == "demo-tar"
    assert any(text.startswith("tar-1.5b (download") for text in menu["options"])
    menu = {i.id: i.about for i in loaders.LoadTarDetokenizer.define_schema().inputs}["checkpoint"]
    assert menu["default"].startswith("demo-dtok") and "ar-dtok-512 (download, not pinned)" in menu["options"]
    menu = {i.id: i.about for i in conditioning.ImageToCodes.define_schema().inputs}["ta_tok"]
    assert menu["default"] == "demo-ta-tok" and "ta-tok (download, not pinned)" in menu["options"]
    valid = loaders.LoadTar.validate_inputs
    assert valid("tar-1.5b (download 3.29 GB)") is True and valid("ta-tok") == "ta-tok is a ta_tok; choose it as ta_tok"
    valid = loaders.LoadTarDetokenizer.validate_inputs
    assert valid("demo-dtok") is True and valid(None) is True
    menus = {i.id: i.about["options"] for i in loaders.LoadTarDetokenizer.define_schema().inputs}
    assert "auto" in menus["ta_tok"] and "ta-tok (download)" in menus["ta_tok"] and "demo-tar" not in menus["ta_tok"]
    assert conditioning.ImageToCodes.validate_inputs("ta-tok (download)") is True
    assert "none of the files here" in conditioning.ImageToCodes.validate_inputs("gone.pth")


# ------------------------------------------------------------------------------------------------ pictures as codes


def codes_of(image, ta_tok="seer.safetensors", **changes):
    chosen = values(conditioning.ImageToCodesSettings, dtype="fp32", **changes)
    return conditioning.ImageToCodes.execute(image=image, ta_tok=ta_tok, **chosen).result[0]


def test_pictures_become_codes_each_for_itself(folder):
    pictures = torch.rand(10, 20, 12, 4, generator=torch.Generator().manual_seed(0))
    made = codes_of(pictures)
    assert len(made) == 10 and made.size == 20 and all(codes.shape == (25,) for codes in made.codes)
    for i in (0, 9):
        alone = codes_of(pictures[i : i + 1], images=2)
        assert (
            torch.equal(alone.codes[0], made.codes[i])
            and torch.equal(*alone.codes)
            and alone.names == ("picture 1",) * 2
        )
    assert codes_of(pictures[..., :1], detail="169").codes[0].shape == (4,)
    assert [patchers for patchers, _ in fake_comfy.state.loaded[:1]] == [[conditioning._ta_tok._loaded.patcher]]
    assert Progress.updates[-1][:2] == (10, 10)


def test_cancel_between_pictures(folder):
    fake_comfy.state.interrupt_at = 1
    with pytest.raises(Interrupted):
        codes_of(torch.rand(20, 8, 8, 3))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"image": 5}, "^image: it got the number 5"),
        ({"ta_tok": "reader.safetensors"}, "^ta_tok: tiny reader holds no picture encoder"),
        ({"ta_tok": "gone"}, "^ta_tok: "),
        ({"ta_tok": None}, "^ta_tok: None is no file name"),
        ({"images": 200}, "^images: 2 pictures 200 times"),
        ({"detail": "5"}, "^detail: "),
    ],
)
def test_pictures_that_cannot_be_read(folder, changes, words):
    with pytest.raises(UserError, match=words):
        codes_of(**{"image": torch.rand(2, 8, 8, 3)} | changes)


# ------------------------------------------------------------------------------------------------ samplers


def mulosd(
    target=None,
    draft=None,
    condition=None,
    seed=5,
    upscale_model=None,
    node=token_samplers.MuLoSDSampler,
    **changes,
):
    extra = {name: changes.pop(name) for name in ("preset",) if name in changes}
    done = node.execute(
        target=drawer() if target is None else target,
        draft=drawer("small", 1) if draft is None else draft,
        condition=prompt() if condition is None else condition,
        seed=seed,
        upscale_model=upscale_model,
        **values(MuLoSDSettings, **{"top_k": 0, **changes}),
        **extra,
    )
    return done.result[0]["samples"], done.result[1]


def test_mulosd_draws_checks_and_repairs():
    large, small = drawer(), drawer("small", 1)
    codes = prompt()
    fake_comfy.state.loaded.clear()
    Progress.updates.clear()
    samples, report = mulosd(large, small, codes, acceptance_target=0.6)
    assert samples.shape == (2, 4, 6, 6) and report.sampler == "mulosd" and report.model == "tiny large"
    assert 0 < report.acceptance < 1 and report.counts["draft_passes"] < report.counts["transformer_passes"]
    record = [(done, total) for done, total, _ in Progress.updates]
    assert [done for done, _ in record] == list(range(1, report.counts["transformer_passes"] + 1)) and record[-1][
        0
    ] == record[-1][1]
    assert Progress.updates[-1][2][1].size == (240, 120)  # two pictures of 12 pixels, enlarged
    (reading, _), (patchers, about) = fake_comfy.state.loaded
    assert reading == [large.parts["ta_tok"].patcher]
    assert patchers == [large.patcher, small.patcher, large.vae.patcher], (
        "the draft, or the decoder that enlarges, is not there"
    )
    assert report.counts["cache_bytes"] < about["memory_required"]
    for what in ("islands", "waves", "expanded", "outcome"):
        image = comparison.TokenMap.execute(
            report=report, image=large.vae.decode(samples), what=what, opacity=0.5
        ).result[0]
        assert image.shape[0] == 2 and image.std() > 0.01


def test_one_prompt_feeds_every_size_and_method():
    codes = prompt()
    large, small = drawer(), drawer("small", 1)
    plain, report = draw(token_samplers.LlamaGenSampler, large, codes, top_k=0)
    assert report.sampler == "tar" and report.counts["transformer_passes"] == 36
    exact, record = mulosd(large, small, codes, preset="exact", tau=0.0)
    assert torch.equal(exact, plain) and record.counts == report.counts
    fast, record = draw(token_samplers.ZipARSampler, large, codes, top_k=0, window=2)
    assert fast.shape == plain.shape and record.counts["transformer_passes"] < 36
    assert draw(token_samplers.LlamaGenSampler, small, codes)[0].shape == (2, 4, 3, 3)
    for label_set in ("picture-book", ""):
        loaded = host.Loaded.of(replace(large.model, label_set=label_set), large.vae, large.parts)
        for name in ("balanced", "fast"):
            meant = presets.values(MuLoSDSettings, name, label_set == "picture-book")
            settings = mulosd(loaded, small, codes, preset=name, node=previous.PreviousMuLoSD)[1].settings
            assert {k: settings[k] for k in meant} == meant


def test_cancel_while_it_drafts_and_while_it_repairs():
    total = mulosd(tau=1.01, resample_window=0)[1].counts["transformer_passes"]
    for at in (2, total - 2):
        Progress.updates.clear()
        codes = prompt()
        Progress.updates.clear()
        fake_comfy.state.asked, fake_comfy.state.interrupt_at = 0, at
        with pytest.raises(Interrupted):
            mulosd(condition=codes, tau=1.01, resample_window=0)
        assert len(Progress.updates) == at
        fake_comfy.state.interrupt_at = -1


def test_llamagens_of_two_sizes():
    samples, report = mulosd(a_model(grid=8), a_model(grid=4), from_ids([1, 2]), acceptance_target=0.5)
    assert samples.shape == (2, 4, 8, 8) and report.sampler == "mulosd"


class Upscale:
    """As much of core's UPSCALE_MODEL as there is."""

    scale, input_channels, output_channels = 3, 3, 3
    architecture = SimpleNamespace(name="Tiny")

    def __init__(self, patcher: bool = True):
        self.model = torch.nn.Conv2d(3, 3, 1)
        if patcher:
            self.patcher = fake_comfy.Patcher(self.model, torch.device("cpu"), None)
        self.seen: list[torch.Tensor] = []

    def __call__(self, x):
        self.seen.append(x)
        return torch.nn.functional.interpolate(x, scale_factor=self.scale) * 1.5


@pytest.mark.parametrize("patcher", [True, False])
def test_an_upscale_model_enlarges_the_draft(patcher):
    large, small, model = drawer(), drawer("small", 1), Upscale(patcher)
    codes = prompt()
    fake_comfy.state.loaded.clear()
    samples, report = mulosd(large, small, codes, upscale_model=model, tau=0.0)
    assert report.settings["up_sampler"] == "pixel, Tiny x3" and report.acceptance == 1
    (seen,) = model.seen
    assert (
        seen.shape == (2, 3, 6, 6)
        and 0 <= seen.min()
        and seen.max() <= 1
        and fake_comfy.state.tiles == [(512, 512, 32, 3)]
    )
    net = large.vae.first_stage_model
    # By 3, cut off at 1, and brought to a factor of 2.
    big = torch.nn.functional.interpolate(
        (seen.repeat_interleave(3, 2).repeat_interleave(3, 3) * 1.5).clamp(0, 1) * 2 - 1,
        size=(12, 12),
        mode="bicubic",
        antialias=True,
    )
    assert torch.equal(samples, net.vectors(net.encode(big.clamp(-1, 1))[1]))
    patchers = fake_comfy.state.loaded[-1][0]
    assert len(patchers) == 4 and patchers[3].model is model.model


def test_memory_runs_out_and_tiles_shrink(monkeypatch):
    model, asked = host.Upscaler(Upscale()), []

    def tiled(x, function, tile_x, *_, **__):
        asked.append(tile_x)
        if tile_x > 128:
            raise RuntimeError("CUDA out of memory")
        return function(x)

    monkeypatch.setattr(host.comfy.utils, "tiled_scale", tiled)
    assert model(torch.rand(1, 3, 4, 4)).shape == (1, 3, 12, 12) and asked == [512, 256, 128]
    monkeypatch.setattr(model, "_piece", lambda x: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError):
        model(torch.rand(1, 3, 4, 4))


def test_a_learned_up_sampler_comes_with_its_decoder(folder, monkeypatch, tmp_path_factory):
    package = tmp_path_factory.mktemp("package")
    monkeypatch.setattr(hub, "_PACKAGE", package)
    (package / "demo" / "checkpoints").mkdir(parents=True)
    write(package / "demo" / "checkpoints" / "vq.safetensors", random(VQAutoencoder(VQ_SIZE)), groups=4, name="tiny vq")
    without, _ = load(decoder="demo-vq")
    torch.manual_seed(0)
    write(
        package / "demo" / "checkpoints" / "upsampler.safetensors",
        initialise(UpSampler(UpSamplerConfig(4, 6, 1))),
        name="learned",
    )
    made, _ = load(decoder="demo-vq")
    assert "up_sampler" not in without.parts and made.parts["up_sampler"].model.name == "learned"
    large = replace_grid(made)
    fake_comfy.state.loaded.clear()
    _, report = mulosd(large, drawer("small", 1), prompt(), up_sampler="latent", acceptance_target=0.5)
    assert (
        report.settings["up_sampler"] == "latent, learned"
        and large.parts["up_sampler"].patcher in fake_comfy.state.loaded[-1][0]
    )


def replace_grid(loaded: host.Loaded) -> host.Loaded:
    """The same parts around a de-tokenizer of the large grid."""
    big = drawer()
    return host.Loaded.of(big.model, loaded.vae, {**big.parts, "up_sampler": loaded.parts["up_sampler"]})


def other_codebook() -> host.Loaded:
    vae = tiny_vae()
    vae.first_stage_model.quantize.embedding.weight.data.mul_(-1)
    vae.name = "another vq"
    return host.Loaded.of(drawer("small").model, vae)


REFUSED = {
    "no target": (
        {"target": 5},
        "^target: it got the number 5; connect the output of Load LlamaGen / PAR or Load Tar De-tokenizer",
    ),
    "a language model": ({"draft": host.Loaded.of(tiny_tar())}, "^draft: it got a TarModel"),
    "a picture": ({"condition": torch.zeros(2)}, "^condition: it got a tensor .*Tar Prompt"),
    "labels": (
        {"condition": from_ids([1])},
        "^condition: it holds class labels, tiny large draws from semantic features",
    ),
    "codes of others": (
        {"condition": CodeCondition((torch.zeros(16, dtype=torch.int64),), ("x",), 65536)},
        "^condition: its codes are of a codebook of 65536",
    ),
    "the same size": ({"draft": drawer("large", 1)}, "^draft: tiny large draws 6 x 6 tokens, .* no whole multiple"),
    "another family": (
        {"draft": a_model(grid=3)},
        "^condition: it holds semantic features, tiny draws from class labels",
    ),
    "another codebook": (
        {"draft": other_codebook()},
        "^draft: its decoder is another vq, tiny large's is tiny vq.*same decoder",
    ),
    "no upscale model": (
        {"upscale_model": 5},
        "^upscale_model: it got the number 5; connect the output of Load Upscale Model",
    ),
    "an upscale model for latents": (
        {"upscale_model": Upscale(), "up_sampler": "latent"},
        "^up_sampler: 'latent' has no use",
    ),
    "no learned one": ({"up_sampler": "latent"}, "^up_sampler: there is no learned up-sampler for tiny vq"),
    "no decoder": ({"draft": host.Loaded.of(drawer("small").model)}, "^draft: it came without its decoder"),
    "all neighbours": ({"neighbours": 22}, "^neighbours: 22 is all of the 23 codes"),
    "tau": ({"tau": 2.0}, "^tau: "),
    "a preset": ({"preset": "best"}, "^preset: 'best'"),
    "a seed": ({"seed": 1.5}, "^seed: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mulosd_refuses(name):
    changes, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as problem:
        mulosd(**changes)
    assert "\n" not in str(problem.value)


def test_an_upscale_model_for_masks_is_none():
    model = Upscale()
    model.output_channels = 1
    with pytest.raises(UserError, match="^upscale_model: .*colour pictures"):
        mulosd(upscale_model=model)


def test_codes_need_the_de_tokenizers_ta_tok():
    alone = host.Loaded.of(replace(drawer().model, ta_tok=None), tiny_vae())
    with pytest.raises(UserError, match="^condition: it holds semantic codes, .*; load it with the TA-Tok"):
        draw(token_samplers.LlamaGenSampler, alone, prompt())
    with pytest.raises(UserError, match="^condition: it holds semantic codes, tiny draws from class labels"):
        draw(token_samplers.LlamaGenSampler, a_model(), prompt())
    with pytest.raises(UserError, match="^condition: .*Tar Prompt"):
        draw(token_samplers.LlamaGenSampler, drawer(), "a red boat")


def test_tar_has_a_baseline_of_its_own():
    codes = prompt()
    reports = [
        draw(token_samplers.ZipARSampler, drawer(), codes)[1],
        draw(token_samplers.LlamaGenSampler, drawer(), codes)[1],
        mulosd(condition=codes)[1],
        draw(token_samplers.LlamaGenSampler, a_model(), from_ids([1, 2]))[1],
        draw(token_samplers.ZipARSampler, a_model(), from_ids([1, 2]))[1],
    ]
    for report, seconds in zip(reports, (2.0, 4.0, 1.0, 3.0, 1.5), strict=True):
        report.seconds = seconds
    pairs = {f"image_{i}": [torch.rand(1, 8, 8, 3)] for i in range(1, 6)} | {
        f"report_{i}": [r] for i, r in enumerate(reports, 1)
    }
    _, text = comparison.Compare.execute(labels=[""], columns=[0], baseline=[0], **pairs).result
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")][:2]
        for line in text.partition("\n\n")[0].splitlines()[2:]
    ]
    assert [row[0].split(" ")[0] for row in rows] == ["Tar", "ZipAR", "MuLo-SD", "LlamaGen", "ZipAR"]
    assert [row[1] for row in rows] == ["1.00x", "2.00x", "4.00x", "1.00x", "2.00x"]
