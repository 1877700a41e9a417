"""Time the chosen matrix products of official models beside ``F.linear``: ``python -m fastar_nodes.tools.products``.

Every weight shape is multiplied by a few row counts: by the method that ``matmul.py`` chooses in this process, and by ``F.linear``, in
turn, on several copies of the weight, so that it is not in the caches. The table gives medians. The exit code is 1 if a ratio is
above the limit by more than two timings of the same function differ.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cli.bench import SIZES, TOKEN_SIZES, official, official_gpt
from ..model_loaders.networks import matmul
from ..model_loaders.networks.gpt import GPT
from ..model_loaders.networks.mar import MAR

ROWS = (1, 2, 4, 8, 14, 64, 128, 512)
LIMIT = 1.05
# Numbers of the copies of a weight together: more than the caches hold.
SPREAD = 1 << 24


def shapes(names: list[str]) -> dict[tuple[int, int], str]:
    """Weight shapes (out, in) of models of official sizes that other methods than ``F.linear`` apply to, and the first model of each."""
    found: dict[tuple[int, int], str] = {}
    for name in names:
        with torch.device("meta"):
            net = MAR(official(name)) if name in SIZES else GPT(official_gpt(name))
        for module in net.modules():
            if isinstance(module, matmul.Linear) and module.weight.numel() >= matmul.LARGE_WEIGHT:
                found.setdefault((module.out_features, module.in_features), name)
    return found


def paired(calls: tuple[Callable[[int], object], Callable[[int], object]], pairs: int) -> list[float]:
    """Ratios of the CPU seconds of two calls, alternating; the argument counts the calls."""
    out = []
    for i in range(pairs + 2):
        seconds = [0.0, 0.0]
        for k in (0, 1) if i % 2 else (1, 0):
            began = time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
            calls[k](2 * i + k)
            seconds[k] = (time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()) - began
        out.append(seconds[0] / seconds[1])
    return out[2:]


def ratios(shape: tuple[int, int], rows: int, pairs: int) -> tuple[str, float, float]:
    """The chosen method, its seconds over those of ``F.linear``, and those of ``F.linear`` over its own; medians."""
    copies = max(2, SPREAD // (shape[0] * shape[1]))
    layers = [matmul.Linear(shape[1], shape[0]).requires_grad_(False) for _ in range(copies)]
    x = torch.randn(rows, shape[1])

    def ours(i: int) -> Tensor:
        return layers[i % copies](x)

    def plain(i: int) -> Tensor:
        return F.linear(x, layers[i % copies].weight)

    with torch.inference_mode():
        for i in range(copies):
            ours(i)  # the choice is made, and copies are packed
        found, noise = paired((ours, plain), pairs), paired((plain, plain), pairs)
    kind = matmul._kind(rows, shape[1])
    return matmul.choices().get(kind, "linear"), median(found), median(noise)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 1 if a product is slower than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=["MAR-B", "MAR-L", "LlamaGen-B", "LlamaGen-XL"], choices=[*SIZES, *TOKEN_SIZES]
    )
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--pairs", type=int, default=25)
    options = parser.parse_args(arguments)
    slow, worst = [], 0.0
    print("| weight | rows | method | over F.linear | F.linear over itself |\n|---|---|---|---|---|")
    for shape, _ in shapes(options.models).items():
        for rows in options.rows:
            method, ratio, noise = ratios(shape, rows, options.pairs)
            if ratio > LIMIT * max(1.0, noise) and method != "linear":
                again = ratios(shape, rows, 4 * options.pairs)  # one of hundreds of medians is slow by chance
                method, ratio, noise = again
            print(f"| {shape[0]} x {shape[1]} | {rows} | {method} | {ratio:.2f} | {noise:.2f} |", flush=True)
            worst = max(worst, ratio)
            if ratio > LIMIT * max(1.0, noise) and method != "linear":
                slow.append(f"{shape[0]} x {shape[1]}, {rows} rows: {method} {ratio:.2f}")
    print(
        f"\n{matmul._state.spent * 1000:.0f} ms of timing for {len(matmul.choices())} kinds; the largest ratio is {worst:.2f}."
    )
    for line in slow:
        print(f"slower than F.linear: {line}")
    return int(bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
