"""How many AR steps CSpD drafts, what it keeps and what it counts, by hand."""

from __future__ import annotations

import pytest
import torch
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.loop import FullTransformer
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import CSpDSettings, MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from tiny_hybrids import tiny_hybrid


class Wrong(FullTransformer):
    """The draft's transformer: right but for some AR steps, whose drafts are rejected. Records the AR steps it is asked for."""

    def __init__(self, *steps: int):
        super().__init__()
        self.steps, self.asked = steps, list[int]()

    def __call__(self, run, step, wanted):
        out = super().__call__(run, step, wanted)
        self.asked.append(step)
        if step in self.steps:
            out[0].add_(torch.randn(out[0].shape, generator=torch.Generator().manual_seed(step)))
        return out


def drafted(model, draft: Wrong, **changes) -> tuple[list[int], int]:
    """AR steps that were drafted, by a draft model that is the target, and how many passes the target made."""
    few = {"ar_steps": 16, "diffusion_steps": 4, "cfg": 1.0, "draft_length": 8, "prefill_ratio": 0.0, **changes}
    noise = PairedNoise(5, (0,))
    done = finish(cspd(model, from_ids((1,)), CSpDSettings(**few), noise, draft=model, draft_transformer=draft))
    counts = done.report.counts
    return draft.asked, counts["transformer_passes"] - counts["draft_passes"]


def test_the_next_segment_is_twice_as_long_as_what_was_kept(model):
    """AR step 0 is the target's. Of 1 .. 8 the second is wrong: one was kept, so two are drafted next, then four, then eight.
    There the first is wrong: nothing was kept, and one is drafted next."""
    segments = (
        [1, 2, 3, 4, 5, 6, 7, 8],
        [3, 4],
        [5, 6, 7, 8],
        [9, 10, 11, 12, 13, 14, 15],
        [10],
        [11, 12],
        [13, 14, 15],
    )
    assert drafted(model, Wrong(2, 9)) == (sum(segments, []), 1 + len(segments))


def test_segments_are_never_longer_than_the_setting(model):
    """Three of four were kept: six would follow, and four are drafted."""
    segments = ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15])
    assert drafted(model, Wrong(4), draft_length=4) == (sum(segments, []), 1 + len(segments))


@pytest.mark.parametrize(("ratio", "first"), [(0.0, 1), (0.17, 3), (0.25, 5), (0.9, 15)])
def test_the_target_makes_the_first_steps_alone(model, ratio, first):
    """AR steps s <= S ratio, of 16."""
    assert drafted(model, Wrong(), prefill_ratio=ratio)[0][0] == first


def test_accepted_drafts_stay_as_they_are(model):
    """Mode ``published`` with the target as its own draft, from the same noise: the ratio is 1, and all tokens are plain MAR's."""
    few, noise, labels = {"ar_steps": 4, "diffusion_steps": 4, "cfg": 2.0}, PairedNoise(5, (0, 1)), from_ids((1, 2))
    settings = CSpDSettings(**few, mode="published", cfg_schedule="constant", draft_length=1, prefill_ratio=0.0)
    made = finish(cspd(model, labels, settings, noise, draft=model))
    plain = finish(mar(model, labels, MARSettings(**few, cfg_schedule="constant"), noise))
    assert made.report.counts["rejected"] == 0 < made.report.counts["accepted"]
    torch.testing.assert_close(made.latents, plain.latents, rtol=1e-4, atol=1e-4)


def test_the_rows_of_both_models_are_counted():
    """Every prompt is read by each of them, and all rows of a transformer are the encoder's, the language model's or the decoder's."""
    target, draft, prompt = tiny_hybrid(), tiny_hybrid(1), PromptCondition(("a boat",))
    settings = CSpDSettings(ar_steps=4, diffusion_steps=4, cfg=1.0, draft_length=2, prefill_ratio=0.0)
    counts = finish(cspd(target, prompt, settings, PairedNoise(5, (0,)), draft=draft)).report.counts
    assert counts["prompt_rows"] == 2 * len(target.prompt("a boat")) and counts["draft_passes"]
    assert counts["transformer_tokens"] == sum(counts[f"{part}_rows"] for part in ("encoder", "llm", "decoder"))
