"""llama.cpp for the comparison: a checkpoint written as GGUF, and its own C API to run it.

Runs in that engine's environment, so it imports numpy, gguf and llama_cpp, and nothing of ours. It
decodes in batches as llama.cpp's own server does: one call for the next token of all sequences.
"""

import ctypes
import json
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Run = Callable[[Prompts, int], int]
SEQUENCES, CONTEXT, BATCH = 32, 1024, 4096
# What transformers calls the settings that a GGUF file has, for each of its model types.
NAMES: dict[str, dict[str, str]] = {
    "gpt2": {
        "layers": "n_layer",
        "context": "n_positions",
        "width": "n_embd",
        "heads": "n_head",
    },
    "llama": {
        "layers": "num_hidden_layers",
        "context": "max_position_embeddings",
        "width": "hidden_size",
        "heads": "num_attention_heads",
    },
}


def engine(model: str, weights: str) -> tuple[Run, str]:
    import numpy as np

    c: Any = import_module("llama_cpp")
    kind = {"bf16": "BF16", "int8": "Q8_0"}[weights]
    path = written(Path(model), kind)
    c.llama_backend_init()
    loaded = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
    if not loaded:
        raise RuntimeError(f"llama.cpp does not load {path.name}")
    threads = len(os.sched_getaffinity(0))
    settings = c.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = SEQUENCES * CONTEXT, BATCH, 512
    settings.n_seq_max, settings.n_threads, settings.n_threads_batch = SEQUENCES, threads, threads
    settings.kv_unified = False
    context = c.llama_init_from_model(loaded, settings)
    size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    batch = c.llama_batch_init(BATCH, 0, 1)

    def step(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Tokens as (sequence, position, id, whether its logits are wanted); the best next ones."""
        batch.n_tokens = len(rows)
        for n, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.logits[n] = token, position, wanted
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
        assert c.llama_decode(context, batch) == 0
        best = []
        for n in (n for n, row in enumerate(rows) if row[3]):
            pointer = ctypes.cast(
                c.llama_get_logits_ith(context, n), ctypes.POINTER(ctypes.c_float)
            )
            best.append(int(np.ctypeslib.as_array(pointer, (size,)).argmax()))
        return best

    def run(prompts: Prompts, new: int) -> int:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        rows = [
            (s, place, token, place == len(ids) - 1)
            for s, ids in enumerate(prompts)
            for place, token in enumerate(ids)
        ]
        best, made = step(rows), len(prompts)
        for turn in range(new - 1):
            best = step([(s, len(prompts[s]) + turn, t, True) for s, t in enumerate(best)])
            made += len(best)
        return made

    about = f"{version('llama-cpp-python')}, {kind}, {threads} threads, KV f16"
    return run, f"{about}, batches of {BATCH}, 512 at once"


def written(model: Path, kind: str) -> Path:
    """A GGUF file with the weights under llama.cpp's names; its vocabulary stays empty."""
    from safetensors.torch import load_file

    gguf: Any = import_module("gguf")
    config = json.loads((model / "config.json").read_text())
    family = config["model_type"]
    path = model.parent / f"{kind}.gguf"
    writer = gguf.GGUFWriter(str(path), family)
    _describe(writer, config)
    layers = config[NAMES[family]["layers"]]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), layers)
    for name, tensor in load_file(str(model / "model.safetensors")).items():
        known = names.get_name(name.removeprefix("transformer."), (".weight", ".bias"))
        if known is None:
            continue
        values = _turned(name, tensor.float().numpy(), config)
        # As its own tool has it: what is added, and no factor, keeps its numbers.
        plain = values.ndim == 1 or (kind == "Q8_0" and "position_embd" in known)
        if plain:
            writer.add_tensor(known, values)
        else:
            stored = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(known, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: Any, config: dict[str, Any]) -> None:
    family = config["model_type"]
    names = NAMES[family]
    width, heads = config[names["width"]], config[names["heads"]]
    writer.add_block_count(config[names["layers"]])
    writer.add_context_length(config[names["context"]])
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if family == "gpt2":
        writer.add_feed_forward_length(config.get("n_inner") or 4 * width)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(width // heads)
    base = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 1e4)
    writer.add_rope_freq_base(base)


def _turned(name: str, values: Any, config: dict[str, Any]) -> Any:
    """As llama.cpp has this tensor: (out, in), and rotated channels beside their partners."""
    import numpy as np

    if config["model_type"] == "gpt2":
        inner = values.ndim == 2 and ".h." in f".{name}"
        values = values.T if inner else values
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        which = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        heads, (rows, width) = config[which], values.shape
        values = values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2)
        values = values.reshape(rows, width)
    return np.ascontiguousarray(values, dtype=np.float32)
