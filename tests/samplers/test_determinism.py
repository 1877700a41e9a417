"""The same seed gives the same bits in every process on one machine, whatever ran before."""

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from fastar_nodes.runs.registry import SAMPLERS

SCRIPT = """
import json, sys
import checkout  # loads this checkout
import torch
torch.set_num_threads(1)
from test_determinism import digests
print(json.dumps(digests(reverse=sys.argv[1] == "reverse")))
"""


def digests(reverse: bool) -> dict[str, str]:
    """Digest of the output of every sampler on tiny models whose
    weights all count as large, so that the rule for products applies.
    """
    from fastar_nodes.networks import ops

    ops.LARGE_WEIGHT = 1  # before the models are made
    import test_block_contract as blocks
    import test_nextstep_contract as nextstep
    import torch
    from fastar_nodes.samplers.engine import finish
    from test_batches import CASES, IMAGES, masked, tokens

    starts = {"hybrid": partial(CASES["hybrid"], range(IMAGES))}
    for contract in (masked, tokens, blocks, nextstep):
        starts |= {name: partial(contract.start, name) for name in contract.CASES}
    found = {}
    for name in sorted(starts, reverse=reverse):
        with torch.inference_mode():
            result = finish(starts[name]())[0]
        found[name] = hashlib.sha256(result.contiguous().numpy().tobytes()).hexdigest()
    return found


@pytest.mark.slow
def test_two_processes_give_the_same_bits(root: Path) -> None:
    paths = os.pathsep.join([str(root / "tests" / "lib"), *filter(None, sys.path)])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, order],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for order in ("forward", "reverse")
    ]
    one, other = (json.loads(child.communicate(timeout=300)[0]) for child in running)
    assert {*SAMPLERS, "hybrid", "prompt"} - {"tar"} <= set(one), "tar is llamagen on features"
    assert one == other
