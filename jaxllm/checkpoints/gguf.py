"""GGUF tensors under their Hugging Face names and in their Hugging Face order."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxllm.checkpoints.errors import CorruptFileError, UnsupportedFormatError
from jaxllm.checkpoints.gguf_config import ROPE_FREQS, architecture, config_from_gguf
from jaxllm.checkpoints.gguf_file import GGUFFile
from jaxllm.checkpoints.source import Index, TensorInfo

_TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one is given back as it is."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return _TOP_NAMES.get(name, name)


def half_split_rows(rows: int, heads: int) -> np.ndarray:
    """Where each Hugging Face row of a query or key projection lies in a llama GGUF file.

    llama.cpp rotates neighbouring pairs, Hugging Face the two halves of a head: the file holds
    row (h, 2i + j) where Hugging Face has row (h, j * D/2 + i), for head h and pair i.

    Returns:
        int64 [rows].
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


class GGUFSource:
    """The weights of a GGUF file as a TensorSource.

    Raises:
        CorruptFileError, UnsupportedFormatError: as GGUFFile, and an unknown architecture.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        arch = architecture(self._file)
        self._gguf_names: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for tensor in self._file.tensors.values():
            if tensor.name == ROPE_FREQS:
                continue  # part of the configuration: see gguf_config
            name = hugging_face_name(tensor.name)
            self._gguf_names[name] = tensor.name
            self.tensors[name] = TensorInfo(tensor.shape, tensor.kind.name)
        config = config_from_gguf(self._file)
        self._permuted_heads: dict[str, int] = {}
        if arch == "llama":
            self._permuted_heads = {
                "q_proj": config["num_attention_heads"],
                "k_proj": config["num_key_value_heads"],
            }

    def read(self, name: str, index: Index, dtype: np.dtype) -> np.ndarray:
        """The slice `index` of `name`, dequantised to `dtype`: a fresh C-contiguous array.

        Only the rows, and within them only the blocks, of the slice are dequantised.
        """
        gguf_name, shape = self._gguf_names[name], self.tensors[name].shape
        order = self._row_order(name, shape[0])
        if len(shape) == 1:
            start, stop = index[0]
            if order is None:
                return self._file.read(gguf_name, slice(None), (start, stop), dtype)[0]
            whole = self._file.read(gguf_name, slice(None), (0, shape[0]), dtype)[0]
            return whole[order[start:stop]]
        if len(shape) > 2:
            raise UnsupportedFormatError(
                f"{self._file.path}: tensor {gguf_name!r} has {len(shape)} dimensions, read are 2"
            )
        rows = slice(*index[0]) if order is None else order[slice(*index[0])]
        return self._file.read(gguf_name, rows, index[1], dtype)

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        module = name.split(".")[-2] if "." in name else ""
        heads = self._permuted_heads.get(module)
        if heads is None:
            return None
        if rows % (2 * heads):
            raise CorruptFileError(f"{self._file.path}: {name!r} has {rows} rows for {heads} heads")
        return half_split_rows(rows, heads)
