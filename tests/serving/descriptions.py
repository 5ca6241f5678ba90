"""What an engine process says of itself, made up for tests of the metrics."""

from typing import Any

from serving.engine.messages import Description


def description(config: dict[str, Any] | None = None) -> Description:
    return Description(
        tokenizer=None,
        revision=None,
        vocab_size=10,
        max_model_len=100,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        block_size=4,
        num_blocks=9,
        eos_token_ids=[],
        generation_config={},
        config=config or {},
        start_seconds=0.0,
    )
