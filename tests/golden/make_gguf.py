"""Make small GGUF files of every tensor type the engine reads, and record what they say.

Needs torch, transformers, gguf and tokenizers (an environment of its own, not the project's).
Recorded with torch 2.13.0, transformers 5.24.0, gguf 0.19.0:

    python tests/golden/make_gguf.py

``data/gguf/<name>.gguf``: tiny random models, with tokenizer and chat template in the metadata.

- ``llama-f32``, ``-f16``, ``-bf16``, ``-q4_0``, ``-q4_1``, ``-q5_0``, ``-q5_1``, ``-q8_0``: one
  model (hidden 64, two layers, untied), quantised by the gguf package.
- ``llama-q2_k`` to ``llama-q6_k``: hidden 256, one layer, tied. The gguf package cannot quantise to
  these types, so their blocks are random bytes under scales that give weights of a sane size.
- ``llama31-f16``: Llama 3.1's RoPE scaling, which llama.cpp keeps as the tensor
  ``rope_freqs.weight``; ``llama-yarn-f16``: yarn scaling by metadata; ``qwen2-f16``: biases;
  ``qwen3-f16``: norms of query and key heads.

Matrices have the file's type; norms and biases are F32. As llama.cpp's converter does, the rows of
attn_q and attn_k of the ``llama`` architecture are reordered, per head, from Hugging Face's halves
[2, D/2] to neighbouring pairs [D/2, 2]; other architectures keep Hugging Face's order.

``data/gguf/recording.npz``: for each file ``<name>.ids`` [T] int32 and ``<name>.logits`` [N, V]
float32, transformers' logits at the last N = 16 positions, on the weights as ``gguf.dequantize``
gives them (for ``llama31-f16`` T is 1024, since its scaling shows at a distance only).

``data/gguf/tokenizer.json``: texts with their ids, and conversations rendered by the template. All
files share the vocabulary; ``llama-f16`` sets ``add_bos_token``, the others clear it.

``data/tiny_chat/``: the model and tokenizer of ``llama-f32.gguf`` as a Hugging Face folder.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from record import Auto, build, logits_of, randomise
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

DATA = Path(__file__).parent / "data"
OUT = DATA / "gguf"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 288
RECORDED = 16
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the cat and the dog sat on the mat and then they ran to the river",
    "an answer to the question is in the other book on the table there",
    "user: what is the time? assistant: it is ten past nine in the morning",
    "for x in range(10): print(x, x * x, 'and the rest')",
] * 20
SMALL_KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
# Where a block keeps its float16 scales, and the minimum's multiple of the scale that centres it.
K_KINDS: dict[Kind, tuple[int, int | None, float]] = {
    Kind.Q2_K: (80, 82, 1.5),
    Kind.Q3_K: (108, None, 0.0),
    Kind.Q4_K: (0, 2, 7.5),
    Kind.Q5_K: (0, 2, 15.5),
    Kind.Q6_K: (208, None, 0.0),
}
FILE_TYPES = {
    Kind.F32: gguf.LlamaFileType.ALL_F32,
    Kind.F16: gguf.LlamaFileType.MOSTLY_F16,
    Kind.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Kind.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    Kind.Q4_1: gguf.LlamaFileType.MOSTLY_Q4_1,
    Kind.Q5_0: gguf.LlamaFileType.MOSTLY_Q5_0,
    Kind.Q5_1: gguf.LlamaFileType.MOSTLY_Q5_1,
    Kind.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Kind.Q2_K: gguf.LlamaFileType.MOSTLY_Q2_K,
    Kind.Q3_K: gguf.LlamaFileType.MOSTLY_Q3_K_M,
    Kind.Q4_K: gguf.LlamaFileType.MOSTLY_Q4_K_M,
    Kind.Q5_K: gguf.LlamaFileType.MOSTLY_Q5_K_M,
    Kind.Q6_K: gguf.LlamaFileType.MOSTLY_Q6_K,
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, *module, kind = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(module)]}.{kind}"


def heads_to_reorder(name: str, config: PreTrainedConfig) -> int:
    """How many heads of a tensor llama.cpp's converter reorders; 0 for none."""
    if config.model_type == "llama" and "q_proj" in name:
        return config.num_attention_heads
    if config.model_type == "llama" and "k_proj" in name:
        return config.num_key_value_heads
    return 0


