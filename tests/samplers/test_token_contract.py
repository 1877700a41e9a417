"""What every sampler of discrete tokens must do, whatever it accelerates. A new sampler passes all of it."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports.record import COUNTS
from fastar_nodes.runs.registry import JANUS, SAMPLERS
from fastar_nodes.runs.registry import TAR as TAR_FAMILY
from fastar_nodes.samplers.conditioning import ClassCondition, TextCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.settings import knobs
from fastar_nodes.samplers.tokens.mulosd.drafting import PixelUpSampling
from fastar_nodes.samplers.tokens.mulosd.settings import ONE_BY_ONE, SUFFIX
from fastar_nodes.samplers.tokens.par import ADJACENT, NON_LOCAL
from fastar_nodes.samplers.tokens.tar import TarPromptSettings, tar_prompt
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from fastar_nodes.samplers.tokens.zipar import ZipARSettings, zipar_schedule
from janus_images import edits_of, tiny_editor
from qwen_reference import tiny_tar
from small_settings import TOKENS, small
from stepping import process_state, stepped
from tiny_tokens import VQ
from tokens_reference import KINDS, condition_of, tiny_gpt
from torch.utils._python_dispatch import TorchDispatchMode

FEW = {"cfg": 2.5, "top_k": 8, "top_p": 0.9, "temperature": 0.9}
PLAIN, TRAINED, TEXT, FEATURES = tiny_gpt(), tiny_gpt(special=3, seed=1), tiny_gpt("text"), tiny_gpt("features")
GROUPED = tiny_gpt("class, grouped heads")
LARGE = {kind: tiny_gpt(kind, 6) for kind in KINDS}
SMALL = {(kind, side): tiny_gpt(kind, side, seed=1) for kind in LARGE for side in (2, 3)}
TAR = tiny_tar(penalty=1.3)
EDITOR = tiny_editor()
PROMPTS = ("a red boat", "cat", "a red boat")


@functools.cache
def with_blanks(grid, window):
    # To the cache, all cells are known from the start, so rows attend to slots that no pass has written yet.
    return dataclasses.replace(zipar_schedule(grid, window), known=grid**2)


class ZipARWithBlanks(ZipARSettings):
    """ZipAR as its authors' code, which shows undecided cells as blanks."""

    def schedule(self, model):
        return with_blanks(model.grid, self.window)


def of(name, model, **changes):
    """A registered sampler, a model and settings."""
    return SAMPLERS[name].run, model, SAMPLERS[name].settings(**{**FEW, **small(name), **changes})


def scaled(kind="class", side=3, name="mulosd", **changes):
    """A sampler with a draft of 2 x 2 or 3 x 3 for 6 x 6."""
    return *of(name, LARGE[kind], **changes), SMALL[kind, side]


def usual(name):
    """The cases of a sampler by the models that it is for."""
    entry = SAMPLERS[name]
    if entry.needs_draft:
        return {name: scaled(name=name)}

    found = {name: of(name, TRAINED if name == "par" else PLAIN)}
    if TAR_FAMILY in entry.families:
        found[f"{name}, features"] = of(name, FEATURES)
    if JANUS in entry.families:
        found[f"images, {name}"] = of(name, EDITOR)
    if "parallel" in knobs(entry.settings):
        found[f"window, {name}"] = of(name, found[name][1], parallel=4)
    return found


