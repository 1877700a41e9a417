"""Tiny GPTs, and a slow reference of token sampling: no cache, one image, one cell at a time.

The reference keeps every row that was fed, derives from the history which rows are visible to each, and runs the
network's uncached pass over all of them for every token. Prefixes have their full length; texts are not collapsed.
"""

import math

import numpy as np
import torch
from fastar_nodes.networks.llama import Llama, LlamaConfig, TokenModel
from fastar_nodes.samplers.conditioning import FeatureCondition, TextCondition, from_ids
from fastar_nodes.samplers.tokens.cache_slots import window_slots
from fastar_nodes.samplers.tokens.looks import DeviceTable
from fastar_nodes.samplers.tokens.schedule import schedule_table
from token_numbers import gumbel_of
from torch import Tensor

KINDS = {
    "class": {"condition": "class", "condition_size": 5},
    "text": {"condition": "text", "condition_size": 6, "text_rows": 7},
    "features": {"condition": "features", "condition_size": 6, "absolute": 64, "kv_heads": 1},
    "class, grouped heads": {"condition": "class", "condition_size": 5, "kv_heads": 1},
}


def tiny_gpt(kind: str = "class", grid: int = 4, special: int = 0, seed: int = 0) -> TokenModel:
    """A random network of a few thousand weights whose tokens differ from cell to cell."""
    shape = {"kv_heads": 2, **KINDS[kind]}
    net = (
        Llama(LlamaConfig(dim=16, depth=2, heads=2, hidden=24, vocab=23, special=special, **shape))
        .eval()
        .requires_grad_(False)
    )
    g = torch.Generator().manual_seed(seed)
    for name, p in net.state_dict().items():
        scale = 1.0 if "embed" in name or name == "abs_pe" else 1.5 / p.shape[-1] ** 0.5
        p.copy_(torch.randn(p.shape, generator=g) * scale + (1.0 if p.ndim == 1 and "norm" in name else 0.0))
    return TokenModel(net, "tiny", grid)


def condition_of(kind: str, images: tuple[int, ...] = (0, 1, 2)):
    """Conditions of tiny networks: image i is the same in every batch. Texts differ in length."""
    if kind.startswith("class"):
        return from_ids([(1, 4, 0)[i] for i in images])
    g = [torch.Generator().manual_seed(50 + i) for i in images]
    if kind == "text":
        return TextCondition(
            tuple(torch.randn((3, 7, 1)[i], 6, generator=r) for i, r in zip(images, g, strict=True)),
            ("",) * len(images),
        )
    return FeatureCondition(tuple(torch.randn(4, 6, generator=r) for r in g), ("",) * len(images))


def prefix_rows(net: Llama, condition, image: int, null: bool) -> Tensor:
    """Prefix [n, C] of one image, computed directly."""
    c = net.config
    if c.condition == "class":
        return net.cls_embedding.embedding_table.weight[[c.condition_size if null else condition.labels[image]]]
    x = condition.features[image]
    if c.condition == "text":
        x = net.cls_embedding.uncond_embedding[c.text_rows - len(x) :] if null else x
        projection = net.cls_embedding.cap_proj
        hidden = torch.nn.functional.gelu(x @ projection.fc1.weight.T, approximate="tanh")
        return hidden @ projection.fc2.weight.T
    return (torch.zeros_like(x) if null else x) @ net.clip_proj.weight.T + net.clip_proj.bias


def visible(schedule) -> list:
    """What the rows of every pass but the first attend to, by place in the schedule: bool [rows, places]."""
    place = window_slots(schedule).place
    holds = np.arange(place.max() + 1)[:, None] == place  # [places, slots]
    return [(mask[:, None] & holds).any(-1) for mask in masks(schedule)[1:]]


def decided_at(schedule) -> np.ndarray:
    """The pass that decides each cell in raster order, then one for padding: -1 for known cells; for padding and cells
    that are left out the number of passes.
    """
    table = schedule_table(schedule)
    passes = np.full(schedule.grid**2 + 1, table.passes)
    passes[: schedule.known] = -1
    passes[table.cells] = table.pass_of_cell
    return passes


def masks(schedule) -> list:
    """Attention mask of every pass of a schedule, of all image slots: bool [rows, slots]."""
    slots = window_slots(schedule)
    on_host = DeviceTable(schedule, slots, 0, torch.device("cpu"))
    row_start = schedule_table(schedule).row_start
    return [on_host.mask(slice(a, b), slots.count).numpy() for a, b in zip(row_start, row_start[1:], strict=False)]


