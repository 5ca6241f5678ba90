"""EngineConfig: every setting of the engine, one documented field each; the CLI is made from it."""

import argparse
import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from jaxllm.errors import ConfigError

_BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str | int) -> int:
    """Bytes from "2GiB", "512M", "1.5g" or a plain number.

    Raises:
      ValueError: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; examples: 2GiB, 512MiB, 1073741824")
    return int(float(match[1]) * _BYTE_UNITS[match[2].upper()])


def parse_length(text: str | int) -> int | Literal["auto"]:
    """Tokens from "4096", "32k" (thousands) or "32K" (1024s); "auto" and -1 mean auto.

    Raises:
      ValueError: the text is no length.
    """
    if text in ("auto", -1, "-1"):
        return "auto"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kK]?)", str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a length; examples: 4096, 32k, auto")
    return int(float(match[1]) * {"": 1, "k": 1000, "K": 1024}[match[2]])


def _field(default: Any, help: str, parse: Callable[[str], Any] | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "parse": parse})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings under vLLM's names. None means: choose what fits the model and the machine."""

    model: str = _field("smollm2", "folder, hub id, .gguf file, Orbax folder, or 'smollm2'")
    revision: str | None = _field(None, "revision of a hub id")
    tokenizer: str | None = _field(None, "folder or hub id of the tokenizer, if not the model's")
    skip_tokenizer_init: bool = _field(False, "serve token ids only; prompts must be token ids")
    load_format: Literal["auto", "safetensors", "gguf", "orbax", "dummy"] = _field(
        "auto", "format of the weights; 'dummy' makes random ones from the config alone"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _field(
        "auto", "dtype of weights and activations; auto takes the checkpoint's, float32 as bfloat16"
    )
    quantization: Literal["int8"] | None = _field(
        None, "int8: round every matrix to 8 bits with a scale per row, when it is loaded"
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _field(
        "auto", "dtype of the KV cache; auto takes that of the weights"
    )
    max_model_len: int | Literal["auto"] | None = _field(
        None,
        "most tokens of a request, prompt and output; unset: the model's own limit; auto: that, "
        "or what fits the KV pool if less",
        parse_length,
    )
    max_num_seqs: int | None = _field(None, "most requests that run at once")
    max_num_batched_tokens: int | None = _field(None, "token budget of a step")
    enable_chunked_prefill: bool = _field(True, "cut long prompts to the step's budget")
    long_prefill_token_threshold: int = _field(
        0, "most prompt tokens of one request in a step while others wait; 0: no limit"
    )
    scheduling_policy: Literal["fcfs", "priority"] = _field(
        "fcfs", "order of admission; 'priority' serves smaller values first"
    )
    async_scheduling: bool | None = _field(
        None, "plan a step while the one before it runs; unset: on where it helps (not on a CPU)"
    )
    enable_prefix_caching: bool = _field(True, "share KV blocks of equal prefixes")
    block_size: int | None = _field(None, "tokens in a KV block")
    gpu_memory_utilization: float = _field(0.92, "share of the accelerator's memory to use")
    kv_cache_memory: int | None = _field(
        None, "bytes of the KV pool per device (2GiB, ...); unset: what is left", parse_bytes
    )
    num_blocks: int | None = _field(None, "KV blocks, the null block included; overrides sizing")
    tensor_parallel_size: int = _field(1, "devices the model is sharded over")
    attention_backend: str = _field("auto", "paged attention to use: auto, xla, cpu, ...")
    enforce_eager: bool = _field(False, "no warm-up: compile each bucket when it is first needed")
    compilation_cache_dir: str | None = _field(
        None, "folder of compiled programs; unset: JAX_COMPILATION_CACHE_DIR or the user's cache"
    )
    compilation_cache_max_size: int = _field(
        2**30,
        "bytes of programs to keep in that folder, and of JAX's own cache there; what was used "
        "longest ago goes first",
        parse_bytes,
    )
    batch_invariant: bool = _field(
        False,
        "promise the same bits for a request alone, in any batch, chunked, preempted or cached; "
        "checked at start",
    )
    max_logprobs: int = _field(
        20,
        "most log probabilities a request may ask for at a position; -1: any number, and with -1 "
        "the whole vocabulary",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = _field(
        "raw_logprobs",
        "log probabilities of the logits as they are, or of the distribution sampled from",
    )
    generation_config: Literal["auto", "none"] = _field(
        "auto", "take default sampling parameters from the model's generation_config.json"
    )
    seed: int = _field(0, "seed of requests that bring none, and of dummy weights")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), _choices(field.type)
            parse = field.metadata["parse"]
            if value is None:
                continue
            if parse is not None:
                try:
                    object.__setattr__(self, field.name, parse(value))
                except ValueError as error:
                    raise ConfigError(f"{field.name}: {error}") from None
            elif choices and value not in choices:
                raise ConfigError(f"{field.name}={value!r}: one of {', '.join(map(str, choices))}")
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 1),
            ("num_blocks", 2),
            ("tensor_parallel_size", 1),
            ("long_prefill_token_threshold", 0),
            ("kv_cache_memory", 1),
            ("compilation_cache_max_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value >= low):
                raise ConfigError(f"{name}={value!r}: an integer of at least {low}")
        limit = self.max_logprobs
        if not (_is_int(limit) and (limit >= 1 or limit == -1)):
            raise ConfigError(f"max_logprobs={limit!r}: an integer of at least 1, or -1")
        if isinstance(self.max_model_len, int) and self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len={self.max_model_len}: at least 2, for a prompt token and a new one"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: above 0, at most 1"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal, alone or as a member of a union."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


# Other names that users of vLLM type.
ALIASES = {
    "num_blocks": ["--num-gpu-blocks-override"],
    "kv_cache_memory": ["--kv-cache-memory-bytes"],
}


def add_arguments(parser: argparse._ActionsContainer, skip: frozenset[str] = frozenset()) -> None:
    """Adds a flag per field of EngineConfig (`--max-model-len`, `--no-enable-prefix-caching`)."""
    for field in dataclasses.fields(EngineConfig):
        if field.name in skip:
            continue
        flags = ["--" + field.name.replace("_", "-"), *ALIASES.get(field.name, [])]
        default = "" if field.default is None else f" (default: {field.default})"
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": field.metadata["help"].replace("%", "%%") + default,
        }
        members = {field.type, *get_args(field.type)}
        choices = _choices(field.type)
        if bool in members:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
            continue
        if field.metadata["parse"] is not None:
            options["type"] = field.metadata["parse"]
            options["metavar"] = field.name.rpartition("_")[2].upper()
        elif choices:
            options["choices"] = choices
        else:
            kind = next(kind for kind in (int, float, str) if kind in members)
            options["type"] = kind
            options["metavar"] = {int: "N", float: "X", str: "TEXT"}[kind]
        parser.add_argument(*flags, **options)


def from_arguments(arguments: argparse.Namespace) -> EngineConfig:
    """EngineConfig from parsed flags; flags that were not given keep their defaults."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(**{k: v for k, v in vars(arguments).items() if k in names})
