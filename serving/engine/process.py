"""The engine process: one EngineCore, stepped as long as there is work, and its channel.

Started as `python -m serving.engine.process ADDRESS PARENT_PID PULSE_FD`, with the lifeline on
standard input. It knows tokens only; text is the API process's work.
"""

import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec
import zmq

from jaxllm.engine.request import FinishReason
from jaxllm.engine.step_plan import EngineOutput
from jaxllm.sampling_params import SamplingParams
from serving.engine.block_map import block_runs
from serving.engine.messages import (
    Abort,
    Add,
    Call,
    Command,
    Description,
    Failed,
    News,
    Output,
    Ready,
    Refused,
    Reply,
    Start,
    Started,
    Stats,
    StepNews,
    Stop,
)
from serving.engine.parent import die_with_parent, start_pulse
from serving.engine.plan_recorder import PlanRecorder
from serving.engine.request_factory import RequestFactory
from serving.engine.rows import logprob_rows, prompt_logprob_rows
from serving.engine.weights import EngineWeights, fault_of
from serving.garbage import keep_from_collector

logger = logging.getLogger(__name__)

# After so many steps that raised in a row the process gives up; the supervisor starts another.
MAX_FAILED_STEPS = 3
_IDLE_POLL_MS = 1000
_COMPILE_POLL_MS = 5
# Waiting requests that cannot be scheduled yet are tried again after this time.
_STALLED_SECONDS = 0.001


class Channel:
    """The engine's end: lists of commands in, news out."""

    def __init__(self, address: str):
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Command])

    def receive(self, wait_ms: int) -> list[Command]:
        """Every command that has come; waits for one at most `wait_ms`."""
        commands: list[Command] = []
        if self._socket.poll(wait_ms):
            while self._socket.poll(0):
                commands += self._decoder.decode(self._socket.recv())
        return commands

    def send(self, news: News) -> None:
        self._socket.send(self._encoder.encode(news))

    def close(self) -> None:
        """Sends what is left, for a second at most."""
        self._socket.close(linger=1000)
        zmq.Context.instance().term()


class EngineLoop:
    """Serves commands and steps the core."""

    def __init__(self, channel: Channel, engine: Any):
        self._channel = channel
        self._engine = engine
        self._core = engine.core
        self._recorder = PlanRecorder(engine.core.runner)
        engine.core.runner = self._recorder
        self._refused: list[Refused] = []
        self._outputs: list[Output] = []
        self._factory = RequestFactory(engine)
        # Requests that wait for their grammar.
        self._compiling: dict[str, tuple[Add, SamplingParams, Future[Any]]] = {}
        self._paused = False
        self._weights = EngineWeights(engine, self._give)
        self._failed_in_a_row = 0
        self._compiled = _compile_counter()
        self._lost_preemptions = self._lost_queries = self._lost_hits = 0

    def run(self) -> None:
        """Until a Stop command."""
        core = self._core
        while True:
            idle = self._is_halted or not core.has_unfinished
            if idle and not self._is_halted:
                core.drain()
            wait = 0 if not idle else _COMPILE_POLL_MS if self._compiling else _IDLE_POLL_MS
            for command in self._channel.receive(wait):
                if isinstance(command, Stop):
                    return
                self._serve(command)
            if self._compiling:
                self._add_compiled()
            if core.has_unfinished and not self._is_halted:
                self._step()
            elif self._refused or self._outputs:
                self._send(None)

    def _serve(self, command: Command) -> None:
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._compiling.pop(request_id, None)
            self._core.abort(command.request_ids)
            if self._is_halted or not self._core.has_unfinished:
                # No step follows that would tell of the freed blocks.
                self._send(None)
        elif isinstance(command, Call):
            self._call(command)

    def _add(self, command: Add) -> None:
        try:
            params = self._factory.params(command)
            grammar = self._factory.compile(params)
            if grammar is None or grammar.done():
                compiled = None if grammar is None else grammar.result()
                self._core.add(self._factory.make(command, params, compiled))
            else:
                self._compiling[command.request_id] = (command, params, grammar)
        except ValueError as error:
            self._refused.append(Refused(command.request_id, str(error)))

    def _add_compiled(self) -> None:
        """Adds the requests whose grammars are ready by now."""
        ready = [key for key, (_, _, grammar) in self._compiling.items() if grammar.done()]
        for key in ready:
            command, params, grammar = self._compiling.pop(key)
            try:
                self._core.add(self._factory.make(command, params, grammar.result()))
            except ValueError as error:
                self._refused.append(Refused(command.request_id, str(error)))

    def _call(self, command: Call) -> None:
        functions: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self._core.reset_prefix_cache,
            "pause": lambda: self._pause(True),
            "resume": lambda: self._pause(False),
            "preempt_and_reset_prefix_cache": lambda: self._core.reset_prefix_cache(True),
            "block_runs": lambda: block_runs(self._core.scheduler.pool),
        }
        function = (functions | self._weights.functions).get(command.name)
        if function is None:
            reply = Reply(command.call_id, None, f"no function {command.name!r}")
        else:
            try:
                reply = Reply(command.call_id, function(**command.arguments))
            except Exception as error:
                fault = fault_of(error)
                if fault == "engine":
                    logger.exception("%s failed", command.name)
                reply = Reply(command.call_id, None, str(error), fault)
        self._channel.send(reply)

    @property
    def _is_halted(self) -> bool:
        """No step is started, whatever waits."""
        return self._paused or self._weights.is_sleeping

    def _give(self, outputs: list[EngineOutput]) -> None:
        """Sends news that came of a control function."""
        self._outputs += [_output(output) for output in outputs]
        self._send(None)

    def _pause(self, pause: bool) -> bool:
        self._paused = pause
        return pause

    def _step(self) -> None:
        failure = None
        try:
            outputs = self._core.step()
            self._failed_in_a_row = 0
        except Exception as error:
            # Whatever a step raises ends the requests in flight, not the engine.
            logger.exception("a step failed")
            failure = f"{type(error).__name__}: {error}"
            outputs = self._drop_all()
            self._failed_in_a_row += 1
        self._outputs += [_output(output) for output in outputs]
        stalled = not outputs and not self._recorder.step_tokens
        if not stalled or self._refused or failure:
            self._send(failure)
        else:
            time.sleep(_STALLED_SECONDS)
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            logger.critical("%d steps failed in a row; giving up", MAX_FAILED_STEPS)
            raise SystemExit(70)

    def _drop_all(self) -> list[EngineOutput]:
        scheduler = self._core.scheduler
        lost = [
            EngineOutput(request, [], FinishReason.ERROR) for request in scheduler.requests.values()
        ]
        # The new scheduler counts from zero; counters of the process must not fall.
        self._lost_preemptions += scheduler.stats.num_preemptions
        self._lost_queries += scheduler.stats.prefix_queries
        self._lost_hits += scheduler.stats.prefix_hits
        self._core.reset()
        return lost

    def _send(self, failure: str | None) -> None:
        scheduler = self._core.scheduler
        step_tokens, started = self._recorder.take()
        news = StepNews(
            time=time.monotonic(),
            stats=Stats(
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.requests) - len(scheduler.running) + len(self._compiling),
                kv_usage=scheduler.pool.usage,
                step_tokens=step_tokens,
                num_steps=self._recorder.num_steps,
                num_preemptions=self._lost_preemptions + scheduler.stats.num_preemptions,
                prefix_queries=self._lost_queries + scheduler.stats.prefix_queries,
                prefix_hits=self._lost_hits + scheduler.stats.prefix_hits,
                num_compiled=self._compiled(),
            ),
            outputs=self._outputs,
            started=[
                Started(r.request_id, r.first_scheduled_time or 0.0, r.num_cached_tokens)
                for r in started
            ],
            refused=self._refused,
            failure=failure,
        )
        self._channel.send(news)
        self._outputs, self._refused = [], []


