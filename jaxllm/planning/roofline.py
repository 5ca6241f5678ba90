"""Roofline of a decoder step: the least time that arithmetic, memory and links allow.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009): a step
takes at least the larger of its arithmetic at peak rate and its memory traffic at peak bandwidth.
"""

import dataclasses
from typing import TYPE_CHECKING

from jaxllm.planning.gpus import Gpu
from jaxllm.planning.weights import DTYPE_BYTES, parameter_groups

if TYPE_CHECKING:
    from jaxllm.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """Costs of a step of one model on `tp` devices.

    Attributes:
      layer_params: weights every token is multiplied with, all devices.
      head_params: weights every sampled row is multiplied with, all devices.
      step_bytes: weight bytes a step reads on one device.
      kv_token_bytes: KV bytes of a token on one device.
      attention_flops: floating point operations per query and key, all layers and devices.
      windows: sliding window of each layer, None is full attention.
      link_token_bytes: bytes a token sends over the links in one step.
      flops, bandwidth, link: rates of one device, per second; 0 for `link` is no link.
      overhead: seconds of a step that neither rate explains (launches, host work).
    """

    layer_params: int
    head_params: int
    step_bytes: int
    kv_token_bytes: int
    attention_flops: int
    windows: tuple[int | None, ...]
    link_token_bytes: float
    tp: int
    flops: float
    bandwidth: float
    link: float
    overhead: float = 0.0

    @classmethod
    def of(
        cls,
        config: "ModelConfig",
        gpu: Gpu,
        *,
        dtype: str,
        weight_bytes: int,
        kv_token_bytes: int,
        tp: int = 1,
    ) -> "Roofline":
        """At the data sheet's peak rates; quantised weights still multiply in bfloat16.

        Args:
          weight_bytes: parameter bytes on one device.
          kv_token_bytes: KV bytes of a token on one device.
        """
        layer_params = sum(g.size for g in parameter_groups(config) if g.quantized)
        head_params = config.vocab_size * config.hidden_size
        # An input table of its own is only looked up, never read whole.
        unread = 0 if config.tie_word_embeddings else head_params * DTYPE_BYTES[dtype] // tp
        # Two all-reduces a layer; a ring moves 2 (tp - 1) / tp of the data through each device.
        reduced = 2 * config.num_layers * config.hidden_size * DTYPE_BYTES[dtype]
        return cls(
            layer_params=layer_params,
            head_params=head_params,
            step_bytes=weight_bytes - unread,
            kv_token_bytes=kv_token_bytes,
            attention_flops=4 * config.num_heads * config.head_dim * config.num_layers,
            windows=config.windows,
            link_token_bytes=reduced * 2 * (tp - 1) / tp,
            tp=tp,
            flops=gpu.bf16_tflops * 1e12 / (2 if dtype == "float32" else 1),
            bandwidth=gpu.bandwidth_gbs * 1e9,
            link=gpu.link_gbs * 1e9,
        )

    def attained(self, compute: float, bandwidth: float, overhead: float) -> "Roofline":
        """The same with only these shares of the peak rates, and a fixed cost of a step.

        Args:
          compute, bandwidth: shares in (0, 1] of the peak arithmetic and memory rates.
          overhead: seconds.
        """
        return dataclasses.replace(
            self,
            flops=self.flops * compute,
            bandwidth=self.bandwidth * bandwidth,
            link=self.link * bandwidth,
            overhead=overhead,
        )

    def seconds(
        self,
        prefill_tokens: int,
        decode_requests: int,
        context_tokens: int,
        prefill_pairs: int = 0,
    ) -> float:
        """Time of a step.

        Args:
          prefill_tokens: prompt tokens that run.
          decode_requests: requests that run one token.
          context_tokens: tokens those attend to, summed.
          prefill_pairs: (query, key) pairs of the prompt tokens, summed.
        """
        tokens = prefill_tokens + decode_requests
        share = self._attended(context_tokens, decode_requests)
        attention = self.attention_flops * (prefill_pairs + share * context_tokens)
        sampled = max(decode_requests, 1)
        compute = (2 * self.layer_params * tokens + 2 * self.head_params * sampled + attention) / (
            self.flops * self.tp
        )
        moved = self.step_bytes + self.kv_token_bytes * (share * context_tokens + tokens)
        memory = moved / self.bandwidth
        links = self.link_token_bytes * tokens / self.link if self.link else 0.0
        return max(compute, memory) + links + self.overhead

    def bound_by(self, tokens: int, context_tokens: int) -> str:
        """ "memory" or "compute": which rate a decode step of `tokens` requests meets first."""
        without = dataclasses.replace(self, bandwidth=float("inf"))
        whole = self.seconds(0, tokens, context_tokens)
        return "compute" if without.seconds(0, tokens, context_tokens) == whole else "memory"

    @property
    def ridge_tokens(self) -> float:
        """Tokens in a step from which on arithmetic takes longer than reading the weights."""
        per_token = 2 * self.layer_params / (self.flops * self.tp)
        return self.step_bytes / self.bandwidth / per_token

    def _attended(self, context_tokens: int, requests: int) -> float:
        """Share of the context that windowed layers leave, if all contexts are equally long."""
        if not context_tokens or not any(self.windows):
            return 1.0
        reach = sum(
            min(1.0, window * requests / context_tokens) if window else 1.0
            for window in self.windows
        )
        return reach / len(self.windows)
