"""TLS, a path prefix, and CORS."""

import ssl
import subprocess

import httpx
import pytest

from tests.serving.conftest import start_server


@pytest.fixture(scope="module")
def secure(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    running = start_server(
        model_folder,
        f"--ssl-certfile={certificate}",
        f"--ssl-keyfile={key}",
        "--root-path=/api",
        "--allowed-origins",
        "http://a.example",
        "--api-key=secret",
        wait=False,
    )
    trust = ssl.create_default_context(cafile=str(certificate))
    running.client.close()
    running.client = httpx.Client(base_url=running.url, verify=trust, trust_env=False, timeout=30)
    running.get = running.client.get
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()


KEY = {"Authorization": "Bearer secret"}


def test_tls_and_prefix(secure):
    assert secure.url.startswith("https://")
    assert secure.url.endswith("/api")
    body = {"prompt": "Hello", "max_tokens": 2}
    assert secure.post("/v1/completions", body, headers=KEY).status_code == 200
    assert secure.post("/v1/completions", body).status_code == 401
    # A proxy may take the prefix away.
    bare = secure.url.removesuffix("/api")
    assert secure.client.get(bare + "/v1/models", headers=KEY).status_code == 200
    assert secure.client.get(bare + "/v1/models").status_code == 401
    assert secure.client.get(bare + "/api/api/health").status_code == 401


def test_only_the_given_origin_may_ask(secure):
    for origin, allowed in (("http://a.example", True), ("http://b.example", False)):
        reply = secure.get("/v1/models", headers={**KEY, "Origin": origin})
        assert ("access-control-allow-origin" in reply.headers) is allowed


def test_a_certificate_that_is_not_there(model_folder):
    from serving.commands import main

    assert main(["serve", str(model_folder), "--ssl-certfile=/no/such.pem", "--port=0"]) == 2
