"""The canvas of MAR-like models: the state of the images while a sampler generates them.

:class:`Order` says which tokens each AR step (pass) decides, and with which guidance scale. :class:`TokenIndex` names
some tokens of some images. :class:`MARCanvas` holds the images, and makes the batches for the diffusion of their tokens
(:meth:`MARCanvas.batch`). ``prepare.py`` makes the order and the canvas of a run.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. Shapes: B images, L tokens of c channels, S diffusion steps, D the
width of the transformer, and P branches. P is 2 with guidance: the branch with the condition, and the null branch
without it. P is 1 without guidance. Latents are [B, C, H, W]. A position is the index of a token in its image, counted
row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...networks.mar import Conditioning, MARModel
from ...networks.torch_state import to_device
from ...reports.record import Report
from ..chain import DiffusionBatch, noise_for_steps
from ..diffusion_steps import StepTable, step_table
from ..engine import Canvas, Sampled
from ..noise import PairedNoise, StreamNoise, stream_noise
from .tables import Respacing, respacing


@dataclass(frozen=True, eq=False)
class Order:
    """Which positions each AR step decides, and with which guidance scale. Both are known before the first AR step.

    In an edit, the positions outside the mask are *fixed*: they count as decided before the first AR step.
    """

    # One entry for each AR step, the same for all images:
    count_before: tuple[int, ...]  # number of positions decided before the AR step, including fixed positions
    sizes: tuple[int, ...]  # number of positions that the AR step decides
    cfg: tuple[float, ...]  # guidance scale; the same numbers as in ``scale``
    decision_order: Tensor  # int64 [B, L], the positions in the order of their decision; fixed positions first
    # fp32 [B, L], ``cfg`` of the AR step that decides each position; 1 at fixed positions, where it has no effect
    scale: Tensor

    @property
    def steps(self) -> int:
        """Number of AR steps."""
        return len(self.sizes)

    @property
    def plan(self) -> dict[int, Tensor]:
        """The positions that each AR step decides, int64 [B, n], by the index of the AR step."""
        return {step: self.positions_from(step) for step in range(self.steps)}

    def positions_from(self, step: int, count: int = 1) -> Tensor:
        """The positions that ``count`` AR steps decide, from AR step ``step`` on, int64 [B, M], in the order of
        decision. If fewer than ``count`` AR steps are left, the result covers only these.
        """
        start = self.count_before[step]
        stop = start + sum(self.sizes[step : step + count])
        return self.decision_order[:, start:stop]

    def decided_before(self, step: int) -> Tensor:
        """The positions decided before AR step ``step``, int64 [B, K], ascending."""
        return self.decision_order[:, : self.count_before[step]].sort(dim=1).values

    def decided_before_each(self, images: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """:meth:`decided_before` for Q snapshots. A snapshot is an image at an AR step, see ``transformer.py``.

        Args:
            images: int64 [Q], the image of each snapshot.
            steps: the AR step of each snapshot.

        Returns:
            The positions of each snapshot, int64 [Q, K], ascending, then padding; and a mask, bool [Q, K], which is
            False on padding. The mask is None if there is no padding.
        """
        counts = [self.count_before[step] for step in steps]
        most = max(counts)
        decided = self.decision_order[images, :most]
        if min(counts) == most:
            return decided.sort(dim=1).values, None

        # The padding gets an index above every position, so the sort puts the padding last.
        last = self.decision_order.shape[1] - 1
        mask = torch.arange(most, device=decided.device) < to_device(torch.tensor(counts), decided.device)[:, None]
        padded_last = torch.where(mask, decided, last + 1).sort(dim=1).values
        return padded_last.clamp(max=last), mask


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Images and positions of N tokens that are chosen from a batch of images, without the tokens' values. The number
    of chosen tokens may differ between the images.

    In this example, there are two images with three positions each, and a mask chooses three of these six tokens. Each
    line of ``positions`` and of ``mask`` is an image. On the right are the three chosen tokens. The lines ``image`` and
    ``position`` are the field ``index``, and the lines ``image`` and ``column`` are the field ``index_by_column``::

                                                            token 1    token 2    token 3
        positions    5 2 7    mask    0 1 0    image        0          1          1
                     4 0 1            1 0 1    position     2          4          1
                                               column       1          0          2
    """

    # Image and position of each token, int64 [N] each. If ``values`` [B, L, ...] are values of all tokens of the
    # images, ``values[tokens.index]`` are the values of the N chosen tokens.
    index: tuple[Tensor, Tensor]
    # Image and column of each token, int64 [N] each; a column is an index in a line of ``positions``. If ``values``
    # [B, n, ...] are values of the tokens at ``positions``, ``values[tokens.index_by_column]`` are the values of the N
    # chosen tokens. None if all tokens of ``positions`` are chosen, one image after another; then
    # ``values.flatten(0, 1)`` are their values.
    index_by_column: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def all(positions: Tensor) -> TokenIndex:
        """All tokens at ``positions``, int64 [B, n], one image after another."""
        image = torch.arange(len(positions), device=positions.device).repeat_interleave(positions.shape[1])
        return TokenIndex((image, positions.flatten()))

    @staticmethod
    def in_columns(columns: Tensor, positions: Tensor) -> TokenIndex:
        """The tokens in the ``columns``, int64 [B, m], of ``positions``, int64 [B, n], one image after another."""
        image = torch.arange(len(columns), device=columns.device).repeat_interleave(columns.shape[1])
        column = columns.flatten()
        return TokenIndex((image, positions[image, column]), (image, column))

    @staticmethod
    def step_by_step(positions: Sequence[Tensor]) -> TokenIndex:
        """All tokens of several AR steps: one AR step after another, and within each AR step one image after another.

        ``positions``: int64 [B, n] for each AR step. The columns of the result are counted in all these tensors side by
        side. In this example, two images have two AR steps, of two positions and of one position::

            positions    5 2 | 7        image       0 0 1 1 | 0 1
                         4 0 | 1        position    5 2 4 0 | 7 1
                                        column      0 1 0 1 | 2 2
        """
        images = []
        columns = []
        first = 0  # the first column of the AR step
        for step_positions in positions:
            images.append(TokenIndex.all(step_positions).index[0])
            end = first + step_positions.shape[1]
            columns.append(torch.arange(first, end, device=step_positions.device).repeat(len(step_positions)))
            first = end

        image = torch.cat(images)
        position = torch.cat([step_positions.flatten() for step_positions in positions])
        return TokenIndex((image, position), (image, torch.cat(columns)))

    def __len__(self) -> int:
        return len(self.index[0])


