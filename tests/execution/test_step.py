"""The paged step against recorded logits: one chunk, many, token by token, mixed."""

import numpy as np
import pytest

from pallas_kernels.paged_attention.registry import available_implementations
from tests.execution.harness import Harness
from tests.models.families import FAMILIES, load

TOLERANCE = {"atol": 1e-4, "rtol": 0}
# What a step adds to a model is the same for every kind of rope; models/test_llama.py has them all.
STEPPED = [name for name in FAMILIES if not name.startswith("rope_") or name == "rope_llama3"]
# With windows; those without go through this implementation where the C++ kernel takes them not.
XLA_FAMILIES = ["mistral"]


def cases():
    # The C++ kernel takes head sizes in multiples of 16; each family goes through one of the two.
    by_cpu = []
    if available_implementations()["cpu"] is None:
        by_cpu = [name for name in STEPPED if load(name).model.config.head_dim % 16 == 0]
    by_xla = [name for name in STEPPED if name not in by_cpu or name in XLA_FAMILIES]
    return [(name, "cpu") for name in by_cpu] + [(name, "xla") for name in by_xla]


@pytest.fixture(scope="module", params=cases(), ids=lambda case: "-".join(case))
def recorded_and_impl(request):
    name, impl = request.param
    return load(name), impl


def check(recorded, index, start, logits):
    _, expected = recorded.sequences[index % len(recorded.sequences)]
    np.testing.assert_allclose(logits, expected[start : start + len(logits)], **TOLERANCE)


def test_every_way_of_cutting_gives_the_recorded_logits(recorded_and_impl):
    recorded, impl = recorded_and_impl
    harness = Harness(recorded, impl)
    lengths = [len(ids) for ids, _ in recorded.sequences]

    # In one chunk.
    check(recorded, 0, 0, harness.run([(0, 0, lengths[0])])[0])

    # In many chunks, of sizes around those of a block.
    start = 0
    for size in (7, 8, 9, 1, 16, 3, 64):
        size = min(size, lengths[1] - start)
        if size:
            check(recorded, 1, start, harness.run([(1, start, size)])[0])
            start += size

    # Prompt chunks and single tokens of other sequences in one batch.
    harness.run([(2, 0, 5)])
    first, second, third = harness.run([(2, 5, 1), (3, 0, 30), (0, lengths[0] - 1, 1)])
    check(recorded, 2, 5, first)
    check(recorded, 3, 0, second)
    check(recorded, 0, lengths[0] - 1, third)

    # The same batch where only the last tokens' hidden states are kept.
    chunks = [(2, 5, 1), (3, 0, 30), (0, lengths[0] - 1, 1)]
    _, every = harness.hidden(chunks, keep_all=True)
    kept, rows = harness.hidden(chunks)
    np.testing.assert_allclose(rows, every, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(kept[:3], rows)

    # Token by token, two sequences in step.
    for position in range(6, 20):
        first, second = harness.run([(2, position, 1), (3, position + 24, 1)], decode=True)
        check(recorded, 2, position, first)
        if position + 24 < lengths[1]:
            check(recorded, 3, position + 24, second)
        if position + 25 >= lengths[1]:
            break
