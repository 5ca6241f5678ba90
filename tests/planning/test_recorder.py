import pytest

from jaxllm.engine.step_plan import StepResult
from jaxllm.errors import ConfigError
from jaxllm.planning.recorder import StepRecorder
from jaxllm.planning.replay import replay
from jaxllm.planning.simulate import SimulationConfig, simulate
from jaxllm.planning.step_time import fit_step_time
from jaxllm.planning.trace import Lengths, TraceRequest, Traffic
from tests.engine.stub_runner import VOCAB, make_core, make_request


class Clock:
    """Moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class SlowRunner:
    """A stub runner whose steps take the time that `seconds` gives for a plan."""

    def __init__(self, inner, seconds, wait):
        self.inner = inner
        self.seconds = seconds
        self.wait = wait

    def dispatch(self, plan):
        pending, duration = self.inner.dispatch(plan), self.seconds(plan)
        wait = self.wait

        class Step:
            def result(self) -> StepResult:
                wait(duration)
                return pending.result()

        return Step()

    def reset(self):
        self.inner.reset()


def seconds(plan):
    return 0.01 + 0.001 * plan.num_tokens


def test_steps_are_timed_with_the_host_work_between_them():
    clock = Clock()

    def wait(duration):
        clock.now += duration

    core = make_core(budget=16)
    core.runner = SlowRunner(core.runner, seconds, wait)
    recorder = StepRecorder.install(core, clock)
    core.add(make_request("a", list(range(20)), 3, core))
    while core.has_unfinished:
        core.step()
        clock.now += 0.5
    found = [
        (s.prefill_tokens, s.decode_requests, s.context_tokens, s.prefill_pairs)
        for s in recorder.samples
    ]
    assert found == [
        (16, 0, 0, 136),
        (4, 0, 0, 74),
        (0, 1, 21, 0),
        (0, 1, 22, 0),
    ]
    # The first step began from rest; the others waited for the host.
    times = [s.seconds for s in recorder.samples]
    assert times == pytest.approx([0.026, 0.514, 0.511, 0.511])
    recorder.uninstall(core)
    assert isinstance(core.runner, SlowRunner)


def test_a_pause_is_no_part_of_a_step():
    clock = Clock()

    def wait(duration):
        clock.now += duration

    core = make_core()
    core.runner = SlowRunner(core.runner, seconds, wait)
    recorder = StepRecorder.install(core, clock)
    for name in "ab":
        core.add(make_request(name, [1, 2, 3], 1, core))
        core.step()
        clock.now += 60
    assert [s.seconds for s in recorder.samples] == pytest.approx([0.013, 0.013])


def test_a_busy_engine_is_refused():
    core = make_core()
    core.add(make_request("a", [1], 4, core))
    with pytest.raises(ValueError, match="middle"):
        StepRecorder.install(core)
    with pytest.raises(ConfigError, match="busy"):
        replay(core, [TraceRequest(0.0, 2, 2)], vocab_size=VOCAB)


def test_requests_too_long_for_the_engine_are_refused():
    with pytest.raises(ConfigError, match="max_model_len=64"):
        replay(make_core(), [TraceRequest(0.0, 60, 8)], vocab_size=VOCAB)


def test_the_simulator_foretells_a_replay():
    """On a virtual clock, so that only the model of time and the scheduler are compared."""
    clock = Clock()

    def wait(duration):
        clock.now += duration

    core = make_core(num_blocks=128, budget=32)
    core.runner = SlowRunner(core.runner, seconds, wait)

    def run(seed, rate):
        traffic = Traffic(80, rate, Lengths.parse("2:40"), Lengths.parse("2:20"), seed=seed)
        trace = list(traffic.requests())
        measured = replay(core, trace, vocab_size=VOCAB, seed=seed, clock=clock, sleep=wait)
        core.reset_prefix_cache()
        return trace, measured

    _, calibration = run(1, 20.0)
    fit = fit_step_time(calibration.samples)
    assert fit.mean_error < 0.02
    for seed, rate in ((2, 0.0), (3, 5.0), (4, 20.0)):
        trace, measured = run(seed, rate)
        found = simulate(trace, SimulationConfig(core.config, core.num_blocks), fit.model).summary()
        assert found.num_finished == 80
        assert found.output_tokens_per_second == pytest.approx(
            measured.output_tokens_per_second, rel=0.02
        )
        assert found.ttft.mean == pytest.approx(measured.ttft.mean, rel=0.05)
        assert found.ttft.p99 == pytest.approx(measured.ttft.p99, rel=0.1)
