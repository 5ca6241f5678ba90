"""POST /v1/completions."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from serving.engine.messages import LogprobRow
from serving.generation import GenerationStream, Job
from serving.http.answer import ChunkedAnswer, reply
from serving.http.body import decode_body
from serving.http.context import ServerContext
from serving.http.errors import bad_request
from serving.http.logprobs import LogprobWriter, prompt_logprobs
from serving.http.params import check_request, make_params, stream_interval
from serving.http.protocol import CompletionRequest
from serving.sequence_stream import Delta

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
_DEFAULT_MAX_TOKENS = 16


@dataclasses.dataclass(slots=True)
class _Choice:
    """One choice on its way.

    Attributes:
      echo: what of the prompt is still to be sent before the output, None when it was.
      drop_output: only the prompt was asked for.
    """

    index: int
    prompt: Any
    logprobs: LogprobWriter | None
    echo: str | None
    drop_output: bool
    sent_prompt_ids: bool = False
    held: Delta = dataclasses.field(default_factory=Delta)


class _Completion(ChunkedAnswer):
    """One request: its choices, and how they are written."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        stream: GenerationStream,
        answer_id: str,
        model: str,
    ):
        super().__init__(context, body, stream, answer_id, model, "text_completion")
        self.is_plain = self.is_plain and body.logprobs is None
        self.body = body
        tokenizer = context.llm.tokenizer
        top = None if body.logprobs is None else int(body.logprobs)
        self.choices: list[_Choice] = []
        for prompt in stream.prompts:
            ids = prompt.job.prompt.token_ids
            echo = None
            if body.echo:
                echo = prompt.job.prompt.prompt_text
                if echo is None:
                    echo = tokenizer.decode(ids) if tokenizer is not None else ""
            for _ in range(prompt.job.params.n):
                writer = None
                if top is not None:
                    writer = LogprobWriter(
                        tokenizer,
                        [] if body.echo else ids,
                        top,
                        bool(body.return_tokens_as_token_ids),
                    )
                self.choices.append(
                    _Choice(
                        len(self.choices),
                        prompt,
                        writer,
                        echo,
                        bool(body.echo) and body.max_tokens == 0,
                    )
                )

    def render(self, choice: _Choice, delta: Delta) -> dict[str, Any]:
        """A choice as JSON, from news of it."""
        if choice.drop_output:
            finish = delta.finish_reason and "length"
            delta = Delta(finish_reason=finish)
        self.usage.completion_tokens += len(delta.token_ids)
        text, rows, ids = delta.text, list(delta.logprobs or []), delta.token_ids
        all_rows: list[LogprobRow | None] = [*rows]
        all_ids = ids
        if choice.echo is not None:
            text = choice.echo + text
            choice.echo = None
            if choice.logprobs is not None:
                prompt_ids = choice.prompt.job.prompt.token_ids
                scored = choice.prompt.prompt_logprobs or [None] * len(prompt_ids)
                all_rows = [*scored, *rows]
                all_ids = [*prompt_ids, *ids]
        logprobs = None
        if choice.logprobs is not None:
            logprobs = choice.logprobs.completion(all_rows, all_ids)
        rendered: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            rendered["token_ids"] = ids
            if not choice.sent_prompt_ids:
                rendered["prompt_token_ids"] = choice.prompt.job.prompt.token_ids
                choice.sent_prompt_ids = True
        if self.body.prompt_logprobs is not None:
            scored = choice.prompt.prompt_logprobs
            rendered["prompt_logprobs"] = scored and prompt_logprobs(
                scored, choice.prompt.job.prompt.token_ids, self.context.llm.tokenizer
            )
        return rendered

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        deltas = await self.deltas(len(self.choices))
        choices = [self.render(c, d) for c, d in zip(self.choices, deltas, strict=True)]
        return {**self.head, "choices": choices, "usage": self.usage.render()}

    def chunks(self, index: int, delta: Delta) -> Iterable[dict[str, Any] | bytes]:
        choice = self.choices[index]
        if self._is_text_alone(choice, delta):
            yield self.text_chunk(index, delta.text, len(delta.token_ids))
            return
        choice.held.merge(delta)
        if self._worth_sending(choice):
            delta, choice.held = choice.held, Delta()
            yield {**self.head, "choices": [self.render(choice, delta)]}

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self.render(self.choices[index], Delta(text))

    def _is_text_alone(self, choice: _Choice, delta: Delta) -> bool:
        return bool(
            self.is_plain
            and delta.text
            and delta.finish_reason is None
            and choice.echo is None
            and not choice.drop_output
            and not choice.held.token_ids
        )

    def _worth_sending(self, choice: _Choice) -> bool:
        """Not where a piece would carry nothing: its text is still held back."""
        held = choice.held
        return bool(
            held.text
            or held.finish_reason
            or (choice.echo and held.token_ids)
            or (held.token_ids and (choice.logprobs is not None or self.body.return_token_ids))
        )


def completions_route(context: ServerContext) -> Any:
    """The endpoint."""

    async def endpoint(request: Request) -> ASGIApp:
        body = await decode_body(request, CompletionRequest, context.settings.max_body_size)
        model = context.check_model(body.model)
        _check(body)
        answer_id = context.request_id(request, body.request_id, "cmpl")
        jobs = await _jobs(context, request, body)
        stream = context.llm.submit(jobs, answer_id)
        answer = _Completion(context, body, stream, answer_id, model)
        return await reply(request, context, answer, streamed=bool(body.stream))

    return endpoint


def _check(body: CompletionRequest) -> None:
    check_request(body)
    if body.prompt is None:
        raise bad_request("a prompt is needed", "prompt")
    if body.prompt_embeds is not None:
        raise bad_request("embeddings as a prompt are not supported", "prompt_embeds")
    if body.suffix:
        raise bad_request("the model does not fill in before a suffix", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is not supported", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens must be at least 1 without echo", "max_tokens")
    scores = {int(k) for k in (body.logprobs, body.prompt_logprobs) if k is not None}
    if body.echo and len(scores) > 1:
        raise bad_request("with echo it must equal logprobs", "prompt_logprobs")


def _prompts(prompt: str | list[Any]) -> list[str | list[Any]]:
    """The prompts of a request: one text or id list, or a list of them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("the prompt is empty", "prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if not all(isinstance(item, str) for item in prompt) and not all(
        isinstance(item, list) for item in prompt
    ):
        raise bad_request("a string, a list of token ids, or a list of either", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"{len(prompt)} prompts; at most {MAX_PROMPTS}", "prompt")
    return prompt


async def _jobs(context: ServerContext, request: Request, body: CompletionRequest) -> list[Job]:
    llm = context.llm
    prompts = _prompts(body.prompt or "")
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise bad_request(f"at most {MAX_CHOICES} choices in all", "n")
    salt = context.cache_salt(request, body.cache_salt)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    more: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo:
        # One token is generated and dropped: the engine always makes one.
        max_tokens = max_tokens or 1
        if body.logprobs is not None:
            more["prompt_logprobs"] = int(body.logprobs)
    interval = stream_interval(body, context.settings.stream_interval)
    jobs = []
    for prompt in prompts:
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        processed = await llm.process_prompt(
            {key: prompt, "cache_salt": salt},
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            add_special_tokens=body.add_special_tokens is not False,
        )
        params = make_params(
            body,
            llm.description,
            prompt_len=len(processed.token_ids),
            max_tokens=max_tokens,
            **more,
        )
        jobs.append(Job(processed, params, body.priority or 0, interval))
    return jobs
