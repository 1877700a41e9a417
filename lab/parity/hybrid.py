"""Parity cases of Harmon and UniPic: networks, position tables, diffusion tables, prompts, schedules, sampling runs.

A folder contains any of the files named below; all sizes are read from them.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from ...model_loaders.files import checkpoint as ck
from ...model_loaders.files.tokenizer import load_tokenizer
from ...model_loaders.hybrid.loader import config_of, load_network
from ...networks.hybrid import INSTRUCTION, TABLES, Hybrid, HybridConfig, HybridModel, PromptBatch, PromptConditioning
from ...reports.record import fingerprint
from ...samplers import chain, diffusion_steps
from ...samplers.annealing import annealed_steps
from ...samplers.mar import prepare
from ...samplers.mar.settings import MARSettings
from ...samplers.mar.tables import Respacing, respacing
from ...samplers.mar.transformer import FullTransformer
from ...samplers.noise import PairedNoise
from .cases import Case, Check, Known, exact, from_files, read_json, read_tensors, relative, same_shapes
from .mar import CLIPPED, schedule_cases, table_cases

MODEL, CONFIG = "hybrid_model_f16.safetensors", "hybrid_config.json"
TOKENIZER, WORDS, SHAPES = "hybrid_tokenizer", "hybrid_prompts_*.json", "hybrid_shapes_*.json"
# The recorded Harmon runs but the official one were clipped, as in DiSA's code.
OFFICIAL = "hybrid_sample_official"


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``; weights are read when a case runs."""
    known: Known = {
        "hybrid_inside.safetensors": ((MODEL, CONFIG, "hybrid_inside.json"), _inside),
        "hybrid_pos_embed.safetensors": ((MODEL, CONFIG), _position_tables),
        "hybrid_tables.safetensors": ((CONFIG,), _tables),
        "hybrid_schedule.json": (
            (),
            lambda f: schedule_cases(f"{_family(f)}/schedule", read_json(f / "hybrid_schedule.json")),
        ),
        "hybrid_sample.safetensors": ((MODEL, CONFIG, "hybrid_sample.json"), lambda f: _sampling(f, "hybrid_sample")),
        f"{OFFICIAL}.safetensors": ((MODEL, CONFIG, f"{OFFICIAL}.json"), lambda f: _sampling(f, OFFICIAL)),
    }
    out = from_files(folder, known, _family(folder)) + [_words(path) for path in sorted(folder.glob(WORDS))]
    return out + [_shapes(path) for path in sorted(folder.glob(SHAPES))]


def _family(folder: Path) -> str:
    """Prefix of the folder's cases."""
    try:
        return str(read_json(folder / CONFIG)["family"])[:20]
    except Exception:  # reported by the case that needs it
        return "hybrid"


@lru_cache(maxsize=2)
def _file(folder: Path) -> tuple[ck.Checkpoint, HybridConfig]:
    file = ck.read(folder / MODEL)
    return file, config_of(file, read_json(folder / CONFIG))


@lru_cache(maxsize=4)
def recorded_model(folder: Path, height: int, width: int) -> HybridModel:
    file, config = _file(folder)
    net = load_network(file, config, height, width)
    settings = read_json(folder / CONFIG)

    def tokenize(text: str) -> list[int]:
        raise NotImplementedError

    about: dict[str, Any] = {
        "latent_scale": float(settings["vae_scale"]),
        "max_beta": float(settings["diffusion"]["max_beta"]),
    }
    about |= {"tokenize": tokenize, "turn": (0, 0), "trained": config.mar.grid}

    return HybridModel(net.mar, "recorded", hybrid=net, **about)


# ------------------------------------------------------------------------------------------------ networks


