"""What a request can ask for, on a tiny random model with a tokenizer."""

import json
import re

import numpy as np
import pytest

from jaxllm import LLM, RequestOutputKind, SamplingParams, StructuredOutputs
from jaxllm.beam_search import BeamSearchParams
from jaxllm.errors import ParameterError
from tests.models.families import DATA

PROMPT = {"prompt_token_ids": [5, 9, 14, 40, 41, 42, 7, 8, 30, 31, 32, 33]}
OTHER = {"prompt_token_ids": [60, 61, 5, 9]}


@pytest.fixture(scope="module")
def llm():
    return LLM(
        str(DATA / "tiny_chat"), dtype="float32", max_model_len=160, max_num_seqs=8,
        max_num_batched_tokens=64, block_size=8, kv_cache_memory="8MiB", enforce_eager=True,
        progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def unlimited():
    return LLM(
        str(DATA / "tiny_chat"), dtype="float32", max_model_len=64, max_num_seqs=4,
        max_num_batched_tokens=16, block_size=8, kv_cache_memory="8MiB", enforce_eager=True,
        progress=False, max_logprobs=-1,
    )  # fmt: skip


def one(llm, prompt=PROMPT, **options):
    options = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, **options}
    return llm.generate(prompt, SamplingParams(**options), use_tqdm=False)[0]


def test_stop_strings_cut_the_text_and_end_the_request(llm):
    free = one(llm).outputs[0]
    text = free.text
    stop = text[5:8]
    for include in (False, True):
        output = one(llm, stop=["never there", stop], include_stop_str_in_output=include).outputs[0]
        end = text.index(stop) + (len(stop) if include else 0)
        assert output.text == text[:end]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.token_ids) <= len(free.token_ids)
    assert not llm._engine.core.has_unfinished


def test_nothing_of_a_stop_string_leaks_into_a_stream(llm):
    text = one(llm).outputs[0].text
    stop = text[9:13]
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, stop=stop,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    joined = ""
    for output in llm.stream(PROMPT, params):
        joined += output.outputs[0].text
        assert text[: text.index(stop)].startswith(joined)
    assert joined == text[: text.index(stop)]


def test_min_tokens_holds_off_every_kind_of_end(llm):
    free = one(llm).outputs[0]
    first = free.token_ids[0]
    assert one(llm, stop_token_ids=[first]).outputs[0].token_ids == [first]
    held = one(llm, stop_token_ids=[first], min_tokens=6).outputs[0]
    assert len(held.token_ids) >= 6 and first not in held.token_ids[:6]
    by_string = one(llm, stop=free.text[0], min_tokens=4).outputs[0]
    assert len(by_string.token_ids) > 4
    with pytest.raises(ParameterError, match="min_tokens=150: the prompt leaves room for 148"):
        one(llm, max_tokens=None, min_tokens=150)


def test_allowed_ids_bias_and_bad_words_steer_the_output(llm):
    allowed = [20, 21, 22]
    assert set(one(llm, allowed_token_ids=allowed).outputs[0].token_ids) <= set(allowed)
    assert set(one(llm, logit_bias={77: 100}).outputs[0].token_ids) == {77}
    free = one(llm).outputs[0]
    word = llm.get_tokenizer().decode(free.token_ids[:2])
    steered = one(llm, bad_words=[word]).outputs[0]
    assert word not in steered.text
    with pytest.raises(ParameterError, match="allowed_token_ids=100000"):
        one(llm, allowed_token_ids=[100000])


def test_penalties_change_what_repeats(llm):
    biased = {"logit_bias": {77: 100.0}}
    assert set(one(llm, **biased).outputs[0].token_ids) == {77}
    softened = one(llm, temperature=1.0, seed=3, frequency_penalty=2.0, presence_penalty=2.0,
                   max_tokens=40).outputs[0].token_ids  # fmt: skip
    plain = one(llm, temperature=1.0, seed=3, max_tokens=40).outputs[0].token_ids
    assert len(set(softened)) > len(set(plain))


