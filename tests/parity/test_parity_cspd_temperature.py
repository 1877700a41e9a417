"""CSpD's published mode at temperatures 1.0 and 0.8 against recorded runs of the reference code."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.reports.record import ACCEPTED, PLAIN, REJECTED
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.canvas import TokenIndex
from fastar_nodes.samplers.mar.cspd import cspd, rejection
from fastar_nodes.samplers.mar.cspd.settings import CSpDSettings
from safetensors import safe_open
from torch import Tensor

DATA = "cspd_temperature.safetensors"
CASES = ("plain", "cool", "near")
PREFILL, KEPT, REDRAWN, ZERO = range(4)  # values of the recorded outcome
EXPECTED = torch.tensor([PLAIN, ACCEPTED, REJECTED, REJECTED])  # what the report has for each


class Record:
    """A recorded run: the sampler's noise and its uniform and normal draws, by image and position."""

    seed = None

    def __init__(self, folder, name: str):
        with safe_open(folder / DATA, "pt") as file:
            self.options = json.loads(file.metadata()[name])
            keys = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118 (not a dict)
            data = {key.removeprefix(f"{name}."): file.get_tensor(key) for key in keys}
        self.reveal = data["orders"].long()
        self.recorded_start, self.recorded_steps = data["first_f16"].float(), data["inter_f16"].float()
        self.guesses, self.normals, self.uniforms = (data[f"{k}_f16"].float() for k in ("guess", "normals", "uniforms"))
        self.outcome, self.out = data["outcome"].long(), data["out"]

    def __len__(self) -> int:
        return len(self.reveal)

    def orders(self, tokens: int) -> Tensor:
        return self.reveal

    def start_noise(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self.recorded_start if stream == "full" else torch.zeros(len(self.reveal), tokens, channels)

    def step_noise(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return self.recorded_steps.flip(2).transpose(1, 2)  # recorded with the lowest timestep first

    def acceptance(self, tokens: TokenIndex) -> Tensor:
        return self.guesses[tokens.index]

    def proposals(self, tokens: TokenIndex, first: int, count: int, channels: int) -> tuple[Tensor, Tensor]:
        tries = torch.arange(first, first + count)[:, None]
        image, position = tokens.index
        normals, uniforms = (x[tries % len(x), image, position] for x in (self.normals, self.uniforms))
        # Beyond the recorded numbers no draw may be kept.
        return normals.transpose(0, 1), torch.where(tries < len(self.uniforms), uniforms, torch.inf).T


def replay(folder, record: Record):
    """The sampler's result for a record's noise and settings."""
    o = record.options
    named = {
        "steps": "num_iter",
        "draft_length": "num_draft",
        "prefill_ratio": "ratio",
    }
    own = {ours: o[theirs] for ours, theirs in (named | {"cfg": "cfg", "temperature": "temperature"}).items()}
    settings = CSpDSettings(**own, diffusion_steps=record.recorded_steps.shape[2], t_max=950, mode="published")
    target, draft = (
        replace(load_mar(folder / f"{name}_f16.safetensors", "fp32", heads=4), latent_scale=1.0)
        for name in ("tiny_mar", "cspd_draft")
    )
    with torch.no_grad():
        for q, p in zip(draft.net.parameters(), target.net.parameters(), strict=True):
            q.copy_(p + (q - p) / o["draft_divisor"])
    # The record takes the place of the rejections' random numbers.
    rule = rejection.PUBLISHED_RULE._replace(draft_std_factor=o["inner"])
    with patch.multiple(rejection, RejectionNoise=lambda keys: record, PUBLISHED_RULE=rule):
        return finish(cspd(target, from_ids(o["labels"]), settings, record, draft=draft))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast_cases("cool")
def test_a_recorded_run_is_reproduced(mar_fixtures, name):
    record = Record(mar_fixtures, name)
    result = replay(mar_fixtures, record)
    outcome = torch.from_numpy(result.report.maps["outcome"]).long().flatten(1)
    assert torch.equal(outcome, EXPECTED[record.outcome])
    torch.testing.assert_close(result.latents, record.out, atol=1e-4, rtol=0)


def test_the_records_cover_every_outcome(mar_fixtures):
    counts = {name: torch.bincount(Record(mar_fixtures, name).outcome.flatten(), minlength=4) for name in CASES}
    assert all(c[[PREFILL, KEPT, REDRAWN]].min() >= 4 for c in counts.values())
    assert counts["near"][ZERO] == 1
