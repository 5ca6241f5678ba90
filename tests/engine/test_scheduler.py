import pytest

from jaxllm.engine.request import FinishReason, RequestStatus
from jaxllm.engine.scheduler import SchedulerConfig
from jaxllm.errors import CapacityError, ConfigError
from tests.engine.stub_runner import EOS, make_core, make_request, reference_output, run


def counts_of(core) -> dict[str, int]:
    plan = core.runner.plans[-1]
    return {r.request_id: n for r, n in zip(plan.requests, plan.counts, strict=True)}


def add(core, *requests):
    for request in requests:
        core.add(request)


def test_fresh_requests_run_whole_in_order_of_arrival():
    core = make_core(num_blocks=200, budget=1024, max_num_seqs=16)
    add(core, *(make_request(str(i), [i] * 10, core=core) for i in range(10)))
    core.step()
    assert counts_of(core) == {str(i): 10 for i in range(10)}
    assert list(counts_of(core)) == [str(i) for i in range(10)]


def big_core(**options):
    return make_core(
        num_blocks=1000, block_size=16, budget=1024, max_model_len=4096, caching=False, **options
    )


def test_long_prompts_are_cut_to_threshold_and_budget():
    core = big_core(long_prefill_token_threshold=400)
    add(core, *(make_request(name, [1] * 800, core=core) for name in "abc"))
    core.step()
    assert counts_of(core) == {"a": 400, "b": 400, "c": 224}
    core.step()
    assert counts_of(core) == {"a": 400, "b": 400, "c": 224}
    core.step()
    assert counts_of(core) == {"a": 1, "b": 1, "c": 352}


def test_the_threshold_spares_a_lone_request():
    core = big_core(long_prefill_token_threshold=400)
    add(core, make_request("lone", [1] * 2000, core=core))
    core.step()
    assert counts_of(core) == {"lone": 1024}
    core = big_core(long_prefill_token_threshold=400)
    add(core, make_request("long", [1] * 2000, core=core), make_request("b", [1] * 10, core=core))
    core.step()
    assert counts_of(core) == {"long": 400, "b": 10}


def test_without_chunking_a_prompt_waits_for_room():
    core = make_core(
        num_blocks=100, block_size=16, budget=100, max_model_len=100, enable_chunked_prefill=False
    )
    add(core, make_request("a", [1] * 60, core=core), make_request("b", [2] * 60, core=core))
    core.step()
    assert counts_of(core) == {"a": 60}
    core.step()
    assert counts_of(core) == {"a": 1, "b": 60}


def test_without_chunking_the_budget_must_hold_a_full_prompt():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=32 is below max_model_len=64"):
        SchedulerConfig(4, 32, 64, 4, enable_chunked_prefill=False)


def test_decodes_get_their_token_before_a_prompt_takes_the_rest():
    core = make_core(num_blocks=100, budget=16, max_model_len=128)
    add(core, make_request("a", [1] * 4, core=core))
    core.step()
    add(core, make_request("b", [2] * 60, core=core))
    core.step()
    assert counts_of(core) == {"a": 1, "b": 15}


def test_max_num_seqs_limits_admission():
    core = make_core(max_num_seqs=2)
    add(core, *(make_request(str(i), [i, 1], core=core) for i in range(5)))
    core.step()
    assert len(core.scheduler.running) == 2
    assert len(core.scheduler.waiting) == 3
    outputs = run(core)
    assert set(outputs) >= {"2", "3", "4"}


def test_eos_ends_with_stop_and_no_reason():
    core = make_core()
    request = make_request("a", [3, 1, 4], 500, core, eos=frozenset({EOS}), ignore_eos=False)
    core.add(request)
    run(core)
    expected = reference_output([3, 1, 4], core.config.max_model_len, frozenset({EOS}))
    assert request.output_token_ids == expected
    if expected[-1] == EOS:
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)


def test_a_stop_id_is_the_stop_reason_and_nothing_follows_it():
    free = reference_output([3, 1, 4], 40, frozenset())
    stop = free[5]
    core = make_core()
    request = make_request("a", [3, 1, 4], 30, core, stop_token_ids=(stop,))
    core.add(request)
    run(core)
    assert request.output_token_ids == free[: free.index(stop) + 1]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, stop)


def test_ignore_eos_goes_on_to_the_length():
    free = reference_output([3, 1, 4], 40, frozenset())
    core = make_core()
    request = make_request("a", [3, 1, 4], 20, core, eos=frozenset({free[2]}), ignore_eos=True)
    core.add(request)
    run(core)
    assert request.output_token_ids == free[:20]
    assert request.finish_reason is FinishReason.LENGTH


def test_max_model_len_ends_a_request():
    core = make_core(max_model_len=16)
    request = make_request("a", [1] * 10, 500, core)
    core.add(request)
    run(core)
    assert request.num_tokens == 16
    assert request.finish_reason is FinishReason.LENGTH