def test_logprobs_are_those_of_the_prompt_pass(llm):
    """Sampled log probabilities equal those of a forward pass over the finished text."""
    output = one(llm, temperature=0.8, seed=5, logprobs=3)
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)
    for entry, token in zip(completion.logprobs, completion.token_ids, strict=True):
        assert 3 <= len(entry) <= 4
        assert next(iter(entry)) == token
        top = sorted(entry.values(), key=lambda e: e.rank)
        assert [e.logprob for e in top] == sorted((e.logprob for e in top), reverse=True)
    whole = {"prompt_token_ids": output.prompt_token_ids + completion.token_ids}
    again = one(llm, whole, max_tokens=1, prompt_logprobs=3)
    assert again.prompt_logprobs[0] is None
    start = len(output.prompt_token_ids)
    for i, token in enumerate(completion.token_ids):
        assert again.prompt_logprobs[start + i][token].logprob == pytest.approx(
            completion.logprobs[i][token].logprob, abs=1e-4
        )
    total = sum(completion.logprobs[i][t].logprob for i, t in enumerate(completion.token_ids))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_zero_logprobs_give_the_sampled_token_and_more_than_the_limit_are_refused(llm):
    vocab = llm._engine.model_config.vocab_size
    assert all(len(e) == 1 for e in one(llm, logprobs=0).outputs[0].logprobs)
    with pytest.raises(ParameterError, match="logprobs=21: at most 20"):
        one(llm, logprobs=21)
    for field in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ParameterError, match=f"{field}=-1: stands for {vocab} tokens; at most"):
            one(llm, **{field: -1})


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_without_a_limit_any_number_and_the_whole_vocabulary_can_be_had(unlimited, field):
    vocab = unlimited._engine.model_config.vocab_size

    def entries(count):
        output = one(unlimited, max_tokens=2, **{field: count})
        found = output.outputs[0].logprobs if field == "logprobs" else output.prompt_logprobs[1:]
        assert len(found) == (2 if field == "logprobs" else 11)
        return found

    def by_rank(entry):
        return [e.logprob for e in sorted(entry.values(), key=lambda e: e.rank)]

    everything = entries(-1)
    assert all(len(entry) == vocab for entry in everything)
    assert sum(np.exp(e.logprob) for e in everything[0].values()) == pytest.approx(1, abs=1e-4)
    # 20 are what a program of their own returns.
    for count in (19, 20, 21, 25, vocab, vocab + 7):
        for whole, some in zip(everything, entries(count), strict=True):
            token = next(iter(some))
            others = {t: e for t, e in some.items() if e.rank <= count}
            assert len(others) == min(count, vocab)
            assert set(some) == {token, *others}
            assert by_rank(others) == pytest.approx(by_rank(whole)[:count], abs=1e-5)
            expected = [whole[t].logprob for t in some]
            assert [e.logprob for e in some.values()] == pytest.approx(expected, abs=1e-5)


def test_a_start_without_a_limit_has_the_programs_of_the_whole_vocabulary(llm, unlimited):
    few, more = (engine._engine.runner.programs for engine in (llm, unlimited))
    for programs, variants in ((few, {0}), (more, {0, 1})):
        keys = [key for key in programs.keys() if key.kind == "logprobs"]  # noqa: SIM118
        sizes = {key.size for key in keys}
        assert {(key.size, key.variant) for key in keys} == {
            (s, v) for s in sizes for v in variants
        }
    assert few.num_top == more.num_top == 20
    assert [more.logprob_variant(wanted) for wanted in ([20, 0], [0, 21], [-1])] == [0, 1, 1]


def test_a_neighbour_that_wants_the_whole_vocabulary_changes_nothing(unlimited):
    llm = unlimited
    alone = one(llm, logprobs=3, prompt_logprobs=2)
    options = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    few = SamplingParams(**options, logprobs=3, prompt_logprobs=2)
    everything = SamplingParams(**options, logprobs=-1)
    none = SamplingParams(**options, logprobs=0)
    first, _, last = llm.generate([PROMPT, OTHER, PROMPT], [few, everything, none], use_tqdm=False)
    assert [len(e) for e in last.outputs[0].logprobs] == [1] * 20
    pairs = zip(alone.outputs[0].logprobs, first.outputs[0].logprobs, strict=True)
    for one_entry, other in pairs:
        assert list(one_entry) == list(other)
        assert [e.rank for e in one_entry.values()] == [e.rank for e in other.values()]
        assert all(one_entry[t].logprob == pytest.approx(other[t].logprob, abs=1e-4) for t in other)


def test_logprobs_do_not_change_the_text_and_cached_prefixes_not_the_logprobs(llm):
    plain = one(llm).outputs[0].token_ids
    for _ in range(2):
        output = one(llm, logprobs=5, prompt_logprobs=2)
        assert output.outputs[0].token_ids == plain
        assert output.num_cached_tokens == 0
        assert len(output.prompt_logprobs) == 12


def test_prompt_logprobs_survive_chunking(llm):
    long = {"prompt_token_ids": [i % 200 + 3 for i in range(140)]}
    alone = one(llm, long, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    crowd = llm.generate([long] * 3 + [PROMPT], params, use_tqdm=False)
    for output in crowd[:3]:
        for a, b in zip(alone[1:], output.prompt_logprobs[1:], strict=True):
            assert a.keys() == b.keys()
            assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in a)


