"""Prompt templates: an example's ids before its answer equal the prompt's ids."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.adapters.prompt_template import PromptTemplate, RenderedPrompt
from gpt.errors import ConfigError, PromptTooLongError, RequestError
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer
from tests.support.trained_tokenizers import all_cases

V = 1000  # Larger than every vocabulary here: ids from 1000 on are virtual.
P0 = "<|VIRTUAL_PROMPT_0|>"
P1 = "<|VIRTUAL_PROMPT_1|>"
P2 = "<|VIRTUAL_PROMPT_2|>"
NAMES = ("bpe", "llama", "unigram", "gpt2", "byte_level", "llama_json", "metaspace")
WORDS = st.sampled_from(
    ["the fox", "", " ", "  over", "e\u0301", "漢字🙂", "?", "=", "\n", "12", "the"]
)
ATTACKS = st.sampled_from([P0, P1, "<prompt_0>", "{answer}", "{context}", "{", "}}", "</s>", "<s>"])
TEXT = st.lists(st.one_of(WORDS, ATTACKS), max_size=5).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    cases = all_cases(tmp_path_factory.mktemp("tokenizers"))
    return {name: case.ours for name, case in cases.items()}


@pytest.fixture(scope="module")
def llama(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["llama"]


@pytest.fixture(scope="module")
def gpt2(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["gpt2"]


class LettersTokenizer(NullTokenizer):
    """A tokenizer with one token per character."""

    def encode(
        self, text: str, *, allow_special: bool = False, continues_text: bool = False
    ) -> list[int]:
        return [ord(character) % 7 for character in text]


def render(template: PromptTemplate, tokenizer: Tokenizer, **inputs: str) -> RenderedPrompt:
    """A prompt; with an answer among the inputs, an example."""
    answer = template.answer_field in inputs
    return template.render(tokenizer, inputs, vocab_size=V, tokens_max=10_000, with_answer=answer)


def test_order_of_rendered_ids() -> None:
    # With numbers as tokens the ids can be read off the template.
    template = PromptTemplate(
        f"1 {P0} 2 {{a}} {P1}{P2} {{b}}", (2, 3, 1), eos=False, answer_field="b"
    )
    null = NullTokenizer(V)

    prompt = [1, V, V + 1, 2, 7, 8, V + 2, V + 3, V + 4, V + 5]
    assert render(template, null, a="7 8") == RenderedPrompt(prompt, 10, 0)
    assert render(template, null, a="7 8", b="9") == RenderedPrompt([*prompt, 9], 10, 0)
    assert template.virtual_tokens == 6
    assert template.fields == ("a", "b")


def test_marker_numbers_select_rows_in_any_order() -> None:
    null = NullTokenizer(V)
    template = PromptTemplate(f"{P1} 5 {P0} {{a}}", (2, 1))
    assert render(template, null, a="6").ids == [V + 2, 5, V, V + 1, 6]


def test_text_between_virtual_tokens_is_tokenized_in_one_piece(gpt2: Tokenizer) -> None:
    template = PromptTemplate(f"{P0}th{{a}} {{b}}{P1}over", (1, 1))
    middle = gpt2.encode("the lazy dog")
    assert len(middle) < len(gpt2.encode("th") + gpt2.encode("e lazy") + gpt2.encode(" dog"))
    assert render(template, gpt2, a="e lazy", b="dog").ids == [
        V,
        *middle,
        V + 1,
        *gpt2.encode("over"),
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(question=TEXT, context=TEXT, answer=TEXT, between=WORDS)
def test_ids_before_the_answer_equal_the_prompt(
    tokenizers: dict[str, Tokenizer],
    name: str,
    question: str,
    context: str,
    answer: str,
    between: str,
) -> None:
    tokenizer = tokenizers[name]
    text = f"{P0}Q: {{question}} {P1}\n{{context}}{between}{{answer}}"
    template = PromptTemplate(text, (2, 3), answer_field="answer", eos=tokenizer.eos_id is not None)
    fields = {"question": question, "context": context}

    prompt = render(template, tokenizer, **fields)
    example = render(template, tokenizer, **fields, answer=answer)

    start = example.answer_start
    assert example.ids[:start] == prompt.ids
    assert start == prompt.answer_start == len(prompt.ids)
    # Whatever the fields contain, there are five virtual tokens, in order, and one eos.
    assert [i for i in example.ids if i >= V] == list(range(V, V + 5))
    eos_positions = [
        position for position, token in enumerate(example.ids) if token == tokenizer.eos_id
    ]
    assert eos_positions == ([len(example.ids) - 1] if template.eos else [])
    if name in ("llama", "gpt2", "byte_level", "llama_json"):
        tail = example.ids[example.ids.index(V + 4) + 1 :]
        assert tokenizer.decode(tail) == f"\n{context}{between}{answer}".rstrip(" ")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_token_spans_prompt_and_answer(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    template = PromptTemplate("th{answer}", answer_field="answer")
    prompt = tokenizer.encode("th")
    full_ids = tokenizer.encode("the")
    assert full_ids[: len(prompt)] != prompt, "or this tests nothing"

    example = render(template, tokenizer, answer="e")

    assert example.ids[: example.answer_start] == prompt
    assert tokenizer.decode(example.ids) == "the"
    assert example.ids[-1] == tokenizer.eos_id


def test_space_before_an_answer_is_part_of_the_answer(gpt2: Tokenizer) -> None:
    template = PromptTemplate("A: {answer}", answer_field="answer")
    assert render(template, gpt2).ids == gpt2.encode("A:")
    example = render(template, gpt2, answer="the")
    assert example.ids[example.answer_start : -1] == gpt2.encode(" the")


def test_prompt_ignores_a_given_answer(gpt2: Tokenizer) -> None:
    template = PromptTemplate("{q} A: {answer}", answer_field="answer")
    kwargs: Any = {"vocab_size": V, "tokens_max": 99, "with_answer": False}
    with_answer = template.render(gpt2, {"q": "the", "answer": "fox"}, **kwargs)
    assert with_answer == template.render(gpt2, {"q": "the"}, **kwargs)


def test_examples_without_an_answer_field_are_trained_entirely(gpt2: Tokenizer) -> None:
    template = PromptTemplate(f"{P0}{{text}}", (2,))
    kwargs: Any = {"vocab_size": V, "tokens_max": 99}
    example = template.render(gpt2, {"text": "the fox"}, **kwargs, with_answer=True)
    assert example.answer_start == 0
    assert example.ids == [V, V + 1, *gpt2.encode("the fox"), gpt2.eos_id]


def test_bos_position(llama: Tokenizer) -> None:
    text = llama.encode("the fox")
    bos = llama.bos_id
    for position, ids in (
        ("none", [V, V + 1, *text]),
        ("first", [bos, V, V + 1, *text]),
        ("text", [V, V + 1, bos, *text]),
    ):
        assert (
            render(PromptTemplate(f"{P0}{{text}}", (2,), bos=position), llama, text="the fox").ids
            == ids
        )
    middle = PromptTemplate(f"the fox{P0}{{text}}", (1,), bos="text")
    assert render(middle, llama, text="").ids == [bos, *text, V]
    with pytest.raises(
        ConfigError, match=r"requires the bos token, .* no such token; set bos to none"
    ):
        render(PromptTemplate(f"{P0}{{text}}", (1,), bos="first"), NullTokenizer(V), text="1")


NUMBERS = PromptTemplate(
    f"{P0} 1 {{context}} 2 {{question}} {{answer}}",
    (3,),
    truncate_field="context",
    answer_field="answer",
    eos=False,
)


def test_truncate_field_is_cut_until_the_prompt_fits() -> None:
    null = NullTokenizer(V)
    inputs = {"context": "10 11 12 13 14", "question": "20", "answer": "30"}

    def fit(tokens_max: int, answer: bool) -> tuple[list[int], int]:
        rendered = NUMBERS.render(
            null, inputs, vocab_size=V, tokens_max=tokens_max, with_answer=answer
        )
        return rendered.ids[3:], rendered.truncated_tokens

    assert fit(11, False) == ([1, 10, 11, 12, 13, 14, 2, 20], 0)
    assert fit(10, False) == ([1, 10, 11, 12, 13, 2, 20], 1)
    assert fit(10, True) == ([1, 10, 11, 12, 2, 20, 30], 2)
    assert fit(7, True) == ([1, 2, 20, 30], 5)
    with pytest.raises(RequestError) as caught:
        fit(6, True)
    assert str(caught.value) == (
        "even without the text of 'context', prompt and answer have 4 tokens + 3 virtual tokens "
        "= 7, over the limit of 6; shorten the text by 1 tokens"
    )
    assert caught.value.field == "inputs"
    with pytest.raises(RequestError, match="the virtual tokens alone reach the limit"):
        fit(3, False)


@pytest.mark.parametrize("truncate_field", [None, "a"])
def test_text_limit_holds_for_the_rendered_text(truncate_field: str | None) -> None:
    template = PromptTemplate(
        f"{P0}1 é{{a}}{{a}} {{b}} {{a}}{{c}}",
        (2,),
        truncate_field=truncate_field,
        answer_field="c",
    )

    def fits(text_bytes_max: int | None) -> bool:
        inputs = {"a": "2 €", "b": "3"}
        try:
            template.render(
                LettersTokenizer(V),
                inputs,
                vocab_size=V,
                tokens_max=100,
                with_answer=False,
                text_bytes_max=text_bytes_max,
            )
        except RequestError as error:
            return "text_bytes_max" not in str(error)
        return True

    text = "1 é2 €2 € 3 2 €"
    assert fits(None) and fits(len(text.encode())) and not fits(len(text.encode()) - 1)


def test_large_text_is_refused_before_it_is_joined() -> None:
    template = PromptTemplate(P0 + "{x}" * 100_000, (1,))
    with pytest.raises(RequestError, match=r"are 100000000000 bytes of text"):
        template.render(
            NullTokenizer(V),
            {"x": "a" * 1_000_000},
            vocab_size=V,
            tokens_max=100,
            with_answer=False,
            text_bytes_max=1 << 20,
        )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(context=TEXT, tokens_left=st.integers(0, 40))
def test_truncated_example_keeps_its_answer_and_equals_the_truncated_prompt(
    tokenizers: dict[str, Tokenizer], name: str, context: str, tokens_left: int
) -> None:
    tokenizer = tokenizers[name]
    eos = tokenizer.eos_id is not None
    roles: Any = {"truncate_field": "context", "answer_field": "answer", "eos": eos}
    template = PromptTemplate(f"{P0}{{context}} what is the answer? {{answer}}", (2,), **roles)
    fixed = len(render(template, tokenizer, context="", answer="fox").ids)
    inputs = {"context": context * 9, "answer": "fox"}

    # One more token than with an empty field: a truncated text may merge with what follows.
    tokens_max = fixed + 3 + tokens_left
    example = template.render(
        tokenizer, inputs, vocab_size=V, tokens_max=tokens_max, with_answer=True
    )

    assert len(example.ids) <= tokens_max
    assert not eos or example.ids[-1] == tokenizer.eos_id
    # Some prefix of the field, cut between characters, gives exactly these ids.
    truncations = [inputs["context"][:n] for n in range(len(inputs["context"]) + 1)]
    prompts = [render(template, tokenizer, context=truncation).ids for truncation in truncations]
    assert example.ids[: example.answer_start] in prompts


def test_too_long_prompt_error_has_the_token_counts() -> None:
    template = PromptTemplate(f"{P0} {{text}}", (2,))
    with pytest.raises(
        PromptTooLongError, match=r"has 5 tokens \+ 2 virtual tokens = 7, over .* of 4;"
    ):
        template.render(
            NullTokenizer(V), {"text": "1 2 3 4 5"}, vocab_size=V, tokens_max=4, with_answer=False
        )


def test_empty_prompt_is_refused(gpt2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        render(PromptTemplate("{text}"), gpt2, text="  ")


@pytest.mark.parametrize(
    ("inputs", "message", "field"),
    [
        ({"q": "x"}, r"field 'context' is missing; the template needs context, q$", "context"),
        ({"q": "x", "contxt": "y"}, "'contxt' is not in the template; did you mean 'con", "contxt"),
        ({"q": "x", "zz": "y"}, "'zz' is not in the template; choose one of: a, context, q", "zz"),
        ({"q": "x", "context": 3}, "'context' is a int; it must be a string", "context"),
    ],
)
def test_invalid_fields_are_refused_by_name(
    gpt2: Tokenizer, inputs: dict[str, Any], message: str, field: str
) -> None:
    template = PromptTemplate("{context} {q} {a}", answer_field="a")
    with pytest.raises(RequestError, match=message) as caught:
        template.render(gpt2, inputs, vocab_size=V, tokens_max=99, with_answer=False)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"text": f"{P0}{P0}", "splits": (1, 1)},
            r"the markers \[0, 0\], but `splits` is \[1, 1\];",
        ),
        ({"text": f"{P1}", "splits": (1,)}, r"the markers \[1\], but `splits` is \[1\];"),
        ({"text": f"{P0}"}, r"the markers \[0\], but `splits` is \[\];"),
        ({"text": "{a}", "splits": (1,)}, r"the markers \[\], but `splits` is \[1\];"),
        ({"text": f"{P0}", "splits": (0,)}, "each number must be at least 1 virtual token"),
        ({"text": "<|VIRTUAL_PROMPT_x|>"}, "broken marker"),
        ({"text": "{a}", "bos": "last"}, "choose one of: none, first, text"),
        ({"text": "{a}", "truncate_field": "b"}, "truncate_field 'b' is not in the template"),
        ({"text": "a", "answer_field": "b"}, "'b' is not in the template; the template has no"),
        ({"text": "{a}.", "answer_field": "a"}, "must occur once, at the end of the template"),
        ({"text": "{a}{a}", "answer_field": "a"}, "must occur once"),
        (
            {"text": "{a}", "answer_field": "a", "truncate_field": "a"},
            "the answer cannot be",
        ),
    ],
)
def test_invalid_template_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptTemplate(**arguments)


def test_braces_around_other_text_are_literal(gpt2: Tokenizer) -> None:
    template = PromptTemplate('{"label": "{label}", {}, {not a name}}')
    assert template.fields == ("label",)
    expected = gpt2.encode('{"label": "x", {}, {not a name}}')
    assert render(template, gpt2, label="x").ids == expected


def test_template_dict_round_trip_refuses_unknown_keys() -> None:
    assert PromptTemplate.from_dict(NUMBERS.to_dict()) == NUMBERS
    assert PromptTemplate.from_dict({"text": "{a}"}) == PromptTemplate("{a}")
    for record, message in (
        ({"text": "{a}", "split": [1]}, "template: unknown key 'split'; did you mean 'splits'"),
        ({"splits": [1]}, "template: 'text' is missing"),
        ({"text": P0, "splits": ["1"]}, "splits is '1'; it must be a whole number"),
        ({"text": 3}, "text is 3; it must be a text"),
    ):
        with pytest.raises(ConfigError, match=message):
            PromptTemplate.from_dict(record)


def test_default_template_puts_all_rows_before_the_text(gpt2: Tokenizer) -> None:
    assert render(PromptTemplate(f"{P0}{{text}}", (3,)), gpt2, text="the").ids == [
        V,
        V + 1,
        V + 2,
        *gpt2.encode("the"),
    ]
