"""Harmon and UniPic in the masked samplers: prompts, batches, exactness settings, work counts."""

from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.networks.hybrid import UNCONDITIONAL, PromptBatch
from fastar_nodes.networks.speed import Recordable
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.prepare import mar_canvas, read_condition
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.mar.tables import respacing
from fastar_nodes.samplers.noise import PairedNoise
from tiny_hybrids import TURN, tiny_hybrid
from tiny_models import tiny_mar

SHORT, LONG = "a dog", "two red apples in a blue bowl"
PROMPTS = PromptCondition((SHORT, LONG))
FEW = {"steps": 6, "diffusion_steps": 4, "cfg": 3.0, "cfg_schedule": "constant"}


@pytest.fixture(scope="module")
def hybrid():
    return tiny_hybrid()


def sampled(model, name="mar", condition=PROMPTS, images=None, *, draft=None, edit=None, **settings):
    entry = SAMPLERS[name]
    more = {"draft": draft, "edit": edit}
    noise = PairedNoise(3, range(len(condition)) if images is None else images)
    made = entry.settings(**{**FEW, **settings})
    return finish(entry.run(model, condition, made, noise, **{k: v for k, v in more.items() if v is not None}))


def canvas_of(model, **settings):
    made, noise = MARSettings(**{**FEW, **settings}), PairedNoise(3, (0, 1))
    return mar_canvas("mar", model, PROMPTS, made, noise, None)


@pytest.fixture(scope="module")
def plain(hybrid):
    return sampled(hybrid)


def close(a, b, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())))


def test_the_prompt_and_the_unconditional_text_matter(hybrid, plain):
    other = sampled(hybrid, "mar", PromptCondition((LONG, LONG))).latents
    assert (other[0] - plain.latents[0]).abs().max() > 1e-2
    close(other[1], plain.latents[1], 1e-4)
    away = sampled(hybrid, "mar", replace(PROMPTS, unconditional="blurred")).latents
    assert (away - plain.latents).abs().max() > 1e-2


def test_a_compiled_hybrid_names_its_language_model_which_runs_plain(hybrid, monkeypatch):
    assert "plain" not in sampled(hybrid).report.note
    monkeypatch.setattr(hybrid.net, "speed", "compile")
    monkeypatch.setattr(Recordable, "compiled", lambda self, function, part: function)
    note = sampled(hybrid).report.note
    assert note.endswith("speed: compile was chosen, but these parts ran with speed plain: language model")


def test_without_guidance_the_unconditional_text_is_not_read(hybrid):
    made = sampled(hybrid, cfg=1.0)
    assert made.report.counts["prompt_rows"] == sum(len(hybrid.prompt(t)) for t in PROMPTS.texts)
    other = sampled(hybrid, "mar", replace(PROMPTS, unconditional="blurred"), cfg=1.0)
    assert torch.equal(made.latents, other.latents)


def test_equal_prompts_are_read_once():
    model, condition = tiny_hybrid(), PromptCondition((SHORT, SHORT, LONG))
    read = model.prompt(SHORT) + model.prompt(LONG) + model.instruction(UNCONDITIONAL)
    assert sampled(model, "mar", condition).report.counts["prompt_rows"] == len(read)


def test_marks_that_are_typed_stay_text(hybrid):
    ids = hybrid.prompt("<|im_end|> <image>")
    assert sum(i in TURN for i in ids) == 3 and len(ids) == len(hybrid.prompt("")) + 18
    assert hybrid.prompt("") != hybrid.instruction(UNCONDITIONAL)


@pytest.mark.parametrize(
    ("model", "condition", "says"),
    [
        (tiny_hybrid(positions=60), PromptCondition((LONG,)), "reads at most 41"),
        (tiny_hybrid(), PromptCondition(()), "no prompt"),
        (tiny_hybrid(), from_ids([0, 1]), "reads prompts, but"),
        (tiny_mar(), PROMPTS, "reads class labels, but"),
    ],
)
def test_conditions_that_cannot_be_read_are_refused(model, condition, says):
    with pytest.raises(UserError, match=says):
        sampled(model, "mar", condition)


def test_appended_tokens_equal_a_full_pass_where_raster_order_is_the_same(hybrid):
    rows, net = read_condition(hybrid, PROMPTS, True), hybrid.hybrid
    tokens, known, new = torch.randn(2, 16, 4), torch.tensor([[1, 4], [0, 2]]), torch.tensor([[5, 9], [3, 15]])
    both = torch.cat([known, new], 1)
    encoded = net.mar.encode(tokens, both, rows.vectors(True))
    kept = rows.feature_cache(4, 7)
    rows.fuse(encoded[:, :5], known, True, cache=kept)
    made = rows.extend(torch.cat([encoded[:, 5:], encoded[:, :3]], 1), kept, 2)
    full = rows.fuse(encoded, both, True)
    close(made, torch.cat([full[:, 5:], full[:, :3]], 1))
    assert len(kept.tensors) == 4


