"""Kernels of a diffusion step at MAR-B's depth, counted in the code that the compiler generates for a CPU.

On a GPU the fused loops are other kernels, but what is fused
follows from the same scheduler. Counts do not depend on widths.
"""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from fastar_nodes.lab.work.sizes import official
from fastar_nodes.networks.mar import MAR, DiffusionHead
from fastar_nodes.samplers.chain import advance

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="NOT TESTED: torch.compile needs a C++ compiler; install g++"),
    pytest.mark.skipif(
        " " in torch.__file__, reason="NOT TESTED: torch.compile cannot build below a folder with a blank"
    ),
]
TOKENS = 6
# A call of a generated loop or of a library's matrix product.
CALL = re.compile(r"^\s+(?:\w+ = )?(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.\S+?)\(", re.MULTILINE)


def kernels(function, *args) -> int:
    """Kernel calls of one call of a function, compiled."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=True), *args)
    found = CALL.findall(code[code.index("def call(") :])
    return len(found)


@pytest.fixture(scope="module")
def step():
    """A head of MAR-B's depth, and the arguments of its ``denoise`` and :func:`advance`."""
    net = MAR(replace(official("MAR-B"), dim=24, head_width=64)).eval().requires_grad_(False)
    c = net.config
    with torch.inference_mode():
        modulations = net.head.modulations(torch.randn(2 * TOKENS, 64))
        x, noise = torch.randn(2, TOKENS, c.channels)
        out, cfg = torch.randn(2, TOKENS, 2 * c.channels), torch.full((TOKENS, 1), 3.0)
        numbers = torch.rand(4).unbind()
        yield net.head, (torch.cat([x, x]), modulations), (numbers, cfg, noise, x, out)


@torch.inference_mode()
def test_compiled_diffusion_step(step):
    """Of six blocks: 14 products, 6 SiLU, 7 normalisations with the residual before them, and the update."""
    head, inputs, update = step
    assert kernels(DiffusionHead.denoise, head, *inputs) == 27
    assert kernels(advance, *update) == 1
