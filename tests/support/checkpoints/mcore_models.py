"""Small GPTs of the real Megatron-Core on CPU ranks over gloo: the oracle of its file formats.

Each rank builds its own chunks, gets random weights, saves a file as Megatron-LM's `torch` format
does from its own state_dict(), and takes part in a forward pass through all stages. Or it builds
the model of a file's arguments, and loads that file's weights strictly. Calls of CUDA that need
only a device are stubbed.
"""

import contextlib
import math
import os
import zlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VOCABULARY = 101
PADDED = 128
POSITIONS = 64
LENGTH = 24


@dataclass(frozen=True)
class Case:
    """A model by Megatron's arguments, and the split that trains it."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    layers: int = 4
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.ep


MODERN = {
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "rotary_base": 500,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "bias_gelu_fusion": False,
    "ffn_hidden_size": 44,
    "kv_channels": 12,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = {
    **MODERN,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "rotary_percent": 1.0,
}
GPT_OSS = {
    **EXPERTS,
    "swiglu": False,
    "quick_geglu": True,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "qk_layernorm": False,
    "softmax_type": "learnable",
    "window_size": (6, 0),
    "window_attn_skip_freq": 2,
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 8.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
    "yarn_correction_range_round_to_int": False,
}
# Fields of TransformerConfig that only some cases set.
OPTIONAL_FIELDS = (
    "window_attn_skip_freq",
    "no_rope_freq",
    "softmax_type",
    "softmax_scale",
    "activation_func_clamp_value",
    "glu_linear_offset",
)
CASES = {
    "classic, TP 2 x PP 2 x VPP 2": Case(2, 2, 2),
    "classic, erf, TP 4": Case(4, args={"bias_gelu_fusion": False}),
    "modern, TP 2 x PP 2": Case(2, 2, args=MODERN),
    "modern, fewer groups than ranks, TP 4": Case(4, args=MODERN),
    "modern, window, QKV bias, TP 2": Case(
        2, args={**MODERN, "window_size": (6, 0), "add_qkv_bias": True}
    ),
    "uneven stages, PP 3": Case(
        pp=3,
        layers=5,
        args={
            "decoder_first_pipeline_num_layers": 1,
            "decoder_last_pipeline_num_layers": 1,
            "squared_relu": True,
            "bias_gelu_fusion": False,
        },
    ),
    "llama3 positions, interleaved, TP 2": Case(
        2,
        args={
            **MODERN,
            "use_rope_scaling": True,
            "rotary_interleaved": True,
            "rotary_base": 500000,
            "rotary_percent": 1.0,
        },
    ),
    "linear positions": Case(args={**MODERN, "rotary_seq_len_interpolation_factor": 3.0}),
    "experts, TP 2 x EP 2": Case(2, ep=2, args=EXPERTS),
    "experts, PP 2 x EP 2, sigmoid, some layers dense": Case(
        pp=2,
        ep=2,
        args={
            **EXPERTS,
            "moe_layer_freq": [0, 1, 1, 0],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_shared_expert_intermediate_size": 20,
        },
    ),
    "windows, RoPE of some layers, scaled scores, TP 2 x PP 2": Case(
        2,
        2,
        args={
            **MODERN,
            "window_size": (6, 0),
            "window_attn_skip_freq": [1, 0, 1, 1],
            "no_rope_freq": [0, 0, 1, 0],
            "softmax_scale": 0.4,
        },
    ),
    "as GPT-OSS, PP 2 x EP 2": Case(pp=2, ep=2, args=GPT_OSS),
    "experts, softmax first": Case(args={**EXPERTS, "moe_router_pre_softmax": True}),
}


def arguments(case: Case) -> dict[str, Any]:
    """The arguments of 0.16 that describe the network, as a training run saves them."""
    return {
        "num_layers": case.layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "kv_channels": 8,
        "group_query_attention": False,
        "num_query_groups": 1,
        "position_embedding_type": "learned_absolute",
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "window_size": None,
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "layernorm_zero_centered_gamma": False,
        "swiglu": False,
        "squared_relu": False,
        "bias_gelu_fusion": True,
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "untie_embeddings_and_output_weights": False,
        "num_experts": None,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": None,
        "moe_ffn_hidden_size": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "max_position_embeddings": POSITIONS,
        "seq_length": POSITIONS,
        "padded_vocab_size": PADDED,
        "vocab_size": VOCABULARY,
        "make_vocab_size_divisible_by": 128 // case.tp,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.tp,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        **case.args,
    }


def save_and_run(rank: int, case: Case, root: Path) -> tuple[Tensor, Tensor] | None:
    """On every rank: build, save a file under `root`, run forward; the last rank returns logits."""
    _initialize(case)
    chunks = [_build(case, chunk) for chunk in range(case.vpp or 1)]
    for number, chunk in enumerate(chunks):
        _randomize(chunk, case, number)
    _save(chunks, case, root)
    return _run_forward(rank, chunks, case)


def load_and_run(rank: int, split: Case, root: Path) -> tuple[Tensor, Tensor] | None:
    """On every rank: build the model of the file under `root`, load it strictly, run forward."""
    _initialize(split)
    path = root / "release" / _folder(split) / "model_optim_rng.pt"
    record = torch.load(path, weights_only=False)
    case = replace(split, args=vars(record["args"]))
    chunks = [_build(case, chunk) for chunk in range(case.vpp or 1)]
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(record[f"model{number}" if case.vpp else "model"], strict=True)
    return _run_forward(rank, chunks, case)


def _initialize(case: Case) -> None:
    _without_cuda()
    _core("parallel_state").initialize_model_parallel(
        case.tp, case.pp, case.vpp, expert_model_parallel_size=case.ep
    )


def _run_forward(rank: int, chunks: list[Any], case: Case) -> tuple[Tensor, Tensor] | None:
    """Token ids and, on the last rank, their logits."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    logits = _forward(chunks, case, ids)
    return (ids, logits) if rank == torch.distributed.get_world_size() - 1 else None