def test_a_request_that_can_never_fit_is_refused_with_both_numbers():
    core = make_core(num_blocks=5, block_size=4, max_model_len=64)
    with pytest.raises(CapacityError, match=r"needs 5 KV blocks .* pool holds 4") as caught:
        core.add(make_request("big", [1] * 10, 8, core))
    assert (caught.value.needed, caught.value.available) == (5, 4)
    assert not core.has_unfinished
    # Seventeen tokens need K/V for sixteen: the last one is never fed back.
    core.add(make_request("fits", [1] * 10, 7, core))
    assert len(run(core)["fits"]) == 7


def test_a_duplicate_id_is_refused():
    core = make_core()
    core.add(make_request("a", [1], core=core))
    with pytest.raises(ValueError, match="'a' is already in use"):
        core.add(make_request("a", [2], core=core))


def test_the_last_admitted_is_preempted_and_its_output_is_as_without():
    core = make_core(num_blocks=12, block_size=16, budget=200, max_model_len=176, caching=False)
    first, second = (make_request(n, [i] * 80, 40, core) for i, n in enumerate("ab"))
    add(core, first, second)
    core.step()
    assert len(core.scheduler.running) == 2
    while second.status is RequestStatus.RUNNING:
        core.step()
    assert second.status is RequestStatus.PREEMPTED
    assert second.block_ids == []
    assert core.scheduler.waiting.peek() is second
    run(core)
    assert second.num_preemptions >= 1 and first.num_preemptions == 0
    assert core.scheduler.stats.num_preemptions == second.num_preemptions
    for request, i in ((first, 0), (second, 1)):
        assert request.output_token_ids == reference_output([i] * 80, 120, frozenset())


def test_a_late_token_of_a_preempted_request_is_kept():
    core = make_core(
        num_blocks=12, block_size=16, budget=200, max_model_len=176, async_scheduling=True
    )
    first, second = (make_request(n, [i] * 80, 40, core) for i, n in enumerate("ab"))
    add(core, first, second)
    while second.status is not RequestStatus.PREEMPTED:
        core.step()
        core.scheduler.pool.check()
    run(core)
    assert second.num_preemptions >= 1
    assert second.output_token_ids == reference_output([1] * 80, 120, frozenset())


def test_nothing_is_admitted_in_a_step_that_preempts():
    core = make_core(num_blocks=9, block_size=4, max_num_seqs=4, max_model_len=32)
    add(core, make_request("a", [1] * 14, 18, core), make_request("b", [2] * 14, 18, core))
    core.step()
    core.add(make_request("c", [3], 1, core))
    for _ in range(40):
        before = core.scheduler.stats.num_preemptions
        core.step()
        if core.scheduler.stats.num_preemptions > before:
            assert not core.runner.plans[-1].admitted
    assert core.scheduler.stats.num_preemptions > 0


def test_priority_orders_admission_ties_by_arrival():
    core = make_core(max_num_seqs=1, policy="priority")
    ranks = {"a": 2, "b": 1, "c": 1, "d": 0}
    for i, (name, rank) in enumerate(ranks.items()):
        core.add(make_request(name, [1], 1, core, priority=rank, arrival_time=float(i)))
    order = []
    while core.has_unfinished:
        order += [output.request_id for output in core.step()]
    assert order == ["d", "b", "c", "a"]


def test_the_worst_priority_is_the_victim_even_when_planned_before_others():
    # A (200 tokens, priority 9) runs first; B needs a block; A goes, and C still gets its token.
    core = make_core(num_blocks=17, block_size=16, budget=512, max_model_len=256, policy="priority")
    a = make_request("A", [1] * 200, 20, core, priority=9, arrival_time=0.0)
    core.add(a)
    core.step()
    b = make_request("B", [2] * 31, 40, core, priority=0, arrival_time=1.0)
    c = make_request("C", [3], 40, core, priority=1, arrival_time=2.0)
    add(core, b, c)
    core.step()
    while a.status is RequestStatus.RUNNING:
        core.step()
        core.scheduler.pool.check()
    assert a.status is RequestStatus.PREEMPTED
    assert counts_of(core) == {"B": 1, "C": 1}
    run(core)
    assert a.output_token_ids == reference_output([1] * 200, 220, frozenset())


def test_no_state_is_left_behind():
    core = make_core(num_blocks=20, async_scheduling=True)
    add(core, *(make_request(str(i), [i] * 9, 12, core) for i in range(12)))
    run(core)
    scheduler = core.scheduler
    assert not scheduler.requests and not scheduler.running and len(scheduler.waiting) == 0
    assert scheduler.pool.num_used == 0
    assert sorted(scheduler._free_slots) == list(range(core.config.max_num_seqs))
    scheduler.pool.check()
