"""Parity cases of the MAR family: networks, head, diffusion tables, mask schedule, sampling runs, KL autoencoder.

A folder contains any of the files named below. All sizes are
read from the files; the constants hold what they do not record.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ...model_loaders.autoencoders.loader import load_kl
from ...networks.autoencoder import KLAutoencoder, KLConfig, KLModel
from ...networks.mar import BUDGET, MAR, MARConfig, MARModel
from ...reports.record import Report
from ...samplers import chain, diffusion_steps
from ...samplers.chain import HeadSampler, guide
from ...samplers.conditioning import from_ids
from ...samplers.engine import finish
from ...samplers.mar.mar import mar
from ...samplers.mar.schedule import masked_after
from ...samplers.mar.settings import MARSettings
from ...samplers.mar.tables import constants, respaced_timesteps, respacing
from ...samplers.noise import PairedNoise
from . import cspd as parity_cspd
from . import lazymar as parity_lazymar
from .cases import Case, Check, Known, exact, from_files, masked_model, read_json, read_tensors, relative, same_shapes

MODEL, MODEL_CONFIG, DECODER = "tiny_mar_f16.safetensors", "tiny_mar_config.json", "tiny_vae_f16.safetensors"
# Recorded runs from t = 999, whose results are large. The other runs, and the tables "c", start at 950.
FROM_999 = ("a", "b")
CLIPPED = 950
TEMPERATURES = {"b": 0.95}
TABLE_TOLERANCE = 1e-9


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``; weights are read when a case runs."""
    known: Known = {
        "encdec.safetensors": ((MODEL,), _encdec),
        "head.safetensors": ((MODEL,), _head),
        "diffusion_tables.safetensors": ((), _tables),
        "mask_schedule.json": ((), lambda f: schedule_cases("mar/mask_schedule", read_json(f / "mask_schedule.json"))),
        "sample_tokens.safetensors": ((MODEL,), _sampling),
        "vae.safetensors": ((DECODER,), _autoencoder),
        parity_lazymar.DATA: ((parity_lazymar.MODEL,), lambda f: parity_lazymar.cases(f, MODEL_CONFIG, RecordedNoise)),
        parity_cspd.DATA: ((parity_cspd.DRAFT, MODEL), lambda f: parity_cspd.cases(f, MODEL, MODEL_CONFIG)),
    }
    return [*from_files(folder, known, "mar"), *(_key_list(path) for path in sorted(folder.glob("*_keys.json")))]


@lru_cache(maxsize=2)
def _model(folder: Path) -> MARModel:
    return masked_model(folder / MODEL, folder / MODEL_CONFIG)


@lru_cache(maxsize=2)
def _decoder(folder: Path) -> KLModel:
    return load_kl(folder / DECODER, "fp32")


# ------------------------------------------------------------------------------------------------ networks


def _encdec(folder: Path) -> Iterator[Case]:
    data = read_tensors(folder / "encdec.safetensors")

    def checks(tag: str, labels: Tensor | None, suffix: str) -> Iterator[Check]:
        net = _model(folder).net
        mask, tokens = data[f"{tag}.mask"], data[f"{tag}.tokens"]
        known, hidden = ((mask == value).nonzero()[:, 1].view(len(mask), -1) for value in (0, 1))
        encoded = net.encode(tokens, known, net.class_rows(labels, len(mask)))
        yield Check(encoded, data[f"{tag}.enc_out{suffix}"])
        z = data[f"{tag}.dec_out{suffix}"]
        yield Check(net.decode(encoded, known), z)

        # The samplers decode masked positions only.
        at = hidden[..., None].expand(-1, -1, z.shape[2])
        yield Check(net.decode(encoded, known, hidden), z.gather(1, at))

    for tag in sorted({key.split(".")[0] for key in data}):
        labels = data[f"{tag}.labels"].long()
        yield Case(f"mar/encdec.{tag}.cond", partial(checks, tag, labels, ""))
        yield Case(f"mar/encdec.{tag}.null", partial(checks, tag, None, "_uncond"))