class StartTimesteps(NamedTuple):
    """Two timesteps. They differ only if the settings limit the first timestep; see :func:`start_timesteps`."""

    # Where the diffusion of every token starts, also in a draft model, and also in the shorter diffusions of DiSA and
    # FastHybrid.
    first: int
    # Where the diffusion of unaccelerated MAR starts. The noise of the run has an entry for every step of this
    # diffusion, so this noise is identical to the noise of unaccelerated MAR.
    of_noise: int


@dataclass(eq=False)
class MARCanvas(Canvas):
    """The canvas of a MAR model. ``values`` are the tokens, fp32 [B, L, c]."""

    model: MARModel
    # The settings of the sampler. Each sampler has a settings class, and all these classes have the fields of MARBase.
    # A function that reads other fields names the class in a local variable.
    settings: Any
    noise: PairedNoise
    order: Order = field(kw_only=True)
    conditioning: Conditioning = field(kw_only=True)  # the condition as the network reads it
    # The latents of the image to edit, fp32 [1 or B, C, H, W]; None without an edit.
    edit_latents: Tensor | None = field(default=None, kw_only=True)
    timesteps: StartTimesteps = field(kw_only=True)  # where the diffusions start

    guided: bool = field(init=False)  # whether guidance is on, so there is a null branch

    # State of LazyMAR, int32 [B, L]: for each token, how many passes took the token's row in the decoder from the token
    # cache. None without this cache.
    cached: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.total = self.order.steps
        self.guided = self.settings.uses_guidance

    def with_model(self, model: MARModel, conditioning: Conditioning, report: Report) -> MARCanvas:
        """A new canvas for a second model, which reads the tokens of the same images. Only the first canvas (``self``)
        decides tokens.

        ``conditioning``: the condition as the second model reads it. ``report`` counts the second model's work. The two
        canvases share everything else that a sampler reads: the tensor of the tokens, the order, the noise, the clock,
        and the timestep at which the diffusion starts.
        """
        return MARCanvas(
            model,
            self.settings,
            self.noise,
            self.grid,
            self.values,
            report,
            regenerated=self.regenerated,
            order=self.order,
            conditioning=conditioning,
            edit_latents=self.edit_latents,
            timesteps=self.timesteps,
            clock=self.clock,
        )

    def to_latents(self, values: Tensor) -> Tensor:
        """Turn tokens, fp32 [B, L, c], into latents, fp32 [B, C, H, W]. In an edit, the latents outside the mask
        come from :attr:`edit_latents`.
        """
        latents = self.model.to_latents(values)
        if self.edit_latents is None or self.regenerated is None:
            return latents
        patch = self.model.patch
        sampled = self.regenerated.unflatten(1, self.grid)[:, None]  # bool [B, 1, h, w]
        sampled = sampled.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
        return torch.where(sampled, latents, self.edit_latents)

    @torch.inference_mode(False)
    def finish(self) -> Sampled:
        """See :meth:`.Canvas.finish`. With LazyMAR's token cache, the report also gets the map :attr:`cached`."""
        if self.cached is not None:
            cached = self.cached.unflatten(1, self.grid).cpu().numpy()
            self.report.maps["cached"] = cached
            self.report.add(cached_tokens=int(cached.sum()))
        return super().finish()

    # --- the diffusion of a token

    def respaced_diffusion(self, count: int) -> Respacing:
        """The coefficients of a diffusion in at most ``count`` steps; see :func:`.tables.respacing`."""
        return respacing(count, self.timesteps.first, self.model.max_beta)

    def step_table(self, count: int) -> StepTable:
        """The steps of :meth:`respaced_diffusion`, on the device. As in the published code, the last step adds no
        noise.
        """
        respaced = self.respaced_diffusion(count)
        return step_table(respaced.without_last_noise, self.time_embeddings(respaced))

    @torch.no_grad()
    def time_embeddings(self, respaced: Respacing) -> Tensor:
        """The diffusion head's embeddings of the timesteps, [S, w], highest timestep first; w is the head's width."""
        return self.model.net.head.time_embed(to_device(respaced.timestep_map.flip(0), self.device))

    def noise_of(self, stream: str) -> StreamNoise:
        """The noise of a stream (see :class:`.StreamNoise`) for every token, on the device.

        Raises:
            LookupError: ``settings.streams()`` lacks the stream.
        """
        streams = self.settings.streams()
        if stream not in streams:
            raise LookupError(
                f"{type(self.settings).__name__}.streams() lacks {stream!r}; declare its diffusion steps."
            )

        config = self.model.net.config
        count = len(respacing(streams[stream], self.timesteps.of_noise, self.model.max_beta))
        return stream_noise(self.noise, stream, count, config.tokens, config.channels, self.device)

    def batch(self, table: StepTable, tokens: TokenIndex, z: Tensor, noise: StreamNoise) -> DiffusionBatch:
        """A batch for the diffusion of N tokens, in their states before the first diffusion step of ``table``. Each
        token gets the guidance scale of the AR step that decides it.

        Args:
            table: the diffusion steps to take.
            tokens: the N tokens.
            z: the conditions z of n positions in each image, [P, B, n, D]; the N tokens are at some or all of these
                positions.
            noise: noise of all tokens of the images; it may have more diffusion steps than ``table``.
        """
        image, position = tokens.index
        if tokens.index_by_column is None:  # all positions, one image after another
            z_of_tokens = z.flatten(1, 2)
        else:
            _, column = tokens.index_by_column
            z_of_tokens = z[:, image, column]
        return DiffusionBatch(
            z=z_of_tokens,  # [P, N, D]
            cfg=self.order.scale[tokens.index][:, None],
            x=noise.start[tokens.index],
            noise=noise_for_steps(noise.steps[:, image, position], len(table.times)),
            table=table,
            temperature=self.settings.temperature,
        )
