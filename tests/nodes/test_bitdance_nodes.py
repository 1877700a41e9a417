"""Load BitDance, BitDance Sampler and what runs any sampler, on tiny files and the fake ComfyUI."""

import json
from dataclasses import replace

import fake_comfy
import pytest
import torch
from block_models import FOLDER, bits, text_bitdance
from fake_comfy import Interrupted, Progress
from fastar_nodes.errors import UserError
from fastar_nodes.networks.binary import BinaryAutoencoder, BinaryConfig
from fastar_nodes.nodes import filling, host, loaders, samplers
from fastar_nodes.nodes.conditioning import ClassLabel, Prompt
from fastar_nodes.nodes.sharing import AnySampler
from fastar_nodes.nodes.vae import BITS, KL, mark
from fastar_nodes.reports.record import GIVEN
from safetensors.torch import save_file
from tiny import LABELS, a_block, a_gpt, dropped, sample
from tiny_models import drawn

NODE = samplers.BitDanceSampler
FEW = {"diffusion_steps": 2, "cfg": 2.0, "cfg_schedule": "constant"}


def right_half(height: int = 8, width: int = 8) -> torch.Tensor:
    """A mask [1, height, width] over the right half."""
    mask = torch.zeros(1, height, width)
    mask[..., width // 2 :] = 1
    return mask


# ------------------------------------------------------------------------------------------------ sampling


def test_progress_previews_and_cancellation_reach_every_evaluation_of_the_head():
    """Four blocks of two steps, and a last evaluation each."""
    model = a_block()
    Progress.updates.clear()
    sample(NODE, model=model, **FEW)
    assert [(done, total) for done, total, _ in Progress.updates] == [(k + 1, 12) for k in range(12)]
    assert Progress.updates[-1][2][1].size == (256, 128)  # two images of 8 pixels, enlarged

    Progress.updates.clear()
    fake_comfy.state.asked, fake_comfy.state.interrupt_at = 0, 5
    with pytest.raises(Interrupted):
        sample(NODE, model=model, **FEW)
    assert len(Progress.updates) == 5


def test_prompts_and_sizes_that_are_not_square():
    model = a_block(text_bitdance())
    text = Prompt.execute("a red house\nan old boat", lines=True).result[0]
    size = {"width": 8, "height": 16}
    samples, _ = sample(NODE, model=model, condition=text, **FEW, **size)
    assert samples.shape == (2, 12, 8, 4)
    alone, _ = sample(NODE, model=model, condition=Prompt.execute("a red house").result[0], **FEW, **size)
    assert torch.equal(alone[0], samples[0])
    assert model.vae.decode(samples).shape == (2, 16, 8, 3)


# ------------------------------------------------------------------------------------------------ inpainting


def test_tokens_outside_the_mask_are_kept_bit_for_bit_and_the_others_are_drawn_again():
    model = a_block()
    start = model.vae.encode(torch.rand(1, 31, 17, 3))
    assert start.shape == (1, 6, 4, 4) and bool((start.abs() == 1).all()), "scaled to the model's size"
    samples, report = sample(NODE, model=model, latent_image={"samples": start}, mask=right_half(), **FEW)
    assert torch.equal(samples[..., :2], start[..., :2].expand(2, -1, -1, -1))
    assert not torch.equal(samples[..., 2:], start[..., 2:].expand(2, -1, -1, -1))
    assert (report.maps["outcome"][:, :, :2] == GIVEN).all() and (report.maps["outcome"][:, :, 2:] != GIVEN).all()

    # The latent's own mask, and rounded latents, which mean the same bits.
    own = {"samples": (start * 0.7).half(), "noise_mask": right_half(64, 32)[:, None]}
    assert torch.equal(sample(NODE, model=model, latent_image=own, **FEW)[0], samples)


def test_an_edit_of_another_size_names_the_numbers_to_set():
    model = a_block(replace(text_bitdance()))
    text = Prompt.execute("a red house").result[0]
    start = {"samples": bits(1, model.model, (4, 4))}
    edit = {"latent_image": start, "mask": right_half(), "condition": text}
    with pytest.raises(
        UserError, match="^latent_image: .* 8 x 8 pixels, .* 8 x 16; set width to 8 and height to 8, or"
    ):
        sample(NODE, model=model, **FEW, width=8, height=16, **edit)
    assert sample(NODE, model=model, **FEW, width=8, height=8, **edit)[0].shape == (1, 12, 4, 4)


def test_a_decoder_takes_whole_images_only():
    """It normalises with statistics of the whole image: tiles would change it."""
    vae = a_block().vae
    latents = bits(1, a_block().model, (4, 4))
    for tiled, field, remedy in (
        (lambda: vae.decode_tiled(latents), "samples", "use VAE Decode"),
        (lambda: vae.encode_tiled(torch.rand(1, 8, 8, 3)), "pixels", "use VAE Encode"),
    ):
        with pytest.raises(UserError, match=f"^{field}: the decoder tiny bits .* normalises .*; {remedy}"):
            tiled()
    assert vae.decode(latents).shape == vae.decode(vae.encode(torch.rand(1, 8, 8, 3))).shape == (1, 8, 8, 3)


def test_without_memory_for_a_whole_image_it_says_so(monkeypatch):
    def full(*_):
        raise RuntimeError("out of memory")

    vae = a_block().vae
    monkeypatch.setattr(vae, "_decode", full)
    monkeypatch.setattr(vae, "_encode", full)
    with pytest.raises(UserError, match="^samples: .* tiles.*; there is not enough memory to decode the whole image"):
        vae.decode(torch.ones(1, 6, 4, 4))
    with pytest.raises(UserError, match="^pixels: .* tiles.*; there is not enough memory to encode the whole image"):
        vae.encode(torch.rand(1, 8, 8, 3))


def test_features_that_are_not_finite_are_named_although_their_bits_would_be_finite():
    vae = a_block().vae
    with torch.no_grad():
        vae.first_stage_model.encoder.conv_in.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="^decoder: tiny bits computed features that are not finite"):
        vae.encode(torch.rand(1, 8, 8, 3))


