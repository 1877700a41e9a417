"""GtR against a slow reference that is written from the paper's text: order, sizes, diffusion steps and latents."""

import cmath
import math

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.gtr import gtr
from fastar_nodes.samplers.mar.gtr.settings import GtRSettings
from fastar_nodes.samplers.mar.gtr.stages import in_stages, staged_after, stages_of_cells
from fastar_nodes.samplers.mar.mar import check, mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from hypothesis import given
from hypothesis import strategies as st
from mar_reference import diffuse, full_z
from stepping import stepped
from tiny_models import tiny_mar

# 16 tokens: stages of 2, 2, 4 and 8 in 2, 1, 1 and 1 AR steps.
BASE = {"steps": 5, "diffusion_steps": 6, "diffusion_steps_end": 3, "cfg": 2.0, "first_share": 0.5}
# Timesteps of 3 to 6 diffusion steps from 950 down: 999 k / (T - 1), by hand.
TIMESTEPS = {
    6: (0, 200, 400, 599, 799, 950),
    5: (0, 250, 500, 749, 950),
    4: (0, 333, 666, 950),
    3: (0, 500, 950),
}


def run(model, settings, images=(0, 1, 2), **more):
    labels = from_ids([(1, 4, 0)[i] for i in images])
    return finish(gtr(model, labels, settings, PairedNoise(5, images), **more))


# ------------------------------------------------------------------------------------------------ the slow reference


