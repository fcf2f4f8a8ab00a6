"""KServe v2 metadata: names, kinds and aliases of the inputs, and datatypes of the outputs.

There is one table for the inputs, one for their aliases in Triton's vLLM and TensorRT-LLM backends,
and one for the outputs. Metadata responses, input parsing and errors all read these tables.
"""

from collections.abc import Mapping
from typing import Any, Literal

from gpt.errors import RequestError
from gpt.settings import MISSPELLING_SIMILARITY_MIN, short_repr, suggest_nearest
from serving.protocols.kserve.tensors import BYTES
from serving.request import RefusedError

# Defines how the value of an input is parsed: see `_PARSERS` in `inputs`.
InputKind = Literal["text", "texts", "integer", "integers", "number", "flag", "object", "early"]

# Errors quote at most this number of characters of a name, since gRPC trailers have limited size.
NAME_CHARACTERS_MAX = 80
# Request parameters that are not inputs. Names that begin with `triton_` are reserved as well.
RESERVED_PARAMETERS = {"priority", "timeout", "sequence_id", "sequence_start", "sequence_end"}

# Inputs that set one field of an `Ask`: the kind of the input (which defines how the value is
# parsed), and the field.
SAMPLING_INPUTS: Mapping[str, tuple[InputKind, str]] = {
    "max_tokens": ("integer", "max_new_tokens"),
    "min_tokens": ("integer", "min_new_tokens"),
    "temperature": ("number", "temperature"),
    "top_k": ("integer", "top_k"),
    "top_p": ("number", "top_p"),
    "min_p": ("number", "min_p"),
    "typical_p": ("number", "typical_p"),
    "repetition_penalty": ("number", "repetition_penalty"),
    "presence_penalty": ("number", "presence_penalty"),
    "frequency_penalty": ("number", "frequency_penalty"),
    "no_repeat_ngram_size": ("integer", "no_repeat_ngram_size"),
    "n": ("integer", "answers"),
    "seed": ("integer", "seed"),
    "stop": ("texts", "stop_strings"),
    "stop_token_ids": ("integers", "stop_token_ids"),
    "include_stop_str_in_output": ("flag", "stop_in_text"),
    "ignore_eos": ("flag", "ignore_ends"),
    "bad_words": ("texts", "bad_words"),
    "allowed_token_ids": ("integers", "allowed_token_ids"),
    "logprobs": ("integer", "logprobs"),
    "truncate_prompt_tokens": ("integer", "truncate_tokens"),
    "add_special_tokens": ("flag", "add_special_tokens"),
    "parse_special_tokens": ("flag", "parse_special_tokens"),
    "cache_salt": ("text", "cache_salt"),
    "beam_width": ("integer", "beam_width"),
    "length_penalty": ("number", "length_penalty"),
    "early_stopping": ("early", "early_stopping"),
}
# Inputs that are not copied into one field of an `Ask`: they are converted, or select outputs.
_OTHER_INPUTS: Mapping[str, InputKind] = {
    "text_input": "text",
    "input_ids": "integers",
    "inputs": "object",
    "adapter_id": "text",
    "stream": "flag",
    "exclude_input_in_output": "flag",
    "return_finish_reason": "flag",
    "return_cumulative_logprob": "flag",
    "return_logprobs": "flag",
    "return_log_probs": "flag",
    "return_num_input_tokens": "flag",
    "return_num_output_tokens": "flag",
    "sampling_parameters": "object",
    "logit_bias": "object",
    "guided_decoding": "object",
    "guided_decoding_guide_type": "text",
    "guided_decoding_guide": "text",
    "skip_special_tokens": "flag",
    "spaces_between_special_tokens": "flag",  # Ignored, as in OpenAI's API.
    "best_of": "integer",
    "end_id": "integer",
    "pad_id": "integer",
}
# Inputs of Triton's backends that have only one allowed value here, the backend's default. They are
# accepted, because clients send them with this value.
NEUTRAL_INPUTS: Mapping[str, tuple[InputKind, Any]] = {
    **dict.fromkeys(
        (
            "return_context_logits",
            "return_generation_logits",
            "return_perf_metrics",
            "return_hidden_states",
            "return_encoder_output",
            "return_kv_cache_reuse_stats",
            "use_beam_search",
            "use_draft_logits",
            "flat_logprobs",
            "no_stop_trim",
            "skip_reading_prefix_cache",
        ),
        ("flag", False),
    ),
    "detokenize": ("flag", True),
    "num_draft_tokens": ("integer", 0),
    "prompt_ignore_length": ("integer", 0),
    "beam_search_diversity_rate": ("number", 0.0),
    "top_p_decay": ("number", 1.0),
    "extra_args": ("object", {}),
}
INPUT_KINDS: Mapping[str, InputKind] = {
    **_OTHER_INPUTS,
    **{name: kind for name, (kind, _) in SAMPLING_INPUTS.items()},
    **{name: kind for name, (kind, _) in NEUTRAL_INPUTS.items()},
}
INPUT_ALIASES: Mapping[str, str] = {
    "prefix_id": "adapter_id",
    "lora_name": "adapter_id",
    "streaming": "stream",
    "exclude_input_from_output": "exclude_input_in_output",
    "num_return_sequences": "n",
    "stop_words": "stop",
    "min_length": "min_tokens",
    "random_seed": "seed",
    "structured_outputs": "guided_decoding",
}
# TensorRT-LLM's newer backend puts this prefix before the names of sampling inputs.
SAMPLING_PREFIX = "sampling_param_"

