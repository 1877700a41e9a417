"""Estimates of memory: against the tensors alive in full-size networks on the meta device, and in reports."""

import pytest
import torch
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.networks.hybrid import UNCONDITIONAL, Hybrid, HybridConfig, HybridModel, PromptBatch, PromptCache
from fastar_nodes.networks.llama import LlamaConfig, qwen_config
from fastar_nodes.networks.mar import MARConfig
from fastar_nodes.reports.record import to_text
from fastar_nodes.runs import memory
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.memory.mar import estimate
from fastar_nodes.runs.registry import SAMPLERS, family_of
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.cspd.settings import CSpDSettings
from fastar_nodes.samplers.mar.fasthybrid.settings import FastHybridSettings
from fastar_nodes.samplers.mar.lazy.settings import LazyMARSettings
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import noise_bytes
from live_bytes import counted
from tiny_hybrids import TURN, characters, tiny_hybrid

GB = 1e9
KL16 = KLConfig(ch=128, ch_mult=(1, 1, 2, 2, 4), blocks=2, z_channels=16)


def meta_model(llm: LlamaConfig, mar: MARConfig) -> HybridModel:
    """A full-size model in bf16, its head's last layer in fp32, without memory."""
    with torch.device("meta"):
        net = Hybrid(HybridConfig(mar, llm)).to(torch.bfloat16).requires_grad_(False)
        net.head.final_layer.linear.float()
    return HybridModel(net.mar, "unipic", hybrid=net, tokenize=characters, turn=TURN, trained=64, max_beta=0.2)


@pytest.fixture(scope="module")
def unipic():
    llm = qwen_config(dim=1536, depth=28, heads=12, kv_heads=2, head_dim=128, hidden=8960, vocab=151936, tied=True)
    shape = {"dim": 1280, "encoder_depth": 20, "decoder_depth": 20, "heads": 16, "head_depth": 12, "head_width": 1536}
    return meta_model(llm, MARConfig(**shape, buffer=64, tokens=4096, channels=16, classes=0))


def test_unipic_at_1024_pixels_fits_in_ten_gigabytes(unipic):
    """Batch 1, bf16, guidance, with all of LazyMAR's caches too; the VAE in fp32."""
    condition = PromptCondition(("a red boat at sunset",))
    with torch.device("meta"):
        vae = KLAutoencoder(KL16)
    decode = sum(4 * p.numel() for p in vae.parameters()) + vae.decode_bytes(1, 64, 64)
    plain = estimate(unipic, condition, MARSettings(steps=32, cfg=3.0)) | {memory.DECODE: decode}
    lazy = LazyMARSettings(steps=32, cfg=3.0)
    cached = estimate(unipic, condition, lazy, lazy) | {memory.DECODE: decode}
    weights = sum(v for k, v in plain.items() if k.startswith(memory.WEIGHTS))
    assert weights == pytest.approx(5.0 * GB, rel=0.01)
    assert 5 * GB < memory.total(plain) < sum(plain.values()) < 10 * GB
    assert memory.total(plain) < memory.total(cached) < 10 * GB


def test_parts_are_all_weights_once(unipic):
    whole = {id(p) for p in unipic.hybrid.parameters()}
    parts = [id(p) for part in unipic.parts.values() for p in part.parameters()]
    assert len(parts) == len(set(parts)) and set(parts) == whole
    assert unipic.weights()["language model"] == pytest.approx(3.1 * GB, rel=0.03)


def test_a_part_moves_alone_and_the_network_sees_it():
    model = tiny_hybrid()
    model.parts["MAR"].to(torch.float64)
    kinds = {name: p.dtype for name, p in model.hybrid.named_parameters()}
    for name, kind in kinds.items():
        moved = name.startswith("mar.") and "diffloss" not in name
        assert kind == (torch.float64 if moved else torch.float32), name


def test_passes_hold_what_is_estimated(unipic, monkeypatch):
    """An AR step with nearly all tokens known: no less than what is alive, and at most four times as much."""
    c, net, known = unipic.hybrid.config.llm, unipic.hybrid, 3800
    shape = (c.depth, c.kv_heads, 40, c.head_dim)
    with torch.device("meta"), torch.no_grad():
        caches = [PromptCache(*(torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))) for _ in range(2)]
        prompts, tokens = PromptBatch(caches), torch.empty(1, 4096, 16)
        at, wanted = torch.zeros(1, known, dtype=torch.int64), torch.zeros(2, 201, dtype=torch.int64)
        work = unipic.working_bytes(2 * (4096 + 64))
        with counted(monkeypatch) as live:
            encoded = net.mar.encode(tokens, at, net.mar.class_rows(None, 1))
        assert live.peak < work["MAR"]
        with counted(monkeypatch) as live:
            fused = net.fuse(encoded, at, prompts)
        assert live.peak < work["language model"] < 4 * live.peak
        with counted(monkeypatch) as live:
            net.mar.decode(fused, at.expand(2, -1), wanted)
        assert live.peak < work["MAR"] < 4 * live.peak


def run(model, sampler="mar", settings=None, **more):
    condition = PromptCondition(("a boat", "a cat"))
    settings = settings or MARSettings(steps=4, diffusion_steps=4)
    return finish(Drawing(SAMPLERS[sampler], model, settings, condition, 3, range(2), **more).steps()).report


