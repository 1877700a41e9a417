"""What is often taken for a file of weights: other formats, told by their first bytes, and weights of other programs.

The latter are told by the names of the weights. Every answer is a pair: what was found, which completes the sentence
"<file> ...", and what to do.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any

# What the names of weight files end with.
SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin")

_CHOOSE = "choose a .safetensors file or a torch checkpoint"
# What to get in the place of weights that cannot be read.
INSTEAD = (
    "get the fp32, bf16 or fp16 file of the same model; in ComfyUI, FastAR also reads ComfyUI's formats fp8, int8 and "
    "asym_w4a8_int8"
)
_SHORTEST = 8  # bytes; fewer than any file of weights has
_UNPACK = "unpack it and choose the file inside"
# First bytes of a file, without a byte order mark and blanks in front.
_BEGINNINGS: dict[bytes, tuple[str, str]] = {
    b"version https://git-lfs": (
        "is a Git LFS pointer, not the weights themselves",
        "get the file with 'git lfs pull', or download it from its page",
    ),
    b"<": (
        "is a web page, not weights",
        "open the address in a browser, log in if necessary, and download the file there",
    ),
    b"GGUF": (
        "is a GGUF file, a format that FastAR does not read",
        "get the .safetensors file of the same model (fp32, bf16 or fp16); with the dtype int4, it takes as little "
        "memory as a GGUF file of 4 bits",
    ),
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": (
        "is a checkpoint in torch's old format (before 2020), which may hold code",
        "if you trust it, load it with torch.load and save its weights again with torch.save",
    ),
    b"\x80": (
        "is a pickle that torch.save did not write, and it may hold code",
        "if you trust it, load it with pickle.load and save its weights with torch.save",
    ),
    b"\x1f\x8b": ("is a gzip archive", _UNPACK),
}
_TAR = slice(257, 262)  # where a tar archive says "ustar"

# Parts of weight names that only one format has, and the format. The first that is found counts.
_PACKED: dict[str, re.Pattern[str]] = {
    "weights that bitsandbytes quantised to nf4": re.compile(r"\.quant_state\.bitsandbytes__nf4$"),
    "weights that bitsandbytes quantised to fp4": re.compile(r"\.quant_state\.bitsandbytes__fp4$"),
    "weights that bitsandbytes quantised": re.compile(
        r"\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format)$|\.quant_state\."
    ),
    "weights that Nunchaku quantised (SVDQuant)": re.compile(
        r"\.(wscales|wzeros|wtscale|wcscales|smooth|smooth_factor|smooth_factor_orig)$"
    ),
    "weights that GPTQ quantised": re.compile(r"\.g_idx$"),
    "weights that AWQ quantised": re.compile(r"\.(qweight|qzeros)$"),
    "weights that ExLlamaV2 quantised (EXL2)": re.compile(r"\.(q_weight|q_scale_max|q_group_map|q_invperm)$"),
    "NVFP4 weights": re.compile(r"\.(weight_scale_2|weight_global_scale)$"),
    "MXFP4 weights": re.compile(r"(_blocks|\.weight_blocks)$"),
    "weights with a ComfyUI format of 4 bits": re.compile(r"\.(weight_s_rel|weight_s_channel|weight_codebook)$"),
    "weights with smoothed inputs (pre_quant_scale)": re.compile(r"\.pre_quant_scale$"),
    "fp8 weights with a scale for every block, as in DeepSeek's files": re.compile(r"\.weight_scale_inv$"),
    "packed weights of compressed-tensors": re.compile(r"\.(weight_packed|weight_zero_point|weight_g_idx)$"),
    "weights that HQQ quantised": re.compile(r"\.W_q$"),
    "weights that quanto quantised": re.compile(r"\.weight\._(data|scale|shift)$"),
    # What ComfyUI's own reader has left, and all of it outside ComfyUI.
    "weights in a quantised format of ComfyUI": re.compile(r"\.comfy_quant$|(^|\.)scaled_fp8$"),
    "quantised weights with scales beside them": re.compile(r"\.(scale_weight|scale_input|weight_scale|input_scale)$"),
}
_MLX = re.compile(r"\.scales$")
_MLX_TOO = re.compile(r"\.biases$")
_STATED = ".comfy_quant"  # beside a weight: its format as JSON
# Why a format that ComfyUI reads is refused.
_REASONS = {
    "convrot_w4a4": "weights in convrot_w4a4, which FastAR does not read, because this format also rounds the inputs "
    "of matrix products to 4 bits, with an error of 20 %",
}
_LORA = re.compile(r"(^|[._])lora_?(A|B|up|down|E|magnitude_vector)([._]|$)|\.(hada_w1_a|lokr_w1|oft_blocks)$")
_NAMED = ("quantization_config", "_quantization_metadata")


def other_format(head: bytes, size: int) -> tuple[str, str]:
    """What a file is that is neither safetensors nor a checkpoint of ``torch.save``.

    ``head`` are its first bytes; ``size`` is in bytes.
    """
    if not size:
        return "is empty (0 bytes)", "get the file again"

    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for beginning, answer in _BEGINNINGS.items():
        if text.startswith(beginning):
            return answer

    if head[_TAR] == b"ustar":
        return "is a tar archive", _UNPACK
    if text.startswith(b"{") and b'"weight_map"' in text:
        return "is the index of several weight files, not weights", "choose one of the files that it names"

    shown = printable(text)
    if text.startswith((b"{", b"[")) and shown:
        return f"is a JSON text, not weights ({shown})", _CHOOSE
    if shown:
        return f"is a text, not weights ({shown})", _CHOOSE

    if size <= _SHORTEST:
        return f"is cut short: it has {size} bytes", "get the file again"

    return "is not a weight file of a known format", _CHOOSE


def printable(text: bytes) -> str:
    """The first 80 characters of a text in UTF-8, in quotes; "" for anything else."""
    try:
        start = codecs.getincrementaldecoder("utf-8")().decode(text[:320])  # which may end within a character
    except UnicodeDecodeError:
        return ""

    words = " ".join(start.split())
    return f"'{words[:80]}'" if words and words.isprintable() else ""


def packed_format(state: Mapping[str, Any], metadata: Mapping[str, str]) -> tuple[str, str] | None:
    """What a file holds whose weights need another program: quantised weights, or the changes of a LoRA.

    ``state``: its tensors by name. None for anything else.
    """
    names = list(state)
    for name in names:
        reason = _REASONS.get(_stated(state[name])) if name.endswith(_STATED) else None
        if reason is not None:
            return f"holds {reason} ({name[:80]})", INSTEAD

    for kind, pattern in _PACKED.items():
        found = next((name for name in names if pattern.search(name)), None)
        if found is not None:
            return f"holds {kind}, which FastAR cannot read ({found[:80]})", INSTEAD

    scales = next((name for name in names if _MLX.search(name)), None)
    if scales is not None and any(_MLX_TOO.search(name) for name in names):
        return f"holds weights that MLX quantised, which FastAR cannot read ({scales[:80]})", INSTEAD

    stated = next((key for key in _NAMED if key in metadata), None)
    if stated is not None:
        return f"holds quantised weights, which FastAR cannot read ({stated} in its metadata)", INSTEAD

    changed = next((name for name in names if _LORA.search(name)), None)
    if changed is not None:
        found = f"holds a LoRA, which changes a model but is not a model ({changed[:80]})"
        return found, "merge the LoRA into a model first"

    return None


def _stated(tensor: Any) -> str:
    """The format that a tensor beside a weight states; "" if it states none."""
    try:
        return str(json.loads(bytes(tensor.tolist())).get("format"))
    except (AttributeError, TypeError, ValueError, RecursionError):
        return ""