class History:
    """Every row fed so far for one image and one guidance half."""

    def __init__(self, model: TokenModel, prefix: Tensor):
        self.model, self.n = model, len(prefix)
        self.rows = list(prefix)
        self.position = list(range(-self.n, 0))
        self.visible = [set(range(i + 1)) for i in range(self.n)]
        self.holder: dict[int, int] = {}  # image slot to the row that holds it

    def feed(self, row: Tensor, position: int, slot: int) -> int:
        self.rows.append(row)
        self.position.append(position)
        self.visible.append(set())
        self.holder[slot] = len(self.rows) - 1
        return len(self.rows) - 1

    def attend(self, row: int, last: int) -> None:
        """Make the whole prefix and the present holders of slots up to ``last`` visible to a row."""
        self.visible[row] = {*range(self.n), *(r for slot, r in self.holder.items() if slot <= last)}

    def logits(self, row: int) -> Tensor:
        net, count = self.model.net, len(self.rows)
        mask = torch.zeros(count, count, dtype=torch.bool)
        for i, visible in enumerate(self.visible):
            mask[i, list(visible)] = True
        x = torch.stack(self.rows)[None]
        return net(x, torch.tensor(self.position), net.positions(self.model.grid, self.n), mask)[0, row]


def pick(logits: Tensor, settings, gumbel: Tensor) -> int:
    """One token by plain arithmetic on a sorted list."""
    scaled = (logits.double() / max(settings.temperature, 1e-5)).tolist()
    kept = sorted(range(len(scaled)), key=lambda v: -scaled[v])
    if settings.top_k:
        least = scaled[kept[min(settings.top_k, len(kept)) - 1]]
        kept = [v for v in kept if scaled[v] >= least]
    weight = torch.tensor([scaled[v] for v in kept], dtype=torch.float64).softmax(0)
    within, reached = [], 0.0
    for v, p in zip(kept, weight.tolist(), strict=True):
        if reached > settings.top_p and settings.top_p < 1:
            break
        within.append(v)
        reached += p
    factor = entropy_factor([float(logits[v]) for v in within], settings.entropy_temperature)
    return max(within, key=lambda v: scaled[v] / factor + float(gumbel[v]))


def entropy_factor(logits: list[float], strength: float) -> float:
    """Factor of the temperature of some values by the entropy of their distribution, in plain arithmetic."""
    weights = [math.exp(value - max(logits)) for value in logits]
    entropy = 0.0
    for weight in weights:
        probability = weight / sum(weights)
        if probability > 0:
            entropy -= probability * math.log(probability)
    return (1 - strength) + strength * (2.5 * math.exp(-entropy / 3) + 0.6)


def entry(net, row, tokens: dict[int, int]) -> Tensor:
    """What a row feeds."""
    if row.transition_token >= 0:
        return net.spe_tok_embeddings.special_embeddings.weight[row.transition_token]
    return net.tok_embeddings.weight[tokens[row.cell]]


@torch.no_grad()
def reference_codes(model: TokenModel, condition, settings, draws, passes) -> Tensor:
    """Codes [B, G, G] that a list of passes gives, by the plain path."""
    net, count = model.net, model.tokens
    gumbel = gumbel_of(draws, "token", torch.arange(count), net.config.vocab)
    pictures = []
    for image in range(len(condition)):
        halves = [History(model, prefix_rows(net, condition, image, null)) for null in (False, True)]
        tokens: dict[int, int] = {}
        for k, p in enumerate(passes):
            rows = []
            for h in halves:
                fed = [h.n - 1]
                if k:
                    fed = [h.feed(entry(net, row, tokens), row.position, row.place) for row in p.fed_rows]
                    for r, row in zip(fed, p.fed_rows, strict=True):
                        h.attend(r, row.last_visible)
                rows.append([h.logits(fed[i]) for i in p.predicted_by])
            guided = settings.cfg > 1 and (settings.cfg_interval is None or p.cfg_step <= settings.cfg_interval)
            new = {}
            for cell, cond, null in zip(p.cells, *rows, strict=True):
                mixed = null + settings.cfg * (cond - null) if guided else cond
                new[cell] = pick(mixed, settings, gumbel[image, cell])
            tokens.update(new)
        pictures.append([tokens[c] for c in range(count)])
    return torch.tensor(pictures).view(len(condition), model.grid, model.grid)
