"""The AR step of each image, and which tokens a pass of FastHybrid samples and decides.

``__init__.py`` explains the method. Shapes: B images of L tokens. Masks of images are bool [B, 1]. Masks of tokens are
bool [B, L]; column i is for the i-th token in the order in which an image decides its tokens. In this example, four AR
steps decide 1, 2, 3 and 4 tokens, and a lookahead samples the tokens of two AR steps (k is 2). These are the masks
:attr:`Pace.present` and :attr:`Pace.ahead` of an image whose present AR step is 1 (x is True)::

    column     0   1 2   3 4 5   6 7 8 9
    AR step    0   1 1   2 2 2   3 3 3 3
    present    .   x x   . . .   . . . .
    ahead      .   x x   x x x   . . . .

Three tables of :class:`Pace` say where the masks begin and end. Both masks begin at the column ``first_column``. They
end before the columns ``present_end`` and ``ahead_end``. The masks of a finished image are empty::

    AR step         0  1  2  3  finished
    first_column    0  1  3  6  10
    present_end     1  3  6  10 10
    ahead_end       3  6  10 10 10

All tensors of this file are on the host, except the result of :meth:`Pace.tokens_at`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ..canvas import MARCanvas
from ..tokens import TokenIndex


class Pace:
    """The *present* AR step of every image, and masks that follow from it."""

    unfinished: Tensor  # mask of the images that have AR steps left
    moved: Tensor  # mask of the images that have moved to a new AR step since the previous pass
    present: Tensor  # mask of the tokens of each image's present AR step
    ahead: Tensor  # mask of the same tokens, and of the later tokens that a lookahead from this AR step drafts

    def __init__(self, canvas: MARCanvas):
        order = canvas.order
        steps = order.steps
        reach = canvas.settings.reach
        self.order = order

        # For every AR step, and then for finished images: the tables at the top of this file, int64 [steps + 1] each.
        firsts = [*order.count_before, canvas.cells]
        self.first_column = torch.tensor(firsts)
        self.present_end = torch.tensor([*firsts[1:], canvas.cells])
        self.ahead_end = torch.tensor([firsts[min(step + reach(step), steps)] for step in range(steps + 1)])
        self.column = torch.arange(canvas.cells)  # int64 [L]

        # The present AR step of every image, int64 [B, 1]; order.steps once the image is finished.
        self.step_of_image = torch.full((canvas.images, 1), -1)
        self.advance(self.step_of_image < 0)

    @property
    def mean_step(self) -> int:
        """Number of AR steps that are done, averaged over the images and rounded down."""
        return int(self.step_of_image.sum()) // len(self.step_of_image)

    def advance(self, advancing: Tensor) -> None:
        """Move the images in the mask ``advancing`` on to their next AR step."""
        self.step_of_image = self.step_of_image + advancing
        self.unfinished = self.step_of_image < self.order.steps
        self.moved = advancing & self.unfinished

        step = self.step_of_image
        begun = self.first_column[step] <= self.column
        self.present = begun & (self.column < self.present_end[step])
        self.ahead = begun & (self.column < self.ahead_end[step])

    def tokens_at(self, mask: Tensor) -> TokenIndex:
        """The N tokens in ``mask``, on the device, one image after another. Their columns are those of the mask."""
        positions = self.order.decision_order
        image, column = to_device(mask.nonzero().T, positions.device)
        return TokenIndex((image, positions[image, column]), column)

    def steps_of(self, mask: Tensor) -> Tensor:
        """For each of the N tokens in ``mask``, the present AR step of its image: int32 [N], in the order of
        :meth:`tokens_at`.
        """
        return self.step_of_image.int().expand_as(mask)[mask]


class Decision(NamedTuple):
    """Which images go on after a pass, and which tokens the sampler samples for this. Every decided token is either
    sampled by a full diffusion or refined.
    """

    advancing: Tensor  # mask of the images that decide their present AR step and go on to the next
    decided: Tensor  # mask of the decided tokens: all tokens of the present AR step in the advancing images
    refined: Tensor  # mask of the decided tokens that have an accepted draft
    # Mask of the tokens that a full diffusion samples: the decided tokens without an accepted draft, and the tokens of
    # later AR steps in the lookahead. For these later tokens, the samples are drafts.
    sampled_in_full: Tensor
    step: int  # the AR step that determines the number of diffusion steps of the full diffusion


def next_decision(pace: Pace, accepted: Tensor, together: bool) -> Decision:
    """Decide which images go on after a pass.

    An image is *ready* if every token of its present AR step has an accepted draft. Ready images go on at once, in few
    head calls, and all other images wait. If no image is ready, all unfinished images go on together, because a full
    diffusion takes the same number of sequential head calls for one image as for all images.

    Args:
        pace: the AR step of each image.
        accepted: mask of the accepted drafts.
        together: whether all images must stay at the same AR step. If it is False, the caller must use the same number
            of diffusion steps for all AR steps.
    """
    # Mask of the images with a token that has no accepted draft.
    needs_diffusion = (pace.present & ~accepted).any(1, keepdim=True)
    ready = pace.unfinished & ~needs_diffusion
    advancing = ready if ready.any() and not together else pace.unfinished

    decided = pace.present & advancing
    return Decision(
        advancing=advancing,
        decided=decided,
        refined=decided & accepted,
        sampled_in_full=pace.ahead & ~accepted & needs_diffusion & advancing,
        step=int(pace.step_of_image[advancing].max()),
    )