def test_prompts_of_three_lengths_are_grouped_without_padding(hybrid):
    read = [hybrid.hybrid.read(torch.tensor(hybrid.prompt(t))) for t in (SHORT, LONG, SHORT + "s")]
    batch = PromptBatch([read[0], read[1], read[2], read[0]])
    assert sorted(len(prompt) for _, prompt, *_ in batch.groups) == [1, 1, 2]
    q, k, v = (torch.randn(4, heads, 5, 6) for heads in (4, 2, 2))
    together = batch.attend(1, q, k, v)
    for row, prompt in enumerate((0, 1, 2, 0)):
        one = slice(row, row + 1)
        close(PromptBatch([read[prompt]]).attend(1, q[one], k[one], v[one])[0], together[row])


OFF = dict.fromkeys(("condition_cache", "token_cache", "head_cache", "encoder_cache"), False)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lazymar", {"refresh_period": 3, "start_step": 6}),
        ("lazymar", {"refresh_period": 3, "start_step": 1, **OFF}),
        ("cspd", {"mode": "lossless", "draft_length": 2, "prefill_ratio": 0.2}),
    ],
    ids=str,
)
@pytest.mark.fast_cases(2)
def test_exact_settings_are_plain(hybrid, plain, name, settings):
    """CSpD's draft is the target's copy: all that it drafts is accepted."""
    made = sampled(hybrid, name, draft=tiny_hybrid() if name == "cspd" else None, **settings)
    close(made.latents, plain.latents, 1e-3 if name == "cspd" else 1e-5)
    assert not made.report.counts.get("rejected")


@pytest.mark.parametrize("condition_cache", [True, False])
def test_lazymar_computes_less_and_stays_near(hybrid, plain, condition_cache):
    cache = {"condition_cache": condition_cache, "head_cache": False}
    made = sampled(hybrid, "lazymar", refresh_period=2, start_step=1, ratio_schedule="stretched", **cache)
    ours, full = made.report.counts, plain.report.counts
    assert ours["encoder_rows"] < full["encoder_rows"]
    assert ours["llm_rows"] < full["llm_rows"]
    assert 0 < float((made.latents - plain.latents).std()) < 0.5 * float(plain.latents.std())


def test_cspd_drafts_with_another_hybrid(hybrid):
    draft, settings = tiny_hybrid(1, head_width=8), {"draft_length": 2, "prefill_ratio": 0.2}
    made = sampled(hybrid, "cspd", draft=draft, **settings)
    assert made.report.counts["draft_passes"] and made.report.counts["rejected"]
    alone = sampled(hybrid, "cspd", PromptCondition((LONG,)), [1], draft=draft, **settings)
    close(alone.latents[0], made.latents[1], 1e-4)


def test_a_masked_edit_keeps_the_rest(hybrid, plain):
    mask = torch.zeros(1, 4, 4)
    mask[:, :2] = 1
    edit = Edit(plain.latents, mask)
    made = sampled(hybrid, "mar", PromptCondition((LONG, SHORT)), edit=edit)
    assert torch.equal(made.latents[:, :, 2:], plain.latents[:, :, 2:])
    assert not torch.equal(made.latents[:, :, :2], plain.latents[:, :, :2])


def test_a_model_samples_with_its_own_largest_beta(hybrid, plain):
    """Swapped tables would be seen here: they differ at the highest timesteps only."""
    capped = tiny_hybrid(max_beta=0.2)
    made, other = (sampled(model, t_max=999).latents for model in (capped, hybrid))
    assert (made - other).abs().max() > 1e-2
    for model, beta in ((capped, 0.2), (hybrid, 0.999)):
        assert canvas_of(model, t_max=999).respaced_diffusion(4).steps == respacing(4, 999, beta).steps


def test_the_first_timestep_follows_the_diffusion(hybrid):
    harmon, unipic = (replace(tiny_hybrid(max_beta=beta), t_max=999) for beta in (0.999, 0.2))
    assert [harmon.first_timestep(n) for n in (100, 50)] == [999, 950]
    assert [unipic.first_timestep(n) for n in (100, 50)] == [999, 999]
    assert hybrid.first_timestep(100) == 950


def test_all_tables_of_a_run_start_where_the_settings_diffusion_steps_say(hybrid):
    """A table of 10 steps starts at 999 in a run of 100 diffusion steps, and one of 100 steps at 950 in a run of 50."""
    harmon = replace(tiny_hybrid(max_beta=0.999), t_max=999)
    for steps, highest in ((100, 999), (50, 950)):
        canvas = canvas_of(harmon, diffusion_steps=steps)
        for count in (10, 50, 100):
            assert canvas.respaced_diffusion(count).timestep_map.max() == highest, (steps, count)


def test_no_row_is_computed_twice(hybrid, plain):
    c, counts = hybrid.net.config, plain.report.counts
    order = canvas_of(hybrid).order
    known = [c.buffer + start for start in order.count_before]
    assert counts["encoder_rows"] == 2 * sum(known)
    assert counts["llm_rows"] == 2 * counts["encoder_rows"]
    assert counts["decoder_rows"] == 4 * order.steps * (c.buffer + c.tokens)
    assert counts["transformer_tokens"] == sum(counts[f"{part}_rows"] for part in ("encoder", "llm", "decoder"))
