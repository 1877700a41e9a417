"""Values that are not finite, and tensors of other kinds than fp32:
refused in one sentence with the true cause, never shown as black.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError, not_finite
from fastar_nodes.nodes import compare, conditioning, editing, preview, samplers, timelapse
from fastar_nodes.nodes.vae import FastARVAE
from fastar_nodes.runs.images import to_bytes
from tiny import a_gpt, a_mar, a_report, a_vae, a_vq, sample
from torch import Tensor

NAN, INF = math.nan, math.inf
PIXELS = str(not_finite("decoder", "tiny", "pixels"))


def broken(vae: FastARVAE, value: float) -> FastARVAE:
    """The decoder with one weight that makes its results NaN or infinite."""
    with torch.no_grad():
        next(vae.first_stage_model.parameters()).fill_(value)
    return vae


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_pixels_that_are_not_finite_are_an_error_of_the_decoder(value):
    """Clamping would make infinity white, and NaN would be saved as black."""
    vae, latents = broken(a_vae(), value), torch.ones(2, 2, 2, 2)
    for decode in (vae.decode, vae.decode_tiled):
        with pytest.raises(UserError) as caught:
            decode(latents)
        assert str(caught.value) == PIXELS


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_preview_shows_grey_and_does_not_end_the_run(value):
    vae = broken(a_vae(), value)
    shown = preview.Canvas(vae.decode_now).draw(torch.ones(1, 2, 2, 2), torch.ones(1, 2, 2, dtype=torch.bool))
    assert (shown == preview.GREY).all()


def test_an_encoder_that_computes_nan_is_named():
    """A VQ tokenizer's codes would hide it: the nearest code of NaN is some code."""
    picture = torch.full((1, 16, 16, 3), 0.5)
    vae = a_vae()
    vae.first_stage_model.encode = lambda x: (torch.full((1, 2, 4, 4), NAN), None)
    vq = a_vq()
    with torch.no_grad():
        vq.first_stage_model.encoder.conv_in.weight.fill_(INF)
    for one, name, what in ((vae, "tiny", "latents"), (vq, "tiny vq", "features")):
        for encode in (one.encode, one.encode_tiled):
            with pytest.raises(UserError, match=f"^decoder: {name} computed {what} that are not finite"):
                encode(picture)


def test_pictures_and_latents_that_are_not_finite_are_not_the_decoders_fault():
    for value in (NAN, INF, -INF):
        picture, latents = torch.full((1, 16, 16, 3), 0.5), torch.zeros(1, 2, 2, 2)
        picture[0, 3, 3, 1] = latents[0, 1, 1, 0] = value
        for one in (a_vae().encode, a_vae().encode_tiled):
            with pytest.raises(UserError, match="^pixels: some values are not finite"):
                one(picture)
        for one in (a_vae().decode, a_vae().decode_tiled):
            with pytest.raises(UserError, match="^samples: some values are not finite"):
                one(latents)


def test_pictures_that_are_not_finite_are_refused_by_every_node_that_takes_them():
    good, bad = torch.full((1, 8, 8, 3), 0.5), torch.full((1, 8, 8, 3), 0.5)
    bad[0, 0, 0, 0] = NAN
    report, mask = a_report("mar"), torch.ones(1, 8, 8)
    report.maps["step"] = np.zeros((1, 2, 2), np.int32)
    runs = {
        "image_2": lambda: compare.Compare.execute([""], image_1=[good], image_2=[bad], columns=[0], baseline=[0]),
        "image": lambda: compare.TokenMap.execute(report, bad),
        "image ": lambda: cropped(bad, mask),
        "image_1": lambda: timelapse.TimeLapse.execute("x", 1.0, image_1=bad, report_1=report),
        "inpainted": lambda: editing.PasteInpaintedArea.execute(cropped(good, mask), bad, feather=0),
        "mask": lambda: cropped(good, mask * NAN),
    }
    for field, run in runs.items():
        with pytest.raises(UserError, match=f"^{field.strip()}: some values are not finite"):
            run()


# ------------------------------------------------------------------------------------------------ pixels of 8 bits


