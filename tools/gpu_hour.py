"""What is to be measured on a GPU, in one command of at most 25 minutes.

    python -m fastar_nodes.tools.gpu_hour --out gpu_hour

It writes gpu_hour.json and one page of Markdown, gpu_hour.md:

- parity: every sampler with tiny random models, the device beside the CPU, in fp32 and in bf16;
- seconds, launches and peak memory of every sampler at official sizes with random weights, plain and compiled.

Random weights mean nothing for acceptance. FastHybrid accepts every draft, as it does on the demo at batch 1 (98 % at
batch 8); MuLo-SD accepts a share of 0.7, the middle of the demo's; CSpD accepts what it does, which the page says.

A run that takes too long is stopped after some steps and extrapolated to all of them;
the page marks it. Cells that do not fit into the time are listed as left out. With
--dry every cell runs once at a tiny size, on any device; its numbers mean nothing.
"""

import argparse
import gc
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..bench.initialise import initialise_llama, initialise_mar
from ..bench.sizes import DTOK_SIZES, PAR_SPECIAL, SIZES, TOKEN_SIZES, official, official_gpt
from ..cli.options import choose_device
from ..errors import UserError
from ..model_loaders.networks.autoencoder import VQAutoencoder, VQConfig, VQModel
from ..model_loaders.networks.llama import Llama, TokenModel
from ..model_loaders.networks.mar import MAR, MARModel
from ..model_loaders.networks.speed import COMPILE, PLAIN, choose
from ..reports.files import typed_path, writable
from ..reports.record import VERSION
from ..reports.table import figure, markdown
from ..samplers.conditioning import AnyCondition, FeatureCondition, from_ids
from ..samplers.driver import finish
from ..samplers.noise import PairedNoise
from ..samplers.registry import SAMPLERS
from ..samplers.settings import make
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.upsampling import UpSampling

# Seconds after which no further cell is begun; seconds of a cell's timed runs, and their number. The first run of a
# compiled cell, in which it is compiled, may take COMPILE_SECONDS.
SECONDS, CELL_SECONDS, REPEATS = 23 * 60, 6.0, 3
COMPILE_SECONDS = 90.0
# Steps from the middle of a run in which launches are counted.
COUNTED = 4
# Tar's de-tokenizer for 1,024 and 512 pixels: tokens a side. Semantic codes of its condition and their width.
_DTOK_GRIDS, _CODES, _WIDTH = {"AR-DTok-1024": 64, "AR-DTok-512": 32}, 169, 1152
_MAR_SETS = {"steps": 64, "diffusion_steps": 100, "cfg": 3.0}
# What forces an acceptance rate.
_FORCED: Mapping[str, Mapping[str, Any]] = dict.fromkeys(("fasthybrid", "fasthybrid+lazymar"), {"threshold": -1.0})
_FORCED = {**_FORCED, "mulosd": {"acceptance_target": 0.7}}


@dataclass(frozen=True)
class Cell:
    """One measurement: a sampler of the registry on a model of an official size."""

    model: str
    sampler: str
    batch: int = 1
    dtype: str = "bf16"
    speed: str = PLAIN

    def __str__(self) -> str:
        return f"{self.model} {self.sampler}, batch {self.batch}, {self.dtype}, {self.speed}"


def cells() -> list[Cell]:
    """All cells, the most important ones first; cells of one model are neighbours."""
    masked = ("mar", "fasthybrid", "lazymar", "fasthybrid+lazymar")
    tokens = ("llamagen", "zipar")
    models = {"MAR-B": masked, "MAR-H": (*masked, "cspd"), "LlamaGen-XL": tokens, "LlamaGen-XXL": tokens[:1]}
    models |= {"PAR-XL": ("par",), "AR-DTok-1024": (*tokens, "mulosd")}
    out = [Cell(model, name, speed=s) for model, names in models.items() for name in names for s in (PLAIN, COMPILE)]
    larger = (("MAR-B", masked[:3]), ("LlamaGen-XL", tokens), ("PAR-XL", ("par",)))
    return out + [Cell(model, name, batch) for model, names in larger for batch in (8, 64) for name in names]


# ------------------------------------------------------------------------------------------------ models


