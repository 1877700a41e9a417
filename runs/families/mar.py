"""MAR as a family."""

from __future__ import annotations

from typing import Any

from ...model_loaders.catalogue.hub import Entry
from ...model_loaders.mar.loader import load_mar
from ...networks.mar import MARModel
from ...samplers.mar.settings import MARSettings
from ...samplers.settings import knobs
from ..labels import DEMO_LABELS
from . import network_of
from .masked import MARFamily

_DEMO_STEPS = 32


class _MAR(MARFamily):
    def published(self, model: MARModel) -> dict[str, Any]:
        if model.label_set == DEMO_LABELS:
            return {"steps": _DEMO_STEPS}

        papers, _ = knobs(MARSettings)["steps"]
        return {"steps": papers}

    def outlined(self, entry: Entry) -> MARModel:
        return MARModel(network_of(entry), entry.id)


FAMILY = _MAR(
    name="mar",
    words="a MAR",
    load_file=load_mar,
    files="mar",
    reads=("class",),
    one_grid="because a MAR has only one grid",
    demo=("demo",),
    usual_samplers=("mar", "fasthybrid"),
)
