"""The service: methods of jaxllm.proto over an AsyncLLM."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from jaxllm.sampling_params import SamplingParams, check_against_model, sampling_defaults
from jaxllm.structured_outputs import StructuredOutputs
from serving.api_keys import given_key
from serving.async_llm import AsyncLLM, GenerationStream, Job, PromptState
from serving.errors import ControlError, NotReadyError
from serving.grpc import messages as pb
from serving.grpc.convert import (
    params_values,
    prompt_value,
    sample_message,
    token_logprobs,
)
from serving.grpc.weight_upload import WeightUpload
from serving.sequence_stream import Delta
from serving.tenants import tenant_salt
from serving.version import VERSION
from serving.weights import Updated, WeightAccess

_DEFAULT_MAX_TOKENS = 16


class Inference:
    """jaxllm.Inference.

    Args:
      isolate_keys: requests with different API keys never share a prefix.
    """

    def __init__(self, llm: AsyncLLM, isolate_keys: bool = False):
        self._llm = llm
        self._isolate_keys = isolate_keys

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> pb.GenerateResponse:
        stream = await self._submit(request, context)
        deltas = [Delta() for _ in range(stream.prompts[0].job.params.n)]
        try:
            async for news in stream:
                for index, delta in news:
                    deltas[index].merge(delta)
        finally:
            stream.close()
        return pb.GenerateResponse(
            request_id=stream.request_id,
            prompt=_prompt_info(stream.prompts[0]),
            samples=[sample_message(index, delta) for index, delta in enumerate(deltas)],
        )

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateChunk]:
        stream = await self._submit(request, context)
        prompt = stream.prompts[0]
        first = True
        try:
            async for news in stream:
                for index, delta in news:
                    chunk = pb.GenerateChunk(
                        request_id=stream.request_id, sample=sample_message(index, delta)
                    )
                    if first:
                        chunk.prompt.CopyFrom(_prompt_info(prompt))
                        first = False
                    yield chunk
        finally:
            # A client that cancels, or whose deadline passes, ends its request here.
            stream.close()

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:  # noqa: N802
        llm = self._llm
        llm.check_door()
        salt = self._salt(request, context)
        prompt = await llm.process_prompt(prompt_value(request.prompt, salt))
        value = prompt_value(request.continuation, None)
        rest = await llm.process_prompt(value, add_special_tokens=False)
        joined = await llm.process_prompt(
            {"prompt_token_ids": prompt.token_ids + rest.token_ids, "cache_salt": salt}
        )
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
        stream = llm.submit([Job(joined, params)], f"score-{secrets.token_hex(8)}")
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()
        rows = (stream.prompts[0].prompt_logprobs or [])[len(prompt.token_ids) :]
        logprobs = [row.logprobs[0] for row in rows if row is not None]
        return pb.ScoreResponse(token_ids=rest.token_ids, logprobs=logprobs, total=sum(logprobs))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenIds:  # noqa: N802
        self._llm.check_ready()
        if self._llm.tokenizer is None:
            raise ValueError("this server has no tokenizer")
        add = not request.HasField("add_special_tokens") or request.add_special_tokens
        return pb.TokenIds(ids=self._llm.tokenizer.encode(request.text, add))

    async def Detokenize(  # noqa: N802
        self, request: pb.TokenIds, context: Any
    ) -> pb.DetokenizeResponse:
        self._llm.check_ready()
        if self._llm.tokenizer is None:
            raise ValueError("this server has no tokenizer")
        text = self._llm.tokenizer.decode(list(request.ids), skip_special_tokens=False)
        return pb.DetokenizeResponse(text=text)

    def _salt(self, request: pb.GenerateRequest | pb.ScoreRequest, context: Any) -> str | None:
        given = request.cache_salt if request.HasField("cache_salt") else None
        if not self._isolate_keys:
            return given
        return tenant_salt(given_key(context.invocation_metadata()), given)

    async def _submit(self, request: pb.GenerateRequest, context: Any) -> GenerationStream:
        llm = self._llm
        llm.check_door()
        asked = request.sampling_params
        truncate = (
            asked.truncate_prompt_tokens if asked.HasField("truncate_prompt_tokens") else None
        )
        salt = self._salt(request, context)
        add = not request.HasField("add_special_tokens") or request.add_special_tokens
        prompt = await llm.process_prompt(
            prompt_value(request.prompt, salt),
            truncate_prompt_tokens=truncate,
            add_special_tokens=add,
        )
        engine = llm.description
        room = engine.max_model_len - len(prompt.token_ids)
        wanted = asked.max_tokens if asked.HasField("max_tokens") else _DEFAULT_MAX_TOKENS
        values = {**sampling_defaults(engine.generation_config), **params_values(asked)}
        if asked.HasField("max_tokens") and wanted == 0:
            values["max_tokens"] = 0
        else:
            values["max_tokens"] = min(wanted, room)
        if "structured_outputs" in values:
            spec = StructuredOutputs.from_value(values["structured_outputs"])
            values["structured_outputs"] = spec
        params = SamplingParams(**values)
        max_logprobs = int(engine.config.get("max_logprobs", 20))
        check_against_model(params, engine.vocab_size, max_logprobs, room)
        request_id = request.request_id or f"grpc-{secrets.token_hex(16)}"
        return llm.submit([Job(prompt, params, request.priority)], request_id)


class Control:
    """jaxllm.Control."""

    def __init__(self, llm: AsyncLLM, names: tuple[str, ...], access: WeightAccess):
        self._llm = llm
        self._names = names
        self._access = access

    async def GetServerInfo(self, request: pb.Empty, context: Any) -> pb.ServerInfo:  # noqa: N802
        info = pb.ServerInfo(version=VERSION, ready=True)
        try:
            self._llm.check_ready()
        except NotReadyError as error:
            info.ready, info.reason = False, str(error)
        stats = self._llm.metrics.last_stats
        info.num_running, info.num_waiting = stats.num_running, stats.num_waiting
        info.kv_cache_usage = stats.kv_usage
        info.engine_restarts = self._llm.supervisor.num_restarts
        info.sleeping = self._llm.weights.is_sleeping
        info.weights_version = self._llm.weights.version
        return info

    async def GetModelInfo(self, request: pb.Empty, context: Any) -> pb.ModelInfo:  # noqa: N802
        engine = self._llm.description
        return pb.ModelInfo(
            names=self._names,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
        )

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        return pb.AbortResponse(aborted=self._llm.abort_requests(list(request.request_ids)))

    async def Pause(self, request: pb.Empty, context: Any) -> pb.Empty:  # noqa: N802
        await self._llm.pause()
        return pb.Empty()

    async def Resume(self, request: pb.Empty, context: Any) -> pb.Empty:  # noqa: N802
        await self._llm.resume()
        return pb.Empty()

    async def ResetPrefixCache(  # noqa: N802
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.ResetPrefixCacheResponse:
        name = "preempt_and_reset_prefix_cache" if request.preempt_running else "reset_prefix_cache"
        return pb.ResetPrefixCacheResponse(done=bool(await self._llm.call(name)))

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.Empty:  # noqa: N802
        self._access.check()
        level = request.level if request.HasField("level") else 1
        await self._llm.weights.sleep(level, _running(request.running))
        return pb.Empty()

    async def WakeUp(self, request: pb.WakeUpRequest, context: Any) -> pb.Empty:  # noqa: N802
        self._access.check()
        await self._llm.weights.wake_up(list(request.tags) or None)
        return pb.Empty()

    async def UpdateWeights(  # noqa: N802
        self, requests: AsyncIterator[pb.UpdateWeightsRequest], context: Any
    ) -> pb.UpdateWeightsResponse:
        self._access.check()
        weights = self._llm.weights
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "header":
            raise ControlError("the first message must be a header", "argument")
        header, running = first.header, _running(first.header.running)
        with weights.exclusively():
            if header.HasField("path"):
                place = self._access.find(header.path)
                if await anext(aiter(requests), None) is not None:
                    raise ControlError("after a header with a path nothing follows", "argument")
                done = await weights.update(place, header.version, running)
            else:
                done = await self._receive(requests, header.version, running)
        return pb.UpdateWeightsResponse(
            version=done.version,
            num_tensors=done.num_tensors,
            num_bytes=done.num_bytes,
            seconds=done.seconds,
        )

    async def _receive(
        self, requests: AsyncIterator[pb.UpdateWeightsRequest], version: str, running: str
    ) -> Updated:
        """Stores the chunks that follow in a folder of this user's, and hands that on."""
        weights = self._llm.weights
        with tempfile.TemporaryDirectory(prefix="jaxllm-weights-") as name:
            upload = WeightUpload(Path(name), await weights.describe())
            try:
                async for request in requests:
                    if request.WhichOneof("part") != "chunk":
                        raise ControlError("after the header only chunks may follow", "argument")
                    await asyncio.to_thread(upload.add, request.chunk)
                await asyncio.to_thread(upload.finish)
            finally:
                upload.close()
            return await weights.update(Path(name), version, running)


def _running(value: int) -> str:
    """The name in `jaxllm.weights.Running` of an enum value."""
    if value not in pb.Running.values():
        raise ControlError(f"running={value}: {', '.join(pb.Running.keys())}", "argument")
    return str(pb.Running.Name(value)).lower()


def _prompt_info(prompt: PromptState) -> pb.PromptInfo:
    return pb.PromptInfo(
        token_ids=prompt.job.prompt.token_ids,
        num_cached_tokens=prompt.num_cached_tokens or 0,
        logprobs=token_logprobs(prompt.prompt_logprobs or []),
    )
