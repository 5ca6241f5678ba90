"""Request: one sequence on its way through the engine, as tokens."""

import dataclasses
import enum
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxllm.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position.

    Attributes:
      token_id, logprob, rank: the token that stands there; rank 1 is the most probable.
      top_ids, top_logprobs: the most probable tokens, in falling order, as many as were asked for;
        top_ids is None where top_logprobs holds the whole vocabulary by id.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are the ones clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class MaskFiller(Protocol):
    """Computes the masks of many grammar states at once."""

    def fill_masks(
        self, states: Sequence[Any], rows: Sequence[int], out: np.ndarray
    ) -> Mapping[int, ValueError]:
        """Writes which tokens may follow states[i] to row rows[i] of out int32 [R, V / 32], bit
        t % 32 of word t // 32; returns the error of each row that failed."""


class GrammarState(Protocol):
    """Where an output stands in the grammar it must follow."""

    @property
    def filler(self) -> MaskFiller:
        """What computes its masks."""

    def accept(self, token_id: int) -> bool:
        """Moves on by a token; False if the grammar does not allow it."""

    @property
    def is_terminated(self) -> bool:
        """Nothing may follow."""


_arrival_order = itertools.count()


class Request:
    """Tokens, progress and blocks of one sequence.

    Attributes:
      token_ids: prompt, then every sampled token the host knows of.
      num_in_flight: tokens sampled by dispatched steps whose results are not on the host yet.
      num_computed_tokens: leading tokens whose K/V is in the pool, or will be when the steps
        dispatched so far have run.
      block_ids: pool blocks in sequence order; block i holds tokens i * block_size onward.
      block_hashes: hash of every full block of token_ids, as far as computed.
      num_registered_blocks: leading blocks already offered to the prefix cache.
      slot: the request's row on the device while it runs, else -1.
      token_on_device: the newest token was sampled into the slot, so the next step reads it
        there.
      num_cached_tokens: prompt tokens taken from the prefix cache at first admission.
      bad_word_ids: token sequences that must not be completed.
      grammar: state of the grammar the output follows, if any.
      prompt_logprobs: of the prompt's tokens from the second on, as far as computed.
      failure: what went wrong with this request alone; the next update ends it with an error.
    """

    __slots__ = (
        "arrival_time",
        "bad_word_ids",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "eos_token_ids",
        "failure",
        "finish_reason",
        "first_scheduled_time",
        "first_token_time",
        "grammar",
        "key",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "order",
        "params",
        "priority",
        "prompt_logprobs",
        "request_id",
        "seed",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
        "token_on_device",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        seed: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        grammar: GrammarState | None = None,
    ):
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset(params.stop_token_ids or ())
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.order = next(_arrival_order)
        self.key = (priority, self.arrival_time, self.order)
        max_new = max_model_len if params.max_tokens is None else params.max_tokens
        self.max_total_tokens = min(self.num_prompt_tokens + max_new, max_model_len)

        self.bad_word_ids = bad_word_ids
        self.grammar = grammar
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.failure: str | None = None
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.slot = -1
        self.token_on_device = False
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None

    @property
    def needs_host_tokens(self) -> bool:
        """Whether its next logits depend on tokens that the host must have seen."""
        return self.params.penalizes or bool(self.bad_word_ids) or self.grammar is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may skip computing a cached prefix; prompt logprobs need every position."""
        return not (
            self.params.skip_reading_prefix_cache or self.params.prompt_logprobs is not None
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append(self, token_id: int) -> FinishReason | None:
        """Records a sampled token and says whether it ends the request.

        An end-of-sequence token wins over a stop id, and both over the length limit.
        """
        self.token_ids.append(token_id)
        # A grammar that had ended left only end ids, also for a request that ignores those.
        was_complete = self.grammar is not None and self.grammar.is_terminated
        if self.failure is None and self.grammar is not None:
            self._advance_grammar(token_id)
        if self.failure is not None:
            self.stop_reason = self.failure
            return FinishReason.ERROR
        if was_complete:
            return FinishReason.STOP
        if token_id in self.eos_token_ids:
            return FinishReason.STOP
        if token_id in self.stop_ids:
            self.stop_reason = token_id
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _advance_grammar(self, token_id: int) -> None:
        try:
            accepted = self.grammar is None or self.grammar.accept(token_id)
        except ValueError as error:
            self.failure = str(error)
        else:
            if not accepted:
                self.failure = f"token {token_id} does not fit the grammar"

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, {self.num_prompt_tokens}+"
            f"{self.num_output_tokens} tokens, computed {self.num_computed_tokens})"
        )