def _inside(folder: Path) -> Iterator[Case]:
    data, about = read_tensors(folder / "hybrid_inside.safetensors"), read_json(folder / "hybrid_inside.json")

    def checks(tag: str, height: int, width: int) -> Iterator[Check]:
        net = recorded_model(folder, height, width).hybrid
        found = {k.split(".")[1]: v for k, v in data.items() if k.startswith(f"{tag}.")}
        mask, ids, seen = found["mask"], found["input_ids"], found["attention_mask"].long()
        known = (mask == 0).nonzero()[:, 1].view(len(mask), -1)
        hidden = (mask == 1).nonzero()[:, 1].view(len(mask), -1)
        read = [net.read(row[:n]) for row, n in zip(ids, seen.sum(1).tolist(), strict=True)]

        for name, layer in (("first", 0), ("last", -1)):
            for kind in ("key", "value"):
                recorded = found.get(f"prompt_{kind}_{name}")
                for row, prompt in zip(recorded if recorded is not None else (), read, strict=False):
                    yield Check(getattr(prompt, f"{kind}s")[layer], row[:, : prompt.keys.shape[2]])

        prompts, batch = PromptBatch(read), len(mask)
        encoded = net.mar.encode(found["tokens_f16"], known, net.mar.class_rows(None, batch))
        yield Check(encoded, found["enc_out"])
        order = net.llm_order(known)
        y = net.proj_in(encoded).gather(1, order[..., None].expand(-1, -1, net.config.llm.dim))
        if "llm_in" in found:
            yield Check(y, found["llm_in"])
        positions = prompts.lengths[:, None] + torch.arange(y.shape[1])
        yield exact(positions, found["position_ids"])
        yield Check(net.llm.hidden(y.repeat(2, 1, 1), positions, prompts.attend), found["llm_out"])
        fused = net.fuse(encoded, known, prompts)
        yield Check(fused, found["fused"])
        yield Check(net.mar.decode(fused, known.repeat(2, 1)), found["z"])

        # The samplers decode masked positions only.
        at = hidden.repeat(2, 1)
        wanted = found["z"].gather(1, at[..., None].expand(-1, -1, found["z"].shape[2]))
        yield Check(net.mar.decode(fused, known.repeat(2, 1), at), wanted)

    for tag, entry in sorted(about.items()):
        yield Case(f"{_family(folder)}/inside.{tag}", partial(checks, tag, *entry["image_shape"]))


def _position_tables(folder: Path) -> Iterator[Case]:
    data = read_tensors(folder / "hybrid_pos_embed.safetensors")

    def checks(grid: str) -> Iterator[Check]:
        net = recorded_model(folder, *(int(n) for n in grid.split("x"))).net
        for name in TABLES:
            yield Check(getattr(net, name), data[f"{grid}.{name.split('_')[0]}"])

    for grid in sorted({key.split(".")[0] for key in data}):
        yield Case(f"{_family(folder)}/pos_embed.{grid}", partial(checks, grid))


def _shapes(path: Path) -> Case:
    """Names and shapes of an official file, compared with a network of that size on the meta device."""

    def checks() -> Iterator[Check]:
        shapes, settings = read_json(path), read_json(path.parent / CONFIG) if path.stem.endswith("tiny") else {}
        unread = [name for name in shapes if name.startswith(("llm.lm_head.", "siglip2", "mar.class_emb."))]

        def make(state: dict[str, Tensor]) -> Hybrid:
            return Hybrid(config_of(ck.Checkpoint(state, {}, path), settings))

        yield same_shapes(shapes, make, unread)

    return Case(f"{_family(path.parent)}/shapes.{path.stem.removeprefix('hybrid_shapes_')}", checks)


# ------------------------------------------------------------------------------------------------ prompts, arithmetic


def _words(path: Path) -> Case:
    """Token ids of prompts. "not yet" without the package ``tokenizers`` or without the tokenizer itself."""
    kind = path.stem.removeprefix("hybrid_prompts_")
    folder = path.parent / (TOKENIZER if kind == "tiny" else f"{TOKENIZER}_{kind}")

    def checks() -> Iterator[Check]:
        recorded, tokenizer = read_json(path), load_tokenizer(folder, "", {})
        opening, closing = (tokenizer.special_tokens[f"<|im_{end}|>"] for end in ("start", "end"))
        tiny = recorded_model(path.parent, 2, 2)
        about = {"tokenize": tokenizer.encode, "turn": (opening, closing), "trained": 2}
        model = HybridModel(tiny.net, "recorded", hybrid=tiny.hybrid, **about)
        assert recorded["prefix"] == INSTRUCTION, "the instruction differs"
        for case in recorded["conditional"]:
            yield exact(torch.tensor(model.prompt(case["prompt"])), torch.tensor(case["ids"]))
        none = recorded["unconditional"]
        yield exact(torch.tensor(model.instruction(none["text"])), torch.tensor(none["ids"]))

    there = folder.is_dir() and importlib.util.find_spec("tokenizers") is not None
    return Case(f"{_family(path.parent)}/prompts.{kind}", checks if there else None)


def _tables(folder: Path) -> Iterator[Case]:
    data = read_tensors(folder / "hybrid_tables.safetensors")
    max_beta = float(read_json(folder / CONFIG)["diffusion"]["max_beta"])
    return table_cases(f"{_family(folder)}/tables", data, max_beta=max_beta)


