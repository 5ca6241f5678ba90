"""How the server's text side starts."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from jaxllm.config import EngineConfig
from serving import async_llm
from serving.async_llm import AsyncLLM
from tests.serving.descriptions import description

FOLDER = str(Path(__file__).parents[1] / "golden" / "data" / "tiny_chat")


@pytest.mark.parametrize(
    "settings, found, wanted",
    [
        ({"model": FOLDER}, FOLDER, "safetensors"),
        ({"model": FOLDER, "skip_tokenizer_init": True}, None, None),
        ({"model": "smollm2"}, "/package/model.gguf", "gguf"),
        ({"model": "smollm2", "tokenizer": "org/name"}, "org/name", "safetensors"),
        ({"model": FOLDER, "tokenizer": "/some/model.gguf"}, "/some/model.gguf", "gguf"),
    ],
)
def test_the_library_is_imported_early_where_the_tokenizer_will_need_it(
    settings, found, wanted, monkeypatch
):
    seen = []

    async def start_engine():
        return msgspec.structs.replace(description(), tokenizer=found)

    async def run() -> None:
        llm = AsyncLLM(EngineConfig(**settings), model_name="m")
        monkeypatch.setattr(llm._supervisor, "start", start_engine)
        await llm.start()
        llm._handler.cancel()

    monkeypatch.setattr(async_llm, "import_auto_tokenizer", lambda: seen.append("import"))
    monkeypatch.setattr(
        async_llm, "load_tokenizer", lambda source, format, revision: seen.append((source, format))
    )
    asyncio.run(run())
    assert (
        seen
        == {
            None: [],
            "gguf": [(found, "gguf")],
            "safetensors": ["import", (found, "safetensors")],
        }[wanted]
    )
