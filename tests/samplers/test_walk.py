"""How many functions and files a reader of one AR step comes through: all that it enters in this package."""

import sys

import pytest
import test_token_contract as tokens
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.noise import PairedNoise
from tiny_models import tiny_mar

OURS = "fastar_nodes."
BASE = {"steps": 8, "diffusion_steps": 20, "cfg": 2.0}
# Sampler and settings to the most functions and files of an AR step.
# They may fall; what raises them makes the method harder to read. About fifteen functions and three files of each are
# the loop of all families (engine.py) and the chain of all diffusion heads (chain.py), which a reader learns once.
WALKS = {
    "mar": ({}, 48, 9),
    # Three of these are of images that go on at paces of their own: what moves them, their pass, and its rows.
    "fasthybrid": ({"lookahead": 4, "threshold": 0.97, "guided_steps": 4}, 55, 10),
    "lazymar": ({"refresh_period": 3, "start_step": 1, "ratio_schedule": "stretched"}, 55, 12),
}


@pytest.mark.parametrize("name", WALKS)
def test_an_ar_step_enters_few_functions(name):
    settings, most, files = WALKS[name]
    entry = SAMPLERS[name]
    steps = entry.run(tiny_mar(), from_ids((1, 4)), entry.settings(**BASE, **settings), PairedNoise(5, (0, 1)))
    walks = walked(steps, BASE["steps"] - 2)
    assert max(f for f, _ in walks) <= most and max(p for _, p in walks) <= files, walks


@pytest.mark.parametrize(("name", "most", "files"), [("llamagen", 50, 10), ("window, llamagen", 65, 11)])
def test_a_pass_of_tokens_enters_few_functions(name, most, files):
    walks = walked(tokens.start(name), 6)
    assert max(f for f, _ in walks) <= most and max(p for _, p in walks) <= files, walks


def walked(steps, count):
    """Functions and files of this package that each of the steps after the first one enters."""
    seen = set()

    def profile(frame, event, arg):
        code, written = frame.f_code, frame.f_code.co_filename[0] != "<"  # not the methods that dataclasses generates
        ours = str(frame.f_globals.get("__name__")).startswith(OURS)
        if event == "call" and ours and written and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_firstlineno))

    walks = []
    next(steps)
    for _ in range(count):
        seen.clear()
        sys.setprofile(profile)
        try:
            next(steps)
        finally:
            sys.setprofile(None)
        walks.append((len(seen), len({file for file, _ in seen})))
    return walks
