"""Parity cases of the LlamaGen family: GPT, sampling runs of LlamaGen, PAR and ZipAR, top-k and top-p filters.

A folder contains any of the files named below. ``X_io`` belongs to the weights ``X``, and ZipAR's runs to the weights
of LlamaGen. All sizes are read from the files. The VQ tokenizers have cases of their own (``vq.py``).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...networks.llama import Block, Llama, LlamaConfig, TokenModel, attend
from ...samplers.conditioning import AnyCondition, TextCondition, from_ids
from ...samplers.engine import finish
from ...samplers.tokens.cache_slots import serial_slots
from ...samplers.tokens.canvas import token_canvas
from ...samplers.tokens.decode import decode_schedule
from ...samplers.tokens.looks import CachedTransformer, DeviceTable
from ...samplers.tokens.par import par_groups, par_schedule
from ...samplers.tokens.sampling import allowed
from ...samplers.tokens.schedule import Schedule, raster
from ...samplers.tokens.settings import TokenSettings
from ...samplers.tokens.token_noise import TokenNoise
from ...samplers.tokens.zipar import zipar_schedule
from .cases import Case, Check, exact, gathered, read_json, read_tensors, same_shapes

_GREEDY = re.compile(r"(.+)\.greedy\.cfg([\d.]+?)(?:_int(\d+))?\.tokens")
_SAMPLED = re.compile(r"(.+)\.sampled\.seed(\d+)_cfg([\d.]+)_k(\d+)_p([\d.]+)_t([\d.]+)\.tokens")


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``; weights are read when a case runs."""
    known: dict[str, Callable[[Path, str], Iterable[Case]]]
    known = {"gpt": _gpt, "par": _par, "zipar": _zipar, "ziparmasked": _zipar, "sampler": _filters}
    out: list[Case] = []

    for path in sorted(folder.glob("*_io.safetensors")):
        stem = path.name.removesuffix("_io.safetensors")
        if make := known.get(stem.split("_")[0]):
            out += gathered(f"llamagen/{stem}", partial(make, folder, stem))

    return [*out, *(_key_list(path) for path in sorted(folder.glob("keys_*.json")) if "vq" not in path.stem)]


@lru_cache(maxsize=4)
def _io(folder: Path, stem: str) -> dict[str, Tensor]:
    return read_tensors(folder / f"{stem}_io.safetensors")


@lru_cache(maxsize=4)
def _model(folder: Path, stem: str) -> TokenModel:
    """The model of the weights ``stem``; head count and grid follow from the RoPE table, or are the official ones."""
    state, io = read_tensors(folder / f"{stem}.safetensors"), _io(folder, stem)
    heads = state["tok_embeddings.weight"].shape[1] // (2 * io["freqs_cis"].shape[1]) if "freqs_cis" in io else None
    net = Llama(LlamaConfig.of_llamagen(state, heads))
    net.load_state_dict(state)
    cells = next(v.shape[1] for k, v in io.items() if k.endswith(("tokens", "tokens_raster")))
    return TokenModel(net.eval().requires_grad_(False), stem, int(cells**0.5))


def _condition(io: dict[str, Tensor]) -> AnyCondition:
    """Condition of the recorded runs: class ids, or captions without padding."""
    if "cond" in io:
        return from_ids(io["cond"].tolist())
    texts = [rows[mask > 0] for rows, mask in zip(io["caption_embs"], io["emb_masks"], strict=True)]
    return TextCondition(tuple(texts), tuple(str(i) for i in range(len(texts))))


# ------------------------------------------------------------------------------------------------ networks


