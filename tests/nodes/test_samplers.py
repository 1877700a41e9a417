"""Sampler nodes of all families on tiny models: results, presets, edits, caches, and inputs that do not fit."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import fake_comfy
import pytest
import torch
from fake_comfy import Interrupted, Progress
from fastar_nodes.errors import UserError
from fastar_nodes.networks.latent_samplers import LatentSamplers, LatentSamplersConfig, LatentSamplersModel
from fastar_nodes.nodes import conditioning, editing, host, loaders, samplers
from fastar_nodes.nodes.host.loaded import Loaded
from fastar_nodes.reports.record import GIVEN
from fastar_nodes.runs import memory
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import TextCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.settings import MARSettings
from qwen_reference import tiny_tar
from tiny import LABELS, NODES, SHORT, TEXT_SIZE, a_drawer, a_gpt, a_mar, a_prompt, a_vq, models, sample

MAR_NODES = [node for node in NODES.values() if SAMPLERS[node.sampler].family.kind == "masked"]
TOKEN_NODES = [node for node in NODES.values() if SAMPLERS[node.sampler].family.kind == "tokens"]
TOKEN_NODES = [node for node in TOKEN_NODES if not SAMPLERS[node.sampler].needs_draft]
FAST = [node for node in NODES.values() if node.preset]


def kind_of(node) -> type:
    return SAMPLERS[node.sampler].settings


@pytest.mark.parametrize("node", MAR_NODES)
def test_mar_samplers_give_latents_and_a_report(node):
    samples, report = sample(node)
    assert samples.shape == (2, 2, 4, 4) and samples.dtype == torch.float32
    assert (report.seed, report.images) == (3, 2) and report.settings == asdict(kind_of(node)(**SHORT))


@pytest.mark.parametrize("node", TOKEN_NODES)
def test_token_latents_are_code_vectors_that_core_decodes_and_encodes(node):
    model = models(node)["model"]
    samples, report = sample(node, model=model)
    assert samples.shape == (2, 4, 4, 4) and samples.dtype == torch.float32
    net = model.vae.first_stage_model
    assert torch.equal(net.vectors(net.codes(samples)), samples)
    pictures = model.vae.decode(samples)
    assert pictures.shape == (2, 8, 8, 3) and 0 <= pictures.min() and pictures.max() <= 1
    assert torch.equal(model.vae.decode(samples.half()), pictures), "half precision changed a code"
    back = model.vae.encode(pictures)
    assert back.shape == samples.shape and torch.equal(net.vectors(net.codes(back)), back)
    assert (report.seed, report.images) == (3, 2)
    assert report.settings == asdict(kind_of(node)()) | {"cfg": 4.0, "top_k": 2000}
    passes = report.counts["transformer_passes"]
    assert [(done, total) for done, total, _ in Progress.updates] == [(k + 1, passes) for k in range(passes)]
    assert Progress.updates[-1][2][1].size == (256, 128)  # two images of 8 pixels, enlarged


def test_mulosd_drafts_checks_and_resamples():
    large, small, codes = a_drawer(), a_drawer("small", 1), a_prompt()
    fake_comfy.state.loaded.clear()
    Progress.updates.clear()
    about = {"target": large, "draft": small, "condition": codes, "top_k": 0, "acceptance_target": 0.6}
    samples, report = sample(samplers.MuLoSDSampler, **about)
    assert samples.shape == (2, 4, 6, 6) and report.sampler == "mulosd" and report.model == "tiny large"
    assert 0 < report.acceptance < 1 and report.counts["draft_passes"] < report.counts["transformer_passes"]
    shown = [(done, total) for done, total, _ in Progress.updates]
    assert len(shown) == report.counts["transformer_passes"] and shown == sorted(set(shown))
    assert {total for _, total in shown} == {2 * 36} and shown[-1] == (72, 72)
    (reading, _), (patchers, asked) = fake_comfy.state.loaded
    assert reading == [large.parts["ta_tok"].patcher]
    assert patchers == [large.patcher, small.patcher, large.vae.patcher]
    assert report.counts["cache_bytes"] < asked["memory_required"]
    samples, _ = sample(samplers.MuLoSDSampler, target=a_gpt(grid=8), draft=a_gpt(grid=4), condition=LABELS)
    assert samples.shape == (2, 4, 8, 8)


def test_one_prompt_feeds_every_size():
    codes, large, small = a_prompt(), a_drawer(), a_drawer("small", 1)
    plain, report = sample(samplers.LlamaGenSampler, model=large, condition=codes, top_k=0)
    assert report.sampler == "tar" and report.counts["transformer_passes"] == 36
    fast, record = sample(samplers.ZipARSampler, model=large, condition=codes, top_k=0, window=2)
    assert fast.shape == plain.shape and record.counts["transformer_passes"] < 36
    assert sample(samplers.LlamaGenSampler, model=small, condition=codes)[0].shape == (2, 4, 3, 3)


def test_texts_of_a_batch():
    texts = TextCondition((torch.ones(3, 6), torch.ones(7, 6)), ("three", "seven"))
    samples, report = sample(samplers.ZipARSampler, model=a_gpt(TEXT_SIZE), condition=texts, window=2)
    assert samples.shape == (2, 4, 4, 4) and report.images == 2


def test_every_part_of_a_hybrid_is_placed_and_room_is_made_for_what_the_report_says():
    model, vae = loaders.LoadHybrid.execute("demo-hybrid", "auto", "fp32", False, "plain").result
    text = conditioning.Prompt.execute("a red boat", images=2).result[0]
    fake_comfy.state.loaded.clear()
    _, report = sample(samplers.MARSampler, model=replace(model, vae=None), condition=text)
    kept = sum(v for k, v in report.memory.items() if not k.startswith(memory.WEIGHTS))
    assert fake_comfy.state.loaded[0][1]["memory_required"] == kept
    fake_comfy.state.loaded.clear()
    latent, report = sample(samplers.MARSampler, model=model, condition=text)
    assert report.memory[memory.DECODE] == vae.memory_used_decode(latent.shape, torch.float32) > 0
    patchers = fake_comfy.state.loaded[0][0]
    assert len(patchers) == len(set(patchers)) == 4 and patchers[-1] is vae.patcher
    placed = {id(p) for patcher in patchers[:3] for p in patcher.model.parameters()}
    assert placed == {id(p) for p in model.model.hybrid.parameters()}
    other = loaders.LoadHybrid.execute("demo-hybrid", "auto", "fp32", False, "plain").result[0]
    fake_comfy.state.loaded.clear()
    sample(samplers.CSpDSampler, draft=other, target=model, condition=text)
    assert len(fake_comfy.state.loaded[0][0]) == 7


def test_both_models_are_brought_to_the_device_once():
    both = models(samplers.CSpDSampler)
    sample(samplers.CSpDSampler, **both)
    assert [both["target"].patcher, both["draft"].patcher] == fake_comfy.state.loaded[-1][0][:2]
    one = a_mar()
    sample(samplers.CSpDSampler, draft=one, target=one)
    assert fake_comfy.state.loaded[-1][0].count(one.patcher) == 1


@pytest.mark.parametrize("node", TOKEN_NODES)
@pytest.mark.fast_cases("PARSampler")
def test_room_is_made_for_the_kv_cache_and_without_previews_not_for_the_decoder(node, monkeypatch):
    model = models(node)["model"]
    sample(node, model=model)
    assert fake_comfy.state.loaded[-1][0] == [model.patcher, model.vae.patcher]
    monkeypatch.setattr(host.queue, "previews_wanted", lambda: False)
    monkeypatch.setattr(model.vae, "decode_now", None)
    _, report = sample(node, model=model, condition=from_ids([1] * 8))
    patchers, asked = fake_comfy.state.loaded[-1]
    assert patchers == [model.patcher]
    assert report.counts["cache_bytes"] < asked["memory_required"] < 100 * report.counts["cache_bytes"]


@pytest.mark.parametrize("at", [2, 30])
@pytest.mark.fast_cases("30")
def test_cancel_while_mulosd_drafts_and_while_it_resamples(at):
    codes = a_prompt()
    Progress.updates.clear()
    fake_comfy.state.asked, fake_comfy.state.interrupt_at = 0, at
    with pytest.raises(Interrupted):
        sample(samplers.MuLoSDSampler, condition=codes, top_k=0, tau=1.01, resample_window=0)
    assert len(Progress.updates) == at


class Upscale:
    """As much of core's UPSCALE_MODEL as there is."""

    scale, input_channels, output_channels = 3, 3, 3
    architecture = SimpleNamespace(name="Tiny")

    def __init__(self) -> None:
        self.model = torch.nn.Conv2d(3, 3, 1)

    def __call__(self, x):
        return x


