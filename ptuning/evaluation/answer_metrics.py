"""Answer metrics: exact match, accuracy, F1 and ROUGE-L of generated answers.

Each metric is a mean over answers, from 0 to 1; higher is better. In a script without spaces
between words, each character counts as a word. The mean over several tasks gives each task the same
weight, regardless of its number of records. This module uses no model.
"""

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

# Unicode ranges of scripts without spaces between words: Thai and Lao, Burmese, Khmer, kana, Han.
# Hangul is not listed, because Korean text has spaces.
UNSPACED_SCRIPTS = (
    range(0x0E00, 0x0F00),
    range(0x1000, 0x10A0),
    range(0x1780, 0x1800),
    range(0x3005, 0x3008),
    range(0x3040, 0x3100),
    range(0x31F0, 0x3200),
    range(0x3400, 0x4DC0),
    range(0x4E00, 0xA000),
    range(0xF900, 0xFB00),
    range(0x20000, 0x40000),
)
ARTICLES = frozenset(("a", "an", "the"))


def compute_metrics(answers: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Return the mean of each metric over all answers.

    - `exact_match`: whether the texts are equal after stripping white space at both ends.
    - `accuracy`, for labels: whether the texts are equal after Unicode NFKC normalization, case
      folding and collapsing of white space.
    - `f1`: F-measure of the common words, without case, punctuation and English articles, as in
      SQuAD. Unlike in SQuAD, punctuation separates words.
    - `rouge_l`: F-measure of the longest common subsequence of words.
    """
    pairs = list(zip(answers, expected, strict=True))
    metrics = {"exact_match": exact_match, "accuracy": accuracy, "f1": f1, "rouge_l": rouge_l}
    count = max(1, len(pairs))
    return {name: sum(metric(*pair) for pair in pairs) / count for name, metric in metrics.items()}


def macro_average(tasks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the unweighted mean over tasks of each metric that all tasks have."""
    names = [name for name in tasks[0] if all(name in task for task in tasks)] if tasks else []
    return {name: sum(task[name] for task in tasks) / len(tasks) for name in names}


def exact_match(answer: str, expected: str) -> float:
    return float(answer.strip() == expected.strip())


def accuracy(answer: str, expected: str) -> float:
    return float(_normalized(answer) == _normalized(expected))


def f1(answer: str, expected: str) -> float:
    answer_words, expected_words = (
        Counter(word for word in split_words(text) if word not in ARTICLES)
        for text in (answer, expected)
    )
    return _f_measure(
        (answer_words & expected_words).total(), answer_words.total(), expected_words.total()
    )


def rouge_l(answer: str, expected: str) -> float:
    answer_words, expected_words = split_words(answer), split_words(expected)
    return _f_measure(
        common_subsequence_length(answer_words, expected_words),
        len(answer_words),
        len(expected_words),
    )


def split_words(text: str) -> list[str]:
    """Return the case-folded words of a text.

    A word consists of letters, digits and combining marks; other characters only separate words. In
    scripts without spaces, each letter is a word, with its combining marks.
    """
    words: list[str] = []
    continues_word = False  # Whether a letter or digit would extend the last word.
    after_letter = False  # Whether a combining mark would extend the last word.
    for character in _normalized(text):
        category = unicodedata.category(character)[0]
        is_unspaced = (
            any(ord(character) in span for span in UNSPACED_SCRIPTS)
            if ord(character) > 127
            else False
        )
        if (category == "M" and after_letter) or (
            category in "LN" and continues_word and not is_unspaced
        ):
            words[-1] += character
        elif category in "LN":
            words.append(character)
            continues_word = not is_unspaced
        else:
            continues_word = False
        after_letter = category in "LNM"
    return words


def common_subsequence_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence of `a` and `b` (Hyyrö 2004).

    The algorithm is bit-parallel: an integer has one bit per position of `a`, so each word of `b`
    needs only a few integer operations.
    """
    position_bits: dict[str, int] = {}
    for position, word in enumerate(a):
        position_bits[word] = position_bits.get(word, 0) | 1 << position
    all_bits = (1 << len(a)) - 1
    # Let L(i) be the length of the longest common subsequence of a[:i] and the words of `b` so far.
    # Bit i of unmatched_bits is 0 if L(i+1) = L(i) + 1, and 1 if L(i+1) = L(i).
    unmatched_bits = all_bits
    for word in b:
        matched_bits = unmatched_bits & position_bits.get(word, 0)
        unmatched_bits = (
            (unmatched_bits + matched_bits) | (unmatched_bits - matched_bits)
        ) & all_bits
    return len(a) - unmatched_bits.bit_count()


def _normalized(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _f_measure(common: int, answer_count: int, expected_count: int) -> float:
    """Return the F-measure from word counts: 1 if both texts are empty, 0 if only one is empty."""
    return 2 * common / (answer_count + expected_count) if answer_count + expected_count else 1.0