def test_the_memory_of_the_decoder_is_the_networks_own_estimate():
    vae = a_block().vae
    assert vae.memory_used_decode((9, 6, 4, 4), torch.float32) == vae.first_stage_model.decode_bytes(1, 4, 4)


# ------------------------------------------------------------------------------------------------ refusals


def test_latents_of_other_families_are_refused_both_ways():
    model = a_block()
    with pytest.raises(UserError, match="^samples: .* a MAR, .* the decoder tiny bits is for .* a Bit"):
        model.vae.decode(mark(torch.zeros(1, 6, 4, 4), KL))
    with pytest.raises(UserError, match="^samples: .* a BitDance"):
        a_gpt().vae.decode(sample(NODE, model=model, **FEW)[0])
    with pytest.raises(UserError, match="^latent_image: .* family"):
        latent = {"samples": mark(torch.zeros(1, 6, 4, 4), KL)}
        sample(NODE, model=model, latent_image=latent, mask=right_half(), **FEW)


REFUSED = {
    "a sampler of MARs": ("lazymar", "^sampler: lazymar works with a MAR.* a BitDance .*; choose bitdance"),
    "caches": ("fasthybrid+lazymar", "^sampler: fasthybrid.lazymar works with a MAR.*; choose bitdance"),
    "a sampler of tokens": ("zipar", "^sampler: zipar works with a LlamaGen.*; choose bitdance"),
    "a draft": ("mulosd", "^sampler: mulosd works with a LlamaGen.*; choose bitdance"),
    "parallel decoding": ("bitdance: parallel=16", "^parallel: .* does not help.*512 to 2,048 .*;"),
    "euler": ("bitdance: sampler=euler", "^sampler: .* not the euler sampler .*; leave this setting out"),
    "AR steps": (
        "bitdance: steps=32",
        "^steps: the size of the image sets the number of blocks.*; set diffusion_",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.fast_cases("a sampler of MARs", "a draft", "parallel decoding", "AR steps")
def test_what_cannot_be_on_a_bitdance_is_refused_with_the_reason(case):
    line, said = REFUSED[case]
    with pytest.raises(UserError, match=said):
        AnySampler.execute(a_block(), LABELS, line, 3)
    remedy = "bitdance: diffusion_steps=2, diffusion_steps_end=1, cfg=2"
    assert AnySampler.execute(a_block(), LABELS, remedy, 3).result[1].sampler == "bitdance"


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """ComfyUI's model folder: an ImageNet model with its autoencoder inside, another beside, and a text model."""
    net = a_block().model.net
    config = BinaryConfig(widths=(8, 8), blocks=1, z_channels=6, groups=4)
    vae = drawn(BinaryAutoencoder(config), 1, 0.1, 0.1).state_dict()
    inside = {f"vae.{name}": tensor for name, tensor in vae.items()}
    about = {"heads": "2", "bounded": "1", "label_set": "picture-book", "groups": "4"}
    recommended = json.dumps({"diffusion_steps": 3, "cfg": 1.5})
    save_file({**net.state_dict(), **inside}, tmp_path / "whole.safetensors", {**about, "defaults": recommended})
    save_file(net.state_dict(), tmp_path / "net.safetensors", {**about, "stride": "2"})
    save_file(vae, tmp_path / "bits.safetensors", {"groups": "4"})
    (tmp_path / "text").symlink_to(FOLDER / "native")

    names = ["whole.safetensors", "net.safetensors", "bits.safetensors", "text/model-00001-of-00002.safetensors"]
    monkeypatch.setattr(host.folders, "paths", lambda *kinds: [tmp_path])
    monkeypatch.setattr(host.folders, "local_files", lambda *kinds: names)
    return tmp_path


def load(**changes):
    """Outputs and text of the loader."""
    node = loaders.LoadBitDance
    done = node.execute(**dropped(node, **{"checkpoint": "whole.safetensors", "dtype": "fp32", **changes}))
    return (*done.result, done.ui["fastar_text"][0] if done.ui else "")


def test_a_file_with_its_autoencoder_inside_and_what_it_recommends(folder):
    model, vae, said = load()
    assert said == "", "there is no other size"
    assert (vae.sizes, vae.latent_channels, vae.downscale_ratio, vae.kind) == (((8, 8),), 6, 2, BITS)
    _, report = sample(NODE, model=model, preset="recommended", condition=ClassLabel.execute("mountains").result[0])
    assert (report.settings["diffusion_steps"], report.settings["cfg"]) == (3, 1.5)
    assert report.settings["cfg_schedule"] == "linear", "published, of ImageNet"


def test_an_autoencoder_beside_it_gives_the_same_images(folder):
    model, vae, _ = load()
    other, beside, _ = load(checkpoint="net.safetensors", decoder="bits.safetensors")
    latents = bits(2, model.model, (4, 4))
    assert torch.equal(vae.decode(latents), beside.decode(latents))
    assert torch.equal(sample(NODE, model=model, **FEW)[0], sample(NODE, model=other, **FEW)[0])


def test_a_text_model_is_a_folder_and_says_its_sizes(folder):
    model, vae, said = load(checkpoint="text")
    assert said == "This model generates images of 32 x 32 pixels." and vae.sizes == ((32, 32),)
    text = Prompt.execute("a red house").result[0]
    samples, _ = sample(NODE, model=model, condition=text, **FEW, width=8, height=8)
    assert vae.decode(samples).shape == (1, 8, 8, 3)


def test_eight_bits_and_the_dtypes_that_are_refused(folder):
    model, _, _ = load(dtype="int8")
    kinds = {p.dtype for name, p in model.model.net.named_parameters() if "layers" in name and p.ndim == 2}
    assert torch.int8 in kinds
    assert {p.dtype for p in model.model.net.denoiser.parameters()} == {torch.float32}
    assert "int8 weights" in sample(NODE, model=model, **FEW)[1].note

    assert "fp16" not in loaders.LoadBitDance.options("dtype")
    with pytest.raises(UserError, match="^dtype: .fp16. is not one of auto, fp32, bf16, int8, fp8"):
        load(dtype="fp16")
    with pytest.raises(UserError, match="^speed: 'fast' is not one of auto, plain, compile"):
        load(speed="fast")


def test_a_preset_fills_in_the_size_of_the_file_and_the_published_settings(folder):
    def filled(checkpoint):
        loader = {"class_type": "FastARLoadBitDance", "inputs": {"checkpoint": checkpoint}}
        return filling.fill("FastARBitDanceSampler", "recommended", loader)

    found = filled("whole.safetensors")
    assert found["model"] == "demo BitDance", "its labels are the demo's"
    wanted = {"width": 8, "height": 8, "diffusion_steps": 3, "cfg": 1.5, "diffusion_steps_end": 3}
    assert {name: found["values"][name] for name in wanted} == wanted

    # Published: 100 diffusion steps and guidance of 3.9 for B with blocks of 4, 50 and 7.5 for a 14B.
    small, large = filled("bitdance-b-4x")["values"], filled("bitdance-14b-64x")["values"]
    assert (small["width"], small["diffusion_steps"], small["cfg"], small["cfg_schedule"]) == (256, 100, 3.9, "linear")
    assert (large["width"], large["diffusion_steps"], large["cfg"]) == (1024, 50, 7.5)
    assert large["cfg_schedule"] == "constant"


# ------------------------------------------------------------------------------------------------ any sampler