def to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of 3 special tokens, 256 bytes and 29 merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"vocabulary of {tokenizer.get_vocab_size()}")
    return tokenizer


def random_blocks(kind: Kind, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Random blocks [rows, bytes per row] whose weights have a deviation near 1.2 / sqrt(cols)."""
    rows, cols = shape
    size, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    at, min_at, centre = K_KINDS[kind]
    raw = rng.integers(0, 256, (rows * cols // size, bytes_per_block), dtype=np.uint8)

    def put(offset: int, values: np.ndarray) -> None:
        raw[:, offset : offset + 2] = values.astype(np.float16)[:, None].view(np.uint8)

    scales = rng.uniform(0.5, 1.5, len(raw))
    target = 1.2 / cols**0.5
    unit = 2.0**-10
    put(at, scales * unit)
    if min_at is not None:
        put(min_at, scales * unit * centre)
    deviation = gguf.dequantize(raw, kind).std()
    factor = target / deviation
    put(at, scales * unit * factor)
    if min_at is not None:
        put(min_at, scales * unit * factor * centre)
    return raw.reshape(rows, -1)


def metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig, kind: Kind) -> None:
    parameters = config.rope_parameters
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(parameters["rope_theta"])
    if parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])


def tokenizer_metadata(writer: gguf.GGUFWriter, tokenizer: Tokenizer, add_bos: bool) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)


def llama3_divisors(config: PreTrainedConfig) -> np.ndarray:
    """What llama.cpp divides each frequency by, from transformers' own frequencies. [D/2]."""
    plain = LlamaConfig(
        **{
            **config.to_dict(),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.rope_parameters["rope_theta"],
            },
        }
    )
    return (
        build(plain).model.rotary_emb.inv_freq / build(config).model.rotary_emb.inv_freq
    ).numpy()


