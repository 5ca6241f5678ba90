"""A typed client of the gRPC service, blocking and for asyncio.

    with Client("localhost:50051") as client:
        print(client.generate("Hello", max_tokens=8).samples[0].text)
        for chunk in client.stream("Hello", max_tokens=8):
            print(chunk.sample.text, end="")

`AsyncClient` has the same methods, awaited. It needs the packages of jaxllm[serve], and no JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.grpc.async_client import AsyncClient
    from serving.grpc.client import Client
    from serving.grpc.requests import RequestError, make_request

__all__ = ["AsyncClient", "Client", "RequestError", "make_request"]

_HOMES = {
    "AsyncClient": "serving.grpc.async_client",
    "Client": "serving.grpc.client",
    "RequestError": "serving.grpc.requests",
    "make_request": "serving.grpc.requests",
}


def __getattr__(name: str) -> Any:
    # The library stands without the server; only who asks for a client imports it.
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm.client' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ImportError as error:
        raise ImportError(f"jaxllm.client needs the packages of jaxllm[serve]: {error}") from error
