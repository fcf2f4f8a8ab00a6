"""Small HybridModels of the real Megatron-Core 0.19 on CPU ranks: the oracle of their files.

Every rank builds its segments of the pattern, gets random weights, saves them as a training run
does (a distributed checkpoint of all ranks, or its own `mp_rank` file), and takes part in a forward
pass. Or it builds the model of a checkpoint's args and loads the weights, also those of a GPT
through Megatron-Core's own bridge at load time. This version of Megatron-Core has its own folder,
because the tests of GPTs use another one. Its layers are those without Transformer Engine.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tests.support.checkpoints import mcore_dist, mcore_models
from tests.support.checkpoints.mcore_models import EXPERTS, MODERN, POSITIONS, Case

FOLDER = Path(__file__).parents[3] / "build/megatron-core/0.19.2"
PRELOAD = ("tests.support.checkpoints.preloaded_core",)
# The rule by which Megatron-Core's plain layers get the key names of Transformer Engine's layers.
NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
SHARED = {
    **EXPERTS,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 20,
}
# In a GPT, layers 2 and 4 would have no window, and layer 4 no rotary positions.
PERIODS = {**MODERN, "window_size": (6, 0), "window_attn_skip_freq": 2, "no_rope_freq": 4}
UNTIED = {"untie_embeddings_and_output_weights": True}


@dataclass(frozen=True)
class Hybrid:
    """A HybridModel by its pattern and args, and how it is saved."""

    pattern: str
    split: Case = field(default_factory=Case)
    rank_files: bool = False  # `torch` instead of `torch_dist`.
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        """The case by which the helpers of GPTs make the args, of 0.19 and of a HybridModel."""
        layers = re.sub(r"\||/.*", "", self.pattern)
        hybrid_args = {
            "hybrid_layer_pattern": self.pattern,
            "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        }
        return Case(
            self.split.tp,
            self.split.pp,
            self.split.vpp,
            self.split.ep,
            len(layers),
            {**self.split.args, **hybrid_args},
        )


SAVED = {
    "classic, tied": Hybrid("*-*-"),
    "classic, untied, TP 2 x PP 2": Hybrid("*-*-|*-*-", Case(2, 2, args=UNTIED)),
    "modern, a segment of one layer, PP 4": Hybrid("*-*|-|*-|*-", Case(1, 4, args=MODERN)),
    "modern, windows and rotary positions by even periods": Hybrid("*-*-", Case(args=PERIODS)),
    "modern, singletons, TP 2": Hybrid(
        "*-*-", Case(2, args=MODERN), metadata={"singleton_local_shards": True}
    ),
    "experts, TP 2 x EP 2": Hybrid("*E*E", Case(2, ep=2, args=EXPERTS)),
    "experts and dense, PP 2": Hybrid("*-*E*|E*-", Case(1, 2, args=SHARED)),
    "rank files, classic, TP 2 x PP 2 x VPP 2": Hybrid(
        "*-*|-*|-*-|*-", Case(2, 2, 2), rank_files=True
    ),
    "rank files, experts and dense, PP 2 x EP 2": Hybrid(
        "*-*E|*E", Case(1, 2, ep=2, args=SHARED), rank_files=True
    ),
    "rank files, modern, TP 4": Hybrid("*-*-", Case(4, args=MODERN), rank_files=True),
}


# Token ids and logits. Megatron-Core 0.19 replaces the functions that unpickle tensors, so ranks
# return arrays.
Run = tuple[NDArray[Any], NDArray[Any]]


def save_and_run(rank: int, names: Sequence[str], root: Path) -> dict[str, Run]:
    """On every rank, for each case: build, save under `root`, run; the last rank has the logits."""
    import_core()
    runs = {}
    for name in names:
        hybrid = SAVED[name]
        mcore_models._build = partial(_build, pattern=hybrid.pattern)
        if hybrid.rank_files:
            mcore_models._save = _save_rank_files
            ids_and_logits = mcore_models.save_and_run(rank, hybrid.case, root / name)
        else:
            sharded = mcore_dist.Sharded(hybrid.case, hybrid.metadata)
            ids_and_logits = mcore_dist.save_and_run(rank, sharded, root / name)
        if ids_and_logits is not None:
            runs[name] = (ids_and_logits[0].numpy(), ids_and_logits[1].detach().numpy())
        mcore_models._core("parallel_state").destroy_model_parallel()
    return runs


@dataclass(frozen=True)
class Loading:
    """How to load a checkpoint: into a GPT, into a HybridModel, or a GPT into a HybridModel."""

    folder: Path
    split: tuple[int, int, int]
    pattern: str = (
        ""  # The HybridModel that loads a GPT's checkpoint; empty: the model of the args.
    )


def load_and_run(rank: int, loadings: Sequence[Loading]) -> list[tuple[Run, set[str]]]:
    """On every rank, for each checkpoint: build the model, load it, run a forward pass.

    The set has the keys of the model that the checkpoint lacks.
    """
    import_core()
    mcore_models._without_cuda()
    results = []
    for loading in loadings:
        loaded = _load(loading)
        results.append(((loaded.ids.numpy(), loaded.logits.detach().numpy()), loaded.unexpected))
    return results


def _load(loading: Loading) -> mcore_dist.Loaded:
    bridge: Any = import_module("megatron.core.dist_checkpointing.gpt_checkpoint_interop")

    def build(case: Case, chunk: int) -> Any:
        pattern = loading.pattern or case.args.get("hybrid_layer_pattern")
        if not pattern:
            return _build_gpt(case, chunk)
        tp, pp, ep = loading.split
        model = _build(Case(tp, pp, ep=ep, layers=case.layers, args=case.args), chunk, pattern)
        if loading.pattern:
            sharded_state_dict = model.sharded_state_dict
            maps = bridge.gpt_compatible_layer_maps(pattern)

            def retargeted(**keywords: Any) -> Any:
                state_dict = sharded_state_dict(**keywords)
                bridge.retarget_sharded_state_dict_to_gpt_checkpoint(state_dict, maps)
                return state_dict

            model.sharded_state_dict = retargeted
        return model

    mcore_models._build = build
    return mcore_dist._load(loading.folder, loading.split)


def load_rank_files_and_run(rank: int, split: Case, roots: Sequence[Path]) -> list[Run | None]:
    """On every rank, for each root: load the rank's file strictly, run; the last has the logits."""
    import_core()
    runs: list[Run | None] = []
    for root in roots:
        mcore_models._build = _build_for_rank_file
        ids_and_logits = mcore_models.load_and_run(rank, split, root)
        runs.append(
            ids_and_logits and (ids_and_logits[0].numpy(), ids_and_logits[1].detach().numpy())
        )
        mcore_models._core("parallel_state").destroy_model_parallel()
    return runs