def write(name: str, model: PreTrainedModel, kind: Kind, tokenizer: Tokenizer) -> Path:
    config = model.config
    path = OUT / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name(name)
    metadata(writer, config, kind)
    tokenizer_metadata(writer, tokenizer, add_bos=name == "llama-f16")
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    rng = np.random.default_rng(7)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        if heads := heads_to_reorder(hf_name, config):
            weight = to_pairs(weight, heads)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(hf_name), weight)
        elif kind in K_KINDS:
            blocks = random_blocks(kind, weight.shape, rng)
            writer.add_tensor(gguf_name(hf_name), blocks, raw_dtype=kind)
        elif kind in (Kind.F32, Kind.F16):
            writer.add_tensor(
                gguf_name(hf_name), weight.astype(np.float32 if kind == Kind.F32 else np.float16)
            )
        else:
            writer.add_tensor(
                gguf_name(hf_name), gguf.quants.quantize(weight, kind), raw_dtype=kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if path.stat().st_size > 400_000:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes")
    return path


def read_back(path: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a file, its weights dequantised by the gguf package."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    model = build(config)
    state = {}
    for hf_name in model.state_dict():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = tensors.pop(gguf_name(hf_name))
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if heads := heads_to_reorder(hf_name, config):
            weight = to_halves(weight, heads)
        state[hf_name] = torch.tensor(np.array(weight))
    if set(tensors) - {"rope_freqs.weight"}:
        raise SystemExit(f"{path}: surplus tensors {sorted(tensors)}")
    model.load_state_dict(state, strict=False)
    return model


def check_with_transformers(path: Path, model: PreTrainedModel, ids: np.ndarray) -> None:
    """transformers' own GGUF reader must give the same model.

    It ignores RoPE scaling, and Qwen3's head_dim, so there the configuration is handed to it.
    """
    config = model.config
    ignored = config.rope_parameters["rope_type"] != "default" or config.model_type == "qwen3"
    theirs = Auto.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        **({"config": copy.deepcopy(config)} if ignored else {}),
    ).eval()
    error = np.abs(logits_of(theirs, ids) - logits_of(model, ids)).max()
    if error > 1e-5:
        raise SystemExit(f"{path}: transformers' reader gives logits {error} off")


def configs() -> dict[str, tuple[PreTrainedConfig, Kind]]:
    common = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
    }
    default = {"rope_type": "default", "rope_theta": 10000.0}
    small: dict[str, Any] = {
        **common,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": default,
        "tie_word_embeddings": False,
    }
    wide: dict[str, Any] = {
        **common,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "rope_parameters": default,
        "tie_word_embeddings": True,
    }
    tiny: dict[str, Any] = {
        **small,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    llama31 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    out: dict[str, tuple[PreTrainedConfig, Kind]] = {}
    for kind in SMALL_KINDS:
        out[f"llama-{kind.name.lower()}"] = (LlamaConfig(**small), kind)
    for kind in K_KINDS:
        out[f"llama-{kind.name.lower()}"] = (LlamaConfig(**wide), kind)
    long = {"head_dim": 32, "max_position_embeddings": 131072, "rope_parameters": llama31}
    out["llama31-f16"] = (LlamaConfig(**{**tiny, **long}), Kind.F16)
    scaled = {"max_position_embeddings": 64, "rope_parameters": yarn}
    out["llama-yarn-f16"] = (LlamaConfig(**{**tiny, **scaled}), Kind.F16)
    out["qwen2-f16"] = (Qwen2Config(**tiny), Kind.F16)
    out["qwen3-f16"] = (Qwen3Config(**tiny, head_dim=32), Kind.F16)
    return out


def record_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        unk_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
        model_max_length=512,
    )
    texts = [
        "",
        " ",
        "the cat and the dog",
        "  the  cat\n\n\tand",
        "naïve 北京 🙂 e\u0301",
        "x = 1234 * 5",
        "<|im_start|>user\nHi<|im_end|>\n",
        "\U0001f468\u200d\U0001f469",
        "don't",
        "the\u00a0end ",
    ]
    user = {"role": "user", "content": "what is the time?"}
    system = {"role": "system", "content": "the answer is short"}
    reply = {"role": "assistant", "content": "it is ten"}
    chats = [([user], True), ([user], False), ([system, user, reply, user], True)]
    recorded = {
        "bos_token_id": 1,
        "texts": [{"text": t, "ids": fast(t).input_ids} for t in texts],
        "chats": [
            {
                "messages": messages,
                "add_generation_prompt": prompt,
                "rendered": fast.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt
                ),
            }
            for messages, prompt in chats
        ],
    }
    for entry in recorded["texts"]:
        if fast.decode(entry["ids"]) != entry["text"]:
            raise SystemExit(f"{entry['text']!r} does not come back")
    (OUT / "tokenizer.json").write_text(json.dumps(recorded, indent=1) + "\n")
    return fast


def write_folder(model: PreTrainedModel, fast: PreTrainedTokenizerFast) -> None:
    folder = DATA / "tiny_chat"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    fast.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    tokenizer = train_tokenizer()
    fast = record_tokenizer(tokenizer)
    arrays: dict[str, np.ndarray] = {}
    for name, (config, kind) in configs().items():
        model = build(config)
        randomise(model, seed=11)
        path = write(name, model, kind, tokenizer)
        rng = np.random.default_rng(5)
        ids = rng.integers(3, VOCAB, 1024 if name == "llama31-f16" else 24).astype(np.int32)
        back = read_back(path, config)
        check_with_transformers(path, back, ids)
        arrays[f"{name}.ids"] = ids
        arrays[f"{name}.logits"] = logits_of(back, ids)[-RECORDED:]
        drift = np.abs(arrays[f"{name}.logits"] - logits_of(model, ids)[-RECORDED:]).max()
        print(name, path.stat().st_size, "std", arrays[f"{name}.logits"].std(), "drift", drift)
        if name == "llama-f32":
            write_folder(model, fast)
    np.savez_compressed(OUT / "recording.npz", **arrays)


if __name__ == "__main__":
    main()
