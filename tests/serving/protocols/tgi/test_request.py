"""TGI requests: the `Ask` of each parameter, and refused combinations."""

import json
from typing import Any

import pytest

from gpt.errors import PreambleError
from serving.frontend.json_body import parse_request
from serving.messages import Guide
from serving.protocols.tgi.request import GenerateRequest, build_ask
from serving.request import Ask


def parse(**fields: Any) -> GenerateRequest:
    return parse_request(json.dumps({"inputs": "a", **fields}).encode(), GenerateRequest)


def ask(**parameters: Any) -> Ask:
    return build_ask(parse(parameters=parameters), stream=False)


def test_decoding_is_greedy_unless_a_sampling_rule_is_set() -> None:
    for greedy in ({}, {"temperature": 1.0}, {"temperature": 0, "do_sample": True}, {"top_p": 1}):
        assert ask(**greedy).temperature is None, greedy
    for sampled in ({"do_sample": True}, {"top_k": 5}, {"top_p": 0.5}, {"typical_p": 0.5}):
        assert ask(**sampled).temperature == 1.0, sampled
    assert ask(temperature=0.5, top_k=3, seed=7).temperature == 0.5
    assert ask(temperature=0.5, top_k=3, seed=7).seed == 7


def test_defaults_are_those_of_tgi() -> None:
    default = ask()
    assert default.max_new_tokens == 100 and default.fit_new_tokens
    assert default.logprobs is None and not default.stop_in_text
    assert ask(adapter_id="fox").max_new_tokens is None  # The adapter's own number.
    assert ask(adapter_id="fox").adapters == ("fox",)
    assert not ask(max_new_tokens=5).fit_new_tokens
    assert build_ask(parse(), stream=True).logprobs == ask(details=True).logprobs == 0
    assert ask(details=True, top_n_tokens=3).logprobs == 3
    assert ask(details=True, decoder_input_details=True).prompt_logprobs == 0
    assert ask(decoder_input_details=True).prompt_logprobs is None


def test_stop_sequences_are_part_of_the_text() -> None:
    for name in ("stop", "stop_sequences"):
        stopped = ask(**{name: ["b", "c"]})
        assert stopped.stop_strings == ("b", "c") and stopped.stop_in_text


def test_null_parameters_are_unset() -> None:
    names = "seed", "stop", "top_k", "top_p", "truncate", "grammar", "best_of", "watermark"
    assert ask(**dict.fromkeys(names)) == ask() == build_ask(parse(), stream=False)
    assert build_ask(parse(parameters=None, options={"use_cache": False}), stream=False) == ask()


@pytest.mark.parametrize(
    ("grammar", "guide"),
    [
        ({"type": "json", "value": {"type": "object"}}, Guide("json", '{"type": "object"}')),
        ({"type": "json", "value": '{"type": "object"}'}, Guide("json", '{"type": "object"}')),
        (
            {"type": "json_schema", "value": {"name": "a", "schema": {"type": "string"}}},
            Guide("json", '{"type": "string"}'),
        ),
        ({"type": "regex", "value": "a+"}, Guide("regex", "a+")),
    ],
)
def test_grammars_become_guides(grammar: dict[str, Any], guide: Guide) -> None:
    assert ask(grammar=grammar).guide == guide


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": 3}, "Expected `str`"),
        ({"input": "a"}, "did you mean 'inputs'"),
        ({"max_new_tokens": 3}, "belongs into parameters"),
        ({"parameters": {"max_tokens": 3}}, "unknown field 'max_tokens'"),
        ({"parameters": {"watermark": True}}, "watermark is not supported"),
        ({"parameters": {"best_of": 2}}, "greedy decoding has one completion"),
        ({"parameters": {"stop": ["a"], "stop_sequences": ["b"]}}, "mean the same"),
        ({"parameters": {"grammar": {"type": "regex", "value": 3}}}, "not a string"),
        ({"parameters": {"grammar": {"type": "json"}}}, "not a JSON schema"),
        ({"parameters": {"grammar": {"type": "bnf", "value": "a"}}}, "Invalid enum value"),
    ],
)
def test_invalid_requests_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PreambleError) as caught:
        build_ask(parse(**fields), stream=False)
    assert message in str(caught.value)


def test_streams_refuse_what_they_cannot_return() -> None:
    for parameters in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True}):
        with pytest.raises(PreambleError, match=next(iter(parameters))):
            parse(parameters=parameters).check_stream()
