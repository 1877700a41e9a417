"""Official sizes of Harmon and UniPic: work, random weights, and what is known of the published ones."""

import json
from dataclasses import replace

import hybrid_files
import own_model
import pytest
import torch
from fastar_nodes.lab.work import operations, sizes
from fastar_nodes.lab.work.sizes import random_models
from fastar_nodes.model_loaders.catalogue import official
from fastar_nodes.networks.hybrid import Hybrid, HybridConfig, HybridModel
from fastar_nodes.networks.llama import attend
from fastar_nodes.networks.mar import Block
from fastar_nodes.runs.registry import find
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise

pytestmark = pytest.mark.slow

# TFLOP of an image in the authors' code, as computed for the specification by hand.
PUBLISHED = {"Harmon-0.5B": 95, "Harmon-1.5B": 380, "UniPic-1.5B": 934}
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


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_the_work_is_what_a_run_counts(tiny, cfg):
    condition = PromptCondition(("a boat", "two red cats"))
    settings = MARSettings(steps=5, diffusion_steps=3, cfg=cfg)
    counts = finish(mar(tiny, condition, settings, PairedNoise(1, range(2)))).report.counts
    head = operations.head_flops(tiny.net.config, counts["head_rows"])
    work = operations.hybrid_flops(tiny, condition, settings)
    assert work["head"] == head
    c = tiny.hybrid.config  # beside the products of every row there is attention
    assert work["MAR encoder"] > counts["encoder_rows"] * c.mar.encoder_depth * 24 * c.mar.dim**2
    assert work["language model"] > counts["llm_rows"] * operations.llm_flops(c.llm, 1, 0)


def test_a_block_s_work_is_what_it_computes(tiny):
    dim, llm = 16, tiny.hybrid.llm
    with operations.counted() as mar_work:
        Block(dim, 2)(torch.randn(2, 5, dim), out=torch.tensor([[0, 3], [1, 2]]))
    with operations.counted() as llm_work:  # one row sees itself
        llm.hidden(torch.randn(1, 1, llm.config.dim), torch.zeros(1, 1), lambda _, q, k, v: attend(q, k, v))
    made = [2 * sum(count for count, _ in work.products) for work in (mar_work, llm_work)]
    assert made == [operations.block_flops(dim, 10, 4, 5), operations.llm_flops(llm.config, 1, 0)]
    more = operations.llm_flops(llm.config, 1, 3) - operations.llm_flops(llm.config, 1, 0)
    assert more == 3 * 4 * llm.config.depth * llm.config.heads * llm.config.head_dim  # three more keys


def test_random_weights_are_drawn_from_and_repeatable(tiny):
    condition, settings = PromptCondition(("a boat",)), MARSettings(steps=4, diffusion_steps=3)
    latents = finish(mar(tiny, condition, settings, PairedNoise(1, range(1)))).latents
    assert latents.isfinite().all() and tiny.name == "tiny, random weights"
    with pytest.raises(Exception, match="llamagen samples .* but Harmon-0.5B is not one"):
        random_models("Harmon-0.5B", [find("llamagen")], "fp32", torch.device("cpu"))


def ids(text: str) -> list[int]:
    """A tokenizer with the recorded words only."""
    known = {"user\nGenerate an image.": [872, 198, 31115, 458, 2168, 13], "\n": [198], "assistant\n": [77091, 198]}
    for words, numbers in own_model.QWEN_IDS.items():
        known[f"user\nGenerate an image: {words}"] = [872, 198, 31115, 458, 2168, 25, *numbers]
    return known[text]


def test_what_is_known_of_a_hybrid_beside_its_shapes(tiny):
    """The case of test_own_model.py that needs released files."""
    right = replace(tiny, tokenize=ids)
    own_model.expect_hybrid_facts(right, "tiny")

    shifted = replace(tiny, tokenize=lambda text: [n + 1 for n in ids(text)])
    for wrong in (shifted, replace(right, max_beta=0.2)):
        with pytest.raises(AssertionError):
            own_model.expect_hybrid_facts(wrong, "tiny")


def test_the_work_of_every_size_is_printed_and_the_authors_is_the_specification_s(lab):
    answer = lab("operations", "--hybrids")
    assert answer.code == 0, answer
    rows = [line.split("|")[1:] for line in answer.out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == list(sizes.HYBRID_SIZES)
    ours, theirs = ([float(row[column]) for row in rows] for column in (3, 4))
    assert theirs == pytest.approx(list(PUBLISHED.values()), rel=0.01)
    assert all(0.9 * b < a < 0.94 * b for a, b in zip(ours, theirs, strict=True))


def test_operations_of_the_head_are_those_of_its_matrices():
    """Two per weight of every matrix that a row of the head
    passes; the condition's and the time's are not counted per row.
    """
    with torch.device("meta"):
        net = Hybrid(sizes.official_hybrid("Harmon-0.5B"))
    head = net.mar.diffloss.net
    shared = ("time_embed", "cond_embed")
    weights = sum(t.numel() for name, t in head.named_parameters() if t.ndim == 2 and not name.startswith(shared))
    assert operations.head_flops(net.config.mar, 7) == 2 * 7 * weights
