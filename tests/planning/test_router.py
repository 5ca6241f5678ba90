import pytest

from jaxllm.errors import ConfigError
from jaxllm.planning.router import LeastLoaded, PrefixAware, RoundRobin, make_router
from jaxllm.planning.trace import TraceRequest

PLAIN = TraceRequest(0.0, 8, 8)


def with_prefix(name):
    return TraceRequest(0.0, 8, 8, name, 4)


def test_round_robin_takes_turns():
    router = RoundRobin(3)
    assert [router.choose(PLAIN, ()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_takes_the_first_of_the_emptiest():
    router = LeastLoaded(4)
    assert router.choose(PLAIN, [3, 1, 1, 2]) == 1
    assert router.choose(PLAIN, [0, 0, 0, 0]) == 0


def test_a_prefix_stays_where_it_was_seen():
    router = PrefixAware(3, ratio=1.5, slack=4)
    assert router.choose(with_prefix("a"), [0, 0, 0]) == 0
    assert router.choose(with_prefix("b"), [1, 0, 0]) == 1
    assert router.choose(with_prefix("a"), [4, 0, 0]) == 0
    assert router.choose(PLAIN, [4, 1, 0]) == 2


def test_an_overloaded_home_gets_a_second_one():
    router = PrefixAware(3, ratio=1.5, slack=4)
    router.choose(with_prefix("a"), [0, 0, 0])
    assert router.choose(with_prefix("a"), [5, 1, 0]) == 2
    # Both are homes now, and the emptier one is taken.
    assert router.choose(with_prefix("a"), [5, 0, 3]) == 2
    assert router.choose(with_prefix("a"), [2, 0, 3]) == 0


def test_routers_by_name():
    assert isinstance(make_router("prefix-aware", 2), PrefixAware)
    with pytest.raises(ConfigError, match="least-loaded"):
        make_router("random", 2)
