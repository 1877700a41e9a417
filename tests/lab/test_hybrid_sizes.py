"""Official sizes of Harmon and UniPic: work, random weights, and what is known of the published ones."""

import json
from dataclasses import replace

import hybrid_files
import pytest
import torch
from fastar_nodes.cli import verify
from fastar_nodes.lab.work import sizes
from fastar_nodes.lab.work.sizes import random_models
from fastar_nodes.model_loaders.catalogue import official
from fastar_nodes.networks.hybrid import Hybrid, HybridConfig, HybridModel
from fastar_nodes.runs.registry import find
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise

pytestmark = pytest.mark.slow

TINY = ((24, 2, 4, 2, 32), (16, 1, 1, 16), 4, 4, 0.999, 4)


@pytest.mark.parametrize("size", sizes.HYBRID_SIZES)
def test_shapes_are_those_of_the_recorded_key_lists(size, root):
    family = "unipic" if size.startswith("Uni") else "harmon"
    file = {"Harmon-0.5B": "harmon_0_5b", "Harmon-1.5B": "harmon_1_5b", "UniPic-1.5B": "unipic_1_5b"}[size]
    known = json.loads((root / "tests" / "parity" / family / f"hybrid_shapes_{file}.json").read_text())
    with torch.device("meta"):
        made = Hybrid(sizes.official_hybrid(size)).state_dict()
    unread = ("llm.lm_head", "mar.class_emb", "siglip2_proj")
    wanted = {k: v for k, v in known.items() if not k.startswith(unread)}
    assert {k: list(t.shape) for k, t in made.items()} == wanted
    assert HybridConfig.from_state_dict(made) == sizes.official_hybrid(size)


@pytest.fixture
def tiny(monkeypatch) -> HybridModel:
    """A tiny model that is the only official size, whose head counts are listed."""
    config = hybrid_files.config(vocab=151936, tied=True)
    for module in (sizes, official):
        monkeypatch.setattr(module, "HYBRID_SIZES", {"tiny": TINY})
        monkeypatch.setattr(module, "official_hybrid", lambda size, grid=None: config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return sizes.random_hybrid("tiny", torch.float32, "cpu")


def test_random_weights_are_drawn_from_and_repeatable(tiny):
    condition, settings = PromptCondition(("a boat",)), MARSettings(steps=4, diffusion_steps=3)
    latents = finish(mar(tiny, condition, settings, PairedNoise(1, range(1)))).latents
    assert latents.isfinite().all() and tiny.name == "tiny, random weights"
    with pytest.raises(Exception, match="llamagen works with a LlamaGen .* but not with Harmon-0.5B"):
        random_models("Harmon-0.5B", [find("llamagen")], "fp32", torch.device("cpu"))


def ids(text: str) -> list[int]:
    """A tokenizer with the recorded words only."""
    known = {"user\nGenerate an image.": [872, 198, 31115, 458, 2168, 13], "\n": [198], "assistant\n": [77091, 198]}
    for words, numbers in verify.QWEN_IDS.items():
        known[f"user\nGenerate an image: {words}"] = [872, 198, 31115, 458, 2168, 25, *numbers]
    return known[text]


def test_what_is_known_of_a_hybrid_beside_its_shapes(tiny):
    """The part of ``verify`` that needs released files."""
    right = replace(tiny, tokenize=ids)
    assert verify.hybrid_facts(right, "tiny") == ""

    shifted = replace(tiny, tokenize=lambda text: [n + 1 for n in ids(text)])
    for wrong in (shifted, replace(right, max_beta=0.2)):
        assert verify.hybrid_facts(wrong, "tiny")
