from jaxllm.engine.prefix_cache import ROOT_HASH, hash_block
from tests.engine.stub_runner import make_core, make_request, run


def test_first_request_gets_the_first_blocks_and_the_second_shares_the_full_ones():
    core = make_core(num_blocks=11, block_size=16, budget=512, max_model_len=512)
    prefix = list(range(48))
    first = make_request("a", [*prefix, 1, 2, 3], core=core)
    core.add(first)
    core.step()
    assert first.block_ids == [1, 2, 3, 4]
    assert first.num_cached_tokens == 0
    second = make_request("b", [*prefix, 4, 5], core=core)
    core.add(second)
    core.step()
    assert second.block_ids == [1, 2, 3, 5]
    assert second.num_cached_tokens == 48
    assert [core.scheduler.pool.ref_counts[b] for b in (1, 2, 3)] == [2, 2, 2]


def test_requests_admitted_in_one_step_share_too():
    core = make_core(budget=64)
    prompts = [[*range(12), i] for i in range(4)]
    for i, prompt in enumerate(prompts):
        core.add(make_request(str(i), prompt, core=core))
    core.step()
    assert core.scheduler.stats.prefix_hits == 3 * 12


def test_a_fully_cached_prompt_recomputes_its_last_block():
    core = make_core()
    prompt = list(range(16))
    core.add(make_request("a", prompt, 1, core))
    run(core)
    again = make_request("b", prompt, 1, core)
    core.add(again)
    core.step()
    assert again.num_cached_tokens == 12


def test_outputs_are_cached_as_well():
    core = make_core()
    first = make_request("a", [1, 2, 3], 10, core)
    core.add(first)
    run(core)
    turn = make_request("b", [*first.token_ids, 5], 1, core)
    core.add(turn)
    run(core)
    assert turn.num_cached_tokens == 12


def test_a_salt_breaks_the_whole_chain():
    tokens = list(range(4))
    plain, salted = hash_block(ROOT_HASH, tokens), hash_block(ROOT_HASH, tokens, "salt")
    assert plain != salted
    assert hash_block(plain, tokens) != hash_block(salted, tokens)
    core = make_core()
    hits = []
    for i, salt in enumerate([None, "x", "x", None, ""]):
        request = make_request(str(i), list(range(13)), 1, core, cache_salt=salt)
        core.add(request)
        run(core)
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 12, 12, 0]


def test_hashes_depend_on_every_part():
    base = hash_block(ROOT_HASH, [1, 2, 3, 4])
    others = [
        hash_block(base, [1, 2, 3, 4]),
        hash_block(ROOT_HASH, [1, 2, 4, 3]),
        hash_block(ROOT_HASH, [1, 2, 3]),
        hash_block(ROOT_HASH, [1, 2, 3, 4], ""),
    ]
    assert len({base, *others}) == 5


def test_no_hit_with_caching_off():
    core = make_core(caching=False)
    for i in range(2):
        request = make_request(str(i), list(range(13)), 1, core)
        core.add(request)
        run(core)
        assert request.num_cached_tokens == 0
    assert core.scheduler.stats.prefix_queries == 0


def test_shared_blocks_are_not_evicted_while_in_use():
    core = make_core(num_blocks=9, block_size=4, max_model_len=32)
    shared = list(range(8))
    holder = make_request("holder", [*shared, 1], 20, core)
    core.add(holder)
    core.step()
    held = holder.block_ids[:2]
    sharer = make_request("sharer", [*shared, 2], 4, core)
    core.add(sharer)
    core.step()
    assert sharer.block_ids[:2] == held
    run(core)
    core.scheduler.pool.check()
    assert core.scheduler.pool.num_used == 0


def test_reset_is_refused_with_running_requests_unless_they_are_preempted():
    core = make_core()
    requests = [make_request(str(i), [i, 1, 2, 3, 4, 5], 6, core) for i in range(3)]
    for request in requests:
        core.add(request)
    core.step()
    assert not core.reset_prefix_cache()
    assert core.reset_prefix_cache(preempt_running=True)
    assert [r.request_id for r in core.scheduler.waiting] == ["0", "1", "2"]
    assert core.scheduler.pool.num_used == 0
    run(core)
    assert all(r.num_output_tokens == 6 for r in requests)


def test_preempted_requests_stay_out_of_the_hit_rate():
    core = make_core()
    core.add(make_request("a", list(range(9)), 6, core))
    core.step()
    queries = core.scheduler.stats.prefix_queries
    core.reset_prefix_cache(preempt_running=True)
    run(core)
    assert core.scheduler.stats.prefix_queries == queries
