"""Text that is given out bit by bit is the whole text, and ends before a stop string."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.generation.stop_strings import CertainText
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, open_tokenizer
from tests.support.trained_tokenizers import sentencepiece_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("text") / "tokenizer.model"
    file.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    return open_tokenizer(file)


def given_out(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[list[str], bool]:
    text = CertainText(tokenizer, stops)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.finish()], text.stopped


@given(
    ids=st.lists(st.integers(0, 599), max_size=30),
    stops=st.lists(st.text(" aeθ的.", min_size=1, max_size=3), max_size=3),
)
def test_the_pieces_are_the_text_up_to_the_first_stop(
    tokenizer: Tokenizer, ids: list[int], stops: list[str]
) -> None:
    whole = tokenizer.decode(ids, started=True)
    # The stop that is complete first; of those that are complete together, the longest.
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]

    pieces, stopped = given_out(tokenizer, ids, stops)

    assert "".join(pieces) == (whole[: sum(min(ends))] if ends else whole)
    assert stopped == bool(ends)


def test_what_may_become_a_stop_is_held_back_until_it_is_decided() -> None:
    # The text of 1, 2, 3 is " 1 2 3".
    assert given_out(NullTokenizer(10), [1, 2, 3], ["2 4"]) == ([" 1", " ", "2 3", ""], False)
    assert given_out(NullTokenizer(10), [1, 2, 3], ["2 3"]) == ([" 1", " ", "", ""], True)


def test_which_stop_it_is_does_not_depend_on_how_tokens_cut_the_text() -> None:
    # "2" is complete before "1 2 3" is, in whatever bits the text comes.
    for ids in ([1, 2, 3, 4], [1, 2]):
        pieces, stopped = given_out(NullTokenizer(10), ids, ["1 2 3", "2"])
        assert ("".join(pieces), stopped) == (" 1 ", True)


def test_many_long_stops_that_nearly_match_cost_little() -> None:
    stops = [" 1" * 127 + f" {end}" for end in range(2, 10)] * 2
    took = []
    for _ in range(3):
        text, started = CertainText(NullTokenizer(10), stops), time.process_time()
        given = "".join(text.push(1) for _ in range(2000)) + text.finish()
        took.append(time.process_time() - started)
        assert given == " 1" * 2000
    assert min(took) < 0.5


def test_half_a_character_is_never_given_out(tokenizer: Tokenizer) -> None:
    for text in ("的", "☃ snow", "a😀b"):
        pieces, _ = given_out(tokenizer, tokenizer.encode(text), [])
        assert "\ufffd" not in "".join(pieces)
