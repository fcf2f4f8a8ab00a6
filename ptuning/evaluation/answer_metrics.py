"""What generated answers are worth beside the right ones: shares from 0 to 1, higher is better.

Four measures of texts, each of them a mean over answers. Words are found alike in any script: where
one puts no spaces between words, each character is one. Of several tasks each counts alike, however
many records it has. Knows no model.
"""

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

# Scripts without spaces between words: Thai and Lao, Burmese, Khmer, kana and Han. Hangul has some.
UNSPACED = (
    *(range(0x0E00, 0x0F00), range(0x1000, 0x10A0), range(0x1780, 0x1800), range(0x3005, 0x3008)),
    *(range(0x3040, 0x3100), range(0x31F0, 0x3200), range(0x3400, 0x4DC0), range(0x4E00, 0xA000)),
    *(range(0xF900, 0xFB00), range(0x20000, 0x40000)),
)
ARTICLES = frozenset(("a", "an", "the"))


def measures(answers: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """The mean over all answers of

    `exact_match`: the text is the right one, but for spaces at both ends;
    `accuracy`: so it is without regard to case, to Unicode's other ways to write the same, and to
    how much space stands where there is some: what a label is right by;
    `f1`: nearly as SQuAD has it: the words that both have, without case, punctuation, which parts
    words here, and English articles;
    `rouge_l`: the longest run of words, with gaps, that both have, as the F-measure.
    """
    pairs = list(zip(answers, expected, strict=True))
    kinds = {"exact_match": exact_match, "accuracy": accuracy, "f1": f1, "rouge_l": rouge_l}
    count = max(1, len(pairs))
    return {name: sum(kind(*pair) for pair in pairs) / count for name, kind in kinds.items()}


def macro(tasks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the measures that all tasks have, the mean in which each task counts alike."""
    names = [name for name in tasks[0] if all(name in one for one in tasks)] if tasks else []
    return {name: sum(one[name] for one in tasks) / len(tasks) for name in names}


def exact_match(answer: str, right: str) -> float:
    return float(answer.strip() == right.strip())


def accuracy(answer: str, right: str) -> float:
    return float(_folded(answer) == _folded(right))


def f1(answer: str, right: str) -> float:
    ours, theirs = (
        Counter(word for word in words(text) if word not in ARTICLES) for text in (answer, right)
    )
    return _f_measure((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(answer: str, right: str) -> float:
    ours, theirs = words(answer), words(right)
    return _f_measure(common_length(ours, theirs), len(ours), len(theirs))


def words(text: str) -> list[str]:
    """Letters and digits that stand together, in lower case; nothing of what is between them."""
    found: list[str] = []
    inside = False  # Whether a letter goes on with the last word. A mark goes on with any.
    beside = False
    for character in _folded(text):
        kind = unicodedata.category(character)[0]
        alone = any(ord(character) in span for span in UNSPACED) if ord(character) > 127 else False
        if (kind == "M" and beside) or (kind in "LN" and inside and not alone):
            found[-1] += character
        elif kind in "LN":
            found.append(character)
            inside = not alone
        else:
            inside = False
        beside = kind in "LNM"
    return found


def common_length(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence.

    Bits of one integer say where the length grows along `a`, so a word of `b` costs a few
    operations on it (Hyyrö 2004).
    """
    places: dict[str, int] = {}
    for place, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(a)) - 1
    flat = full  # A bit that is 0 is a place where the length grows.
    for word in b:
        met = flat & places.get(word, 0)
        flat = ((flat + met) | (flat - met)) & full
    return len(a) - flat.bit_count()


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _f_measure(both: int, ours: int, theirs: int) -> float:
    """Two texts without a word are the same; one without is worth nothing."""
    return 2 * both / (ours + theirs) if ours + theirs else 1.0