def _head(folder: Path) -> Iterator[Case]:
    data = read_tensors(folder / "head.safetensors")
    z = data["z"]

    def net() -> Iterator[Check]:
        head = _model(folder).net.head
        x, t, half = data["net.x"], data["net.t"], len(data["net.x"]) // 2
        yield Check(head.time_embed(t), data["net.t_emb"])
        yield Check(head(x, t, z), data["net.out"])
        out = head(torch.cat([x[:half], x[:half]]), t, z)
        eps, logits = guide(out.unflatten(0, (2, half)), torch.full((half, 1), 3.0), x.shape[1])
        assert logits is not None
        yield Check(torch.cat([eps, logits], 1), data["net.cfg3_out"][:half])

    def sample(tag: str, count: int, clipped: bool, temperature: float, cfg: float) -> Iterator[Check]:
        first = data[f"s{tag}.init_noise"]
        n = len(first)
        made = respacing(count, CLIPPED if clipped else 999)
        net = _model(folder).net
        table = diffusion_steps.step_table(made.without_last_noise, net.head.time_embed(made.timestep_map.flip(0)))
        conditions = (z[: 2 * n] if cfg != 1 else z[:n]).unflatten(0, (-1, n))
        noise = chain.noise_for_steps(data[f"s{tag}.step_noise_f16"][:, :n].float(), len(table))
        rows = chain.DiffusionBatch(conditions, torch.full((n, 1), cfg), first, noise, table, temperature)
        out = HeadSampler(net, net.head, Report("verify", "", {}, None, n, "cpu"), BUDGET).sample(rows)
        expected = data[f"s{tag}.t{temperature}.cfg{cfg}.out"][:n]
        yield Check(out, expected) if clipped else relative(out, expected)

    if "net.x" in data:
        yield Case("mar/head.net", net)
    found = re.compile(r"s((\d+)(c?))\.t([\d.]+)\.cfg([\d.]+)\.out")

    for m in sorted(filter(None, map(found.fullmatch, data)), key=lambda m: (m[3], int(m[2]), m[4], m[5])):
        arguments = (m[1], int(m[2]), bool(m[3]), float(m[4]), float(m[5]))
        yield Case(f"mar/head.s{m[1]}.t{m[4]}.cfg{m[5]}", partial(sample, *arguments))


def _autoencoder(folder: Path) -> Iterator[Case]:
    data = read_tensors(folder / "vae.safetensors")

    def decode() -> Iterator[Check]:
        yield Check(_decoder(folder).net.decode(data["z"]), data["decoded"])

    def encode() -> Iterator[Check]:
        net = _decoder(folder).net
        mean, std = net.encode(data["x"])
        yield Check(mean, data["mean"])
        yield Check(std, data["std"])
        yield Check(net.quant_conv(net.encoder(data["x"])), data["moments"])

    yield Case("mar/vae.decode", decode)
    yield Case("mar/vae.encode", encode)


def _key_list(path: Path) -> Case:
    """Names and shapes of an official file, compared with a network of that size on the meta device."""

    def checks() -> Iterator[Check]:
        shapes, config = read_json(path), path.parent / MODEL_CONFIG
        tiny = path.stem.startswith("tiny") and config.is_file()

        def make(state: dict[str, Tensor]) -> torch.nn.Module:
            if "class_emb.weight" not in state:
                return KLAutoencoder(KLConfig.from_state_dict(state))
            heads = int(read_json(config)["encoder_num_heads"]) if tiny else None
            return MAR(MARConfig.from_state_dict(state, heads))

        yield same_shapes(shapes, make)

    return Case(f"mar/keys.{path.stem.removesuffix('_keys')}", checks)


# ------------------------------------------------------------------------------------------------ arithmetic


def _tables(folder: Path) -> Iterator[Case]:
    return table_cases("mar/diffusion_tables", read_tensors(folder / "diffusion_tables.safetensors"))


def table_cases(prefix: str, data: dict[str, Tensor], **about: float) -> Iterator[Case]:
    """Cases of recorded diffusion tables; the name of a clipped one ends with "c"."""

    def checks(tag: str) -> Iterator[Check]:
        timesteps = respaced_timesteps(int(tag.rstrip("c")), CLIPPED if tag.endswith("c") else 999)
        ours = constants(timesteps, **about)
        for key, expected in data.items():
            if key.split(".")[0] == tag:
                made = getattr(ours, key.split(".")[1])
                yield relative(made, expected, TABLE_TOLERANCE) if made.is_floating_point() else exact(made, expected)

    for tag in sorted({key.split(".")[0] for key in data}, key=lambda t: (t.endswith("c"), int(t.rstrip("c")))):
        yield Case(f"{prefix}.{tag}", partial(checks, tag))


