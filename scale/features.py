"""Networks that turn pictures into features: torch-fidelity's Inception, a function of the user, and LPIPS.

torch-fidelity, LPIPS and their weights are not part of the pack. They are imported when a measure needs them; a missing one is reported
in one sentence before anything is computed.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError, first_line

INCEPTION = "inception"
# Inception of the original FID, converted from TensorFlow by torch-fidelity's authors.
WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
SOURCE = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS}"
_BATCH = 50
_MOST_FEATURES = 1 << 16


@dataclass(frozen=True)
class Extractor:
    """A network that turns pictures into features.

    Attributes:
        name: in tables, and part of what makes two figures comparable.
        run: from uint8 [n, H, W, 3] on the CPU to features [n, D], and logits [n, C] or None.
    """

    name: str
    run: Callable[[Tensor], tuple[Tensor, Tensor | None]]

    def __call__(self, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Features float32 [N, D] of pictures uint8 [N, H, W, 3], and logits [N, C] or None.

        Raises:
            UserError: the network gives another shape, or values that are not finite.
        """
        parts = [self._part(pictures[at : at + _BATCH]) for at in range(0, len(pictures), _BATCH)]
        features = np.concatenate([features for features, _ in parts])
        logits = [logits for _, logits in parts if logits is not None]
        return features, np.concatenate(logits) if logits else None

    @torch.no_grad()
    def _part(self, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        features, logits = self.run(torch.from_numpy(np.ascontiguousarray(pictures)))
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(pictures):
            found = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise UserError(
                f"extractor: {self.name} returned {found} for {len(pictures)} pictures; it should return a tensor "
                f"[{len(pictures)}, D]."
            )
        if features.shape[1] > _MOST_FEATURES:
            raise UserError(f"extractor: {self.name} has {features.shape[1]} features; use at most {_MOST_FEATURES}.")
        if not bool(features.isfinite().all()):
            raise UserError(f"extractor: {self.name} returned values that are not finite.")
        return features.float().cpu().numpy(), None if logits is None else logits.float().cpu().numpy()


def load_extractor(name: str, weights: Path | None, device: torch.device) -> Extractor:
    """An extractor by name.

    Args:
        name: "inception", or "module:function", a function from uint8 [N, H, W, 3] to features [N, D].
        weights: of Inception; None for where torch.hub keeps them.
        device: for Inception; a function decides for itself.

    Raises:
        UserError: a package, a file, a module or a function is missing.
    """
    return _inception(weights, device) if name == INCEPTION else _function(name)


def _function(name: str) -> Extractor:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UserError(f"extractor: {name!r} is neither {INCEPTION} nor of the form module:function.")
    try:
        found: Any = importlib.import_module(module)
    except Exception as e:  # anything may go wrong while a module of the user is imported
        raise UserError(
            f"extractor: {module} cannot be imported ({first_line(e)}); is its folder on PYTHONPATH?"
        ) from None
    for part in function.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UserError(f"extractor: {module} has no function {function}.")
    return Extractor(name, lambda pictures: (found(pictures), None))


def _inception(weights: Path | None, device: torch.device) -> Extractor:
    try:
        network = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    except Exception as e:  # torch-fidelity imports torchvision, which fails in several ways beside another torch
        raise UserError(
            f"extractor: {INCEPTION} needs torch-fidelity ({first_line(e)}); pip install torch-fidelity, or name another extractor as "
            "module:function."
        ) from None
    path = weights or Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
    if not path.is_file():
        raise UserError(
            f"inception: {path} is missing; download {SOURCE} (96 MB) to it, or name the file with --inception FILE."
        )
    # torch-fidelity unpickles whatever the file holds; it is given a copy with the tensors only. The file may be in the format that
    # torch wrote before 2020, which the loaders refuse.
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged file can raise any exception
        raise UserError(f"inception: {path.name} cannot be read ({first_line(e)}).") from None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "inception.pth"
        torch.save(dict(state), copy)
        try:
            net = network("inception-v3-compat", ["2048", "logits_unbiased"], str(copy))
        except RuntimeError as e:
            raise UserError(
                f"inception: {path.name} does not hold torch-fidelity's Inception ({first_line(e)})."
            ) from None
    net = net.eval().to(device)

    def run(pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        features, logits = net(pictures.permute(0, 3, 1, 2).contiguous().to(device))
        return features, logits

    return Extractor(INCEPTION, run)


def load_lpips(device: torch.device) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """LPIPS (Zhang et al. 2018, arXiv 1801.03924) with AlexNet: from two uint8 [N, H, W, 3] to distances float64 [N].

    Raises:
        UserError: the package lpips or its weights are missing.
    """
    try:
        net = importlib.import_module("lpips").LPIPS(net="alex", verbose=False)
    except Exception as e:  # the package downloads AlexNet through torchvision
        raise UserError(
            f"lpips: it needs the package lpips and its weights ({first_line(e)}); pip install lpips."
        ) from None
    net = net.eval().to(device)

    @torch.no_grad()
    def distances(pictures: np.ndarray, baseline: np.ndarray) -> np.ndarray:
        out = []
        for at in range(0, len(pictures), _BATCH):
            sides = (torch.from_numpy(side[at : at + _BATCH]).permute(0, 3, 1, 2) for side in (pictures, baseline))
            a, b = (side.to(device, torch.float32) / 127.5 - 1 for side in sides)
            out.append(net(a, b).flatten().double().cpu().numpy())
        return np.concatenate(out)

    return distances
