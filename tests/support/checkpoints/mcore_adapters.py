"""LoRA and DoRA of the real Megatron-Bridge on small GPTs: the oracle of its adapters' files.

Every rank builds a model of Megatron-Core, saves it as a training run does, applies
Megatron-Bridge's own classes, draws the adapter's weights, saves what Megatron-Bridge saves of
them, and takes part in a forward pass. Or it loads an adapter into such a model, as
Megatron-Bridge's `export_adapter_ckpt` does. Only its adapters and configs are imported: they need
Transformer Engine and omegaconf for checks of types alone, which stubs pass.
"""

import ast
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from tests.support.checkpoints import mcore_dist, mcore_models
from tests.support.checkpoints.mcore_models import MODERN, Case

FOLDER = Path(__file__).parents[3] / "build/megatron-bridge/0.3.1"
BASE, ADAPTER = "base", "adapter"  # The folders of a case.


@dataclass(frozen=True)
class AdapterCase:
    """A model and its split, and an adapter by the fields of Megatron-Bridge's class."""

    case: Case
    method: str = "lora.LoRA"  # Below `megatron.bridge.peft`.
    fields: Mapping[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


GATED = {**MODERN, "ffn_hidden_size": 48}
HEADS = {**GATED, "num_query_groups": 8}
CANONICAL = "canonical_lora.CanonicalLoRA"
WITHOUT_FC1 = {"target_modules": ["linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc2"]}
CASES = {
    "plain": AdapterCase(Case()),
    "plain, TP 2": AdapterCase(Case(2)),
    "plain, TP 4, SP": AdapterCase(Case(4), sequence_parallel=True),
    "plain, TP 2 x PP 2 x VPP 2": AdapterCase(Case(2, 2, 2)),
    "gated": AdapterCase(Case(args=GATED)),
    "gated, TP 2, SP": AdapterCase(Case(2, args=GATED), sequence_parallel=True),
    "gated, TP 2 x PP 2": AdapterCase(Case(2, 2, args=GATED)),
    "gated, a key for each layer, TP 2 x PP 2": AdapterCase(
        Case(2, 2, args=GATED), metadata={"non_homogeneous_layers": True}
    ),
    "gated, fewer KV heads than ranks, TP 4": AdapterCase(Case(4, args=GATED)),
    "attention of two layers": AdapterCase(
        Case(args=GATED),
        fields={"target_modules": ["*.layers.0.*.linear_qkv", "*.layers.2.*.linear_proj"]},
        metadata={"non_homogeneous_layers": True},
    ),
    "canonical": AdapterCase(Case(args=GATED), CANONICAL),
    "canonical, TP 2": AdapterCase(Case(2, args=GATED), CANONICAL),
    "canonical, all KV heads, TP 2": AdapterCase(Case(2, args=HEADS), CANONICAL),
    "canonical, plain, TP 2": AdapterCase(Case(2), CANONICAL, WITHOUT_FC1),
    "DoRA": AdapterCase(Case(args=GATED), "dora.DoRA"),
}
REFUSED = {
    "canonical, fewer KV heads than ranks, TP 4": (
        AdapterCase(Case(4, args=GATED), CANONICAL),
        "4 tensor ranks trained on a model with 2 KV heads",
    ),
    "canonical, gates of a plain MLP": (AdapterCase(Case(), CANONICAL), "no gated MLPs"),
    "DoRA, TP 2": (AdapterCase(Case(2, args=GATED), "dora.DoRA"), "tensor_model_parallel_size 2"),
    "DoRA, QKV bias": (AdapterCase(Case(), "dora.DoRA"), "multiplies by the magnitudes too"),
}
ALL = {**CASES, **{name: case for name, (case, _) in REFUSED.items()}}
RANK, ALPHA = 8, 12

Run = tuple[Tensor, Tensor]  # Token ids and logits.


def save_and_run(rank: int, names: Sequence[str], root: Path) -> dict[str, Run]:
    """On every rank, for each case: build, save under `root`, run; the last rank has the logits."""
    runs = {}
    for name in names:
        adapter_case = ALL[name]
        with _models(adapter_case) as chunks:
            mcore_dist._save(chunks, adapter_case.case, root / name / BASE, {})
            fields = {"dim": RANK, "alpha": ALPHA, **adapter_case.fields}
            peft = _apply(chunks, adapter_case.method, fields)
            for number, chunk in enumerate(chunks):
                _randomize(chunk, number)
            _save(chunks, peft, adapter_case, root / name / ADAPTER / "iter_0000007")
            run = mcore_models._run_forward(rank, chunks, adapter_case.case)
        if run is not None:
            runs[name] = run
    return runs


def load_and_run(rank: int, folders: Mapping[str, Path]) -> dict[str, Tensor]:
    """On every rank, for each case: apply and load an adapter; the last rank has the logits."""
    results = {}
    for name, folder in folders.items():
        with _models(ALL[name]) as chunks:
            fields = yaml.safe_load((folder / "run_config.yaml").read_text())["peft"]
            module, _, _ = (
                fields.pop("_target_").removeprefix("megatron.bridge.peft.").partition(".")
            )
            name_of_class = ALL[name].method.rpartition(".")[2]
            peft = _apply(chunks, f"{module}.{name_of_class}", fields)
            loading: Any = import_module("megatron.core.dist_checkpointing")
            loaded = loading.load(_adapter_state(chunks, peft, {}), str(folder))
            for key, chunk in zip(_keys(chunks), chunks, strict=True):
                chunk.load_state_dict(loaded[key], strict=False)
            run = mcore_models._run_forward(rank, chunks, ALL[name].case)
        if run is not None:
            results[name] = run[1]
    return results


@contextmanager
def _models(adapter_case: AdapterCase) -> Iterator[list[Any]]:
    """The chunks of this rank, with their random weights."""
    make_config = mcore_models._config
    mcore_dist._write_in_threads()
    mcore_models._initialize(adapter_case.case)
    if adapter_case.sequence_parallel:
        mcore_models._config = lambda args: replace(make_config(args), sequence_parallel=True)
        _allow_torch_norms()
    try:
        chunks = [
            mcore_models._build(adapter_case.case, chunk)
            for chunk in range(adapter_case.case.vpp or 1)
        ]
        for number, chunk in enumerate(chunks):
            mcore_models._randomize(chunk, adapter_case.case, number)
        yield chunks
    finally:
        mcore_models._config = make_config
        mcore_models._core("parallel_state").destroy_model_parallel()


def _allow_torch_norms() -> None:
    """Let layers with sequence parallelism have torch's norms: the forward pass is row by row."""
    norm: Any = mcore_models._core("transformer.torch_norm").WrappedTorchNorm
    make = norm.__new__

    def new(cls: Any, config: Any, *args: Any, **keywords: Any) -> Any:
        return make(cls, replace(config, sequence_parallel=False), *args, **keywords)

    norm.__new__ = new


def _apply(chunks: list[Any], method: str, fields: Mapping[str, Any]) -> Any:
    _import_bridge()
    module, _, name = method.partition(".")
    peft = getattr(import_module(f"megatron.bridge.peft.{module}"), name)(**fields)
    peft(chunks, training=True)
    peft.set_params_to_save(chunks)
    for chunk in chunks:
        chunk.eval()
    return peft


def _keys(chunks: list[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _adapter_state(chunks: list[Any], peft: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """As apply_peft_adapter_filter_to_state_dict of megatron.bridge.training.checkpointing."""
    return {
        key: {
            name: value
            for name, value in chunk.sharded_state_dict(metadata=dict(metadata)).items()
            if peft.adapter_key_filter(name)
        }
        for key, chunk in zip(_keys(chunks), chunks, strict=True)
    }


def _save(chunks: list[Any], peft: Any, adapter_case: AdapterCase, path: Path) -> None:
    rank = torch.distributed.get_rank()
    if rank == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    record = {
        "checkpoint_version": 3.0,
        "iteration": 7,
        **_adapter_state(chunks, peft, adapter_case.metadata),
    }
    saving: Any = import_module("megatron.core.dist_checkpointing")
    saving.save(record, path, content_metadata=dict(adapter_case.metadata))
    if rank == 0:
        configs: Any = import_module("megatron.bridge.training.utils.config_utils")
        run = {
            **dict.fromkeys(_config_fields()),
            "_target_": "megatron.bridge.training.config.ConfigContainer",
            "model": {"tensor_model_parallel_size": adapter_case.case.tp},
            "peft": configs._ConfigContainerBase._convert_value_to_dict(peft),
        }
        dumping: Any = import_module("megatron.bridge.utils.yaml_utils")
        dumping.dump_dataclass_to_yaml(run, path / "run_config.yaml")
        (path.parent / "latest_checkpointed_iteration.txt").write_text("7")


def _config_fields() -> list[str]:
    """The fields of run_config.yaml; importing their module needs all dependencies."""
    source = (FOLDER / "megatron/bridge/training/config.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (container,) = (node for node in classes if node.name == "ConfigContainer")
    targets = [node.target for node in container.body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _import_bridge() -> None:
    """Make `megatron.bridge.peft` importable, without the other imports of Megatron-Bridge."""
    if "megatron.bridge" in sys.modules:
        return
    ops = _stub("transformer_engine.pytorch.ops", Sequential=object)
    pytorch = _stub("transformer_engine.pytorch", Linear=type("Linear", (nn.Module,), {}), ops=ops)
    _stub("transformer_engine", pytorch=pytorch)
    _stub("omegaconf", OmegaConf=object)
    _stub("omegaconf._utils", is_structured_config=lambda _value: False)
    megatron = import_module("megatron")
    megatron.__path__ = [*megatron.__path__, str(FOLDER / "megatron")]
    for name in ("bridge", "bridge.training", "bridge.training.utils", "bridge.utils"):
        package = _stub(f"megatron.{name}")
        package.__path__ = [str(FOLDER / "megatron" / name.replace(".", "/"))]
    # Without Transformer Engine, Megatron-Core has mocks of its classes, which are no types.
    modules: dict[str, Any] = sys.modules
    mocks = modules["megatron.core.extensions.transformer_engine"]
    modules[mocks.__name__] = None
    for name in ("lora", "canonical_lora", "dora"):
        import_module(f"megatron.bridge.peft.{name}")
    modules[mocks.__name__] = mocks


def _stub(name: str, **attributes: object) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


@torch.no_grad()
def _randomize(model: Any, chunk: int) -> None:
    """Values far from the start; tensor-parallel ranks draw their own, replicas the same."""
    parallel = mcore_models._core("parallel_state")
    stage = parallel.get_pipeline_model_parallel_rank()
    tensor = parallel.get_tensor_model_parallel_rank()
    for name, value in model.named_parameters():
        if ".adapter." not in name:
            continue
        seed = f"{name} {stage} {chunk}"
        if getattr(value, "tensor_model_parallel", False):
            seed += f" tensor {tensor}"
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        random = torch.randn(value.shape, generator=generator)
        if name.endswith("weight_magnitude"):
            value.mul_(1 + 0.2 * random)
        else:
            value.copy_(random / value.shape[-1] ** 0.5)
