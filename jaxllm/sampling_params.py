"""SamplingParams: what a request asks of the sampler, validated once, at the door.

Names, defaults and limits are vLLM's.
"""

import dataclasses
import math
from typing import Any

from jaxllm.errors import ParameterError

GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_TEMPERATURE = 2.0
MAX_N = 16384
SEED_BOUND = 2**63

# Accepted by name so that a vLLM call site gets a clear refusal, not a TypeError.
_UNSUPPORTED_DEFAULTS: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "include_stop_str_in_output": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "truncate_prompt_tokens": None,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request.

    Attributes:
      n: how many independent completions of the prompt; sample i uses seed + i.
      temperature: 0 (anything below 1e-5) is greedy and switches top_p, top_k and min_p off;
        0 < t < 0.01 is raised to 0.01; at most 2.
      top_p: keep the smallest set of most probable tokens whose mass reaches top_p, in (0, 1].
      top_k: keep the k most probable tokens; 0 and -1 mean all.
      min_p: drop tokens less probable than min_p times the most probable one, in [0, 1].
      seed: 64-bit; the same request and seed draw the same tokens in any batch. -1 and None
        leave the choice to the engine.
      max_tokens: at most this many new tokens, >= 1; None means up to max_model_len.
      stop_token_ids: further ids that end the output (finish_reason "stop").
      ignore_eos: go on after an end-of-sequence token.
      detokenize: False leaves the text empty and saves the work.
      skip_special_tokens, spaces_between_special_tokens: how ids become text.

    Raises:
      ParameterError: names the field, the value and the rule.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Any = None
    min_tokens: int = 0
    logprobs: Any = None
    prompt_logprobs: Any = None
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None

    def __post_init__(self) -> None:
        for field, default in _UNSUPPORTED_DEFAULTS.items():
            value = getattr(self, field)
            if value != default and value != []:
                raise ParameterError(field, value, "is not supported yet")
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -SEED_BOUND, SEED_BOUND - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        for token in self.stop_token_ids or ():
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        set_field = object.__setattr__
        set_field(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids or ())))
        if self.seed == -1:
            set_field(self, "seed", None)
        if self.is_greedy:
            if self.n > 1:
                raise ParameterError("n", self.n, "must be 1 with greedy sampling (temperature 0)")
            set_field(self, "temperature", 0.0)
            set_field(self, "top_p", 1.0)
            set_field(self, "top_k", 0)
            set_field(self, "min_p", 0.0)
        elif self.temperature < MIN_TEMPERATURE:
            set_field(self, "temperature", MIN_TEMPERATURE)
        if self.top_k == -1:
            set_field(self, "top_k", 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p is on."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParameterError(field, value, f"must be an integer from {low} to {high}")


def _check_float(
    field: str, value: object, low: float, high: float, low_open: bool = False
) -> None:
    rule = f"must be a finite number in {'(' if low_open else '['}{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ParameterError(field, value, rule)
    if not (low < value if low_open else low <= value) or value > high:
        raise ParameterError(field, value, rule)
