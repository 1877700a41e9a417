"""Everything that is to be measured on a GPU, in one command of at most 25 minutes.

    python -m fastar_nodes.tools.gpu_hour --out gpu_hour

It writes gpu_hour.json and one page of Markdown, gpu_hour.md:

- parity: every sampler with tiny random models, the device beside the CPU, in fp32 and in bf16;
- rates of the device: a large matrix product, and reading memory;
- seconds, operations, launches, waits, peak memory and share of the roofline of every sampler at official sizes with random weights.

Random weights mean nothing for acceptance. FastHybrid accepts every draft, as it does on the demo at batch 1 (98 % at batch 8); MuLo-SD
accepts a share of 0.7, the middle of the demo's; CSpD, Jacobi and LANTERN accept what they do, which the page says.

A run that takes too long is stopped after some steps and extrapolated to all of them; the page marks it. Cells that do not fit into the
time are listed as left out. With --dry every cell runs once at a tiny size, on any device; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..bench.operations import Speed, Work, counted, measure_speed
from ..cli.options import choose_device
from ..errors import UserError
from ..model_loaders.networks.speed import COMPILE, GRAPHS, KERNELS, PLAIN, choose
from ..reports.record import VERSION
from ..samplers.noise import PairedNoise
from ..samplers.registry import MAR as MAR_FAMILY
from ..samplers.registry import SAMPLERS
from ..samplers.tokens.draws import PairedDraws
from .gpu_cells import UNFORCED, Cell, build, cells, condition_of, extras, settings_of

# Seconds after which no further cell is begun; seconds of a cell's timed runs, and their number. The first run of a compiled cell, in
# which it is compiled, may take COMPILE_SECONDS.
SECONDS, CELL_SECONDS, REPEATS = 23 * 60, 6.0, 3
COMPILE_SECONDS = 90.0
# Operations, waits and launches are counted in a part of a run's steps, from its middle: this share of them, within bounds.
COUNTED, FEWEST, MOST = 16, 2, 32
# Seconds at batch 1 on an H200 that are aimed at, by model and sampler.
GOALS = {
    ("MAR-B", "mar"): 0.14,
    ("MAR-H", "mar"): 0.62,
    ("LlamaGen-XL", "llamagen"): 0.36,
    ("LlamaGen-XXL", "llamagen"): 0.65,
    ("AR-DTok-1024", "llamagen"): 3.4,
    ("AR-DTok-1024", "mulosd"): 0.8,
}
# Speed-ups over the plain sampler that the papers report, on other GPUs: abstracts of LazyMAR and PAR; CSpD for MAR-H with MAR-B at batch
# 1; ZipAR on Tar at 1,024 pixels by MuLo-SD's table, and MuLo-SD on Tar-7B.
PAPERS = {"lazymar": 2.83, "par": 3.6, "cspd": 1.44, "zipar": 3.65, "mulosd": 5.33}


# ------------------------------------------------------------------------------------------------ measuring


def _steps(cell: Cell, model: Any, more: Mapping[str, Any], seed: int, dry: bool) -> Any:
    entry, images = SAMPLERS[cell.sampler], range(cell.batch)
    noise = PairedNoise(seed, images) if entry.family == MAR_FAMILY else PairedDraws(seed, images)
    return entry.run(model, condition_of(model, cell.batch), settings_of(cell, dry), noise, seed, **more)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(steps: Any, device: torch.device, limit: float) -> tuple[float, bool, Any]:
    """Seconds of a sampler, whether they are extrapolated from the steps within ``limit`` seconds, and the report."""
    _synchronize(device)
    began, step = time.perf_counter(), None
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


def _launches(call: Callable[[], None], device: torch.device) -> int | None:
    """Launches of kernels and of CUDA graphs in a call; None on devices that do not report them."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize(device)
    return sum(e.count for e in profile.key_averages() if e.key.startswith(("cudaLaunchKernel", "cudaGraphLaunch")))