def test_an_upscale_model_enlarges_the_draft_with_cores_node():
    large, model, codes = a_drawer(), Upscale(), a_prompt()
    fake_comfy.state.loaded.clear()
    about = {"target": large, "condition": codes, "upscale_model": model, "tau": 0.0, "top_k": 0}
    samples, report = sample(samplers.MuLoSDSampler, **about)
    assert report.settings["up_sampler"] == "Tiny x3" and report.acceptance == 1
    ((used, pictures),) = fake_comfy.state.upscaled
    assert used is model and pictures.shape == (2, 6, 6, 3)
    net = large.vae.first_stage_model
    big = pictures.movedim(-1, 1).repeat_interleave(3, 2).repeat_interleave(3, 3) * 2 - 1
    big = torch.nn.functional.interpolate(big, size=(12, 12), mode="bicubic", antialias=True)
    assert torch.equal(samples, net.vectors(net.encode(big.clamp(-1, 1))[1]))
    # The sampled models are placed again after core's node, which may have unloaded them.
    before, after = (patchers for patchers, _ in fake_comfy.state.loaded[-2:])
    assert before == after and large.patcher in after


def latent_samplers(ratio=2, codes=None):
    """Loaded latent samplers for the tokenizer of :func:`a_drawer`, or for another number of codes."""
    vq = a_drawer().vae.tokenizer.net
    config = LatentSamplersConfig(ratio, codes or vq.config.codes, vq.config.code_channels, 8, 1, 1, 8, 1)
    net = LatentSamplers(config).eval()
    if codes is None:
        net.codebook.load_state_dict(vq.quantize.state_dict())
    return Loaded.of(LatentSamplersModel(net, "own samplers"))