def build(name: str, dtype: str, device: torch.device, dry: bool = False) -> MARModel | TokenModel:
    """A model with random weights from a fixed seed; ``dry``: of a tiny size with the same parts."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        if name in SIZES:
            config = official(name)
            if dry:
                config = replace(config, dim=24, encoder_depth=2, decoder_depth=2, heads=2, buffer=2, tokens=16)
                config = replace(config, channels=4, classes=8, head_depth=6, head_width=16)
            net = initialise_mar(MAR(config)).eval().requires_grad_(False)
            for parameter in net.head.parameters():  # zero at first: every condition would have the same tokens
                if parameter.ndim == 2 and not parameter.any():
                    parameter.normal_(std=0.1 if dry else 0.02)
            net = net.to(device, kind)
            net.head.final_layer.linear.float()
            return MARModel(net, name, t_max=950)
        tokens = _gpt(name, dry).eval().requires_grad_(False)
        tokens.output.weight.normal_(std=0.5 if dry else 0.02)  # zero at first: all tokens would be equally likely
        grid = _DTOK_GRIDS.get(name) or TOKEN_SIZES[name.replace("PAR", "LlamaGen")][3]
        if dry:
            grid = 8 if name == "AR-DTok-1024" else 4
        return TokenModel(tokens.to(device, kind), name, grid)


def _gpt(name: str, dry: bool) -> Llama:
    if name in _DTOK_GRIDS:
        dim, depth, heads = DTOK_SIZES["AR-DTok-LP"]
        config = replace(official_gpt("LlamaGen-XL"), dim=dim, depth=depth, heads=heads, kv_heads=heads)
        rows = (6 if dry else _CODES) + (64 if dry else _DTOK_GRIDS[name] ** 2)
        config = replace(config, condition="features", condition_size=12 if dry else _WIDTH, absolute=rows)
    else:
        config = official_gpt(name.replace("PAR", "LlamaGen"), PAR_SPECIAL if name.startswith("PAR") else 0)

    if dry:
        config = replace(config, dim=16, depth=2, heads=2, kv_heads=2, hidden=24, vocab=32)
        config = replace(config, condition_size=8) if config.condition == "class" else config

    return initialise_llama(Llama(config))


def extras(cell: Cell, device: torch.device, dry: bool) -> dict[str, Any]:
    """Draft model and random tokenizer, of LlamaGen's size, of a sampler."""
    entry, out = SAMPLERS[cell.sampler], dict[str, Any]()
    if entry.needs_draft:
        name = {"MAR-H": "MAR-B", "AR-DTok-1024": "AR-DTok-512"}.get(cell.model, cell.model)
        out["draft"] = build(name, cell.dtype, device, dry)
        choose(out["draft"].net, cell.speed, device)

    if entry.needs_codes:
        config = VQConfig(ch=128, ch_mult=(1, 1, 2, 2, 4), blocks=2, z_channels=256, codes=16384)
        if dry:
            config = VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=8, codes=32, code_channels=4, groups=4)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = VQAutoencoder(config).eval().requires_grad_(False).to(device)
        vq = VQModel(net, "random VQ")
        out[entry.needs_codes] = UpSampling(vq)

    return out


def condition_of(model: MARModel | TokenModel, batch: int) -> AnyCondition:
    """Consecutive classes, or the same features for every image."""
    c: Any = model.net.config
    if isinstance(model, MARModel) or c.condition == "class":
        return from_ids([i % 8 for i in range(batch)])
    device = next(model.net.parameters()).device
    rows = torch.randn(c.absolute - model.tokens, c.condition_size, generator=torch.Generator().manual_seed(0))
    return FeatureCondition((rows.to(device),) * batch, ("",) * batch)


def steps_of(cell: Cell, model: Any, more: Mapping[str, Any], seed: int, dry: bool) -> Any:
    """A run of the cell's sampler, with published settings and the acceptance forced."""
    entry, images = SAMPLERS[cell.sampler], range(cell.batch)
    masked = cell.model in SIZES
    sets: dict[str, Any] = dict(_MAR_SETS) if masked else {"cfg": 4.0}
    if dry and masked:
        sets |= {"steps": 6, "diffusion_steps": 4}
    settings = make(entry.settings, {**sets, **_FORCED.get(cell.sampler, {})})
    noise = PairedNoise(seed, images) if masked else PairedDraws(seed, images)

    return entry.run(model, condition_of(model, cell.batch), settings, noise, **more)


