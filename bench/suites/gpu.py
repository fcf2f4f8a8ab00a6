"""Our engine on one GPU, held against the device's own limits, transformers, and itself in FP8.

One run: a copy, a large product, and every way to answer take turns, so that a device that clocks
down does it for all. A model of 5B has random weights, drawn on the device. What cannot be had is
left out, with the reason; it needs no network.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from bench.harness.offline_engine import answered, asking, engine_of, ids, loaded
from bench.harness.record import Item
from bench.harness.roofline import Limit, Model
from bench.harness.targets import Row, Settings, judged, not_run
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.checkpoint.random_init import drawn
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from gpt.model.loading import device_of
from gpt.parallel.sharding import Parameter
from serving.config import ServerConfig
from serving.engine.engine import Engine

NETWORK = GPTConfig(
    num_layers=24,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=51200,
    max_position_embeddings=2304,
    dtype="bfloat16",
)
# What is called "FP8" here, beside the same model in bf16.
# Weights that were drawn say nothing that could be kept; how far off they are is in the log.
FP8_PREFILL = {"linear_backend": "fp8", "divergence_max": 1e3}
FP8_DECODE = FP8_PREFILL | {"kv_dtype": "fp8"}


@dataclass(frozen=True)
class Sizes:
    """What is run; a test does less, and on a CPU."""

    rounds: int = 5
    network: GPTConfig = NETWORK
    device: str = "cuda"
    copy_bytes: int = 4 << 30
    side: int = 8192  # Of the matrices whose product is the peak.
    single: int = 32  # Tokens of the prompt behind which one request decodes,
    new: int = 128  # and how many everybody makes.
    requests: int = 64
    prompt: int = 512
    prefill: int = 2048
    decodes: int = 32
    decode_prompt: int = 576  # With half of the new tokens a context of 640.

    @property
    def config(self) -> ServerConfig:
        block = ServerConfig.kv_block_tokens
        most = max(self.requests * (self.prompt + self.new), self.prefill + self.new)
        return ServerConfig(
            "",
            device=self.device,
            dtype=self.network.dtype,
            running_requests_max=max(self.requests, self.decodes),
            # A batch's prompts are one step, so that what follows are its tokens alone.
            step_tokens_max=max(
                self.requests * self.prompt, self.decodes * self.decode_prompt, self.prefill
            ),
            kv_tokens_max=most + (max(self.requests, self.decodes) + 1) * 2 * block,
            prefix_cache=False,
        )


@dataclass
class _Turns:
    """Ways to spend time, taken in turn; one that fails is out, and its reason is kept."""

    ways: dict[str, Callable[[], float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def take(self, rounds: int) -> None:
        """After one round that is not counted."""
        for turn in range(rounds + 1):
            for name, way in list(self.ways.items()):
                try:
                    spent = way()
                except Exception as error:
                    self.lose(name, error)
                    del self.ways[name]
                    self.seconds.pop(name, None)
                    continue
                if turn:
                    self.seconds.setdefault(name, []).append(spent)

    def lose(self, name: str, error: Exception) -> None:
        words = (str(error).splitlines() or [""])[0]
        self.missing[name] = f"{type(error).__name__}: {words}"[:200]

    def why(self, *names: str) -> str:
        """Why one of them has no time; empty: all have."""
        return "; ".join(f"{one}: {self.missing[one]}" for one in names if one in self.missing)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def lines(rounds: int = 5, sizes: Sizes | None = None) -> Iterator[Item]:
    """All rows; takes minutes, most of them the peer's."""
    sizes = replace(sizes or Sizes(), rounds=rounds)
    turns = _Turns()
    with ExitStack() as stack:
        _limits(turns, sizes)
        _ours(turns, stack, sizes)
        _peer(turns, sizes)
        yield _settings(sizes)
        turns.take(sizes.rounds)
    for name, reason in turns.missing.items():
        yield f"left out: {name}: {reason}"
    yield from _judged(turns, sizes)


# ------------------------------------------------------------------------------------------- ways


