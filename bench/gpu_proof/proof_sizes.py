"""Sizes of a GPU proof: the models and workloads of its stages, on a GPU and in a rehearsal."""

from dataclasses import dataclass, replace
from typing import Self

from bench.suites.gpu import GpuSizes
from gpt.config import GPTConfig

TINY = GPTConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=512,
    max_position_embeddings=256,
    dtype="bfloat16",
)
# Small enough that the CPU computes its logits in a second.
SMALL = GPTConfig(
    num_layers=4,
    hidden_size=512,
    num_attention_heads=8,
    vocab_size=8192,
    max_position_embeddings=256,
    dtype="bfloat16",
)
LLAMA_8B = GPTConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
    max_position_embeddings=2304,
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    position_embedding_type="rope",
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
    untie_embeddings_and_output_weights=True,
    dtype="bfloat16",
)


def _node_network(hidden_size: int, vocab_size: int) -> GPTConfig:
    """Return a network for up to 8 tensor ranks or stages.

    It has positions for an answer that is long enough to lose a rank in the middle of it.
    """
    return GPTConfig(
        num_layers=8,
        hidden_size=hidden_size,
        num_attention_heads=8,
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )


@dataclass(frozen=True)
class MixedLoad:
    """Requests that arrive at fixed times, so that prompts run beside decodes."""

    seconds: float  # Of arrivals. The last requests end later.
    arrivals_per_s: float
    prompt_tokens: tuple[int, ...]  # Of the requests, in turn.
    new_tokens: int
    chunk_tokens: tuple[int, ...]  # Token budgets of a step; the load runs with each of them.
    running_requests_max: int

    @property
    def requests(self) -> int:
        return round(self.seconds * self.arrivals_per_s)

    @property
    def arrivals(self) -> list[tuple[float, int]]:
        """The second of each arrival, and the tokens of its prompt."""
        return [
            (index / self.arrivals_per_s, self.prompt_tokens[index % len(self.prompt_tokens)])
            for index in range(self.requests)
        ]


# A GPU of 3 TB/s and 800 TFLOP/s has about ten of these requests at a time, and computes prompts
# in a fifth of the time.
MIXED_LOAD = MixedLoad(
    seconds=15.0,
    arrivals_per_s=10.0,
    prompt_tokens=(256, 1024, 512, 2048),
    new_tokens=128,
    chunk_tokens=(512, 2048),
    running_requests_max=32,
)


@dataclass(frozen=True)
class ProofSizes:
    """Models and workloads of the stages."""

    node_network: GPTConfig  # Its tokens are compared between layouts of ranks.
    suite: GpuSizes  # Of `bench.suites.gpu`: the rows of the targets.
    checked_network: GPTConfig  # Its tokens are compared with the CPU's.
    rotary_network: GPTConfig  # Its decode time is measured.
    mixed_load: MixedLoad = MIXED_LOAD  # With the model of `suite`.
    rounds: int = 3
    # Attention: many sequences of one context length, and the same with one long context.
    attention_sequences: int = 64
    context_tokens: int = 640
    long_context_tokens: int = 100_000
    heads: tuple[int, int] = (32, 128)  # Number of heads, channels of each.
    vocab_sizes: tuple[int, ...] = (51_200, 151_936)
    profiled_requests: int = 8
    profiled_tokens: int = 64
    # Bytes of the all-reduces: 8 KiB is one row of a decode step, 16 MiB a prompt of 2048 tokens.
    all_reduce_bytes: tuple[int, ...] = (
        1 << 13,
        1 << 16,
        1 << 18,
        1 << 19,
        1 << 20,
        1 << 22,
        1 << 23,
        1 << 24,
    )

    @classmethod
    def of(cls, device: str) -> Self:
        """Return the sizes of the proof on a GPU, or those of the rehearsal on a CPU."""
        if device == "cuda":
            return cls(_node_network(512, 8192), GpuSizes(rounds=3), SMALL, LLAMA_8B)
        suite = GpuSizes(
            rounds=1,
            network=TINY,
            device="cpu",
            copy_bytes=1 << 20,
            matrix_side=128,
            single_prompt_tokens=4,
            new_tokens=4,
            requests=3,
            prompt_tokens=8,
            prefill_tokens=24,
            decode_requests=2,
            decode_prompt_tokens=6,
        )
        rotary = replace(TINY, position_embedding_type="rope")
        return cls(
            _node_network(64, 512),
            suite,
            TINY,
            rotary,
            MixedLoad(
                seconds=0.5,
                arrivals_per_s=16.0,
                prompt_tokens=(8, 40, 24),
                new_tokens=4,
                chunk_tokens=(16, 64),
                running_requests_max=4,
            ),
            rounds=1,
            attention_sequences=4,
            context_tokens=40,
            long_context_tokens=200,
            heads=(4, 16),
            vocab_sizes=(512,),
            profiled_requests=2,
            profiled_tokens=4,
            all_reduce_bytes=(1 << 13, 1 << 18),
        )
