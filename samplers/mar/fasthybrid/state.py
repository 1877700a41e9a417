"""The state of FastHybrid: the AR step of each image, the conditions z, and the drafts with their verification.

``__init__.py`` explains the method and its symbols. Shapes: B images of L tokens, c channels of a token, C transformer
width, and P branches of guidance. Tensors [B, L, ...] are *by column*: column i is for the i-th token in the order in
which an image decides its tokens (see :class:`Pace`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED, PLAIN, REDONE
from ..canvas import MARCanvas, TokenIndex
from ..transformer import Snapshots, Transformer


class Pace:
    """The *present* AR step of every image, and masks that follow from it.

    Masks of images are bool [B, 1]. Masks of tokens are bool [B, L]; column i is for the i-th token in the order in
    which an image decides its tokens. In this example, four AR steps decide 1, 2, 3 and 4 tokens, and a lookahead
    samples the tokens of two AR steps (k is 2). These are the masks :attr:`present` and :attr:`ahead` of an image whose
    present AR step is 1 (x is True)::

        column     0   1 2   3 4 5   6 7 8 9
        AR step    0   1 1   2 2 2   3 3 3 3
        present    .   x x   . . .   . . . .
        ahead      .   x x   x x x   . . . .

    Three tables say where the masks begin and end. Both masks begin at the column ``first_column``. They end before the
    columns ``present_end`` and ``ahead_end``. The masks of a finished image are empty::

        AR step         0  1  2  3  finished
        first_column    0  1  3  6  10
        present_end     1  3  6  10 10
        ahead_end       3  6  10 10 10

    All tensors are on the host, except ``decision_order`` and the result of :meth:`tokens_at`.
    """

    unfinished: Tensor  # mask of the images that have AR steps left
    moved: Tensor  # mask of the images that have moved to a new AR step since the previous pass
    present: Tensor  # mask of the tokens of each image's present AR step
    ahead: Tensor  # mask of the same tokens, and of the later tokens that a lookahead from this AR step drafts

    def __init__(self, canvas: MARCanvas):
        steps = canvas.order.steps
        reach = canvas.settings.reach
        self.decision_order = canvas.order.decision_order
        self.steps = steps

        # For every AR step, and then for finished images: the tables above, int64 [steps + 1] each.
        firsts = [*canvas.order.count_before, canvas.cells]
        self.first_column = torch.tensor(firsts)
        self.present_end = torch.tensor([*firsts[1:], canvas.cells])
        self.ahead_end = torch.tensor([firsts[min(step + reach(step), steps)] for step in range(steps + 1)])
        self.column = torch.arange(canvas.cells)  # int64 [L]

        # The present AR step of every image, int64 [B, 1]; ``steps`` once the image is finished.
        self.step_of_image = torch.full((canvas.images, 1), -1)
        self.advance(self.step_of_image < 0)

    def advance(self, advancing: Tensor) -> None:
        """Move the images in the mask ``advancing`` on to their next AR step."""
        self.step_of_image = self.step_of_image + advancing
        self.unfinished = self.step_of_image < self.steps
        self.moved = advancing & self.unfinished

        step = self.step_of_image
        begun = self.first_column[step] <= self.column
        self.present = begun & (self.column < self.present_end[step])
        self.ahead = begun & (self.column < self.ahead_end[step])

    def tokens_at(self, mask: Tensor) -> TokenIndex:
        """The N tokens in ``mask``, on the device, one image after another. Their columns are those of the mask."""
        image, column = to_device(mask.nonzero().T, self.decision_order.device)
        return TokenIndex((image, self.decision_order[image, column]), (image, column))


class Decision(NamedTuple):
    """Which images go on to their next AR step after a pass, and which tokens the sampler samples before they go on.
    Every decided token is either sampled by a full diffusion or refined.
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


