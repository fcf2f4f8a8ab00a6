"""A thousand fixed texts that different tokenizer libraries are likely to encode differently."""

from collections.abc import Iterable

WORDS = (
    "the",
    "quick brown fox",
    "What is the sum?",
    "don't",
    "3.14159",
    "Straße",
    "déjà vu",
    "Привет",
    "今日は世界",
    "한국어",
    "नमस्ते",
    "def f(x):\n    return x",
    "https://example.org/a?b=c&d",
    "AbCdEfG",
)
HOSTILE = (
    "",
    " ",
    "  ",
    "     ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\t\t ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\0",
    "\x7f",
    "\u200b",
    "\ufeff",
    "\ufffd",
    "\u2581",
    "\u2581the",
    "\u0120the",
    "e\u0301",
    "e\u0301\u0323",
    "Z\u0351\u036b\u0343\u036a",
    "ﬁ①½",
    "\u1100\u1161\u11a8",
    "👩‍👩‍👧",
    "👍🏽🇩🇪",
    "مَرْحَبًا بالعالم",
    "\u202eשלום\u202c",
    "𝔘𝔫𝔦",
    "<0x41>",
    "<0x0A>",
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<|endoftext|>",
    "<|im_start|>user\n",
    "<|im_end|>",
    "[INST] a [/INST]",
    "<extra_id_0>",
    "a" * 600,
    "ab" * 300,
    " " * 70,
    "<|im_<|im_end|>",
)
SEPARATORS = ("", " ", "  ", "\n", "\t", ". ")


def fixed_texts(control_tokens: Iterable[str] = (), count: int = 1000) -> list[str]:
    """Return `count` different texts: each part alone, then sequences of up to eight parts."""
    parts = list(dict.fromkeys((*HOSTILE, *WORDS, *control_tokens)))
    texts = dict.fromkeys(parts)
    number = 0
    while len(texts) < count:
        state = number * 2654435761 % (1 << 32)  # Knuth's multiplicative hash.
        chosen = [parts[(state >> (3 * i)) % len(parts)] for i in range(2 + number % 7)]
        texts[SEPARATORS[number % len(SEPARATORS)].join(chosen)] = None
        number += 1
    return list(texts)[:count]
