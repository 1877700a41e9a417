"""Every sampler on a pretended CUDA device, in fp32 and bf16: no mixed devices or types, and the CPU's results.

They need a CUDA build of PyTorch, but no GPU: ``make dry-run`` installs one in an environment of its own. A CPU build
refuses to index a tensor of device "cuda".
"""

import copy

import pytest
import test_block_contract as blocks
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.samplers.conditioning import CodeCondition, PromptCondition, from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.tokens.prepare import features_of
from pretended_cuda import CUDA, MEMORY, CUDATensor, pretended_cuda, to_cuda
from tar_files import tiny_ta_tok
from tiny_hybrids import tiny_hybrid
from tiny_models import tiny_mar
from tiny_tokens import tiny_vq
from waits import moved

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None, reason="PyTorch is a CPU build: run make dry-run, which installs one for CUDA"
    ),
]
TYPES = {"fp32": None, "bf16": torch.bfloat16}
IMAGES = (0, 1, 2)


def same(cuda, cpu):
    """Results equal up to rounding."""
    assert isinstance(cuda, CUDATensor) and cuda.device == CUDA
    torch.testing.assert_close(cuda.host, cpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", masked.CASES)
def test_masked_samplers(name, dtype):
    with pretended_cuda():
        out = finish(masked.start(name, move=lambda model: moved(model, TYPES[dtype])))
    assert out.report.device == "cuda" and out.latents.dtype == torch.float32
    assert torch.isfinite(out.latents.host).all()
    if dtype == "fp32":
        _, cpu = masked.whole(name)
        same(out.latents, cpu.latents)
        assert out.report.counts == cpu.report.counts


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [name for name in masked.CASES if "lazymar, " not in name])
def test_masked_samplers_with_prompts(name, dtype):
    own = {"condition": PromptCondition(("a boat", "cat", "a red boat"))}
    own |= {"model": tiny_hybrid(), "draft": tiny_hybrid(1)}
    with pretended_cuda():
        out = finish(masked.start(name, move=lambda model: moved(model, TYPES[dtype]), **own))
    assert torch.isfinite(out.latents.host).all()
    if dtype == "fp32":
        same(out.latents, finish(masked.start(name, **own)).latents)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_masked_edit(dtype):
    model, settings = tiny_mar(), masked.CASES["mar"][1]
    edit = Edit(torch.zeros(1, 4, 4, 4), torch.arange(16).view(1, 4, 4) % 3 == 0)

    def run(model):
        return finish(mar(model, from_ids((1, 2)), settings, PairedNoise(5, (0, 1)), edit=edit))

    with pretended_cuda():
        out = run(moved(model, TYPES[dtype]))
    assert torch.isfinite(out.latents.host).all()
    if dtype == "fp32":
        same(out.latents, run(model).latents)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", tokens.CASES)
def test_token_samplers(name, dtype):
    with pretended_cuda():
        out = finish(tokens.start(name, move=lambda model: moved(model, TYPES[dtype])))
    assert out.latents.device == CUDA
    if dtype == "fp32":
        assert torch.equal(out.latents.host, tokens.whole(name)[1].latents)
    if "prompt" in name:
        assert all(not isinstance(codes, CUDATensor) for codes in out.condition.codes), "the condition is on the host"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", blocks.CASES)
def test_block_samplers(name, dtype):
    with pretended_cuda():
        out = finish(blocks.start(name, move=lambda model: moved(model, TYPES[dtype])))
    assert out.latents.device == CUDA and out.latents.dtype == torch.float32
    if dtype == "fp32":
        assert torch.equal(out.latents.host, blocks.whole(name)[1].latents)


@pytest.mark.parametrize("dtype", TYPES)
def test_semantic_features(dtype):
    net = tiny_ta_tok()
    codes = CodeCondition((torch.arange(4) % net.config.codes,), ("",))

    class Model:
        name = "tiny"

    def run(net):
        model = Model()
        model.net = net
        return features_of(codes, model).features[0]

    with pretended_cuda():
        out = run(to_cuda(copy.deepcopy(net), TYPES[dtype]))
    assert torch.isfinite(out.host).all()
    if dtype == "fp32":
        same(out, run(net))


@pytest.mark.parametrize("dtype", TYPES)
def test_autoencoders(dtype):
    vq = tiny_vq()
    codes, g = torch.arange(16).view(1, 4, 4) % 23, torch.Generator().manual_seed(0)
    kl = KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, groups=4)).eval().requires_grad_(False)
    latents, images = torch.randn(1, 4, 4, 4, generator=g), torch.rand(1, 3, 8, 8, generator=g)
    with torch.no_grad():
        expected = vq.net.decode_codes(codes), kl.decode(latents), vq.net.encode(images)[1]
        with pretended_cuda():
            net, other = (to_cuda(copy.deepcopy(n), TYPES[dtype]) for n in (vq.net, kl))
            kind = TYPES[dtype] or torch.float32
            found = (
                net.decode_codes(codes.to(CUDA)),
                other.decode(latents.to(CUDA, kind)),
                net.encode(images.to(CUDA, kind))[1],
            )
    if dtype == "fp32":
        for a, b in zip(found, expected, strict=True):
            same(a, b)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_text_encoder(dtype):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no text encoder to run")
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=3)
    net = transformers.T5EncoderModel(config).eval().requires_grad_(False)
    with torch.no_grad():
        expected = net(input_ids=torch.arange(5)[None]).last_hidden_state
        with pretended_cuda():
            found = to_cuda(copy.deepcopy(net), TYPES[dtype])(
                input_ids=torch.arange(5).to(CUDA)[None]
            ).last_hidden_state
    if dtype == "fp32":
        same(found, expected)


@pytest.mark.parametrize(
    "name", ["llamagen", "par", "par, adjacent", "zipar", "zipar, blanks", "zipar, guided at first"]
)
def test_a_pass_waits_for_nothing(name):
    with pretended_cuda() as waits:
        for step in tokens.start(name, move=moved):
            assert not waits or step.done in (1, step.total)
            waits.clear()


def test_mixed_devices_are_refused():
    with pretended_cuda():
        a = torch.ones(2, device="cuda")
        assert (a + 1).device == CUDA and (a * torch.tensor(2.0)).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="found one on cpu"):
            a + torch.ones(2)
        with pytest.raises((RuntimeError, TypeError)):
            a.numpy()
        with pytest.raises(RuntimeError):
            torch.mm(a[None], a.to(torch.bfloat16)[:, None])


@pytest.mark.parametrize("name", [*masked.CASES, *tokens.CASES])
def test_the_peak_in_the_report_is_what_was_measured(name):
    """Bytes of tensors, counted one by one, against the report; memory that was freed before the run does not count."""
    ready = {}

    def move(model):  # every network is on the device before the run
        if id(model) not in ready:
            ready[id(model)] = moved(model)
        return ready[id(model)]

    contract = masked if name in masked.CASES else tokens
    with pretended_cuda():
        contract.start(name, move=move).close()
        before = torch.zeros(1 << 24, device="cuda")
        del before
        MEMORY.highest = started = MEMORY.live
        out = finish(contract.start(name, move=move))
        measured = MEMORY.highest
    assert out.report.peak_memory_bytes == measured > started + out.report.counts.get("cache_bytes", 0)
    held = sum(x.numel() * x.element_size() for m in ready.values() for x in (*m.net.parameters(), *m.net.buffers()))
    assert measured < 1 << 24 and started >= held