# Name to sampler, model, settings and draft model: every sampler, and more settings and models of some.
CASES = {name: case for each in TOKENS for name, case in usual(each).items()}
CASES |= {
    "llamagen, no guidance": of("llamagen", PLAIN, cfg=1.0),
    "llamagen, guided at first": of("llamagen", PLAIN, cfg_interval=4),
    "llamagen, text": of("llamagen", TEXT),
    "llamagen, features, grouped heads": of("llamagen", FEATURES),
    "llamagen, by entropy": of("llamagen", PLAIN, entropy_temperature=1.0),
    "par, by entropy": of("par", TRAINED, entropy_temperature=0.7),
    "par, guided at first": of("par", TRAINED, cfg_interval=1),
    "par, text": of("par", tiny_gpt("text", special=3)),
    "par, at once": of("par", TRAINED, sequential_start=False),
    "par, non-local": of("par", PLAIN, grouping=NON_LOCAL),
    "par, adjacent": of("par", PLAIN, grouping=ADJACENT),
    "par, adjacent, at once": of("par", GROUPED, grouping=ADJACENT, sequential_start=False),
    "zipar, blanks": (SAMPLERS["zipar"].run, PLAIN, ZipARWithBlanks(**FEW, window=2)),
    "zipar, guided at first": of("zipar", PLAIN, window=1, cfg_interval=2),
    "zipar, by entropy": of("zipar", PLAIN, window=1, entropy_temperature=1.0),
    "zipar, text": of("zipar", TEXT),
    "zipar, grouped heads": of("zipar", GROUPED, window=3),
    "window, llamagen": of("llamagen", PLAIN, parallel=5),
    "window, guided at first": of("llamagen", GROUPED, cfg_interval=4, parallel=3),
    "window, by entropy": of("llamagen", PLAIN, entropy_temperature=1.0, parallel=5),
    "window, text": of("llamagen", TEXT, parallel=5),
    "window, par, adjacent": of("par", GROUPED, grouping=ADJACENT, parallel=4),
    "window, zipar, text": of("zipar", TEXT, parallel=4),
    "mulosd, rows": scaled("text", draft_rows=1),
    "mulosd, raster": scaled("features", resample_window=0),
    "mulosd, no guidance": scaled(cfg=1.0, draft_rows=2),
    "mulosd, guided at first": scaled(cfg_interval=9),
    "mulosd, by entropy": scaled(entropy_temperature=1.0),
    "mulosd, suffix": scaled("class, grouped heads", repair=SUFFIX),
    "mulosd, one by one": scaled(resample_order=ONE_BY_ONE),
    "mulosd, rate": scaled(acceptance_target=0.7),
    "mulosd, a third": scaled(side=2, draft_rows=1),
    "mulosd, drafted in windows": scaled("features", draft_parallel=3, draft_window=0),
    "mulosd, rows in windows": scaled("text", draft_parallel=4, draft_rows=1),
    "mulosd, exact": scaled(tau=1.01, resample_window=0),
    "images, no guidance": of("llamagen", EDITOR, cfg=1.0),
    "images, guided at first": of("llamagen", EDITOR, cfg_interval=4),
    "images, window": of("llamagen", EDITOR, parallel=5),
    "images, window, guided at first": of("llamagen", EDITOR, cfg_interval=4, parallel=3),
    "images, window, zipar": of("zipar", EDITOR, parallel=3),
    "prompt": (tar_prompt, TAR, TarPromptSettings(top_k=0, top_p=1.0)),
    "prompt, by entropy": (tar_prompt, TAR, TarPromptSettings(top_k=9, entropy_temperature=1.0)),
    "prompt, window": (tar_prompt, TAR, TarPromptSettings(top_k=9, parallel=4)),
}


# A case of every loop, for tests that sample again, which takes long in all cases of FAST together.
FEWER = (*TOKENS, "llamagen, text", "window, llamagen", "prompt", "images, llamagen")
# A case of every path of the code; the others are slow.
FAST = (*FEWER, "llamagen, guided at first", "llamagen, features, grouped heads")
FAST += ("par, non-local", "par, adjacent, at once", "zipar, blanks", "zipar, grouped heads")
FAST += ("window, guided at first", "window, par, adjacent", "window, zipar, text")
FAST += ("mulosd, rows in windows", "prompt, window", "images, guided at first", "images, window, zipar")
pytestmark = pytest.mark.fast_cases(*FAST)


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


def what_of(model, images):
    """The condition of some of three images."""
    if model is TAR:
        return [PROMPTS[i] for i in images]
    return edits_of(images) if model is EDITOR else condition_of(model.net.config.condition, images)


def start(case, images=(0, 1, 2), seed=5, move=lambda m: m, edit=None, **changes):
    """The steps of a case; ``move`` changes every model, ``changes`` the settings."""
    sampler, model, chosen, *drafts = CASES[case]
    chosen = dataclasses.replace(chosen, **changes)
    more = {"draft": move(drafts[0]), "up_sampler": PixelUpSampling(move(VQ))} if drafts else {}
    more |= {"edit": edit} if edit else {}
    return sampler(move(model), what_of(model, images), chosen, TokenNoise(seed, images), **more)


whole = functools.cache(lambda case: stepped(start(case)))


@pytest.mark.fast_cases(*FEWER)
def test_an_image_does_not_depend_on_its_batch(case):
    _, together = whole(case)
    for i in range(3):
        alone = finish(start(case, (i,)))
        assert torch.equal(alone[0][0], together[0][i])
        for name, values in alone.report.maps.items():
            # The passes of MuLo-SD are those of the image that needs most of them.
            assert ("mulosd" in case and name == "step") or np.array_equal(values[0], together.report.maps[name][i])