class NewestConditions:
    """The newest output z of the transformer for every token: the condition of the diffusion head."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer):
        self.canvas = canvas
        self.transformer = transformer
        self._z = torch.zeros(0)  # empty until the first pass, which is for all images

    def update(self, pace: Pace) -> Tensor:
        """Run a pass for the images that have moved to a new AR step. Returns z by column, [P, B, L, C]. For every
        image, z is up to date in the columns of the mask ``pace.ahead``.
        """
        images = pace.moved.flatten().nonzero().flatten()  # int64 [I]
        if not len(images):
            return self._z

        # 1. The columns of ``pace.ahead`` for each image. A pass needs the same number of columns for all images, so an
        # image with fewer columns gets neighbouring columns too. For example, let three images be at AR steps 1, 2 and
        # 3 of the example of :class:`Pace`:
        #
        #     pace.ahead          columns of the pass
        #       1 2 3 4 5           1 2 3 4 5 6 7
        #           3 4 5 6 7 8 9       3 4 5 6 7 8 9
        #                 6 7 8 9       3 4 5 6 7 8 9
        steps = pace.step_of_image[images]
        first_column = pace.first_column[steps]  # [I, 1]
        width = int((pace.ahead_end[steps] - first_column).max())
        last_begin = len(pace.column) - width  # the last column at which a pass can begin; 3 in the example
        columns = first_column.clamp(max=last_begin) + torch.arange(width)  # [I, width]

        # 2. Run the transformer for the positions in these columns.
        order = self.canvas.order.decision_order
        image_and_column = torch.stack([images[:, None].expand_as(columns), columns])
        image, column = to_device(image_and_column, order.device)
        wanted = order[image, column]
        image_list, step_list = images.tolist(), steps.flatten().tolist()
        if len(image_list) == self.canvas.images and len(set(step_list)) == 1:
            z = self.transformer(step_list[0], wanted)
        else:
            z = self.transformer.for_snapshots(Snapshots(image_list, step_list), wanted)

        # 3. Store the z of these columns.
        if not self._z.numel():
            self._z = z.new_zeros(len(z), *order.shape, z.shape[-1])
        self._z[:, image, column] = z
        return self._z


class TokenDrafts:
    """The drafts of all tokens, and which of them are accepted. Refined drafts and full samples are stored here too.

    Args:
        canvas: the images.
        threshold: lambda.
    """

    def __init__(self, canvas: MARCanvas, threshold: float):
        images, length, _ = canvas.values.shape
        self.threshold = threshold
        self.report = canvas.report

        # On the device: the newest value that was sampled for each token, fp32 [B, L, c]. Before a token is decided, it
        # is the draft x'. Then it is the result: the refined draft, or a sample of a full diffusion.
        self.newest = torch.zeros_like(canvas.values)
        # On the device: z', from which the draft was sampled, fp32 [B, L, C].
        self.conditions = torch.zeros(images, length, canvas.model.net.config.dim, device=canvas.device)

        # On the host: whether a token has a draft, bool [B, L]; whether this draft is accepted, bool [B, L]; and the
        # outcome of the draft, uint8 [B, L], as in ``reports/record.py``.
        self.has_draft = torch.zeros(images, length, dtype=torch.bool)
        self.accepted = torch.zeros(images, length, dtype=torch.bool)
        self.outcome = torch.full((images, length), PLAIN, dtype=torch.uint8)

        self._similarities: list[Tensor] = []  # for each verification, cos(z', z) of n drafts, [n] on the device

    def verify(self, pace: Pace, z: Tensor) -> None:
        """Verify the drafts of the images that have moved to a new AR step, for the tokens of that AR step. A draft is
        accepted if cos(z', z) >= lambda.

        ``z``: the newest z of the branch that reads the user's condition, [B, L, C].
        """
        verified = pace.present & pace.moved & self.has_draft
        index = pace.tokens_at(verified).index_by_column
        cosine = F.cosine_similarity(self.conditions[index], z[index].float(), dim=-1)
        self._similarities.append(cosine)
        accepted = (cosine >= self.threshold).cpu()  # in an AR step, the host waits for the device only here

        self.accepted[verified] = accepted
        self.outcome[verified] = torch.where(accepted, ACCEPTED, REDONE).to(torch.uint8)
        rejected = verified & ~self.accepted
        self.report.add(
            accepted=int(accepted.sum()),
            rejected=int(rejected.sum()),
            restarts=int(rejected.any(1).sum()),
        )

    def similarity(self) -> np.ndarray:
        """cos(z', z) of all verified drafts, fp32 [n]."""
        return torch.cat(self._similarities).cpu().numpy()
