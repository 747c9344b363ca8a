"""The text is the tokenizer's own, however ids and text are split."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from nanovllm.config import ConfigError
from nanovllm.server.detokenize import Detokenizer, StopStrings, Vocabulary
from tests.server.tiny_tokenizer import MARKERS, metaspace_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
SIZE = TOKENIZER.get_vocab_size()


def pieces(items, data):
    """Return the items in order, split at random places."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True) if a < b]


def streamed(vocabulary, ids, *, skip_special=True):
    detokenizer = Detokenizer(vocabulary, skip_special=skip_special)
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@given(st.lists(st.integers(0, SIZE - 1), max_size=30), st.booleans())
def test_any_ids_read_as_the_tokenizer_reads_them(ids, skip_special) -> None:
    expected = TOKENIZER.decode(ids, skip_special_tokens=skip_special)
    assert "".join(streamed(VOCABULARY, ids, skip_special=skip_special)) == expected


@given(st.text(max_size=40))
def test_any_text_comes_back_and_never_half_a_character(text) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    parts = streamed(VOCABULARY, ids, skip_special=False)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


def test_a_vocabulary_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer\.json: the decoder must be ByteLevel"):
        Vocabulary(metaspace_tokenizer())


def test_half_a_character_waits_and_is_replaced_at_the_end() -> None:
    ids = TOKENIZER.encode("ü").ids  # not in the training text: two tokens of one byte
    assert len(ids) == 2
    assert streamed(VOCABULARY, ids) == ["", "ü", ""]
    assert streamed(VOCABULARY, ids[:1]) == ["", "\ufffd"]


def test_ids_beyond_the_vocabulary_are_visible() -> None:
    assert streamed(VOCABULARY, [SIZE + 7, SIZE]) == [f"<{SIZE + 7}>", f"<{SIZE}>", ""]
    assert VOCABULARY.bytes_of(SIZE + 7) == f"<{SIZE + 7}>".encode()


def test_the_bytes_of_a_token_are_those_of_the_text() -> None:
    text = "naïve 日本 😀ü"
    ids = TOKENIZER.encode(text).ids
    assert b"".join(VOCABULARY.bytes_of(i) for i in ids) == text.encode()


MARKED = Vocabulary(TOKENIZER, [*MARKERS, "<|im_end|>", "<none>"])


def test_a_marker_that_is_a_token_is_no_text() -> None:
    assert MARKED.marks["<none>"] == "<none>"
    think, end = MARKED.marks["<think>"], MARKED.marks["<|im_end|>"]
    ids = TOKENIZER.encode("a<think>b<|im_end|>").ids
    typed = [i for c in "<think>" for i in TOKENIZER.encode(c).ids]
    assert "".join(streamed(MARKED, ids + typed)) == f"a{think}b{end}<think>"  # special or not
    assert MARKED.marked("x<think>y") == f"x{think}y"
    half = TOKENIZER.encode("\N{SNOWMAN}").ids[:1]
    assert "".join(streamed(MARKED, half + ids[1:3])) == f"\ufffd{think}b"
    assert MARKED.bytes_of(ids[1]) == b"<think>"


@given(st.lists(st.integers(0, SIZE - 1), max_size=30), st.booleans())
def test_marks_stand_for_their_markers(ids, skip_special) -> None:
    vocabulary = Vocabulary(TOKENIZER, MARKERS)
    text = "".join(streamed(vocabulary, ids, skip_special=skip_special))
    for marker, mark in vocabulary.marks.items():
        text = text.replace(mark, marker)
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip_special)


stops = st.lists(st.text("ab<", min_size=1, max_size=3), min_size=1, max_size=3)


@given(st.text("ab<c", max_size=20), stops, st.data(), st.booleans())
def test_stop_strings_are_found_however_the_text_is_cut(text, stops, data, include) -> None:
    def cut_at_stop(parts):
        finder, out = StopStrings(stops, include=include), ""
        for part in parts:
            sure, is_stopped = finder.feed(part)
            out += sure
            if is_stopped:
                return out, True
        return out + finder.finish(), False

    assert cut_at_stop(pieces(text, data)) == cut_at_stop(list(text))
    shown, is_stopped = cut_at_stop(list(text))
    assert is_stopped == any(stop in text for stop in stops)
    assert text.startswith(shown)
    if not is_stopped:
        assert shown == text
    elif not include:
        assert not any(stop in shown for stop in stops)
    else:
        assert any(shown.endswith(stop) for stop in stops)


@pytest.mark.parametrize(("include", "expected"), [(False, ("ab", True)), (True, ("abSTOP", True))])
def test_a_stop_string_over_three_pieces(include, expected) -> None:
    finder = StopStrings(["STOP"], include=include)
    assert finder.feed("abS") == ("ab", False)
    assert finder.feed("TO") == ("", False)
    assert finder.feed("P and more") == (expected[0][2:], True)


def test_text_that_only_resembles_a_stop_string_is_released() -> None:
    finder = StopStrings(["STOP"], include=False)
    assert finder.feed("ST") == ("", False)
    assert finder.feed("ART S") == ("START ", False)
    assert finder.finish() == "S"
