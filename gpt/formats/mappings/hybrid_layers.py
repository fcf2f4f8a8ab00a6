"""HybridModel layers mapping: the layers of Megatron-Core's HybridModel, and the layers of a GPT.

HybridModel stores attention and MLP as separate layers. Its pattern has one symbol per layer, such
as `*-*E`. If attention (`*`) and MLP (`-`) or MoE (`E`) layers alternate strictly, layers 2i and
2i + 1 compute what layer i of a GPT computes, so only layer numbers differ. Any other pattern is
another function, and is refused. The module uses names and patterns only, and opens no files.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpt.errors import CheckpointError
from gpt.formats.mappings.unsupported_architectures import architecture_of_symbol
from gpt.parallel.weight_sharding import LAYERS_PREFIX

ATTENTION, MLP, MOE = "*", "-", "E"
SEGMENT_END, MTP_SEPARATOR = "|", "/"
LAYERS_MAX = 1 << 16  # Limit of a pattern's length; a longer pattern is broken or hostile.
LAYERS_SHOWN_MAX = 40  # Symbols of a pattern in a message.

GPT_FINAL_NORM, HYBRID_FINAL_NORM = "decoder.final_layernorm.", "decoder.final_norm."
LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)", re.DOTALL)
ATTENTION_PART = re.compile(r"self_attention\.|input_layernorm\.")
EXPERT_PART = re.compile(r"mlp\.(router|experts|shared_experts)\.")
MLP_PART = re.compile(r"mlp\.|pre_mlp_layernorm\.")


@dataclass(frozen=True)
class HybridPattern:
    """A pattern of attention and MLP layers in strict alternation."""

    layers: str  # One symbol per layer, without segment ends.
    has_mtp_heads: bool = False  # Multi-token prediction heads, which are ignored.


def parse_pattern(text: str, origin: str) -> HybridPattern:
    """Parse a pattern; refuse layers that are not a GPT's. Messages begin with `origin`.

    Segment ends (`|`) divide the layers over the ranks of a pipeline. They are dropped, because
    files have global layer numbers, or all layers of a stage from 0 on. `/` separates the patterns
    of multi-token prediction heads.
    """
    if len(text) > LAYERS_MAX:
        raise CheckpointError(
            f"{origin} has {len(text)} symbols, more than the limit of {LAYERS_MAX}; copy the file "
            "from the training run again"
        )
    main_pattern, separator, heads = text.partition(MTP_SEPARATOR)
    layers = main_pattern.replace(SEGMENT_END, "")
    for symbol in layers:
        if (architecture := architecture_of_symbol(symbol)) is not None:
            raise CheckpointError(
                f"{origin} is {show_layers(layers)!r}; {symbol} is {architecture.name}, which "
                f"Preamble does not support; {architecture.way_out}"
            )
        if symbol not in (ATTENTION, MLP, MOE):
            raise CheckpointError(
                f"{origin} is {show_layers(layers)!r}, in which {symbol!r} is not a layer symbol; "
                "copy the file from the training run again"
            )
    refuse_unpaired_layers(layers, origin)
    return HybridPattern(layers, bool(separator and heads.strip(MTP_SEPARATOR)))


def refuse_unpaired_layers(layers: str, origin: str) -> None:
    """Refuse layers that are not attention, MLP, attention, MLP and so on."""
    for number, symbol in enumerate(layers):
        if (symbol == ATTENTION) != (number % 2 == 0):
            expected = f"attention ({ATTENTION})" if number % 2 == 0 else f"{MLP} or {MOE}"
            problem = f"layer {number} is {symbol} instead of {expected}"
            break
    else:
        if layers and len(layers) % 2 == 0:
            return
        problem = f"layer {len(layers) - 1} has no MLP after it" if layers else "there are none"
    raise CheckpointError(
        f"{origin} is {show_layers(layers)!r}: {problem}; Preamble supports only attention (*) and "
        "MLP (- or E) layers in strict alternation, because they compute the same function as a "
        "GPT: give such a model"
    )


def stored_layers(names: Iterable[str], num_layers: int) -> str:
    """Return the pattern of a HybridModel's layers from its canonical tensor names.

    Return an empty string if a layer has both attention and MLP, as in a GPT, or neither.
    """
    attention: set[int] = set()
    mlp: set[int] = set()
    experts: set[int] = set()
    for name in names:
        if match := LAYER_NAME.fullmatch(name):
            layer, part = int(match[1]), match[2]
            if ATTENTION_PART.match(part):
                attention.add(layer)
            elif MLP_PART.match(part):
                mlp.add(layer)
                if EXPERT_PART.match(part):
                    experts.add(layer)
    if attention & mlp or attention | mlp != set(range(num_layers)):
        return ""
    return "".join(
        ATTENTION if layer in attention else MOE if layer in experts else MLP
        for layer in range(num_layers)
    )


def gpt_name(name: str) -> str:
    """Return the GPT's name of a HybridModel's tensor: layers 2i and 2i + 1 become layer i."""
    match = LAYER_NAME.fullmatch(name)
    return f"{LAYERS_PREFIX}{int(match[1]) // 2}.{match[2]}" if match else name


def hybrid_name(name: str) -> str:
    """Return a HybridModel's name of a GPT's tensor or module.

    `canonical_key` undoes the new name of the final norm, `gpt_name` the layer numbers.
    """
    match = LAYER_NAME.fullmatch(name)
    if match is None:
        return name.replace(GPT_FINAL_NORM, HYBRID_FINAL_NORM)
    is_mlp = ATTENTION_PART.match(match[2]) is None
    return f"{LAYERS_PREFIX}{2 * int(match[1]) + is_mlp}.{match[2]}"


def hybrid_pattern(moe_layers: Sequence[bool], segments: Iterable[range]) -> str:
    """Return the pattern of a GPT's layers; `segments` has the GPT layers of each segment."""
    return SEGMENT_END.join(
        "".join(ATTENTION + (MOE if moe_layers[layer] else MLP) for layer in segment)
        for segment in segments
    )


def show_layers(layers: str) -> str:
    """Return the first symbols of a pattern, for a message."""
    return layers if len(layers) <= LAYERS_SHOWN_MAX else f"{layers[:LAYERS_SHOWN_MAX]}..."
