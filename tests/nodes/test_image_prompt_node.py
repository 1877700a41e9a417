"""Image and Prompt with Load Janus and the samplers of tokens, on the fake ComfyUI."""

import json

import janus_images
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.nodes.conditioning import ImageAndPrompt
from fastar_nodes.nodes.loaders import LoadJanus
from fastar_nodes.nodes.samplers import LlamaGenSampler, ZipARSampler
from safetensors.torch import load_file

NAMES = ("Janus-4o tiny", "Janus-Pro-7B", "model")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editors")
    return {name: janus_images.one_file(folder / f"{name}.safetensors", name) for name in NAMES}


@pytest.fixture
def load(files, monkeypatch):
    """Load Janus of the file of a name."""

    def loaded(name=NAMES[0]):
        monkeypatch.setattr(hub, "absent", lambda *_: None)
        monkeypatch.setattr(hub, "resolve", lambda *_: files[name])
        choice = "janus-pro-1b (download 4.18 GB, not pinned)"
        return LoadJanus.execute(checkpoint=choice, dtype="fp32", allow_download=False, speed="plain").result[0]

    return loaded


def image(*numbers):
    """An IMAGE of recorded images of one size."""
    return torch.stack([janus_images.picture(i).float() / 255 for i in numbers])


def condition(numbers=(0,), text="make it night", **values):
    return ImageAndPrompt.execute(image=image(*numbers), text=text, **values).result[0]


def draw(model, made, node=LlamaGenSampler, preset="recommended", **inputs):
    return node.execute(model=model, condition=made, seed=3, preset=preset, **inputs).result


def test_the_recorded_tokens(load):
    model = load()
    prompt = json.loads((janus_images.FOLDER / "edit/texts.json").read_text(encoding="utf-8"))["e1"]["prompt"]
    recorded = load_file(janus_images.FOLDER / "edit/io.safetensors")["e1.cfg5_w5.tokens"]
    latent, report = draw(model, condition(text=prompt), temperature=0.0)
    codes = model.vae.first_stage_model.codes(latent["samples"])
    assert torch.equal(codes.flatten(), recorded)
    assert report.settings["cfg"] == 5.0 and not report.note


def test_variants_windows_and_zipar(load):
    model = load()
    made = condition(images=3, freedom=0.0)
    assert len(made) == 3 and made.freedom == 0.0
    samples = draw(model, made)[0]["samples"]
    assert samples.shape == (3, 8, 4, 4)
    assert torch.equal(draw(model, condition(freedom=0.0))[0]["samples"], samples[:1])
    assert torch.equal(draw(model, made, parallel=4)[0]["samples"], samples)
    assert draw(model, made, ZipARSampler, "fast")[0]["samples"].shape == samples.shape


def test_every_image_of_a_batch_is_edited(load):
    model = load()
    batch = torch.rand(2, 20, 30, 3, generator=torch.Generator().manual_seed(1))
    made = ImageAndPrompt.execute(image=batch, text="night").result[0]
    assert len(made) == 2 and len(set(made.digests())) == 2
    both = draw(model, made)[0]["samples"]
    assert torch.equal(draw(model, made.for_images([0]))[0]["samples"], both[:1])


def test_a_mask_limits_the_edit(load):
    model = load()
    latent = {"samples": model.vae.encode(torch.rand(1, 16, 16, 3))}
    mask = torch.zeros(1, 16, 16)
    mask[:, 8:] = 1
    changed = draw(model, condition(), latent_image=latent, mask=mask)[0]["samples"]
    codes = model.vae.first_stage_model.codes
    assert torch.equal(codes(changed)[:, :2], codes(latent["samples"])[:, :2])


def test_it_says_how_an_image_lies_in_the_square():
    wide = ImageAndPrompt.execute(image=torch.rand(1, 427, 640, 3), text="night")
    assert "384 x 256 of 384 x 384 pixels" in str(wide.ui)
    square = ImageAndPrompt.execute(image=torch.rand(1, 40, 40, 3), text="night")
    assert "384" not in str(square.ui)


def test_channels_and_values_become_8_bits():
    grey = ImageAndPrompt.execute(image=torch.full((1, 4, 4, 1), 0.5), text="").result[0].images[0]
    assert grey.dtype == torch.uint8 and grey.shape == (4, 4, 3) and (grey == 128).all()
    clear = ImageAndPrompt.execute(image=torch.full((1, 4, 4, 4), 1.5), text="").result[0].images[0]
    assert clear.shape == (4, 4, 3) and (clear == 255).all()


def test_a_model_that_is_not_known_to_edit_is_remarked(load):
    assert "is not known to have been trained to edit" in draw(load("model"), condition())[1].note


def test_refusals(load):
    with pytest.raises(UserError, match="^condition: Janus-Pro-7B was not trained to edit"):
        draw(load("Janus-Pro-7B"), condition())
    with pytest.raises(UserError, match="^freedom: "):
        condition(freedom=11.0)
    with pytest.raises(UserError, match="^images: 512"):
        condition(images=256, numbers=(0, 0))
    for wrong in (None, torch.zeros(1, 4, 4, 2), torch.full((1, 4, 4, 3), torch.nan)):
        with pytest.raises(UserError, match="^image: "):
            ImageAndPrompt.execute(image=wrong, text="night")
