"""Run by test_sweep_memory.py: the node Sweep and its grid on 100 cells of 1024 x 1024 pixels. Prints bytes of the process: idle, peak.

Argument: a folder for the cells. The model is tiny, its decoder enlarges; everything after the decoder is of full size.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import conftest  # noqa: E402, F401  the package under its name
import fake_comfy  # noqa: E402

fake_comfy.install()

import tiny  # noqa: E402
import torch  # noqa: E402
from fastar_nodes.nodes import host, sweep  # noqa: E402
from fastar_nodes.samplers.conditioning import from_ids  # noqa: E402

PIXELS, SIDE = 256, 4


class Enlarging(torch.nn.Module):
    """A decoder of 256 pixels per position."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(z[:, [0, 1, 0]], scale_factor=PIXELS, mode="bilinear")


class Unkept(list):
    """Calls of the progress bar, with their previews, which the stand-in for ComfyUI would keep."""

    def append(self, item: object) -> None:
        """Keep nothing."""


def memory(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


torch.set_num_threads(1)
fake_comfy.Progress.updates = Unkept()
fake_comfy.state.folder = Path(sys.argv[1])
loaded = tiny.a_mar(tokens=SIDE**2)
vae = host.FastARVAE(Enlarging(), "enlarging", PIXELS, 2, 1)
loaded = host.Loaded(loaded.model, loaded.patcher, vae)
about = {"sampler": "fasthybrid", "x": "threshold", "y": "lookahead", "seeds": "7"}
about |= {"settings": "ar_steps=4, diffusion_steps=4, guided_steps=2, cfg=2, cfg_schedule=constant"}


def run(x_values: str, y_values: str, folder: str) -> torch.Tensor:
    with torch.no_grad():
        out = sweep.SweepNode.execute(
            loaded, from_ids([1]), **about, x_values=x_values, y_values=y_values, folder=folder
        )
        return sweep.SweepGrid.execute(out.result[0], cell_size=1024).result[0]


run("0.5", "2", "first")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
idle = memory("VmRSS")
grid = run("0.1..1 x 10", "1..10", "all")
cells = len(list((Path(sys.argv[1]) / "output" / "fastar_sweeps" / "all").glob("*.png")))
print(idle, memory("VmHWM"), cells, *grid.shape)