def test_reports_hold_the_estimate():
    model = tiny_hybrid()
    report = run(model)
    settings = MARSettings(steps=4, diffusion_steps=4)
    assert report.memory == estimate(model, PromptCondition(("a boat", "a cat")), settings)
    assert {"weights: language model", "weights: MAR", "weights: head", "prompt cache"} < set(report.memory)
    assert report.to_dict()["memory_estimate_bytes"] == report.memory
    assert "memory, estimated: language model weights " in to_text(report)


@pytest.mark.parametrize("condition_cache", [True, False])
@pytest.mark.parametrize("encoder_cache", [True, False])
def test_what_lazymar_keeps_is_within_the_estimate(encoder_cache, condition_cache):
    lazy = {"steps": 8, "diffusion_steps": 4, "start_step": 1, "refresh_period": 4, "ratio_schedule": "stretched"}
    report = run(
        tiny_hybrid(), "lazymar", LazyMARSettings(**lazy, encoder_cache=encoder_cache, condition_cache=condition_cache)
    )
    assert 0 < report.counts["cache_bytes"] <= report.memory["feature cache"] <= 3 * report.counts["cache_bytes"]


def test_a_draft_s_weights_are_part_of_it():
    report = run(tiny_hybrid(), "cspd", CSpDSettings(steps=4, diffusion_steps=4), draft=tiny_hybrid(1))
    assert report.memory["weights: draft language model"] == report.memory["weights: language model"]


def test_stages_and_their_sum_by_hand():
    """A pass has both branches of 2 images with 3 class rows and 16 tokens; CSpD verifies three AR steps in one, or in
    its mode published all in one row."""
    model, condition = tiny_hybrid(), PromptCondition(("a boat", "a cat"))
    once = model.working_bytes(2 * 2 * (3 + 16))["MAR"]
    assert estimate(model, condition, MARSettings(steps=4))[memory.MAR] == once
    for mode, at_once in (("published", 1), ("lossless", 3), ("paper", 4)):
        settings = CSpDSettings(steps=4, draft_length=3, mode=mode)
        assert estimate(model, condition, settings)[memory.MAR] == at_once * once
    words = [len(model.prompt(text)) for text in condition.texts]
    for cfg, read in ((1.0, sum(words)), (3.0, sum(words) + len(model.instruction(UNCONDITIONAL)))):
        found = estimate(model, condition, MARSettings(steps=4, cfg=cfg))
        assert found[memory.PROMPTS] == model.prompt_bytes(read) and memory.FEATURES not in found
    parts = {"weights: MAR": 50, "weights: head (streamed)": 1000, "noise": 5}
    parts |= {memory.MAR: 3, memory.HEAD: 7, memory.LLM: 2}
    assert memory.total(parts) == 50 + 5 + 7 and memory.total({"noise": 5}) == 5


def test_a_draft_keeps_prompts_and_features_of_its_own():
    model, condition = tiny_hybrid(), PromptCondition(("a boat", "a cat"))
    settings = LazyMARSettings(steps=8, cfg=3.0)
    alone = family_of(model).memory(model, condition, settings)
    both = family_of(model).memory(model, condition, settings, draft=model)
    of_draft = {name: alone[name] for name in (memory.PROMPTS, memory.FEATURES)}
    of_draft |= {name: count for name, count in alone.items() if name.startswith(memory.WEIGHTS)}
    named = {f"draft {name}".replace("draft weights: ", "weights: draft "): n for name, n in of_draft.items()}
    assert both == alone | named and len(named) == 2 + 3


def test_noise_and_the_head_by_hand():
    """16 tokens of 4 channels; a head of width 16 with 2 blocks has 16 x (3 x 2 + 2) modulations of a row."""
    model, condition = tiny_hybrid(), PromptCondition(("a boat", "a cat"))
    # Start noise, 5 steps, and one more.
    assert noise_bytes(3, {"full": 5}, 16 * 4) == 4 * 3 * 7 * 16 * 4
    assert noise_bytes(3, {"full": 5, "guided": 2}, 16 * 4) == 4 * 3 * (7 + 4) * 16 * 4
    # floor(16 cos(pi/8 (s + 1))) of 16 tokens are left after AR
    # step s: 14, 11, 6 and 0. The largest step decides 6 tokens.
    steps = {"steps": 4, "diffusion_steps": 5}
    for settings, tokens in (
        (MARSettings(**steps), 6),
        (FastHybridSettings(**steps, lookahead=0), 6),
        (FastHybridSettings(**steps, lookahead=2), 12),
        (FastHybridSettings(**steps, lookahead=3), 16),
        (CSpDSettings(**steps, draft_length=1, mode="published"), 6),
        (CSpDSettings(**steps, draft_length=2, mode="published"), 12),
        (CSpDSettings(**steps, draft_length=2, mode="paper"), 16),
    ):
        # Both branches of 2 images at all steps, three times in fp32.
        assert estimate(model, condition, settings)[memory.HEAD] == 3 * 4 * 5 * (2 * 2 * tokens) * 16 * 8