@pytest.mark.fast_cases(*FEWER)
def test_another_seed_another_picture(case):
    assert not torch.equal(finish(start(case, seed=6))[0], whole(case)[1][0])


@pytest.mark.fast_cases(*FEWER)
def test_repeats_itself_changes_nothing_global_and_never_waits_for_the_device(case):
    model = CASES[case][1]

    before, weights = process_state(), {k: v.clone() for k, v in model.net.state_dict().items()}
    left = start(case)
    step = next(left)
    assert process_state() == before, "in the middle of a run"
    assert not step.latents.is_inference()
    left.close()
    steps = start(case)
    next(steps)

    class NoAnswers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            assert name not in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal"), func
            return func(*args, **(kwargs or {}))

    with NoAnswers():
        again = finish(steps)
    assert process_state() == before
    assert all(torch.equal(v, weights[k]) for k, v in model.net.state_dict().items())
    assert torch.equal(again[0], whole(case)[1][0]) and again.report.counts == whole(case)[1].report.counts


def test_yields_after_every_pass(case):
    seen, result = whole(case)
    maps, done = result.report.maps, [step.done for step in seen]
    assert len(seen) == result.report.counts["transformer_passes"], "one step a pass of either model"
    assert (np.diff(done) > 0).all() and done[-1] == seen[-1].total and all(s.done <= s.total for s in seen)
    codes = result[0].view_as(seen[-1].latents)  # flat after a prompt
    assert torch.equal(seen[-1].latents, codes)
    for k, step in enumerate(seen):
        assert step.latents.shape == codes.shape
        if "mulosd" not in case or "exact" in case:
            decided = torch.from_numpy(maps["step"] <= k).view_as(step.latents)
            assert torch.equal(step.latents, torch.where(decided, codes, 0)), "what is decided stays"
            window = "window" in case
            assert step.done == (int(decided.flatten(1).sum(1).min()) if window else k + 1)
            assert step.total == (result[0][0].numel() if window else len(seen))
            assert torch.equal(step.decided, decided)
        else:
            assert step.total == 2 * codes[0].numel() and not step.latents[~step.decided].any()
    assert seen[-1].decided.all()


def test_report_adds_up(case):
    _, model, chosen, *_ = CASES[case]
    _, (codes, report, *_) = whole(case)
    vocab = model.special.codes if model is TAR else model.net.config.vocab
    assert codes.dtype == torch.int64 and 0 <= int(codes.min()) and int(codes.max()) < vocab
    assert set(report.counts) <= set(COUNTS), "add what is missing to COUNTS, and explain it in docs/report.md"
    side = model.sides[0] if model is TAR else model.grid
    shape, step, outcome = (3, side, side), report.maps["step"], report.maps["outcome"]
    assert all(values.shape == shape for values in report.maps.values())
    assert step.dtype == np.int32 and outcome.dtype == np.uint8 and step.min() >= 0
    assert step.max() < report.counts["transformer_passes"] and ("mulosd" in case or (step[:, 0, 0] == 0).all())
    if "accepted" in report.counts and "mulosd" not in case:
        assert report.counts["accepted"] == int((outcome == 1).sum()) and outcome.max() <= 1
    elif "mulosd" not in case:
        assert not outcome.any()
    own = dataclasses.asdict(chosen)
    own |= {"up_sampler": "bicubic"} if "mulosd" in case else {}
    own |= {"repetition_penalty": 1.3} if model is TAR else {}  # the model's, in the place of None
    assert report.settings == own and (report.images, report.seed, report.device) == (3, 5, "cpu")
    assert report.seconds > 0 and sum(report.phases.values()) <= report.seconds * 1.05
    phases = {"transformer", "sampling"}
    if "mulosd" in case and "exact" not in case:
        phases |= {"draft", "up-sampling", "verification"}
    assert set(report.phases) == phases


def test_wrong_input_says_so(case):
    sampler, model, chosen, *drafts = CASES[case]
    more = {"draft": drafts[0], "up_sampler": PixelUpSampling(VQ)} if drafts else {}
    if model is TAR:  # see test_tar_prompt.py
        return
    kind, one = model.net.config.condition, TokenNoise(1, (0,))
    other = TextCondition((torch.zeros(2, 6),), ("",)) if kind != "text" else from_ids((1,))
    wrong = [(what_of(model, (0, 1, 2)), one), (other, one)]
    wrong += [(from_ids((5,)), one), (ClassCondition((), ()), TokenNoise(1, ()))] if kind == "class" else []
    for what, draws in wrong:
        with pytest.raises(UserError, match="^(condition|label)"):
            next(sampler(model, what, chosen, draws, **more))
