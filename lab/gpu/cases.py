"""What is measured on a card: parts in the order of their importance, and how long a row may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    arguments: str  # of the command bench; PRODUCTS: products alone
    batch: int = 1
    speeds: str = ""  # to measure, written as for the option --speeds; "" for the option's own

    @property
    def command(self) -> str:
        """A command that times the same; "" for products."""
        if self.arguments == PRODUCTS:
            return ""
        batch = f" --batch {self.batch}" if self.batch > 1 else ""
        return f"python -m fastar_nodes.lab bench {self.arguments}{batch} --device cuda"


# Most seconds of a row; one that is cut goes on when the command is run again.
ROW_SECONDS = 60.0
PRODUCTS = "products"


@dataclass(frozen=True)
class Part:
    """Rows that are measured one after another."""

    name: str
    cases: tuple[Case, ...]

    @property
    def seconds(self) -> float:
        """Most that it may take."""
        return ROW_SECONDS * len(self.cases)


_MAR_L = "--random MAR-L --dtype fp16 --samplers"
_MAR_H = "--random MAR-H --dtype fp16 --samplers"
_LLAMAGEN = "--random LlamaGen-XL --dtype bf16 --samplers"
_JANUS_7B = "--random Janus-Pro-7B --samplers llamagen --dtype"
_JANUS_1B = "--random Janus-Pro-1B --samplers llamagen --dtype"
_BITDANCE = "--random BitDance-14B-64x"
_ALL_ACCEPTED = "fasthybrid --set threshold=-1"
_GTR = "--set steps=17 --set diffusion_steps=50 --set diffusion_steps_end=20 --set t_max=950"
_FREE = "--set align_lookaheads=false"
_LONG = "cspd --set steps=256"
_DTYPES = ("bf16", "int8", "fp8", "int4")
# Where plain alone takes longer than a row may.
_FAST = "auto"
_COMPILED = "auto,compile"

PARTS: tuple[Part, ...] = (
    # 1. Whether what is fast is right.
    Part(
        "demo",
        (
            Case("demo's LlamaGen", "--model demo-llamagen --samplers llamagen"),
            Case("demo's LlamaGen, parallel 16", "--model demo-llamagen --samplers llamagen --set parallel=16"),
            Case("demo's LlamaGen, int4", "--model demo-llamagen --samplers llamagen --dtype int4"),
            Case("demo's LlamaGen, int8", "--model demo-llamagen --samplers llamagen --dtype int8"),
            Case("demo's LlamaGen, ZipAR", "--model demo-llamagen --samplers zipar"),
            Case("demo's PAR", "--model demo-par --samplers par"),
            Case("demo's MAR", "--model demo --samplers mar"),
            Case("demo's MAR, FastHybrid", "--model demo --samplers fasthybrid"),
            Case("demo's MAR, LazyMAR", "--model demo --samplers lazymar"),
            Case("demo's MAR, CSpD", "--model demo --samplers cspd"),
            Case("demo's MAR, GtR", "--model demo --samplers gtr"),
            Case("demo's BitDance", "--model demo-bitdance --samplers bitdance"),
            Case("demo's BitDance, speculation 8", "--model demo-bitdance --samplers bitdance --set speculation=8"),
        ),
    ),
    Part("products", (Case("products of quantised weights", PRODUCTS),)),
    # 2. Headlines.
    Part(
        "janus-7b",
        (
            Case("Janus-Pro-7B, bf16", f"{_JANUS_7B} bf16"),
            Case("Janus-Pro-7B, int8", f"{_JANUS_7B} int8"),
            Case("Janus-Pro-7B, int4", f"{_JANUS_7B} int4"),
        ),
    ),
    Part(
        "fasthybrid-8",
        (
            Case("MAR-L, MAR", f"{_MAR_L} mar", batch=8),
            Case("MAR-L, FastHybrid, every draft accepted", f"{_MAR_L} {_ALL_ACCEPTED}", batch=8),
        ),
    ),
    Part(
        "lazymar",
        (
            Case("MAR-L, MAR", f"{_MAR_L} mar"),
            Case("MAR-L, LazyMAR", f"{_MAR_L} lazymar"),
        ),
    ),
    Part(
        "cspd-8",
        (
            Case("MAR-L, MAR, 256 AR steps", f"{_MAR_L} mar --set steps=256", batch=8, speeds=_FAST),
            Case("MAR-L, CSpD, 256 AR steps", f"{_MAR_L} {_LONG}", batch=8, speeds=_FAST),
        ),
    ),
    # 3. The others.
    Part(
        "fasthybrid-paces",
        (
            Case("MAR-L, FastHybrid, own paces", f"{_MAR_L} fasthybrid {_FREE}"),
            Case("MAR-L, FastHybrid, own paces", f"{_MAR_L} fasthybrid {_FREE}", batch=8),
            Case("MAR-L, FastHybrid, own paces, every draft accepted", f"{_MAR_L} {_ALL_ACCEPTED} {_FREE}", batch=8),
        ),
    ),
    Part(
        "cspd-mar-h",
        (
            Case("MAR-H, MAR, 256 AR steps", f"{_MAR_H} mar --set steps=256", speeds=_FAST),
            Case("MAR-H, CSpD, 256 AR steps", f"{_MAR_H} {_LONG}", speeds=_FAST),
            Case("MAR-H, MAR, 256 AR steps", f"{_MAR_H} mar --set steps=256", batch=64, speeds=_FAST),
            Case("MAR-H, CSpD, 256 AR steps", f"{_MAR_H} {_LONG}", batch=64, speeds=_FAST),
        ),
    ),
    Part(
        "gtr",
        (
            Case("MAR-L, GtR, 17 AR steps", f"{_MAR_L} gtr {_GTR}"),
            Case("MAR-L, MAR with GtR's numbers of steps", f"{_MAR_L} mar {_GTR}"),
        ),
    ),
    Part(
        "batch-64",
        (
            Case("MAR-L, MAR", f"{_MAR_L} mar", batch=64),
            Case("MAR-L, LazyMAR", f"{_MAR_L} lazymar", batch=64),
        ),
    ),
    Part(
        "parallel",
        (
            Case("LlamaGen-XL, ZipAR", f"{_LLAMAGEN} zipar"),
            Case("LlamaGen-XL, ZipAR, parallel 24", f"{_LLAMAGEN} zipar --set parallel=24"),
            Case("LlamaGen-XL, LlamaGen, parallel 24", f"{_LLAMAGEN} llamagen --set parallel=24"),
            Case("PAR-XL, PAR, 4 regions", f"{_LLAMAGEN} par"),
        ),
    ),
    Part(
        "janus-dtypes",
        (
            *(Case(f"Janus-Pro-7B, {dtype}", f"{_JANUS_7B} {dtype}", speeds=_COMPILED) for dtype in _DTYPES),
            *(Case(f"Janus-Pro-1B, {dtype}", f"{_JANUS_1B} {dtype}", speeds=_COMPILED) for dtype in _DTYPES),
        ),
    ),
    Part("llamagen", (Case("LlamaGen-XL, LlamaGen", f"{_LLAMAGEN} llamagen", speeds="plain,auto,compile"),)),
    Part(
        "bitdance-14b",
        (
            Case("BitDance-14B-64x, 1,024 pixels, int4", f"{_BITDANCE} --dtype int4"),
            Case("BitDance-14B-64x, 1,024 pixels", _BITDANCE),
        ),
    ),
    Part(
        "mar-methods",
        (
            Case("MAR-L, CSpD", f"{_MAR_L} cspd"),
            Case("MAR-L, MAR with DiSA", f"{_MAR_L} mar --set diffusion_steps_end=10"),
            Case("MAR-L, FastHybrid", f"{_MAR_L} fasthybrid"),
            Case("MAR-H, MAR", f"{_MAR_H} mar"),
        ),
    ),
    Part(
        "further-models",
        (
            Case("Harmon-1.5B, MAR", "--random Harmon-1.5B --samplers mar"),
            Case("BitDance-B-16x", "--random BitDance-B-16x"),
        ),
    ),
)
