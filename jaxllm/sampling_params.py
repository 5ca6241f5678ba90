"""SamplingParams: what a request asks of the engine, validated once, at the door.

Names, defaults and limits are vLLM's.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.errors import ParameterError
from jaxllm.structured_outputs import StructuredOutputs

GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_TEMPERATURE = 2.0
MAX_N = 16384
SEED_BOUND = 2**63
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128

# Accepted by name so that a vLLM call site gets a clear refusal, not a TypeError.
UNSUPPORTED_DEFAULTS: dict[str, Any] = {
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "stream_interval": None,
    "repetition_detection": None,
    "thinking_token_budget": None,
    "extra_args": None,
}


BOOLEANS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "skip_reading_prefix_cache",
)

# Keys of generation_config.json that are defaults of sampling parameters.
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams, and their values, that a generation_config.json sets."""
    found = {
        k: generation_config[k] for k in GENERATION_KEYS if generation_config.get(k) is not None
    }
    if generation_config.get("do_sample") is False:
        found = {"temperature": 0.0}
    if generation_config.get("max_new_tokens"):
        found["max_tokens"] = generation_config["max_new_tokens"]
    return found


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request, and what to return.

    Attributes:
      n: how many independent completions of the prompt; sample i uses seed + i.
      presence_penalty, frequency_penalty: subtracted from the logit of a token that is in the
        output, once, and per occurrence; in [-2, 2].
      repetition_penalty: the logit of a token in prompt or output is divided (positive) or
        multiplied (negative) by it; above 0.
      temperature: 0 (anything below 1e-5) is greedy and switches top_p, top_k and min_p off;
        0 < t < 0.01 is raised to 0.01; at most 2.
      top_p: keep the smallest set of most probable tokens whose mass reaches top_p, in (0, 1].
      top_k: keep the k most probable tokens; 0 and -1 mean all.
      min_p: drop tokens less probable than min_p times the most probable one, in [0, 1].
      seed: 64-bit; the same request and seed draw the same tokens in any batch. -1 and None
        leave the choice to the engine.
      stop: strings that end the output (finish_reason "stop"), found across token borders.
      stop_token_ids: further ids that end the output.
      bad_words: words whose last token is never sampled where it would complete the word.
      include_stop_str_in_output: leave the stop string, or the text of the ending token, in.
      ignore_eos: go on after an end-of-sequence token.
      max_tokens: at most this many new tokens, >= 1; None means up to max_model_len.
      min_tokens: no end before this many tokens: end ids are masked, stop strings not looked for.
      logprobs: return the log probability of each sampled token and of the k most probable ones;
        0 is the sampled token alone, True is 1, -1 the whole vocabulary where the engine's
        max_logprobs allows that.
      prompt_logprobs: the same for the prompt's tokens; the request then reads no cached prefix.
      detokenize: False leaves the text empty and saves the work.
      skip_special_tokens, spaces_between_special_tokens: how ids become text.
      truncate_prompt_tokens: keep the last k tokens of the prompt; -1: what the model takes.
      output_kind: what each output of a stream holds.
      structured_outputs: a grammar the output must follow.
      logit_bias: token id -> number added to its logit, clamped to [-100, 100].
      allowed_token_ids: only these may be sampled.
      skip_reading_prefix_cache: recompute the whole prompt.

    Raises:
      ParameterError: names the field, the value and the rule.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str | None = ()
    stop_token_ids: Sequence[int] | None = ()
    bad_words: Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputs | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_reading_prefix_cache: bool = False
    logprob_token_ids: Any = None
    flat_logprobs: bool = False
    stream_interval: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    extra_args: Any = None

    def __post_init__(self) -> None:
        for field, default in UNSUPPORTED_DEFAULTS.items():
            value = getattr(self, field)
            if value != default:
                raise ParameterError(field, value, "is not supported")
        for field in BOOLEANS:
            if not isinstance(getattr(self, field), bool):
                raise ParameterError(field, getattr(self, field), "must be True or False")
        self._check_numbers()
        self._check_ends()
        self._check_tokens()
        self._settle_temperature()

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 1e9, low_open=True)
        _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -SEED_BOUND, SEED_BOUND - 1)
            if self.seed == -1:
                self._set("seed", None)
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if isinstance(value, bool):
                value = 1 if value else None
                self._set(field, value)
            if value is not None:
                _check_int(field, value, -1, 2**31 - 1)
        if self.top_k == -1:
            self._set("top_k", 0)

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        _check_words("stop", stop)
        if stop and not self.detokenize:
            raise ParameterError("stop", list(stop), "needs detokenize=True")
        self._set("stop", stop)
        constraint = self.structured_outputs
        if constraint is not None and not isinstance(constraint, StructuredOutputs):
            raise ParameterError("structured_outputs", constraint, "must be StructuredOutputs")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ParameterError("output_kind", self.output_kind, "must be a RequestOutputKind")

    def _check_tokens(self) -> None:
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        words = _items("bad_words", self.bad_words)
        _check_words("bad_words", words)
        if len(words) > MAX_BAD_WORDS:
            raise ParameterError("bad_words", len(words), f"at most {MAX_BAD_WORDS} words")
        self._set("bad_words", words)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ParameterError("allowed_token_ids", [], "must not be empty")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_bias(self.logit_bias))

    def _settle_temperature(self) -> None:
        if self.is_greedy:
            if self.n > 1:
                raise ParameterError("n", self.n, "must be 1 with greedy sampling (temperature 0)")
            for field, off in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                self._set(field, off)
        elif self.temperature < MIN_TEMPERATURE:
            self._set("temperature", MIN_TEMPERATURE)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p is on."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is on."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def allows_all_logprobs(max_logprobs: int, vocab_size: int) -> bool:
    """Whether a request may ask for the log probabilities of the whole vocabulary: max_logprobs is
    -1, which is no limit, or not below the vocabulary."""
    return max_logprobs == -1 or max_logprobs >= vocab_size