def paper_stages(grid: int) -> list[set[int]]:
    """Positions of the stages, as the text has them: the cells with (i + j) mod 2 = 0, bisected into an eighth, an
    eighth and a quarter of the image, then the others. A bisection keeps every second cell of a square lattice, which
    is a lattice again, turned by 45 degrees.
    """
    cells = {(i, j) for i in range(grid) for j in range(grid)}
    structure = {(i, j) for i, j in cells if (i + j) % 2 == 0}
    half = {(i, j) for i, j in structure if (i % 2, j % 2) == (0, 0)}
    quarter = {(i, j) for i, j in half if (i // 2 + j // 2) % 2 == 0}
    stages = [quarter, half - quarter, structure - half, cells - structure]
    return [{i * grid + j for i, j in stage} for stage in stages]


def quarter_stages(grid: int) -> list[set[int]]:
    """Positions of the stages *quarters*: even rows and columns, odd rows and columns, the others."""
    first, second, *others = paper_stages(grid)
    return [first | second, *others]


STAGES = {"paper": paper_stages, "quarters": quarter_stages}


def paper_order(grid: int, random: list[int], stages: str = "paper") -> list[list[int]]:
    """Positions of the stages in random order."""
    return [[position for position in random if position in stage] for stage in STAGES[stages](grid)]


def paper_groups(stages: list[list[int]], counts: tuple[int, ...]) -> list[list[int]]:
    """Positions of every AR step: a stage's are cut evenly, the larger groups last."""
    groups = []
    for stage, count in zip(stages, counts, strict=True):
        before = 0
        for s in range(count):
            after = math.floor(len(stage) * (s + 1) / count)
            groups.append(stage[before:after])
            before = after
    return groups


def paper_energy(z: list[float]) -> float:
    """sum over n = 0 .. D / 2 of (1 + n / (D / 2)) |F_n|^2, by the definition of the transform."""
    size = len(z)
    total = 0.0
    for n in range(size // 2 + 1):
        f = sum(value * cmath.exp(-2j * math.pi * n * d / size) for d, value in enumerate(z))
        total += (1 + n / (size / 2)) * abs(f) ** 2
    return total


@torch.no_grad()
def reference(model, labels, settings, noise, counts, diffusion_steps):
    """Latents [B, C, H, W], the AR step of every token [B, L], and its number of diffusion steps [B, L]."""
    net, s = model.net, settings
    c = net.config
    start = noise.start_noise("full", c.tokens, c.channels)
    noises = noise.step_noise("full", s.diffusion_steps, c.tokens, c.channels)
    pictures = []
    decided, taken = (torch.zeros(len(labels), c.tokens, dtype=torch.int32) for _ in range(2))
    for b, random in enumerate(noise.orders(c.tokens).flip(1).tolist()):
        tokens = torch.zeros(c.tokens, c.channels)
        classes = [net.class_emb.weight[labels[b]]] + [net.fake_latent[0]] * (s.cfg != 1)
        known: list[int] = []
        for step, group in enumerate(paper_groups(paper_order(c.grid, random, s.stages), counts)):
            left = c.tokens - len(known) - len(group)
            scale = 1 + (s.cfg - 1) * (c.tokens - max(1, left)) / c.tokens if s.cfg_schedule == "linear" else s.cfg
            z = [full_z(net, tokens, known, row) for row in classes]

            by_energy = sorted(group, key=lambda p, z=z: paper_energy(z[0][p].tolist()), reverse=True)
            detailed = by_energy[: int(s.detail_share * len(group))]
            made = {}
            for p in group:
                count = s.diffusion_steps if p in detailed else diffusion_steps[step]
                # A shorter diffusion takes its noise evenly from the longest one's.
                noise_of = noises[b, [k * s.diffusion_steps // count for k in range(count)], p]
                rows = [row[p] for row in z]
                made[p] = diffuse(net, rows, scale, start[b, p], noise_of, TIMESTEPS[count], s.temperature)
                decided[b, p], taken[b, p] = step, count

            for p, token in made.items():
                tokens[p] = token
            known += group
        pictures.append(model.to_latents(tokens[None]))
    return torch.cat(pictures), decided, taken


# Settings, AR steps of the stages, and diffusion steps of every AR step: 3 + 3 (1 - u), rounded down, with u = 0, 1/4
# .. 1 up to the reconstruction's first AR step.
CASES = {
    # Half of the tokens of two, four and eight keep six diffusion steps.
    "half": ({"detail_share": 0.5}, (2, 1, 1, 1), [6, 5, 4, 3, 3]),
    "none, no guidance": ({"detail_share": 0.0, "cfg": 1.0, "temperature": 0.7}, (2, 1, 1, 1), [6, 5, 4, 3, 3]),
    "two last steps": (
        {"steps": 6, "reconstruction_steps": 2, "detail_share": 0.25, "cfg_schedule": "constant"},
        (2, 1, 1, 2),
        [6, 5, 4, 3, 3, 3],
    ),
    "quarters": (
        {"steps": 6, "reconstruction_steps": 2, "stages": "quarters", "detail_share": 0.25},
        (3, 1, 2),
        [6, 5, 4, 3, 3, 3],
    ),
    "all": ({"detail_share": 1.0}, (2, 1, 1, 1), [6, 5, 4, 3, 3]),
}


@pytest.mark.parametrize(("case", "seed"), [*((case, 0) for case in CASES), ("half", 7)])
def test_equals_the_slow_reference(case, seed):
    """In the model of seed 7 the null branch has its energy in other tokens."""
    model = tiny_mar(seed)
    changes, counts, diffusion_steps = CASES[case]
    s, noise, labels = GtRSettings(**{**BASE, **changes}), PairedNoise(5, (0, 3)), (1, 4)
    slow, decided, taken = reference(model, labels, s, noise, counts, diffusion_steps)
    fast = finish(gtr(model, from_ids(labels), s, noise))

    torch.testing.assert_close(fast.latents, slow, rtol=1e-3, atol=1e-3 * float(slow.abs().max()))
    assert torch.equal(torch.from_numpy(fast.report.maps["step"]).flatten(1), decided)
    assert fast.report.counts["head_rows"] == (1 + (s.cfg != 1)) * int(taken.sum())
    # The longest diffusion of an AR step makes its sequential calls.
    assert fast.report.counts["head_calls"] == sum(int(taken[decided == step].max()) for step in range(sum(counts)))
    assert fast.report.counts["transformer_passes"] == sum(counts)


# ------------------------------------------------------------------------------------------------ order and sizes


def sizes(left: list[int], tokens: int) -> list[int]:
    return [a - b for a, b in zip([tokens, *left], left, strict=False)]


@pytest.mark.parametrize("last, counts", [(1, (12, 3, 1, 1)), (2, (12, 3, 1, 2))])
def test_the_papers_numbers_of_tokens(last, counts):
    """256 tokens: {2.67, 10.67, 64} an AR step in 12, 3 and 1 of them, then 128 in one or two: 17 or 18 in all."""
    made = GtRSettings(steps=16 + last, reconstruction_steps=last)
    found = sizes(made.masked_after_steps(256), 256)
    assert made.stage_steps == counts and len(found) == 16 + last
    assert [sum(found[:12]) / 12, sum(found[12:15]) / 3, found[15]] == pytest.approx([8 / 3, 32 / 3, 64])
    assert set(found[:12]) == {2, 3} and set(found[12:15]) == {10, 11} and found[16:] == [128 // last] * last


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("grid", range(1, 17))
def test_stages_are_those_of_the_definition(grid, stages):
    """Orders are permutations; within a stage the tokens keep their random order."""
    found = stages_of_cells(grid, stages)
    for number, cells in enumerate(STAGES[stages](grid)):
        assert set((found == number).nonzero().flatten().tolist()) == cells

    orders = PairedNoise(3, (0, 1)).orders(grid * grid)
    made = in_stages(orders, found)
    assert torch.equal(made.sort(1).values, torch.arange(grid * grid).expand(2, -1))
    for order, random in zip(made.tolist(), orders.tolist(), strict=True):
        assert order == sum(paper_order(grid, random, stages), [])


@given(st.lists(st.integers(0, 150), min_size=3, max_size=4), st.tuples(*[st.integers(1, 99)] * 4))
def test_stages_decide_every_token_once(cells, steps):
    steps = steps[: len(cells)]
    found = sizes(staged_after(cells, steps), sum(cells))
    assert sum(found) == sum(cells) and min(found, default=1) >= 1
    for size, count in zip(cells, steps, strict=True):
        own, found = found[: min(size, count)], found[min(size, count) :]
        assert sum(own) == size and max(own, default=0) - min(own, default=0) <= 1
    assert not found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 3}, "^reconstruction_steps: 1 is too many if steps is 3.* at least 3 .*; set steps to at least 4"),
        (
            {"steps": 2, "stages": "quarters"},
            "^reconstruction_steps: 1 is too many if steps is 2.* at least 2 .*; set steps to at least 3, or",
        ),
        ({"steps": 8}, "^steps: GtR's first stage has only 2 tokens for 4 AR steps; use fewer, or change"),
        ({"steps": 11, "first_share": 0.2}, "^steps: GtR's third stage has only 4 tokens for 6 AR steps; use fewer"),
        (
            {"steps": 13, "reconstruction_steps": 9},
            "^reconstruction_steps: GtR's last stage has only 8 tokens for 9 AR steps; lower reconstruction",
        ),
        ({"steps": 17, "reconstruction_steps": 0}, "^steps: 17 is outside 1 to 16"),
    ],
    ids=str,
)
def test_steps_that_do_not_fit_are_refused(model, changes, message):
    made = GtRSettings(**{**BASE, **changes})
    with pytest.raises(UserError, match=message):
        check(model, made)
    with pytest.raises(UserError, match=message):
        run(model, made)


@pytest.mark.parametrize("name", ["gtr", "gtr+lazymar"])
def test_a_warm_up_fits_the_stages(model, name):
    entry = SAMPLERS[name]
    Drawing(entry, model, entry.settings(), from_ids((1,)), 0, range(1)).warm_up()


# ------------------------------------------------------------------------------------------------------------- edits


def picture(images: int) -> torch.Tensor:
    return torch.randn(images, 4, 4, 4, generator=torch.Generator().manual_seed(0))


def masks() -> torch.Tensor:
    """The left half, and of another image the upper half."""
    left, upper = torch.zeros(4, 4), torch.zeros(4, 4)
    left[:, :2] = upper[:2] = 1
    return torch.stack([left, upper])


def test_an_edit_keeps_what_is_given_and_does_not_depend_on_its_batch(model):
    """Eight tokens are drawn: stages of 1, 1, 2 and 4 in at most 2, 1, 1 and 1 AR steps."""
    s, start, drawn = GtRSettings(**BASE, detail_share=0.5), picture(2), masks()
    seen, together = stepped(gtr(model, from_ids((1, 4)), s, PairedNoise(5, (0, 1)), edit=Edit(start, drawn)))
    kept = (drawn == 0)[:, None].expand_as(start)
    assert torch.equal(together.latents[kept], start[kept])
    assert bool((together.latents[~kept] != start[~kept]).all())
    assert len(seen) == 1 + 1 + 1 + 1 and seen[-1].done == seen[-1].total == 4
    decided = torch.from_numpy(together.report.maps["step"]).flatten(1)
    assert [[int((row == step).sum()) for step in range(-1, 4)] for row in decided] == [[8, 1, 1, 2, 4]] * 2

    for image, mask in zip(decided.tolist(), drawn.flatten(1).bool().tolist(), strict=True):
        for number, stage in enumerate(paper_stages(4)):
            again = {p for p in stage if mask[p]}
            assert {p for p in range(16) if image[p] == number} == again

    for i, label in enumerate((1, 4)):
        edit = Edit(start[i : i + 1], drawn[i : i + 1])
        alone = finish(gtr(model, from_ids((label,)), s, PairedNoise(5, (i,)), edit=edit))
        torch.testing.assert_close(alone.latents, together.latents[i : i + 1], rtol=1e-4, atol=1e-4)


def masks_with_other_stages() -> torch.Tensor:
    """Two tokens of each image; both are of the first stage in one image, but only one of them in the other."""
    masks = torch.zeros(2, 4, 4)
    masks[0, 0, 0] = masks[0, 2, 2] = masks[1, 0, 0] = masks[1, 0, 1] = 1
    return masks


def test_masks_with_stages_of_other_sizes_are_refused(model):
    with pytest.raises(UserError, match="^mask: .*GtR's stages.* different numbers of tokens"):
        run(model, GtRSettings(**BASE), (0, 1), edit=Edit(picture(2), masks_with_other_stages()))


def test_an_edit_without_reconstruction_is_mars(model):
    """Without a reconstruction there are no stages, so the masks may have any tokens, as in plain MAR."""
    edit = Edit(picture(2), masks_with_other_stages())
    common = {**BASE, "diffusion_steps_end": None}
    del common["first_share"]
    found = run(model, GtRSettings(**common, reconstruction_steps=0), (0, 1), edit=edit)
    plain = finish(mar(model, from_ids((1, 4)), MARSettings(**common), PairedNoise(5, (0, 1)), edit=edit))
    assert torch.equal(found.latents, plain.latents)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("first", [0, 1])
def test_edits_of_few_tokens(model, tokens, first):
    """Also of the reconstruction's alone."""
    cells = torch.arange(16)
    mask = ((cells >= first) & (cells < first + tokens)).float().view(1, 4, 4)
    result = run(model, GtRSettings(**BASE | {"reconstruction_steps": 2}), (0,), edit=Edit(picture(1), mask))
    assert (result.report.maps["step"] >= 0).sum() == tokens and bool(result.latents.isfinite().all())


# ------------------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("changes", [{}, {"head_cache": False}], ids=str)
def test_with_lazymars_caches(changes):
    """Fewer rows; with a cached head the two numbers of diffusion steps run after each other."""
    values = {**BASE, "diffusion_steps": 40, "diffusion_steps_end": 30, "detail_share": 0.5}
    caches = {"refresh_period": 3, "start_step": 1, "computed_ratio": 0.2, **changes}
    entry = SAMPLERS["gtr+lazymar"]
    model = tiny_mar()
    alone = run(model, GtRSettings(**values))
    both = finish(entry.run(model, from_ids((1, 4, 0)), entry.settings(**values, **caches), PairedNoise(5, (0, 1, 2))))
    assert both.report.sampler == "gtr+lazymar" and both.report.settings["detail_share"] == 0.5
    assert both.report.counts["transformer_tokens"] < alone.report.counts["transformer_tokens"]
    more = both.report.counts["head_calls"] - alone.report.counts["head_calls"]
    if "head_cache" in changes:
        assert more == 0 and both.report.counts["head_rows"] == alone.report.counts["head_rows"]
    else:
        assert more > 0 and both.report.counts["head_rows"] < alone.report.counts["head_rows"]