def _limits(turns: _Turns, sizes: Sizes) -> None:
    device = torch.device(sizes.device)
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target, dtype = torch.empty_like(source), getattr(torch, sizes.network.dtype)
    square = torch.randn(sizes.side, sizes.side, device=device).to(dtype)
    out = torch.empty_like(square)
    turns.ways["copy"] = partial(_timed, device, lambda: target.copy_(source))
    turns.ways["product"] = partial(_timed, device, lambda: torch.mm(square, square.T, out=out))


def _ours(turns: _Turns, stack: ExitStack, sizes: Sizes) -> None:
    """The engine in bf16, and twice in FP8, with weights alone and with keys and values too."""
    for name, more in {"": {}, "fp8 ": FP8_PREFILL, "fp8 kv ": FP8_DECODE}.items():
        try:
            config = replace(sizes.config, **more)  # type: ignore[arg-type]
            engine = stack.enter_context(_engine(sizes, config))
        except PreambleError as error:
            for one in ("single", "batch", "prefill", "decode"):
                turns.lose(name + one, error)
            continue
        answer = partial(_answered, engine, random.Random(0), sizes)
        ways = {
            "single": partial(_decoded, answer, 1, sizes.single, sizes.new),
            "batch": partial(answer, sizes.requests, sizes.prompt, sizes.new),
            "prefill": partial(answer, 1, sizes.prefill, 1),
            "decode": partial(_decoded, answer, sizes.decodes, sizes.decode_prompt, sizes.new),
        }
        wanted = {"": tuple(ways), "fp8 ": ("prefill",), "fp8 kv ": ("decode",)}[name]
        turns.ways |= {name + one: ways[one] for one in wanted}


def _engine(sizes: Sizes, config: ServerConfig) -> Any:
    weights = _random(sizes.network, device_of(config.device))
    return engine_of(loaded(weights, config), config)


