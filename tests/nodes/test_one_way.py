"""The same wish through nodes and Python gives the same image; tests/cli/test_pipeline.py compares Python with the
command line.
"""

import fastar_nodes
import nextstep_models
import numpy as np
import pytest
import torch
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.nodes import conditioning, loaders, samplers
from PIL import Image


def picture(side: int) -> Image.Image:
    """A picture without a sharp edge, of the size that the demo's decoders encode."""
    ramp = torch.linspace(0, 1, side)
    planes = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side), ramp.flip(0).expand(side, side)])
    return Image.fromarray((planes.movedim(0, -1) * 255).round().to(torch.uint8).numpy())


def upper_half(side: int) -> np.ndarray:
    mask = np.zeros((side, side), np.uint8)
    mask[: side // 2] = 255
    return mask


def label(text: str, **values):
    return conditioning.ClassLabel.execute(labels=text, **values).result[0]


def prompt(text: str, **values):
    return conditioning.Prompt.execute(text=text, **values).result[0]


def codes(text: str, seed: int, **values):
    tar = loaders.LoadTar.execute("demo-tar").result[0]
    return conditioning.TarPrompt.execute(tar=tar, text=text, seed=seed, **values).result[0]


FEW = {"steps": 6, "diffusion_steps": 10}
# No demo of it ships, so a tiny one stands in for this entry of the catalogue.
NEXTSTEP = "nextstep-1.1-pretrain-256px"
# Loader, entry, sampler's node, its condition, the widgets of the node; prompt, and arguments in Python.
WISHES = {
    "a label": (
        *(loaders.LoadMAR, "demo", samplers.MARSampler, lambda: label("cat"), FEW),
        *("cat", {"sampler": "mar", **FEW}),
    ),
    "labels, several images of each, and a preset": (
        *(loaders.LoadMAR, "demo", samplers.FastHybridSampler, lambda: label("cat, 7", images_per_label=2)),
        *({"preset": "fast"}, ["cat", 7], {"sampler": "fasthybrid", "preset": "fast", "images": 2}),
    ),
    "an image of a batch alone": (
        *(
            loaders.LoadMAR,
            "demo",
            samplers.LazyMARSampler,
            lambda: label("boat"),
            {"preset": "fast", "first_image": 3},
        ),
        *("boat", {"sampler": "lazymar", "preset": "fast", "first": 3}),
    ),
    "a prompt with a negative": (
        *(loaders.LoadHybrid, "demo-hybrid", samplers.MARSampler),
        *(lambda: prompt("a red boat", negative="a blue cat"), FEW),
        *("a red boat", {"sampler": "mar", "negative": "a blue cat", **FEW}),
    ),
    "a prompt in codes": (
        *(loaders.LoadTarDetokenizer, "demo-dtok-low", samplers.ZipARSampler, lambda: codes("a red boat", 7)),
        *({"preset": "balanced"}, "a red boat", {"sampler": "zipar", "preset": "balanced"}),
    ),
    "tokens": (
        *(loaders.LoadLlamaGen, "demo-llamagen-low", samplers.LlamaGenSampler, lambda: label("fish"), {"cfg": 2.0}),
        *("fish", {"sampler": "llamagen", "cfg": 2.0}),
    ),
    "blocks": (
        *(loaders.LoadBitDance, "demo-bitdance", samplers.BitDanceSampler, lambda: label("fish")),
        *({"diffusion_steps": 4}, "fish", {"sampler": "bitdance", "diffusion_steps": 4}),
    ),
    "tokens one by one": (
        *(loaders.LoadNextStep, NEXTSTEP, samplers.NextStepSampler, lambda: prompt("a boat", negative="blurry")),
        *({"diffusion_steps": 2}, "a boat", {"sampler": "nextstep", "negative": "blurry", "diffusion_steps": 2}),
    ),
}
# Those whose nodes take an image to inpaint.
EDITS = ("a label", "a prompt in codes", "tokens", "blocks", "tokens one by one")
CASES = [*((wish, False) for wish in WISHES), *((wish, True) for wish in EDITS)]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A tiny NextStep for 64 x 64 pixels in the place of the catalogue's."""
    folder = tmp_path / "NextStep-1.1-Pretrain-256px"
    folder.symlink_to(nextstep_models.FOLDER / "model")
    absent, resolve = hub.absent, hub.resolve
    monkeypatch.setattr(hub, "absent", lambda name, *more: None if NEXTSTEP in name else absent(name, *more))
    monkeypatch.setattr(hub, "resolve", lambda name, *more: folder if NEXTSTEP in name else resolve(name, *more))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.fast_cases(every=3)
@pytest.mark.parametrize(("wish", "edited"), CASES, ids=[f"{wish}, edited" if edit else wish for wish, edit in CASES])
def test_nodes_and_python_draw_the_same(wish, edited):
    loader, entry, node, condition, widgets, prompt, arguments = WISHES[wish]
    pipe = fastar_nodes.load(entry)
    model, vae = loader.execute(entry).result
    side = vae.sizes[0][0]

    sockets = {}
    if edited:
        image = torch.from_numpy(np.asarray(picture(side)).copy())[None].float() / 255
        mask = torch.from_numpy(upper_half(side))[None].float() / 255
        sockets = {"latent_image": {"samples": vae.encode(image)}, "mask": mask}
        arguments = {**arguments, "image": picture(side), "mask": upper_half(side)}

    latent, report = node.execute(model=model, condition=condition(), seed=7, **sockets, **widgets).result
    made = pipe.sample(prompt, seed=7, **arguments)

    of_python = vae.vectors(made.latents) if pipe.ready.kind.codes else made.latents
    assert torch.equal(latent["samples"], of_python)
    assert report.settings == made.report.settings and report.counts == made.report.counts
    assert report.conditions == made.report.conditions and report.edits == made.report.edits

    # Decoders round another way in batches of another size.
    drawn = (vae.decode(latent["samples"]) * 255).round().numpy()
    assert np.abs(drawn - pipe.decode(made.latents)).max() <= 1
