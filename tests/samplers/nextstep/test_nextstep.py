"""NextStep's sampler: steps by hand, switches that change nothing, branches, batches, edits, sizes and refusals.

``test_nextstep_contract.py`` follows it with a plain reference that draws one image without caches.
"""

import math
from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.networks.nextstep import NextStepModel, to_latents, to_tokens
from fastar_nodes.samplers import diffusion_steps
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.nextstep import canvas as canvases
from fastar_nodes.samplers.nextstep import nextstep as module
from fastar_nodes.samplers.nextstep.canvas import scale_at
from fastar_nodes.samplers.nextstep.flow import SOLVERS, flow
from fastar_nodes.samplers.nextstep.nextstep import check, nextstep
from fastar_nodes.samplers.nextstep.settings import NextStepSettings
from fastar_nodes.samplers.noise import PairedNoise
from nextstep_models import EDITOR, PROMPTS, edits_of, tiny_nextstep

FEW = NextStepSettings(diffusion_steps=4, cfg=2.0)
# Largest difference of tokens that is rounding: a batch and an image alone take different kernels.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def model() -> NextStepModel:
    return tiny_nextstep()


def draw(model, settings=FEW, images=(0,), texts=("a red house",), seed=5, condition=None, **more):
    condition = condition or PromptCondition(texts)
    return finish(nextstep(model, condition, settings, PairedNoise(seed, images), **more))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


# ------------------------------------------------------------------------------------------------ steps by hand


def written(step: diffusion_steps.DiffusionStep, t: float) -> tuple[float, float, float]:
    """The factors of x, velocity and noise of a step, whose data is x + (1 - t) velocity."""
    assert (step.data_x, step.data_per_prediction) == (1.0, 1 - t) and step.log_std_per_logit == 0
    return step.x_coefficient + step.data_coefficient, step.data_coefficient * (1 - t), math.exp(step.log_std_middle)


def test_em_by_hand():
    """Two steps: t = 0 and 0.96. x + dt ((1 + t) v - x) + sqrt(2 (1 - t) dt) n, then x + 0.04 v."""
    found = flow("em", 2)
    assert found.times == (0.0, 0.96)
    assert written(found.steps[0], 0.0) == pytest.approx((0.04, 0.96, math.sqrt(2 * 0.96)))
    assert written(found.steps[1], 0.96) == pytest.approx((1.0, 0.04, 0.0))


def test_em0_by_hand():
    """Two steps: t = 0 and 0.5; the last one ends at 1, with the noise sqrt(2) / 2."""
    found = flow("em0", 2)
    assert found.times == (0.0, 0.5)
    assert written(found.steps[0], 0.0) == pytest.approx((0.5, 0.5, 1.0))
    assert written(found.steps[1], 0.5) == pytest.approx((0.5, 0.75, math.sqrt(2) / 2))


def test_sde_by_hand():
    """g^2 = 0.64 (1 - t) / t, and 0.64 / (1 - 0.5) at 0: drift g^2 dt / (2 (1 - t)) of t v - x."""
    found = flow("sde", 2)
    assert written(found.steps[0], 0.0) == pytest.approx((1 - 0.32, 0.5, math.sqrt(0.64)))
    assert written(found.steps[1], 0.5) == pytest.approx((1 - 0.32, 0.5 + 0.16, math.sqrt(0.32)))


def test_ode_and_cps_by_hand():
    assert [written(step, t) for step, t in zip(flow("ode", 2).steps, (0.0, 0.5), strict=True)] == [(1, 0.5, 0)] * 2
    kept = math.cos(0.4 * math.pi) * 0.5
    first, last = flow("cps", 2).steps
    assert written(first, 0.0) == pytest.approx((kept + 0.5, 0.5, math.sin(0.4 * math.pi) * 0.5))
    assert written(last, 0.5) == pytest.approx((1.0, 0.5, 0.0)), "the token that is expected"


def test_a_time_shift_moves_all_times_and_the_rest_of_em_stays():
    """s(t) = t / (3.2 - 2.2 t): 0.96 becomes 0.882353, and the last step still goes 0.04 of the way."""
    found = flow("em", 3, 3.2)
    assert found.times == pytest.approx((0.0, 0.48 / (3.2 - 2.2 * 0.48), 0.882352941))
    assert written(found.steps[2], found.times[2])[1] == pytest.approx(0.04)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("count", [1, 2, 28, 1000])
