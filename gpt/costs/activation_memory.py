"""Activation memory of training: bytes of a layer, layers in flight, embedding and LM head.

The formulas are those of arXiv 2205.05198, generalized to all widths of a GPTConfig and to training
with frozen weights. The module does not import torch.
"""

from gpt.config import GPTConfig
from gpt.costs.training import RecomputeMode, TrainingSetup, layer_widths


def layer_activation_bytes(
    config: GPTConfig, batch: int, sequence: int, recompute: RecomputeMode, setup: TrainingSetup
) -> float:
    """Return the activation bytes of one layer and micro-batch on one rank.

    Activations have 2 bytes per element, dropout masks 1 byte. For the standard GPT layer the sum
    is sbh (10 + 24/t + 5as/(ht)), or with sequence parallelism sbh/t (34 + 5as/h), where s is the
    sequence length, b the batch size, h the hidden size, a the number of heads and t the tensor
    parallel size. Selective recomputation and flash attention remove the last term. Full
    recomputation saves only the layer's input: 2sbh, or with sequence parallelism 2sbh/t. A frozen
    linear saves no input. In a MoE layer, the input of fc1 is a copy of the token for each of its
    experts, on each tensor rank. Norms after attention and MLP, and norms of queries and keys, save
    their inputs too. "block" is computed like "none": for block recomputation, the caller must
    compute the recomputed layers as "full" and the other layers as "none", and add up their bytes.
    """
    w, tokens = layer_widths(config), batch * sequence
    t = setup.tp
    sequence_shards = t if setup.sequence_parallel else 1
    if recompute == "full":
        return 2 * tokens * w.hidden / sequence_shards
    is_frozen = setup.trainable == "adapter"
    # Sharded with sequence parallelism, else replicated on the tensor ranks: the inputs of the
    # norms, the masks of two dropouts, and the inputs of the QKV linear and of fc1 (or the router).
    norms = 4 if config.norm_placement == "pre_and_post" else 2
    replicated = (2 * norms + (2 if setup.dropout else 0) + (0 if is_frozen else 4)) * w.hidden
    expert_inputs = 0 if is_frozen else 2 * w.expert_inputs
    # Sharded over tensor ranks: queries, keys and values, the input of the activation, and the
    # inputs of proj and of fc2. The input of proj is also the output of attention, which flash
    # attention saves for its backward pass even if proj is frozen.
    sharded = 2 * (w.queries + 2 * w.keys) + 2 * w.fc1
    sharded += 0 if is_frozen else 2 * w.queries + 2 * w.fc2
    sharded += 2 * w.queries if is_frozen and setup.flash else 0
    sharded += 2 * (w.queries + w.keys) if config.qk_layernorm else 0
    scores = 0.0
    if recompute != "selective" and not setup.flash:
        # Softmax output (2 bytes), dropout mask (1) and dropout output (2).
        scores = 5.0 * w.heads * sequence
    return tokens * (replicated / sequence_shards + expert_inputs + (sharded + scores) / t)


def layers_in_flight(
    num_layers: int, pp: int, micro_batches: int, vpp: int = 1, stage: int = 0
) -> float:
    """Return the peak number of layers whose activations stage `stage` stores in a 1F1B schedule.

    A layer counts once for each micro-batch in flight. `num_layers` is the number of layers of the
    whole model, and `micro_batches` is the number per step. `vpp` is the number of model chunks per
    stage; above 1 the schedule is interleaved.
    """
    if vpp == 1:
        return -(-num_layers // pp) * min(pp - stage, micro_batches)
    chunks = pp * vpp + pp - 1 - 2 * stage
    return num_layers / (pp * vpp) * min(chunks, vpp * micro_batches)


def edge_activation_bytes(
    config: GPTConfig, batch: int, sequence: int, pp: int, setup: TrainingSetup
) -> tuple[float, float]:
    """Return the activation bytes of the embedding (first stage) and of the head (last stage)."""
    tokens = batch * sequence
    h = config.hidden_size
    t = setup.tp
    sequence_shards = t if setup.sequence_parallel else 1
    # The mask of the embedding's dropout (1 byte), for pp micro-batches in flight.
    first = tokens * h * pp / sequence_shards
    # The inputs of the final norm and of the head (2 bytes), and the logits in fp32.
    last = 2 * 2 * tokens * h / sequence_shards + 4 * tokens * config.vocab_size / t
    return first, last
