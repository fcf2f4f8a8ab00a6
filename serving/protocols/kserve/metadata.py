"""The names of KServe's v2 wire: what can be asked for, and what is told.

One table each of what an input is, of the other names that it has in Triton's vLLM and TensorRT-LLM
backends, and of outputs. Metadata, reading and refusals go by these alone.
"""

from collections.abc import Mapping
from typing import Literal

from gpt.errors import RequestError
from gpt.settings import nearest, shown
from serving.protocols.kserve.tensors import BYTES
from serving.request import RefusedError

Kind = Literal["text", "texts", "integer", "integers", "number", "flag", "object", "early"]

# Characters of a name that nobody knows: an error's trailers have no room for more.
NAME_SHOWN = 80
# Of a request's parameters: not inputs by another way. Names that begin with triton_ are too.
RESERVED = {"priority", "timeout", "sequence_id", "sequence_start", "sequence_end"}

# What is wanted, and the field of an Ask that it becomes.
SAMPLING: Mapping[str, tuple[Kind, str]] = {
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
    "beam_width": ("integer", "beam_width"),
    "length_penalty": ("number", "length_penalty"),
    "early_stopping": ("early", "early_stopping"),
}
# What becomes a field in some other way.
_OTHERS: Mapping[str, Kind] = {
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
    "best_of": "integer",
    "end_id": "integer",
    "pad_id": "integer",
}
# What those backends can do in two ways and this server in one: clients send that along.
FIXED: Mapping[str, bool] = {
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
    "use_beam_search": False,
    "flat_logprobs": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "detokenize": True,
}
KINDS: Mapping[str, Kind] = {
    **_OTHERS,
    **{name: kind for name, (kind, _) in SAMPLING.items()},
    **dict.fromkeys(FIXED, "flag"),
}
ALIASES: Mapping[str, str] = {
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
# TensorRT-LLM's newer backend puts this before the names of sampling.
PREFIX = "sampling_param_"

_OWN_ROWS = "rows of a prompt are an adapter's here; have it in the server's directory, name it as "
_OWN_ROWS += "the model or in adapter_id"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("prompt_embedding_table", "prompt_table_extra_id"), _OWN_ROWS),
    **dict.fromkeys(("prompt_vocab_size", "lora_task_id", "lora_weights"), _OWN_ROWS),
    **dict.fromkeys(("lora_config", "lora_id", "lora_path"), _OWN_ROWS),
    "embedding_bias_words": "say logit_bias, by token ids, in sampling_parameters",
    "embedding_bias_weights": "say logit_bias, by token ids, in sampling_parameters",
    "image": "this model reads text only",
}

# Each output, its datatype, and the flag that asks for it where a request lists no outputs.
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
# What an ask calls otherwise, for what the admission refuses.
NAMES: Mapping[str, str] = {
    **{field: name for name, (_, field) in SAMPLING.items()},
    "text": "text_input",
    "prompt": "text_input",
    "token_ids": "input_ids",
    "adapter": "adapter_id",
    "stops.strings": "stop",
    "stops.token_ids": "stop_token_ids",
    **dict.fromkeys(("guide", "guide.json", "guide.regex"), "guided_decoding"),
    **dict.fromkeys(("guide.choice", "guide.grammar"), "guided_decoding"),
}
SCORED = {"cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"}


def known(name: str) -> str:
    """The one spelling of a name, or a refusal."""
    bare = name.removeprefix(PREFIX)
    name_here = ALIASES.get(bare, bare)
    if name_here in KINDS:
        return name_here
    if bare in _REFUSED:
        raise RefusedError("UNSUPPORTED", f"{bare} is not taken here: {_REFUSED[bare]}", bare)
    way = nearest(bare, (*KINDS, *ALIASES))
    raise RequestError(f"{shown(name)} is no input of this model; {way}", name[:NAME_SHOWN])
