"""The diffusion head's Triton kernels in Triton's interpreter, on a CPU, beside the plain head."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="NOT TESTED: Triton, which builds of PyTorch for CUDA install (make dry-run)")

# The interpreter must be chosen before Triton is imported.
SCRIPT = """
import conftest, torch
from fastar_nodes.model_loaders.networks import head_kernels
from fastar_nodes.model_loaders.networks.diffusion_head import DiffusionHead

launches = []
launch = head_kernels._launch
head_kernels._launch = lambda *a, **b: (launches.append(a[0]), launch(*a, **b))
torch.manual_seed(3)
# Half precision stands for bf16, whose products the interpreter of Triton 3.7 gets wrong.
for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 0.01)):
    for rows, channels, width, depth in ((1, 16, 96, 2), (19, 16, 64, 1), (6, 5, 40, 6)):
        head = DiffusionHead(channels, width, depth, 12).requires_grad_(False)
        for p in head.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else p.shape[1] ** -0.5))
        head.to(dtype)
        head.final_layer.linear.float()
        with torch.inference_mode():
            modulations = head.modulations(torch.randn(rows, width, dtype=dtype))
            x = torch.randn(rows, channels)
            launches.clear()
            found, expected = head_kernels.denoise(head, x, modulations), head.denoise(x, modulations)
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        assert found.dtype == expected.dtype == torch.float32 and error <= limit, (dtype, rows, error)
        assert len(launches) == 2 * depth + 1
        print(dtype, rows, channels, width, depth, error)
"""


def test_the_kernels_equal_the_plain_head_in_the_interpreter():
    about = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=about, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


SAMPLERS = """
import conftest, torch
from fastar_nodes.model_loaders.networks import head_kernels, speed
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.noise import PairedNoise
from test_sampler_contract import CASES
from tiny_models import tiny_mar

speed.set_backend("eager")
launches = []
launch = head_kernels._launch
head_kernels._launch = lambda *a, **b: (launches.append(a[0]), launch(*a, **b))
for name in ("mar", "fasthybrid", "lazymar", "fasthybrid+lazymar"):
    sampler, settings = CASES[name]
    plain, fast = tiny_mar(), tiny_mar()
    fast.net.speed, fast.net.kernels = speed.KERNELS, True
    expected, found = (
        finish(sampler(m, from_ids((1, 4)), settings, PairedNoise(5, (0, 1)), 5)).latents for m in (plain, fast)
    )
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    assert error < 1e-3, (name, error)
    print(name, len(launches), error)
assert launches
"""


def test_samplers_with_the_kernels_equal_plain_ones_in_the_interpreter():
    paths = os.pathsep.join(str(Path(__file__).parents[1] / part) for part in ("", "samplers"))
    about = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", SAMPLERS], env=about, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


# Needs no GPU: Triton brings NVIDIA's assembler.
COMPILE = """
import conftest, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fastar_nodes.model_loaders.networks import head_kernels as hk

sizes = {name: "i32" for name in ("rows", "width", "columns", "channels")}
tile = {"R": hk._ROWS, "N": hk._COLUMNS, "K": hk._READ, "C": 16}
for capability in (80, 90):
    for dtype in ("fp32", "bf16"):
        for kernel, choices in ((hk._normalised_product, ("ACTIVATE", "PROJECT")), (hk._gated_product, ("PROJECT",))):
            for on in (False, True):
                constants = {**tile, **{name: on for name in choices}}
                signature = {}
                for name in kernel.arg_names:
                    kind = "*fp32" if name == "x" and on or name == "out" and "ACTIVATE" in choices and not on else f"*{dtype}"
                    signature[name] = sizes.get(name) or ("fp32" if name == "eps" else "constexpr" if name in constants else kind)
                made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
                memory = made.metadata.shared
                assert made.asm["cubin"] and memory <= 96 * 1024, memory
                print(capability, dtype, kernel.__name__, on, memory, made.asm["ptx"].count(".local"))
"""


def test_the_kernels_compile_for_nvidia_gpus():
    about = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=about, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 16
    print(done.stdout)