def _gpt(folder: Path, stem: str) -> Iterator[Case]:
    io = _io(folder, stem)
    tag = next(key for key in io if ".full_logits" in key).split(".")[0]
    name = f"llamagen/{stem}"

    def given() -> Tensor:
        return io["cond"] if "cond" in io else io["caption_embs"]

    def rows(prefix: Tensor) -> tuple[Tensor, Tensor]:
        net = _model(folder, stem).net
        x = torch.cat([prefix, net.tok_embeddings(io["tokens"])], 1)
        return x, torch.arange(-prefix.shape[1], io["tokens"].shape[1])

    def full(suffix: str) -> Iterator[Check]:
        net, grid = _model(folder, stem).net, _model(folder, stem).grid
        prefix = net.prefix(given(), guided=True)[len(given()) :] if "uncond" in suffix else net.prefix(given())
        yield Check(net(*rows(prefix), net.positions(grid, prefix.shape[1])), io[f"{tag}.full_logits{suffix}"])

    def inside() -> Iterator[Check]:
        net, grid = _model(folder, stem).net, _model(folder, stem).grid
        prefix = net.prefix(given())
        if f"{tag}.cap_proj" in io:
            yield Check(prefix, io[f"{tag}.cap_proj"])
        x, place = rows(prefix)
        rope = net.positions(grid, prefix.shape[1]).rows(place, len(x))
        yield Check(rope, io["freqs_cis"])
        if f"{tag}.l0_out" in io:
            first = net.layers[0]
            assert isinstance(first, Block)
            norm = first.attention_norm(x)
            q, kv = first.attention.project(norm, rope[:, None])
            k, v = kv.chunk(2, 1)
            attention = first.attention.wo(attend(q, k, v, causal=True))
            out = x + attention
            out = out + first.feed_forward(first.ffn_norm(out))
            for key, computed in (("l0_norm", norm), ("l0_attn", attention), ("l0_out", out)):
                yield Check(computed, io[f"{tag}.{key}"])
            yield Check(net.output(io[f"{tag}.final_norm"]), io[f"{tag}.full_logits"])

    def cached(suffix: str) -> Iterator[Check]:
        model = _model(folder, stem)
        what: AnyCondition = _condition(io)
        if suffix == "_nomask":
            what = TextCondition(tuple(io["caption_embs"]), ("",) * len(io["caption_embs"]))
        computed = replay(model, what, raster(model.grid), io["tokens"], "uncond" in suffix)
        yield Check(computed, io[f"{tag}.cached_logits{suffix}"])

    for key in sorted(io):
        for kind, make in (("full_logits", full), ("cached_logits", cached)):
            if key.startswith(f"{tag}.{kind}"):
                yield Case(f"{name}.{key.removeprefix(f'{tag}.')}", partial(make, key.removeprefix(f"{tag}.{kind}")))

    yield Case(f"{name}.inside", inside)
    yield from _runs(folder, stem, io, io, lambda run, model: raster(model.grid))


def _par(folder: Path, stem: str) -> Iterator[Case]:
    io = _io(folder, stem)

    def order() -> Iterator[Check]:
        model = _model(folder, stem)
        cells = torch.tensor(par_groups(model.grid, model.regions)).flatten()
        yield exact(cells, io["par.perm_index"])
        yield exact(io["tokens_raster"][:, cells], io["tokens_par_order"])

    def full() -> Iterator[Check]:
        model = _model(folder, stem)
        net, n = model.net, model.regions
        cells = torch.tensor(par_groups(model.grid, n)).flatten()
        tokens, none = net.tok_embeddings(io["tokens_raster"][:, cells]), torch.full((n - 1,), -1)
        special = net.spe_tok_embeddings.special_embeddings.weight.expand(len(tokens), -1, -1)
        x = torch.cat([net.prefix(io["cond"]), tokens[:, :n], special, tokens[:, n:]], 1)
        place = torch.cat([none[:1], cells[:n], none, cells[n:]])
        yield Check(net(x, place, net.positions(model.grid, 1), io["group_mask"].bool()), io["par.full_logits"])

    def mask() -> Iterator[Check]:
        model = _model(folder, stem)
        schedule = par_schedule(model.grid, model.regions)
        slots = serial_slots(schedule)
        count = slots.count_without_padding
        visible = DeviceTable(schedule, slots, 0, torch.device("cpu")).mask(slice(0, -1), count)
        recorded = io["group_mask"][1:, 1:][list(slots.of_row[:-1]), :count]
        yield exact(visible.to(torch.uint8), recorded)

    yield Case(f"llamagen/{stem}.order", order)
    yield Case(f"llamagen/{stem}.full_logits", full)
    yield Case(f"llamagen/{stem}.group_mask", mask)
    yield from _runs(folder, stem, io, io, lambda run, model: par_schedule(model.grid, model.regions))


def _zipar(folder: Path, stem: str) -> Iterator[Case]:
    family, rest = stem.split("_", 1)
    weights = f"gpt_{rest}"

    def schedule(run: str, model: TokenModel) -> Schedule:
        hidden = zipar_schedule(model.grid, int(run.rpartition("_w")[2]))
        # The published code attends to undecided cells as blanks: to the cache, all cells are known from the start.
        return replace(hidden, known=model.tokens) if family == "zipar" else hidden

    yield from _runs(folder, weights, _io(folder, stem), _io(folder, weights), schedule)


def _key_list(path: Path) -> Case:
    """Names and shapes of an official file, compared with a network of that size on the meta device."""

    def checks() -> Iterator[Check]:
        yield same_shapes(read_json(path)["keys"], lambda state: Llama(LlamaConfig.of_llamagen(state)))

    return Case(f"llamagen/keys.{path.stem.removeprefix('keys_')}", checks)


# ------------------------------------------------------------------------------------------------ sampling


def _filters(folder: Path, stem: str) -> Iterator[Case]:
    io = _io(folder, stem)

    def checks(key: str, top_k: int, top_p: float) -> Iterator[Check]:
        left = allowed(io["logits"], top_k, top_p)
        yield exact(left.isfinite().to(torch.uint8), io[f"filtered_{key}_keepmask"])
        yield Check(left.softmax(-1), io[f"probs_{key}"])

    for m in filter(None, (re.fullmatch(r"probs_(k(\d+)_p([\d.]+))", key) for key in sorted(io))):
        yield Case(f"llamagen/sampler.{m[1]}", partial(checks, m[1], int(m[2]), float(m[3])))


