"""The memory arithmetic of one model, as a function of tensor parallelism and step shape."""

import dataclasses
from typing import TYPE_CHECKING

from jaxllm.errors import ConfigError
from jaxllm.planning.activation import Activation, StepShape, activation_bound
from jaxllm.planning.recommend import utilization_knob
from jaxllm.planning.weights import KV_DTYPE_BYTES, weight_bytes

if TYPE_CHECKING:
    from jaxllm.models.config import ModelConfig

TP_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """A KV pool on one device.

    Attributes:
      num_blocks: P, the null block included.
      num_tokens: what the other blocks hold.
      reserve: bytes kept back for the runtime.
    """

    num_bytes: int
    num_blocks: int
    num_tokens: int
    reserve: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What is fixed; the methods take what may vary. Bytes are those of one device.

    Attributes:
      memory: bytes of the device, None where only kv_cache_memory, the pool's bytes, is given.
      max_model_len: the longest request that should run.
      all_logprobs: whether requests may ask for log probabilities of the whole vocabulary.
    """

    config: "ModelConfig"
    dtype: str
    kv_dtype: str
    quantization: str | None
    block_size: int
    memory: int | None
    kv_cache_memory: int | None
    max_model_len: int
    all_logprobs: bool

    def weights(self, tp: int) -> int:
        """Parameter bytes."""
        return weight_bytes(self.config, self.dtype, self.quantization, tp)

    def block_bytes(self, tp: int) -> int:
        """KV bytes of a block; ConfigError if tp does not divide the heads."""
        from jaxllm.execution.mesh import HeadLayout

        heads = HeadLayout.of(self.config, tp).num_kv_heads // tp
        row = heads * self.config.head_dim * KV_DTYPE_BYTES[self.kv_dtype]
        return 2 * self.config.num_layers * self.block_size * row

    def token_bytes(self, tp: int) -> int:
        """KV bytes of a token."""
        return self.block_bytes(tp) // self.block_size

    def shape(self, tp: int, seqs: int, budget: int) -> StepShape:
        """The largest step of `seqs` requests and `budget` tokens."""
        return StepShape(
            seqs, budget, self.max_model_len, self.block_size, self.dtype, self.kv_dtype, tp,
            self.all_logprobs,
        )  # fmt: skip

    def activation(self, tp: int, seqs: int, budget: int) -> Activation:
        """An upper bound of that step's memory."""
        return activation_bound(self.config, self.shape(tp, seqs, budget))

    def pool(self, tp: int, utilization: float, activation: Activation) -> Pool:
        """The pool as the engine sizes it."""
        from jaxllm.execution.memory import RESERVE_BYTES, num_blocks_for

        size, reserve = self.kv_cache_memory, 0
        if size is None:
            reserve = RESERVE_BYTES
            budget = int((self.memory or 0) * utilization)
            size = max(budget - self.weights(tp) - activation.num_bytes - reserve, 0)
        blocks = num_blocks_for(size, self.block_bytes(tp))
        return Pool(size, blocks, max(blocks - 1, 0) * self.block_size, reserve)

    def smallest_tp(
        self, utilization: float | None, seqs: int, budget: int, known: dict[int, Activation]
    ) -> int | None:
        """Fewest devices on which one request of max_model_len runs."""
        for tp in TP_SIZES:
            try:
                activation = known.get(tp) or self.activation(tp, seqs, budget)
                share = utilization
                if share is None:
                    share = 1.0 if self.memory is None else utilization_knob(self.memory, tp).value
                if self.pool(tp, share, activation).num_tokens >= self.max_model_len - 1:
                    return tp
            except ConfigError:
                continue
        return None
