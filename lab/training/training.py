"""The resumable training loop of all demo networks: EMA, warm-up and decay, mixed precision, progress.

The batch and the noise of a step depend only on (seed, step), so a resumed run
equals an uninterrupted one. A recipe passes the module and a loss function.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Net = TypeVar("Net", bound=nn.Module)
# (module, step) -> (scalar loss, figures to log, numbers or scalar tensors)
Figures = dict[str, Any]
Loss = Callable[[nn.Module, int], tuple[Tensor, Figures]]


@dataclass(frozen=True)
class Schedule:
    """Length and learning rates of a training.

    Attributes:
        steps: number of optimiser steps.
        batch: images per step.
        lr: peak learning rate of AdamW (vectors, embeddings, convolutions).
        muon_lr: peak learning rate of Muon for the hidden matrices; 0 trains them with AdamW as well.
        warmup: steps of linear warm-up.
        decay: last fraction of the steps, in which the rate falls linearly to zero.
        ema: decay of the exponential moving average of the weights, which is the result.
        weight_decay: decoupled weight decay of the matrices.
    """

    steps: int
    batch: int
    lr: float
    muon_lr: float = 0.0
    warmup: int = 100
    decay: float = 0.3
    ema: float = 0.998
    weight_decay: float = 0.02

    def rate(self, step: int) -> float:
        """Fraction of the peak rate at a step (0-based); a trapezoid."""
        tail = max(1.0, self.decay * self.steps)
        return max(0.0, min(1.0, (step + 1) / max(1, self.warmup), (self.steps - step) / tail))


def _optimisers(module: nn.Module, s: Schedule, fp32: bool = False) -> list[torch.optim.Optimizer]:
    # Of torch >= 2.9. Its products are bf16.
    muon = getattr(torch.optim, "Muon", None) if s.muon_lr and not fp32 else None
    hidden, matrices, vectors = [], [], []
    for name, p in module.named_parameters():
        plain = not any(part in name for part in ("emb", "final", "latent", "output", "pos_for_diff"))
        inner = p.ndim == 2 and min(p.shape) >= 32 and plain
        (hidden if muon and inner else matrices if p.ndim >= 2 else vectors).append(p)

    groups = [{"params": p, "weight_decay": w} for p, w in ((matrices, s.weight_decay), (vectors, 0.0)) if p]
    out: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=s.lr, betas=(0.9, 0.98), eps=1e-8)]
    if muon and hidden:
        about = {"weight_decay": s.weight_decay, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
        out.append(muon(hidden, lr=s.muon_lr, **about))

    for o in out:
        for g in o.param_groups:
            g["peak"] = g["lr"]

    return out


def generator(seed: int, step: int) -> torch.Generator:
    """The random generator of one step."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % (2**63))


def seeded(seed: int, make: Callable[[], Net], start: nn.Module | None = None) -> Net:
    """A network with random weights of this seed, or a trainable
    copy of ``start``; the global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = make()

    if start is not None:
        net.load_state_dict(start.state_dict())
    return net


@dataclass(frozen=True)
class Job:
    """What the trainings of a run have in common; ``steps`` and
    ``images`` replace the recipes'. MPS trains in fp32, others in bf16 unless ``fp32`` is set.
    """

    folder: Path
    device: torch.device = torch.device("cpu")
    log: Callable[[str], None] = print
    steps: int | None = None
    images: int | None = None
    fp32: bool = False  # without bf16, and without Muon: many times as fast on a CPU that has no instructions for bf16

    def count(self, usual: int) -> int:
        """Number of training images."""
        return self.images or usual

    def schedule(self, usual: Schedule) -> Schedule:
        """A recipe's schedule, shortened to ``steps``."""
        if self.steps is None:
            return usual
        return replace(usual, steps=self.steps, warmup=min(usual.warmup, self.steps))


def train(job: Job, name: str, module: Net, loss: Loss, usual: Schedule, save_every: float = 120.0) -> Net:
    """Train ``module``, or resume the run ``<folder>/<name>.state.pt``, and return it with the averaged weights.

    ``loss`` draws its own batch from the step; ``usual`` is the recipe's schedule; ``save_every`` is in seconds.
    """
    folder, device, log, schedule = job.folder, job.device, job.log, job.schedule(usual)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.state.pt"
    module.to(device).train()
    optimisers = _optimisers(module, schedule, job.fp32)
    average = {k: v.detach().clone().float() for k, v in module.state_dict().items()}
    start = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        module.load_state_dict(state["model"])
        average, start = state["average"], state["step"]
        for o, saved in zip(optimisers, state["optimisers"], strict=True):
            peaks = [g["peak"] for g in o.param_groups]
            o.load_state_dict(saved)
            for g, peak in zip(o.param_groups, peaks, strict=True):
                g["peak"] = peak
        log(f"{name}: resuming at step {start} of {schedule.steps}")

    def save(step: int) -> None:
        state = {"model": module.state_dict(), "average": average, "step": step}
        state["optimisers"] = [o.state_dict() for o in optimisers]
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    half = device.type != "mps" and not job.fp32
    began = logged = saved = time.monotonic()
    seen: dict[str, float] = {}

    for step in range(start, schedule.steps):
        for o in optimisers:
            for g in o.param_groups:
                g["lr"] = g["peak"] * schedule.rate(step)
        # On CPUs the backward pass of fused attention is slower than that of plain attention at these sizes.
        plain = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
        with plain, torch.autocast(device.type, torch.bfloat16, enabled=half):
            value, figures = loss(module, step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for o in optimisers:
            o.step()
            o.zero_grad(set_to_none=True)
        keep = min(schedule.ema, (step + 1) / (step + 10))
        with torch.no_grad():
            for k, v in module.state_dict().items():
                average[k].lerp_(v.float(), 1 - keep)
        for k, f in {"loss": value, **figures}.items():
            f = float(f.detach() if isinstance(f, Tensor) else f)
            seen[k] = f if k not in seen or not math.isfinite(seen[k]) else seen[k] * 0.97 + f * 0.03
        now = time.monotonic()
        if now - logged > 10 or step + 1 == schedule.steps:
            pace = (now - began) / (step + 1 - start)
            text = "  ".join(f"{k} {f:.4f}" for k, f in seen.items())
            left = (schedule.steps - step - 1) * pace / 60
            log(f"{name}: step {step + 1}/{schedule.steps}  {text}  {pace:.3f} s/step  {left:.0f} min left")
            logged = now
        if now - saved > save_every or step + 1 == schedule.steps:
            save(step + 1)
            saved = now

    module.load_state_dict({k: v.to(module.state_dict()[k].dtype) for k, v in average.items()})

    return module.eval()