def _counts(cell: Cell, model: Any, more: Mapping[str, Any], device: torch.device, speed: Speed, dry: bool) -> Any:
    """Launches of the whole run, from some steps in the middle; of a plain run operations, waits and floor too."""
    steps = _steps(cell, model, more, 0, dry)
    step = next(steps)
    part = min(max(step.total // COUNTED, FEWEST), MOST)
    for _ in range(min(4, step.total // 4)):
        step = next(steps, step)
    done = step.done
    plain = cell.speed == PLAIN  # the counter does not see inside of compiled and captured functions
    with counted() if plain else nullcontext(Work(0, 0, [])) as work:
        for _ in range(part):
            step = next(steps, step)
    if step.done == done:  # a run of one step
        return {"operations": None, "waits": None, "launches": None, "floor": None}
    factor, after = step.total / (step.done - done), step.done
    last = [step]

    def more_steps() -> None:
        for _ in range(part):
            last[0] = next(steps, last[0])

    launches = _launches(more_steps, device)
    if launches is not None:
        launches = round(launches * last[0].total / max(1, last[0].done - after))
    steps.close()
    if not plain:
        return {"launches": launches}
    return {
        "operations": round(work.operations * factor),
        "waits": round(work.waits * factor),
        "launches": launches,
        "floor": work.floor(speed) * factor,
    }


def device_speed(device: torch.device, dtype: torch.dtype, dry: bool) -> Speed:
    """Rates of the device: a matrix product in ``dtype``, and reading memory."""
    if device.type == "cpu":
        return measure_speed()
    side, numbers = (256, 1 << 20) if dry else (8192, 1 << 29)

    def best(call: Callable[[], Tensor]) -> float:
        found = []
        for _ in range(6):
            _synchronize(device)
            began = time.perf_counter()
            call()
            _synchronize(device)
            found.append(time.perf_counter() - began)
        return min(found[1:])

    a = torch.ones(side, side, device=device, dtype=dtype)
    long = torch.ones(numbers, device=device)
    return Speed(2 * side**3 / best(lambda: a @ a), long.nbytes / best(long.sum))


def measure(
    cell: Cell, model: Any, device: torch.device, speed: Speed, dry: bool, seconds: float = CELL_SECONDS
) -> Any:
    """Time a cell and count its work; a dictionary for the JSON file."""
    choose(model.net, cell.speed, device)
    more = extras(cell, device, dry)
    warm, _, _ = _timed(_steps(cell, model, more, 0, dry), device, seconds if cell.speed == PLAIN else COMPILE_SECONDS)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found: list[tuple[float, bool, Any]] = []
    began = time.perf_counter()
    for repeat in range(1 if dry else REPEATS):
        if found and time.perf_counter() - began > seconds:
            break
        found.append(_timed(_steps(cell, model, more, repeat + 1, dry), device, seconds))
    report = found[-1][2]
    out = {**asdict(cell), "seconds": [s for s, _, _ in found], "median": median(s for s, _, _ in found), "first": warm}
    out |= {"extrapolated": any(e for _, e, _ in found), "acceptance": report.acceptance, "counts": dict(report.counts)}
    out["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    out |= _counts(cell, model, more, device, speed, dry)
    out["share_of_floor"] = out["floor"] / out["median"] if out.get("floor") else None
    out["goal"] = GOALS.get((cell.model, cell.sampler)) if cell.batch == 1 and cell.dtype == "bf16" else None
    out["paper"] = PAPERS.get(cell.sampler)
    return out


def parity(device: torch.device, speeds: tuple[str, ...] = (PLAIN,)) -> list[dict[str, Any]]:
    """Every sampler at a tiny size on the device, beside the CPU in fp32.

    Returns:
        "difference": the largest of a latent, relative to the largest latent; or "equal": the share of equal tokens.
    """
    cpu, out = torch.device("cpu"), []
    firsts: dict[str, Cell] = {}
    for cell in cells():
        firsts.setdefault(cell.sampler, cell)
    covered = {how: {cell.sampler for cell in cells() if cell.speed == how} for how in speeds}
    for name, cell in firsts.items():
        results = {}
        for key, on, dtype, how in [("cpu", cpu, "fp32", PLAIN)] + [
            (f"{dtype} {how}", device, dtype, how)
            for dtype in ("fp32", "bf16")
            for how in speeds
            if name in covered[how] or how in (PLAIN, COMPILE)
        ]:
            here = replace(cell, dtype=dtype, batch=2, speed=how)
            model = build(cell.model, dtype, on, True)
            choose(model.net, how, on)
            steps = _steps(here, model, extras(here, on, True), 1, True)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    results[key] = (end.value.latents if hasattr(end.value, "latents") else end.value.codes).cpu()
                    break
        for key, found in results.items():
            if key == "cpu":
                continue
            if found.dtype == torch.int64:
                out.append({"sampler": name, "on": key, "equal": float((found == results["cpu"]).float().mean())})
            else:
                out.append(
                    {
                        "sampler": name,
                        "on": key,
                        "difference": float((found - results["cpu"]).abs().max() / results["cpu"].abs().max()),
                    }
                )
    return out


# ------------------------------------------------------------------------------------------------ the page


def page(found: Mapping[str, Any]) -> str:
    """The results as one page of Markdown."""
    about = found["about"]
    lines = [f"# {about['device']}, {about['date']}", ""]
    if about["dry"]:
        lines += ["A dry run at tiny sizes: the numbers mean nothing.", ""]
    rates = ", ".join(
        f"{k} {v['arithmetic'] / 1e12:.3g} TFLOP/s, {v['memory'] / 1e9:.4g} GB/s" for k, v in about["rates"].items()
    )
    lines += [
        f"FastAR {about['version']}, PyTorch {about['torch']}; random weights; measured rates: {rates}. FastHybrid accepts every draft and "
        f"MuLo-SD 70 %, as on the demo; {', '.join(UNFORCED)} are not forced. ~: extrapolated from the first steps.",
        "",
        "| model | sampler | batch | dtype | speed | s | goal | ratio | paper | floor / s "
        "| operations | launches | waits | GiB | accepted |",
        "|" + "---|" * 15,
    ]
    base = {}
    for entry in found["cells"]:
        cell = Cell(*(entry[k] for k in ("model", "sampler", "batch", "dtype", "speed")))
        if SAMPLERS[cell.sampler].baseline or cell.sampler == "llamagen":
            base[cell.baseline] = entry["median"]
    for entry in found["cells"]:
        cell = Cell(*(entry[k] for k in ("model", "sampler", "batch", "dtype", "speed")))
        plain = base.get(cell.baseline)
        row = [cell.model, cell.sampler, cell.batch, cell.dtype, cell.speed]
        row += ["~" * entry["extrapolated"] + f"{entry['median']:.3g}", entry["goal"]]
        row += [f"{plain / entry['median']:.2f}" if plain and entry["median"] else None, entry["paper"]]
        share, peak, accepted = entry.get("share_of_floor"), entry["peak_memory_bytes"], entry["acceptance"]
        row += [
            f"{share:.2f}" if share is not None else None,
            entry.get("operations"),
            entry.get("launches"),
            entry.get("waits"),
        ]
        row += [
            f"{peak / 2**30:.2f}" if peak is not None else None,
            f"{accepted:.2f}" if accepted is not None else None,
        ]
        lines.append("| " + " | ".join("" if x is None else str(x) for x in row) + " |")
    lines += [
        "",
        "Beside the CPU in fp32, tiny models:",
        "",
        "| sampler | device | largest difference | equal tokens |",
        "|---|---|---|---|",
    ]
    for entry in found["parity"]:
        far, same = entry.get("difference"), entry.get("equal")
        lines.append(
            f"| {entry['sampler']} | {entry['on']} | {'' if far is None else f'{far:.2g}'} "
            f"| {'' if same is None else f'{100 * same:.1f} %'} |"
        )
    for what, why in found["failed"].items():
        lines += ["", f"Failed: {what}: {why}"]
    if found["left_out"]:
        lines += ["", "Left out for lack of time: " + "; ".join(found["left_out"]) + "."]
    return "\n".join(lines) + "\n"


def hour(device: torch.device, dry: bool, seconds: float, out: Path, speeds: tuple[str, ...]) -> dict[str, Any]:
    """Run everything; the files are written again after every cell, so that an interruption loses one cell."""
    began = time.perf_counter()
    rates = {d: device_speed(device, k, dry) for d, k in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    about = {
        "device": name,
        "date": time.strftime("%Y-%m-%d"),
        "version": VERSION,
        "torch": torch.__version__,
        "dry": dry,
    }
    found: dict[str, Any] = {
        "about": {**about, "rates": {k: asdict(v) for k, v in rates.items()}},
        "cells": [],
        "parity": [],
        "failed": {},
        "left_out": [],
    }

    def save() -> None:
        out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(page(found), encoding="utf-8")

    found["parity"] = parity(device, speeds)
    save()
    model: Any = None
    held: tuple[str, str] | None = None
    for cell in cells():
        what = f"{cell.model} {cell.sampler}, batch {cell.batch}, {cell.dtype}, {cell.speed}"
        if cell.speed not in speeds:
            continue
        cell = replace(cell, batch=min(cell.batch, 3)) if dry else cell
        if time.perf_counter() - began > seconds:
            found["left_out"].append(what)
            continue
        try:
            if held != (cell.model, cell.dtype):
                model, held = None, None
                _release(device)
                model, held = build(cell.model, cell.dtype, device, dry), (cell.model, cell.dtype)
            found["cells"].append(measure(cell, model, device, rates[cell.dtype], dry))
        except (RuntimeError, UserError, MemoryError) as error:  # out of memory, say: the next cells may run
            found["failed"][what] = str(error).splitlines()[0][:200]
            model, held = None, None
        _release(device)
        save()
        print(f"{time.perf_counter() - began:6.0f} s  {what}", flush=True)
    save()
    return found


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_hour"), help="files to write, without their ending")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time after which no further cell is begun")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on any device: whether every cell runs")
    parser.add_argument("--plain", action="store_true", help="leave out the compiled cells")
    options = parser.parse_args(arguments)
    try:
        device = choose_device(
            "cpu" if options.dry and options.device == "cuda" and not torch.cuda.is_available() else options.device
        )
    except UserError as problem:
        print(problem)
        return 2
    if device.type != "cuda" and not options.dry:
        print(f"device: {device.type} is not CUDA, and official sizes would take hours; add --dry.")
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    speeds = (PLAIN,) if options.plain else (PLAIN, COMPILE, *((KERNELS, GRAPHS) if device.type == "cuda" else ()))
    found = hour(device, options.dry, options.seconds, options.out, speeds)
    print(f"{options.out.with_suffix('.json')}, {options.out.with_suffix('.md')}")
    return int(bool(found["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
