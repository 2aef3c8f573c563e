import codecs
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.router.detokenizer import Detokenizer

BYTES = [bytes([byte]) for byte in range(256)]
MIXED = st.text(alphabet="ab한é🙂\n .", max_size=40)


def by_characters(text, stops, include=False):
    """The rule, written the slow way: grow the text by one character until some stop string ends there."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end if include else end - len(max(ended, key=len))], True
    return text, False


def cut(raw: bytes, borders: list[int]) -> list[bytes]:
    at = sorted({0, len(raw), *(border % (len(raw) + 1) for border in borders)})
    return [raw[a:b] for a, b in itertools.pairwise(at)]


def stream(table, ids, stops=(), group=1, **more):
    detokenizer = Detokenizer(table, tuple(stops), **more)
    deltas = [detokenizer.push(ids[at : at + group]) for at in range(0, len(ids), group)]
    return detokenizer, [*deltas, detokenizer.flush()]


@given(st.binary(max_size=60), st.integers(1, 7))
@example(b"\xc4\x8f\xf0\x9f\x99\x82\xc3\xa9", 1)
@example(b"a\xf0\x9fb", 1)
def test_joined_deltas_equal_a_decode_of_the_whole(raw, group):
    _, deltas = stream(BYTES, list(raw), group=group)
    complete = codecs.utf_8_decode(raw, "replace", False)[0]
    assert "".join(deltas) == complete
    assert raw.decode("utf-8", "replace").startswith(complete)


@given(MIXED)
def test_no_delta_shows_a_part_of_a_character(text):
    _, deltas = stream(BYTES, list(text.encode()))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_cut_off_by_the_end_is_dropped():
    assert stream(BYTES, list("ď🙂".encode()[:4]))[1] == ["", "ď", "", "", ""]


@given(MIXED, st.lists(st.text(alphabet="ab한\n.", min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 99)))
@example("end.\n\nNext", ["zzz", "\n\n"], [3, 6])
@example("aab", ["ab"], [1, 2])
@example("abcd", ["abcd", "c"], [])
def test_stop_strings_end_the_text_wherever_tokens_are_cut(text, stops, borders):
    table = cut(text.encode(), borders)
    want, hit = by_characters(text, stops)
    for group in (1, 3, len(table) or 1):
        detokenizer, deltas = stream(table, list(range(len(table))), stops, group)
        assert "".join(deltas) == want
        assert detokenizer.stopped == hit


@given(
    MIXED,
    st.lists(st.text(alphabet="ab한\n.", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 99)),
    st.integers(0, 12),
    st.booleans(),
)
@example("abab", ["ab"], [1, 2, 3], 1, False)  # a stop that begins in a free id's text
@example("aab", ["ab"], [1], 1, True)
@example("한b", ["한"], [1], 1, False)  # a character belongs to the id that completes it
def test_the_first_ids_are_shown_at_once_and_never_part_of_a_stop(text, stops, borders, num_free, include):
    table = cut(text.encode(), borders)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(piece) for piece in table]
    rest, hit = by_characters("".join(texts[num_free:]), stops, include)
    for group in (1, 3, len(table) or 1):
        detokenizer, deltas = stream(
            table, list(range(len(table))), stops, group, num_free=num_free, include_stop=include
        )
        assert "".join(deltas) == "".join(texts[:num_free]) + rest
        assert detokenizer.stopped == hit
        if group == 1:
            assert deltas[: min(num_free, len(table))] == texts[:num_free]


@given(MIXED, st.lists(st.text(alphabet="ab.", min_size=1, max_size=3), min_size=1, max_size=3))
def test_held_back_is_only_what_may_become_a_stop_string(text, stops):
    detokenizer, seen = Detokenizer(BYTES, tuple(stops)), ""
    for at, byte in enumerate(text.encode()):
        seen += detokenizer.push([byte])
        if detokenizer.stopped:
            break
        whole = codecs.utf_8_decode(text.encode()[: at + 1], "strict", False)[0]
        held = whole[len(seen) :]
        assert any(stop.startswith(held) and stop != held for stop in stops)  # one character less than it, at most
        longer = [whole[-n:] for n in range(len(held) + 1, len(whole) + 1)]
        assert not any(stop.startswith(end) for stop in stops for end in longer)


def test_ids_count_up_to_the_one_that_completed_the_stop():
    table = [b"one", b" tw", b"o th", b"ree", b" four"]
    detokenizer, deltas = stream(table, [0, 1, 2, 3, 4], ["two"], group=5)
    assert ("".join(deltas), detokenizer.num_ids, detokenizer.stopped) == ("one ", 3, True)
    assert detokenizer.push([4]) == ""
    assert detokenizer.num_ids == 3


def test_ids_without_text_count_and_show_nothing():
    detokenizer, deltas = stream([b"a", b"", b"b"], [0, 1, 2])
    assert (deltas, detokenizer.num_ids) == (["a", "", "b", ""], 3)


@pytest.mark.parametrize(("strip", "want"), [(True, "one two"), (False, " one two")])
def test_a_text_of_its_own_loses_the_space_before_its_first_word(strip, want):
    assert "".join(stream([b"", b" one", b" two"], [0, 1, 2], strip_space=strip)[1]) == want


def test_only_one_leading_space_goes():
    assert "".join(stream([b" ", b" a"], [0, 1], strip_space=True)[1]) == " a"


def test_an_id_that_is_skipped_counts_and_lets_go_of_what_was_held():
    detokenizer = Detokenizer([b"a", b"b"], ("ab",))
    assert detokenizer.push([0]) == ""
    detokenizer.skip()
    assert (detokenizer.num_ids, detokenizer.flush()) == (2, "a")
