"""From sampled token ids to the text a caller sees."""

from collections.abc import Sequence

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import IncrementalDetokenizer
from jaxllm.text.tokenizer import Tokenizer


class SequenceText:
    """Text of one growing output.

    Args:
      tokenizer: None leaves the text empty.
      prompt_token_ids: what the output follows.
      params: how to decode.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ):
        self.text = ""
        self._stream: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._stream = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes new ids, and returns the text that became certain."""
        if self._stream is None:
            return ""
        delta = self._stream.append(token_ids)
        self.text += delta
        return delta

    def finish(self) -> str:
        """Ends the output, and returns the text that was held back."""
        if self._stream is None:
            return ""
        delta = self._stream.finish()
        self.text += delta
        return delta
