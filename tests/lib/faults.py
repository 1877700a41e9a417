"""Injected lack of memory: the n-th call of torch that allocates much fails, for tests that try every n."""

import torch
from torch.overrides import TorchFunctionMode

# Functions whose results or scratch space dominate the memory of a network.
HEAVY = {
    "linear", "matmul", "__matmul__", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention",
    "conv2d", "conv_transpose2d", "interpolate", "layer_norm", "softmax", "embedding",
    "cat", "stack", "pad_sequence", "sort", "topk", "randn", "zeros", "new_zeros",
}  # fmt: skip


class Faults(TorchFunctionMode):
    """Counts heavy functions in a block, and fails the n-th.

    Args:
        at: number of the function call that fails, from 0; None: none.
        lasting: whether all later ones fail too.
        error: the exception; default torch's own.
    """

    def __init__(self, at: int | None = None, lasting: bool = False, error: BaseException | None = None):
        super().__init__()
        self.at, self.lasting, self.error = at, lasting, error
        self.calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in HEAVY:
            n, self.calls = self.calls, self.calls + 1
            if self.at is not None and (n == self.at or self.lasting and n > self.at):
                raise self.error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return function(*args, **(kwargs or {}))
