"""What is measured on a card: parts in the order of their importance, each with the most seconds it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    arguments: str  # of the command bench; of a program of others, the official size
    batch: int = 1
    goal: float | None = None  # seconds on an H100
    # Of a program of others: "static" or "dynamic", transformers' cache of keys and values; "mar" or "llamagen", the
    # authors' checkout.
    theirs: str = ""

    @property
    def command(self) -> str:
        """A command that times the same; "" for a program of others."""
        if self.theirs:
            return ""
        batch = f" --batch {self.batch}" if self.batch > 1 else ""
        return f"python -m fastar_nodes.lab bench {self.arguments}{batch} --device cuda"


@dataclass(frozen=True)
class Part:
    """Rows that are measured one after another."""

    name: str
    seconds: float  # most it may take; a part that is cut goes on when the command is run again
    cases: tuple[Case, ...]


# The part that is left out without checkouts.
AUTHORS = "authors"

_MAR = "--random MAR-L --dtype fp16 --samplers mar"
_MAR_H = "--random MAR-H --dtype fp16 --samplers mar"
_LAZY = "--random MAR-L --dtype fp16 --samplers lazymar"
_GTR = "--set steps=17 --set diffusion_steps=50 --set diffusion_steps_end=20 --set t_max=950"
_FASTHYBRID = "--random MAR-L --dtype fp16 --samplers fasthybrid"
_LLAMAGEN = "--random LlamaGen-XL --dtype bf16 --samplers llamagen"
_PAR = "--random LlamaGen-XL --dtype bf16 --samplers par"
_ZIPAR = "--random LlamaGen-XL --dtype bf16 --samplers zipar"
_JANUS_7B = "--random Janus-Pro-7B --samplers llamagen --dtype"
_JANUS_1B = "--random Janus-Pro-1B --samplers llamagen --dtype"

PARTS: tuple[Part, ...] = (
    Part("mar", 75, (Case("MAR-L, MAR", _MAR, goal=1.5),)),
    Part("llamagen", 60, (Case("LlamaGen-XL, LlamaGen", _LLAMAGEN, goal=0.9),)),
    Part("janus-7b", 80, (Case("Janus-Pro-7B, bf16", f"{_JANUS_7B} bf16", goal=3.3),)),
    Part(
        "par",
        45,
        (
            Case("PAR-XL, PAR, 4 regions", _PAR, goal=0.3),
            Case("LlamaGen-XL, ZipAR", _ZIPAR),
        ),
    ),
    Part("lazymar", 60, (Case("MAR-L, LazyMAR", _LAZY),)),
    Part(
        "batch-64",
        120,
        (
            Case("MAR-L, MAR", _MAR, batch=64),
            Case("MAR-L, LazyMAR", _LAZY, batch=64),
        ),
    ),
    Part("bitdance-14b", 110, (Case("BitDance-14B-64x, 1,024 pixels", "--random BitDance-14B-64x", goal=8),)),
    Part(
        "mar-methods",
        150,
        (
            Case("MAR-L, FastHybrid, every draft accepted", f"{_FASTHYBRID} --set threshold=-1"),
            Case("MAR-L, CSpD", "--random MAR-L --dtype fp16 --samplers cspd"),
            Case("MAR-L, MAR with DiSA", f"{_MAR} --set diffusion_steps_end=10"),
            Case("MAR-L, GtR, 17 AR steps", f"--random MAR-L --dtype fp16 --samplers gtr {_GTR}"),
            Case("MAR-L, MAR with GtR's numbers of steps", f"{_MAR} {_GTR}"),
            Case("MAR-L, FastHybrid", _FASTHYBRID),
        ),
    ),
    Part("mar-h", 90, (Case("MAR-H, MAR", _MAR_H),)),
    Part("batch-8", 75, (Case("MAR-L, MAR", _MAR, batch=8),)),
    Part(
        "parallel",
        90,
        (Case("LlamaGen-XL, LlamaGen, parallel 24", f"{_LLAMAGEN} --set parallel=24"),),
    ),
    Part("janus-7b-int8", 110, (Case("Janus-Pro-7B, int8", f"{_JANUS_7B} int8", goal=2.2),)),
    Part("janus-7b-fp8", 110, (Case("Janus-Pro-7B, fp8", f"{_JANUS_7B} fp8", goal=2.2),)),
    Part("harmon", 120, (Case("Harmon-1.5B, MAR", "--random Harmon-1.5B --samplers mar"),)),
    Part("bitdance-b", 40, (Case("BitDance-B-16x", "--random BitDance-B-16x"),)),
    Part(
        "demo",
        60,
        (
            Case("demo's LlamaGen", "--model demo-llamagen --samplers llamagen"),
            Case("demo's LlamaGen, parallel 16", "--model demo-llamagen --samplers llamagen --set parallel=16"),
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
    Part(
        "transformers",
        120,
        (
            Case("transformers' Janus-Pro-7B, static cache", "Janus-Pro-7B", theirs="static"),
            Case("transformers' Janus-Pro-7B, dynamic cache", "Janus-Pro-7B", theirs="dynamic"),
        ),
    ),
    Part(
        AUTHORS,
        120,
        (
            Case("the authors' MAR-L", "MAR-L", theirs="mar"),
            Case("the authors' LlamaGen-XL", "LlamaGen-XL", theirs="llamagen"),
        ),
    ),
    Part(
        "janus-1b",
        90,
        (
            Case("Janus-Pro-1B, bf16", f"{_JANUS_1B} bf16"),
            Case("Janus-Pro-1B, int8", f"{_JANUS_1B} int8"),
            Case("Janus-Pro-1B, fp8", f"{_JANUS_1B} fp8"),
        ),
    ),
    Part(
        "mar-h-batches",
        150,
        (
            Case("MAR-H, MAR", _MAR_H, batch=8),
            Case("MAR-H, MAR", _MAR_H, batch=64),
        ),
    ),
)
