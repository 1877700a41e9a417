"""How often the host waits for the device in an AR step of every MAR sampler, counted with ``waits.py``."""

import pytest
import test_sampler_contract as masked
import torch
from fastar_nodes.samplers.driver import to_device
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


READS = {
    "a number": lambda x: int(x[1]),
    "a condition": lambda x: bool(x[1] > 0),
    "a list": lambda x: x.tolist(),
    "a copy to the host": lambda x: x.cpu(),
    "where it is not zero": lambda x: x.nonzero(),
    "rows by a mask": lambda x: x[x > 1],
    "an index that is not pinned": lambda x: x[[1]],
    "a copy to the device that is not pinned": lambda x: torch.ones(3).to(x.device),
    "a tensor of a list": lambda x: torch.tensor([1, 2], device=x.device),
    "repeats whose sum is unknown": lambda x: x.repeat_interleave(x),
}
NO_READS = {
    "arithmetic with a number of the device": lambda x: x * x.float().mean(),
    "a mask": lambda x: x.masked_fill(x > 1, 0),
    "rows by an index of the device": lambda x: x[x],
    "a pinned copy": lambda x: to_device(torch.ones(3), x.device),
}


@pytest.mark.parametrize("name", [*READS, *NO_READS])
def test_what_makes_the_host_wait_is_counted(name):
    with counted_waits() as waits:
        x = torch.arange(3, device=META)
        (READS | NO_READS)[name](x)
    assert waits.total() == (name in READS)