def test_score_is_the_log_probability_of_the_continuation(llm):
    output = one(llm, logprobs=0)
    completion = output.outputs[0]
    score = llm.score(PROMPT, completion.token_ids)
    assert score.token_ids == completion.token_ids
    assert score.total == pytest.approx(completion.cumulative_logprob, abs=1e-3)


def test_beams_are_sorted_distinct_and_scored_as_they_are(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    beams = llm.beam_search(PROMPT, params)[0].beams
    assert len({tuple(beam.token_ids) for beam in beams}) == 3
    logprobs = [beam.cumulative_logprob for beam in beams]
    assert logprobs == sorted(logprobs, reverse=True)
    for beam in beams:
        assert llm.score(PROMPT, beam.token_ids).total == pytest.approx(
            beam.cumulative_logprob, abs=1e-3
        )
    # One beam is greedy search.
    single = BeamSearchParams(beam_width=1, max_tokens=5, ignore_eos=True)
    assert llm.beam_search(PROMPT, single)[0].beams[0].token_ids == (
        one(llm, max_tokens=5).outputs[0].token_ids
    )


@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        ({"regex": "[ab]{3,5}"}, lambda t: re.fullmatch("[ab]{3,5}", t)),
        ({"choice": ["yes", "no", "perhaps"]}, lambda t: t in ("yes", "no", "perhaps")),
        (
            {"json": {"type": "object", "properties": {"a": {"type": "boolean"}},
                      "required": ["a"], "additionalProperties": False},
             "disable_any_whitespace": True},
            lambda t: isinstance(json.loads(t)["a"], bool),
        ),
    ],
    ids=["regex", "choice", "json"],
)  # fmt: skip
def test_structured_outputs_follow_their_grammar(llm, constraint, check):
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=60, structured_outputs=StructuredOutputs(**constraint)
    )
    outputs = llm.generate([PROMPT, OTHER, PROMPT], [params, params, params], use_tqdm=False)
    for output in outputs:
        completion = output.outputs[0]
        assert completion.finish_reason == "stop", completion
        assert check(completion.text), completion.text


def test_a_bad_grammar_is_refused_and_the_engine_goes_on(llm):
    with pytest.raises(ValueError):
        one(llm, structured_outputs=StructuredOutputs(regex="("))
    assert len(one(llm).outputs[0].token_ids) == 20


def test_a_truncated_prompt_keeps_its_end(llm):
    assert one(llm, truncate_prompt_tokens=5).prompt_token_ids == PROMPT["prompt_token_ids"][-5:]


def test_an_aborted_request_ends_with_all_its_samples(llm):
    params = SamplingParams(temperature=1, n=3, seed=1, max_tokens=100, ignore_eos=True)
    last = None
    for count, output in enumerate(llm.stream([PROMPT, OTHER], params)):
        if count == 10:
            llm.abort("unknown")
            llm.abort([output.request_id])
            aborted = output.request_id
        if count >= 10 and output.request_id == aborted:
            last = output
        if last is not None and last.finished:
            break
    assert [c.finish_reason for c in last.outputs] == ["abort"] * 3
    assert llm._engine.core.scheduler.pool.num_used == 0


def test_an_aborted_stream_says_so(llm):
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = []
    for output in llm.stream([PROMPT, OTHER], [params, params]):
        outputs.append(output)
        if len(outputs) == 4:
            llm.abort(output.request_id)
    reasons = [o.outputs[0].finish_reason for o in outputs if o.finished]
    assert sorted(reasons) == ["abort", "length"]
    assert llm._engine.core.scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    ("settings", "temperature", "logged"),
    [
        ({}, 0.6, "temperature=0.6, top_k=40, max_tokens=64 from generation_config.json"),
        ({"generation_config": "none"}, 1.0, "the general ones"),
    ],
    ids=["auto", "none"],
)
def test_the_defaults_in_force_are_logged_once(tmp_path, caplog, settings, temperature, logged):
    (tmp_path / "config.json").write_text((DATA / "llama2" / "config.json").read_text())
    generation = {"temperature": 0.6, "top_k": 40, "top_p": None, "max_new_tokens": 64}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with caplog.at_level("INFO", logger="jaxllm"):
        started = LLM(
            str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=64,
            kv_cache_memory="4MiB", enforce_eager=True, progress=False, **settings,
        )  # fmt: skip
    lines = [m for m in caplog.messages if m.startswith("default sampling parameters:")]
    assert lines == [f"default sampling parameters: {logged}"]
    assert started.get_default_sampling_params().temperature == temperature
