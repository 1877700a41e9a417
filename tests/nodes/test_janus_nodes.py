"""Load Janus and Prompt with the samplers of tokens, on the fake ComfyUI."""

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.nodes.conditioning import Prompt
from fastar_nodes.nodes.loaders import LoadJanus
from fastar_nodes.nodes.samplers import LlamaGenSampler, ZipARSampler
from janus_files import one_file

RECOMMENDED, FAST = "recommended", "fast"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return one_file(tmp_path_factory.mktemp("janus") / "janus.safetensors")


@pytest.fixture
def loaded(path, monkeypatch):
    monkeypatch.setattr(hub, "absent", lambda *_: None)
    monkeypatch.setattr(hub, "resolve", lambda *_: path)
    choice = "janus-pro-1b (download 4.18 GB)"
    return LoadJanus.execute(checkpoint=choice, dtype="fp32", allow_download=False, speed="plain").result


def prompts(text="a cat", images=1, **values):
    return Prompt.execute(text=text, images=images, **values).result[0]


def draw(node, model, condition=None, preset=RECOMMENDED, **inputs):
    """The latents and the report."""
    given = {"model": model, "condition": condition or prompts(), "seed": 3, "preset": preset}
    latent, report = node.execute(**given | inputs).result
    return latent["samples"], report


def test_a_prompt_becomes_a_picture(loaded):
    model, vae = loaded
    samples, report = draw(LlamaGenSampler, model)
    assert samples.shape == (1, 8, 4, 4) and vae.decode(samples).shape == (1, 8, 8, 3)
    assert (report.model, report.settings["cfg"], report.settings["top_k"]) == ("Tiny Janus", 5.0, 0)
    assert torch.equal(draw(LlamaGenSampler, model, parallel=4)[0], samples)


def test_every_line_is_a_prompt(loaded):
    model, _ = loaded
    batch = prompts("a cat\n\n the moon over the sea ", lines=True, images=2)
    assert batch.texts == ("a cat", "a cat", " the moon over the sea ", " the moon over the sea ")
    assert prompts("a cat\nthe moon").texts == ("a cat\nthe moon",) and prompts(" \n", lines=True).texts == ("",)
    together, first = (draw(ZipARSampler, model, text, FAST)[0] for text in (batch, prompts()))
    assert torch.equal(together[:1], first)
    with pytest.raises(UserError, match="^images: "):
        prompts("a\nb\nc", lines=True, images=100)


def test_a_picture_is_changed_under_a_mask(loaded):
    model, vae = loaded
    first, _ = draw(LlamaGenSampler, model)
    latent = {"samples": vae.encode(torch.rand(1, 8, 8, 3))}
    mask = torch.zeros(1, 8, 8)
    mask[:, 4:] = 1
    changed, _ = draw(LlamaGenSampler, model, latent_image=latent, mask=mask)
    kept = vae.first_stage_model.codes(latent["samples"])[:, :2]
    assert torch.equal(vae.first_stage_model.codes(changed)[:, :2], kept) and not torch.equal(changed, first)
    noted, _ = draw(LlamaGenSampler, model, latent_image={**latent, "noise_mask": mask[:, None]})
    assert torch.equal(noted, changed)
    with pytest.raises(UserError, match="^mask: "):
        draw(LlamaGenSampler, model, latent_image=latent)
    for wrong in ({"samples": torch.zeros(1, 4, 4, 4)}, None):
        with pytest.raises(UserError, match="^latent_image: "):
            draw(ZipARSampler, model, preset=FAST, latent_image=wrong, mask=mask)
