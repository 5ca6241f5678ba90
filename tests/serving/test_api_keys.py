"""API keys: read from headers of either kind, and known among others."""

import pytest

from serving.api_keys import ApiKeys, given_key


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([("authorization", "Bearer one")], "one"),
        ([(b"authorization", b"bearer   one ")], "one"),
        ([(b"host", b"h"), (b"x-api-key", b"one")], "one"),
        ([("x-api-key", "one")], "one"),
        ([("authorization", "one")], ""),
        ([("authorization", "Basic one")], ""),
        ([(b"authorization", b"Bearer \xe9")], "\xe9"),
        ([("trace-bin", b"\xff")], ""),
        ([], ""),
        # What one front reads, the other must not read otherwise.
        ([("authorization", "Bearer one"), ("authorization", "Bearer two")], "one"),
        ([("authorization", "Basic x"), ("x-api-key", "two")], ""),
        ([("x-api-key", "two"), ("authorization", "Bearer one")], "two"),
    ],
)
def test_the_key_a_call_brings(headers, key):
    assert given_key(headers) == key


def test_which_keys_open():
    keys = ApiKeys(["one", "two"])
    assert keys
    assert "one" in keys
    assert "two" in keys
    for other in ("", "On", "onetwo", "one ", "\xe9", "\ud800"):
        assert other not in keys


def test_without_keys_there_is_nothing_to_know():
    assert not ApiKeys([])
    assert "" not in ApiKeys([])
