"""Every sampler in the states of torch that other packs and scripts leave: the same image, and the state as it was."""

from contextlib import nullcontext

import pytest
import test_block_contract as blocks
import test_nextstep_contract as continuous
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.networks.torch_state import in_own_state, own_state
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.engine import finish
from torch_states import STATES, default_dtype, state_of_torch

CONTRACTS = {name: contract for contract in (masked, tokens, blocks, continuous) for name in contract.CASES}
FEATURES = "llamagen, features, grouped heads"  # of Tar, whose function is LlamaGen's


def first_case(name: str) -> str:
    """The first case of the contracts of a registered sampler."""
    entry = SAMPLERS[name]
    if name == "tar":
        return FEATURES
    for case, contract in CONTRACTS.items():
        if contract.CASES[case][0] is entry.run:
            return case
    raise AssertionError(f"the contracts of tests/samplers have no case of {name}; add one.")


FIRST = {name: first_case(name) for name in SAMPLERS}


def started(case):
    """The steps of a case; its condition is made here, nothing else is computed yet."""
    return CONTRACTS[case].start(case)


def whole(case):
    return CONTRACTS[case].whole(case)[1]


def draws_the_same(case, state):
    """Check that a run in a state has the result of the plain run, and leaves the state as it was."""
    steps = started(case)
    with STATES[state]():
        found = state_of_torch()
        result = finish(steps)
        assert state_of_torch() == found

    assert result[0].dtype == whole(case)[0].dtype and torch.equal(result[0], whole(case)[0])
    assert result[1].counts == whole(case)[1].counts


@pytest.mark.parametrize("case", CONTRACTS)
@pytest.mark.fast_cases(*FIRST.values(), "prompt", "bitdance, prompts", "images, llamagen")
def test_every_case_draws_the_same_image_in_the_worst_state(case):
    draws_the_same(case, "everything")


@pytest.mark.parametrize("case", FIRST.values())
@pytest.mark.parametrize("state", STATES)
@pytest.mark.fast_cases(*(f"{state}-{case}" for state in STATES for case in ("mar", "llamagen", "bitdance")))
def test_every_sampler_draws_the_same_image_in_every_state(state, case):
    draws_the_same(case, state)


@pytest.mark.parametrize("case", FIRST.values())
def test_the_state_is_the_callers_at_every_step(case):
    """It comes and goes between steps, as around ``next`` in a caller's loop."""
    steps, k = started(case), 0
    result = None
    while result is None:
        with STATES["everything"]() if k % 2 else nullcontext():
            found = state_of_torch()
            try:
                next(steps)
            except StopIteration as end:
                result = end.value
            assert state_of_torch() == found, f"after {k} steps"
        k += 1
    assert k > 2 and torch.equal(result[0], whole(case)[0])


@pytest.mark.parametrize("case", FIRST.values())
def test_a_run_that_is_left_gives_the_state_back(case):
    steps = started(case)
    with STATES["everything"]():
        found = state_of_torch()
        next(steps)
        steps.close()
        assert state_of_torch() == found


# ------------------------------------------------------------------------------------------------ the state itself


def test_own_state_is_torchs_own():
    usual = state_of_torch()[:4]
    for name, state in STATES.items():
        with state():
            found = state_of_torch()
            with own_state():
                assert state_of_torch()[:4] == usual, name
                assert torch.ones(1).dtype == torch.float32 and torch.ones(1).device.type == "cpu", name
            assert state_of_torch() == found, name


def test_own_state_is_left_with_an_error():
    with default_dtype(torch.bfloat16):
        with pytest.raises(KeyError), own_state():
            raise KeyError
        assert torch.get_default_dtype() == torch.bfloat16


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch before 2.9 has one name for it")
@pytest.mark.parametrize("part", ["matmul", "conv"])
def test_products_rounded_by_the_newer_names(part):
    """With these, torch refuses to say what the older name would say."""
    place = getattr(torch.backends.mkldnn, part)
    before = place.fp32_precision
    place.fp32_precision = "bf16"
    try:
        with own_state():
            assert place.fp32_precision == "ieee"
        assert place.fp32_precision == "bf16"
    finally:
        place.fp32_precision = before


def test_a_generator_is_closed_and_passes_on_its_errors():
    seen = []

    @in_own_state
    def steps():
        try:
            yield torch.ones(1).dtype
            yield torch.ones(1).dtype
            raise KeyError
        finally:
            seen.append(torch.ones(1).dtype)

    with default_dtype(torch.float64):
        left = steps()
        assert next(left) == torch.float32
        left.close()
        failing = steps()
        assert [next(failing), next(failing)] == [torch.float32] * 2
        with pytest.raises(KeyError):
            next(failing)
        assert torch.ones(1).dtype == torch.float64
    assert seen == [torch.float32] * 2