def test_latent_samplers_enlarge_the_draft_in_place_of_the_decoder():
    large, own = a_drawer(), latent_samplers()
    fake_comfy.state.loaded.clear()
    about = {"target": large, "condition": a_prompt(), "latent_samplers": own, "tau": 0.0, "top_k": 0}
    samples, report = sample(samplers.MuLoSDSampler, **about)
    assert report.settings["up_sampler"] == "own samplers" and report.acceptance == 1 and samples.shape[2:] == (6, 6)

    (patchers, _) = fake_comfy.state.loaded[-1]
    assert own.patcher in patchers


# What a model's file might recommend; of it a sampler takes what it has.
MAR_FILE = {"steps": 5, "diffusion_steps": 6, "cfg": 1.5, "temperature": 0.75, "lookahead": 3, "threshold": 0.5}
TOKEN_FILE = {"cfg": 2.0, "temperature": 0.5, "top_k": 9, "top_p": 0.75, "window": 3}


def recommended(node, preset="recommended", label_set="picture-book", **changes):
    """A run of a model whose file recommends settings."""
    target = "target" if "target" in node.models else "model"
    make, file = (a_mar, MAR_FILE) if node in MAR_NODES else (a_gpt, TOKEN_FILE)
    return sample(node, **{target: make(label_set=label_set, file=file), "preset": preset, **changes})


def test_a_preset_takes_what_the_models_file_recommends():
    settings = recommended(samplers.MARSampler)[1].settings
    assert settings == asdict(MARSettings(**{k: v for k, v in MAR_FILE.items() if k in settings}))
    settings = recommended(samplers.LlamaGenSampler, parallel=2)[1].settings
    assert {k: settings.get(k) for k in TOKEN_FILE} == TOKEN_FILE | {"window": None} and settings["parallel"] == 2
    # The file's window is the one that was measured on its grid.
    for preset, window in {"custom": 3, "balanced": 3, "fast": 4, "exact": 256}.items():
        assert recommended(samplers.ZipARSampler, preset)[1].settings["window"] == window