# ------------------------------------------------------------------------------------------------ measuring


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(steps: Any, device: torch.device, limit: float) -> tuple[float, bool, Any]:
    """Seconds of a sampler, whether they are extrapolated from the steps within ``limit`` seconds, and the report."""
    _synchronize(device)
    began = time.perf_counter()

    try:
        while True:
            step = next(steps)
            if time.perf_counter() - began > limit:
                _synchronize(device)
                seconds = (time.perf_counter() - began) * step.total / step.done
                steps.close()
                return seconds, step.done < step.total, step.report
    except StopIteration as end:
        _synchronize(device)
        return time.perf_counter() - began, False, end.value.report


def launches(steps: Any, device: torch.device) -> int | None:
    """Launches of kernels and CUDA graphs in a whole run, from
    some steps in its middle; None on other devices than CUDA.
    """
    if device.type != "cuda":
        return None
    step = next(steps)
    for _ in range(step.total // 2):
        step = next(steps, step)
    before = step.done
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(COUNTED):
            step = next(steps, step)
        _synchronize(device)

    steps.close()
    found = sum(e.count for e in profile.key_averages() if e.key.startswith(("cudaLaunchKernel", "cudaGraphLaunch")))

    return round(found * step.total / max(1, step.done - before))


def measure(cell: Cell, model: Any, device: torch.device, dry: bool, seconds: float = CELL_SECONDS) -> dict[str, Any]:
    """Time a cell; a dictionary for the JSON file."""
    choose(model.net, cell.speed, device)
    more = extras(cell, device, dry)
    first = timed(steps_of(cell, model, more, 0, dry), device, seconds if cell.speed == PLAIN else COMPILE_SECONDS)[0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found: list[tuple[float, bool, Any]] = []
    began = time.perf_counter()

    for repeat in range(1 if dry else REPEATS):
        if found and time.perf_counter() - began > seconds:
            break
        found.append(timed(steps_of(cell, model, more, repeat + 1, dry), device, seconds))

    report = found[-1][2]

    return {
        **asdict(cell),
        "seconds": [s for s, _, _ in found],
        "median": median(s for s, _, _ in found),
        "first": first,
        "extrapolated": any(e for _, e, _ in found),
        "acceptance": report.acceptance,
        "counts": dict(report.counts),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "launches": launches(steps_of(cell, model, more, 0, dry), device),
    }


def parity(device: torch.device, speeds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every sampler at a tiny size on the device, beside the CPU in fp32: "difference", the largest of a latent,
    relative to the largest latent, or "equal", the share of equal tokens."""
    out = []
    for cell in {cell.sampler: cell for cell in reversed(cells())}.values():

        def result(on: torch.device, dtype: str, how: str, cell: Cell = cell) -> torch.Tensor:
            here = replace(cell, dtype=dtype, batch=2, speed=how)
            model = build(cell.model, dtype, on, True)
            choose(model.net, how, on)
            done = finish(steps_of(here, model, extras(here, on, True), 1, True))
            return (done.latents if hasattr(done, "latents") else done.codes).cpu()

        expected = result(torch.device("cpu"), "fp32", PLAIN)
        for dtype, how in [(dtype, how) for dtype in ("fp32", "bf16") for how in speeds]:
            found, about = result(device, dtype, how), {"sampler": cell.sampler, "on": f"{dtype} {how}"}
            if found.dtype == torch.int64:
                out.append({**about, "equal": float((found == expected).float().mean())})
            else:
                out.append({**about, "difference": float((found - expected).abs().max() / expected.abs().max())})

    return out


def page(found: Mapping[str, Any]) -> str:
    """The results as one page of Markdown."""
    about = found["about"]
    lines = [f"# {about['device']}, {about['date']}", ""]
    if about["dry"]:
        lines += ["A dry run at tiny sizes: the numbers mean nothing.", ""]
    lines += [
        f"FastAR {about['version']}, PyTorch {about['torch']}; random weights. FastHybrid accepts every draft "
        "and MuLo-SD 70 %, as on the demo; the acceptance of CSpD and Jacobi is not forced. ~: extrapolated from "
        "the first steps. Ratio: to the plain sampler of the model with the same batch and precision.",
        "",
    ]
    key = lambda e: (e["model"].replace("PAR", "LlamaGen"), e["batch"], e["dtype"])  # noqa: E731
    own = [e for e in found["cells"] if e["sampler"] in ("mar", "llamagen") and e["speed"] == PLAIN]
    plain = {key(e): e["median"] for e in own}
    rows = [["model", "sampler", "batch", "dtype", "speed", "s", "ratio", "launches", "GiB", "accepted"]]

    for e in found["cells"]:
        base, peak = plain.get(key(e)), e["peak_memory_bytes"]
        rows.append([e["model"], e["sampler"], str(e["batch"]), e["dtype"], e["speed"]])
        rows[-1] += ["~" * e["extrapolated"] + figure(e["median"], ".3g"), figure(base and base / e["median"], ".2f")]
        rows[-1] += [figure(e["launches"], "d"), figure(peak and peak / 2**30, ".2f"), figure(e["acceptance"], ".2f")]

    lines += [markdown(rows), "", "Beside the CPU in fp32, tiny models:", ""]
    rows = [["sampler", "device", "largest difference", "equal tokens"]]
    for e in found["parity"]:
        rows.append([e["sampler"], e["on"], figure(e.get("difference"), ".2g"), figure(e.get("equal"), ".1%")])
    lines.append(markdown(rows))
    for what, why in found["failed"].items():
        lines += ["", f"Failed: {what}: {why}"]
    if found["left_out"]:
        lines += ["", "Left out for lack of time: " + "; ".join(found["left_out"]) + "."]

    return "\n".join(lines) + "\n"


def hour(device: torch.device, dry: bool, seconds: float, out: Path, speeds: tuple[str, ...]) -> dict[str, Any]:
    """Run everything; the files are written again after every cell, so that an interruption loses one cell."""
    began = time.perf_counter()
    cuda = device.type == "cuda"
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "date": time.strftime("%Y-%m-%d"),
    }
    about |= {"version": VERSION, "torch": torch.__version__, "dry": dry}
    found: dict[str, Any] = {"about": about, "cells": [], "parity": parity(device, speeds)}
    found |= {"failed": {}, "left_out": []}

    def save() -> None:
        out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(page(found), encoding="utf-8")

    model: Any = None
    held: tuple[str, str] | None = None

    for cell in cells():
        if cell.speed not in speeds:
            continue
        cell = replace(cell, batch=min(cell.batch, 3)) if dry else cell
        if time.perf_counter() - began > seconds:
            found["left_out"].append(str(cell))
            continue
        try:
            if held != (cell.model, cell.dtype):
                model, held = None, None
                _release(device)
                model, held = build(cell.model, cell.dtype, device, dry), (cell.model, cell.dtype)
            found["cells"].append(measure(cell, model, device, dry))
        except (RuntimeError, UserError, MemoryError) as error:  # out of memory, for example: the next cells may run
            found["failed"][str(cell)] = str(error).splitlines()[0][:200]
            model, held = None, None
        _release(device)
        save()
        print(f"{time.perf_counter() - began:6.0f} s  {cell}", flush=True)

    save()

    return found


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_hour", help="files to write, without their ending")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time after which no further cell is begun")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on any device: whether every cell runs")
    parser.add_argument("--plain", action="store_true", help="leave out the compiled cells")
    options = parser.parse_args(arguments)

    try:
        device = choose_device(options.device)
        out = typed_path(options.out, "out")
        writable(out.parent, "out", f"{out.name}.json")
    except UserError as problem:
        print(problem)
        return 2

    if device.type != "cuda" and not options.dry:
        print(f"device: {device.type} is not CUDA, and official sizes would take hours; add --dry.")
        return 2

    speeds = (PLAIN,) if options.plain else (PLAIN, COMPILE)
    found = hour(device, options.dry, options.seconds, out, speeds)
    print(f"{out.with_suffix('.json')}, {out.with_suffix('.md')}")

    return int(bool(found["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
