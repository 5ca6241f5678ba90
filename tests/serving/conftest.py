"""Servers in processes of their own, on free ports of localhost."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.serving.tiny_model import ENGINE_SETTINGS, make_tiny_model

ROOT = Path(__file__).parent.parent.parent
WAIT_SECONDS = 90


class Server:
    """A running server. `get`, `post` are httpx's, with the base URL."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path):
        self.process = process
        self.url = url
        self.log = log
        self.client = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self.get = self.client.get

    def post(self, path, body, **options):
        return self.client.post(path, json=body, **options)

    def complete(self, prompt="Hello", **fields):
        reply = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def chat(self, content="Hello", **fields):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        reply = self.post("/v1/chat/completions", {"messages": messages, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, path, body, stop_after=None):
        """The events of a stream as JSON, without [DONE]; it must come, once, at the end."""
        chunks = []
        with self.client.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            done = 0
            for line in reply.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done += 1
                    continue
                assert not done
                chunks.append(json.loads(line[6:]))
                if stop_after is not None and len(chunks) >= stop_after:
                    return chunks
        assert done == 1
        return chunks

    def metric(self, name, **labels):
        """Sum of a metric's series that have the labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"vllm:{name}") and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                if series.split("{")[0] == f"vllm:{name}" and all(
                    f'{key}="{wanted}"' in series for key, wanted in labels.items()
                ):
                    total += float(value)
        return total

    def wait_idle(self, seconds=10):
        deadline = time.monotonic() + seconds
        while self.metric("num_requests_running") + self.metric("num_requests_waiting"):
            assert time.monotonic() < deadline, "requests are still there"
            time.sleep(0.05)
        assert self.metric("kv_cache_usage_perc") == 0

    def wait_ready(self, seconds=WAIT_SECONDS):
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.get("/health").status_code == 200:
                    return
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def children(self):
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        # One that was killed stays in the list until the server has waited for it.
        return [int(pid) for pid in path.read_text().split() if is_alive(pid)]

    def end(self, number=signal.SIGTERM, seconds=20):
        """Ends the server; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.client.close()


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def start_server(folder, *flags, stub=None, module="tests.serving.stub_serve", wait=True, log=None):
    """A server with the Python engine (or the real one with module serving.commands)."""
    log = log or Path(folder) / f"log-{time.monotonic_ns()}.txt"
    settings = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in ENGINE_SETTINGS.items()
        if not isinstance(value, bool)
    ]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", str(folder), "--port=0", *settings, *flags],
            cwd=ROOT,
            env={
                **os.environ,
                "SERVING_STUB": json.dumps(stub or {}),
                "JAX_PLATFORMS": "cpu",
                "JAXLLM_CPU_KERNELS": "xla",
                "XLA_FLAGS": "",
            },
            stderr=output,
            stdout=output,
        )
    deadline = time.monotonic() + WAIT_SECONDS
    while "listening at " not in (text := log.read_text()):
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
    url = text.split("listening at ")[1].split()[0]
    server = Server(process, url, log)
    if wait:
        server.wait_ready()
    return server


@contextlib.contextmanager
def running_server(*arguments, ready_seconds=WAIT_SECONDS, **options):
    """A server that is ready, and ends with the block."""
    server = start_server(*arguments, wait=False, **options)
    try:
        server.wait_ready(ready_seconds)
        yield server
    finally:
        server.end()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(model_folder):
    """One server for all tests that leave it as it was."""
    with running_server(
        model_folder,
        "--served-model-name",
        "tiny",
        "also-tiny",
        "--enable-prompt-tokens-details",
        "--tool-call-parser=hermes",
        stub={"raise_on": 250},
    ) as running:
        yield running


@pytest.fixture
def launch(model_folder):
    """Starts servers that a test may break; whatever is left of them is ended."""
    running = []

    def start(*flags, **options):
        wait = options.pop("wait", True)
        running.append(start_server(model_folder, *flags, wait=False, **options))
        if wait:
            running[-1].wait_ready()
        return running[-1]

    yield start
    for each in running:
        each.end(signal.SIGKILL)
