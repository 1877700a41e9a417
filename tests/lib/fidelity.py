"""A stand-in for torch-fidelity, which imports torchvision: its public names, and figures that can
be computed by hand.
"""

from types import ModuleType

import torch


class Base(torch.nn.Module):
    """FeatureExtractorBase."""

    def __init__(self, name: str, features_list: list[str]):
        super().__init__()
        assert set(features_list) <= set(self.get_provided_features_list())


class Inception(torch.nn.Module):
    """FeatureExtractorInceptionV3 with one linear layer: mean colours, and logits of them."""

    def __init__(self, name: str, layers: list[str], weights: str):
        super().__init__()
        assert layers == ["2048", "logits_unbiased"]
        self.fc = torch.nn.Linear(3, 4)
        self.load_state_dict(torch.load(weights, weights_only=True))

    @staticmethod
    def state() -> dict[str, torch.Tensor]:
        return {"fc.weight": torch.ones(4, 3), "fc.bias": torch.zeros(4)}

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert pictures.dtype == torch.uint8 and pictures.shape[1] == 3
        x = pictures.float().mean((2, 3))
        return x, self.fc(x)


def make() -> ModuleType:
    """The module; ``asked`` holds the options of all calls."""
    module, extractors = ModuleType("torch_fidelity"), {}
    module.asked = []

    def calculate_metrics(input1: torch.utils.data.Dataset, **options: object) -> dict[str, float]:
        module.asked.append(options)
        kind = extractors[options["feature_extractor"]]
        net = kind(options["feature_extractor"], [kind.get_default_feature_layer_for_metric("any")])
        rows = [torch.stack([side[i] for i in range(len(side))]) for side in (input1, options.get("input2")) if side]
        (own,), (other,) = net(rows[0]), net(rows[-1])
        if options.get("fid"):
            return {"fid": float((own.mean(0) - other.mean(0)).square().sum())}
        if options.get("isc"):
            return {"is": float(own.mean())}
        if options.get("kid"):
            return {"kid": float(own.sum() - other.sum())}
        return {"precision": 0.25, "recall": 0.75}

    names = {"FID": "fid", "ISC_MEAN": "is", "KID_MEAN": "kid", "PRECISION": "precision", "RECALL": "recall"}
    for name, key in names.items():
        setattr(module, f"KEY_METRIC_{name}", key)
    module.FeatureExtractorBase, module.FeatureExtractorInceptionV3 = Base, Inception
    module.register_feature_extractor = extractors.__setitem__
    module.calculate_metrics = calculate_metrics
    return module
