"""Which module serves which `architectures` entry of config.json."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.models import config as configs
from jaxllm.models.config import ModelConfig
from jaxllm.models.llama import LlamaForCausalLM


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFamily:
    """A module class and the function that reads its configuration from config.json."""

    module: type[LlamaForCausalLM]
    read_config: Callable[[dict[str, Any]], ModelConfig]


ARCHITECTURES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(LlamaForCausalLM, configs.llama_config),
    "MistralForCausalLM": ModelFamily(LlamaForCausalLM, configs.mistral_config),
    "Qwen2ForCausalLM": ModelFamily(LlamaForCausalLM, configs.qwen2_config),
    "Qwen3ForCausalLM": ModelFamily(LlamaForCausalLM, configs.qwen3_config),
}


def find_family(hf_config: dict[str, Any]) -> ModelFamily:
    """The family of a config.json.

    Raises:
      ConfigError: no listed architecture is known; the message lists the known ones.
    """
    names = hf_config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ConfigError(
        f"architectures={names!r} in config.json: none is supported; "
        f"supported: {', '.join(sorted(ARCHITECTURES))}"
    )
