"""Time the chosen matrix products of official models beside ``F.linear``: ``python -m fastar_nodes.tools.products``.

For every model, a network with random weights chooses the methods of ``matmul.py`` as a run of the model does. Then every weight shape
is multiplied by a few row counts: by the chosen method and by ``F.linear``, in turn, on several copies of the weight, so that it is not
in the caches. The table gives medians. The exit code is 1 if a ratio is above the limit by more than two timings of the same function
differ, or if a model's choices took longer than allowed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cli.bench import SIZES, TOKEN_SIZES, official, official_gpt
from ..model_loaders.networks import matmul
from ..model_loaders.networks.llama import Llama
from ..model_loaders.networks.mar import MAR

ROWS = (1, 2, 4, 8, 14, 64, 128, 512)
LIMIT = 1.05
# Seconds of timing that the choices of a model may take.
LONGEST = 0.05
# Numbers of the copies of a weight together: more than the caches hold.
SPREAD = 1 << 24


def network(name: str) -> nn.Module:
    """A network of an official size with random weights."""
    net: nn.Module = MAR(official(name)) if name in SIZES else Llama(official_gpt(name))
    return net.requires_grad_(False)


def large(net: nn.Module) -> dict[tuple[int, int], matmul.Linear]:
    """The first layer of each weight shape (out, in) that other methods than ``F.linear`` apply to."""
    found: dict[tuple[int, int], matmul.Linear] = {}
    for module in net.modules():
        if isinstance(module, matmul.Linear) and module.weight.numel() >= matmul.LARGE_WEIGHT:
            found.setdefault((module.out_features, module.in_features), module)
    return found


def choose(net: nn.Module, rows: list[int]) -> float:
    """Choose the methods of a network; to the seconds of all timing."""
    matmul.configure()
    with torch.inference_mode():
        for n in rows:
            for (_, width), layer in large(net).items():
                layer(torch.ones(n, width))
    return matmul._state.spent


def paired(calls: tuple[Callable[[int], object], Callable[[int], object]], pairs: int) -> list[float]:
    """Ratios of the seconds of two calls, alternating; the argument numbers the calls."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    out = []
    for i in range(pairs + 2):
        seconds = [0.0, 0.0]
        for turn, k in enumerate((0, 1) if i % 2 else (1, 0)):
            began = clock()
            calls[k](2 * i + turn)
            seconds[k] = clock() - began
        out.append(seconds[0] / seconds[1])
    return out[2:]


def ratios(shape: tuple[int, int], rows: int, pairs: int) -> tuple[str, float, float]:
    """The chosen method, its seconds over those of ``F.linear``, and those of ``F.linear`` over its own; medians."""
    copies = max(2, SPREAD // (shape[0] * shape[1])) | 1  # odd, so that both functions meet every copy
    layers = [matmul.Linear(shape[1], shape[0]).requires_grad_(False) for _ in range(copies)]
    x = torch.randn(rows, shape[1])

    def ours(i: int) -> Tensor:
        layer = layers[i % copies]
        return matmul.linear(x, layer.weight, None, layer)

    def plain(i: int) -> Tensor:
        return F.linear(x, layers[i % copies].weight)

    with torch.inference_mode():
        for i in range(copies):
            ours(i)  # copies are packed
        found, noise = paired((ours, plain), pairs), paired((plain, plain), pairs)
    kind = matmul._kind(rows, shape[1])
    method = matmul.choices().get(kind, "linear")
    if not matmul._usable(method, kind.rows, layers[0].weight):
        method = "linear"
    return method, median(found), median(noise)


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
    print("| model | weight | rows | method | over F.linear | F.linear over itself |\n|---|---|---|---|---|---|")
    for name in options.models:
        net = network(name)
        spent = choose(net, options.rows)
        for shape in large(net):
            for rows in options.rows:
                method, ratio, noise = ratios(shape, rows, options.pairs)
                if ratio > LIMIT * max(1.0, noise) and method != "linear":
                    method, ratio, noise = ratios(shape, rows, 4 * options.pairs)  # one of hundreds is slow by chance
                what = f"{name} | {shape[0]} x {shape[1]} | {rows}"
                print(f"| {what} | {method} | {ratio:.2f} | {noise:.2f} |", flush=True)
                if method != "linear":
                    worst = max(worst, ratio)
                    slow += [f"slower than F.linear: {what}"] if ratio > LIMIT * max(1.0, noise) else []
        print(f"| {name}: {spent * 1000:.0f} ms of timing for {len(matmul.choices())} kinds | | | | | |", flush=True)
        slow += [f"too long: {name}, {spent:.3f} s of timing"] if spent > LONGEST else []
        del net
    matmul.configure()
    print(f"\nThe largest ratio of another method than F.linear is {worst:.2f}.", *slow, sep="\n")
    return int(bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
