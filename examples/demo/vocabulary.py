"""Trains the demo's sentencepiece vocabulary on the demo's own records.

Digits stand alone, text is taken as it is (no normalisation, nothing collapsed), and letters that
were left out are spelled in bytes, so that every string round-trips. No beginning-of-text token:
a prompt starts with whatever comes first, which may be a virtual token. One end token.
"""

import io
import itertools
import re

import sentencepiece

from examples.demo.tasks import training_records
from examples.demo.words import RARE_LETTERS

VOCABULARY_SIZE = 997  # a prime: no tensor-parallel size divides it, so its padding is real
WEIGHTS = {"capitals": 4.0}  # else the capitals, rarest of all, would be spelled by the letter
# Japanese writes no spaces: pieces end at its particles, as they end at spaces elsewhere.
BOUNDARY = "\x1f"
WORD_END_JA = re.compile("(?<=[がでを、に])|(?=[がでを、に])")
UNKNOWN_ID, END_ID = 0, 1


def train_vocabulary(seed: int, records: int = 20_000) -> bytes:
    """The sentencepiece model file."""
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