def test_every_number_of_steps_is_finite(solver, count):
    found = flow(solver, count, 0.3)
    numbers = [number for step in found.steps for number in step[:4]]
    assert len(found.steps) == len(found.times) == count and all(map(math.isfinite, numbers))
    noisy = sum(step.log_std_middle > -math.inf for step in found.steps)
    assert noisy == {"em": count - 1, "ode": 0, "cps": count - 1}.get(solver, count)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [5, 5, 5, 5]), ("falling", [5, 4, 3, 2]), ("rising", [2.5, 2.5, 3, 4])]
)
def test_guidance_schedules_by_hand(schedule, expected):
    assert [scale_at(5.0, schedule, done, 4) for done in range(4)] == expected
    assert [scale_at(1.0, schedule, done, 4) for done in range(4)] == [1.0] * 4


def test_the_order_of_the_numbers_of_a_token_by_hand():
    """By channel, then by row and column of the patch."""
    latents = torch.arange(2 * 4 * 6).view(1, 2, 4, 6)
    tokens = to_tokens(latents, 2)
    assert tokens[0, 1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33] and tokens.shape == (1, 6, 8)
    assert torch.equal(to_latents(tokens, (2, 3), 2), latents)


# ------------------------------------------------------------------------------------------------ what changes nothing


def test_images_are_equal_alone_and_in_a_batch(model):
    """Prompts of different lengths, which are padded."""
    together = draw(model, FEW, (0, 1, 2), PROMPTS).latents
    for i in range(3):
        close(draw(model, FEW, (i,), PROMPTS[i : i + 1]).latents[0], together[i])
    assert not torch.equal(together[0], together[2])


def test_the_steps_of_the_last_token_at_the_number_of_the_first_are_off(model):
    expected = draw(model)
    for end in (4, 9):
        found = draw(model, replace(FEW, diffusion_steps_end=end))
        assert torch.equal(found.latents, expected.latents) and found.report.counts == expected.report.counts
    falling = draw(model, replace(FEW, diffusion_steps_end=1)).report.counts["head_calls"]
    assert falling == 4 + 3 + 3 + 2 + 2 + 2 + 1 + 1 + 1


def test_modulations_in_advance_equal_those_of_every_step(model, monkeypatch):
    expected = draw(model).latents
    made = []
    head = type(model.net.head)
    plain = head.modulations

    def counted(self, embedding, *blocks):
        made.append(len(embedding))
        return plain(self, embedding, *blocks)

    monkeypatch.setattr(head, "modulations", counted)
    assert torch.equal(draw(model).latents, expected)
    assert made == [4] * 9, "all four steps of a token in one product"

    made.clear()
    monkeypatch.setattr(module, "MODULATION_BUDGET", 1)
    close(draw(model).latents, expected)
    assert made == [1] * 36


def test_without_guidance_the_negative_rows_are_not_computed(model):
    found = draw(model, replace(FEW, cfg=1.0), (0, 1), ("a boat", "a boat"))
    assert found.report.counts["head_rows"] == 2 * 9 * 4
    assert draw(model, FEW, (0, 1), ("a boat", "a boat")).report.counts["head_rows"] == 2 * 2 * 9 * 4


@pytest.mark.parametrize("branches", [2, 3])
def test_guidance_with_a_scale_of_one_is_none(monkeypatch, branches):
    """The negative rows computed after all, and also those of the image with the negative text."""
    model = tiny_nextstep(EDITOR)
    condition = edits_of((0,))
    plain = draw(model, replace(FEW, cfg=1.0), condition=condition)

    def scale(cfg, *_):
        return 1.0

    monkeypatch.setattr(canvases, "scale_at", scale)
    found = draw(model, replace(FEW, cfg=2.0, cfg_img=1.0 if branches == 2 else 2.0), condition=condition)
    assert (plain.report.counts["head_rows"], found.report.counts["head_rows"]) == (9 * 4, branches * 9 * 4)
    close(found.latents, plain.latents)


