"""The routes around generation, keys, and request ids."""

import httpx

from tests.serving.tiny_model import MAX_MODEL_LEN


def test_models(server):
    body = server.get("/v1/models").json()
    assert [card["id"] for card in body["data"]] == ["tiny", "also-tiny"]
    assert body["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert server.get("/v1/models/also-tiny").json()["id"] == "also-tiny"
    assert server.get("/v1/models/other").status_code == 404
    assert server.complete(model="also-tiny", max_tokens=1)["model"] == "also-tiny"


def test_tokenize_and_back(server):
    for text in ("the an", "  two  blanks\n\ttab", "日本語 😀"):
        body = server.post("/tokenize", {"prompt": text}).json()
        assert body["count"] == len(body["tokens"])
        assert server.post("/detokenize", {"tokens": body["tokens"]}).json()["prompt"] == text
    messages = [{"role": "user", "content": "Hello"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    assert server.chat(messages, max_tokens=1)["usage"]["prompt_tokens"] == count


def test_bad_tokens(server):
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**40]}),
    ):
        assert server.post(path, body).status_code == 400


def test_probes(server):
    for path in ("/health", "/livez", "/readyz", "/ping", "/version", "/load"):
        assert server.get(path).status_code == 200
    assert server.post("/ping", {}).status_code == 200
    assert isinstance(server.get("/version").json()["version"], str)
    assert server.get("/load").json() == {"server_load": 0}
    assert server.get("/tokenizer_info").json()["eos_token"] == "<|end|>"


def test_ids_of_requests(server):
    assert "mine-17" in server.complete(max_tokens=1, request_id="mine-17")["id"]
    reply = server.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "h-1"})
    assert "h-1" in reply.json()["id"]


def test_api_keys(launch):
    server = launch("--api-key", "secret-one", "secret-two", "--enable-request-id-headers")
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-one"}):
        reply = server.post("/v1/completions", body, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["type"] == "AuthenticationError"
    for path in ("/v1/models", "/tokenize", "/no-such-path", "/server_info", "/load"):
        assert server.get(path).status_code == 401, path
    for path in ("/health", "/livez", "/readyz", "/version", "/metrics"):
        assert server.get(path).status_code == 200, path
    assert httpx.get(server.url + "//health", trust_env=False, timeout=10).status_code == 401
    # A Host header cannot move the path that is checked.
    for host in ("x/health?", "x#", "localhost/health"):
        reply = httpx.get(
            server.url + "/v1/models", headers={"Host": host}, trust_env=False, timeout=10
        )
        assert reply.status_code in (400, 401)
    prompt = "shared prompt " * 20
    cached = {}
    for key in ("secret-one", "secret-two", "secret-one"):
        reply = server.post(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 1},
            headers={"Authorization": f"Bearer {key}", "x-request-id": "r-5"},
        )
        assert reply.status_code == 200
        assert reply.headers["x-request-id"] == "r-5"
        cached[key] = server.metric("prefix_cache_hits_total")
    # Tenants share no prefix; the first key finds its own again.
    assert cached["secret-two"] == 0
    assert cached["secret-one"] > 100