class MultinomialNoise(TokenNoise):
    """Draws of the reference: torch.multinomial divides probabilities by exponential
    random numbers of the global generator and takes the maximum. ``together``: one
    call draws all cells of a pass (PAR), instead of one call per cell.
    """

    def __init__(self, seed: int, images: int, together: bool):
        self._generator, self._images, self._together = torch.Generator().manual_seed(seed), images, together

    def __len__(self) -> int:
        return self._images

    def stream(self, name: str, values: int, device: torch.device) -> Any:
        return SimpleNamespace(gumbel=partial(self._next, values))

    def _next(self, values: int, cells: Tensor) -> Tensor:
        calls, rows = (1, len(cells)) if self._together else (len(cells), 1)
        parts = [torch.empty(self._images, rows, values).exponential_(generator=self._generator) for _ in range(calls)]
        return -torch.cat(parts, 1).log()


def _runs(
    folder: Path,
    weights: str,
    runs: dict[str, Tensor],
    io: dict[str, Tensor],
    schedule: Callable[[str, TokenModel], Schedule],
) -> Iterator[Case]:
    """Recorded generations."""

    def generated(model: TokenModel, run: str, settings: TokenSettings, seed: int) -> Tensor:
        draws = MultinomialNoise(seed, len(_condition(io)), together=model.regions > 1)
        canvas, prepared = token_canvas("verify", model, _condition(io), settings, draws)
        out = finish(decode_schedule(canvas, prepared, schedule(run, model)))
        return out.latents.flatten(1)

    def greedy(run: str, base: str, cfg: float, until: int | None) -> Iterator[Check]:
        model = _model(folder, weights)
        plan = schedule(run, model)
        computed = generated(model, run, TokenSettings(cfg=cfg, top_k=1, cfg_interval=until), 0)
        yield exact(computed, runs[f"{base}.tokens_raster" if model.regions > 1 else f"{base}.tokens"])
        prefix = io["emb_masks"].shape[1] if "emb_masks" in io else 1
        if f"{base}.positions" in runs:
            positions = [row.place + prefix for p in plan.passes[1:] for row in p.fed_rows]
            yield exact(torch.tensor([*range(prefix), *positions]), runs[f"{base}.positions"])
            lengths = [prefix, *(len(p.fed_rows) for p in plan.passes[1:])]
            yield exact(torch.tensor(lengths), runs[f"{base}.positions_len"])

        if f"{base}.logits" in runs:
            expected = runs[f"{base}.logits"]
            halves = len(expected) // len(_condition(io))
            logits = torch.cat([replay(model, _condition(io), plan, computed, half > 0) for half in range(halves)])
            yield Check(logits, expected[:, prefix - 1 :])

    def sampled(run: str, key: str, seed: int, settings: TokenSettings) -> Iterator[Check]:
        model = _model(folder, weights)
        expected = runs[key]
        if model.regions > 1:  # recorded in decoding order
            cells = torch.tensor(par_groups(model.grid, model.regions)).flatten()
            expected = torch.empty_like(expected).index_copy(1, cells, expected)
        yield exact(generated(model, run, settings, seed), expected)

    for key in sorted(runs):
        if m := _GREEDY.fullmatch(key):
            base = key.removesuffix(".tokens")
            yield Case(f"llamagen/{base}", partial(greedy, m[1], base, float(m[2]), int(m[3]) if m[3] else None))
        elif m := _SAMPLED.fullmatch(key):
            settings = TokenSettings(cfg=float(m[3]), top_k=int(m[4]), top_p=float(m[5]), temperature=float(m[6]))
            yield Case(f"llamagen/{m[1]}.sampled", partial(sampled, m[1], key, int(m[2]), settings))


def replay(model: TokenModel, condition: AnyCondition, schedule: Schedule, tokens: Tensor, null: bool) -> Tensor:
    """Teacher-forced logits [B, rows, V] of all passes of a schedule,
    with tokens int64 [B, N]; the first row is the prefill's.
    """
    draws = MultinomialNoise(0, len(condition), False)
    canvas, prepared = token_canvas("verify", model, condition, TokenSettings(), draws)
    canvas.values[:, :-1] = tokens
    look = CachedTransformer(canvas, prepared)
    slots = serial_slots(schedule)
    hidden = look.prefill(True, slots.count)
    table = DeviceTable(schedule, slots, look.cache.prefix, tokens.device)

    for k in range(1, len(schedule.passes)):
        more = look.feed(canvas.values, table.pass_rows(k)[0], True)
        hidden = torch.cat([hidden, more], 1)

    logits = model.net.logits(hidden)
    return logits[len(tokens) :] if null else logits[: len(tokens)]
