"""The routes around generation: models, tokens, health, version, metrics."""

import asyncio
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.sampling_params import sampling_defaults
from jaxllm.text.input import check_token_ids
from serving.errors import NotReadyError
from serving.http.body import decode_body
from serving.http.chat_prompt import chat_token_ids
from serving.http.context import ServerContext
from serving.http.errors import ApiError, bad_request
from serving.http.json_response import JsonResponse
from serving.http.protocol import DetokenizeRequest, TokenizeRequest
from serving.version import VERSION


def small_routes(context: ServerContext) -> list[Route]:
    """All of them."""
    llm = context.llm
    limit = context.settings.max_body_size

    async def models(request: Request) -> Response:
        llm.check_ready()
        return JsonResponse({"object": "list", "data": [_card(context, n) for n in context.names]})

    async def model(request: Request) -> Response:
        llm.check_ready()
        return JsonResponse(_card(context, context.check_model(request.path_params["model"])))

    async def tokenize(request: Request) -> Response:
        llm.check_ready()
        body = await decode_body(request, TokenizeRequest, limit)
        context.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("either a prompt or messages", "prompt")
        if body.messages is not None:
            ids = await chat_token_ids(context, body)
        else:
            ids = _encode(context, body)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": llm.description.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs and llm.tokenizer is not None:
            answer["token_strs"] = [llm.tokenizer.backend.id_to_token(i) for i in ids]
        return JsonResponse(answer)

    async def detokenize(request: Request) -> Response:
        llm.check_ready()
        body = await decode_body(request, DetokenizeRequest, limit)
        context.check_model(body.model)
        if llm.tokenizer is None:
            raise bad_request("this server has no tokenizer", "tokens")
        ids = check_token_ids(body.tokens, llm.description.vocab_size)
        return JsonResponse({"prompt": llm.tokenizer.decode(ids, skip_special_tokens=False)})

    async def tokenizer_info(request: Request) -> Response:
        llm.check_ready()
        if llm.tokenizer is None:
            raise ApiError(404, "this server has no tokenizer")
        special = llm.tokenizer.special_tokens
        return JsonResponse(
            {
                "bos_token": special.get("bos_token"),
                "eos_token": special.get("eos_token"),
                "pad_token": special.get("pad_token"),
                "chat_template": context.chat_template or llm.tokenizer.chat_template,
                "vocab_size": llm.tokenizer.vocab_size,
                "max_model_len": llm.description.max_model_len,
            }
        )

    async def health(request: Request) -> Response:
        try:
            llm.check_ready()
        except NotReadyError as error:
            return JsonResponse({"status": str(error)}, 503, {"Retry-After": "1"})
        return Response(status_code=200)

    async def live(request: Request) -> Response:
        return Response(status_code=200)

    async def ready(request: Request) -> Response:
        try:
            llm.check_ready()
        except NotReadyError as error:
            body = {"ready": False, "reason": str(error), "state": llm.supervisor.state}
            return JsonResponse(body, 503)
        return JsonResponse({"ready": True, "restarts": llm.supervisor.num_restarts})

    async def version(request: Request) -> Response:
        return JsonResponse({"version": VERSION})

    async def load(request: Request) -> Response:
        return JsonResponse({"server_load": context.server_load})

    async def metrics(request: Request) -> Response:
        # The page takes some 10 ms to write, in which streams should go on.
        page = await asyncio.to_thread(llm.metrics.render)
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/livez", live, methods=["GET"]),
        Route("/readyz", ready, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/load", load, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/server_info", server_info_route(context), methods=["GET"]),
    ]


def server_info_route(context: ServerContext) -> Any:
    """The endpoint that tells the limits and defaults in force."""
    llm = context.llm

    async def server_info(request: Request) -> Response:
        llm.check_ready()
        engine = llm.description
        return JsonResponse(
            {
                "version": VERSION,
                "max_model_len": engine.max_model_len,
                "max_num_seqs": engine.max_num_seqs,
                "max_num_batched_tokens": engine.max_num_batched_tokens,
                "block_size": engine.block_size,
                "num_blocks": engine.num_blocks,
                "default_sampling_params": sampling_defaults(engine.generation_config),
                "tool_parser": context.tool_parser,
                "reasoning_parser": context.settings.reasoning_parser,
            }
        )

    return server_info


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "jaxllm",
        "root": context.names[0],
        "parent": None,
        "max_model_len": context.llm.description.max_model_len,
    }


def _encode(context: ServerContext, body: TokenizeRequest) -> list[int]:
    tokenizer = context.llm.tokenizer
    if tokenizer is None:
        raise bad_request("this server has no tokenizer", "prompt")
    return tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
