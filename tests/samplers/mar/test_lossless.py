"""Lossless CSpD and the speculative head draw plain MAR's distribution; the same tests reject approximate samplers.

Errors of a temperature of 1.02 or an acceptance 3 % too ready (u <= 1.03 p / q) pass with 5,000 draws and are noticed
with 80,000; a temperature of 1.1 or an acceptance 10 % too ready is noticed with 5,000. ``test_paired_lossless.py``
notices a temperature of 1.01 and an acceptance 3 % too ready with 50 tokens, because it compares token by token.
"""

import pytest
from lossless_cases import ALPHA, CARELESS, CASES, WARMER, Case, Comparisons, draw

pytestmark = pytest.mark.slow

DRAWS = 5000


def rejected(case: Case) -> list[str]:
    """Controls that 5,000 draws suffice to reject; the others' difference is too small."""
    small = WARMER, *([CARELESS] if case.title == "cspd, near draft" else [])
    return [name for name in case.controls if name not in small]


@pytest.fixture(scope="module")
def tests() -> Comparisons:
    return Comparisons(DRAWS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_the_distribution_is_plain_mars_and_the_controls_are_not(tests: Comparisons, case: Case):
    p, _ = tests.case(case)
    assert min(p.values()) > ALPHA, p
    assert rejected(case)
    for name in rejected(case):
        assert tests.control(case, name) <= ALPHA, name


def test_a_draw_is_repeatable_and_its_noise_is_its_keys():
    first, again, other = (draw(key, 50, "mar", "", {"steps": 2, "diffusion_steps": 3})[0] for key in "aab")
    assert first.shape == (50, 8) and first.equal(again)
    assert not (first == other).any()
