"""The load generator against a server with a script, whose timing is known."""

import asyncio
import contextlib
import json
import time

import numpy as np

from serving.bench.client import Target
from serving.bench.datasets import BenchRequest
from serving.bench.load import run_load


class ScriptedServer:
    """Answers completions with `pieces` (seconds to wait, event) each; counts what is open."""

    def __init__(self, pieces, status=200):
        self.pieces = pieces
        self.status = status
        self.open = self.most_open = 0
        self.bodies = []
        self.headers = []
        self.times = []

    async def handle(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(
                    line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line
                )
                body = await reader.readexactly(int(headers["content-length"]))
                self.times.append(time.monotonic())
                self.headers.append(headers)
                self.bodies.append(json.loads(body))
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                await self.answer(writer)
                self.open -= 1
        writer.close()

    async def answer(self, writer):
        if self.status != 200:
            writer.write(b"HTTP/1.1 %d Busy\r\ncontent-length: 9\r\n\r\nnot today" % self.status)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for wait, event in self.pieces:
            await asyncio.sleep(wait)
            data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode()
            data += b"\n\n"
            # Chunks end where they like.
            for part in filter(None, (data[:9], data[9:])):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def piece(text, **more):
    return {"choices": [{"index": 0, "text": text, **more}]}


STREAM = [
    (0.0, b": ping"),
    (0.1, piece("a")),
    (0.05, piece("")),
    (0.05, piece("b", finish_reason="length")),
    (0.0, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}),
    (0.0, b"data: [DONE]"),
]


def load(server, count=1, arrivals=None, backend="openai", output_len=8, **options):
    async def go():
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        target = Target(
            f"http://127.0.0.1:{port}", backend, "/v1/x", "m", {"x-own": "1"}, {"temperature": 0}
        )
        async with listener:
            return await run_load(
                target,
                [BenchRequest(f"prompt {i}", 3, output_len) for i in range(count)],
                np.zeros(count) if arrivals is None else np.asarray(arrivals),
                **options,
            )

    return asyncio.run(go())


def test_a_stream_is_timed_and_counted():
    server = ScriptedServer(STREAM)
    (timeline,), duration = load(server)
    assert timeline.success, timeline.error
    assert timeline.text == "ab"
    # The server's own count, not that of the pieces.
    assert (timeline.prompt_len, timeline.output_len) == (5, 4)
    assert 0.09 < timeline.ttft < 0.4
    assert len(timeline.itl) == 2 and all(gap > 0.03 for gap in timeline.itl)
    assert timeline.latency == timeline.ttft + sum(timeline.itl)
    assert duration >= timeline.latency
    body = server.bodies[0]
    assert body["prompt"] == "prompt 0" and body["max_tokens"] == 8 and body["temperature"] == 0
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert server.headers[0]["x-request-id"] == "bench-0" and server.headers[0]["x-own"] == "1"


def test_without_usage_a_piece_is_a_token():
    (timeline,), _ = load(ScriptedServer(STREAM[:4]))
    assert (timeline.prompt_len, timeline.output_len) == (3, 3)


def test_chat_pieces_with_a_role_only_are_no_output():
    def delta(finish=None, **fields):
        return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}

    server = ScriptedServer(
        [
            (0.0, delta(role="assistant", content="")),
            (0.1, delta(reasoning_content="hm")),
            (0.0, delta(content="yes")),
            (0.0, delta("stop")),
        ]
    )
    (timeline,), _ = load(server, backend="openai-chat")
    assert timeline.ttft > 0.09 and len(timeline.itl) == 2 and timeline.text == "yes"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "prompt 0"}]
    assert server.bodies[0]["max_completion_tokens"] == 8


def test_a_closed_loop_keeps_as_many_open_as_it_may():
    server = ScriptedServer(STREAM)
    timelines, duration = load(server, 9, max_concurrency=3)
    assert server.most_open == 3 and all(t.success for t in timelines)
    # Three rounds of 0.2 s; whoever waited for a place is timed from when it got one.
    assert duration > 0.55
    assert sum(t.queue > 0.15 for t in timelines) == 6
    assert all(t.latency < 0.5 for t in timelines)


def test_an_open_loop_sends_by_the_clock_whatever_is_open():
    server = ScriptedServer(STREAM)
    arrivals = [0.0, 0.05, 0.1, 0.3]
    load(server, 4, arrivals)
    sent = np.asarray(server.times) - server.times[0]
    assert np.abs(sent - arrivals).max() < 0.045
    assert server.most_open >= 3


def test_warmups_are_sent_and_not_counted():
    server = ScriptedServer(STREAM)
    timelines, _ = load(server, 2, num_warmups=3)
    assert len(server.bodies) == 5 and len(timelines) == 2
    assert [body["prompt"] for body in server.bodies[:3]] == ["prompt 0"] * 3


def test_failures_are_told_and_nothing_is_raised():
    (refused,), _ = load(ScriptedServer([], status=503))
    assert refused.error == "503 Busy: not today" and not refused.success
    (broken,), _ = load(ScriptedServer([*STREAM[:2], (0.0, {"error": {"message": "lost"}})]))
    assert "lost" in broken.error
    (empty,), _ = load(ScriptedServer(STREAM[4:]))
    assert empty.error == "the stream had no output"
    (garbage,), _ = load(ScriptedServer([(0.0, b"data: {nonsense")]))
    assert "JSONDecodeError" in garbage.error

    async def nobody():
        target = Target("http://127.0.0.1:9", "openai", "/v1/x", "m")
        return await run_load(target, [BenchRequest("p", 1, 1)], np.zeros(1))

    (unreachable,), _ = asyncio.run(nobody())
    assert "ClientConnectorError" in unreachable.error
