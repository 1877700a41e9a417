"""Every sampler on a pretended CUDA device, in fp32 and bf16: no mixed devices or types, and the CPU's results.

They need a CUDA build of PyTorch, but no GPU: ``make dry-run`` installs one in an environment of its own. A CPU build refuses to
index a tensor of device "cuda".
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.samplers.conditioning import CodeCondition, PromptCondition, from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.editing import Edit
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.samplers.tokens.conditioning import features_of
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings, MuLoSDSettings, TarPromptSettings
from fastar_nodes.samplers.tokens.tar import tar_prompt
from fastar_nodes.samplers.tokens.upsampling import UpSampling
from pretended_cuda import CUDA, MEMORY, CUDATensor, pretended_cuda, to_cuda
from qwen_reference import tiny_tar
from tar_files import tiny_ta_tok
from test_sampler_contract import CASES as MASKED
from tiny_hybrids import tiny_hybrid
from tiny_models import tiny_mar
from tiny_tokens import tiny_vq
from tokens_reference import condition_of, tiny_gpt

sys.path.insert(0, str(Path(__file__).parent / "tokens"))
from test_tokens_decoding import CASES as TOKENS  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        torch.version.cuda is None, reason="PyTorch is a CPU build: run make dry-run, which installs one for CUDA"
    ),
]
TYPES = {"fp32": None, "bf16": torch.bfloat16}
IMAGES = (0, 1, 2)


def moved(model, dtype, keep=("final_layer.linear",)):
    """A copy of a model on the pretended device."""
    net = to_cuda(copy.deepcopy(model.net), dtype, keep)
    return dataclasses.replace(model, net=net)


def moved_hybrid(model, dtype):
    hybrid = to_cuda(copy.deepcopy(model.hybrid), dtype, ("final_layer.linear",))
    return dataclasses.replace(model, net=hybrid.mar, hybrid=hybrid)


def same(cuda, cpu):
    """Results equal up to rounding."""
    assert isinstance(cuda, CUDATensor) and cuda.device == CUDA
    torch.testing.assert_close(cuda.host, cpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MASKED)
def test_masked_samplers(name, dtype):
    sampler, settings = MASKED[name]
    model, drafts = tiny_mar(), getattr(sampler, "keywords", {})

    def run(model, sampler):
        return finish(sampler(model, from_ids((1, 4, 0)), settings, PairedNoise(5, IMAGES), 5))

    with pretended_cuda():
        func, extra = getattr(sampler, "func", sampler), {k: moved(m, TYPES[dtype]) for k, m in drafts.items()}
        out = run(moved(model, TYPES[dtype]), partial(func, **extra))
    assert out.report.device == "cuda" and out.latents.dtype == torch.float32
    assert torch.isfinite(out.latents.host).all()
    if dtype == "fp32":
        cpu = run(model, sampler)
        same(out.latents, cpu.latents)
        assert out.report.counts == cpu.report.counts


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [name for name in MASKED if "lazymar, " not in name])
def test_masked_samplers_with_prompts(name, dtype):
    sampler, settings = MASKED[name]
    model, condition = tiny_hybrid(), PromptCondition(("a boat", "cat", "a red boat"))
    draft = tiny_hybrid(1)

    def run(model, extra):
        func = getattr(sampler, "func", sampler)
        return finish(func(model, condition, settings, PairedNoise(5, IMAGES), 5, **extra))

    with pretended_cuda():
        extra = {"draft": moved_hybrid(draft, TYPES[dtype])} if hasattr(sampler, "keywords") else {}
        out = run(moved_hybrid(model, TYPES[dtype]), extra)
    assert torch.isfinite(out.latents.host).all()
    if dtype == "fp32":
        same(out.latents, run(model, {"draft": draft} if extra else {}).latents)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_masked_edit(dtype):
    model, settings = tiny_mar(), MASKED["mar"][1]
    edit = Edit(torch.zeros(1, 4, 4, 4), torch.arange(16).view(1, 4, 4) % 3 == 0)

    def run(model):
        return finish(mar(model, from_ids((1, 2)), settings, PairedNoise(5, (0, 1)), 5, edit=edit))

    with pretended_cuda():
        out = run(moved(model, TYPES[dtype]))
    assert torch.isfinite(out.latents.host).all()
    if dtype == "fp32":
        same(out.latents, run(model).latents)


def token_condition(model, cuda=False):
    return condition_of(model.net.config.condition, IMAGES)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", TOKENS)
def test_token_samplers(name, dtype):
    sampler, model, settings, _ = TOKENS[name]

    def run(model):
        return finish(
            sampler(model, condition_of(model.net.config.condition, IMAGES), settings, PairedDraws(5, IMAGES), 5)
        )

    with pretended_cuda():
        out = run(moved(model, TYPES[dtype]))
    assert out.codes.device == CUDA
    if dtype == "fp32":
        assert torch.equal(out.codes.host, run(model).codes)


DRAFTED = {
    "llamagen, in windows": LlamaGenSettings(cfg=2.5, parallel=4),
    "mulosd": MuLoSDSettings(cfg=2.5, top_k=8, tau=0.2, draft_window=2, resample_window=2),
    "mulosd, rows": MuLoSDSettings(cfg=2.5, tau=0.2, draft_rows=1, resample_window=0),
    "mulosd, target": MuLoSDSettings(cfg=2.5, acceptance_target=0.7),
    "mulosd, windows": MuLoSDSettings(cfg=2.5, draft_parallel=3, draft_window=0),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ("class", "text", "features"))
@pytest.mark.parametrize("name", DRAFTED)
def test_token_samplers_with_drafts(name, kind, dtype):
    settings, entry, vq = DRAFTED[name], SAMPLERS[name.split(",")[0]], tiny_vq()
    grid, small = (6, 3) if entry.name == "mulosd" else (4, 4)
    model, draft = tiny_gpt(kind, grid), tiny_gpt(kind, small, seed=1)

    def run(model, draft, vq):
        extra = {"draft": draft, "up_sampler": UpSampling(vq)} if entry.needs_draft else {}
        return finish(entry.run(model, condition_of(kind, IMAGES), settings, PairedDraws(5, IMAGES), 5, **extra))

    with pretended_cuda():
        out = run(*(moved(m, TYPES[dtype]) for m in (model, draft)), moved(vq, TYPES[dtype]))
    assert out.codes.device == CUDA
    if dtype == "fp32":
        assert torch.equal(out.codes.host, run(model, draft, vq).codes)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parallel", [0, 4])
def test_the_language_model_and_the_detokenizer(parallel, dtype):
    """Prompts to codes, codes to features, features to tokens, tokens to a picture."""
    model, settings = tiny_tar(), TarPromptSettings(top_k=0, parallel=parallel)
    prompts = ("a red boat", "cat", "a red boat")

    def run(model):
        return finish(tar_prompt(model, prompts, settings, PairedDraws(5, IMAGES), 5))

    with pretended_cuda():
        out = run(moved(model, TYPES[dtype]))
    if dtype == "fp32":
        assert torch.equal(out.codes.host, run(model).codes)
    assert all(not isinstance(codes, CUDATensor) for codes in out.condition.codes), "the condition is on the host"


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


def test_every_sampler_is_run():
    """A new sampler has to be added here, or to the lists that this file takes."""
    listed = {getattr(s, "func", s) for s, _ in MASKED.values()} | {s for s, *_ in TOKENS.values()}
    listed |= {SAMPLERS[name.split(",")[0]].run for name in DRAFTED}
    assert not [name for name, entry in SAMPLERS.items() if entry.run not in listed]


# ------------------------------------------------------------------------------------------------ waits

# What the host may wait for in an AR step or a pass: samplers to the most waits in the middle of a run.
WAITS = {
    "mar": 0,
    "lazymar": 0,
    "lazymar, random": 0,
    "fasthybrid": 1,
    "fasthybrid, no guidance": 1,
    "mar, annealed": 0,
    "fasthybrid+lazymar": 2,  # a second time for the map of cached tokens, in the last steps
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_in_an_ar_step(name):
    sampler, settings = MASKED[name]
    func, drafts = getattr(sampler, "func", sampler), getattr(sampler, "keywords", {})
    with pretended_cuda() as waits:
        extra = {key: moved(draft, None) for key, draft in drafts.items()}
        steps, found = (
            func(moved(tiny_mar(), None), from_ids((1, 4, 0)), settings, PairedNoise(5, IMAGES), 5, **extra),
            [],
        )
        for step in steps:
            if 1 < step.done < step.total:
                found.append(dict(waits))
            waits.clear()
    assert len(found) == settings.ar_steps - 2
    assert max(sum(f.values()) for f in found) <= WAITS[name], found


@pytest.mark.parametrize("name", [name for name in TOKENS if TOKENS[name][1].net.config.condition == "class"])
def test_a_pass_waits_for_nothing(name):
    sampler, model, settings, _ = TOKENS[name]
    with pretended_cuda() as waits:
        for step in sampler(moved(model, None), condition_of("class", IMAGES), settings, PairedDraws(5, IMAGES), 5):
            if 1 < step.done < step.total:
                assert not waits
            waits.clear()


# ------------------------------------------------------------------------------------------------ the device itself


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


def held(net):
    """Bytes of a network."""
    return sum(x.numel() * x.element_size() for x in (*net.parameters(), *net.buffers()))


@pytest.mark.parametrize("name", [*MASKED, *TOKENS, *DRAFTED])
def test_the_peak_in_the_report_is_what_was_measured(name):
    """Bytes of tensors, counted one by one, against the report; memory that was freed before the run does not count."""
    with pretended_cuda():
        if name in MASKED:
            sampler, settings = MASKED[name]
            func, drafts = getattr(sampler, "func", sampler), getattr(sampler, "keywords", {})
            extra = {key: moved(draft, None) for key, draft in drafts.items()}
            model, condition, noise = moved(tiny_mar(), None), from_ids((1, 4, 0)), PairedNoise(5, IMAGES)
        else:
            model, extra, noise = (
                moved(tiny_gpt("class", 6 if "mulosd" in name else 4), None),
                {},
                PairedDraws(5, IMAGES),
            )
            if name in TOKENS:
                func, plain, settings, _ = TOKENS[name]
                model = moved(plain, None)
            else:
                entry, settings = SAMPLERS[name.split(",")[0]], DRAFTED[name]
                func = entry.run
                if entry.needs_draft:
                    extra["draft"] = moved(tiny_gpt("class", 3, seed=1), None)
                    extra["up_sampler"] = UpSampling(moved(tiny_vq(), None))
            condition = condition_of(model.net.config.condition, IMAGES)
        before = torch.zeros(1 << 24, device="cuda")
        del before
        MEMORY.highest = started = MEMORY.live
        out = finish(func(model, condition, settings, noise, 5, **extra))
        measured = MEMORY.highest
    assert out.report.peak_memory_bytes == measured > started + out.report.counts.get("cache_bytes", 0)
    assert measured < 1 << 24 and started >= held(model.net)


def test_waits_are_counted():
    with pretended_cuda() as waits:
        a = torch.arange(3, device="cuda")
        torch.ones(3).pin_memory().to("cuda", non_blocking=True)
        b = a + a * a.float().mean()
        assert not waits
        int(a[1]), a.nonzero(), b[a > 1], torch.ones(3).to("cuda"), a.cpu(), a.tolist()
    assert sum(waits.values()) == 6