def test_without_guidance_its_schedule_changes_nothing(model):
    plain = draw(model, replace(FEW, cfg=1.0))
    for schedule in ("falling", "rising"):
        assert torch.equal(draw(model, replace(FEW, cfg=1.0, cfg_schedule=schedule)).latents, plain.latents)


def test_one_scale_of_both_guidances_is_guidance_with_two_branches():
    model = tiny_nextstep(EDITOR)
    condition = edits_of((0,))
    three = draw(model, replace(FEW, cfg=2.0, cfg_img=2.0), condition=condition)
    two = draw(model, replace(FEW, cfg=2.0, cfg_img=1.0), condition=condition)
    assert three.report.counts["head_rows"] == 3 * 9 * 4 and two.report.counts["head_rows"] == 2 * 9 * 4
    close(three.latents, two.latents)
    other = draw(model, replace(FEW, cfg=2.0, cfg_img=1.5), condition=condition)
    assert (other.latents - two.latents).abs().max() > 0.01


def test_steps_without_noise_are_the_ode(model, monkeypatch):
    """em0's drift with its noise at zero, and the score at zero too, is plain Euler."""
    monkeypatch.setattr("fastar_nodes.samplers.nextstep.flow.NOISE_LEVEL", 0.0)
    flow.cache_clear()
    try:
        silent = draw(model, replace(FEW, solver="sde")).latents
    finally:
        flow.cache_clear()
    close(silent, draw(model, replace(FEW, solver="ode")).latents)


def test_a_run_without_noise_follows_the_means(model):
    """With all noise of the steps at zero, em0 equals its own table with no std."""

    class Silent(PairedNoise):
        def step_noise(self, stream, count, tokens, channels):
            return super().step_noise(stream, count, tokens, channels) * 0

    condition = PromptCondition(("a boat",))
    silent = finish(nextstep(model, condition, FEW, Silent(5, (0,)))).latents
    made = module.flow("em0", 4)
    means = replace(made, steps=tuple(step._replace(log_std_middle=-math.inf) for step in made.steps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "flow", lambda *_: means)
        assert torch.equal(draw(model, texts=("a boat",)).latents, silent)


@pytest.mark.parametrize("settings", [{}, {"cfg": 1.0}, {"solver": "em"}, {"solver": "cps"}], ids=str)
def test_windows_of_one_step_are_plain(model, settings):
    few = replace(FEW, **settings)
    plain = draw(model, few)
    found = draw(model, replace(few, speculation=1))
    assert torch.equal(found.latents, plain.latents) and found.report.counts == plain.report.counts
    assert not torch.equal(draw(model, replace(few, speculation=3)).latents, plain.latents)


def test_speculation_does_nothing_with_a_solver_without_noise(model):
    ode = replace(FEW, solver="ode")
    assert torch.equal(draw(model, replace(ode, speculation=8)).latents, draw(model, ode).latents)


@pytest.mark.parametrize(("solver", "verified"), [("em", 3), ("em0", 4), ("sde", 4), ("cps", 3)])
@pytest.mark.parametrize("window", [2, 8])
def test_speculation_verifies_every_step_that_adds_noise(model, solver, verified, window):
    """A call brings a token on by its accepted steps and one that is put right, or to the end of its window."""
    counts = draw(model, replace(FEW, cfg=1.0, solver=solver, speculation=window)).report.counts
    assert 9 * 4 - counts["accepted_steps"] <= counts["head_calls"] <= 9 * 4
    assert 0 < counts["accepted_steps"] <= counts["drafted_steps"]
    assert counts["drafted_steps"] >= 9 * verified


def test_fewer_steps_take_entry_k_t_over_s_of_the_noise(model):
    """Of four steps a token of two takes the entries 0 and 2: with others zero nothing changes."""

    class Noise(PairedNoise):
        def step_noise(self, stream, count, tokens, channels):
            noise = super().step_noise(stream, count, tokens, channels)
            noise[:, 1, -1] = noise[:, 3, -1] = 0
            return noise

    settings = replace(FEW, diffusion_steps_end=2)
    condition = PromptCondition(("a boat",))
    plain, spoilt = (
        finish(nextstep(model, condition, settings, noise(5, (0,)))).latents for noise in (PairedNoise, Noise)
    )
    assert torch.equal(plain, spoilt)


def test_normalised_tokens_are_decoded_and_fed(model):
    latents = draw(model, replace(FEW, use_norm=True)).latents
    tokens = to_tokens(latents, 2)
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(1, 9), atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens.var(-1, correction=0), torch.ones(1, 9), atol=1e-3, rtol=0)


# ------------------------------------------------------------------------------------------------ edits of a part


def start_of(model, images=1, seed=3):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(images, 4, 6, 6, generator=g)


def test_an_edit_of_everything_is_a_new_image(model):
    edit = Edit(start_of(model), torch.ones(1, 8, 8))
    found, plain = draw(model, edit=edit), draw(model)
    assert torch.equal(found.latents, plain.latents) and found.report.counts == plain.report.counts


def test_tokens_outside_the_mask_are_kept_and_fed_together(model):
    mask = torch.zeros(1, 3, 3)
    mask[:, 2, 1] = 1
    start = start_of(model)
    found = draw(model, edit=Edit(start, mask))
    kept = mask.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None].expand_as(start) == 0
    assert torch.equal(found.latents[kept], start[kept]) and not torch.equal(found.latents, start)
    counts = found.report.counts
    assert counts["transformer_passes"] == 2 and counts["head_calls"] == 4, "the prompt, then seven tokens at once"
    assert (found.report.maps["outcome"][0] == 6).sum() == 8


def test_an_edit_of_the_last_tokens_equals_the_image_that_it_started_from(model):
    plain = draw(model).latents
    mask = torch.zeros(1, 3, 3)
    mask[:, 2, 1:] = 1
    start = plain.clone()
    start[..., 4:, 2:] += 1
    close(draw(model, edit=Edit(start, mask)).latents, plain)


def test_an_edited_image_does_not_depend_on_its_batch(model):
    masks = torch.zeros(2, 3, 3)
    masks[0, 0, 0] = masks[0, 2] = masks[1, 1] = 1
    edit = Edit(start_of(model, 2), masks)
    together = draw(model, FEW, (0, 1), PROMPTS[:2], edit=edit)
    for i in (0, 1):
        alone = draw(model, FEW, (i,), PROMPTS[i : i + 1], edit=edit.for_images([i], 2))
        close(alone.latents[0], together.latents[i])
        assert alone.report.edits == together.report.edits[i : i + 1]


def test_one_step_of_em_is_refused_because_it_would_return_noise(model):
    for name in ("diffusion_steps", "diffusion_steps_end"):
        with pytest.raises(UserError, match=f"^{name}: with a single step, the solver em returns noise; use"):
            draw(model, replace(FEW, solver="em", **{name: 1}))
        with pytest.raises(UserError, match=f"^{name}: with a single step"):
            check(model, replace(FEW, solver="em", **{name: 1}))  # before anything is computed
    draw(model, replace(FEW, solver="em0", diffusion_steps=1))


def test_latents_of_another_size_are_refused_with_the_remedy(model):
    with pytest.raises(UserError, match="^latent_image: .* 8 x 8 pixels, .* 12 x 12; set width to 8 and height to 8"):
        draw(model, edit=Edit(torch.zeros(1, 4, 4, 4), torch.ones(1, 4, 4)))
    with pytest.raises(UserError, match=r"^latent_image: it has the shape \[1, 3, 6, 6\], but tiny generates latents"):
        draw(model, edit=Edit(torch.zeros(1, 3, 6, 6), torch.ones(1, 4, 4)))
    with pytest.raises(UserError, match="^mask: it is empty"):
        draw(model, edit=Edit(start_of(model), torch.zeros(1, 3, 3)))


# ------------------------------------------------------------------------------------------------ images to change


def test_an_edited_source_does_not_depend_on_its_batch():
    model = tiny_nextstep(EDITOR)
    settings = replace(FEW, cfg_img=1.5)
    together = draw(model, settings, (0, 1, 2), condition=edits_of()).latents
    for i in range(3):
        close(draw(model, settings, (i,), condition=edits_of((i,))).latents[0], together[i])


def test_the_source_may_have_another_size_than_the_result():
    model = tiny_nextstep(EDITOR)
    found = draw(model, replace(FEW, width=16, height=8), condition=edits_of((0,)))
    assert found.latents.shape == (1, 4, 4, 8)


