"""The random numbers of a stream of :class:`TokenNoise`, on the device of the cells."""

from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from torch import Tensor


def uniform_of(noise: TokenNoise, stream: str, cells: Tensor, values: int) -> Tensor:
    return noise.stream(stream, values, cells.device).uniform(cells)


def gumbel_of(noise: TokenNoise, stream: str, cells: Tensor, values: int) -> Tensor:
    return noise.stream(stream, values, cells.device).gumbel(cells)
