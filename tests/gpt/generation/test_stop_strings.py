"""Stop strings: streamed text equals the whole text, and ends before a stop string."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.generation.stop_strings import StopStringDetokenizer
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, open_tokenizer
from tests.support.trained_tokenizers import sentencepiece_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("text") / "tokenizer.model"
    file.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    return open_tokenizer(file)


def stream_text(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[list[str], bool]:
    text = StopStringDetokenizer(tokenizer, stops)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.is_stopped:
            break
    return [*pieces, text.finish()], text.is_stopped


@given(
    ids=st.lists(st.integers(0, 599), max_size=30),
    stops=st.lists(st.text(" aeθ的.", min_size=1, max_size=3), max_size=3),
)
def test_streamed_pieces_join_to_the_text_before_the_first_stop(
    tokenizer: Tokenizer, ids: list[int], stops: list[str]
) -> None:
    full_text = tokenizer.decode(ids, continues_text=True)
    # The stop that is complete first; among stops that are complete together, the longest.
    stop_ends = [
        (full_text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in full_text
    ]

    pieces, stopped = stream_text(tokenizer, ids, stops)

    assert "".join(pieces) == (full_text[: sum(min(stop_ends))] if stop_ends else full_text)
    assert stopped == bool(stop_ends)


def test_possible_stop_prefixes_are_buffered() -> None:
    # The text of 1, 2, 3 is " 1 2 3".
    assert stream_text(NullTokenizer(10), [1, 2, 3], ["2 4"]) == ([" 1", " ", "2 3", ""], False)
    assert stream_text(NullTokenizer(10), [1, 2, 3], ["2 3"]) == ([" 1", " ", "", ""], True)


def test_the_matching_stop_does_not_depend_on_tokenization() -> None:
    # "2" is complete before "1 2 3" is, however the text is split.
    for ids in ([1, 2, 3, 4], [1, 2]):
        pieces, stopped = stream_text(NullTokenizer(10), ids, ["1 2 3", "2"])
        assert ("".join(pieces), stopped) == (" 1 ", True)


def test_many_near_matches_are_fast() -> None:
    stops = [" 1" * 127 + f" {end}" for end in range(2, 10)] * 2
    took = []
    for _ in range(3):
        text = StopStringDetokenizer(NullTokenizer(10), stops)
        started = time.process_time()
        streamed = "".join(text.push(1) for _ in range(2000)) + text.finish()
        took.append(time.process_time() - started)
        assert streamed == " 1" * 2000
    assert min(took) < 0.5


def test_incomplete_characters_are_not_streamed(tokenizer: Tokenizer) -> None:
    for text in ("的", "☃ snow", "a😀b"):
        pieces, _ = stream_text(tokenizer, tokenizer.encode(text), [])
        assert "\ufffd" not in "".join(pieces)
