"""Load Harmon / UniPic and Prompt on the fake ComfyUI: parts under memory management, and estimates in reports."""

from __future__ import annotations

import fake_comfy
import pytest
import torch
from fastar_nodes.nodes import host, hybrid, loaders, mar_samplers
from fastar_nodes.samplers.mar import memory
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.settings import knobs

SHORT = {"ar_steps": 4, "diffusion_steps": 4}


@pytest.fixture(scope="module")
def loaded():
    return hybrid.LoadHybrid.execute("demo-hybrid", "auto", "fp32").result


def values(settings: type) -> dict:
    return {name: default for name, (default, _) in knobs(settings).items()} | SHORT


def sample(model: host.Loaded, node: type = mar_samplers.MARSampler, text: str = "a red boat", **more):
    condition = hybrid.Prompt.execute(text, images=2).result[0]
    sockets = {"model": model, "condition": condition, "seed": 3}
    return node.execute(**sockets, **(values(MARSettings) | more)).result


def test_language_model_mar_head_and_vae_are_placed_one_by_one(loaded):
    model, vae = loaded
    fake_comfy.state.loaded.clear()
    sample(model)
    patchers, about = fake_comfy.state.loaded[0]
    assert len(patchers) == len(set(patchers)) == 4 and patchers[-1] is vae.patcher
    placed = [p for patcher in patchers[:3] for p in patcher.model.parameters()]
    assert {id(p) for p in placed} == {id(p) for p in model.model.hybrid.parameters()}
    assert about["memory_required"] > 0


def test_a_draft_s_parts_are_placed_too(loaded):
    model, _ = loaded
    fake_comfy.state.loaded.clear()
    condition = hybrid.Prompt.execute("a red boat").result[0]
    other = hybrid.LoadHybrid.execute("demo-hybrid", "auto", "fp32").result[0]
    node = mar_samplers.CSpDSampler
    node.execute(draft=other, target=model, condition=condition, seed=3, **SHORT)
    assert len(fake_comfy.state.loaded[0][0]) == 7


def test_room_is_made_for_what_the_report_says(loaded):
    model, vae = loaded
    vae_only = host.Loaded(model.model, model.patcher, None, further=model.further)
    fake_comfy.state.loaded.clear()
    latent, report = sample(vae_only)
    kept = sum(v for k, v in report.memory.items() if not k.startswith(memory.WEIGHTS))
    assert fake_comfy.state.loaded[0][1]["memory_required"] == kept
    report = sample(model)[1]
    shape = latent["samples"].shape
    assert report.memory[memory.DECODE] == vae.memory_used_decode(shape, torch.float32) > 0


def test_a_kl_decoder_asks_for_less_than_core_estimates(loaded):
    _, vae = loaded
    assert isinstance(vae, loaders.KLDecoder)
    core = host.FastARVAE.memory_used_decode
    small, large = (1, 8, 8, 8), (1, 8, 256, 256)
    for shape in (small, large):
        assert (
            core(vae, shape, torch.float32) / 4
            < vae.memory_used_decode(shape, torch.float32)
            < core(vae, shape, torch.float32)
        )


def test_another_size_carries_a_note(loaded):
    assert sample(loaded[0])[1].note == ""
    with pytest.raises(Exception, match="size: .* has tokens of another size"):
        hybrid.LoadHybrid.execute("demo-hybrid", "auto", "fp32", "256")
