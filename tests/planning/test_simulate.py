import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.errors import ConfigError
from jaxllm.planning.device import plan_features
from jaxllm.planning.simulate import SimulationConfig, simulate
from jaxllm.planning.step_time import LinearStepTime
from jaxllm.planning.trace import Lengths, TraceRequest, Traffic

MODEL = LinearStepTime(0.005, 2e-5, 5e-5, 1e-8, 1e-9)


def config(blocks=200, seqs=8, budget=64, length=400, block=16, **options):
    scheduler = {
        key: options.pop(key)
        for key in ("long_prefill_token_threshold", "policy", "enable_chunked_prefill")
        if key in options
    }
    return SimulationConfig(
        SchedulerConfig(seqs, budget, length, block, **scheduler), blocks, **options
    )


def traffic(count=60, rate=20.0, prompt="1:100", output="1:60", **options):
    return list(
        Traffic(count, rate, Lengths.parse(prompt), Lengths.parse(output), **options).requests()
    )


def same(a, b):
    for field in dataclasses.fields(a):
        first, second = getattr(a, field.name), getattr(b, field.name)
        if isinstance(first, np.ndarray):
            equal_nan = first.dtype.kind == "f"
            assert np.array_equal(first, second, equal_nan=equal_nan), field.name
    # As text, since a nan is not equal to itself.
    one, two = (str(dataclasses.replace(r.summary(), num_scheduled_steps=0)) for r in (a, b))
    assert one == two
    assert len(a.usage) == len(b.usage)
    for usage, other in zip(a.usage, b.usage, strict=True):
        for name in ("times", "used", "running", "waiting", "peak_blocks", "stride"):
            assert getattr(usage, name) == getattr(other, name), name


