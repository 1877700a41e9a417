"""The nodes of the LlamaGen family, without ComfyUI: samplers, loader, prompt, and what looks at their reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_comfy
import pytest
import torch
from fake_comfy import Interrupted, Preview, Progress
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig, VQModel
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig, TokenModel
from fastar_nodes.model_loaders.networks.mar import MARModel
from fastar_nodes.nodes import comparison, conditioning, host, loaders, mar_samplers, previous, token_samplers
from fastar_nodes.samplers import presets
from fastar_nodes.samplers.conditioning import TextCondition, from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.settings import knobs
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import NON_LOCAL, LlamaGenSettings, PARSettings, ZipARSettings
from safetensors.torch import save_file

GPT_SIZE = LlamaConfig(dim=16, depth=1, heads=2, kv_heads=2, hidden=24, vocab=23, condition="class", condition_size=10)
TEXT_SIZE = replace(GPT_SIZE, condition="text", condition_size=6, text_rows=7)
VQ_SIZE = VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=8, codes=23, code_channels=4, groups=4)
SAMPLERS = {
    token_samplers.LlamaGenSampler: LlamaGenSettings,
    token_samplers.PARSampler: PARSettings,
    token_samplers.ZipARSampler: ZipARSettings,
}

pytestmark = pytest.mark.usefixtures("one_thread")


def random(net: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    g = torch.Generator().manual_seed(seed)
    for name, p in net.state_dict().items():
        p.copy_(
            torch.randn(p.shape, generator=g) * (1.0 if "embed" in name else 0.3)
            + (1.0 if p.ndim == 1 and "weight" in name else 0)
        )
    return net.eval().requires_grad_(False)


def tiny_vae() -> host.FastARVAE:
    return loaders.make_vae(VQModel(random(VQAutoencoder(VQ_SIZE)), "tiny vq"), VQ_SIZE.code_channels)


def a_model(config: LlamaConfig = GPT_SIZE, grid: int = 4, label_set: str = "", special: int = 0) -> host.Loaded:
    net = random(Llama(replace(config, special=special)))
    return host.Loaded.of(TokenModel(net, "tiny", grid, label_set=label_set), tiny_vae())


def fitting(node: type) -> host.Loaded:
    return a_model(special=3 if node is token_samplers.PARSampler else 0)


def values(settings: type, **changes):
    """Defaults of a settings class, with the published values for classes."""
    return {name: default for name, (default, _) in knobs(settings).items()} | {"cfg": 4.0, "top_k": 2000} | changes


def sample(node: type, model=None, condition=None, seed: int = 3, **changes):
    """A run of a sampler node: its LATENT's samples and its report."""
    extra = {name: changes.pop(name) for name in ("preset",) if name in changes}
    condition = from_ids([1, 2]) if condition is None else condition
    done = node.execute(
        model=fitting(node) if model is None else model,
        condition=condition,
        seed=seed,
        **values(SAMPLERS.get(node, ZipARSettings), **changes),
        **extra,
    )
    return done.result[0]["samples"], done.result[1]


# ------------------------------------------------------------------------------------------------ samplers


@pytest.mark.parametrize("node", SAMPLERS)
def test_latents_are_code_vectors_that_core_decodes_and_encodes(node):
    model = fitting(node)
    samples, report = sample(node, model)
    assert samples.shape == (2, 4, 4, 4) and samples.dtype == torch.float32
    net = model.vae.first_stage_model
    assert torch.equal(net.vectors(net.codes(samples)), samples)
    pictures = model.vae.decode(samples)
    assert pictures.shape == (2, 8, 8, 3) and 0 <= pictures.min() and pictures.max() <= 1
    assert torch.equal(model.vae.decode(samples.half()), pictures), "half precision changed a code"
    back = model.vae.encode(pictures)
    assert back.shape == samples.shape and torch.equal(net.vectors(net.codes(back)), back)
    assert (report.seed, report.images, report.settings) == (3, 2, values(SAMPLERS[node]))


