"""OpenAI fields of other servers: values that are accepted without effect, and reasons of refusals.

Clients and routers send fields of OpenAI, vLLM, SGLang, TensorRT-LLM, llama.cpp and Dynamo that
this server does not have, most of them with the value of an absent field. These values are in the
table below, and are accepted. Any other value would change the answer or the response, so it is
refused with the reason. null is accepted for every field. The fields that this server has are in
`completion_request` and `chat`.

Clients also send earlier answers back as messages, with the fields of the server or the library
that returned them. Fields that only describe the earlier answer (`REPLAYED_FIELDS`) are accepted
with any value.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UnsupportedField:
    """A field that this server does not have: the reason of refusals, and its neutral values.

    The reason also says what to do instead, if there is something.
    """

    reason: str
    neutral_values: tuple[Any, ...] = ()  # Values that have the effect of an absent field.

    def is_neutral(self, value: Any) -> bool:
        # In Python, True equals 1.
        return any(
            isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
            for neutral in self.neutral_values
        )

    def refusal(self, name: str) -> str:
        """Return the error message for a value that is not neutral."""
        if not self.neutral_values:
            return f"{name} is not supported: {self.reason}"
        values = " or ".join(map(json.dumps, self.neutral_values))
        return f"{name} can only be {values} here: {self.reason}"


def _fields(names: str, reason: str, *neutral_values: Any) -> dict[str, UnsupportedField]:
    return dict.fromkeys(names.split(), UnsupportedField(reason, neutral_values))


_INSTEAD = "this server has another name for it: use "
_CHATS_ONLY = "it is a field of chats; use /v1/chat/completions"
_TEXT_ONLY = "the models read and write text only"
_TEMPLATE = "the chat template controls it: use chat_template_kwargs"
_DISAGGREGATION = "this server neither sends nor receives KV blocks"
_SAMPLER = "this server does not have this sampling rule"

UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = {
    # OpenAI.
    **_fields("modalities", _TEXT_ONLY, ["text"]),
    **_fields("audio", _TEXT_ONLY),
    **_fields("prediction", "this server has no predicted outputs"),
    **_fields("web_search_options", "this server does not search the web"),
    **_fields(
        "service_tier",
        "this server has one tier; service_class and priority order the requests",
        "auto",
        "default",
    ),
    # Reasoning models. This server returns the whole text of an answer, with its reasoning.
    **_fields("include_reasoning", "the text of an answer contains its reasoning", True),
    **_fields(
        "separate_reasoning stream_reasoning",
        "the text of an answer contains its reasoning",
        True,
        False,
    ),
    **_fields("enable_thinking thinking_token_budget thinking_budget", _TEMPLATE),
    **_fields("thinking", _TEMPLATE, {"type": "disabled"}),
    **_fields("reasoning", _INSTEAD + "reasoning_effort", {}),
    # Response contents.
    **_fields("detokenize", "answers have a text; return_token_ids adds the token ids", True),
    **_fields("no_stop_trim", _INSTEAD + "include_stop_str_in_output", False),
    **_fields("return_full_text", _INSTEAD + "echo", False),
    **_fields("return_logprob", _INSTEAD + "logprobs", False),
    **_fields("n_probs top_logprobs_num", _INSTEAD + "logprobs", 0),
    **_fields("logprob_start_len", _INSTEAD + "prompt_logprobs", -1),
    **_fields(
        "return_hidden_states return_routed_experts return_context_logits return_generation_logits "
        "return_perf_metrics return_meta_info return_cached_tokens_details timings_per_token",
        "responses do not have these contents",
        False,
    ),
    # Chats.
    **_fields("echo", "chats do not return the prompt; use /v1/completions", False),
    **_fields("documents", _TEMPLATE, []),
    **_fields("continue_final_message", _CHATS_ONLY, False),
    **_fields("add_generation_prompt", _CHATS_ONLY, True),
    **_fields("chat_template_kwargs", _CHATS_ONLY, {}),
    **_fields("reasoning_effort", _CHATS_ONLY, "none"),
    **_fields("tools", _CHATS_ONLY, []),
    **_fields("tool_choice", _CHATS_ONLY, "none", "auto"),
    **_fields("parallel_tool_calls", _CHATS_ONLY, True, False),
    **_fields("top_logprobs", _CHATS_ONLY, 0),
    **_fields("functions", "send tools instead", []),
    **_fields("function_call", "send tool_choice instead", "none", "auto"),
    **_fields("images videos", _TEXT_ONLY, []),
    **_fields("mm_processor_kwargs media_io_kwargs", _TEXT_ONLY, {}),
    **_fields("use_audio_in_video", _TEXT_ONLY, False),
    **_fields("safe_prompt", "this server adds no text to prompts", False),
    # Prompts, adapters, and identification of requests.
    **_fields("prompt_embeds", "a request has a text or token ids, no embeddings"),
    **_fields("lora_path lora_request lora_adapters", "name an adapter in model", "", []),
    **_fields("rid", _INSTEAD + "request_id"),
    **_fields("extra_key", _INSTEAD + "cache_salt", ""),
    **_fields("cache_prompt", "the setting prefix_cache controls it", True),
    **_fields("id_slot slot_id", "this server keeps no state between requests", -1),
    **_fields("session_params", "this server keeps no state between requests", {}),
    # Guided decoding.
    **_fields("regex", _INSTEAD + "guided_regex"),
    **_fields("ebnf", _INSTEAD + "guided_grammar"),
    **_fields("json_schema", _INSTEAD + "response_format or guided_json"),
    **_fields("guided_json_object", _INSTEAD + "response_format", False),
    **_fields(
        "guided_decoding_backend", "this server has one backend", "auto", "guidance", "llguidance"
    ),
    **_fields("guided_whitespace_pattern", "the backend determines the white space"),
    **_fields("structural_tag", "this server has no structural tags"),
    # Sampling.
    **_fields("max_new_tokens n_predict max_length", _INSTEAD + "max_tokens"),
    **_fields("min_length min_new_tokens", _INSTEAD + "min_tokens", 0),
    **_fields("sampling_seed random_seed", _INSTEAD + "seed", -1),
    **_fields("repeat_penalty", _INSTEAD + "repetition_penalty", 1),
    **_fields("typ_p", _INSTEAD + "typical_p", 1),
    **_fields("num_beams", _INSTEAD + "use_beam_search and beam_width", 1),
    **_fields("best_of", "it is a field of /v1/completions", 1),
    **_fields("stop_regex", _INSTEAD + "stop, which has texts", [], ""),
    **_fields("do_sample", "temperature 0 is greedy decoding, any other temperature samples"),
    **_fields(
        "mirostat top_a xtc_probability dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff "
        "smoothing_factor penalty_alpha",
        _SAMPLER,
        0,
    ),
    **_fields("tfs_z", _SAMPLER, 1),
    **_fields("temperature_last", _SAMPLER, False),
    **_fields("watermark", "this server has no watermarks", False),
    **_fields("repetition_detection", _SAMPLER),
    **_fields("logits_processors", "a request cannot contain programs", []),
    **_fields("custom_logit_processor", "a request cannot contain programs", ""),
    **_fields("custom_params", "a request cannot contain programs", {}),
    # Extensions and routers.
    **_fields("vllm_xargs nvext extra_args", "this server has no such extensions", {}),
    **_fields("kv_transfer_params ec_transfer_params disaggregated_params", _DISAGGREGATION, {}),
    **_fields(
        "bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank data_parallel_rank "
        "routed_dp_rank",
        _DISAGGREGATION,
    ),
}

# Fields of an earlier answer, in OpenAI's API, its extensions and litellm's responses.
REPLAYED_FIELDS = frozenset(
    {
        "annotations",
        "cache_control",
        "citations",
        "created_at",
        "extra_content",
        "finish_reason",
        "id",
        "index",
        "logprobs",
        "parsed",
        "parsed_arguments",
        "provider_specific_fields",
        "reasoning_details",
        "reasoning_items",
        "reasoning_signature",
        "status",
        "stop_reason",
        "thinking_blocks",
        "thought_signature",
        "token_ids",
        "type",
    }
)
# Fields of messages that are accepted with the value of an absent field only.
_NEUTRAL_MESSAGE_VALUES: Mapping[str, Any] = {"images": [], "prefix": False, "partial": False}


def can_ignore_in_message(name: str, value: Any) -> bool:
    """Return whether a field of a message, or of a tool call in it, can be ignored."""
    if name in _NEUTRAL_MESSAGE_VALUES:
        return bool(value == _NEUTRAL_MESSAGE_VALUES[name])
    return name in REPLAYED_FIELDS
