"""Stop strings: the first complete one ends the text, none leaks, nothing is held too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.text.errors import TextError
from jaxllm.text.stop_strings import MAX_STOP_CHARACTERS, StopChecker, StopResult


def run(stop, deltas, include=False):
    checker = StopChecker(stop, include)
    parts, matched = [], None
    for delta in deltas:
        result = checker.feed(delta)
        parts.append(result.text)
        matched = result.matched
        if matched is not None:
            break
    parts.append(checker.finish().text)
    return parts, matched


def oracle(stop, text):
    """Text before the stop, the stop, text with it; by trying every end in turn."""
    for end in range(1, len(text) + 1):
        for candidate in stop:
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate, text[:end]
    return text, None, text


@pytest.mark.parametrize(
    ("stop", "text", "before", "matched"),
    [
        (["a", "is"], "this is a test", "th", "is"),
        (["abc", "b"], "xabc", "xa", "b"),
        (["bc", "c"], "abc", "a", "bc"),
        (["c", "bc"], "abc", "ab", "c"),
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
        (["end"], "the en", "the en", None),
        (["aab"], "aaab", "a", "aab"),
        (["日本"], "x日本語", "x", "日本"),
        (["."], "", "", None),
        ([], "anything", "anything", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_first_complete_stop_string_ends_the_text(stop, text, before, matched, size):
    deltas = [text[i : i + size] for i in range(0, len(text), size)]
    parts, found = run(stop, deltas)
    assert ("".join(parts), found) == (before, matched)
    parts, found = run(stop, deltas, include=True)
    assert ("".join(parts), found) == (oracle(stop, text)[2], matched)


def test_a_stop_string_inside_one_delta_drops_the_rest():
    assert StopChecker(["STOP"]).feed("goSTOPon") == StopResult("go", "STOP")
    assert StopChecker(["STOP"], True).feed("goSTOPon") == StopResult("goSTOP", "STOP")


def test_no_part_of_a_long_stop_string_leaks():
    checker = StopChecker(["DEFGHIJ"])
    released = [checker.feed(character).text for character in "ABCDEFGHIJKL"]
    assert released[:3] == ["A", "B", "C"]
    assert "".join(released) == "ABC"
    assert checker.matched == "DEFGHIJ"
    assert checker.finish().text == ""


def test_unrelated_text_is_not_held_however_long_the_stop_string():
    checker = StopChecker(["x" * 1000])
    assert checker.feed("unrelated").text == "unrelated"


def test_only_the_possible_beginning_is_held():
    checker = StopChecker(["</s>", "</tool>"])
    assert checker.feed("text <").text == "text "
    assert checker.feed("/").text == ""
    assert checker.feed("t").text == ""
    assert checker.feed("able>").text == "</table>"
    assert checker.feed("a </to").text == "a "
    assert checker.finish().text == "</to"


def test_nothing_is_held_when_the_stop_string_is_included():
    checker = StopChecker(["END"], include_stop_str_in_output=True)
    assert [checker.feed(c).text for c in "xEN"] == ["x", "E", "N"]
    assert checker.feed("D!") == StopResult("D", "END")


def test_text_after_a_match_is_dropped():
    checker = StopChecker(["."])
    checker.feed("a.")
    assert checker.feed("b") == StopResult("", ".")
    assert checker.finish() == StopResult("", ".")


def test_without_search_a_stop_string_passes_but_one_that_ends_later_counts():
    checker = StopChecker(["ab"])
    assert checker.feed("abxa", search=False) == StopResult("abx")
    assert checker.feed("b") == StopResult("", "ab")
    assert StopChecker(["ab"]).feed("xab", search=False).text == "xab"
    longer = StopChecker(["ab", "abc"])
    assert longer.feed("ab", search=False).text == ""
    assert longer.feed("c") == StopResult("", "abc")


@pytest.mark.parametrize("stop", [[""], ["a", ""], ["x" * (MAX_STOP_CHARACTERS + 1)]])
def test_unusable_stop_strings_are_refused(stop):
    with pytest.raises(TextError, match="stop"):
        StopChecker(stop)


@given(
    stop=st.lists(st.text("ab^]-", min_size=1, max_size=4), max_size=4),
    deltas=st.lists(st.text("ab^]-", max_size=5), max_size=8),
    include=st.booleans(),
)
def test_any_cut_into_deltas_gives_what_the_whole_text_gives(stop, deltas, include):
    text = "".join(deltas)
    before, matched, with_it = oracle(stop, text)
    parts, found = run(stop, deltas, include)
    assert "".join(parts) == (with_it if include else before)
    assert found == matched


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    text=st.text("ab", max_size=20),
)
def test_exactly_the_longest_beginning_of_a_stop_string_is_held(stop, text):
    checker = StopChecker(stop)
    released = ""
    for end, character in enumerate(text, 1):
        result = checker.feed(character)
        released += result.text
        if result.matched is not None:
            return
        seen = text[:end]
        held = max(
            (n for s in stop for n in range(1, len(s)) if seen.endswith(s[:n])),
            default=0,
        )
        assert released == seen[: len(seen) - held]
