"""Every sampler on a real CUDA device: in fp32 the CPU's results, in 16 bits finite ones.

They run where PyTorch finds a GPU.
"""

import copy
import dataclasses

import pytest
import test_block_contract as blocks
import test_nextstep_contract as continuous
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.networks import speed
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.networks.bitdance import BlockModel
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.engine import finish
from tiny_hybrids import tiny_hybrid
from tiny_tokens import tiny_vq

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED ON A GPU: PyTorch finds no CUDA device"),
]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def exact_products():
    """Convolutions and products in fp32, as on a CPU: cuDNN rounds the factors of convolutions to TF32 by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def on_gpu(dtype):
    """A function that copies a model to the GPU; as the loaders do, the last layer of a MAR's head stays in fp32."""

    def moved(net):
        return copy.deepcopy(net).to("cuda", dtype)

    def move(model):
        hybrid = getattr(model, "hybrid", None)
        if hybrid is not None:
            hybrid = moved(hybrid)
            hybrid.head.final_layer.linear.float()
            return dataclasses.replace(model, net=hybrid.mar, hybrid=hybrid)

        net = moved(model.net)
        if not isinstance(model, BlockModel) and hasattr(net, "head"):
            net.head.final_layer.linear.float()
        return dataclasses.replace(model, net=net)

    return move


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", masked.CASES)
def test_masked_samplers(name, dtype):
    out = finish(masked.start(name, move=on_gpu(TYPES[dtype])))

    assert out.report.device == "cuda" and out.report.peak_memory_bytes > 0
    assert out.latents.dtype == torch.float32 and bool(out.latents.isfinite().all())
    if dtype == "fp32":
        _, cpu = masked.whole(name)
        torch.testing.assert_close(out.latents.cpu(), cpu.latents, rtol=1e-3, atol=1e-3)
        assert out.report.counts == cpu.report.counts


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [name for name in masked.CASES if "lazymar, " not in name])
def test_masked_samplers_with_prompts(name, dtype):
    own = {"condition": PromptCondition(("a boat", "cat", "a red boat"))}
    own |= {"model": tiny_hybrid(), "draft": tiny_hybrid(1)}
    out = finish(masked.start(name, move=on_gpu(TYPES[dtype]), **own))

    assert bool(out.latents.isfinite().all())
    if dtype == "fp32":
        cpu = finish(masked.start(name, **own))
        torch.testing.assert_close(out.latents.cpu(), cpu.latents, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", tokens.CASES)
def test_token_samplers(name, dtype):
    out = finish(tokens.start(name, move=on_gpu(TYPES[dtype])))

    assert out.report.device == "cuda"
    if dtype == "fp32":
        assert torch.equal(out[0].cpu(), tokens.whole(name)[1][0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", blocks.CASES)
def test_block_samplers(name, dtype):
    out = finish(blocks.start(name, move=on_gpu(TYPES[dtype])))

    assert out.latents.dtype == torch.float32 and bool((out.latents.abs() == 1).all())
    if dtype == "fp32":
        assert torch.equal(out.latents.cpu(), blocks.whole(name)[1].latents)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", continuous.CASES)
def test_samplers_of_continuous_tokens(name, dtype):
    out = finish(continuous.start(name, move=on_gpu(TYPES[dtype])))

    assert out.report.device == "cuda" and out.report.peak_memory_bytes > 0
    assert out.latents.dtype == torch.float32 and bool(out.latents.isfinite().all())
    if dtype == "fp32":
        _, cpu = continuous.whole(name)
        torch.testing.assert_close(out.latents.cpu(), cpu.latents, rtol=1e-3, atol=1e-3)
        assert out.report.counts == cpu.report.counts


@pytest.mark.parametrize("name", ["mar", "llamagen", "par", "zipar", "mulosd", "prompt", "bitdance", "nextstep"])
def test_an_image_does_not_depend_on_its_batch(name):
    contract = next(one for one in (masked, tokens, blocks, continuous) if name in one.CASES)
    move = on_gpu(torch.float32)
    together = finish(contract.start(name, move=move))

    for i in range(3):
        if contract is masked:
            alone = finish(masked.start(name, (i,), ((1, 4, 0)[i],), move=move))
            torch.testing.assert_close(alone.latents, together.latents[i : i + 1], rtol=1e-3, atol=1e-3)
        elif contract is blocks:
            alone = finish(blocks.start(name, (i,), (i,), move=move))
            assert torch.equal(alone.latents, together.latents[i : i + 1])
        elif contract is continuous:
            alone = finish(continuous.start(name, (i,), (i,), move=move))
            torch.testing.assert_close(alone.latents, together.latents[i : i + 1], rtol=1e-3, atol=1e-3)
        else:
            alone = finish(tokens.start(name, (i,), move=move))
            assert torch.equal(alone[0][0], together[0][i])


@torch.no_grad()
def test_autoencoders():
    vq = tiny_vq()
    kl = KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, groups=4)).eval()
    codes = torch.arange(16).view(1, 4, 4) % 23
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 4, 4, generator=generator)
    images = torch.rand(1, 3, 8, 8, generator=generator)

    net = copy.deepcopy(vq.net).cuda()
    other = copy.deepcopy(kl).cuda()

    pairs = [
        (net.decode_codes(codes.cuda()), vq.net.decode_codes(codes)),
        (other.decode(latents.cuda()), kl.decode(latents)),
        (net.encode(images.cuda())[1], vq.net.encode(images)[1]),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("contract", "name"),
    [(contract, name) for contract in (masked, tokens, blocks, continuous) for name in contract.CASES],
)
def test_recorded_samplers_draw_the_images_of_plain(contract, name, dtype):
    """Bit for bit, of three images with *auto*; with the allocator that PYTORCH_CUDA_ALLOC_CONF chooses."""

    def at_speed(how):
        copies = {}
        move = on_gpu(TYPES[dtype])

        def moved(model):
            if id(model) not in copies:
                copies[id(model)] = move(model)
                if isinstance(copies[id(model)].net, speed.Recordable):
                    copies[id(model)].net.speed = how
            return copies[id(model)]

        return moved

    plain = finish(contract.start(name, move=at_speed(speed.PLAIN)))[0]
    move = at_speed(speed.AUTO)
    for _ in range(3):
        assert torch.equal(finish(contract.start(name, move=move))[0], plain)


@pytest.mark.parametrize("name", [name for name in masked.CASES if "lazymar" in name])
def test_recordings_of_lazymar_are_of_its_own_stores(name):
    """Bit for bit with other batches and another run in between, whose stores are at other addresses."""
    move = on_gpu(torch.float32)
    moved = {}

    def at_speed(how):
        def once(model):
            key = id(model), how
            if key not in moved:
                moved[key] = move(model)
                moved[key].net.speed = how
            return moved[key]

        return once

    def start(how, images=(0, 1, 2)):
        return masked.start(name, images, tuple((1, 4, 0)[i] for i in images), move=at_speed(how))

    batches = ((0, 1, 2), (1,), (0, 2))
    wanted = {images: finish(start(speed.PLAIN, images))[0] for images in batches}
    for _ in range(3):
        for images in batches:
            drawn = finish(start(speed.AUTO, images))
            assert torch.equal(drawn[0], wanted[images])
            assert drawn.report.note == "speed: auto"

    other = start(speed.AUTO)
    next(other)
    assert torch.equal(finish(start(speed.AUTO))[0], wanted[0, 1, 2])
    assert torch.equal(finish(other)[0], wanted[0, 1, 2])