def _without_cuda() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    tensor: Any = Tensor
    tensor.cuda = lambda self, *_args, **_named: self
    for factory in ("ones", "zeros", "empty", "arange"):
        setattr(torch, factory, _on_cpu(getattr(torch, factory)))
    _core("jit").disable_jit_fuser()

    @contextlib.contextmanager
    def fork(self: object, name: str = "") -> Iterator[None]:
        yield

    _core("tensor_parallel.random").CudaRNGStatesTracker.fork = fork
    # Without Transformer Engine the router imports a name that was never set.
    _core("transformer.moe.moe_utils").te_general_gemm = None


def _core(name: str) -> Any:
    """A Megatron-Core module: it has no types, and is not installed everywhere."""
    return import_module(f"megatron.core.{name}")


def _on_cpu(make: Any) -> Any:
    def make_on_cpu(*args: Any, **keywords: Any) -> Tensor:
        if keywords.get("device") == "cuda":
            keywords["device"] = "cpu"
        value: Tensor = make(*args, **keywords)
        return value

    return make_on_cpu


def _build(case: Case, chunk: int) -> Any:
    parallel = _core("parallel_state")
    args = arguments(case)
    config = _config(args)
    vp = chunk if case.vpp else None
    specs = _core("models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp)
    stage = parallel.get_pipeline_model_parallel_rank()
    last_stage = case.pp - 1
    model = _core("models.gpt.gpt_model").GPTModel(
        config,
        spec,
        args["padded_vocab_size"],
        POSITIONS,
        pre_process=stage == 0 and chunk == 0,
        post_process=stage == last_stage and chunk == (case.vpp or 1) - 1,
        parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
        rope_scaling_factor=args["rope_scaling_factor"],
        seq_len_interpolation_factor=args["rotary_seq_len_interpolation_factor"],
        vp_stage=vp,
    )
    model.eval()
    return model


def _config(args: dict[str, Any]) -> Any:
    """As Megatron-LM's core_transformer_config_from_args builds it."""
    shared_fields = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "kv_channels",
        "normalization",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "window_size",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "rotary_interleaved",
        "moe_layer_freq",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_enable_expert_bias",
        "moe_ffn_hidden_size",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "moe_shared_expert_gate",
        "pipeline_model_parallel_layout",
    )
    uneven = ("first", "last")
    activations = _core("activations")
    activation = activations.squared_relu if args["squared_relu"] else F.gelu
    if args.get("quick_geglu"):
        activation = activations.quick_gelu
    config = _core("transformer.transformer_config").TransformerConfig(
        **{name: args[name] for name in shared_fields},
        **{name: args[name] for name in OPTIONAL_FIELDS if args.get(name) is not None},
        num_query_groups=args["num_query_groups"] if args["group_query_attention"] else None,
        num_moe_experts=args["num_experts"],
        num_layers_in_first_pipeline_stage=args[f"decoder_{uneven[0]}_pipeline_num_layers"],
        num_layers_in_last_pipeline_stage=args[f"decoder_{uneven[1]}_pipeline_num_layers"],
        activation_func=F.silu if args["swiglu"] else activation,
        gated_linear_unit=args["swiglu"] or bool(args.get("quick_geglu")),
        bias_activation_fusion=args["bias_gelu_fusion"],
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        moe_token_dispatcher_type="allgather",
        gradient_accumulation_fusion=False,
    )
    # GPTModel reads these from the config, although TransformerConfig does not declare them.
    for name in (name for name in args if name.startswith("yarn_")):
        setattr(config, name, args[name])
    return config


