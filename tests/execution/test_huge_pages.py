"""Weights of a CPU in one piece of memory backed by huge pages."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.execution.huge_pages import in_huge_pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")


def _params() -> dict[str, jax.Array]:
    key = jax.random.key(0)
    return {
        "a": jax.random.normal(key, (513, 701)).astype(jnp.bfloat16),
        "b": jax.random.normal(key, (1000, 1001)),
        "c": jnp.arange(7, dtype=jnp.int8),
        "d": jnp.ones((3,), jnp.bfloat16),
    }


def _flags(address: int) -> str:
    """The kernel's flags of the mapping that holds an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            found = first <= address < last
        elif found and line.startswith("VmFlags:"):
            return line
    raise LookupError(hex(address))


@linux
def test_values_survive_and_lie_in_one_mapping_with_huge_pages() -> None:
    expected = {name: np.asarray(array) for name, array in _params().items()}
    given = _params()
    placed = in_huge_pages(given)
    assert not given
    assert list(placed) == list(expected)
    for name, array in placed.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(np.asarray(array), expected[name])
        assert " hg" in _flags(array.unsafe_buffer_pointer())
    first, *_, last = (array.unsafe_buffer_pointer() for array in placed.values())
    assert last - first == sum(-(-array.nbytes // 64) * 64 for array in expected.values()) - 64


@linux
def test_programs_read_and_may_be_given_them() -> None:
    placed = in_huge_pages(_params())
    doubled = jax.jit(lambda params: jax.tree.map(lambda x: x + x, params))(placed)
    for name, array in _params().items():
        np.testing.assert_array_equal(np.asarray(doubled[name]), np.asarray(array + array))


def test_less_than_a_huge_page_stays() -> None:
    params = {"a": jnp.ones((8, 8))}
    assert in_huge_pages(params) is params
    assert params


def test_arrays_of_several_devices_stay() -> None:
    mesh = Mesh(jax.devices()[:2], ("x",))
    array = jax.device_put(np.ones((1024, 1024)), NamedSharding(mesh, PartitionSpec("x")))
    params = {"a": array}
    assert in_huge_pages(params)["a"] is array


def test_nothing_to_place() -> None:
    assert in_huge_pages({}) == {}
