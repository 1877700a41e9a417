"""Logits that are NaN or infinite end every token sampler with one error, which names the model that computed them."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import test_token_contract as contract
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.samplers.conditioning import CodeCondition
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.features import features_of
from fastar_nodes.samplers.tokens.mulosd.drafting import PixelUpSampling
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from stepping import stepped
from tiny_tokens import VQ

# One case of every loop: serial, PAR's order, rows in parallel, windows, MuLo-SD, Tar's language model.
CASES = (
    "llamagen",
    "llamagen, text",
    "par",
    "zipar",
    "window, zipar",
    "mulosd, rows",
    "mulosd, exact",
    "prompt",
    "prompt, window",
)
WRONG = (torch.nan, torch.inf, -torch.inf)


def broken(model, value: float, name: str = "diverged"):
    """The model with one number of one hidden row in three replaced before the output layer, as fp16 overflows."""
    model = dataclasses.replace(model, net=copy.deepcopy(model.net), name=name)
    model.net.logits = Broken(model.net.logits, value)
    return model


class Broken:
    """``Llama.logits`` with one wrong value in the third call only, of the token that is the least likely to be
    drawn.
    """

    def __init__(self, logits, value: float):
        self.logits = logits
        self.value = value
        self.calls = 0

    def __call__(self, hidden, span=None):
        out = self.logits(hidden, span)
        self.calls += 1
        if self.calls == 3:
            out[0, 0, out[0, 0].argmin()] = self.value
        return out


def message(field: str, name: str) -> str:
    return (
        rf"^{field}: {name} computed logits that are not finite \(NaN or infinity\)\. .*fp16 overflowed.*bf16 or fp32"
    )


def start(case, model, draft=None):
    sampler, _, chosen, *drafts = contract.CASES[case]
    what = contract.PROMPTS if model.name == "diverged" and case.startswith("prompt") else None
    what = what or contract.condition_of(model.net.config.condition)
    more = {"draft": draft or drafts[0], "up_sampler": PixelUpSampling(VQ)} if drafts else {}
    return sampler(model, what, chosen, TokenNoise(5, (0, 1, 2)), **more)


@pytest.mark.fast_cases(*(f"{case}-nan" for case in CASES), "llamagen-inf", "llamagen--inf")
@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("case", CASES)
def test_one_wrong_logit_is_an_error_at_the_end(case, value):
    """Also -inf, which top-k and top-p write themselves, and which is never drawn."""
    model = broken(contract.CASES[case][1], value)
    steps = start(case, model)
    shown = [next(steps) for _ in range(3)]
    in_cells = "window" in case or "mulosd" in case
    assert shown[-1].done == 3 or in_cells, "the host does not wait for the device at the pass itself"
    with pytest.raises(UserError, match=message("model", "diverged")):
        finish(steps)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.fast_cases(1)
def test_a_draft_model_is_named_as_the_draft(value):
    target = contract.CASES["mulosd"][1]
    draft = broken(contract.CASES["mulosd"][3], value, "small and diverged")
    with pytest.raises(UserError, match=message("draft", "small and diverged")):
        finish(start("mulosd", target, draft))


def test_a_network_whose_weights_are_finite_and_whose_results_are_not():
    """As files of a training that diverged: products of finite weights overflow."""
    model = copy.deepcopy(contract.PLAIN)
    model = dataclasses.replace(model, name="diverged")
    model.net.norm.weight.fill_(1e20)
    model.net.output.weight.mul_(1e20)
    with pytest.raises(UserError, match=message("model", "diverged")):
        finish(start("llamagen", model))


def test_an_up_sampler_that_makes_pixels_that_are_not_finite():
    """Its codes would be drafts like any others."""
    vq = dataclasses.replace(VQ, net=copy.deepcopy(VQ.net), name="overflowing vq")
    vq.net.decode_codes = lambda codes: VQ.net.decode_codes(codes).index_fill(3, torch.tensor([1]), torch.nan)
    codes = torch.zeros(2, 4, 4, dtype=torch.int64)
    for sample in (PixelUpSampling(vq).up, PixelUpSampling(vq).down):
        with pytest.raises(UserError, match="^decoder: overflowing vq computed pixels that are not finite"):
            sample(codes, 2)

    def enlarge(images):
        return (images / 0).repeat_interleave(2, 2).repeat_interleave(2, 3)

    with pytest.raises(UserError, match="^upscale_model: 4x computed pixels that are not finite"):
        PixelUpSampling(VQ, enlarge, "4x").up(codes, 2)


def test_features_of_semantic_codes_that_are_not_finite():
    """The error names TA-Tok, not the model that would read them."""
    net = SimpleNamespace(config=SimpleNamespace(codes=9), features=lambda codes: torch.full((1, 4, 6), torch.inf))
    net.bottleneck = SimpleNamespace(out_linear=SimpleNamespace(weight=torch.zeros(1)))
    codes = CodeCondition((torch.zeros(4, dtype=torch.int64),), ("cat",))
    with pytest.raises(UserError, match="^ta_tok: ta computed features that are not finite"):
        features_of(codes, SimpleNamespace(name="ta", net=net))


@pytest.mark.parametrize("case", ["llamagen", "window, text", "mulosd, rows"])
def test_values_that_top_k_and_top_p_exclude_are_no_fault(case):
    seen, _ = stepped(contract.start(case, top_k=1, top_p=0.01))
    assert seen[-1].decided.all()


def test_a_run_after_a_broken_one_is_not_blamed():
    model = broken(contract.PLAIN, torch.nan)
    with pytest.raises(UserError, match="not finite"):
        finish(start("llamagen", model))
    assert torch.equal(finish(start("llamagen", model)).latents, contract.whole("llamagen")[1].latents)


@pytest.mark.parametrize("case", ["llamagen", "window, zipar", "mulosd, rows", "prompt"])
@pytest.mark.fast_cases("llamagen", "prompt")
def test_rows_whose_square_overflows_are_not_drawn_from(case):
    """RMSNorm divides them by infinity: all logits are 0, and every token would be as likely as any other."""
    model = contract.CASES[case][1]
    model = dataclasses.replace(model, net=copy.deepcopy(model.net), name="diverged")
    for block in model.net.layers:
        block.feed_forward.w2.weight.data.mul_(1e30)
    with pytest.raises(UserError, match=message("model", "diverged")):
        finish(start(case, model))
