"""What the tests of all samplers share: a run step by step, and what it must not change in its process."""

import random
from typing import Any

import numpy as np
import torch
from torch_states import state_of_torch


def stepped(steps: Any) -> tuple[list[Any], Any]:
    """All steps of a run, each looked at, and its result."""
    seen = []
    try:
        while True:
            step = next(steps)
            seen.append(step)
            getattr(step, "latents", None)  # what nobody reads before the next step cannot be read later
    except StopIteration as end:
        return seen, end.value


def process_state() -> list[Any]:
    state = [torch.random.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]
    return [*state, *state_of_torch(), torch.is_deterministic_algorithms_warn_only_enabled()]