@st.composite
def cases(draw):
    blocks, block = draw(st.sampled_from([(40, 4), (60, 16), (300, 8), (2000, 16)]))
    seqs = draw(st.sampled_from([1, 2, 8, 32]))
    deployment = config(
        blocks=blocks,
        block=block,
        seqs=seqs,
        budget=max(seqs, draw(st.sampled_from([8, 64, 512]))),
        length=min(400, (blocks - 1) * block + draw(st.sampled_from([0, 100]))),
        long_prefill_token_threshold=draw(st.sampled_from([0, 16])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        num_replicas=draw(st.sampled_from([1, 3])),
        router=draw(st.sampled_from(["round-robin", "least-loaded", "prefix-aware"])),
        enable_prefix_caching=draw(st.booleans()),
    )
    trace = traffic(
        count=draw(st.sampled_from([3, 40])),
        rate=draw(st.sampled_from([0.0, 5.0, 30.0, 200.0])),
        prompt=draw(st.sampled_from(["1:20", "64:300", "100~1.0"])),
        output=draw(st.sampled_from(["1:4", "8", "32:200", "60~1.0"])),
        burstiness=draw(st.sampled_from([0.3, 1.0])),
        prefix_groups=draw(st.sampled_from([0, 3])),
        prefix_tokens=draw(st.sampled_from([7, 50])),
        seed=draw(st.integers(0, 10**6)),
        most_prompt=350,
    )
    return deployment, trace


@given(cases())
@settings(max_examples=60, deadline=None)
def test_playing_forward_changes_nothing_and_every_request_ends_once(case):
    deployment, trace = case
    fast = simulate(trace, deployment, MODEL)
    same(fast, simulate(trace, dataclasses.replace(deployment, fast_forward=False), MODEL))
    served = fast.replica >= 0
    assert (fast.num_finishes == served).all()
    limit = deployment.scheduler.max_model_len
    wanted = np.minimum(
        [r.output_tokens for r in trace], [max(limit - r.prompt_tokens, 0) for r in trace]
    )
    assert (fast.output_tokens == np.where(served, wanted, 0)).all()
    assert (fast.first_token[served] > fast.arrival[served]).all()
    assert (fast.finish[served] >= fast.first_token[served]).all()
    assert np.isnan(fast.finish[~served]).all()
    _, counts = fast.gaps()
    assert counts.sum() == (fast.output_tokens[served] - 1).sum()


def test_preemption_happens_and_is_the_same_step_by_step():
    deployment = config(blocks=41, block=4, seqs=16, budget=128, length=160)
    trace = traffic(count=60, rate=0.0, prompt="8:20", output="60:100")
    fast = simulate(trace, deployment, MODEL)
    summary = fast.summary()
    assert summary.preemptions > 10 and summary.num_finished == 60
    assert summary.kv_usage_peak == 1.0
    same(fast, simulate(trace, dataclasses.replace(deployment, fast_forward=False), MODEL))


def test_most_steps_are_played_forward():
    trace = traffic(count=50, rate=1.0, output="100:200")
    summary = simulate(trace, config(), MODEL).summary()
    assert summary.num_scheduled_steps < summary.num_steps / 5


def test_one_request_takes_the_time_of_its_steps():
    trace = [TraceRequest(2.0, 100, 4)]
    result = simulate(trace, config(blocks=50, budget=64), MODEL)
    # 100 prompt tokens at 64 a step, then three more tokens.
    first = 2.0 + MODEL.seconds(64, 0, 0, 64 * 65 // 2)
    first += MODEL.seconds(36, 0, 0, 36 * 64 + 36 * 37 // 2)
    assert result.first_token[0] == pytest.approx(first, rel=1e-12)
    rest = sum(MODEL.seconds(0, 1, 101 + i) for i in range(3))
    assert result.finish[0] == pytest.approx(first + rest, rel=1e-12)
    summary = result.summary()
    assert (summary.num_steps, summary.itl.most) == (5, pytest.approx(MODEL.seconds(0, 1, 103)))
    assert summary.ttft.mean == pytest.approx(first - 2.0)
    assert summary.output_tokens_per_second == pytest.approx(4 / (first + rest - 2.0))


def test_batching_saves_steps():
    trace = traffic(count=64, rate=0.0, prompt="16", output="64")
    durations = [
        simulate(trace, config(seqs=seqs, budget=256, blocks=2000), MODEL).summary().duration
        for seqs in (1, 8, 64)
    ]
    assert durations[0] > 4 * durations[1] > 8 * durations[2]


def test_replicas_share_the_load():
    trace = traffic(count=200, rate=100.0, output="50:100")
    one = simulate(trace, config(), MODEL).summary()
    four = simulate(trace, config(num_replicas=4, router="least-loaded"), MODEL)
    assert four.summary().ttft.p99 < one.ttft.p99 / 2
    assert min(np.bincount(four.replica, minlength=4)) > 20


def test_least_loaded_avoids_the_replica_with_the_long_requests():
    # Every other request is long, so taking turns gives all of them to one replica.
    trace = [TraceRequest(0.05 * i, 16, 150 if i % 2 == 0 else 4) for i in range(120)]
    deployment = config(seqs=4, num_replicas=2)
    turns = simulate(trace, deployment, MODEL).summary()
    loads = simulate(trace, dataclasses.replace(deployment, router="least-loaded"), MODEL).summary()
    assert loads.ttft.p99 < turns.ttft.p99 / 2


def test_prefix_aware_routing_finds_more_in_the_cache():
    trace = traffic(
        count=300, rate=40.0, prompt="10:30", output="4:8", prefix_groups=16, prefix_tokens=128
    )
    deployment = config(blocks=60, seqs=4, num_replicas=4, budget=256)
    rates = {
        router: simulate(trace, dataclasses.replace(deployment, router=router), MODEL)
        .summary()
        .prefix_hit_rate
        for router in ("round-robin", "least-loaded", "prefix-aware")
    }
    assert rates["prefix-aware"] > 1.3 * max(rates["round-robin"], rates["least-loaded"])
    off = dataclasses.replace(deployment, enable_prefix_caching=False)
    assert simulate(trace, off, MODEL).summary().prefix_hit_rate == 0.0


def test_shared_blocks_are_only_the_whole_ones_of_the_prefix():
    # 50 tokens of prefix are three blocks of 16 and a part that is never shared.
    trace = [TraceRequest(float(i), 80, 2, "a", 50) for i in range(2)]
    result = simulate(trace, config(), MODEL)
    assert result.cached_tokens.tolist() == [0, 48]


def test_what_can_never_fit_is_refused():
    trace = [TraceRequest(0.0, 10, 10), TraceRequest(0.0, 400, 1), TraceRequest(0.1, 300, 90)]
    result = simulate(trace, config(blocks=20), MODEL)
    assert result.replica.tolist() == [0, -1, -1]
    summary = result.summary()
    assert (summary.num_finished, summary.num_refused) == (1, 2)


def test_processes_change_nothing():
    deployment = config(num_replicas=3)
    trace = traffic(count=50, rate=30.0, prefix_groups=2, prefix_tokens=40)
    alone = simulate(trace, deployment, MODEL)
    shared = simulate(trace, deployment, MODEL, processes=2)
    same(dataclasses.replace(alone, wall_seconds=0), dataclasses.replace(shared, wall_seconds=0))
    assert (shared.num_finishes == 1).all()


def test_asynchronous_scheduling_ends_every_request_too():
    trace = traffic(count=40)
    result = simulate(trace, config(async_scheduling=True), MODEL)
    assert (result.num_finishes == 1).all()
    plain = simulate(trace, config(), MODEL)
    assert (result.output_tokens == plain.output_tokens).all()
    assert result.summary().duration == pytest.approx(plain.summary().duration, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: config(num_replicas=65), "num_replicas=65"),
        (lambda: config(num_replicas=0), "num_replicas=0"),
        (lambda: config(blocks=1), "num_blocks=1"),
        (lambda: config(seqs=100, budget=64), "max_num_batched_tokens=64"),
        (lambda: simulate([], config(), MODEL), "no requests"),
        (
            lambda: simulate([TraceRequest(1.0, 1, 1), TraceRequest(0.0, 1, 1)], config(), MODEL),
            "order",
        ),
        (lambda: simulate([TraceRequest(1.0, 1, 1)], config(router="x"), MODEL), "router='x'"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        change()


def test_features_of_a_mixed_step():
    from jaxllm.engine.step_plan import StepPlan

    plan = StepPlan()
    for start, count in ((9, 1), (19, 1), (0, 4), (16, 8)):
        plan.add(None, start, count, True, False)  # type: ignore[arg-type]
    assert plan_features(plan) == (12, 2, 30, 10 + 8 * 16 + 36)
