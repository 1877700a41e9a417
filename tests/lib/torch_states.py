"""What other packs and scripts leave in torch, as blocks in which a test runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch

State = Callable[[], AbstractContextManager]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def rounded_products() -> Iterator[None]:
    """On a CPU that has them, products of fp32 numbers are computed in bf16."""
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def everything() -> Iterator[None]:
    """The worst of the states together."""
    with ExitStack() as all_of_them:
        for name in ("default dtype bf16", "autocast", "device meta", "rounded products", "gradients"):
            all_of_them.enter_context(STATES[name]())
        yield


STATES: dict[str, State] = {
    "default dtype bf16": partial(default_dtype, torch.bfloat16),
    "default dtype fp16": partial(default_dtype, torch.float16),
    "default dtype fp64": partial(default_dtype, torch.float64),
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "default device meta": partial(default_device, "meta"),
    "device meta": partial(torch.device, "meta"),
    "rounded products": rounded_products,
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "deterministic algorithms": deterministic,
    "everything": everything,
}


def state_of_torch() -> list[object]:
    """What the states above change."""
    matmul, convolution = getattr(torch.backends.mkldnn, "matmul", None), getattr(torch.backends.mkldnn, "conv", None)
    return [
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.empty(0).device,
        torch.get_float32_matmul_precision(),
        getattr(matmul, "fp32_precision", None),
        getattr(convolution, "fp32_precision", None),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    ]