def test_pixels_are_rounded_and_not_cut():
    shades = torch.tensor([0.0, 100.3, 100.7, 254.4, 254.6, 255.0, 300.0, -20.0]) / 255
    made = to_bytes(shades.view(1, 1, 8, 1).expand(1, 1, 8, 3))
    assert made[0, 0, :, 0].tolist() == [0, 100, 101, 254, 255, 255, 255, 0]


# ------------------------------------------------------------------------------------------ tensors of other kinds

# What other packs may connect, and the kind that the message names.
KINDS = {
    "sparse or nested float32": lambda x: x.to_sparse(),
    "float32 without data": lambda x: x.to("meta"),
    "complex64": lambda x: x.to(torch.complex64),
    "int64": lambda x: x.to(torch.int64),
    "uint8": lambda x: x.to(torch.uint8),
    "quint8": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "float4_e2m1fn_x2": lambda x: torch.empty(x.shape, dtype=torch.float4_e2m1fn_x2),
}


def cropped(image: Tensor, mask: Tensor):
    """The crop of an image, for Paste Inpainted Area."""
    return editing.CropAroundMask.execute(image, mask).result[2]


def refused(field: str, run) -> str:
    with pytest.raises(UserError, match=f"^{field}: ") as caught:
        run()
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about nested and quantised tensors
@pytest.mark.parametrize("kind", [*KINDS, "nested"])
def test_a_tensor_of_another_kind_is_refused_on_every_socket(kind):
    if kind.startswith("float4") and not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("needs torch 2.8")

    def made(*shape: int) -> Tensor:
        return torch.nested.nested_tensor([torch.ones(4)]) if kind == "nested" else KINDS[kind](torch.ones(shape))

    picture, mask, latents = torch.ones(1, 16, 16, 3), torch.ones(1, 16, 16), torch.ones(1, 2, 4, 4)
    model = a_mar()
    said = [
        refused("pixels", lambda: a_vae().encode(made(1, 16, 16, 3))),
        refused("samples", lambda: a_vae().decode(made(1, 2, 4, 4))),
        refused("image", lambda: cropped(made(1, 16, 16, 3), mask)),
        refused("mask", lambda: cropped(picture, made(1, 16, 16))),
        refused("inpainted", lambda: editing.PasteInpaintedArea.execute(cropped(picture, mask), made(1, 16, 16, 3))),
        refused(
            "latent_image",
            lambda: sample(samplers.MARSampler, model=model, latent_image={"samples": made(1, 2, 4, 4)}, mask=mask),
        ),
        refused(
            "mask",
            lambda: sample(samplers.MARSampler, model=model, latent_image={"samples": latents}, mask=made(1, 8, 8)),
        ),
        refused("image_1", lambda: compare.Compare.execute([""], image_1=[made(1, 16, 16, 3)], columns=[0])),
    ]
    named = "sparse or nested float32" if kind == "nested" else kind
    assert all(f" {named}, but must be dense and hold floating-point data" in text for text in said), said


def test_fp8_and_bool_are_what_they_say():
    """torch computes little in fp8, but its numbers have a meaning; so have masks of bool."""
    latents = torch.tensor([-1.0, 0.5]).repeat(1, 2, 2, 1)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(a_vae().decode(latents.to(dtype)), a_vae().decode(latents)), dtype
    half = torch.zeros(1, 4, 4)
    half[:, :, :2] = 1
    model, start = a_mar(), {"samples": torch.rand(1, 2, 4, 4)}
    wanted, _ = sample(samplers.MARSampler, model=model, latent_image=start, mask=half)
    for mask in (half > 0.5, half.to(torch.float8_e4m3fn), half[0] > 0.5, half[None]):
        assert torch.equal(sample(samplers.MARSampler, model=model, latent_image=start, mask=mask)[0], wanted)


@pytest.mark.parametrize(
    "shape", [(), (4,), (2, 3), (1, 2, 4), (0, 2, 4, 4), (1, 0, 4, 4), (1, 2, 4, 0), (1, 2, 1, 1, 4, 4)]
)
@pytest.mark.fast_cases(every=3)
def test_latents_of_other_dimensions_are_refused(shape):
    mask = torch.ones(1, 8, 8)
    refused("samples", lambda: a_vae().decode(torch.zeros(shape)))
    edit = {"latent_image": {"samples": torch.zeros(shape)}, "mask": mask}
    refused("latent_image", lambda: sample(samplers.MARSampler, model=a_mar(), **edit))
    refused("latent_image", lambda: sample(samplers.LlamaGenSampler, model=a_gpt(), **edit))


