"""Small real tokenizers of every kind, trained in a moment on a few lines of many languages.

Each comes as our tokenizer, opened from files, and as its own library opens the same files.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, open_tokenizer

LINES = (
    "the quick brown fox jumps over the lazy dog",
    "what is the sum of twelve and thirty? answer: forty-two.",
    "Die Größe der Straße überrascht; déjà vu à l'école",
    "مرحبا بالعالم هذا نص عربي",
    "今日は世界 你好世界",
    "Привет мир, как дела",
)
CORPUS = [f"{line} {word}" for line in LINES for word in ("one", "two", "three", "four") * 5]


class Case:
    """One of our tokenizers, and its library's encoding and decoding.

    With `runs` the library drops a whole run of bytes where ours drops only the invalid bytes.
    """

    def __init__(
        self,
        ours: Tokenizer,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        runs: bool = False,
    ) -> None:
        self.ours = ours
        self.encode = encode
        self.decode = decode
        self.runs = runs


def sentencepiece_model(**options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=600,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def sentencepiece_case(folder: Path, **options: Any) -> Case:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(**options))
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return Case(open_tokenizer(folder), library.encode, library.decode)


def byte_level() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def llama_like() -> tokenizers.Tokenizer:
    """As Llama 2's is written: SentencePiece's behaviour spelled out, byte tokens at the front."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    named = ["<unk>", "<s>", "</s>"]
    special = [*named, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    record = json.loads(library.to_str())
    record["added_tokens"] = record["added_tokens"][: len(named)]  # The bytes are ordinary tokens.
    # And, as in Llama 2, ordinary merges lead to a control token.
    vocabulary = record["model"]["vocab"]
    for piece in ("</", "s>"):
        vocabulary.setdefault(piece, len(vocabulary))
    for letter in "<>/s":
        vocabulary.setdefault(letter, len(vocabulary))
    record["model"]["merges"] += [["<", "/"], ["s", ">"], ["</", "s>"]]
    library = tokenizers.Tokenizer.from_str(json.dumps(record))
    decoders = tokenizers.decoders
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return library


def metaspace() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(tokenizers.models.Unigram())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def word_level() -> tokenizers.Tokenizer:
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "the", "fox", "jumps", " ", ""])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return library


def json_case(folder: Path, library: tokenizers.Tokenizer, runs: bool = False) -> Case:
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    return Case(open_tokenizer(folder), encode, library.decode, runs)


def gpt2_case(folder: Path) -> Case:
    folder.mkdir()
    library = byte_level()
    vocabulary, merges = library.model.save(str(folder))
    Path(vocabulary).rename(folder / "gpt2-vocab.json")
    Path(merges).rename(folder / "gpt2-merges.txt")
    library.encode_special_tokens = True
    # These files do not say that <s> is special, so it is text like any other.
    reference = tokenizers.Tokenizer(library.model)
    reference.pre_tokenizer = library.pre_tokenizer
    reference.decoder = library.decoder
    reference.add_special_tokens(["<|endoftext|>"])
    reference.encode_special_tokens = True
    return Case(
        open_tokenizer(folder), lambda text: list(reference.encode(text).ids), reference.decode
    )


def byte_tokens(case: Case, raw: bytes) -> list[int]:
    """The ids of the byte tokens for these bytes."""
    ids = {}
    for i in range(case.ours.vocab_size):
        piece = case.ours.piece(i)
        if isinstance(piece, bytes):
            ids[piece] = i
    return [ids[bytes([byte])] for byte in raw]


def all_cases(folder: Path) -> dict[str, Case]:
    """A tokenizer of each kind, in folders below `top`."""
    null = NullTokenizer(600)
    numbers = Case(null, null.encode, lambda ids: " ".join(map(str, ids)))
    llama = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    bare = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
    return {
        "bpe": sentencepiece_case(folder / "a", model_type="bpe", byte_fallback=True),
        "llama": sentencepiece_case(folder / "b", model_type="bpe", byte_fallback=True, **llama),
        "unigram": sentencepiece_case(folder / "c", model_type="unigram", **bare),
        "gpt2": gpt2_case(folder / "d"),
        "byte_level": json_case(folder / "e", byte_level()),
        "llama_json": json_case(folder / "f", llama_like(), runs=True),
        "metaspace": json_case(folder / "g", metaspace()),
        "words": json_case(folder / "h", word_level()),
        "null": numbers,
    }


def auto_tokenizer(folder: Path) -> Any:
    """The tokenizer that transformers opens from the files of a folder."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer
