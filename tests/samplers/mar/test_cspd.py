"""CSpD: what is accepted, how many AR steps are drafted, and
what is counted. Its distribution: ``test_paired_lossless.py``.
"""

import copy
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.networks.mar import MARModel
from fastar_nodes.reports.record import ACCEPTED, PLAIN, REJECTED
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.cspd.settings import CSpDSettings
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.prepare import mar_canvas
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.mar.transformer import FullTransformer
from fastar_nodes.samplers.noise import PairedNoise
from tiny_hybrids import tiny_hybrid
from tiny_models import tiny_mar, toy_mar
from toy_models import ManyImages

FEW = {"steps": 6, "diffusion_steps": 8, "cfg": 2.0}
LABELS, NOISE = from_ids((1, 4, 0)), PairedNoise(5, (0, 1, 2))
L = "lossless"


@pytest.fixture(scope="module")
def other() -> MARModel:
    return tiny_mar(1)


def run(target, draft, make_transformer=FullTransformer, labels=LABELS, noise=NOISE, **changes):
    made = CSpDSettings(**{**FEW, "mode": L, "draft_length": 3, "prefill_ratio": 0.0, **changes})
    return finish(cspd(target, labels, made, noise, make_transformer, draft=draft))


def nearly(model: MARModel, amount: float) -> MARModel:
    """The model with noise on its weights."""
    g, net = torch.Generator().manual_seed(9), copy.deepcopy(model.net)
    for p in net.parameters():
        p.add_(amount * p.abs().mean() * torch.randn(p.shape, generator=g))
    return dataclasses.replace(model, net=net)


@pytest.mark.parametrize("mode", ["published", "paper"])
def test_the_target_speculates_in_lossless_only(model, other, mode):
    told = f"^speculation: 4 .* {mode}, .* lossless"
    with pytest.raises(UserError, match=told):
        run(model, other, mode=mode, speculation=4)
    for name, about in (("cspd", {"steps": 4}), ("cspd+lazymar", {"steps": 4, "refresh_period": 1})):
        entry = SAMPLERS[name]
        with pytest.raises(UserError, match=told):
            entry.check(model, entry.settings(**about, mode=mode, speculation=4))

        # 1 drafts nothing; the other is the remedy.
        entry.check(model, entry.settings(**about, mode=mode, speculation=1))
        entry.check(model, entry.settings(**about, mode="lossless", speculation=4))


@pytest.mark.parametrize("mode", [L, "paper", "published"])
@pytest.mark.fast_cases(1)
def test_a_draft_starts_where_the_target_does(model, mode):
    """Whatever the draft's file says; here it is the target itself, so every draft of a single AR step is accepted."""
    target, draft = (dataclasses.replace(model, t_max=t) for t in (999, 950))
    few = {"diffusion_steps": 40, "cfg_schedule": "constant", "mode": mode, "draft_length": 1}
    found, same = run(target, draft, **few), run(target, target, **few)
    assert torch.equal(found.latents, same.latents) and found.report.counts == same.report.counts
    assert mode == "paper" or found.report.counts["rejected"] == 0
    said = "starts at timestep 999, as the target does, but the draft model's file says 950"
    assert said in found.report.note
    assert not same.report.note and not run(target, draft, **few, t_max=950).report.note
    assert not run(draft, target, **few).report.note, "a lower start than its own needs no remark"


def test_steps_that_the_target_drafts_for_itself_are_not_counted(model, other):
    """In mode ``lossless``: acceptance is the draft model's."""
    both, alone = (run(other, model, speculation=s, prefill_ratio=0.0, draft_length=1).report.counts for s in (4, 0))
    assert both["drafted_steps"] == alone["drafted_steps"] == 3 * 15 * 8
    assert both["head_rows"] > alone["head_rows"] and both["accepted_steps"] < both["drafted_steps"] / 2


@pytest.mark.parametrize(("length", "speculation", "mode"), [(1, 0, L), (3, 4, L), (50, 0, L), (1, 0, "published")])
@pytest.mark.fast_cases("3-4-lossless", "1-0-published")
def test_a_draft_that_is_the_target_is_always_accepted(model, length, speculation, mode):
    """In mode ``published`` the ratio is 1 where the guidance is constant; drafts stay as they are."""
    same = {"cfg_schedule": "constant"} if mode == "published" else {}
    result = run(model, model, draft_length=length, speculation=speculation, mode=mode, **same)
    assert result.report.counts["rejected"] == 0 and result.report.counts["accepted"] == 3 * 15
    if mode == L:  # all 8 diffusion steps of each token; the target's own speculation is not among them
        assert result.report.counts["drafted_steps"] == result.report.counts["accepted_steps"] == 3 * 15 * 8
    if not speculation:
        plain = finish(mar(model, LABELS, MARSettings(**FEW, **same), NOISE)).latents
        torch.testing.assert_close(result.latents, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))
    segments = {1: 5, 3: 2, 50: 1}[length]
    assert result.report.counts["transformer_passes"] - result.report.counts["draft_passes"] == 1 + segments


def test_what_comes_out_does_not_depend_on_the_draft_length(model):
    draft = nearly(model, 0.003)
    one, three, all_of_it = (run(model, draft, draft_length=n) for n in (1, 3, 50))
    scale = float(one.latents.abs().max())
    for result in (three, all_of_it):
        torch.testing.assert_close(result.latents, one.latents, rtol=1e-3, atol=1e-4 * scale)
        assert np.array_equal(result.report.maps["outcome"], one.report.maps["outcome"])
        for name in ("accepted", "rejected"):
            assert result.report.counts[name] == one.report.counts[name]


@pytest.mark.parametrize("mode", ["lossless", "published", "paper"])
@pytest.mark.parametrize("ratio", [0.0, 0.17, 0.2, 0.5, 0.9])
@pytest.mark.fast_cases("0.17-lossless", "0.2-published", "0.2-paper")
def test_the_pre_fill_is_the_targets(model, other, mode, ratio):
    """AR steps 0 .. S ratio, as the reference."""
    result = run(model, other, mode=mode, prefill_ratio=ratio)
    plain = finish(mar(model, LABELS, MARSettings(**FEW), NOISE))
    first = torch.from_numpy(result.report.maps["step"] <= 6 * ratio)[:, None].expand_as(plain.latents)
    assert torch.equal(result.latents[first], plain.latents[first])
    judged = result.report.maps["outcome"] != PLAIN
    assert np.array_equal(judged, result.report.maps["step"] > 6 * ratio)
    assert set(np.unique(result.report.maps["outcome"])) <= {PLAIN, ACCEPTED, REJECTED}


def test_without_noise_the_draft_must_be_right(model, other):
    plain = finish(mar(model, LABELS, MARSettings(**FEW, temperature=0.0), NOISE))
    wrong, right = run(model, other, temperature=0.0), run(model, model, temperature=0.0)
    scale = float(plain.latents.abs().max())
    torch.testing.assert_close(wrong.latents, plain.latents, rtol=1e-3, atol=1e-4 * scale)
    torch.testing.assert_close(right.latents, plain.latents, rtol=1e-3, atol=1e-4 * scale)
    assert wrong.report.acceptance == 0 and right.report.acceptance == 1
    assert wrong.report.counts["accepted_steps"] == 0


class Wrong(FullTransformer):
    """The draft's transformer: right but for the AR steps ``wrong``, whose
    drafts are rejected. Records the AR steps it is asked for.
    """

    def __init__(self, canvas, wrong: tuple[int, ...], asked: list[int]):
        super().__init__(canvas)
        self.wrong, self.asked = wrong, asked

    def __call__(self, step, wanted):
        out = super().__call__(step, wanted)
        self.asked.append(step)
        if step in self.wrong:
            out[0].add_(torch.randn(out[0].shape, generator=torch.Generator().manual_seed(step)))
        return out


def drafted(model, *wrong: int, **changes) -> tuple[list[int], int]:
    """AR steps that were drafted, by a draft model that is the target but at AR steps ``wrong``, and how many passes
    the target made.
    """
    asked: list[int] = []
    look = partial(Wrong, wrong=wrong, asked=asked)
    few = {"steps": 16, "diffusion_steps": 4, "cfg": 1.0, "draft_length": 8, "prefill_ratio": 0.0, "mode": L, **changes}
    noise = PairedNoise(5, (0,))
    done = finish(cspd(model, from_ids((1,)), CSpDSettings(**few), noise, draft=model, make_draft_transformer=look))
    counts = done.report.counts
    return asked, counts["transformer_passes"] - counts["draft_passes"]


def test_the_next_segment_is_twice_as_long_as_what_was_kept(model):
    """AR step 0 is the target's. Of 1 .. 8 the second is wrong: one was kept, so two are drafted next, then four, then
    eight. There the first is wrong: nothing was kept, and one is drafted next.
    """
    segments = [[*range(a, b)] for a, b in ((1, 9), (3, 5), (5, 9), (9, 16), (10, 11), (11, 13), (13, 16))]
    assert drafted(model, 2, 9) == (sum(segments, []), 1 + len(segments))


def test_segments_are_never_longer_than_the_setting(model):
    """Three of four were kept: six would follow, and four are drafted."""
    segments = ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15])
    assert drafted(model, 4, draft_length=4) == (sum(segments, []), 1 + len(segments))


class Remembers(FullTransformer):
    """A transformer that verifies step by step, as one with a cache does: it must see final tokens only, in order."""

    allows_different_steps = False

    def __init__(self, canvas, asked):
        super().__init__(canvas)
        self.asked = asked

    def __call__(self, step, wanted):
        tokens = self.canvas.values
        known = self.canvas.order.decided_before(step)[..., None].expand(-1, -1, tokens.shape[2])
        self.asked.append((step, tokens.gather(1, known)))
        return super().__call__(step, wanted)

    def discard_features(self):
        raise AssertionError("the target's tokens are final")


@pytest.mark.parametrize("amount", [0.0, 0.003, 0.5])
@pytest.mark.fast_cases("0.003")
def test_a_transformer_that_remembers_sees_final_tokens_only(model, amount):
    asked, draft = [], nearly(model, amount)
    seen, together = run(model, draft, partial(Remembers, asked=asked)), run(model, draft)
    assert [step for step, _ in asked] == list(range(6))
    scale = float(together.latents.abs().max())
    torch.testing.assert_close(seen.latents, together.latents, rtol=1e-3, atol=1e-4 * scale)
    (step, tokens), final = asked[-1], model.to_tokens(seen.latents)
    known = torch.from_numpy(seen.report.maps["step"]).flatten(1) < step
    torch.testing.assert_close(tokens.flatten(), final[known].flatten(), rtol=1e-4, atol=1e-4 * scale)


def test_published_asks_the_target_once_a_segment(model, other):
    asked = []
    result = run(model, other, partial(Remembers, asked=asked), mode="published", draft_length=2)
    # The pre-fill is step 0; verified after steps 2, 4 and 5, each from what was known at the last verification.
    assert [step for step, _ in asked] == [0, 1, 3, 5]
    assert result.report.counts["transformer_passes"] == 4 + 5 and result.report.counts["draft_passes"] == 5


def test_several_steps_in_one_pass_are_the_steps_one_by_one(model):
    for cfg in (1.0, 2.0):
        canvas = mar_canvas("mar", model, LABELS, MARSettings(**{**FEW, "cfg": cfg}), NOISE, None)
        canvas.values = torch.randn(canvas.values.shape, generator=torch.Generator().manual_seed(1))
        look = FullTransformer(canvas)
        for step, count in ((0, 6), (2, 3), (5, 1)):
            for s, z in zip(range(step, step + count), look.for_ar_steps(range(step, step + count)), strict=True):
                alone = look(s, canvas.order.positions_from(s))
                torch.testing.assert_close(z, alone, rtol=1e-4, atol=1e-5)
                assert len(z) == 1 + (cfg != 1)


def test_drafts_are_forgotten_when_they_were_wrong(model, other):
    told: list[int] = []

    class Cache(FullTransformer):
        def discard_features(self):
            told.append(1)

    for mode, times in (("lossless", 5), ("published", 2), ("paper", 5)):
        told.clear()
        settings = CSpDSettings(**FEW, draft_length=3, prefill_ratio=0.0, mode=mode)
        finish(cspd(model, LABELS, settings, NOISE, draft=other, make_draft_transformer=Cache))
        assert len(told) == times


def test_the_rows_of_both_models_are_counted():
    """Every prompt is read by each of them, and all rows of a
    transformer are the encoder's, the language model's or the decoder's.
    """
    target, draft, prompt = tiny_hybrid(), tiny_hybrid(1), PromptCondition(("a boat",))
    settings = CSpDSettings(steps=4, diffusion_steps=4, cfg=1.0, draft_length=2, prefill_ratio=0.0)
    counts = finish(cspd(target, prompt, settings, PairedNoise(5, (0,)), draft=draft)).report.counts
    assert counts["prompt_rows"] == 2 * len(target.prompt("a boat")) and counts["draft_passes"]
    assert counts["transformer_tokens"] == sum(counts[f"{part}_rows"] for part in ("encoder", "llm", "decoder"))


def test_shared_noise_accepts_more():
    """The paper's table 3."""
    labels, noise = from_ids([1] * 50), ManyImages("shared", 50)
    on, off = (
        run(toy_mar(), toy_mar(off=0.05), labels=labels, noise=noise, mode="published", alignment=a, steps=4)
        for a in (True, False)
    )
    assert on.report.acceptance > 1.5 * off.report.acceptance


def test_one_diffusion_step_is_published_without_extreme_tokens(model, other):
    """With logits around 2, as trained heads have them at t = 0, the std is about exp(-5.2 + 2 x 0.16).

    Between variances of 1e-20 and beta it would be about exp(-14 +
    2 x 9), and redraws as large, with errors of rounding to match.
    """
    target, draft = (dataclasses.replace(m, net=copy.deepcopy(m.net)) for m in (model, other))
    for m in (target, draft):
        m.net.head.final_layer.linear.bias[4:] += 2
    few = {"mode": "published", "diffusion_steps": 1}
    together = run(target, draft, **few)
    plain = finish(mar(target, LABELS, MARSettings(**{**FEW, "diffusion_steps": 1}), NOISE)).latents
    assert float((together.latents - plain).abs().max()) < 0.2
    for i, label in enumerate((1, 4, 0)):
        alone = run(target, draft, labels=from_ids((label,)), noise=PairedNoise(5, (i,)), **few)
        torch.testing.assert_close(alone.latents, together.latents[i : i + 1], rtol=1e-4, atol=1e-4)
        assert np.array_equal(alone.report.maps["outcome"][0], together.report.maps["outcome"][i])


def test_alignment_is_nothing_to_lossless(model, other):
    plain = run(model, other)
    assert torch.equal(plain.latents, run(model, other, alignment=False).latents)


def changed(model: MARModel, **shape) -> MARModel:
    net = copy.deepcopy(model.net)
    net.config = dataclasses.replace(net.config, **shape)
    return dataclasses.replace(model, net=net)


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (lambda m: changed(m, channels=8), "channels per token \\(8 and 4"),
        (lambda m: changed(m, tokens=64), "tokens \\(64 and 16"),
        (lambda m: changed(m, classes=1000), "classes \\(1000 and 5"),
        (lambda m: dataclasses.replace(m, latent_scale=0.2325), "latent scale \\(0.2325 and 0.5"),
        (lambda m: dataclasses.replace(m, patch=2), "patch \\(2 and 1"),
        (lambda m: dataclasses.replace(m, label_set="imagenet-1k"), "label set \\(imagenet-1k and picture-book"),
        (lambda m: dataclasses.replace(m, max_beta=0.2), "the largest beta of their diffusion \\(0.2 and 0.999"),
        (lambda m: tiny_hybrid(), "the kind of condition \\(prompt and class"),
    ],
)
def test_a_draft_of_another_kind_is_refused_before_any_work(model, draft, says):
    named = dataclasses.replace(model, label_set="picture-book")
    with pytest.raises(UserError, match=f"^draft: .*{says}.*; use a draft"):
        next(cspd(named, LABELS, CSpDSettings(**FEW), NOISE, draft=draft(model)))
    # A draft without a label set is taken at its word.
    next(cspd(named, LABELS, CSpDSettings(**FEW), NOISE, draft=model))


def test_a_draft_on_another_device_is_refused_for_its_device(model):
    elsewhere = dataclasses.replace(model, net=copy.deepcopy(model.net).to("meta"))
    with pytest.raises(UserError, match="^draft: tiny is on meta, .* cpu; load both models on one device"):
        next(cspd(model, LABELS, CSpDSettings(**FEW), NOISE, draft=elsewhere))


def test_the_report_says_what_was_guessed_of_the_draft_too(model, other):
    guessed = dataclasses.replace(other, assumed="schedule: guessed")
    assert "draft: schedule: guessed" in run(model, guessed).report.note
