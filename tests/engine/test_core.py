import pytest

from tests.engine.stub_runner import make_core, make_request, reference_output, run

PROMPTS = [[i % 5, *range(i)] for i in range(1, 14)]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("num_blocks", "budget"), [(64, 64), (64, 8), (14, 16)])
def test_outputs_equal_the_reference(async_scheduling, caching, num_blocks, budget):
    core = make_core(
        num_blocks=num_blocks, budget=budget, max_model_len=40,
        async_scheduling=async_scheduling, caching=caching,
    )  # fmt: skip
    requests = [make_request(str(i), p, 6 + i, core) for i, p in enumerate(PROMPTS)]
    for request in requests:
        core.add(request)
    run(core)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        expected = reference_output(prompt, request.max_total_tokens, frozenset())
        assert request.output_token_ids == expected


def test_the_asynchronous_loop_dispatches_ahead():
    core = make_core(async_scheduling=True)
    core.add(make_request("a", [1, 2, 3], 4, core))
    assert core.step() == []
    assert len(core.step()) == 1
    assert len(core.runner.plans) == 2


def test_no_step_is_spent_past_max_tokens():
    for async_scheduling in (False, True):
        core = make_core(async_scheduling=async_scheduling)
        core.add(make_request("a", [1, 2, 3], 4, core))
        run(core)
        assert len(core.runner.plans) == 4


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_abort_frees_everything_at_any_time(async_scheduling):
    for steps in range(6):
        core = make_core(budget=6, async_scheduling=async_scheduling)
        kept = make_request("kept", [1, 2, 3], 9, core)
        core.add(kept)
        core.add(make_request("gone", list(range(14)), 9, core))
        for _ in range(steps):
            core.step()
        outputs = core.abort(["gone", "unknown"])
        assert [o.finish_reason for o in outputs] == ["abort"]
        run(core)
        assert core.abort(["gone"]) == []
        assert kept.output_token_ids == reference_output([1, 2, 3], 12, frozenset())
        assert core.scheduler.pool.num_used == 0
        core.scheduler.pool.check()


def test_a_failed_step_leaves_a_core_that_works_after_reset():
    core = make_core(async_scheduling=True)
    core.add(make_request("a", [1, 2, 3], 9, core))
    core.step()
    core.runner.fail_next = True
    with pytest.raises(RuntimeError, match="device lost"):
        core.step()
    core.reset()
    assert not core.has_unfinished
    again = make_request("a", [1, 2, 3], 9, core)
    core.add(again)
    run(core)
    assert again.output_token_ids == reference_output([1, 2, 3], 12, frozenset())


def test_stepping_an_idle_core_does_nothing():
    core = make_core()
    assert core.step() == []
    assert core.runner.plans == []
