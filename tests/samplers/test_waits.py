"""How often the host waits for the device in an AR step of every MAR sampler, counted with ``waits.py``."""

import pytest
import test_sampler_contract as masked
import torch
from pretended_cuda import META
from waits import counted_waits, moved, waits_of_steps

# Samplers to the most waits of an AR step in the middle of a run.
MOST = {
    "mar": 0,
    "mar, annealed": 0,
    "lazymar": 0,
    "lazymar, cached head": 0,
    "fasthybrid": 1,
    "fasthybrid, no guidance": 1,
    "fasthybrid+lazymar": 2,  # a second time for the map of cached tokens, in the last steps
}


@pytest.mark.parametrize("name", MOST)
def test_an_ar_step_waits_at_most_so_often(name):
    with counted_waits() as waits:
        found, _ = waits_of_steps(masked.start(name, move=moved), waits)
    middle = found[1:-2]
    assert len(middle) == masked.FEW["ar_steps"] - 2
    assert max(waits.total() for waits in middle) <= MOST[name], middle


def test_what_makes_the_host_wait_is_counted():
    with counted_waits() as waits:
        a = torch.arange(3, device=META)
        b = a + a * a.float().mean()
        b[torch.tensor([1], device=META)]  # a list of numbers, copied from memory that is not pinned
        assert waits.total() == 1
        waits.clear()
        (
            int(a[1]),
            bool(a[1] > 0),
            a.nonzero(),
            b[a > 1],
            b.masked_fill(a > 1, 0),
            torch.ones(3).to(META),
            a.cpu(),
            a.tolist(),
        )
    assert waits.total() == 7
