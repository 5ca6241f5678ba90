"""The server with the real engine on a tiny random model."""

import concurrent.futures

import pytest

from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams
from tests.serving.conftest import running_server
from tests.serving.tiny_model import ENGINE_SETTINGS

GREEDY = {"temperature": 0, "ignore_eos": True}
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "enforce_eager": True}


@pytest.fixture(scope="module")
def real(model_folder):
    flags = [
        "--max-num-seqs=4",
        "--max-num-batched-tokens=32",
        "--enforce-eager",
        "--attention-backend=xla",
        "--served-model-name=tiny",
    ]
    # The first start compiles.
    with running_server(
        model_folder, *flags, module="serving.commands", ready_seconds=300
    ) as running:
        yield running


@pytest.mark.slow
def test_it_answers_as_the_library_does(real, model_folder, monkeypatch):
    monkeypatch.setenv("JAXLLM_CPU_KERNELS", "xla")
    prompts = ["Hello", "the an in er", "x" * 70]
    settings = {**ENGINE_SETTINGS, **SMALL, "attention_backend": "xla"}
    llm = LLM(str(model_folder), progress=False, **settings)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
    want = llm.generate(prompts, params, use_tqdm=False)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        bodies = list(
            threads.map(
                lambda p: real.complete(
                    p, max_tokens=8, logprobs=2, return_token_ids=True, **GREEDY
                ),
                prompts,
            )
        )
    for body, output in zip(bodies, want, strict=True):
        (choice,) = body["choices"]
        assert choice["token_ids"] == list(output.outputs[0].token_ids)
        assert choice["text"] == output.outputs[0].text
        assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    chunks = real.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 8, **GREEDY})
    assert "".join(c["choices"][0]["text"] for c in chunks) == want[0].outputs[0].text
    real.wait_idle()


@pytest.mark.slow
def test_structured_outputs_and_words(real):
    body = real.complete(max_tokens=8, temperature=0, structured_outputs={"choice": ["red fox"]})
    assert body["choices"][0]["text"] == "red fox"
    assert body["choices"][0]["finish_reason"] == "stop"
    wrong = real.post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}})
    assert wrong.status_code == 400
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"a": {"enum": ["b"]}}, "required": ["a"]},
        },
    }
    named = {"type": "function", "function": {"name": "f"}}
    choice = real.chat(tools=[tool], tool_choice=named, max_tokens=60)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert '"a"' in call["function"]["arguments"]