def _random(network: GPTConfig, device: torch.device) -> Checkpoint:
    """Weights that are drawn where they go: on a host 5B would take minutes."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(parameter: Parameter) -> torch.Tensor:
        if len(parameter.shape) == 1:
            scale = "norm" in parameter.name and parameter.name.endswith("weight")
            return torch.full(parameter.shape, float(scale), device=device)
        weight = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        return weight.normal_(0.0, 0.02, generator=generator)

    return drawn(network, draw)


def _answered(
    engine: Engine, draw: random.Random, sizes: Sizes, requests: int, prompt: int, new: int
) -> float:
    vocabulary = sizes.network.vocab_size
    asked = [asking(ids(draw, vocabulary, prompt), new, "throughput") for _ in range(requests)]
    start = time.perf_counter()
    answered(engine, asked)
    return time.perf_counter() - start


def _decoded(
    answer: Callable[[int, int, int], float], requests: int, prompt: int, new: int
) -> float:
    """Of one step, without the prompts: what so many more tokens take."""
    return (answer(requests, prompt, new + 1) - answer(requests, prompt, 1)) / new


def _peer(turns: _Turns, sizes: Sizes) -> None:
    """transformers' own continuous batching, with its manager kept from round to round."""
    name = "transformers"
    if sizes.device != "cuda":
        turns.lose(name, ValueError("its continuous batching wants a CUDA device"))
        return
    try:
        import transformers
        from transformers import GenerationConfig

        network = sizes.network
        settings = transformers.GPT2Config(
            n_layer=network.num_layers,
            n_embd=network.hidden_size,
            n_head=network.num_attention_heads,
            vocab_size=network.vocab_size,
            n_positions=network.max_position_embeddings,
            bos_token_id=None,
            eos_token_id=None,
        )
        dtype = getattr(torch, network.dtype)
        with torch.device(sizes.device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                model: Any = transformers.GPT2LMHeadModel(settings)
            finally:
                torch.set_default_dtype(before)
        model.eval()
        wanted: Any = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=sizes.new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        draw = random.Random(1)

        @torch.inference_mode()
        def run() -> float:
            prompts = [
                list(ids(draw, network.vocab_size, sizes.prompt)) for _ in range(sizes.requests)
            ]
            start = time.perf_counter()
            made = model.generate_batch(prompts, generation_config=wanted, persistent_manager=True)
            spent = time.perf_counter() - start
            counts = [len(one.generated_tokens) for one in made.values()]
            if counts != [sizes.new] * sizes.requests:
                raise RuntimeError(f"it made {sum(counts)} tokens for {len(counts)} requests")
            return spent

        turns.ways[name] = run
    except Exception as error:  # It is not installed, or this version has no such thing.
        turns.lose(name, error)


def _timed(device: torch.device, work: Callable[[], object], times: int = 10) -> float:
    """Of one, in seconds; the device's own clock where it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) / times
    start_at, end_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    start_at.record()
    for _ in range(times):
        work()
    end_at.record()
    end_at.synchronize()
    return float(start_at.elapsed_time(end_at)) / 1e3 / times


# ------------------------------------------------------------------------------------------- rows


def _settings(sizes: Sizes) -> Settings:
    network, config = sizes.network, sizes.config
    return Settings(
        f"{network.num_layers} x {network.hidden_size}, {network.num_attention_heads} heads, "
        f"V {network.vocab_size}, {network.dtype}, torch {torch.__version__}",
        {
            "ours": f"step_tokens_max {config.step_tokens_max}, throughput, no prefix cache",
            "fp8": ", ".join(f"{name}: {word}" for name, word in FP8_PREFILL.items()),
            "fp8 kv": ", ".join(f"{name}: {word}" for name, word in FP8_DECODE.items()),
            "transformers": "GPT2LMHeadModel.generate_batch, persistent_manager",
        },
    )


def _judged(turns: _Turns, sizes: Sizes) -> Iterator[Item]:
    cost = Model(sizes.network).cost
    copied, side = 2.0 * sizes.copy_bytes, sizes.side
    if not turns.why("copy"):
        yield Limit("copy bandwidth", "B", {"torch": _rates(turns, "copy", copied)})
    if not turns.why("product"):
        rates = _rates(turns, "product", 2.0 * side**3)
        yield Limit(f"{sizes.network.dtype} products", "FLOP", {f"torch, {side}": rates})
    bytes_read = cost([sizes.single + sizes.new // 2], [1]).read_bytes
    yield _share(turns, "gpu/decode", "single", bytes_read, "copy", copied)
    yield _ratio(turns, "gpu/batch", "batch", "transformers")
    operations = cost([0], [sizes.prefill]).operations
    yield _share(turns, "gpu/prefill", "prefill", operations, "product", 2.0 * side**3)
    yield _ratio(turns, "gpu/fp8-prefill", "fp8 prefill", "prefill")
    yield _ratio(turns, "gpu/fp8-decode", "fp8 kv decode", "decode")


def _rates(turns: _Turns, name: str, amount: float) -> Sequence[float]:
    return [amount / spent for spent in turns.seconds[name]]


def _share(turns: _Turns, row: str, name: str, amount: float, limit: str, of_limit: float) -> Row:
    """How much of a limit is used, in per cent."""
    if why := turns.why(name, limit):
        return not_run(row, why)
    mine, most = amount / turns.median(name), of_limit / turns.median(limit)
    told = f"{100 * mine / most:.0f} % ({1e3 * turns.median(name):.3f} ms)"
    samples = {one: turns.seconds[one] for one in (name, limit)}
    return judged(row, 100 * mine / most, told, samples=samples)


def _ratio(turns: _Turns, row: str, name: str, other: str) -> Row:
    """How many times as fast."""
    if why := turns.why(name, other):
        return not_run(row, why)
    times = turns.median(other) / turns.median(name)
    told = f"{times:.2f} x ({turns.median(name):.4f} s, {other} {turns.median(other):.4f} s)"
    return judged(row, times, told, samples={one: turns.seconds[one] for one in (name, other)})
