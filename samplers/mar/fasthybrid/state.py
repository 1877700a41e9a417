"""The state of FastHybrid: the AR step of each image, the conditions z, and the drafts with their verification.

``__init__.py`` explains the method and its symbols. Shapes: B images of L tokens, c channels of a token, D transformer
width, and P branches of guidance. N tokens are chosen from all images, and a pass is for I of the B images. Tensors
[B, L, ...] are *by column*: column i is for the i-th token in the order in which an image decides its tokens (see
:class:`Pace`).
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
from .settings import FastHybridSettings


class Pace:
    """The *present* AR step of every image, and masks that follow from it.

    Masks of images are bool [B, 1]. Masks of tokens are bool [B, L], by column. In this example, four AR steps decide
    1, 2, 3 and 4 tokens, and a lookahead samples the tokens of two AR steps (k is 2). These are the masks
    :attr:`present` and :attr:`ahead` of an image whose present AR step is 1 (x is True)::

        column     0   1 2   3 4 5   6 7 8 9
        AR step    0   1 1   2 2 2   3 3 3 3
        present    .   x x   . . .   . . . .
        ahead      .   x x   x x x   . . . .

    Three tables, int64 [number of AR steps + 1], say where the masks begin and end. Both masks begin at the column
    ``first_column``. They end before the columns ``present_end`` and ``ahead_end``. The masks of a finished image are
    empty::

        AR step         0  1  2  3  finished
        first_column    0  1  3  6  10
        present_end     1  3  6  10 10
        ahead_end       3  6  10 10 10

    All tensors are on the host, except ``decision_order`` and the result of :meth:`tokens_at`.
    """

    # The present AR step of every image, int64 [B, 1]; the number of AR steps once the image is finished.
    step_of_image: Tensor
    unfinished: Tensor  # mask of the images that have AR steps left
    moved: Tensor  # mask of the images that have moved to a new AR step since the previous pass
    present: Tensor  # mask of the tokens of each image's present AR step
    ahead: Tensor  # mask of the same tokens, and of the later tokens that a lookahead from this AR step drafts

    def __init__(self, canvas: MARCanvas):
        settings: FastHybridSettings = canvas.settings
        self.decision_order = canvas.order.decision_order
        self.steps = canvas.order.steps

        # The tables above. After the entries of the AR steps, each has an entry for finished images.
        first_column = [*canvas.order.count_before, canvas.cells]
        ahead_end = []
        for step in range(self.steps + 1):
            first_step_after_lookahead = min(step + settings.reach(step), self.steps)
            ahead_end.append(first_column[first_step_after_lookahead])
        self.first_column = torch.tensor(first_column)
        self.present_end = torch.tensor([*first_column[1:], canvas.cells])
        self.ahead_end = torch.tensor(ahead_end)
        self.columns = torch.arange(canvas.cells)  # int64 [L]

        # All images move from -1, which means before the first AR step, to AR step 0.
        self.step_of_image = torch.full((canvas.images, 1), -1)
        self.move_to(torch.zeros_like(self.step_of_image))

    def move_to(self, step: Tensor) -> None:
        """Set the present AR step of every image to ``step``, int64 [B, 1], and compute the masks."""
        self.unfinished = step < self.steps
        self.moved = (step != self.step_of_image) & self.unfinished
        self.step_of_image = step

        begun = self.first_column[step] <= self.columns
        self.present = begun & (self.columns < self.present_end[step])
        self.ahead = begun & (self.columns < self.ahead_end[step])

    def tokens_at(self, mask: Tensor) -> TokenIndex:
        """The N tokens in ``mask``, on the device, one image after another, and in each image by column. The result's
        ``index_by_column`` has the columns of the mask. Indexing a tensor [B, L] with the mask gives values in the same
        order.
        """
        image, column = to_device(mask.nonzero().T, self.decision_order.device)
        return TokenIndex((image, self.decision_order[image, column]), (image, column))


class Decision(NamedTuple):
    """Which images go on to their next AR step after a pass, and which tokens the sampler samples before they go on.
    Every decided token is either sampled by a full diffusion or refined. The masks are on the host.
    """

    advancing: Tensor  # bool [B, 1], the images that decide their present AR step and go on to the next
    decided: Tensor  # bool [B, L], the decided tokens: all tokens of the present AR step in the advancing images
    refined: Tensor  # bool [B, L], the decided tokens that have an accepted draft
    # bool [B, L], the tokens that a full diffusion samples: the decided tokens without an accepted draft, and the
    # tokens of later AR steps in the lookahead. For these later tokens, the samples are drafts.
    sampled_in_full: Tensor
    step: int  # the AR step that determines the number of diffusion steps of the full diffusion


def next_decision(pace: Pace, accepted: Tensor, together: bool) -> Decision:
    """Decide which images go on after a pass.

    An image is *ready* if every token of its present AR step has an accepted draft. Ready images go on at once, in few
    head calls, and all other images wait. If no image is ready, all unfinished images go on together, because a full
    diffusion takes the same number of sequential head calls for one image as for all images.

    Args:
        pace: the AR step of each image.
        accepted: the tokens with an accepted draft, bool [B, L].
        together: whether all images must stay at the same AR step. If it is False, the caller must use the same number
            of diffusion steps for all AR steps.
    """
    # The images whose present AR step has a token without an accepted draft, bool [B, 1].
    needs_diffusion = (pace.present & ~accepted).any(1, keepdim=True)
    ready = pace.unfinished & ~needs_diffusion
    only_ready_advance = bool(ready.any()) and not together
    advancing = ready if only_ready_advance else pace.unfinished

    decided = pace.present & advancing
    in_diffusion = needs_diffusion & advancing  # the images with tokens in the full diffusion, bool [B, 1]
    return Decision(
        advancing=advancing,
        decided=decided,
        refined=decided & accepted,
        sampled_in_full=pace.ahead & ~accepted & in_diffusion,
        step=int(pace.step_of_image[advancing].max()),
    )


class NewestConditions:
    """The newest output z of the transformer for every token: the condition of the diffusion head."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer):
        self.canvas = canvas
        self.transformer = transformer
        self._z: Tensor | None = None  # by column, [P, B, L, D]; None before the first pass

    def update(self, pace: Pace) -> Tensor:
        """Run a pass for the images that have moved to a new AR step. Returns z by column, [P, B, L, D]. For every
        image, z is up to date in the columns of the mask ``pace.ahead``.
        """
        images = pace.moved.flatten().nonzero().flatten()  # int64 [I]
        if self._z is not None and not len(images):
            return self._z  # all images that have moved are finished now

        # 1. On the host: the columns of the pass, which include the columns of ``pace.ahead``. A pass needs the same
        #    number of columns for all images. An image with fewer columns gets the columns after them too, or at the
        #    end of the image the columns before them. For example, let three images be at AR steps 1, 2 and 3 of the
        #    example of :class:`Pace`:
        #
        #        pace.ahead          columns of the pass
        #          1 2 3 4 5           1 2 3 4 5 6 7
        #              3 4 5 6 7 8 9       3 4 5 6 7 8 9
        #                    6 7 8 9       3 4 5 6 7 8 9
        steps = pace.step_of_image[images]  # [I, 1]
        begin = pace.first_column[steps]  # [I, 1]
        width = int((pace.ahead_end[steps] - begin).max())
        last_begin = len(pace.columns) - width  # the last column at which a pass can begin; 3 in the example
        columns = begin.clamp(max=last_begin) + torch.arange(width)  # [I, width]
        images_and_columns = torch.stack([images[:, None].expand_as(columns), columns])

        # 2. On the device: the image, the column and the position of every condition of the pass, [I, width] each.
        order = self.canvas.order.decision_order
        image, column = to_device(images_and_columns, order.device)
        wanted = order[image, column]

        # 3. Run the transformer. If the pass is for all images, and they are at the same AR step, no snapshots are
        #    needed. Every transformer can do this.
        ar_steps = steps.flatten().tolist()
        if len(images) == self.canvas.images and len({*ar_steps}) == 1:
            z = self.transformer(ar_steps[0], wanted)
        else:
            z = self.transformer.for_snapshots(Snapshots(images.tolist(), ar_steps), wanted)

        # 4. Store the conditions z [P, I, width, D].
        if self._z is None:
            self._z = z.new_zeros(len(z), *order.shape, z.shape[-1])
        self._z[:, image, column] = z
        return self._z


