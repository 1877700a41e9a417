"""Windows of passes: the tokens of serial decoding in every schedule, and what a call accepts."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import test_token_contract as contract
import torch
from fastar_nodes.reports.record import PLAIN, to_text
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens import jacobi as module
from fastar_nodes.samplers.tokens import jacobi_window, sampling
from fastar_nodes.samplers.tokens.canvas import token_canvas
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.looks import CachedTransformer
from fastar_nodes.samplers.tokens.par import par_schedule
from fastar_nodes.samplers.tokens.sampling import TokenDraw, gumbel_max
from fastar_nodes.samplers.tokens.schedule import raster
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.samplers.tokens.tar import TarPromptSettings, tar_prompt
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from fastar_nodes.samplers.tokens.zipar import zipar_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_reference import tiny_tar
from test_token_contract import FEW
from token_numbers import gumbel_of
from tokens_reference import condition_of, pick, tiny_gpt


def exact(model):
    """The model in fp64, so that the order of sums decides no token; projections of texts are fp32."""
    model = copy.deepcopy(model)
    if model.net.config.condition != "text":
        model.net.double()
    return model


KINDS = "llamagen", "par", "zipar"
CASES = {name: (case[0], exact(case[1]), case[2]) for name, case in contract.CASES.items() if name.startswith(KINDS)}
del CASES["zipar, blanks"]
PLAIN_GPT = CASES["llamagen"][1]
CASES["llamagen, 6 x 6"] = llamagen, exact(tiny_gpt(grid=6)), LlamaGenSettings(**FEW)


def kind_of(model) -> str:
    return model.net.config.condition


def run(sampler, model, chosen, images=(0, 1, 2), seed=5, **changes):
    chosen = dataclasses.replace(chosen, **changes)
    return finish(sampler(model, condition_of(kind_of(model), images), chosen, TokenNoise(seed, images)))


ANY_RUN = (
    st.sampled_from(sorted(CASES)),
    st.sampled_from([2, 3, 5, 16, 100]),
    st.sampled_from([(0,), (1, 2), (0, 1, 2)]),
    st.fixed_dictionaries(
        {
            "cfg": st.sampled_from([1.0, 1.5, 4.0]),
            "temperature": st.sampled_from([0.0, 0.7, 1.0]),
            "top_p": st.sampled_from([0.8, 1.0]),
            "top_k": st.sampled_from([0, 1, 7]),
            "cfg_interval": st.sampled_from([None, 0, 5]),
            "entropy_temperature": st.sampled_from([0.0, 0.3, 1.0]),
        }
    ),
    st.integers(0, 2**32),
)


@settings(max_examples=10)
@given(*ANY_RUN)
def test_tokens_are_those_of_serial_decoding(name, window, images, values, seed):
    check_tokens(name, window, images, values, seed)


@pytest.mark.slow
@settings(max_examples=100)
@given(*ANY_RUN)
def test_tokens_of_many_runs_are_those_of_serial_decoding(name, window, images, values, seed):
    check_tokens(name, window, images, values, seed)


def check_tokens(name, window, images, values, seed):
    case = CASES[name]
    serial = run(*case, images, seed, **values)
    parallel = run(*case, images, seed, **values, parallel=window)
    assert torch.equal(parallel[0], serial[0])
    assert parallel.report.counts["transformer_passes"] <= serial.report.counts["transformer_passes"]


def plain_iteration(model, label: int, image: int, chosen, seed: int) -> tuple[list[int], list[int]]:
    """Jacobi iteration in raster order without a cache; returns the tokens and the call that made each certain."""
    net, count, grid = model.net, model.tokens, model.grid
    gumbel = gumbel_of(TokenNoise(seed, (image,)), "token", torch.arange(count), net.config.vocab)[0]
    labels = torch.tensor([label, net.config.condition_size])
    prefix, positions = net.cls_embedding.embedding_table(labels)[:, None], net.positions(grid, 1)

    def draw_all(tokens):
        x = torch.cat([prefix, net.tok_embeddings(torch.tensor(tokens[:-1])).expand(2, -1, -1)], dim=1)
        cond, null = net(x, torch.arange(-1, count - 1), positions)
        mixed = null + chosen.cfg * (cond - null)
        return [pick(mixed[c], chosen, gumbel[c]) for c in range(count)]

    first = draw_all([0] * count)[0]
    tokens, step, at, call = [first] * count, [0] + [-1] * (count - 1), 1, 0
    while at < count:
        call += 1
        stop = min(count, at + chosen.parallel)
        new = draw_all(tokens)[at:stop]
        changed = [i for i, (a, b) in enumerate(zip(new, tokens[at:stop], strict=True)) if a != b]
        accepted = min(changed[0] + 1 if changed else stop - at, stop - at)
        tokens[at:stop] = new
        tokens[stop:] = [new[-1]] * (count - stop)
        step[at : at + accepted] = [call] * accepted
        at += accepted
    return tokens, step


@pytest.mark.parametrize("window", [2, 4, 30])
@pytest.mark.fast_cases("4")
def test_calls_are_those_of_a_plain_iteration_without_a_cache(window):
    chosen = LlamaGenSettings(**FEW, parallel=window)
    made = run(llamagen, PLAIN_GPT, chosen)
    for i, label in enumerate((1, 4, 0)):
        tokens, step = plain_iteration(PLAIN_GPT, label, i, chosen, 5)
        assert made[0][i].flatten().tolist() == tokens
        assert made.report.maps["step"][i].ravel().tolist() == step
        # The first position of a call's window is certain; the others that the call decides are accepted guesses.
        certain = np.flatnonzero(made.report.maps["outcome"][i].ravel() == PLAIN)
        assert certain.tolist() == [step.index(call) for call in range(max(step) + 1)]
    assert made.report.counts["accepted"] > 0


def test_a_window_of_one_pass_makes_the_calls_of_serial_decoding():
    for name, schedule in (("llamagen", raster(4)), ("zipar", zipar_schedule(4, 2)), ("par", par_schedule(4, 4))):
        _, model, chosen = CASES[name]
        serial = run(*CASES[name])
        canvas, condition = token_canvas(name, model, condition_of(kind_of(model)), chosen, TokenNoise(5, (0, 1, 2)))
        transformer = CachedTransformer(canvas, condition)
        one = finish(module.decode_in_windows(canvas, transformer, TokenDraw(canvas), schedule, 1))
        assert torch.equal(one[0], serial[0])
        assert one.report.counts["transformer_passes"] == serial.report.counts["transformer_passes"]
        assert np.array_equal(one.report.maps["step"], serial.report.maps["step"]) and not one.report.counts["accepted"]
        assert run(*CASES[name], parallel=1).report.counts == serial.report.counts


@pytest.mark.parametrize("window", [1, 3, 4, 50])
@pytest.mark.parametrize("name", ["llamagen", "zipar", "par", "par, adjacent"])
@pytest.mark.fast_cases("llamagen-4", "zipar-3", "par-1", "par, adjacent-50")
def test_right_guesses_take_one_call_a_window(monkeypatch, name, window):
    serial = run(*CASES[name], (1,))
    passes = serial.report.counts["transformer_passes"]

    monkeypatch.setattr(
        jacobi_window, "_fill_with_newest", lambda tokens, *_: tokens[:, :-1].copy_(serial[0].flatten(1))
    )
    made = run(*CASES[name], (1,), parallel=window)
    assert torch.equal(made[0], serial[0])
    assert made.report.counts["transformer_passes"] == (passes if window == 1 else 1 + math.ceil((passes - 1) / window))
    assert window == 1 or not made.report.counts["rejected"]


@pytest.mark.parametrize("name", ["zipar, guided at first", "zipar", "par, non-local", "par, adjacent", "par"])
def test_stand_ins_and_true_tokens_are_seen_by_their_own_passes(monkeypatch, name):
    """All passes in one call: the logits of every row are those of its serial pass, which saw one of the two."""
    serial_logits, window_logits = [], []

    def recording(made):
        def recorded(logits, *more):
            made.append(logits)
            return gumbel_max(logits, *more)

        return recorded

    monkeypatch.setattr(sampling, "gumbel_max", recording(serial_logits))
    serial = run(*CASES[name], (1,))
    monkeypatch.setattr(sampling, "gumbel_max", recording(window_logits))
    monkeypatch.setattr(
        jacobi_window, "_fill_with_newest", lambda tokens, *_: tokens[:, :-1].copy_(serial[0].flatten(1))
    )
    run(*CASES[name], (1,), parallel=100)
    torch.testing.assert_close(torch.cat(window_logits, dim=1), torch.cat(serial_logits, dim=1), rtol=1e-5, atol=1e-5)


def test_a_report_counts_what_a_plain_iteration_draws():
    """One image and a window of 4: of all cells drawn, those that are certain in the end and not the first of their
    call are accepted, and the others were drawn in vain.
    """
    report = run(llamagen, PLAIN_GPT, LlamaGenSettings(**FEW, parallel=4), (1,)).report
    step = report.maps["step"][0].ravel()
    first = [int((step < call).sum()) for call in range(1, step.max() + 1)]  # of each call's window
    drawn = sum(min(4, 16 - at) for at in first)
    assert report.counts["accepted"] == 15 - len(first)
    assert report.counts["rejected"] == drawn - 15
    assert report.tokens_per_pass == pytest.approx(16 / (len(first) + 1))


def test_finished_images_leave_the_batch():
    """Together three images feed no more rows than each on its own, but for the padding of unlike windows."""
    together, *own = (
        run(*CASES["llamagen, 6 x 6"], images, parallel=5).report.counts["transformer_tokens"]
        for images in ((0, 1, 2), (0,), (1,), (2,))
    )
    assert sum(own) <= together < 3 * max(own) and len(set(own)) > 1


def test_a_report_says_where_a_window_costs_time():
    model, chosen = tiny_gpt(), LlamaGenSettings(**FEW, parallel=4)
    four = finish(llamagen(model, from_ids((1, 2, 3, 0)), chosen, TokenNoise(5, range(4)))).report
    assert "parallel: with this value, the passes compute about 4 times as many tokens" in to_text(four)
    assert four.to_dict()["note"] == four.note
    assert not run(llamagen, model, chosen).report.note


TAR = tiny_tar(penalty=1.3)
TAR.net.double()
PROMPTS = ("a red boat", "cat", "a red boat", "")


@settings(max_examples=25)
@given(
    st.sampled_from([2, 3, 7, 40]),
    st.builds(
        TarPromptSettings,
        detail=st.sampled_from(["729", "169", "81"]),
        temperature=st.sampled_from([0.0, 0.8, 1.3]),
        top_p=st.sampled_from([0.9, 1.0]),
        top_k=st.sampled_from([0, 5]),
        repetition_penalty=st.sampled_from([0.01, 0.6, 1.0, 1.9]),
    ),
    st.integers(0, 2**32),
)
@pytest.mark.slow
def test_codes_of_tar_are_those_of_serial_decoding(window, chosen, seed):
    def prompted(parallel, prompts=PROMPTS, images=range(4)):
        own = dataclasses.replace(chosen, parallel=parallel)
        return finish(tar_prompt(TAR, prompts, own, TokenNoise(seed, images)))

    serial, parallel = prompted(0), prompted(window)
    assert torch.equal(parallel[0], serial[0])
    assert parallel.report.counts["transformer_passes"] <= serial.report.counts["transformer_passes"]
    assert torch.equal(prompted(window, PROMPTS[1:2], [1])[0][0], serial[0][1])


# ------------------------------------------------------------------------------------------ 16 bits

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def halved(model, dtype):
    model = copy.deepcopy(model)
    model.net.to(dtype)
    return model


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", [name for name in CASES if "text" not in name])
@pytest.mark.fast_cases("llamagen-bf16", "par, adjacent-fp16")
def test_in_16_bits_all_windows_draw_the_image_of_window_1(name, half):
    """Also with guidance that ends within the image; images of a batch advance independently."""
    sampler, model, chosen = CASES[name]
    model = halved(model, HALVES[half])
    for values in ({"cfg": 4.0}, {"cfg": 4.0, "cfg_interval": 5}):
        one = run(sampler, model, chosen, parallel=1, **values)
        for window in (2, 7):
            made = run(sampler, model, chosen, parallel=window, **values)
            assert torch.equal(made[0], one[0]), (window, values)
            assert f"parallel in {half}: the values 1 to {model.grid} all give this image" in made.report.note


def test_in_16_bits_tars_codes_are_those_of_window_1():
    for half, dtype in HALVES.items():
        model = halved(tiny_tar(), dtype)
        made = [
            finish(tar_prompt(model, ["a cat", "dog"], TarPromptSettings("729", parallel=w), TokenNoise(3, (0, 1))))
            for w in (1, 4)
        ]
        assert torch.equal(made[0][0], made[1][0]), half


def test_in_fp32_window_1_is_serial_decoding():
    """Bit for bit, without a call of a window: a network of fp32 needs no padding."""
    model = tiny_gpt(grid=4)
    chosen = LlamaGenSettings(**FEW)
    serial = run(llamagen, model, chosen)
    one = run(llamagen, model, chosen, parallel=1)
    assert torch.equal(one[0], serial[0]) and not one.report.note
    assert one.report.counts == serial.report.counts


def test_rows_of_a_call_by_hand():
    """A window of 40 passes of one row and one cell each takes the next multiple of 32."""
    rows = [module.padded_row_count(raster(8), window) for window in (1, 32, 33, 40, 64, 100)]
    assert rows == [32, 32, 64, 64, 64, 64]


def test_windows_up_to_the_side_have_the_same_rows_where_a_pass_has_several():
    """PAR's groups of four tokens: 24 passes of 4 rows are 96, of which 1 and 8 passes would need 32."""
    trained = par_schedule(24, 4)
    assert [module.padded_row_count(trained, window) for window in (1, 8, 24, 25)] == [96, 96, 96, 128]


@pytest.mark.parametrize(
    ("window", "said"),
    [(32, "the values 1 to 6 all give this image"), (33, "0 and 33 each round differently")],
)
@pytest.mark.fast_cases(1)
def test_the_report_says_which_windows_draw_one_image(window, said):
    """35 passes of one row: a window of 33 has calls of 64 rows, others of 32."""
    model = halved(tiny_gpt(grid=6), torch.bfloat16)
    assert said in run(llamagen, model, LlamaGenSettings(**FEW), parallel=window).report.note
