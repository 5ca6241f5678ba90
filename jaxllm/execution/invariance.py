"""The check behind `batch_invariant`: a request's bits must not depend on what shares its steps.

Before anything is served, one request is run whole, in parts, behind another request and in the
buckets whose programs are likeliest to differ (the small ones: compilers treat few rows apart).
Hidden states, logits, draws and log probabilities are compared bit for bit. This is a test with
random tokens on this machine, not a proof; what is built to hold is said in docs/engine.md.
"""

import dataclasses

import jax
import numpy as np

from jaxllm.engine.request import Request
from jaxllm.engine.step_plan import StepPlan
from jaxllm.errors import ConfigError
from jaxllm.execution.batch import NEEDS, SamplingFields
from jaxllm.execution.programs import ProgramKey
from jaxllm.execution.runner import Runner
from jaxllm.sampling_params import SamplingParams

# Tokens of the request: more than attention takes in one step of its loop.
MOST_TOKENS = 160
# Forward programs up to this size are all checked, of the larger ones only the reference.
LARGEST_CHECKED = 64


def check_batch_invariance(runner: Runner) -> None:
    """Compares bits as described above; leaves the runner with empty slots.

    Raises:
      ConfigError: some program gives other bits; the message names it.
    """
    hidden = _check_forward(runner)
    logits = _check_logits(runner, hidden)
    _check_rows(runner, logits)
    runner.reset()


def _check_forward(runner: Runner) -> np.ndarray:
    """Hidden states [N, hidden] of the request, after comparing every way to compute them."""
    config = runner.config
    sizes = _sizes(runner, "forward")
    has_company = config.max_num_seqs > 1 and config.num_blocks > 2
    blocks = (config.num_blocks - 1) // (1 + has_company)
    most = min(MOST_TOKENS, config.max_model_len - 1, blocks * config.block_size, max(sizes))
    reference = min(size for size in sizes if size >= most)
    ids = np.random.default_rng(0).integers(runner.model.config.vocab_size, size=(2, most))
    subject, company = (_request(runner, slot, row.tolist()) for slot, row in enumerate(ids))

    def run(size: int, start: int, num_before: int) -> np.ndarray:
        plan = StepPlan()
        if num_before:
            plan.add(company, 0, num_before, samples=False, from_device=False)
        plan.add(subject, start, most - start, samples=False, from_device=False)
        plan.admitted = list(plan.requests)
        hidden = runner.hidden_states(plan, ProgramKey("forward", size))
        return hidden[num_before : num_before + most - start]

    expected = run(reference, 0, 0)
    for size in sizes:
        if size > LARGEST_CHECKED and size != reference:
            continue
        for count in {min(size, most), min(size, -(-most // 2)), 1}:
            befores = {0}
            if has_company:
                befores.add(min(size - count, most))
            for num_before in befores:
                found = run(size, most - count, num_before)
                where = f"{count} tokens behind {num_before} others"
                _compare(runner, ProgramKey("forward", size), where, found, expected[-count:])
    return expected


def _request(runner: Runner, slot: int, token_ids: list[int]) -> Request:
    config = runner.config
    params = SamplingParams(temperature=0)
    request = Request(str(slot), token_ids, params, max_model_len=config.max_model_len)
    num_blocks = -(-len(token_ids) // config.block_size)
    request.slot = slot
    request.block_ids = list(range(1 + slot * num_blocks, 1 + (slot + 1) * num_blocks))
    return request


def _check_logits(runner: Runner, hidden: np.ndarray) -> np.ndarray:
    """Logits [S, V] of hidden states [N, hidden], repeated to S = max_num_seqs rows."""
    num_rows = runner.config.max_num_seqs
    rows = np.resize(hidden, (num_rows, hidden.shape[1]))

    def run(size: int, rows: np.ndarray) -> np.ndarray:
        head = {name: runner.params[name] for name in runner.model.head_names}
        return np.asarray(runner.programs[ProgramKey("logits", size)](head, _put(runner, rows)))

    expected = run(num_rows, rows)
    for size in _sizes(runner, "logits"):
        key = ProgramKey("logits", size)
        _compare(runner, key, "the first rows", run(size, rows), expected[:size])
        _compare(runner, key, "the last rows", run(size, rows[::-1].copy()), expected[::-1][:size])
    return expected


def _check_rows(runner: Runner, logits: np.ndarray) -> None:
    """Compares draws and log probabilities of the same rows at every number of rows."""
    num_rows = len(logits)
    place = np.arange(num_rows)
    rng = np.random.default_rng(1)

    def bits(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32).view(np.int32)

    fields = SamplingFields(
        rows=place,
        slots=place,
        uniform=bits(rng.random(num_rows)),
        temperature=bits(np.array([0.7, 1.0, 1.5])[place % 3]),
        top_k=np.array([0, 20, 0, 0])[place % 4],
        top_p=bits(np.array([0.9, 1.0, 1.0, 0.999])[place % 4]),
        min_p=bits(np.array([0.0, 0.0, 0.0, 0.02, 0.0])[place % 5]),
    )
    sampling = np.stack([getattr(fields, f.name) for f in dataclasses.fields(fields)])
    tokens = rng.integers(logits.shape[1], size=num_rows).astype(np.int32)

    def run(key: ProgramKey, order: np.ndarray) -> list[np.ndarray]:
        rows = [_put(runner, logits[order][: key.size])]
        fields_of_rows = _put(runner, sampling[:, order].astype(np.int32).reshape(-1))
        if key.kind == "sample":
            slots = _put(runner, np.zeros(num_rows + 1, np.int32))
            results = runner.programs[key](*rows, fields_of_rows, slots)[:2]
        else:
            rows.append(_put(runner, tokens[order][: key.size]))
            rows.append(_put(runner, np.full(key.size, -np.inf, np.float32)))
            results = runner.programs[key](*rows, fields_of_rows)
        return [np.asarray(result) for result in results]

    kinds = [("sample", need) for need in range(1, len(NEEDS))]
    kinds += [("logprobs", variant) for variant in runner.programs.logprob_variants]
    for kind, variant in kinds:
        expected = run(ProgramKey(kind, num_rows, variant), place)
        for size in _sizes(runner, kind):
            for order in (place, place[::-1]):
                key = ProgramKey(kind, size, variant)
                for one, other in zip(run(key, order), expected, strict=True):
                    _compare(runner, key, "its rows", one, other[order][:size])


def _sizes(runner: Runner, kind: str) -> list[int]:
    keys = runner.programs.keys()
    return sorted({key.size for key in keys if key.kind == kind})


def _put(runner: Runner, array: np.ndarray) -> jax.Array:
    return jax.device_put(array, runner.programs.replicated)


def _compare(
    runner: Runner, key: ProgramKey, where: str, found: np.ndarray, expected: np.ndarray
) -> None:
    if found.tobytes() == expected.tobytes():
        return
    programs = runner.programs
    raise ConfigError(
        f"batch_invariant=True cannot be held here: on {programs.platform}, with "
        f"{programs.plan.impl} attention on {programs.mesh.size} device(s), the {key.kind} program "
        f"of {key.size} gives other bits for {where}; it is built to hold on one CPU device with "
        "the C++ kernels (attention_backend=cpu, JAXLLM_CPU_KERNELS not xla)"
    )
