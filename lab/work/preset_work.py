"""Print what the presets of full-size models cost in calls, rows and floating-point operations.

Nothing is downloaded and no full-size network is built. A sampler runs on a narrow network: the tokens and steps of the
published one, with rows of few numbers. Every matrix product with a weight is counted at the published size of that
weight, and attention at the published width of a head. Of blocks that are all evaluated alike, those of the diffusion
head and of language models, one runs and is counted as many times as there are. What a random network cannot know,
whether a draft is accepted, is simulated: every draft is accepted with a given probability, independently of the
others. Operations of the autoencoder and of the text encoder are not counted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...errors import UserError
from ...model_loaders.catalogue import hub
from ...networks.autoencoder import VQAutoencoder, VQConfig, VQModel
from ...networks.hybrid import Hybrid
from ...networks.janus import Janus, JanusModel
from ...networks.llama import Llama, LlamaConfig, TokenModel
from ...networks.mar import MAR, MARConfig, MARModel
from ...reports.table import markdown
from ...runs import presets, registry
from ...runs.choice import Choice, ModelFacts
from ...runs.loading import Ready, defaults
from ...runs.outlines import SEMANTIC_SIDE, outlined
from ...samplers.conditioning import AnyCondition, ClassCondition, FeatureCondition, PromptCondition, TextCondition
from ...samplers.engine import finish
from ...samplers.mar.cspd import rejection
from ...samplers.tokens import mulosd
from ...samplers.tokens.mulosd.drafting import PixelUpSampling
from ..training.initialise import initialise_hybrid, initialise_llama, initialise_mar
from .operations import PRODUCTS, countable
from .sizes import AROUND, random_words

PAGE = Path(__file__).resolve().parents[2] / "docs" / "full_size.md"
# Probability that a draft is accepted. FastHybrid's paper states none; its seconds at a batch of 8 imply about 18 full
# passes of 64, and so about 99 % (0.8 % rejected, if a batch restarts together). CSpD's is that of MAR-H drafted by
# MAR-B, 16 AR steps at a time (Table 1).
ACCEPTED = {"fasthybrid": 0.99, "cspd": 0.26}
# Drafts of the paper, where the catalogue names none.
_DRAFTS = {"mar-large": "mar-base-ema", "mar-huge": "mar-base-ema"}
# Width of a head of a narrow network: of a MAR and of a language model, of a target and of its draft. All differ, so
# that attention is counted at the width of the network that it is of.
_MAR_HEADS = (2, 6)
_LLAMA_HEADS = (4, 8)
_NARROW = 8  # width of other layers
_PROMPT_ROWS = 120
# Blocks that run of many, and the one of these that is counted for all that do not. LazyMAR evaluates blocks 1 to 4 of
# the head in its own way, and the others alike; in a token model the first and the last block may differ.
_RUN = {"res_blocks": (6, 5), "layers": (3, 1)}
_BLOCK = re.compile(r"\b(res_blocks|layers)\.(\d+)\.")
_FAMILIES = ("mar", "hybrid", "llamagen", "dtok", "janus")


@dataclass(frozen=True)
class Cost:
    """What one image costs, or a batch."""

    passes: int  # of the transformer, the draft model's included
    head_calls: int
    rows: int  # of the transformer
    head_rows: int
    flops: float  # 2 a multiply-add


# -------------------------------------------------------------------------------------------------- narrow networks


@dataclass(frozen=True, eq=False)
class Narrow:
    """A narrow network in the place of a published one."""

    model: Any
    # Address of a weight's memory to its numbers, those of the published weight, and the blocks that it is counted for.
    weights: dict[int, tuple[int, int, int]]
    heads: dict[int, int]  # width of an attention head to the published one
    condition: AnyCondition


def narrow(entry: hub.Entry, draft: bool = False) -> Narrow:
    """The narrow network of a catalogue entry; ``draft``: as the draft model beside another one."""
    ready = outlined(entry)
    published: Any = ready.kind.network(ready.model)

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        net, model, heads, condition = _MAKERS[entry.family](entry, published.config, int(draft))

    sizes = dict(published.named_parameters())
    weights = {}
    for name, parameter in net.eval().requires_grad_(False).named_parameters():
        about = (parameter.numel(), sizes[name].numel(), _blocks(name, sizes))
        weights[parameter.untyped_storage().data_ptr()] = about
    return Narrow(model, weights, heads, condition)


def _blocks(name: str, published: Iterable[str]) -> int:
    """How many blocks of a published network a weight of the narrow one is counted for; names of parameters."""
    found = _BLOCK.search(name)
    if found is None:
        return 1

    run, for_all = _RUN[found[1]]
    if int(found[2]) != for_all:
        return 1

    before, after = name[: found.start(2)], name[found.end(2) :]
    depth = sum(other.startswith(before) and other.endswith(after) for other in published)
    return depth - run + 1


def _narrow_mar(c: MARConfig, which: int) -> MARConfig:
    """The shape of a narrow MAR."""
    return replace(c, dim=c.heads * _MAR_HEADS[which], head_width=_NARROW, head_depth=_RUN["res_blocks"][0])


def _narrow_llama(c: Any, which: int) -> Any:
    """The shape of a narrow language model or token model."""
    width = _LLAMA_HEADS[which]
    about = {"queries": c.heads * width} if c.queries else {}
    return replace(c, dim=c.heads * width, hidden=_NARROW, depth=_RUN["layers"][0], **about)


def _mar(entry: hub.Entry, c: MARConfig, which: int) -> tuple[nn.Module, Any, dict[int, int], AnyCondition]:
    net = initialise_mar(MAR(_narrow_mar(c, which)))
    model = MARModel(net, entry.id, t_max=999)
    return net, model, {_MAR_HEADS[which]: c.dim // c.heads}, ClassCondition((1,), ("",))


def _hybrid(entry: hub.Entry, c: Any, which: int) -> tuple[nn.Module, Any, dict[int, int], AnyCondition]:
    small = replace(c, mar=_narrow_mar(c.mar, which), llm=_narrow_llama(c.llm, which))
    net = initialise_hybrid(Hybrid(small))
    outline: Any = outlined(entry).model
    model = replace(outline, net=net.mar, hybrid=net)
    heads = {_MAR_HEADS[which]: c.mar.dim // c.mar.heads, _LLAMA_HEADS[which]: c.llm.head_dim}
    return net, model, heads, PromptCondition(("word " * 20,))


def _tokens(entry: hub.Entry, c: LlamaConfig, which: int) -> tuple[nn.Module, Any, dict[int, int], AnyCondition]:
    net = initialise_llama(Llama(_narrow_llama(c, which)))
    net.output.weight.normal_(std=0.02)
    model = TokenModel(net, entry.id, entry.grid)
    condition: AnyCondition = ClassCondition((1,), ("",))
    if model.condition == "text":
        condition = TextCondition((torch.zeros(_PROMPT_ROWS, c.condition_size),), ("",))
    elif model.condition == "features":
        condition = FeatureCondition((torch.zeros(SEMANTIC_SIDE**2, c.condition_size),), ("",))
    return net, model, {_LLAMA_HEADS[which]: c.head_dim}, condition


def _janus(entry: hub.Entry, c: Any, which: int) -> tuple[nn.Module, Any, dict[int, int], AnyCondition]:
    small = _narrow_llama(c, which)
    net = Janus(replace(small, projected=small.dim))
    initialise_llama(net)
    net = net.fold()
    words = partial(random_words, count=_NARROW)
    model = JanusModel(net, entry.id, entry.grid, tokenize=words, template=AROUND)
    return net, model, {_LLAMA_HEADS[which]: c.head_dim}, PromptCondition(("word " * 20,))


_MAKERS = {"mar": _mar, "hybrid": _hybrid, "llamagen": _tokens, "dtok": _tokens, "janus": _janus}


# ---------------------------------------------------------------------------------------------------------- counting


class _Counter(TorchDispatchMode):
    """Counts products at the published sizes of narrow networks."""

    def __init__(self, networks: Sequence[Narrow]):
        super().__init__()
        self.flops = 0.0
        self.weights: dict[int, tuple[int, int, int]] = {}
        self._blocks = 1  # that the product before was counted for: that of the queries, before attention
        self.heads: dict[int, int] = {}
        for network in networks:
            self.weights.update(network.weights)
            self.heads.update(network.heads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1].removesuffix("_")  # in place or not
        if "scaled_dot_product" in name:
            mean = self._attention(*args[:3])
            # The function, in inference mode, or what it calls, which also returns sums of exponentials.
            return mean if name == "scaled_dot_product_attention" else (mean, mean.new_zeros(mean.shape[:-1]))

        out = func(*args, **(kwargs or {}))
        if name in PRODUCTS:
            self._product(out, *(args[i] for i in PRODUCTS[name]))
        return out

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Count attention, in as many blocks as the product before, and return the mean of the values in its place.

        Random weights give one as good as the other, and among thousands of tokens attention takes most of the time.
        """
        wider = self.heads[q.shape[-1]] / q.shape[-1]
        self.flops += 4 * q.numel() * k.shape[-2] * wider * self._blocks
        return v.mean(-2, keepdim=True).repeat(1, 1, q.shape[-2], 1)

    def _product(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """A product of rows with a weight, of which a part may be used."""
        for tensor in (b, a):
            found = self.weights.get(tensor.untyped_storage().data_ptr())
            if found is not None:
                own, published, self._blocks = found
                rows = out.numel() / out.shape[-1]
                self.flops += 2 * rows * published * tensor.numel() / own * self._blocks
                return

        raise AssertionError(f"a product of {list(a.shape)} and {list(b.shape)} is not with a weight")


@contextmanager
def tokenizer_not_counted() -> Iterator[None]:
    """Leave out MuLo-SD's enlarging and reducing, and its table of similar codes, which is made once a tokenizer."""

    def not_counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return function(*args)

        return call

    with ExitStack() as stack:
        for owner, name in ((PixelUpSampling, "up"), (PixelUpSampling, "down"), (mulosd, "cached_neighbours")):
            stack.enter_context(mock.patch.object(owner, name, not_counted(getattr(owner, name))))
        yield


@contextmanager
def accepting(share: float) -> Iterator[None]:
    """Accept every draft of FastHybrid and of CSpD, and keep every redraw, with this probability."""
    rng = torch.Generator().manual_seed(0)

    def cosine(a: Tensor, b: Tensor, dim: int = 1) -> Tensor:
        kept = torch.rand((a + b).sum(dim).shape, generator=rng) < share
        return torch.where(kept, 1.0, -1.0)

    def log_ratio(token: Tensor, *_: Any, **__: Any) -> Tensor:
        kept = torch.rand(token.shape[:-1], generator=rng) < share
        return torch.where(kept, torch.inf, -torch.inf)

    similar = mock.patch.object(F, "cosine_similarity", cosine)
    with similar, mock.patch.object(rejection, "log_ratio", log_ratio):
        yield


def cost(entry: hub.Entry, sampler: str, settings: Any, accepted: float | None = None, images: int = 1) -> Cost:
    """What a batch of images of a catalogue entry costs with a sampler of the registry at its settings.

    ``accepted``: probability that a draft is accepted; None: that of ACCEPTED.
    """
    own = registry.find(sampler)
    network = narrow(entry)
    networks = [network]

    more: dict[str, Any] = {}
    if own.needs_draft:
        networks.append(narrow(draft_of(entry), draft=True))
        more["draft"] = networks[1].model
    if own.needs_up_sampler:
        more["up_sampler"] = PixelUpSampling(_tokenizer())

    noise = own.family.noise(0, range(images))
    condition = network.condition.for_images([0] * images)
    share = ACCEPTED.get(sampler.partition("+")[0], 1.0) if accepted is None else accepted
    with countable(), accepting(share), tokenizer_not_counted(), _Counter(networks) as counter:
        made: Any = finish(own.run(network.model, condition, settings, noise, **more))

    counts = made.report.counts
    return Cost(
        passes=counts["transformer_passes"],
        head_calls=counts.get("head_calls", 0),
        rows=counts["transformer_tokens"],
        head_rows=counts.get("head_rows", 0),
        flops=counter.flops,
    )


def draft_of(entry: hub.Entry) -> hub.Entry:
    """The draft model of an entry: the catalogue's, or the paper's."""
    choice = hub.draft_for(entry.id) or _DRAFTS[entry.id]
    return next(other for other in hub.entries(entry.family) if other.id == choice)


@lru_cache(maxsize=1)
def _tokenizer() -> VQModel:
    """A small tokenizer with the published number of codes, to bring codes from one size to the other."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = VQConfig(ch=32, ch_mult=(1, 1, 1, 1, 1), blocks=1, z_channels=8, codes=16384)
        return VQModel(VQAutoencoder(config).eval().requires_grad_(False), "narrow")


# ----------------------------------------------------------------------------------------------------------- presets


@dataclass(frozen=True)
class Row:
    """A preset of an entry, or plain sampling."""

    entry: hub.Entry
    sampler: str
    preset: str

    @property
    def settings(self) -> Any:
        """Its settings: those that the nodes show for the entry."""
        ready: Ready = outlined(self.entry)
        width = ready.kind.width(ready.model)
        return Choice(registry.find(self.sampler), self.preset, {}).settings(ModelFacts(False, width, defaults(ready)))

    @property
    def title(self) -> str:
        """Its name in the table: "ZipAR, fast"."""
        title = registry.find(self.sampler).title
        return title if self.preset == presets.CUSTOM else f"{title}, {self.preset}"

    def cost(self) -> Cost:
        """What an image costs."""
        return cost(self.entry, self.sampler, self.settings)


def networks() -> list[hub.Entry]:
    """The entries of the catalogue whose samplers have presets, one of each network and grid."""
    found: dict[tuple[str, int], hub.Entry] = {}
    for family in _FAMILIES:
        for entry in hub.entries(family):
            if not entry.built_in:
                found.setdefault((entry.network, entry.grid), entry)

    return list(found.values())


def rows_of(entry: hub.Entry) -> list[Row]:
    """The rows of an entry: plain sampling first, then every preset but *exact*, which costs as much."""
    family = outlined(entry).family
    plain = next(own for own in registry.SAMPLERS.values() if own.baseline and family in own.families)
    special = getattr(outlined(entry).model.net.config, "special", 0)
    if special:
        return [Row(entry, "par", presets.CUSTOM)]

    rows = [Row(entry, plain.name, presets.CUSTOM)]
    if presets.FEW_STEPS in presets.names(plain.settings):
        rows.append(Row(entry, plain.name, presets.FEW_STEPS))

    for name, own in registry.SAMPLERS.items():
        has_presets = bool(presets.values(own.settings, presets.BALANCED, demo=False))
        drafts = not own.needs_draft or hub.draft_for(entry.id) or entry.id in _DRAFTS
        if family in own.families and has_presets and drafts:
            rows += [Row(entry, name, preset) for preset in (presets.BALANCED, presets.FAST)]

    return rows


def line(row: Row, own: Cost, plain: Cost) -> list[str]:
    """A row of the table."""
    return [
        row.entry.id,
        row.title,
        f"{own.passes:,}",
        f"{own.head_calls:,}" if own.head_calls else "",
        f"{own.rows:,}",
        f"{own.head_rows:,}" if own.head_rows else "",
        short(own.flops / 1e12),
        f"{plain.flops / own.flops:.2f}",
    ]


def short(number: float) -> str:
    """A number with three digits, from 1,000 on with all digits before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


HEAD = ["model", "sampler", "passes", "head calls", "rows", "head rows", "TFLOP", "plain / this"]


def lines_of(entry: hub.Entry, titles: Collection[str] | None = None) -> list[list[str]]:
    """The rows of the table of an entry, or those with certain ``titles``, plain sampling among them."""
    rows = [row for row in rows_of(entry) if titles is None or row.title in titles]
    costs = [row.cost() for row in rows]
    return [line(row, own, costs[0]) for row, own in zip(rows, costs, strict=True)]


def written() -> dict[str, list[dict[str, str]]]:
    """Rows of the table in docs/full_size.md by model, each as column and entry; empty entries are left out."""
    page = PAGE.read_text(encoding="utf-8-sig")
    (block,) = re.findall(r"<!-- figure presets: begin -->(.*?)<!-- figure presets: end -->", page, re.S)
    lines = [line for line in block.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row[0], []).append({name: cell for name, cell in zip(head, row, strict=True) if cell})
    return found


def missing_rows() -> list[str]:
    """What the table in docs/full_size.md lacks, "ar-dtok-512: ZipAR, fast", of the models that it has."""
    page = written()
    missing = []
    for entry in networks():
        rows = page.get(entry.id, [])
        there = [row["sampler"] for row in rows]
        missing += [f"{entry.id}: {row.title}" for row in rows_of(entry) if rows and row.title not in there]
    return missing


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--models", metavar="NAMES", help="entries of the catalogue, separated by commas; default all")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    every = {entry.id: entry for entry in networks()}
    names = list(every) if options.models is None else [name.strip() for name in options.models.split(",")]
    for name in names:
        if name not in every:
            raise UserError(f"models: {name[:60]!r} is not one of {', '.join(every)}.")

    table = [HEAD]
    for name in names:
        table += lines_of(every[name])
    print(markdown(table, empty=False))
    return 0