_PROMPT_TABLE_HINT = (
    "a request cannot contain virtual tokens; put the adapter into the server's adapter directory, "
    "and name it as the model or in adapter_id"
)
_LORA_HINT = (
    "a request cannot contain or number a LoRA; put it into the server's adapter directory or load "
    "it with /v1/load_lora_adapter, and name it as the model or in lora_name"
)
_UNSUPPORTED_INPUTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("prompt_embedding_table", "prompt_table_extra_id", "prompt_vocab_size"), _PROMPT_TABLE_HINT
    ),
    **dict.fromkeys(
        ("lora_task_id", "lora_weights", "lora_config", "lora_id", "lora_path"), _LORA_HINT
    ),
    "embedding_bias_words": "set logit_bias, by token id, in sampling_parameters",
    "embedding_bias_weights": "set logit_bias, by token id, in sampling_parameters",
    "image": "this model accepts text only",
}

# The datatype of each output, and its flag. The flag is a boolean input that requests the output if
# the request lists no outputs. None: the output has no flag.
OUTPUTS: Mapping[str, tuple[str, str | None]] = {
    "text_output": (BYTES, None),
    "finish_reason": (BYTES, "return_finish_reason"),
    "cumulative_logprob": ("FP32", "return_cumulative_logprob"),
    "logprobs": (BYTES, "return_logprobs"),
    "num_input_tokens": ("UINT32", "return_num_input_tokens"),
    "num_output_tokens": ("UINT32", "return_num_output_tokens"),
    "num_virtual_tokens": ("UINT32", None),
    "num_cached_tokens": ("UINT32", None),
    "output_ids": ("INT32", None),
    "cum_log_probs": ("FP32", "return_log_probs"),
    "output_log_probs": ("FP32", "return_log_probs"),
    "sequence_index": ("INT32", None),
    "seed": ("UINT64", None),
    "adapter": (BYTES, None),
}
# Maps the field names in the admission's errors to this protocol's names, which the callers know.
# The admission names fields of an `Ask`, and parts of fields, such as `guide.json`.
FIELD_NAMES: Mapping[str, str] = {
    **{field: name for name, (_, field) in SAMPLING_INPUTS.items()},
    "text": "text_input",
    "prompt": "text_input",
    "token_ids": "input_ids",
    "adapter": "adapter_id",
    "stops.strings": "stop",
    "stops.token_ids": "stop_token_ids",
    **dict.fromkeys(("guide", "guide.json", "guide.regex"), "guided_decoding"),
    **dict.fromkeys(("guide.choice", "guide.grammar"), "guided_decoding"),
}
LOGPROB_OUTPUTS = {"cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"}


def canonical_name(name: str) -> str:
    """Return the canonical spelling of an input's name; raise an error if the name is unknown."""
    bare_name = name.removeprefix(SAMPLING_PREFIX)
    canonical = INPUT_ALIASES.get(bare_name, bare_name)
    if canonical in INPUT_KINDS:
        return canonical
    if bare_name in _UNSUPPORTED_INPUTS:
        raise RefusedError(
            "UNSUPPORTED",
            f"{bare_name} is not supported here: {_UNSUPPORTED_INPUTS[bare_name]}",
            bare_name,
        )
    names = (*INPUT_KINDS, *INPUT_ALIASES)
    suggestion = suggest_nearest(bare_name, names, MISSPELLING_SIMILARITY_MIN)
    raise RequestError(
        f"{short_repr(name)} is not an input of this model; {suggestion}",
        name[:NAME_CHARACTERS_MAX],
    )
