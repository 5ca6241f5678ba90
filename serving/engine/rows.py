"""Logprobs of an EngineOutput as rows for the wire."""

from collections.abc import Sequence

import numpy as np

from jaxllm.engine.request import TokenLogprobs
from jaxllm.engine.step_plan import EngineOutput
from serving.engine.messages import LogprobRow


def logprob_rows(output: EngineOutput) -> list[LogprobRow] | None:
    """A row per new token, or None where no logprobs were asked for."""
    return None if output.logprobs is None else [_row(row) for row in output.logprobs]


def prompt_logprob_rows(output: EngineOutput) -> list[LogprobRow | None] | None:
    """A row per prompt token (None for the first), with a request's first token."""
    request = output.request
    if request.params.prompt_logprobs is None or request.num_output_tokens != len(
        output.new_token_ids
    ):
        return None
    rows: Sequence[TokenLogprobs] = request.prompt_logprobs
    return [None, *(_row(row) for row in rows)]


def _row(row: TokenLogprobs) -> LogprobRow:
    """The token itself first, then the most probable ones but for itself."""
    values = row.top_logprobs
    if row.top_ids is None:
        ids = np.argsort(-values, kind="stable")
        values = values[ids]
    else:
        ids = row.top_ids
    others = [
        (token, value, place)
        for place, (token, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), 1)
        if token != row.token_id
    ]
    return LogprobRow(
        [row.token_id, *(token for token, _, _ in others)],
        [row.logprob, *(value for _, value, _ in others)],
        [row.rank, *(place for _, _, place in others)],
    )