class SampledTokens:
    """The newest sample of every token, and the verification of the samples that are drafts.

    Args:
        canvas: the images.
        threshold: lambda.
    """

    def __init__(self, canvas: MARCanvas, threshold: float):
        images, length, _ = canvas.values.shape
        self.threshold = threshold
        self.report = canvas.report

        # On the device, by column: the newest value that was sampled for each token, fp32 [B, L, c]. Before a token is
        # decided, it is the draft x'. Then it is the result: the refined draft, or a sample of a full diffusion.
        self.values = torch.zeros_like(canvas.values)
        # On the device, by column: the condition of the token's newest full diffusion, fp32 [B, L, D]. For a draft,
        # this is z'.
        self.conditions = torch.zeros(images, length, canvas.model.net.config.dim, device=canvas.device)

        # On the host, by column, like the masks of Pace: whether a token has a draft, bool [B, L]; whether this draft
        # is accepted, bool [B, L]; and the outcome of the draft, uint8 [B, L], as in ``reports/record.py``.
        self.has_draft = torch.zeros(images, length, dtype=torch.bool)  # host
        self.accepted = torch.zeros(images, length, dtype=torch.bool)  # host
        self.outcome = torch.full((images, length), PLAIN, dtype=torch.uint8)  # host

        self._similarities: list[Tensor] = []  # for each verification, cos(z', z) of N drafts, [N] on the device

    def verify(self, pace: Pace, z: Tensor) -> None:
        """Verify the drafts of the images that have moved to a new AR step, for the tokens of that AR step. A draft is
        accepted if cos(z', z) >= lambda.

        ``z``: the newest z of the branch that reads the user's condition, [B, L, D].
        """
        verified = pace.present & pace.moved & self.has_draft
        index = pace.tokens_at(verified).index_by_column
        cosine = F.cosine_similarity(self.conditions[index], z[index].float(), dim=-1)
        self._similarities.append(cosine)
        # bool [N]. In an AR step, the host waits for the device only here.
        is_similar = (cosine >= self.threshold).cpu()

        self.accepted[verified] = is_similar
        self.outcome[verified] = torch.where(is_similar, ACCEPTED, REDONE).to(torch.uint8)
        rejected = verified & ~self.accepted
        self.report.add(
            accepted=int(is_similar.sum()),
            rejected=int(rejected.sum()),
            restarts=int(rejected.any(1).sum()),  # images in which this AR step rejects a draft
        )

    def similarity(self) -> np.ndarray:
        """cos(z', z) of all verified drafts of the run, fp32 [n]."""
        return torch.cat(self._similarities).cpu().numpy()
