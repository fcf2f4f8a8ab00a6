"""Prompt tokens: control tokens in and around the texts of an ask, with and without an adapter."""

from dataclasses import replace

import pytest
import tokenizers

from gpt.adapters.card import Card
from gpt.adapters.prompt_template import PromptTemplate
from gpt.errors import RequestError
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from serving.adapters.registry import LoadedAdapter
from serving.admission.prompt_tokens import PromptTokenizer
from serving.config import LimitsConfig
from serving.messages import AdapterRef
from serving.request import Ask
from tests.support.chat_templates import SPECIAL
from tests.support.trained_tokenizers import byte_level

V = 700
TEXT = "<|im_start|>user\nthe fox<|im_end|>"
VIRTUAL = (V, V + 1, V + 2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that adds <s> before a text and </s> after it."""
    library = byte_level()
    library.add_special_tokens(list(SPECIAL))
    ids = [(text, library.token_to_id(text)) for text in ("<s>", "</s>")]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ids
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    library.save(str(folder / "tokenizer.json"))
    return open_tokenizer(folder)


def prompts(tokenizer: Tokenizer, **limits: str | int) -> PromptTokenizer:
    return PromptTokenizer(tokenizer, V, replace(LimitsConfig(), **limits))  # type: ignore[arg-type]


def adapter(bos: str | None) -> LoadedAdapter:
    """An adapter of three virtual tokens; `bos`: the rule of its template, None: no template."""
    template = None if bos is None else PromptTemplate("<|VIRTUAL_PROMPT_0|>{a}", (3,), bos=bos)
    card = Card("a", template=template)
    return LoadedAdapter("a", 1, card, AdapterRef("d", 3, "a.safetensors"))


def bos_eos(tokenizer: Tokenizer) -> tuple[int, int]:
    assert tokenizer.bos_id is not None
    return tokenizer.bos_id, tokenizer.control_tokens["</s>"].id


@pytest.mark.parametrize(
    ("explicit", "by_default", "setting", "parses"),
    [
        (None, False, "auto", False),
        (None, True, "auto", True),
        (True, False, "auto", True),
        (False, True, "auto", False),
        (None, True, "never", False),
        (False, True, "never", False),
    ],
)
def test_request_protocol_and_setting_decide_whether_a_text_is_parsed(
    tokenizer: Tokenizer, explicit: bool | None, by_default: bool, setting: str, parses: bool
) -> None:
    ask = Ask(TEXT, parse_special_tokens=explicit, parse_by_default=by_default)
    ids = prompts(tokenizer, parse_special_tokens=setting).text_prompt(ask, TEXT, None)

    bos, eos = bos_eos(tokenizer)
    assert ids == (bos, *tokenizer.encode(TEXT, allow_special=parses), eos)
    start = tokenizer.control_tokens["<|im_start|>"].id
    assert (start in ids) == parses


def test_fields_are_parsed_only_if_the_request_says_so(tokenizer: Tokenizer) -> None:
    prompt_tokenizer = prompts(tokenizer)
    fields = Ask({"a": TEXT}, parse_by_default=True)
    assert not prompt_tokenizer.parses_special_tokens(fields)
    assert prompt_tokenizer.parses_special_tokens(replace(fields, parse_special_tokens=True))


def test_a_server_that_never_parses_refuses_requests_to_parse(tokenizer: Tokenizer) -> None:
    ask = Ask(TEXT, parse_special_tokens=True)
    with pytest.raises(RequestError, match=r"never parses special tokens.*send token ids") as error:
        prompts(tokenizer, parse_special_tokens="never").text_prompt(ask, TEXT, None)
    assert error.value.field == "parse_special_tokens"


def test_nothing_is_added_without_add_special_tokens(tokenizer: Tokenizer) -> None:
    ask = Ask(TEXT, parse_by_default=True, add_special_tokens=False)
    ids = tuple(tokenizer.encode(TEXT, allow_special=True))
    assert prompts(tokenizer).text_prompt(ask, TEXT, None) == ids
    assert prompts(tokenizer).text_prompt(ask, TEXT, adapter("first")) == (*VIRTUAL, *ids)
    assert prompts(tokenizer).text_prompt(ask, "", None) == ()


def test_a_text_that_begins_with_bos_gets_a_second_one_as_in_vllm(tokenizer: Tokenizer) -> None:
    bos, eos = bos_eos(tokenizer)
    ask = Ask("<s>the", parse_by_default=True)
    the = tokenizer.encode("the")
    assert prompts(tokenizer).text_prompt(ask, "<s>the", None) == (bos, bos, *the, eos)


def test_the_template_of_an_adapter_places_bos(tokenizer: Tokenizer) -> None:
    bos, _ = bos_eos(tokenizer)
    ids = tuple(tokenizer.encode(TEXT, allow_special=True))
    ask = Ask(TEXT, parse_by_default=True)
    for rule, expected in (
        ("none", (*VIRTUAL, *ids)),
        ("first", (bos, *VIRTUAL, *ids)),
        ("text", (*VIRTUAL, bos, *ids)),
        (None, (*VIRTUAL, bos, *ids)),
    ):
        assert prompts(tokenizer).text_prompt(ask, TEXT, adapter(rule)) == expected, rule


def test_text_never_becomes_virtual_tokens(tokenizer: Tokenizer) -> None:
    texts = ("<|VIRTUAL_PROMPT_0|>", f"<{V}> {V}", "<|virtual_0|>", *SPECIAL)
    for text in texts:
        ask = Ask(text, parse_special_tokens=True)
        assert max(prompts(tokenizer).text_prompt(ask, text, None)) < V


def test_truncation_keeps_the_control_tokens_before_a_text(tokenizer: Tokenizer) -> None:
    bos, eos = bos_eos(tokenizer)
    ids = tokenizer.encode(TEXT, allow_special=True)
    for limit in range(1, len(ids) + 4):
        ask = Ask(TEXT, parse_by_default=True, truncate_tokens=limit)
        truncated = prompts(tokenizer).text_prompt(ask, TEXT, None)
        full_ids = (bos, *ids, eos)
        if limit == 1:
            assert truncated == (eos,)
        elif limit < len(full_ids):
            assert truncated == (bos, *full_ids[len(full_ids) - limit + 1 :])
        else:
            assert truncated == full_ids
    ask = Ask(TEXT, parse_by_default=True, truncate_tokens=2)
    assert prompts(tokenizer).text_prompt(ask, TEXT, adapter("first")) == (bos, *VIRTUAL, *ids[-2:])


def test_parsed_fields_are_text_and_control_tokens_of_their_values(tokenizer: Tokenizer) -> None:
    template = PromptTemplate("<|VIRTUAL_PROMPT_0|>say <|im_end|> to {a}: {b}", (3,))
    sizes = {"vocab_size": V, "tokens_max": 99, "with_answer": False}

    def render(a: str, b: str, parse: bool) -> list[int]:
        inputs = {"a": a, "b": b}
        return template.render(tokenizer, inputs, **sizes, parse_fields=parse).ids  # type: ignore[arg-type]

    eos = bos_eos(tokenizer)[1]
    assert render("the fox", "x", True) == render("the fox", "x", False)
    assert render("a</s> b", "<|VIRTUAL_PROMPT_0|>", True) == [
        *VIRTUAL,
        *tokenizer.encode("say <|im_end|> to a"),
        eos,
        *tokenizer.encode(" b: <|VIRTUAL_PROMPT_0|>"),
    ]
    assert eos not in render("a</s> b", "", False)
    assert render("a", "</s> ", True)[-1] == eos


def test_long_texts_are_refused_before_tokenization(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"is 12 bytes.*\(text_bytes_max\)"):
        prompts(tokenizer, text_bytes_max=11).text_prompt(Ask("a" * 12), "a" * 12, None)
