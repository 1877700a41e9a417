"""How often the host waits for the device in an AR step of every MAR sampler, counted with ``waits.py``."""

from dataclasses import replace

import pytest
import test_sampler_contract as masked
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.noise import PairedNoise
from small_settings import MASKED
from waits import counted_waits, moved, waits_of_steps

FEW = {"steps": 5, "diffusion_steps": 6}
# Cases to the most waits of an AR step in the middle of a run, which starts after the first and ends before the last:
# of a sampler none, or as many as here.
MOST = {
    **dict.fromkeys(MASKED, 0),
    "mar, annealed": 0,
    "lazymar, cached head": 0,
    "lazymar, random rows": 0,
    "lazymar, decided tokens": 0,
    "fasthybrid": 1,  # which drafts are similar enough
    "fasthybrid, no guidance": 1,
    "fasthybrid+lazymar": 1,
    "cspd": 2,  # which drafted diffusion steps are accepted, and of those that need redraws, whether one is kept
    "cspd+lazymar": 3,
    "cspd, paper": 2,  # which drafts are accepted, and of those that need more redraws than ten, how many
    "cspd, published": 2,
    "cspd, published, no alignment": 2,
}


def start(name, **more):
    """A case of the contract with fewer steps and two images, on the pretended device."""
    sampler, settings = masked.CASES[name]
    if sampler in masked.DRAFTED:
        more = {"draft": masked.DRAFT, **more}
        more["draft"] = moved(more["draft"])
    noise = PairedNoise(5, (0, 1))
    return sampler(moved(masked.MODEL), from_ids((1, 4)), replace(settings, **FEW), noise, **more)


@pytest.mark.parametrize("name", MOST)
@pytest.mark.fast_cases(*(name for name in MASKED if "+" not in name))
def test_an_ar_step_waits_at_most_so_often(name):
    with counted_waits() as waits:
        found, _ = waits_of_steps(start(name), waits)
    middle = found[1:-2]
    assert len(middle) == FEW["steps"] - 2 or (masked.own_pace(name) and len(middle) >= FEW["steps"] - 2)
    assert max(waits.total() for waits in middle) <= MOST[name], (
        f"an AR step of {name} waits for the device at {middle}; leave the values on it, or state the waits in MOST"
    )


def test_ar_steps_that_are_verified_together_wait_once():
    """The target drafts for itself: of segments of two AR steps the first reads what is accepted of both."""
    with counted_waits() as waits:
        found, result = waits_of_steps(start("cspd", draft=masked.MODEL), waits)
    assert result.report.acceptance == 1
    assert [waits.total() for waits in found[1:-1]] == [1, 0, 1, 0]


@pytest.mark.parametrize("name", ["mar, speculation", "cspd, speculation"])
@pytest.mark.fast_cases("mar, speculation")
def test_a_window_waits_twice_at_most(name):
    """A window is a head call: of L = 3 drafted steps, or in CSpD of the whole path first.

    Half of them at most need redraws, which are read a second time.
    """
    windows, reads, before = 0, 0, 0
    with counted_waits() as waits:
        for step in start(name):
            counts = step.report.counts
            head_calls = counts["head_calls"] - counts.get("draft_head_calls", 0)
            if 1 < step.done < step.total:
                assert waits.total() <= 2 * (head_calls - before), waits
                windows += head_calls - before
                reads += waits.total()
            before = head_calls
            waits.clear()
    assert windows >= 10 and reads <= 1.5 * windows