def test_the_node_draws_what_a_script_draws():
    model = a_model()
    samples, _ = sample(token_samplers.LlamaGenSampler, model, cfg=2.0)
    codes = finish(llamagen(model.model, from_ids([1, 2]), LlamaGenSettings(cfg=2.0), PairedDraws(3, range(2)))).codes
    assert torch.equal(samples, model.vae.first_stage_model.vectors(codes))


@pytest.mark.parametrize("node", SAMPLERS)
def test_progress_counts_passes_and_previews_show_the_canvas(node):
    passes = sample(node)[1].counts["transformer_passes"]
    record = [(done, total) for done, total, _ in Progress.updates]
    assert record == [(k + 1, passes) for k in range(passes)]
    assert Progress.updates[-1][2][0] == "JPEG" and Progress.updates[-1][2][1].size == (
        256,
        128,
    )  # two pictures of 8 pixels, enlarged


def test_cancel_stops_before_the_next_pass():
    fake_comfy.state.interrupt_at = 3
    with pytest.raises(Interrupted):
        sample(token_samplers.LlamaGenSampler)
    assert len(Progress.updates) == 3


def test_without_previews_the_decoder_stays_where_it_is(monkeypatch):
    model = a_model()
    shown, _ = sample(token_samplers.LlamaGenSampler, model)
    assert fake_comfy.state.loaded[-1][0] == [model.patcher, model.vae.patcher]
    monkeypatch.setattr(host.args, "preview_method", Preview.NoPreviews)
    monkeypatch.setattr(model.vae, "decode_now", None)
    samples, _ = sample(token_samplers.LlamaGenSampler, model)
    assert fake_comfy.state.loaded[-1][0] == [model.patcher] and torch.equal(samples, shown)
    monkeypatch.undo()


@pytest.mark.parametrize("node", SAMPLERS)
def test_room_is_made_for_the_cache_before_it_is_taken(node, monkeypatch):
    monkeypatch.setattr(host.args, "preview_method", Preview.NoPreviews)
    _, report = sample(node, condition=from_ids([1] * 8))
    asked = fake_comfy.state.loaded[-1][1]["memory_required"]
    assert report.counts["cache_bytes"] < asked < 100 * report.counts["cache_bytes"]
    monkeypatch.undo()


def test_zipar_with_a_full_window_is_llamagen_and_presets_set_the_window():
    for label_set in ("picture-book", ""):
        model = a_model(grid=8, label_set=label_set)
        plain, _ = sample(token_samplers.LlamaGenSampler, model)
        exact, _ = sample(token_samplers.ZipARSampler, model, preset="exact", window=1)
        assert torch.equal(exact, plain)
        for name in ("balanced", "fast"):
            meant = presets.values(ZipARSettings, name, label_set == "picture-book")
            assert sample(previous.PreviousZipAR, model, preset=name)[1].settings == values(ZipARSettings) | meant
    for node in (token_samplers.ZipARSampler, previous.PreviousZipAR):
        with pytest.raises(UserError, match="^preset: 'best'"):
            sample(node, preset="best")


def test_texts_of_a_batch():
    texts = TextCondition((torch.ones(3, 6), torch.ones(7, 6)), ("three", "seven"))
    samples, report = sample(token_samplers.ZipARSampler, a_model(TEXT_SIZE), texts, window=2)
    assert samples.shape == (2, 4, 4, 4) and report.images == 2


@pytest.mark.parametrize("node", SAMPLERS)
@pytest.mark.parametrize("bad", ["text", 5, None, {"samples": 1}, SimpleNamespace(model=3)])
def test_the_wrong_thing_on_a_socket(node, bad):
    with pytest.raises(UserError, match="^model: .*Load LlamaGen / PAR or Load Tar De-tokenizer") as problem:
        node.execute(model=bad, condition=from_ids([1]), seed=0, **values(SAMPLERS[node]))
    assert "\n" not in str(problem.value)
    with pytest.raises(UserError, match="^condition: .*Class Label"):
        node.execute(model=fitting(node), condition=bad, seed=0, **values(SAMPLERS[node]))
    with pytest.raises(UserError, match="^condition: .*Text Prompt"):
        node.execute(model=a_model(TEXT_SIZE), condition=bad, seed=0, **values(SAMPLERS[node]))


