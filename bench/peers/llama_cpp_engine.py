"""llama.cpp engine: writes a checkpoint as GGUF and generates through llama.cpp's C API.

The module runs in the virtual environment of llama.cpp: it imports numpy, gguf, safetensors and
llama_cpp, but no module of this repository. As in the llama.cpp server, one decode call computes
the next token of all sequences.
"""

import ctypes
import json
import os
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
GenerateFunction = Callable[[Prompts, int], int]
SEQUENCES_MAX = 32
CONTEXT_TOKENS = 1024
BATCH_TOKENS = 4096
# For each model type, maps a setting that a GGUF file needs to its key in the transformers config.
_LLAMA_KEYS = {
    "layers": "num_hidden_layers",
    "context": "max_position_embeddings",
    "width": "hidden_size",
    "heads": "num_attention_heads",
}
CONFIG_KEYS: dict[str, dict[str, str]] = {
    "gpt2": {
        "layers": "n_layer",
        "context": "n_positions",
        "width": "n_embd",
        "heads": "n_head",
    },
    "llama": _LLAMA_KEYS,
    "qwen3_moe": _LLAMA_KEYS,
}
EXPERT_NAME = re.compile(r"(.*\.mlp\.experts\.)(\d+)(\..*)")  # As (before, number, after).


def open_engine(model: str, weights: str) -> tuple[GenerateFunction, str]:
    import numpy as np

    llama_cpp: Any = import_module("llama_cpp")
    quantization = {"bf16": "BF16", "int8": "Q8_0"}[weights]
    path = write_gguf(Path(model), quantization)
    llama_cpp.llama_backend_init()
    llama_model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    if not llama_model:
        raise RuntimeError(f"llama.cpp cannot load {path.name}")
    threads = len(os.sched_getaffinity(0))
    context_params = llama_cpp.llama_context_default_params()
    context_params.n_ctx = SEQUENCES_MAX * CONTEXT_TOKENS
    context_params.n_batch = BATCH_TOKENS
    context_params.n_ubatch = 512
    context_params.n_seq_max = SEQUENCES_MAX
    context_params.n_threads = threads
    context_params.n_threads_batch = threads
    context_params.kv_unified = False
    context = llama_cpp.llama_init_from_model(llama_model, context_params)
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode_batch(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode tokens; return the argmax of the logits of each token whose logits are requested.

        A token is (sequence, position, id, whether its logits are requested).
        """
        batch.n_tokens = len(tokens)
        for index, (sequence, position, token, needs_logits) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.logits[index] = needs_logits
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
        assert llama_cpp.llama_decode(context, batch) == 0
        best_tokens = []
        for index, (_, _, _, needs_logits) in enumerate(tokens):
            if not needs_logits:
                continue
            logits = ctypes.cast(
                llama_cpp.llama_get_logits_ith(context, index), ctypes.POINTER(ctypes.c_float)
            )
            best_tokens.append(int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax()))
        return best_tokens

    def generate(prompts: Prompts, new_tokens: int) -> int:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens = [
            (sequence, position, token, position == len(ids) - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        best_tokens, token_count = decode_batch(tokens), len(prompts)
        for step_index in range(new_tokens - 1):
            best_tokens = decode_batch(
                [
                    (sequence, len(prompts[sequence]) + step_index, token_id, True)
                    for sequence, token_id in enumerate(best_tokens)
                ]
            )
            token_count += len(best_tokens)
        return token_count

    description = f"{version('llama-cpp-python')}, {quantization}, {threads} threads, KV f16"
    return generate, f"{description}, n_batch {BATCH_TOKENS}, n_ubatch 512"


def write_gguf(model: Path, quantization: str) -> Path:
    """Write a GGUF file with llama.cpp's tensor names and an empty vocabulary."""
    from safetensors.torch import load_file

    gguf: Any = import_module("gguf")
    config = json.loads((model / "config.json").read_text())
    model_type = config["model_type"]
    path = model.parent / f"{quantization}.gguf"
    arch = model_type.upper().replace("_", "")  # llama.cpp's name of qwen3_moe is qwen3moe.
    writer = gguf.GGUFWriter(str(path), arch.lower())
    _write_metadata(writer, config)
    layers = config[CONFIG_KEYS[model_type]["layers"]]
    tensor_names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), layers)
    for name, tensor in _stack_experts(load_file(str(model / "model.safetensors"))).items():
        gguf_name = tensor_names.get_name(name.removeprefix("transformer."), (".weight", ".bias"))
        if gguf_name is None:
            continue
        values = _gguf_layout(name, tensor.float().numpy(), config)
        # As in llama.cpp's converter, vectors and routers stay in fp32; with Q8_0, position
        # embeddings do, too.
        is_unquantized = (
            values.ndim == 1
            or "ffn_gate_inp" in gguf_name
            or (quantization == "Q8_0" and "position_embd" in gguf_name)
        )
        if is_unquantized:
            writer.add_tensor(gguf_name, values)
        else:
            quantization_type = getattr(gguf.GGMLQuantizationType, quantization)
            writer.add_tensor(
                gguf_name,
                gguf.quants.quantize(values, quantization_type),
                raw_dtype=quantization_type,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stack_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Replace the weights of single experts by one tensor of all experts of a layer."""
    import torch

    stacked: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors.items():
        match = EXPERT_NAME.fullmatch(name)
        if match is None:
            stacked[name] = tensor
        else:
            experts.setdefault(match[1] + match[3].lstrip("."), {})[int(match[2])] = tensor
    for name, weights in experts.items():
        stacked[name] = torch.stack([weights[expert] for expert in sorted(weights)])
    return stacked


def _write_metadata(writer: Any, config: dict[str, Any]) -> None:
    model_type = config["model_type"]
    config_keys = CONFIG_KEYS[model_type]
    width, heads = config[config_keys["width"]], config[config_keys["heads"]]
    writer.add_block_count(config[config_keys["layers"]])
    writer.add_context_length(config[config_keys["context"]])
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if model_type == "gpt2":
        writer.add_feed_forward_length(config.get("n_inner") or 4 * width)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or width // heads
    writer.add_rope_dimension_count(head_dim)
    if model_type == "qwen3_moe":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    rope_base = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 1e4)
    writer.add_rope_freq_base(rope_base)


def _gguf_layout(name: str, values: Any, config: dict[str, Any]) -> Any:
    """Arrange a tensor as llama.cpp expects it.

    llama.cpp expects linear weights as (out, in); transformers' GPT-2 stores (in, out). In Llama's
    query and key weights, llama.cpp expects the two channels of a rotary pair next to each other;
    transformers stores them half a head apart.
    """
    import numpy as np

    if config["model_type"] == "gpt2":
        is_linear = values.ndim == 2 and ".h." in f".{name}"
        values = values.T if is_linear else values
    elif config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads_key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        heads, (rows, width) = config[heads_key], values.shape
        values = values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2)
        values = values.reshape(rows, width)
    return np.ascontiguousarray(values, dtype=np.float32)
