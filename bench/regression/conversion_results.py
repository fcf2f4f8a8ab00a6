"""Comparison of conversions: every file that `preamble convert` writes in two checkouts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.harness.checkouts import Checkout
from bench.regression.checkout_pair import CheckoutPair, ComparedRow, Results, compare, read_tree


@dataclass(frozen=True)
class Conversion:
    """A run of `preamble convert`; `source` is "demo", "random" or the target of an earlier run."""

    source: str
    target: str
    arguments: Sequence[str]


CONVERSIONS = (
    Conversion("demo", "demo-native", ("--to", "native")),
    Conversion("demo", "demo-megatron", ("--to", "megatron", "--tp", "1", "--pp", "4")),
    Conversion(
        "demo",
        "demo-dist",
        ("--to", "megatron-dist"),
    ),
    Conversion("demo", "demo.nemo", ("--to", "nemo", "--tp", "2", "--pp", "2")),
    Conversion("demo", "demo-hf", ("--to", "hf", "--prove")),
    Conversion("random", "random-native", ("--to", "native", "--dtype", "bfloat16")),
    Conversion("random", "random-megatron", ("--to", "megatron", "--tp", "2", "--pp", "2")),
    Conversion(
        "random", "random-local", ("--to", "megatron", "--tp", "4", "--megatron-spec", "local")
    ),
    Conversion("random", "random-dist", ("--to", "megatron-dist", "--tp", "2")),
    Conversion(
        "random",
        "random.nemo",
        ("--to", "nemo"),
    ),
    Conversion(
        "random-megatron",
        "random-hf",
        ("--to", "hf"),
    ),
    Conversion("random-dist", "random-split", ("--to", "megatron", "--pp", "2", "--vpp", "2")),
    Conversion(
        "random.nemo",
        "random-again",
        ("--to", "native"),
    ),
    Conversion("demo.nemo", "demo-2x1", ("--to", "megatron", "--tp", "2")),
    Conversion("demo-dist", "demo-hf-sharded", ("--to", "hf", "--shard-gb", "0.0005")),
)
# A Llama-shaped model in fp32.
RANDOM: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_random_checkpoint(folder: Path) -> None:
    """Write a Hugging Face checkpoint of random weights; every call writes the same bytes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    hidden = RANDOM["hidden_size"]
    inner = RANDOM["intermediate_size"]
    vocabulary = RANDOM["vocab_size"]
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    for layer in range(RANDOM["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj"] = (hidden, inner)
    tensors = {
        f"{name}.weight": torch.randn(*shape, generator=generator) * 0.05
        for name, shape in shapes.items()
    }
    norms = ["model.norm"]
    for layer in range(RANDOM["num_hidden_layers"]):
        norms += [f"model.layers.{layer}.{name}_layernorm" for name in ("input", "post_attention")]
    tensors |= {
        f"{name}.weight": 1 + torch.randn(hidden, generator=generator) * 0.1 for name in norms
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RANDOM, indent=1))


def compare_conversions(pair: CheckoutPair) -> Iterator[ComparedRow]:
    """Compare all bytes of all target files, which contain no times."""
    sources = {"demo": pair.model, "random": pair.folder / "random"}
    write_random_checkpoint(sources["random"])
    # If the source is an earlier target, both checkouts convert the target that `pair.other` wrote.
    # If each converted its own target, a difference between these two would be reported twice.
    targets = pair.folder_of(pair.other) / "targets"
    for conversion in CONVERSIONS:
        source = sources.get(conversion.source, targets / conversion.source)

        def target_files(
            checkout: Checkout, conversion: Conversion = conversion, source: Path = source
        ) -> Results:
            folder = pair.folder_of(checkout) / "targets"
            folder.mkdir(parents=True, exist_ok=True)
            arguments: list[str | Path] = ["preamble", "convert", source]
            arguments += [folder / conversion.target, *conversion.arguments]
            checkout.command(arguments, pair.folder_of(checkout))
            files = read_tree(folder / conversion.target)
            return {
                f"{conversion.source} to {conversion.target}: {path}": content
                for path, content in files.items()
            }

        this, other = pair.run(target_files)
        yield from compare("conversions", this, other)
        pair.log(f"conversions {conversion.source} to {conversion.target}: {len(this)} files")
