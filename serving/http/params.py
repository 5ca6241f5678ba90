"""From the fields of a request to SamplingParams."""

import re
from typing import Any

from jaxllm.errors import ParameterError
from jaxllm.sampling_params import SamplingParams, check_against_model, sampling_defaults
from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.errors import PromptError
from jaxllm.text.input import check_cache_salt
from serving.engine.messages import Description
from serving.http.errors import bad_request
from serving.http.protocol import SamplingFields

MAX_STOP_STRINGS = 4
MAX_N = 1024
# An interval that no output reaches.
WHOLE = 2**63
_REQUEST_ID = re.compile(r"[\w.:@+=-]{1,128}", re.ASCII)
# Fields that go to SamplingParams under their own name.
_PASSED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "skip_reading_prefix_cache",
    "logprob_token_ids",
    "repetition_detection",
    "thinking_token_budget",
)


def make_params(
    request: SamplingFields,
    engine: Description,
    *,
    prompt_len: int,
    max_tokens: int | None,
    **more: Any,
) -> SamplingParams:
    """SamplingParams of a request: its own values over the model's over the general defaults.

    Args:
      max_tokens: what the request asks for; None is the model's, or the rest of the context.
      **more: fields that the route itself sets.

    Raises:
      ParameterError, ApiError: a value is outside its range or not supported.
    """
    values = sampling_defaults(engine.generation_config)
    for name in _PASSED:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    if request.logit_bias is not None:
        values["logit_bias"] = _bias(request.logit_bias)
    structured = _structured(request)
    if structured is not None:
        values["structured_outputs"] = structured
    values.update(more)
    if values.get("structured_outputs") is not None:
        values["structured_outputs"] = StructuredOutputs.from_value(values["structured_outputs"])
    _check_http_limits(request)
    room = engine.max_model_len - prompt_len
    if max_tokens is not None and max_tokens < 1:
        raise ParameterError("max_tokens", max_tokens, "must be at least 1")
    wanted = values.get("max_tokens", room) if max_tokens is None else max_tokens
    values["max_tokens"] = min(wanted, room)
    params = SamplingParams(**values)
    max_logprobs = int(engine.config.get("max_logprobs", 20))
    check_against_model(params, engine.vocab_size, max_logprobs, room)
    return params


def stream_interval(request: SamplingFields, least: int) -> int:
    """Tokens from one piece of the answer to the next; only the end counts without a stream."""
    if not request.stream:
        return WHOLE
    return max(least, request.stream_interval or 1)


def check_request(request: SamplingFields) -> None:
    """What can be said of the common fields before the prompt is looked at."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream", "stream_options")
    if request.stream_interval is not None and request.stream_interval < 1:
        raise bad_request("must be at least 1", "stream_interval")
    if request.use_beam_search:
        raise bad_request("beam search is not supported", "use_beam_search")
    if request.vllm_xargs:
        raise bad_request("there are no custom processors", "vllm_xargs")
    if request.kv_transfer_params:
        raise bad_request("KV transfer is not supported", "kv_transfer_params")
    if request.truncation_side not in (None, "left"):
        raise bad_request("only 'left' is supported", "truncation_side")
    if request.request_id is not None and not _REQUEST_ID.fullmatch(request.request_id):
        raise bad_request("1 to 128 of A-Z a-z 0-9 _ . : @ + = -", "request_id")
    try:
        check_cache_salt(request.cache_salt)
    except PromptError as error:
        raise bad_request(str(error), "cache_salt") from None
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")


def _check_http_limits(request: SamplingFields) -> None:
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOP_STRINGS:
        raise ParameterError("stop", len(request.stop), f"at most {MAX_STOP_STRINGS} stop strings")
    if request.n is not None and request.n > MAX_N:
        raise ParameterError("n", request.n, f"must be at most {MAX_N}")


def _bias(bias: dict[str, float]) -> dict[int, float]:
    checked = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise ParameterError("logit_bias", key, "keys must be token ids")
        checked[int(key)] = value
    return checked


def _structured(request: SamplingFields) -> dict[str, Any] | None:
    """structured_outputs, or what response_format says in its place."""
    wanted = request.response_format
    if wanted is None:
        return request.structured_outputs
    kind = wanted.get("type")
    found: dict[str, Any] | None
    if kind == "text":
        found = None
    elif kind == "json_object":
        found = {"json_object": True}
    elif kind == "json_schema":
        described = wanted.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict | bool):
            raise bad_request("json_schema.schema must be a JSON schema", "response_format")
        found = {"json": schema}
    elif kind in ("structural_tag", "grammar"):
        found = {kind: wanted.get(kind) if kind == "grammar" else wanted}
    else:
        raise bad_request(
            f"response_format type {kind!r}: text, json_object or json_schema", "response_format"
        )
    if found is not None and request.structured_outputs is not None:
        raise bad_request(
            "response_format and structured_outputs exclude each other", "response_format"
        )
    return found if found is not None else request.structured_outputs
