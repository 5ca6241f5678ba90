"""Random traffic against the plain reference; invariants after every step."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.engine.request import FinishReason
from jaxllm.errors import CapacityError
from tests.engine.stub_runner import EOS, make_core, make_request, reference_output

MAX_MODEL_LEN = 40
# Few distinct prompts, so that prefixes are shared often.
PREFIXES = [[1, 1, 1, 1, 2, 2, 2, 2, 3, 3], [1, 1, 1, 1, 2, 2, 2, 4], [5] * 17, []]


class Traffic(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 3, 4]),
        seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 20),
        policy=st.sampled_from(["fcfs", "priority"]),
        async_scheduling=st.booleans(),
        caching=st.booleans(),
        threshold=st.sampled_from([0, 3]),
    )
    def start(
        self,
        num_blocks,
        block_size,
        seqs,
        extra_budget,
        policy,
        async_scheduling,
        caching,
        threshold,
    ):
        self.core = make_core(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=seqs,
            budget=seqs + extra_budget,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            async_scheduling=async_scheduling,
            caching=caching,
            long_prefill_token_threshold=threshold,
        )
        self.requests = []

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=5),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, "x"]),
        priority=st.integers(0, 3),
        ignore_eos=st.booleans(),
    )
    def add(self, prefix, tail, max_tokens, salt, priority, ignore_eos):
        request = make_request(
            str(len(self.requests)),
            prefix + tail,
            max_tokens,
            self.core,
            eos=frozenset({EOS, 11, 23}),
            ignore_eos=ignore_eos,
            cache_salt=salt,
            priority=priority,
        )
        try:
            self.core.add(request)
        except CapacityError:
            return
        self.requests.append(request)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.core.step()

    @precondition(lambda self: self.core.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        ids = sorted(self.core.scheduler.requests)
        self.core.abort([data.draw(st.sampled_from(ids))])

    @precondition(lambda self: hasattr(self, "core"))
    @rule()
    def reset_cache(self):
        self.core.reset_prefix_cache(preempt_running=True)

    @invariant()
    def blocks_are_counted(self):
        if not hasattr(self, "core"):
            return
        scheduler = self.core.scheduler
        pool = scheduler.pool
        pool.check()
        assert pool.num_used + pool.num_free == pool.num_blocks - 1
        held = Counter(block for r in scheduler.running for block in r.block_ids)
        assert {b: n for b, n in enumerate(pool.ref_counts) if n} == dict(held)
        assert len({r.slot for r in scheduler.running}) == len(scheduler.running)
        assert all(r.slot == -1 and not r.block_ids for r in scheduler.waiting)
        assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)

    def teardown(self):
        if not hasattr(self, "core"):
            return
        # Nobody starves: traffic has ended, so everything must, within a bound.
        bound = 50 + sum(60 * (1 + r.max_total_tokens) for r in self.requests)
        for _ in range(bound):
            if not self.core.has_unfinished:
                break
            self.core.step()
        self.core.drain()
        assert not self.core.has_unfinished
        assert self.core.scheduler.pool.num_used == 0
        for request in self.requests:
            expected = reference_output(
                request.token_ids[: request.num_prompt_tokens],
                request.max_total_tokens,
                request.eos_token_ids,
            )
            got = request.output_token_ids
            if request.finish_reason is FinishReason.ABORT:
                assert got == expected[: len(got)]
            else:
                assert got == expected


Traffic.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTraffic = Traffic.TestCase
