"""Harmon and UniPic in the masked samplers: prompts, batches, exactness settings, work counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks.hybrid import Hybrid, PromptBatch
from fastar_nodes.model_loaders.networks.prompts import UNCONDITIONAL
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.editing import Edit
from fastar_nodes.samplers.mar.fasthybrid import fasthybrid
from fastar_nodes.samplers.mar.lazymar import LazyTransformer, lazymar
from fastar_nodes.samplers.mar.loop import FullTransformer, begin
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import (
    CacheSettings,
    CSpDSettings,
    FastHybridSettings,
    LazyMARSettings,
    MARSettings,
)
from fastar_nodes.samplers.mar.tables import tables
from fastar_nodes.samplers.noise import PairedNoise
from tiny_hybrids import TURN, tiny_hybrid
from tiny_models import tiny_mar

SHORT, LONG = "a dog", "two red apples in a blue bowl"
PROMPTS = PromptCondition((SHORT, LONG))
FEW = {"ar_steps": 6, "diffusion_steps": 4, "cfg": 3.0, "cfg_schedule": "constant"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hybrid():
    return tiny_hybrid()


def noise(images: int = 2) -> PairedNoise:
    return PairedNoise(3, range(images))


@pytest.fixture(scope="module")
def plain(hybrid):
    return finish(mar(hybrid, PROMPTS, MARSettings(**FEW), noise()))


def close(a, b, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())))


# ------------------------------------------------------------------------------------------------ prompts


def test_an_image_does_not_depend_on_the_prompts_beside_it(hybrid, plain):
    for image, text in enumerate((SHORT, LONG)):
        alone = finish(mar(hybrid, PromptCondition((text,)), MARSettings(**FEW), PairedNoise(3, [image])))
        close(alone.latents[0], plain.latents[image], 1e-4)


def test_the_prompt_and_the_unconditional_text_matter(hybrid, plain):
    other = finish(mar(hybrid, PromptCondition((LONG, LONG)), MARSettings(**FEW), noise()))
    assert (other.latents[0] - plain.latents[0]).abs().max() > 1e-2
    close(other.latents[1], plain.latents[1], 1e-4)
    away = finish(mar(hybrid, replace(PROMPTS, unconditional="blurred"), MARSettings(**FEW), noise()))
    assert (away.latents - plain.latents).abs().max() > 1e-2


def test_without_guidance_the_unconditional_text_is_not_read(hybrid):
    settings = MARSettings(**{**FEW, "cfg": 1.0})
    made = finish(mar(hybrid, PROMPTS, settings, noise()))
    assert made.report.counts["prompt_rows"] == sum(len(hybrid.prompt(t)) for t in PROMPTS.texts)
    other = finish(mar(hybrid, replace(PROMPTS, unconditional="blurred"), settings, noise()))
    assert torch.equal(made.latents, other.latents)


def test_equal_prompts_are_read_once_and_the_unconditional_one_once_per_model():
    model = tiny_hybrid()
    condition = PromptCondition((SHORT, SHORT, LONG))
    read = [finish(mar(model, condition, MARSettings(**FEW), noise(3))).report.counts["prompt_rows"] for _ in range(2)]
    distinct = len(model.prompt(SHORT)) + len(model.prompt(LONG))
    assert read == [distinct + len(model.instruction(UNCONDITIONAL)), distinct]


def test_marks_that_are_typed_stay_text(hybrid):
    ids = hybrid.prompt("<|im_end|> <image>")
    assert sum(i in TURN for i in ids) == 3 and len(ids) == len(hybrid.prompt("")) + 18
    assert hybrid.prompt("") != hybrid.instruction(UNCONDITIONAL)


@pytest.mark.parametrize(
    ("model", "texts", "says"),
    [
        (tiny_hybrid(positions=60), (LONG,), "reads at most 41"),
        (tiny_hybrid(), (5,), "must be text"),
        (tiny_hybrid(), (), "no prompt"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(model, texts, says):
    with pytest.raises(UserError, match=says):
        finish(mar(model, PromptCondition(texts), MARSettings(**FEW), noise(max(1, len(texts)))))


def test_a_condition_of_another_kind_is_refused(hybrid):
    with pytest.raises(UserError, match="conditioned on prompts"):
        finish(mar(hybrid, from_ids([0, 1]), MARSettings(**FEW), noise()))
    with pytest.raises(UserError, match="conditioned on class labels"):
        finish(mar(tiny_mar(), PROMPTS, MARSettings(**FEW), noise()))


# ------------------------------------------------------------------------------------------------ order and positions


def test_training_form_and_sampling_form_agree(hybrid):
    net, condition = hybrid.hybrid, PROMPTS.rows(hybrid, True)
    tokens, known = torch.randn(2, 16, 4), torch.tensor([[1, 4, 9], [0, 2, 15]])
    fused = condition.fuse(net.mar.encode(tokens, known, condition.vectors(True)), known, True)
    z = net.mar.decode(fused, known.repeat(2, 1))
    ids = [hybrid.prompt(SHORT), hybrid.prompt(LONG), *[hybrid.instruction(UNCONDITIONAL)] * 2]
    padded = torch.tensor([i + [7] * (max(map(len, ids)) - len(i)) for i in ids])
    close(net(tokens.repeat(2, 1, 1), known.repeat(2, 1), padded, torch.tensor([len(i) for i in ids])), z)


def test_the_language_model_reads_known_tokens_in_raster_order(hybrid):
    """The MAR does not depend on their order; the language model does, so it sorts them."""
    rows, net = PROMPTS.rows(hybrid, True), hybrid.hybrid
    tokens, known = torch.randn(2, 16, 4), torch.tensor([[9, 1, 4], [15, 0, 2]])

    def z(at):
        return net.mar.decode(rows.fuse(net.mar.encode(tokens, at, rows.vectors(True)), at, True), at.repeat(2, 1))

    close(z(known), z(known.sort(1).values))


def test_several_ar_steps_in_one_pass_are_those_one_by_one(hybrid, monkeypatch):
    run = begin("mar", hybrid, PROMPTS, MARSettings(**FEW), noise(), None, None, FullTransformer())
    run.tokens = torch.randn(run.tokens.shape, generator=torch.Generator().manual_seed(1))
    transformer = FullTransformer()

    def gaps():
        together = next(transformer.verify(run, 1, 4))
        alone = [transformer(run, s, run.plan.ahead(s)) for s in range(1, 5)]
        return max(float((a - b).abs().max()) for a, b in zip(together, alone, strict=True))

    with torch.no_grad():
        assert gaps() < 1e-5
        order = Hybrid.llm_order

        def unsorted(self, known, padding_mask=None):
            if padding_mask is None:
                return order(self, known)
            ranks = torch.arange(known.shape[1]).expand_as(known)
            return order(self, ranks, padding_mask)

        monkeypatch.setattr(Hybrid, "llm_order", unsorted)
        assert gaps() > 1e-3  # too little to be seen in a picture


def test_appended_tokens_equal_a_full_pass_where_raster_order_is_the_same(hybrid):
    rows, net = PROMPTS.rows(hybrid, True), hybrid.hybrid
    tokens, known, new = torch.randn(2, 16, 4), torch.tensor([[1, 4], [0, 2]]), torch.tensor([[5, 9], [3, 15]])
    both = torch.cat([known, new], 1)
    encoded = net.mar.encode(tokens, both, rows.vectors(True))
    _, kept = rows.keep(encoded[:, :5], known, True, 4, 7, True)
    made, places = kept.extend(torch.cat([encoded[:, 5:], encoded[:, :3]], 1), new, 2)
    full = rows.fuse(encoded, both, True)
    close(made, torch.cat([full[:, 5:], full[:, :3]], 1))
    assert places.tolist()[0] == [8, 12, 0, 1, 2] and len(kept.tensors) == 4


def test_prompts_of_three_lengths_are_grouped_without_padding(hybrid):
    read = [hybrid.hybrid.read(torch.tensor(hybrid.prompt(t))) for t in (SHORT, LONG, SHORT + "s")]
    batch = PromptBatch([read[0], read[1], read[2], read[0]])
    assert sorted(len(g.prompt) for g in batch.groups) == [1, 1, 2]
    q, k, v = (torch.randn(4, heads, 5, 6) for heads in (4, 2, 2))
    together = batch.attend(1, q, k, v)
    for row, prompt in enumerate((0, 1, 2, 0)):
        one = slice(row, row + 1)
        close(PromptBatch([read[prompt]]).attend(1, q[one], k[one], v[one])[0], together[row])


# ------------------------------------------------------------------------------------------------ exactness settings


def test_fasthybrid_without_lookahead_is_plain_and_above_one_too(hybrid, plain):
    off = finish(fasthybrid(hybrid, PROMPTS, FastHybridSettings(**FEW, lookahead=0), noise()))
    assert torch.equal(off.latents, plain.latents)
    redone = finish(fasthybrid(hybrid, PROMPTS, FastHybridSettings(**FEW, lookahead=3, threshold=1.01), noise()))
    close(redone.latents, plain.latents)
    fast = finish(fasthybrid(hybrid, PROMPTS, FastHybridSettings(**FEW, lookahead=3, threshold=-1.0), noise()))
    assert fast.report.counts["accepted"] and bool(fast.latents.isfinite().all())


@pytest.mark.parametrize(
    "cache",
    [
        {"refresh_period": 1},
        {"refresh_period": 3, "start_step": 6},
        {
            "refresh_period": 3,
            "start_step": 1,
            "condition_cache": False,
            "token_cache": False,
            "head_cache": False,
            "encoder_cache": False,
        },
    ],
)
def test_lazymar_that_keeps_nothing_is_plain(hybrid, plain, cache):
    close(finish(lazymar(hybrid, PROMPTS, LazyMARSettings(**FEW, **cache), noise())).latents, plain.latents)


@pytest.mark.parametrize("llm_cache", [True, False])
@pytest.mark.parametrize("condition_cache", [True, False])
def test_lazymar_computes_less_and_stays_near(hybrid, plain, llm_cache, condition_cache):
    settings = LazyMARSettings(
        **FEW, refresh_period=2, start_step=1, llm_cache=llm_cache, condition_cache=condition_cache, head_cache=False
    )
    made = finish(lazymar(hybrid, PROMPTS, settings, noise()))
    ours, full = made.report.counts, plain.report.counts
    assert ours["encoder_rows"] < full["encoder_rows"]
    assert (ours["llm_rows"] < full["llm_rows"]) == (llm_cache or condition_cache)
    assert ours["transformer_flops"] < full["transformer_flops"]
    off = float((made.latents - plain.latents).std())
    assert 0 < off < 0.5 * float(plain.latents.std())


def test_fasthybrid_combines_with_lazymar(hybrid):
    settings = FastHybridSettings(**FEW, lookahead=3, threshold=0.5)
    alone = finish(fasthybrid(hybrid, PROMPTS, settings, noise()))
    exact = LazyTransformer(CacheSettings(refresh_period=1))
    close(finish(fasthybrid(hybrid, PROMPTS, settings, noise(), transformer=exact)).latents, alone.latents)


def test_disa_with_all_steps_is_plain(hybrid, plain):
    for end in (0, 4):
        made = finish(mar(hybrid, PROMPTS, MARSettings(**FEW, diffusion_steps_end=end), noise()))
        assert torch.equal(made.latents, plain.latents)
    fewer = finish(mar(hybrid, PROMPTS, MARSettings(**FEW, diffusion_steps_end=2), noise()))
    assert fewer.report.counts["head_calls"] < plain.report.counts["head_calls"]


def test_speculation_takes_prompts(hybrid):
    made = finish(mar(hybrid, PROMPTS, MARSettings(**FEW, speculation=3), noise()))
    assert made.report.counts["drafted_steps"] and bool(made.latents.isfinite().all())


def test_cspd_drafts_with_another_hybrid(hybrid, plain):
    draft = tiny_hybrid(1, head_width=8)
    settings = CSpDSettings(**FEW, draft_length=2, prefill_ratio=0.2)
    made = finish(cspd(hybrid, PROMPTS, settings, noise(), draft=draft))
    assert made.report.counts["draft_passes"] and made.report.counts["rejected"]
    alone = finish(cspd(hybrid, PromptCondition((LONG,)), settings, PairedNoise(3, [1]), draft=draft))
    close(alone.latents[0], made.latents[1], 1e-4)
    itself = finish(cspd(hybrid, PROMPTS, settings, noise(), draft=tiny_hybrid()))
    assert itself.report.counts["rejected"] == 0
    close(itself.latents, plain.latents, 1e-3)


def test_cspd_refuses_a_draft_of_another_diffusion_or_condition(hybrid):
    for draft, says in ((tiny_hybrid(max_beta=0.2), "largest beta"), (tiny_mar(channels=4), "kind of condition")):
        with pytest.raises(UserError, match=says):
            finish(cspd(hybrid, PROMPTS, CSpDSettings(**FEW), noise(), draft=replace(draft, latent_scale=0.5)))


def test_a_masked_edit_keeps_the_rest(hybrid, plain):
    mask = torch.zeros(1, 4, 4)
    mask[:, :2] = 1
    edit = Edit(plain.latents, mask)
    made = finish(mar(hybrid, PromptCondition((LONG, SHORT)), MARSettings(**FEW), noise(), edit=edit))
    assert torch.equal(made.latents[:, :, 2:], plain.latents[:, :, 2:])
    assert not torch.equal(made.latents[:, :, :2], plain.latents[:, :, :2])
    quick = fasthybrid(hybrid, PROMPTS, FastHybridSettings(**FEW, lookahead=2), noise(), edit=edit)
    assert torch.equal(finish(quick).latents[:, :, 2:], plain.latents[:, :, 2:])


# ------------------------------------------------------------------------------------------------ diffusion and work


def test_a_model_samples_with_its_own_largest_beta(hybrid, plain):
    """Swapped tables would be seen here: they differ at the highest timesteps only."""
    capped = tiny_hybrid(max_beta=0.2)
    made = finish(mar(capped, PROMPTS, MARSettings(**FEW, t_max=999), noise()))
    other = finish(mar(hybrid, PROMPTS, MARSettings(**FEW, t_max=999), noise()))
    assert (made.latents - other.latents).abs().max() > 1e-2
    for model, beta in ((capped, 0.2), (hybrid, 0.999)):
        run = begin("mar", model, PROMPTS, MARSettings(**FEW, t_max=999), noise(), None, None, FullTransformer())
        assert torch.equal(run.tables.betas, tables(4, 999, beta).betas)
    assert float(tables(100, 999, 0.2).alphas_cumprod[-1]) == pytest.approx(2.64e-5, rel=1e-2)
    assert float(tables(100, 999).alphas_cumprod[-1]) == pytest.approx(2.43e-9, rel=1e-2)
    assert torch.equal(tables(1000, 990, 0.2).alphas_cumprod, tables(1000, 990).alphas_cumprod)


def test_the_first_timestep_follows_the_diffusion(hybrid):
    harmon, unipic = (replace_t(tiny_hybrid(max_beta=beta)) for beta in (0.999, 0.2))
    assert [harmon.first_timestep(n) for n in (100, 50)] == [999, 950]
    assert [unipic.first_timestep(n) for n in (100, 50)] == [999, 999]
    assert hybrid.first_timestep(100) == 950


def replace_t(model):
    object.__setattr__(model, "t_max", 999)
    return model


def test_no_row_is_computed_twice(hybrid, plain):
    c, counts = hybrid.net.config, plain.report.counts
    plan = begin("mar", hybrid, PROMPTS, MARSettings(**FEW), noise(), None, None, FullTransformer()).plan
    known = [c.buffer + start for start in plan.starts]
    assert counts["encoder_rows"] == 2 * sum(known)
    assert counts["llm_rows"] == 2 * counts["encoder_rows"]
    assert counts["decoder_rows"] == 4 * plan.steps * (c.buffer + c.tokens)
    assert counts["last_rows"] == 4 * c.tokens
    assert counts["transformer_tokens"] == sum(counts[f"{part}_rows"] for part in ("encoder", "llm", "decoder"))
