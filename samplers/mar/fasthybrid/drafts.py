"""FastHybrid's drafts and their verification, and the conditions z on which both depend.

``__init__.py`` explains the method and its symbols. Shapes: B images of L tokens, c channels of a token, C transformer
width, and P branches of guidance. All tensors [B, L, ...] of this file are *by column*: column i is for the i-th token
in the order in which an image decides its tokens (see ``pace.py``).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED, PLAIN, REDONE
from ..canvas import MARCanvas
from ..tokens import TokenIndex
from ..transformer import Snapshots, Transformer
from .pace import Pace


class NewestConditions:
    """The newest output z of the transformer for every token: the condition of the diffusion head."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer):
        self.order = canvas.order
        self.transformer = transformer
        self._z = torch.zeros(0)  # empty until the first pass, which is for all images

    def update(self, pace: Pace) -> Tensor:
        """Run a pass for the images that have moved to a new AR step. Returns z by column, [P, B, L, C]. For every
        image, z is up to date in the columns of the mask ``pace.ahead``.
        """
        images = pace.moved.flatten().nonzero().flatten()
        if len(images):
            self._run_pass(pace, images)
        return self._z

    def _run_pass(self, pace: Pace, images: Tensor) -> None:
        """Run a pass for the images with these indices, int64 [I], and store the z that it computes."""
        # The columns of ``pace.ahead`` for each image. A pass needs the same number of columns for all images, so an
        # image with fewer columns gets neighbouring columns too. For example, with the AR steps of the example in
        # ``pace.py``, and images at the AR steps 1, 2 and 3:
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

        # Run the transformer for the positions in these columns.
        image_and_column = torch.stack([images[:, None].expand_as(columns), columns])
        image, column = to_device(image_and_column, self.order.decision_order.device)
        wanted = self.order.decision_order[image, column]
        snapshots = Snapshots(images.tolist(), steps.flatten().tolist())
        z = self.transformer.for_snapshots(snapshots, wanted)

        if not self._z.numel():
            self._z = z.new_zeros(len(z), *self.order.decision_order.shape, z.shape[-1])
        self._z[:, image, column] = z


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

    def store(self, mask: Tensor, tokens: TokenIndex, x: Tensor, z: Tensor) -> None:
        """Store drafts of N tokens.

        Args:
            mask: the N tokens as a mask.
            tokens: the same N tokens, from :meth:`.Pace.tokens_at`.
            x: the drafts x', fp32 [N, c].
            z: the conditions z' from which the drafts were sampled, [N, C].
        """
        self.has_draft |= mask
        self.newest[tokens.index_by_column] = x
        self.conditions[tokens.index_by_column] = z.float()

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