def test_models_that_were_not_trained_to_edit_are_refused():
    with pytest.raises(
        UserError, match="^condition: NextStep-1.1 was not trained to edit .* load NextStep-1-Large-Edit"
    ):
        draw(tiny_nextstep("NextStep-1.1"), condition=edits_of((0,)))
    report = draw(tiny_nextstep("my own"), condition=edits_of((0,))).report
    assert "my own is not known to have been trained to edit" in report.note


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NextStep-1-Large-Edit", True),
        ("nextstep-1-large-edit", True),
        ("NextStep-1.1", False),
        ("NextStep-1-Large", False),
        ("NextStep-1.1-Pretrain-256px", False),
        ("model", None),
    ],
)
def test_what_a_name_says_about_edits(name, known):
    assert tiny_nextstep(name).edits is known


def test_a_scale_of_an_image_that_is_not_there_is_said(model):
    report = draw(model, replace(FEW, cfg_img=2.0)).report
    assert "cfg_img had no effect" in report.note
    assert "cfg_img" not in draw(model).report.note


# ------------------------------------------------------------------------------------------------ sizes, refusals


def test_any_size_of_whole_tokens_of_at_most_1024():
    model = tiny_nextstep()
    assert draw(model, replace(FEW, width=16, height=4)).latents.shape == (1, 4, 2, 8)
    with pytest.raises(UserError, match="^width: 10 x 4 cannot be divided into tokens of 4 x 4 pixels"):
        draw(model, replace(FEW, width=10, height=4))
    with pytest.raises(UserError, match="^width: 132 x 128 has 1056 tokens, .* at most 1024"):
        draw(model, replace(FEW, width=132, height=128))


def test_published_sizes():
    whole = replace(tiny_nextstep("NextStep-1.1", 32), stride=16)
    assert whole.usual_size == (512, 512) and len(whole.sizes) == 17 and whole.sizes[0] == (512, 512)
    assert {(256, 1024), (1024, 256), (480, 544)} <= set(whole.sizes)
    assert whole.grid(None, None) == (32, 32) and whole.grid(256, 1024) == (16, 64)
    assert replace(whole, name="NextStep-1-Large").sizes == ((512, 512),)
    small = replace(tiny_nextstep("NextStep-1.1-Pretrain-256px", 16), stride=16)
    assert small.usual_size == (256, 256) and (128, 512) in small.sizes


def test_a_large_model_is_refused_on_a_cpu(model, monkeypatch):
    weights = sum(p.numel() for p in model.net.layers.parameters())
    monkeypatch.setattr(canvases, "LEAST_WEIGHTS_FOR_GPU_ONLY", weights)
    with pytest.raises(UserError, match="^model: tiny has .* billion weights, .*; use a GPU. There is no smaller"):
        draw(model)
    monkeypatch.setattr(canvases, "LEAST_WEIGHTS_FOR_GPU_ONLY", weights + 1)
    draw(model)


def test_conditions_that_it_does_not_read_are_refused(model):
    with pytest.raises(UserError, match="^condition: tiny reads prompts, but the condition holds class labels"):
        draw(model, condition=from_ids((1,)))
    with pytest.raises(UserError, match="^condition: it holds no prompt"):
        draw(model, images=(), texts=())
    with pytest.raises(UserError, match="^text: .* tokens .* reads at most 1024"):
        draw(model, texts=("a red house " * 200,))
    with pytest.raises(UserError, match="^negative: .* reads at most 1024"):
        draw(model, condition=PromptCondition(("a boat",), "a red house " * 200))


def test_a_prompt_that_leaves_no_room_is_refused(model):
    net = type(model.net).__new__(type(model.net))
    net.__dict__ = {**model.net.__dict__, "config": replace(model.net.config, positions=12)}
    with pytest.raises(UserError, match="^width: 9 image tokens after a prompt .* the 12 positions of tiny"):
        draw(replace(model, net=net))


def test_a_negative_text_changes_the_image_and_the_usual_one_is_empty(model):
    plain = draw(model, condition=PromptCondition(("a boat",))).latents
    assert torch.equal(draw(model, condition=PromptCondition(("a boat",), "")).latents, plain)
    assert not torch.equal(draw(model, condition=PromptCondition(("a boat",), "blurry")).latents, plain)