def test_exact_is_the_baseline():
    assert torch.equal(recommended(samplers.FastHybridSampler, "exact")[0], recommended(samplers.MARSampler)[0])
    plain, _ = sample(samplers.LlamaGenSampler, model=a_gpt(grid=8), preset="recommended")
    assert torch.equal(sample(samplers.ZipARSampler, model=a_gpt(grid=8), preset="exact")[0], plain)


@pytest.mark.parametrize("node", FAST)
@pytest.mark.fast_cases(4)
def test_switched_off_a_sampler_is_the_baseline(node):
    shared = {"cfg": 1.25, "condition": a_prompt() if node is samplers.MuLoSDSampler else LABELS}
    given = models(node)
    off, report = sample(node, **given, **shared, enabled=False)
    plain_node = samplers.MARSampler if node in MAR_NODES else samplers.LlamaGenSampler
    plain, wanted = sample(plain_node, model=given.get("target", given.get("model")), **shared)
    assert torch.equal(off, plain)
    assert (report.sampler, report.settings, report.counts) == (wanted.sampler, wanted.settings, wanted.counts)


def test_a_mistake_in_a_models_file_is_a_sentence():
    with pytest.raises(UserError, match="^model: "):
        sample(samplers.MARSampler, model=a_mar(file={"cfg": 100.0}))


def a_cache(**changes):
    return samplers.LazyMARCache.execute(preset="custom", **changes).result[0]


@pytest.mark.parametrize("node", [samplers.MARSampler, samplers.FastHybridSampler, samplers.CSpDSampler])
@pytest.mark.fast_cases("MARSampler", "CSpDSampler")
def test_a_cache_combines_with_every_other_sampler(node):
    cache, given = a_cache(refresh_period=3, start_step=1), models(node)
    first, report = sample(node, **given, steps=8, cache=cache)
    name = "lazymar" if node is samplers.MARSampler else f"{node.sampler}+lazymar"
    assert report.sampler == name and report.settings["refresh_period"] == 3
    again, _ = sample(node, **given, steps=8, cache=cache)
    assert torch.equal(first, again), "one run left something in the cache for the next"
    if node is samplers.MARSampler:
        own, wanted = sample(samplers.LazyMARSampler, **given, steps=8, refresh_period=3, start_step=1)
        assert torch.equal(first, own) and report.counts == wanted.counts


def test_a_cache_is_for_both_models_of_cspd():
    """The node draws what a script draws with the sampler whose two models have caches."""
    given, caches = models(samplers.CSpDSampler), {"refresh_period": 3, "start_step": 1}
    samples, report = sample(samplers.CSpDSampler, **given, steps=8, cache=a_cache(**caches))
    entry = SAMPLERS["cspd+lazymar"]
    settings = entry.settings(**{**SHORT, "steps": 8, **caches})
    model, draft = (given[name].model for name in ("target", "draft"))
    wanted = finish(entry.run(model, LABELS, settings, entry.family.noise(3, range(2)), draft=draft))
    assert torch.equal(samples, wanted.latents) and report.counts == wanted.report.counts


@pytest.mark.parametrize("node", samplers.NODES)
def test_a_node_can_be_copied_with_locked_attributes(node):
    """As ComfyUI does before it runs one: see lock_class in comfy_api/internal."""

    class Locked(type(node)):
        def __setattr__(cls, name, value):
            raise AttributeError(f"{name} of a locked class")

    copied = type(f"{node.__name__}Clone", (node, *node.__bases__), dict(vars(node)))
    locked = Locked(copied.__name__, copied.__bases__, dict(vars(copied)))
    assert locked.define_schema().node_id == node.define_schema().node_id


def test_cache_settings_are_checked():
    with pytest.raises(UserError, match="^refresh_period: "):
        a_cache(refresh_period=-2)
    with pytest.raises(UserError, match="^cache: "):
        sample(samplers.MARSampler, cache=5)