TEXT = TextCondition((torch.ones(2, 6),), ("two",))
REFUSED = {
    "a MAR": (
        token_samplers.ZipARSampler,
        {"model": host.Loaded(object.__new__(MARModel), None)},
        "^model: it got a MARModel; connect",
    ),
    "a PAR to LlamaGen": (
        token_samplers.LlamaGenSampler,
        {"model": a_model(special=3)},
        "^model: tiny .*use the PAR Sampler",
    ),
    "a PAR to ZipAR": (
        token_samplers.ZipARSampler,
        {"model": a_model(special=3)},
        "^model: tiny .*use the PAR Sampler",
    ),
    "a LlamaGen to PAR": (token_samplers.PARSampler, {"model": a_model()}, "^grouping: tiny is a plain LlamaGen"),
    "an ablation of a PAR": (
        token_samplers.PARSampler,
        {"grouping": NON_LOCAL},
        "^grouping: tiny was trained for its own groups",
    ),
    "text for classes": (
        token_samplers.LlamaGenSampler,
        {"condition": TEXT},
        "^condition: it holds text, tiny draws from class labels",
    ),
    "labels for text": (
        token_samplers.LlamaGenSampler,
        {"model": a_model(TEXT_SIZE)},
        "^condition: it holds class labels, tiny draws",
    ),
    "a label too many": (
        token_samplers.LlamaGenSampler,
        {"condition": from_ids([10])},
        "^condition: label 10 is outside",
    ),
    "no decoder": (
        token_samplers.LlamaGenSampler,
        {"model": replace(a_model(), vae=None)},
        "^model: it came without its decoder",
    ),
    "a seed": (token_samplers.LlamaGenSampler, {"seed": -1}, "^seed: "),
    "a window": (token_samplers.ZipARSampler, {"window": -2}, "^window: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_reported(name):
    node, changes, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as problem:
        sample(node, **changes)
    assert "\n" not in str(problem.value)


def test_a_mar_sampler_refuses_tokens_and_texts():
    plain = values(mar_samplers.SAMPLERS["mar"].settings)
    with pytest.raises(UserError, match="^model: it got a TokenModel; connect the output of Load MAR"):
        mar_samplers.MARSampler.execute(model=a_model(), condition=from_ids([1]), seed=0, **plain)


def test_ablations_of_par_on_a_plain_llamagen():
    _, report = sample(token_samplers.PARSampler, a_model(), grouping=NON_LOCAL)
    assert report.sampler == "par" and report.counts["transformer_passes"] == 7


# ------------------------------------------------------------------------------------------------ loader


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with a LlamaGen that says its grid, one that does not, a PAR and two tokenizers."""

    def write(stem: str, net: torch.nn.Module, **metadata: object) -> None:
        about = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
        save_file(random(net).state_dict(), tmp_path / f"{stem}.safetensors", about)

    write("plain", Llama(GPT_SIZE), heads=2, grid=4, name="plain one")
    write("silent", Llama(GPT_SIZE), heads=2)
    write("par", Llama(replace(GPT_SIZE, special=3)), heads=2, grid=4)
    write("vq", VQAutoencoder(VQ_SIZE), groups=4, name="tiny vq")
    write("other", VQAutoencoder(replace(VQ_SIZE, codes=30)), groups=4, name="other vq")
    monkeypatch.setattr(host, "folders", lambda *kinds: [tmp_path])
    monkeypatch.setattr(host, "local_files", lambda *kinds: sorted(path.name for path in tmp_path.iterdir()))
    return tmp_path


def load(checkpoint="plain.safetensors", decoder="vq.safetensors", grid="auto", dtype="auto"):
    return loaders.LoadLlamaGen.execute(checkpoint=checkpoint, decoder=decoder, grid=grid, dtype=dtype).result


def test_a_llamagen_and_its_decoder_are_loaded(folder):
    model, vae = load()
    assert (model.model.name, model.model.grid, model.model.regions) == ("plain one", 4, 1) and model.vae is vae
    assert (vae.name, vae.latent_channels, vae.downscale_ratio) == ("tiny vq", 4, 2)
    assert load("par.safetensors")[0].model.regions == 4
    assert load("silent.safetensors", grid="8", dtype="bf16")[0].model.grid == 8
    assert sample(token_samplers.LlamaGenSampler, load()[0])[0].shape == (2, 4, 4, 4)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"checkpoint": "silent.safetensors"}, "^grid: silent.safetensors does not say .*choose 16"),
        ({"grid": "8"}, "^grid: plain.safetensors is for 4x4 tokens, not 8x8; choose auto"),
        ({"grid": "7"}, "^grid: '7' is none of auto, 8, 12, 16"),
        ({"grid": None}, "^grid: None is none of auto"),
        (
            {"checkpoint": "vq.safetensors"},
            "^checkpoint: vq.safetensors holds a VQ autoencoder, not a LlamaGen; choose it as decoder",
        ),
        (
            {"decoder": "plain.safetensors"},
            "^decoder: plain.safetensors holds a LlamaGen, not a VQ autoencoder; choose it as checkpoint",
        ),
        ({"decoder": "other.safetensors"}, "^decoder: other vq has 30 codes, plain one writes 23"),
        ({"checkpoint": "gone.safetensors"}, "^checkpoint: "),
        ({"checkpoint": 5}, "^checkpoint: 5 is no file name"),
        ({"dtype": "int4"}, "^dtype: "),
    ],
)
def test_what_the_loader_refuses(folder, changes, words):
    with pytest.raises(UserError, match=words) as problem:
        load(**changes)
    assert "\n" not in str(problem.value)


def test_menus_are_checked_as_they_ever_were(folder):
    valid = loaders.LoadLlamaGen.validate_inputs
    assert valid("plain.safetensors") is True and valid(None) is True
    assert valid("llamagen-b-256 (download 444 MB)") is True
    assert valid("mar-base") == "mar-base is a MAR, not a LlamaGen; choose another from the list"
    assert "none of the files here" in valid("auto")
    # Other menus are checked by ComfyUI, which looks whether they contain the choice.
    menus = {i.id: i.about["options"] for i in loaders.LoadLlamaGen.define_schema().inputs}
    assert "auto" in menus["decoder"] and "vq16-c2i (download 288 MB)" in menus["decoder"]
    assert not {"kl16", "gone.pth", 5, None} & {x for x in ("kl16", "gone.pth", 5, None) if x in menus["decoder"]}
    # When it lists nodes, it copies lists from their elements.
    assert [*menus["decoder"]] == type(menus["decoder"])(x for x in menus["decoder"])
    menus = {i.id: i.about["options"] for i in conditioning.TextPrompt.define_schema().inputs if i.kind == "COMBO"}
    assert "flan-t5-xl (download 11.40 GB)" in menus["encoder"] and "mar-base" not in menus["encoder"]


# ------------------------------------------------------------------------------------------------ prompt


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
    """Stands in for the T5 encoder; what was loaded is in the list."""
    loaded = []

    def load_text_encoder(path, dtype, device, tokenizer):
        loaded.append((path.name, dtype, tokenizer))
        return SimpleNamespace(
            net=torch.nn.Linear(1, 1), encode=lambda texts: [torch.ones(len(text.split()), 6) for text in texts]
        )

    monkeypatch.setattr(conditioning, "load_text_encoder", load_text_encoder)
    monkeypatch.setattr(conditioning, "_encoder", host.ModelCache())
    monkeypatch.setattr(host, "folders", lambda *kinds: [tmp_path])
    monkeypatch.setattr(host, "t5_tokenizer", lambda: "ComfyUI's")
    (tmp_path / "one.safetensors").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").touch()
    return loaded


def prompt(text="a red  boat\n", encoder="one.safetensors", images=2, dtype="auto"):
    return conditioning.TextPrompt.execute(text=text, encoder=encoder, images=images, dtype=dtype).result[0]


def test_a_prompt_is_encoded_and_the_encoder_kept_while_it_is_loaded(encoders):
    made = prompt()
    assert made.names == ("a red boat",) * 2 and [len(rows) for rows in made.features] == [3, 3]
    assert encoders == [("one.safetensors", "fp32", "ComfyUI's")]
    prompt("another one")
    assert len(encoders) == 1, "it was read again"
    kept = conditioning._encoder.get(("x", "y"), lambda: SimpleNamespace(net=torch.nn.Linear(1, 1)))
    prompt(encoder="folder")
    assert encoders[1:] == [("folder", "fp32", None)]  # its own tokenizer is in the folder
    kept.patcher.detach()  # one that is gone already
    prompt(encoder="folder")
    assert len(encoders) == 2
    conditioning._encoder._loaded.patcher.detach()
    prompt(encoder="folder")
    assert len(encoders) == 3, "ComfyUI unloaded it, and it was kept all the same"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"text": "  \n"}, "^text: it is empty"),
        ({"text": "http://boat.com #### boat.png"}, "^text: addresses, file names"),
        ({"text": 5}, "^text: it got the number 5"),
        ({"encoder": "gone.safetensors"}, "^encoder: "),
        ({"encoder": None}, "^encoder: "),
        ({"images": 0}, "^images: "),
        ({"dtype": "fp16"}, "^dtype: "),
    ],
)
def test_prompts_that_cannot_be(encoders, changes, words):
    with pytest.raises(UserError, match=words):
        prompt(**changes)
    assert not encoders


# ------------------------------------------------------------------------------------------------ looking at it


def test_every_family_is_compared_with_its_own_baseline():
    from test_node_work import sample as sample_mar

    mar = sample_mar(mar_samplers.MARSampler, [1])[1]
    reports = [mar, sample(token_samplers.ZipARSampler)[1], sample_mar(mar_samplers.FastHybridSampler, [1])[1]]
    reports += [sample(token_samplers.LlamaGenSampler)[1], sample(token_samplers.PARSampler)[1]]
    for report, seconds in zip(reports, (4.0, 1.0, 2.0, 3.0, 0.5), strict=True):
        report.seconds = seconds * report.images
    pairs = {f"image_{i}": [torch.rand(1, 8, 8, 3)] for i in range(1, 6)} | {
        f"report_{i}": [r] for i, r in enumerate(reports, 1)
    }

    def table(**about):
        _, text = comparison.Compare.execute(**{"labels": [""], "columns": [0], "baseline": [0]} | pairs | about).result
        return [
            [cell.strip() for cell in line.strip("| ").split("|")][:2]
            for line in text.partition("\n\n")[0].splitlines()[2:]
        ]

    assert table() == [
        ["MAR", "1.00x"],
        ["FastHybrid", "2.00x"],
        ["LlamaGen", "1.00x"],
        ["ZipAR", "3.00x"],
        ["PAR", "6.00x"],
    ]
    assert table(baseline=[4])[:2] == [["LlamaGen", "1.00x"], ["MAR", "0.75x"]]
    alone = table(report_2=[None], report_4=[None], report_5=[None])
    assert alone == [["MAR", "1.00x"], ["FastHybrid", "2.00x"]]


@pytest.mark.parametrize("node", SAMPLERS)
@pytest.mark.parametrize("what", ["fixed at step", "order", "outcome", "tokens per step"])
def test_maps_of_token_reports(node, what):
    model = fitting(node)
    samples, report = sample(node, model)
    image = comparison.TokenMap.execute(report=report, image=model.vae.decode(samples), what=what, opacity=0.5).result[
        0
    ]
    assert image.shape[0] == 2 and image.std() > 0.01


def test_reports_of_tokens_as_text():
    _, report = sample(token_samplers.PARSampler)
    text = comparison.ReportToText.execute(report=report, format="text").result[0]
    assert "transformer passes: 7" in text and "tokens per pass: 2.29" in text and "cache bytes: " in text
    record = json.loads(comparison.ReportToText.execute(report=report, format="json").result[0])["runs"][0]
    assert record["settings"] == values(PARSettings) and record["tokens_per_pass"] == 2.2857