def check_against_model(
    params: SamplingParams, vocab_size: int, max_logprobs: int, room: int
) -> None:
    """What only the engine can judge: ids, the number of logprobs, and min_tokens.

    Args:
      max_logprobs: the engine's limit, -1 for none.
      room: how many tokens the longest output can have.

    Raises:
      ParameterError: names the field, the value and the limit.
    """
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, field) or ():
            if token >= vocab_size:
                raise ParameterError(field, token, f"must be below the vocabulary of {vocab_size}")
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is None or max_logprobs == -1:
            continue
        if value == -1 and not allows_all_logprobs(max_logprobs, vocab_size):
            rule = f"stands for {vocab_size} tokens; at most {max_logprobs} (max_logprobs)"
            raise ParameterError(field, value, rule)
        if value > max_logprobs:
            raise ParameterError(field, value, f"at most {max_logprobs} (max_logprobs)")
    if params.min_tokens > room:
        raise ParameterError(
            "min_tokens", params.min_tokens, f"the prompt leaves room for {room} tokens"
        )


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ParameterError("logit_bias", bias, "must map token ids to numbers")
    if len(bias) > MAX_BIASED_TOKENS:
        raise ParameterError("logit_bias", len(bias), f"at most {MAX_BIASED_TOKENS} tokens")
    checked = {}
    for token, value in bias.items():
        _check_int("logit_bias", token, 0, 2**31 - 1)
        _check_float("logit_bias", value, -math.inf, math.inf)
        checked[token] = min(max(float(value), -MAX_BIAS), MAX_BIAS)
    return checked


def _items(field: str, value: Any) -> tuple[Any, ...]:
    """What a list holds; None is an empty one."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ParameterError(field, value, "must be a list")
    return tuple(value)


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    """The ids of a list, each once."""
    ids = _items(field, value)
    for token in ids:
        _check_int(field, token, 0, 2**31 - 1)
    return tuple(dict.fromkeys(ids))


def _check_words(field: str, words: tuple[Any, ...]) -> None:
    for word in words:
        if not isinstance(word, str) or not word:
            raise ParameterError(field, word, "must be strings that are not empty")


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
