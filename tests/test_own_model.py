"""A model of your choice beside itself: a catalogue entry that you added, or any file.

    FASTAR_MODEL=mar-base .venv/bin/python -m pytest tests/test_own_model.py

Exact settings, batches and compiled networks give what the plain sampler gives in fp32, other dtypes nearly so, and
what is known of the published model holds. FASTAR_DEVICE=cuda and FASTAR_DTYPES=bf16,int8 are optional.
tests/test_own_model_cases.py shows that each case can fail.
"""

import os
from dataclasses import replace

import own_model
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import official
from fastar_nodes.model_loaders.kinds import DTYPES, EIGHT_BITS
from fastar_nodes.networks import speed
from fastar_nodes.pipeline import Pipeline
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.presets import EXACT
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.settings import knobs
from own_model import IMAGES, MODEL, SEED, distance, draw, expect_equal, few_steps, network_of, small, values

CHOSEN = os.environ.get("FASTAR_DTYPES", ",".join((*DTYPES, *EIGHT_BITS))).split(",")
# Standard deviation of the tokens of an image, whose latents were scaled to one.
STD = (0.5, 2.0)

# The first tokens of Janus-Pro-1B in bf16 on CUDA, drawn greedily at guidance 5 from a text without the template, as a
# test of transformers states them.
JANUS_TEXT = "A portrait of young girl. masterpiece, film grained, best quality."
JANUS_TOKENS = [
    *(4484, 4015, 15750, 506, 3758, 11651, 8597, 5739, 4861, 971),
    *(14985, 14834, 15438, 7548, 1820, 1465, 13529, 12761, 10503, 12761),
    *(14303, 6155, 4015, 11766, 705, 15736, 14146, 10417, 1951, 7713),
    *(14305, 15617, 6169, 2706, 8006, 14893, 3855, 10188, 15652, 6297),
    *(1097, 12108, 15038, 311, 14998, 15165, 897, 4044, 1762, 4676),
]


@pytest.fixture(scope="session")
def pipe() -> Pipeline:
    """The chosen model in fp32."""
    if not MODEL:
        pytest.skip("NOT TESTED: FASTAR_MODEL=name chooses a model")

    found = own_model.load("fp32")
    if sum(weight.numel() for weight in found.model.net.parameters()) > speed.FEW_WEIGHTS:
        torch.set_num_threads(os.cpu_count() or 1)  # the other tests take one
    return found


def test_a_model_draws_an_image_alone_as_in_a_batch(pipe):
    alone = [values(pipe, draw(pipe, images=range(i, i + 1))) for i in range(IMAGES)]
    expect_equal(torch.cat(alone), values(pipe, draw(pipe)))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_model_draws_the_plain_images_at_exact_settings(pipe, name):
    """A model is its own draft."""
    entry = SAMPLERS[name]
    if name not in pipe.samplers[1:] or entry.needs_up_sampler:
        pytest.skip("it has no exact setting on this model")

    model = small(pipe)
    settings = pipe.settings(name, EXACT, **few_steps(pipe))
    if not settings.exact(min(entry.family.grid(model))):
        pytest.skip("it has no exact setting on this model")
    drawn = draw(pipe, entry, settings, draft=model if entry.needs_draft else None)
    expect_equal(values(pipe, drawn), values(pipe, draw(pipe)))


def test_a_model_decodes_windows_in_parallel_as_one_by_one(pipe):
    entry = SAMPLERS[pipe.samplers[0]]
    if "parallel" not in knobs(entry.settings):
        pytest.skip("its plain sampler has no setting parallel")

    plain = pipe.settings(entry.name)
    windows = replace(plain, parallel=small(pipe).grid)
    expect_equal(values(pipe, draw(pipe, entry, windows)), values(pipe, draw(pipe, entry, replace(plain, parallel=0))))


def test_a_model_draws_the_same_compiled(pipe):
    expected = values(pipe, draw(pipe))
    net = pipe.model.net
    try:
        speed.choose(net, speed.COMPILE, pipe.device)
    except UserError as reason:
        pytest.skip(str(reason))

    try:
        expect_equal(values(pipe, draw(pipe)), expected)
    finally:
        speed.choose(net, speed.PLAIN, pipe.device)


@pytest.mark.parametrize("dtype", [name for name in CHOSEN if name != "fp32"])
def test_a_model_draws_nearly_the_same_in_another_dtype(pipe, dtype):
    """Its tokens are nearer to those of fp32 than the tokens of other noise are."""
    try:
        other = own_model.load(dtype)
    except UserError as reason:
        pytest.skip(str(reason))

    expected, apart = (values(pipe, draw(pipe, seed=seed)) for seed in (SEED, SEED + 1))
    found = values(other, draw(other))
    assert distance(found, expected) < distance(apart, expected)


def test_a_model_draws_varied_tokens(pipe):
    """Latents have a std of about one, so their scale is right; of bits some are on; tokens have several values."""
    result = draw(pipe)
    if pipe.ready.kind.decoder == "kl":
        std = float(pipe.model.to_tokens(result.latents.float()).std())
        assert STD[0] < std < STD[1]
    elif pipe.ready.kind.codes:
        assert len(result.latents.unique()) > 1
    else:
        assert 0 < (result.latents > 0).float().mean() < 1


def test_what_is_known_of_a_published_harmon_or_unipic(pipe):
    network = network_of(MODEL)
    if network not in official.HYBRID_SIZES:
        pytest.skip("the model is no published Harmon or UniPic")
    own_model.expect_hybrid_facts(pipe.model, network)


def test_the_first_tokens_of_a_published_janus(pipe):
    """Another GPU than that of transformers' test may give others."""
    if network_of(MODEL) != "Janus-Pro-1B" or pipe.device.type != "cuda":
        pytest.skip("the tokens are stated of Janus-Pro-1B on CUDA")

    half = own_model.load("bf16")
    model = half.model
    ids = model.tokenize(JANUS_TEXT)
    bare = replace(model, tokenize=lambda _: ids, template=replace(model.template, user=None, assistant=None))
    settings = half.settings(half.samplers[0], top_k=1)
    drawing = Drawing(SAMPLERS[half.samplers[0]], bare, settings, PromptCondition(("",)), 0, range(1))
    steps = drawing.begin(range(1))
    current = next(steps)
    while int(current.decided.sum()) < len(JANUS_TOKENS):
        current = next(steps)
    steps.close()

    assert current.latents.flatten()[: len(JANUS_TOKENS)].tolist() == JANUS_TOKENS