def half(height: int = 8, width: int = 8) -> torch.Tensor:
    """A mask [1, height, width] over the right half."""
    mask = torch.zeros(1, height, width)
    mask[..., width // 2 :] = 1
    return mask


@pytest.mark.parametrize("node", MAR_NODES)
def test_every_mar_sampler_resamples_the_mask_and_gives_back_the_rest(node):
    start = torch.randn(1, 2, 4, 4)
    samples, report = sample(node, latent_image={"samples": start}, mask=half())
    assert torch.equal(samples[..., :2], start[..., :2].expand(2, -1, -1, -1))
    assert not (samples[..., 2:] == start[..., 2:]).any()
    assert (report.maps["outcome"][:, :, :2] == GIVEN).all() and (report.maps["step"][:, :, :2] == -1).all()
    assert (report.maps["outcome"][:, :, 2:] != GIVEN).all() and (report.maps["step"][:, :, 2:] >= 0).all()


def test_the_report_says_which_edit_and_label_it_is_of():
    """The kept tokens and the mask on the grid decide, whatever the mask's size and what was below it."""
    latent, model = {"samples": torch.randn(1, 2, 4, 4)}, a_mar()
    below = {"samples": latent["samples"].clone()}
    below["samples"][..., 3] += 1
    beside = {"samples": latent["samples"].clone()}
    beside["samples"][..., 0] += 1

    def edits(node=samplers.MARSampler, given=latent, mask=None, **more):
        mask = half() if mask is None else mask
        return sample(node, model=model, latent_image=given, mask=mask, **more)[1].edits

    wanted = edits()
    assert len(wanted) == 2 and wanted[0] == wanted[1], "one mask and start for two images"
    assert wanted == edits(samplers.FastHybridSampler) == edits(mask=half(64, 32)) == edits(given=below)
    assert edits(given=beside) != wanted and edits(mask=1 - half()) != wanted

    plain = sample(samplers.MARSampler, model=model)[1]
    other = sample(samplers.MARSampler, model=model, condition=from_ids([1, 4]))[1]
    assert plain.edits == () and len(set(plain.conditions)) == 2
    assert other.conditions != plain.conditions


def test_masks_of_every_shape_and_the_latents_own():
    latent, model = {"samples": torch.randn(1, 2, 4, 4)}, a_mar()
    wanted, _ = sample(samplers.MARSampler, model=model, latent_image=latent, mask=half(4, 4))
    for mask in (half()[0], half()[:, None], half(64, 32), half().half()):
        assert torch.equal(sample(samplers.MARSampler, model=model, latent_image=latent, mask=mask)[0], wanted)
    own = latent | {"noise_mask": half()[:, None]}
    assert torch.equal(sample(samplers.MARSampler, model=model, latent_image=own)[0], wanted)
    # A mask on the socket goes before the latent's own.
    own = latent | {"noise_mask": torch.ones(1, 1, 8, 8)}
    assert torch.equal(sample(samplers.MARSampler, model=model, latent_image=own, mask=half())[0], wanted)


def paste(image, inpainted, mask, **values):
    """Crop around Mask and Paste Inpainted Area; the images and the three in one."""
    crop = editing.CropAroundMask.execute(image, mask).result[2]
    return editing.PasteInpaintedArea.execute(crop, inpainted, **values).result


def test_an_inpainted_area_is_put_back_into_the_image_it_was_cut_from():
    image, mask = torch.rand(1, 60, 90, 3), torch.zeros(1, 60, 90)
    mask[:, 20:40, 30:50] = 1
    cut, cut_mask, crop = editing.CropAroundMask.execute(image, mask, context=1.5).result
    assert torch.equal(cut, image[:, 15:45, 25:55]) and torch.equal(cut_mask, mask[:, 15:45, 25:55])

    drawn = torch.rand(2, 30, 30, 3)
    values = {"feather": 0, "match_colours": False}
    after, three = editing.PasteInpaintedArea.execute(crop, drawn, **values).result
    wanted = image.repeat(2, 1, 1, 1)
    wanted[:, 20:40, 30:50] = drawn[:, 5:25, 5:25]
    torch.testing.assert_close(after, wanted, rtol=0, atol=1e-6)
    assert torch.equal(after[:, :20], wanted[:, :20]) and torch.equal(after[:, :, 50:], wanted[:, :, 50:])
    assert torch.equal(three[:, :, :90], image.expand(2, -1, -1, -1)) and torch.equal(three[:, :, -90:], after)


def test_a_crop_of_one_image_takes_a_batch_of_masks_and_drawings():
    image, mask = torch.rand(1, 12, 16, 3), torch.zeros(2, 24, 32)
    mask[0, 4:8, 4:8], mask[1, 8:16, 8:24] = 1, 1
    after, three = paste(image, torch.rand(2, 8, 8, 3), mask, feather=0)
    assert after.shape == (2, 12, 16, 3) and len(three) == 2
    for k, place in enumerate([(slice(2, 4), slice(2, 4)), (slice(4, 8), slice(4, 12))]):
        changed = (after[k] != image[0]).any(-1)
        inside = torch.zeros_like(changed)
        inside[place] = True
        assert changed.any() and not (changed & ~inside).any()


def test_an_own_image_that_cannot_be_is_reported():
    picture, mask = torch.rand(2, 8, 8, 3), half()
    with pytest.raises(UserError, match="^mask: it is empty; paint over the area"):
        editing.CropAroundMask.execute(picture, 0 * mask)
    with pytest.raises(UserError, match="^image: it holds 2 images, but the other input holds 3"):
        editing.CropAroundMask.execute(picture, mask.repeat(3, 1, 1))
    with pytest.raises(UserError, match="^crop: it holds 2 images, but the other input holds 3"):
        paste(picture, torch.rand(3, 8, 8, 3), mask)
    with pytest.raises(UserError, match="^crop: it got .*; connect the output of Crop around Mask"):
        editing.PasteInpaintedArea.execute(picture, picture)


@pytest.mark.parametrize("node", NODES.values())
def test_the_wrong_thing_on_a_socket(node):
    given = models(node) | {"condition": LABELS}
    for bad in ("text", 5, None, {"samples": 1}, SimpleNamespace(model=3), Loaded.of(tiny_tar())):
        for name in (*node.models, *([] if isinstance(bad, Loaded) else ["condition"])):
            with pytest.raises(UserError, match=f"^{name}: "):
                sample(node, **given | {name: bad})
    with pytest.raises(UserError, match="^enabled: " if node.preset else "^seed: "):
        sample(node, **given, **({"enabled": "no"} if node.preset else {"seed": -1}))


def without_ta_tok() -> Loaded:
    return Loaded.of(replace(a_drawer().model, ta_tok=None), a_vq())


MAR, LLAMAGEN = samplers.MARSampler, samplers.LlamaGenSampler
PAR, MULOSD = samplers.PARSampler, samplers.MuLoSDSampler
UNCOLOURED = Upscale()
UNCOLOURED.output_channels = 1
REFUSED = {
    "another family": (samplers.ZipARSampler, "model", lambda: {"model": a_mar()}),
    "tokens for MAR": (MAR, "model", lambda: {"model": a_gpt()}),
    "no decoder": (LLAMAGEN, "model", lambda: {"model": replace(a_gpt(), vae=None)}),
    "codes without TA-Tok": (LLAMAGEN, "condition", lambda: {"model": without_ta_tok(), "condition": a_prompt()}),
    "no upscale model": (MULOSD, "upscale_model", lambda: {"upscale_model": 5}),
    "an upscale model for masks": (MULOSD, "upscale_model", lambda: {"upscale_model": UNCOLOURED}),
    "latent samplers of another ratio": (MULOSD, "latent_samplers", lambda: {"latent_samplers": latent_samplers(3)}),
    "latent samplers of other codes": (MULOSD, "latent_samplers", lambda: {"latent_samplers": latent_samplers(2, 9)}),
    "a model as latent samplers": (MULOSD, "latent_samplers", lambda: {"latent_samplers": a_mar()}),
    "two that enlarge": (
        MULOSD,
        "latent_samplers",
        lambda: {"latent_samplers": latent_samplers(), "upscale_model": Upscale()},
    ),
    "a preset": (MULOSD, "preset", lambda: {"preset": "fats"}),
    "no such option of a baseline": (MAR, "preset", lambda: {"preset": "balanced"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_sentence_that_names_the_field(name):
    node, field, changes = REFUSED[name]
    with pytest.raises(UserError, match=f"^{field}: ") as problem:
        sample(node, **changes())
    assert "\n" not in str(problem.value)