@torch.no_grad()
def _randomize(model: Any, case: Case, chunk: int) -> None:
    """Values by name and position; tensor-parallel ranks draw their own, replicas the same."""
    parallel = _core("parallel_state")
    stage = parallel.get_pipeline_model_parallel_rank()
    tensor = parallel.get_tensor_model_parallel_rank()
    expert = parallel.get_expert_model_parallel_rank()
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, value in named:
        if not value.is_floating_point() or name.endswith("local_tokens_per_expert"):
            continue
        tied = name == "output_layer.weight" and model.share_embeddings_and_output_weights
        label = "embedding.word_embeddings.weight" if tied else name
        position = (0, 0) if tied or label.startswith("embedding") else (stage, chunk)
        seed = f"{label} {position}"
        if getattr(value, "tensor_model_parallel", False) or tied:
            seed += f" tensor {tensor}"
        if ".local_experts." in name:
            seed += f" expert {expert}"
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        random = torch.randn(value.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            value.copy_(1 + 0.2 * random)
        elif value.dim() == 1:
            value.copy_(0.2 * random)
        elif label.startswith(("embedding.word", "output_layer")):
            value.copy_(random)
        else:
            value.copy_(random / math.sqrt(value.shape[-1]))


def _folder(case: Case) -> str:
    """This rank's directory."""
    parallel = _core("parallel_state")
    tensor = parallel.get_tensor_model_parallel_rank()
    stage = parallel.get_pipeline_model_parallel_rank()
    expert = parallel.get_expert_model_parallel_rank()
    folder = f"mp_rank_{tensor:02d}"
    folder += f"_{stage:03d}" if case.pp > 1 else ""
    return folder + (f"_{expert:03d}" if case.ep > 1 else "")


def _save(chunks: list[Any], case: Case, root: Path) -> None:
    path = root / "iter_0000007" / _folder(case)
    path.mkdir(parents=True)
    record: dict[str, Any] = {
        "args": Namespace(**arguments(case), rank=torch.distributed.get_rank()),
        "checkpoint_version": 3.0,
        "iteration": 7,
    }
    for number, chunk in enumerate(chunks):
        key = f"model{number}" if case.vpp else "model"
        record[key] = chunk.state_dict_for_save_checkpoint()
    torch.save(record, path / "model_optim_rng.pt")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("7")


@torch.no_grad()
def _forward(chunks: list[Any], case: Case, ids: Tensor) -> Tensor:
    """Stage after stage, chunk after chunk; ranks of a stage run together."""
    parallel = _core("parallel_state")
    stage = parallel.get_pipeline_model_parallel_rank()
    positions = torch.arange(LENGTH).expand(*ids.shape)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)  # True: hidden.
    out = torch.empty(LENGTH, ids.shape[0], chunks[0].config.hidden_size)
    for number, chunk in enumerate(chunks):
        if stage > 0 or number > 0:
            torch.distributed.recv(out, parallel.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(out)
        output: Tensor = chunk(ids, positions, mask)
        if stage < case.pp - 1 or number < len(chunks) - 1:
            next_rank = parallel.get_pipeline_model_parallel_next_rank()
            if next_rank == torch.distributed.get_rank():
                chunks[number + 1].set_input_tensor(output)
                continue
            torch.distributed.send(output.contiguous(), next_rank)
    return output