def _output(output: EngineOutput) -> Output:
    request = output.request
    ended = output.finish_reason is not None
    return Output(
        request.request_id,
        output.new_token_ids,
        output.finish_reason.value if output.finish_reason is not None else None,
        request.stop_reason if ended else None,
        request.num_preemptions if ended else 0,
        logprob_rows(output),
        prompt_logprob_rows(output),
    )


def _compile_counter() -> Callable[[], int]:
    """Counts the programs compiled from now on."""
    if "jax" not in sys.modules:
        return lambda: 0
    from jaxllm.execution.compilation import compile_counts

    counts = compile_counts()
    before = counts.compiled
    return lambda: counts.compiled - before


def _describe(engine: Any, seconds: float) -> Description:
    config = engine.config
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = str(config.tokenizer or engine.checkpoint.path)
    limits = engine.scheduler_config
    return Description(
        tokenizer=tokenizer,
        revision=config.revision,
        vocab_size=engine.model_config.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_blocks=engine.num_blocks,
        eos_token_ids=sorted(engine.eos_token_ids),
        generation_config=engine.generation_config,
        config=dataclasses.asdict(config),
        start_seconds=seconds,
    )


def _start(start: Start) -> Any:
    from jaxllm.config import EngineConfig
    from jaxllm.startup import start_engine

    return start_engine(EngineConfig(**start.config), start.progress)


def main(argv: list[str], start_engine: Callable[[Start], Any] = _start) -> int:
    """Runs the process; the exit code says why it ended (0: it was told to).

    `start_engine` makes the engine from the first command.
    """
    address, parent_pid, pulse = argv
    # The API process decides when the engine ends; a Ctrl+C reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(int(parent_pid), sys.stdin.fileno())
    channel = Channel(address)
    commands: list[Command] = []
    while not commands:
        commands = channel.receive(_IDLE_POLL_MS)
    start = commands[0]
    if not isinstance(start, Start):
        raise TypeError(f"the first command must be Start, not {type(start).__name__}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for name in ("jaxllm", "pallas_kernels", "serving"):
        logging.getLogger(name).setLevel(start.log_level)
    start_pulse(int(pulse))
    began = time.monotonic()
    try:
        engine = start_engine(start)
    except Exception as error:
        if start.log_level <= logging.DEBUG:
            logger.exception("the engine could not start")
        # Errors of settings and checkpoints are ValueErrors or OSErrors that say what is wrong.
        mendable = isinstance(error, ValueError | OSError)
        message = str(error) if mendable else f"{type(error).__name__}: {error}"
        channel.send(Failed(message, mendable))
        channel.close()
        return 2 if mendable else 70
    loop = EngineLoop(channel, engine)
    keep_from_collector()
    channel.send(Ready(_describe(engine, time.monotonic() - began)))
    loop.run()
    channel.close()
    return 0


def exit_now(code: int) -> NoReturn:
    """Ends the process without tearing the device down, which takes long and saves nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
