"""Arithmetic of large sweeps, the tables of docs/scale.md: ``python -m fastar_nodes.tools.scale_plan``.

Seconds are estimates and not measurements: floating-point operations at an assumed rate, or memory traffic at an assumed bandwidth,
whichever takes longer, stage by stage. The sizes are those of the published models.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

IMAGES, CELLS, GPUS = 50_000, 20, (1, 8, 64)
# An A100 with 80 GB: 312 Tflop/s in bf16 and 2.0 TB/s, of which a program attains a part.
FLOPS, BANDWIDTH = 312e12 * 0.4, 2.0e12 * 0.75
# Images that are sampled at once; with guidance twice as many rows.
BATCH = 64
BYTES = 2  # of a weight or a cached value
# Features of Inception on one GPU, and reading pictures back, images and bytes a second.
FEATURES, READ = 1_000, 1e9


@dataclass(frozen=True)
class Model:
    """A model and what an image of the plain sampler takes.

    Attributes:
        name: in the table.
        side: of its pictures, pixels.
        flops: an image, guided.
        traffic: bytes of weights and cache that a batch reads in all its sequential steps.
        note: settings.
    """

    name: str
    side: int
    flops: float
    traffic: float
    note: str

    @property
    def seconds(self) -> float:
        """Of an image."""
        return max(self.flops / FLOPS, self.traffic / BATCH / BANDWIDTH)

    @property
    def bytes(self) -> int:
        """Of an image on disk, uint8 RGB."""
        return self.side**2 * 3


def mar(name: str, width: int, depth: int, total: float, head: float, steps: int = 64, diffusion: int = 100) -> Model:
    """MAR at 256 x 256 pixels: 256 tokens and 64 class tokens, as many blocks in the encoder as in the decoder.

    Args:
        width: of the transformer.
        depth: blocks of the encoder, and of the decoder.
        total, head: parameters.
    """
    half = (total - head) / 2
    known = [256 * (1 - math.cos(math.pi / 2 * k / steps)) for k in range(steps)]
    rows = [(64 + n, 320) for n in known]
    transformer = sum(
        2 * half * (a + b) + depth * 4 * width * (a * a + b * b)  # products with weights, and attention
        for a, b in rows
    )
    sampled = 256 * diffusion * 2 * head
    weights = BYTES * (steps * (total - head) + steps * diffusion * head)
    return Model(name, 256, 2 * (transformer + sampled), weights, f"{steps} AR steps, T = {diffusion}, cfg")


def serial(width: int, depth: int, total: float, prefix: int, tokens: int, guided: int = 2) -> tuple[float, float]:
    """Operations an image and traffic a batch of a decoder that writes ``tokens`` tokens one after another behind a prefix.

    Args:
        width: of keys, and of values, all heads together.
        total: parameters.
        guided: rows an image, 2 with guidance.
    """
    lengths = range(prefix, prefix + tokens)
    flops = guided * (2 * total * (prefix + tokens) + depth * 4 * width * sum(lengths))
    cache = guided * BATCH * depth * 2 * width * BYTES * sum(lengths)
    return flops, BYTES * total * tokens + cache


def models() -> list[Model]:
    """The models of the tables."""
    llamagen = serial(1280, 36, 775e6, 1, 24 * 24)
    codes = serial(256, 28, 1.64e9, 60, 729, guided=1)  # two key-value heads of 128
    picture = serial(1280, 30, 655e6, 729, 32 * 32)
    return [
        mar("MAR-B", 768, 12, 207.9e6, 35.7e6),
        mar("MAR-L", 1024, 16, 478.3e6, 72.2e6),
        mar("MAR-H", 1280, 20, 942.4e6, 151.2e6),
        Model("LlamaGen-XL", 384, *llamagen, "576 tokens, cfg"),
        Model("Tar-1.5B, 512", 512, codes[0] + picture[0], codes[1] + picture[1], "729 codes, 1024 tokens, cfg"),
    ]


def tables() -> str:
    """Two Markdown tables: of an image and a cell, and of the sweep by number of GPUs."""
    lines = [
        "| model | plain sampler | Tflop an image | s an image | GPU hours a cell | GB a cell | GB a sweep |",
        "|---|---|---|---|---|---|---|",
    ]
    for m in models():
        cell = m.seconds * IMAGES
        lines.append(
            f"| {m.name} | {m.note} | {m.flops / 1e12:.1f} | {m.seconds:.3f} | {cell / 3600:.1f} | {m.bytes * IMAGES / 1e9:.0f} | "
            f"{m.bytes * IMAGES * CELLS / 1e9:.0f} |"
        )
    lines += [
        "",
        "| model | "
        + " | ".join(f"hours, {n} GPU{'s' * (n > 1)}" for n in GPUS)
        + " | images a second, 64 GPUs | MB/s written, 64 GPUs "
        "| hours of Inception, 1 GPU | minutes to read back |",
        "|---|" + "---|" * (len(GPUS) + 4),
    ]
    for m in models():
        total, rate = m.seconds * IMAGES * CELLS, GPUS[-1] / m.seconds
        hours = " | ".join(f"{total / n / 3600:.1f}" for n in GPUS)
        lines.append(
            f"| {m.name} | {hours} | {rate:.0f} | {rate * m.bytes / 1e6:.0f} | {IMAGES * CELLS / FEATURES / 3600:.1f} | "
            f"{m.bytes * IMAGES * CELLS / READ / 60:.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    argparse.ArgumentParser(prog="python -m fastar_nodes.tools.scale_plan", description=__doc__).parse_args(argv)
    print(tables())
    return 0


if __name__ == "__main__":
    main()