# ------------------------------------------------------------------------------------------------ sampling


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A condition of recorded token ids: conditional rows, then unconditional ones."""

    kind: ClassVar[str] = "prompt"
    subject: ClassVar[str] = ""
    ids: list[Tensor]
    images: int

    def __len__(self) -> int:
        return self.images

    def digests(self) -> tuple[str, ...]:
        return tuple(fingerprint(self.kind, ids.tolist()) for ids in self.ids[: self.images])


def _read_recorded(model: Any, condition: _Recorded, guided: bool) -> PromptConditioning:
    """The token ids of a recorded condition, in the form that the network reads."""
    images = condition.images
    read = [model.hybrid.read(ids) for ids in condition.ids[: images + guided]]
    return PromptConditioning(model.hybrid, read[:images], read[images] if guided else None)


def _table(executed: int, t_max: int, max_beta: float) -> Respacing:
    """The table of a recorded run: the fewest steps, a multiple
    of 5 if possible, of which that many are left by clipping.
    """
    counts = range(executed, 2 * executed + 2)
    fitting = [n for n in counts if len(respacing(min(n, 1000), t_max, max_beta)) == executed]
    return respacing(next((n for n in fitting if n % 5 == 0), fitting[0]), t_max, max_beta)


class _Draws:
    """Recorded noise of a run, in the order of the draws."""

    def __init__(self, data: dict[str, Tensor], images: int, guided: bool):
        self.data, self.images, self.twice = data, images, 1 + guided
        self.row = self.step_row = self.flat = 0
        self.left = iter(data["step_counts"].tolist() if "step_counts" in data else [])

    def take(self, n: int) -> tuple[Tensor, Tensor]:
        """Start noise and step noise of the next AR step of ``n`` tokens per image."""
        rows = self.images * n
        first, self.row = self.data["init_noise_cat"][self.row : self.row + rows], self.row + rows
        if "step_noise_flat_f16" not in self.data:
            noise = self.data["step_noise_cat_f16"][:, self.step_row : self.step_row + rows]
            self.step_row += self.twice * rows  # noise of the null branch, which the reference draws and discards
            return first, noise

        count, channels = next(self.left), first.shape[1]
        size = count * self.twice * rows * channels
        block = self.data["step_noise_flat_f16"][self.flat : self.flat + size]
        self.flat += size

        return first, block.view(count, self.twice * rows, channels)[:, :rows]


def _sampling(folder: Path, stem: str) -> Iterator[Case]:
    data, about = read_tensors(folder / f"{stem}.safetensors"), read_json(folder / f"{stem}.json")
    t_max = CLIPPED if stem != OFFICIAL and _family(folder) == "harmon" else 999

    def checks(tag: str, entry: dict[str, Any]) -> Iterator[Check]:
        model = recorded_model(folder, *entry["image_shape"])
        found = {k.removeprefix(f"{tag}."): v for k, v in data.items() if k.startswith(f"{tag}.")}
        images, guided = len(entry["prompts"]), entry["cfg"] != 1
        lengths = found["attention_mask"].long().sum(1).tolist()
        ids = [row[:n] for row, n in zip(found["input_ids"], lengths, strict=True)]
        lower, upper = entry.get("diff_lower_steps", 0), entry.get("diff_upper_steps", 0)
        named = {name: entry[name] for name in ("cfg", "cfg_schedule", "temperature")}
        settings = MARSettings(steps=entry["num_iter"], **named, t_max=t_max)
        orders = found["orders"].long()

        class Orders(PairedNoise):
            def orders(self, tokens: int) -> Tensor:
                return orders

        condition: Any = _Recorded(ids, images)
        with mock.patch.object(prepare, "read_condition", _read_recorded):
            canvas = prepare.mar_canvas("verify", model, condition, settings, Orders(0, range(images)), None)
        look = FullTransformer(canvas)
        order, draws, at = canvas.order, _Draws(found, images, guided), 0
        yield exact(torch.tensor(order.sizes), found["n_pred"])
        yield Check(torch.tensor(order.cfg), found["cfg_iter"], 1e-6)
        counts = annealed_steps(upper, lower, order.steps)

        for step, n in enumerate(order.sizes):
            where = order.positions_from(step).sort(1).values
            z = look(step, where).flatten(1, 2)
            recorded = found["z_cat"][at : at + z.shape[0] * z.shape[1]]
            at += len(recorded)
            yield Check(z.flatten(0, 1), recorded)
            first, noise = draws.take(n)
            here = _table(len(noise), t_max, model.max_beta)
            if lower:
                here = respacing(counts[step], t_max, model.max_beta)
            table = diffusion_steps.step_table(here.without_last_noise, canvas.time_embeddings(here))
            noise = chain.noise_for_steps(noise.float(), len(table))
            cfg = order.scale.gather(1, where).view(-1, 1)
            rows = chain.DiffusionBatch(z, cfg, first, noise, table, settings.temperature)
            made = look.heads.sample(rows)
            canvas.decide(where, made.view(*where.shape, -1), step)

        yield relative(canvas.values, found["tokens"])
        if model.net.config.grid**2 == model.net.config.tokens:
            yield relative(model.to_latents(canvas.values), found["out"])

    for tag, entry in sorted(about.items()):
        yield Case(f"{_family(folder)}/{stem.removeprefix('hybrid_')}.{tag}", partial(checks, tag, entry))