def _build_for_rank_file(case: Case, chunk: int) -> Any:
    """The model of the file's args, which loads names of Transformer Engine's layers."""
    model = _build(case, chunk, case.args["hybrid_layer_pattern"])
    load_state_dict = model.load_state_dict

    def load(state_dict: dict[str, Any], strict: bool) -> None:
        renamed = {}
        for name, value in state_dict.items():
            for plain, fused in NORM_KEYS.items():
                name = name.replace(fused, plain)
            if not name.endswith("_extra_state"):
                renamed[name] = value
        load_state_dict(renamed, strict=strict)

    model.load_state_dict = load
    return model


def import_core() -> None:
    """Import this version of Megatron-Core, and those of its modules that take long.

    A server of ranks imports them for all of them, and ignores errors; so each rank checks.
    """
    sys.path.insert(0, str(FOLDER))
    version = import_module("megatron.core").__version__
    assert version.partition("+")[0] == FOLDER.name, version
    for name in ("models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "dist_checkpointing"):
        import_module(f"megatron.core.{name}")


_build_gpt = mcore_models._build
_save_rank_files = mcore_models._save


def _build(case: Case, chunk: int, pattern: str) -> Any:
    parallel = mcore_models._core("parallel_state")
    args = mcore_models.arguments(case)
    config = replace(
        mcore_models._config({**args, "moe_layer_freq": 1}),
        window_attn_skip_freq=args.get("window_attn_skip_freq"),
        no_rope_freq=args.get("no_rope_freq"),
    )
    stage = parallel.get_pipeline_model_parallel_rank()
    is_last_chunk = chunk == (case.vpp or 1) - 1
    model = mcore_models._core("models.hybrid.hybrid_model").HybridModel(
        config,
        _stack_spec(config),
        args["padded_vocab_size"],
        POSITIONS,
        hybrid_layer_pattern=pattern,
        pre_process=stage == 0 and chunk == 0,
        post_process=stage == case.pp - 1 and is_last_chunk,
        parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        seq_len_interpolation_factor=args["rotary_seq_len_interpolation_factor"],
        vp_stage=chunk if case.vpp else None,
    )
    model.eval()
    return model


def _stack_spec(config: Any) -> Any:
    """HybridModel's own layers, built of modules without Transformer Engine."""
    core = mcore_models._core
    block = core("models.hybrid.hybrid_block")
    layer = core("transformer.transformer_layer")
    attention = core("transformer.attention")
    mlp = core("transformer.mlp")
    linear = core("tensor_parallel")
    spec = core("transformer.spec_utils").ModuleSpec
    norm = core("transformer.torch_norm").WrappedTorchNorm
    add = core("fusions.fused_bias_dropout").get_bias_dropout_add
    block.TENorm = norm  # The final norm, which no spec sets.
    qk_norm = norm if config.qk_layernorm else None
    self_attention = spec(
        module=attention.SelfAttention,
        params={"attn_mask_type": core("transformer.enums").AttnMaskType.causal},
        submodules=attention.SelfAttentionSubmodules(
            linear_qkv=linear.ColumnParallelLinear,
            core_attention=core("transformer.dot_product_attention").DotProductAttention,
            linear_proj=linear.RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    dense = partial(
        mlp.MLP.as_mlp_submodule,
        submodules=mlp.MLPSubmodules(
            linear_fc1=linear.ColumnParallelLinear, linear_fc2=linear.RowParallelLinear
        ),
    )
    experts = core("models.gpt.moe_module_specs").get_moe_module_spec(
        use_te=False, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=False
    )
    return spec(
        module=block.HybridStack,
        submodules=block.HybridStackSubmodules(
            attention_layer=spec(
                module=layer.TransformerLayer,
                submodules=layer.TransformerLayerSubmodules(
                    input_layernorm=norm,
                    self_attention=self_attention,
                    self_attn_bda=add,
                    sharded_state_dict_keys_map={"input_layernorm.": NORM_KEYS["input_layernorm."]},
                ),
            ),
            mlp_layer=spec(
                module=core("ssm.mlp_layer").MLPLayer,
                submodules=layer.TransformerLayerSubmodules(
                    pre_mlp_layernorm=norm,
                    mlp=dense,
                    mlp_bda=add,
                    sharded_state_dict_keys_map={
                        "pre_mlp_layernorm.": NORM_KEYS["pre_mlp_layernorm."]
                    },
                ),
            ),
            moe_layer=spec(
                module=layer.MoETransformerLayer,
                submodules=layer.TransformerLayerSubmodules(
                    pre_mlp_layernorm=norm, mlp=experts, mlp_bda=add
                ),
            ),
        ),
    )
