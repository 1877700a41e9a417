"""The samplers' nodes by their ids, from the registry alone: tests of a real ComfyUI do not import the nodes."""

from fastar_nodes.runs.registry import SAMPLERS, TAR, Entry

# A combination has no node, and Tar is the second name of LlamaGen.
SAMPLER_NODES: dict[str, Entry] = {
    f"FastAR{entry.title.replace('-', '')}Sampler": entry
    for name, entry in SAMPLERS.items()
    if "+" not in name and name != TAR
}


def nodes_of(decoder: str) -> tuple[str, ...]:
    """The nodes of the samplers whose results a kind of decoder decodes, see ``Family.decoder``."""
    return tuple(name for name, entry in SAMPLER_NODES.items() if entry.family.decoder == decoder)