def schedule_cases(prefix: str, recorded: dict[str, dict[str, list[int]]]) -> Iterator[Case]:
    """Cases of recorded mask schedules, by "L<tokens>_n<steps>"."""

    def checks(tokens: int, steps: int, about: dict[str, list[int]]) -> Iterator[Check]:
        left = masked_after(tokens, steps)
        # The last entry of the reference is 1, although its last step decides all tokens.
        yield exact(torch.tensor(left[:-1]), torch.tensor(about["mask_len"][:-1]))
        sizes = [before - after for before, after in pairwise([tokens, *left])]
        yield exact(torch.tensor(sizes), torch.tensor(about["n_pred"]))

    for key, about in recorded.items():
        tokens, steps = key.removeprefix("L").split("_n")
        yield Case(f"{prefix}.{key}", partial(checks, int(tokens), int(steps), about))


# ------------------------------------------------------------------------------------------------ sampling


class RecordedNoise(PairedNoise):
    """Recorded noise by position; the files store it in the order of the draws."""

    def __init__(self, data: dict[str, Tensor], tag: str, guided: bool):
        self._orders = data[f"{tag}.orders"].long()
        self.images = tuple(range(len(self._orders)))
        first, steps = data[f"{tag}.init_noise_cat"], data[f"{tag}.step_noise_cat_f16"]
        batch, tokens = self._orders.shape
        self._first = torch.zeros(batch, tokens, first.shape[1])
        self._steps = torch.zeros(batch, len(steps), tokens, steps.shape[2])
        reveal, at, row, step_row = self._orders.flip(1), 0, 0, 0

        for n in data[f"{tag}.n_pred"].tolist():
            where = reveal[:, at : at + n].sort(1).values
            at += n
            for image in range(batch):
                self._first[image, where[image]] = first[row : row + n]
                self._steps[image][:, where[image]] = steps[:, step_row : step_row + n]
                row, step_row = row + n, step_row + n
            step_row += batch * n if guided else 0  # noise of the null branch, which the reference draws and discards

    def orders(self, tokens: int) -> Tensor:
        return self._orders

    def start_noise(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self._first

    def step_noise(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return self._steps


def _sampling(folder: Path) -> Iterator[Case]:
    data = read_tensors(folder / "sample_tokens.safetensors")

    def checks(tag: str) -> Iterator[Check]:
        model = _model(folder)
        scales, tokens = data[f"{tag}.cfg_iter"].tolist(), data[f"{tag}.orders"].shape[1]
        constant = max(scales) == min(scales)

        # Linear guidance ends at 1 + (cfg - 1) (L - 1) / L.
        cfg = scales[-1] if constant else 1 + (scales[-1] - 1) * tokens / (tokens - 1)
        t_max = 999 if tag in FROM_999 else CLIPPED
        executed = len(data[f"{tag}.step_noise_cat_f16"])

        # Clipping merges timesteps: 25 steps from 950 are 24. Recorded settings are multiples of 5.
        fitting = [n for n in range(executed, 2 * executed + 2) if len(respacing(min(n, 1000), t_max)) == executed]
        count = next((n for n in fitting if n % 5 == 0), fitting[0])
        settings = MARSettings(len(scales), count, round(cfg, 6), "constant" if constant else "linear")
        settings = replace(settings, t_max=t_max, temperature=TEMPERATURES.get(tag, 1.0))
        noise = RecordedNoise(data, tag, guided=settings.cfg != 1)
        out = finish(mar(model, from_ids(data[f"{tag}.labels"].tolist()), settings, noise)).latents
        expected = data[f"{tag}.out"]
        yield relative(out, expected) if tag in FROM_999 else Check(out, expected)

    for tag in sorted({key.split(".")[0] for key in data}):
        yield Case(f"mar/sample_tokens.{tag}", partial(checks, tag))