@pytest.mark.parametrize("shape", [(), (4,), (0, 4, 4), (1, 4, 0), (1, 3, 4, 4), (1, 4, 4, 1), (1, 1, 1, 4, 4)])
def test_masks_of_other_dimensions_are_refused(shape):
    """Of [batch, height, width, 1] the first row would be taken for the mask."""
    refused(
        "mask",
        lambda: sample(samplers.MARSampler, latent_image={"samples": torch.zeros(1, 2, 4, 4)}, mask=torch.ones(shape)),
    )


# -------------------------------------------------------------------------------------- frames, and sizes of numbers


def test_one_frame_is_an_image_and_more_are_refused_with_a_remedy_that_works():
    latents = torch.rand(2, 2, 3, 4, 4) * 2 - 1
    said = refused("samples", lambda: a_vae().decode(latents))
    assert "3 frames" in said and "Latent Cut To Batch" in said
    # What that node makes of dim t and slice_size 1: [B * T, C, 1, h, w], the frames of an entry one after another.
    cut = latents.movedim(2, 1).reshape(6, 1, 2, 4, 4).movedim(1, 2)
    decoded = a_vae().decode(cut)
    assert decoded.shape == (6, 16, 16, 3)
    assert torch.equal(decoded[4], a_vae().decode(latents[1:, :, 1])[0])
    mask = torch.ones(1, 8, 8)
    refused("latent_image", lambda: sample(samplers.MARSampler, latent_image={"samples": latents}, mask=mask))
    model, one = a_mar(), latents[:1, :, :1]
    edited, _ = sample(samplers.MARSampler, model=model, latent_image={"samples": one}, mask=mask)
    assert torch.equal(
        edited, sample(samplers.MARSampler, model=model, latent_image={"samples": one[:, :, 0]}, mask=mask)[0]
    )


def test_a_latent_that_no_image_has_is_refused():
    """1e38 overflows in the first norm: half of the image was NaN."""
    mask = torch.zeros(1, 4, 4)
    mask[:, :2] = 1
    for value in (1e38, -1e38, 1.1e4):
        start = {"samples": torch.full((1, 2, 4, 4), value)}
        for node, model in ((samplers.MARSampler, a_mar()), (samplers.LlamaGenSampler, a_gpt())):
            assert "latents of an image stay below" in refused(
                "latent_image",
                lambda: sample(node, model=model, latent_image=start, mask=mask),  # noqa: B023
            )
    largest, _ = sample(samplers.MARSampler, latent_image={"samples": torch.full((1, 2, 4, 4), 9e3)}, mask=mask)
    assert largest.isfinite().all()


def test_a_decoder_that_overflows_because_of_the_latent_is_not_blamed():
    vae = a_vae()
    vae.first_stage_model.scale.data.fill_(1e30)
    with pytest.raises(UserError, match="^samples: it holds values up to 1e\\+20"):
        vae.decode(torch.full((1, 2, 4, 4), 1e20))
    with pytest.raises(UserError, match="^decoder: tiny computed pixels that are not finite"):
        broken(a_vae(), INF).decode(torch.ones(1, 2, 4, 4))


def test_image_to_codes_and_the_text_encoder_name_themselves():
    class Net(torch.nn.Module):
        def forward(self, **inputs: Tensor):
            return type("Out", (), {"last_hidden_state": torch.full((1, 3, 4), NAN)})

    from fastar_nodes.model_loaders.llamagen.text import TextEncoder

    net = Net()
    net.config = SimpleNamespace(vocab_size=8)
    net.weight = torch.nn.Parameter(torch.zeros(1))
    net.config = SimpleNamespace(vocab_size=10)
    tokenizer = type("Tokenizer", (), {"encode": lambda self, text: [1, 2], "special_tokens": {"</s>": 3}})()
    encoder = TextEncoder(net, tokenizer, "tiny t5")
    assert refused("encoder", lambda: encoder.encode(["a boat"])).startswith("encoder: tiny t5 computed features")
    assert conditioning.ENCODER_DTYPES == ("auto", "fp32", "bf16"), "the remedy of the message is on the menu"
