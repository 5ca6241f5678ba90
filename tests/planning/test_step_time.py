import dataclasses
import json
import random

import pytest

from jaxllm.errors import ConfigError
from jaxllm.planning.step_time import (
    LinearStepTime,
    StepSample,
    fit_step_time,
    read_samples,
    write_samples,
)

TRUTH = LinearStepTime(2e-3, 3e-5, 1e-4, 2e-8, 5e-9)


def samples(model=TRUTH, count=200, noise=0.0, seed=0):
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        prefill = rng.choice([0, 0, rng.randrange(1, 512)])
        decode = rng.randrange(0 if prefill else 1, 64)
        context = decode * rng.randrange(1, 2000)
        pairs = prefill * rng.randrange(1, 1000)
        seconds = model.seconds(prefill, decode, context, pairs) * (1 + noise * rng.gauss(0, 1))
        found.append(StepSample(prefill, decode, context, seconds, pairs))
    return found


def test_exact_samples_give_the_model_back():
    fit = fit_step_time(samples())
    for field in dataclasses.fields(TRUTH):
        if field.name != "token_buckets":
            want = getattr(TRUTH, field.name)
            assert getattr(fit.model, field.name) == pytest.approx(want, rel=1e-6, abs=1e-15)
    assert fit.mean_error < 1e-9 and fit.num_samples == 200


def test_noise_and_a_compile_do_not_carry_it_away():
    found = samples(noise=0.05)
    found[17] = dataclasses.replace(found[17], seconds=30.0)
    fit = fit_step_time(found)
    assert fit.num_samples == 199
    for prefill, decode, context in ((0, 32, 32000), (256, 0, 0), (128, 16, 8000)):
        want = TRUTH.seconds(prefill, decode, context)
        assert fit.model.seconds(prefill, decode, context) == pytest.approx(want, rel=0.1)


def test_no_cost_is_negative():
    falling = [StepSample(0, n, 10 * n, 1.0 - n / 100) for n in range(1, 50)]
    model = fit_step_time(falling).model
    costs = dataclasses.astuple(model)[:-1]
    assert all(cost >= 0 for cost in costs)
    assert model.base == pytest.approx(0.75)


def test_padding_is_part_of_the_model():
    buckets = (16, 64, 256, 1024)
    padded = LinearStepTime(1e-3, 0, 0, 1e-8, 0, 1e-4, buckets)
    assert padded.seconds(0, 17, 0) == padded.seconds(0, 64, 0) == pytest.approx(7.4e-3)
    fit = fit_step_time(samples(padded), buckets)
    assert fit.model.padded_token == pytest.approx(1e-4, rel=1e-6)
    assert fit.mean_error < 1e-9
    assert fit_step_time(samples(padded)).mean_error > 0.05


def test_files_round_trip(tmp_path):
    path = tmp_path / "steps.json"
    write_samples(path, samples(count=10), (16, 32))
    assert read_samples(path) == (samples(count=10), (16, 32))
    content = json.loads(path.read_text()) | {"machine": "other keys are ignored"}
    path.write_text(json.dumps(content))
    assert len(read_samples(path)[0]) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", "not JSON"),
        ("[]", '"samples"'),
        ('{"samples": [1]}', "sample 0"),
        ('{"samples": [{"prefill_tokens": -1}]}', "prefill_tokens=-1"),
        (
            '{"samples": [{"prefill_tokens": 1, "decode_requests": 0, "context_tokens": 0}]}',
            "seconds=None",
        ),
        ('{"samples": [], "token_buckets": [0]}', "token_buckets"),
    ],
)
def test_wrong_files_are_refused_by_place(tmp_path, content, message):
    path = tmp_path / "steps.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_samples(path)


def test_too_few_samples_are_refused():
    with pytest.raises(ConfigError, match="at least 8"):
        fit_step_time(samples(count=7))
