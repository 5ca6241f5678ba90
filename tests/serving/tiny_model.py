"""A folder with a tiny random model: its configuration and a byte-level tokenizer with a chat
template. The weights are random ones that the engine makes from the configuration."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

SPECIAL = ["<|begin|>", "<|end|>", "<|role|>", "[TOOL_CALLS]"]
CHAT_TEMPLATE = (
    "{% if tools %}<|role|>tools {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)
MAX_MODEL_LEN = 512
ENGINE_SETTINGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_blocks": 129,
    "enforce_eager": False,
}


def make_tiny_model(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes the model's files into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "the")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": 272,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
