"""The OpenAPI document, and what an API fuzzer finds with it."""

import importlib.util
import subprocess
import sys

import pytest

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


def test_the_document_describes_the_types(server):
    document = server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    body = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "stream_options", "structured_outputs"} <= set(body)
    # Every integer says its bounds.
    bounds = [each for each in body["n"]["anyOf"] if each["type"] == "integer"]
    assert bounds[0]["maximum"] == 2**31 - 1
    for path, methods in document["paths"].items():
        for method in methods:
            reply = server.client.request(method, path, params={"seconds": 0})
            assert reply.status_code not in (404, 405), path


@pytest.mark.slow
def test_a_fuzzer_finds_no_server_error(server, tmp_path):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            f"--checks={CHECKS}",
            "--phases=examples,fuzzing",
            "--max-examples=20",
            "--seed=1",
            "--exclude-path=/diagnose",
            "--continue-on-failure",
            "--request-timeout=20",
            "--suppress-health-check=all",
            "--no-color",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert server.complete(max_tokens=1)


def test_the_document_is_open_and_the_routes_are_not(launch):
    server = launch("--api-key=secret")
    assert server.get("/openapi.json").status_code == 200
    document = server.get("/openapi.json").json()
    closed = [path for path in document["paths"] if server.get(path).status_code == 401]
    assert set(document["paths"]) - set(closed) == {
        *("/health", "/ping", "/livez", "/readyz", "/version", "/metrics")
    }
