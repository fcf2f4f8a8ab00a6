"""Vocabulary training of the demo: a SentencePiece model from the demo's training records.

Digits are separate pieces. Text is not normalized and unknown letters are encoded as bytes, so
decoding restores every string exactly. There is no begin-of-text token, because a prompt may start
with a virtual token. There is one end-of-text token.
"""

import io
import itertools
import re

import sentencepiece

from examples.demo.tasks import training_records
from examples.demo.words import RARE_LETTERS

# A prime number: no tensor-parallel size divides it, so the vocabulary must be padded.
VOCABULARY_SIZE = 997
# The task "capitals" gets more records. With fewer records, words in capital letters would be too
# rare to become pieces, and would be split into letters.
WEIGHTS = {"capitals": 4.0}
# English pieces end at spaces. Japanese has no spaces, so a boundary character is inserted around
# particles (short function words), where pieces then end.
BOUNDARY = "\x1f"
WORD_END_JA = re.compile("(?<=[がでを、に])|(?=[がでを、に])")
UNKNOWN_ID, END_ID = 0, 1


def train_vocabulary(seed: int, records: int = 20_000) -> bytes:
    """Return the bytes of the SentencePiece model file."""
    without_rare = str.maketrans(dict.fromkeys(RARE_LETTERS, BOUNDARY))
    lines = (
        WORD_END_JA.sub(BOUNDARY, f"{record.prompt} {record.completion}".translate(without_rare))
        for record in itertools.islice(training_records(seed, WEIGHTS), records)
    )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY_SIZE,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pretokenization_delimiter=BOUNDARY,
        add_dummy_prefix=True,
        unk_id=UNKNOWN_ID,
        eos_id=END_ID,
        bos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
