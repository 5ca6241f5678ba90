"""GGUF files for the tests, written by the `gguf` package."""

from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

SIZES = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 16,
}
NUMBERS = {"rope.freq_base": 500000.0, "attention.layer_norm_rms_epsilon": 1e-5}


def layer_tensors(arch: str = "llama") -> dict[str, np.ndarray]:
    """float32 tensors of a model of SIZES, in GGUF names."""
    rng = np.random.default_rng(1)
    shapes = {
        "token_embd.weight": (96, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    if arch == "qwen2":
        shapes |= {f"blk.0.attn_{x}.bias": (64 if x == "q" else 32,) for x in "qkv"}
    if arch == "qwen3":
        shapes |= {f"blk.0.attn_{x}_norm.weight": (16,) for x in "qk"}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arch: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    *,
    sizes: dict[str, int | list[int]] | None = None,
    numbers: dict[str, float] | None = None,
    texts: dict[str, str] | None = None,
    integers: dict[str, int] | None = None,
    kinds: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a file; `sizes` and `numbers` override keys of `arch`, a None value drops the key.

    `kinds` quantises the named tensors; `texts` (under `arch`) and `integers` (as they are) add
    metadata.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (SIZES | (sizes or {})).items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    for key, value in (NUMBERS | (numbers or {})).items():
        if value is not None:
            name = key if key.startswith("general.") else f"{arch}.{key}"
            writer.add_float32(name, value)
    for key, value in (texts or {}).items():
        writer.add_string(f"{arch}.{key}", value)
    for key, value in (integers or {}).items():
        writer.add_uint32(key, value)
    for name, value in (layer_tensors(arch) if tensors is None else tensors).items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            data = value if value.dtype == np.uint8 else quantize(value, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, row bytes]: bytes that every format decodes to finite values.

    Below 0x78 no two of them are an infinite or undefined float16, bfloat16 or float32.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 0x78, (rows, columns // block * block_bytes), dtype=np.uint8)
