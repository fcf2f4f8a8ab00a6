"""What is learned, as one rank holds it: gradients are put together over ranks, and a step is made.

Values that move and their moments are fp32 at least; a narrower model gets copies. Which copies of
a tensor have equal gradients, and which only their own rows' share, is written here once. A missing
gradient counts as zero. Knows neither examples nor files.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh, receive_from, send_to
from gpt.parallel.sharding import Split, parameters
from ptuning.config import TuneConfig

WORDS = "embedding.word_embeddings.weight"
# Where rows are shared out, these see only their own rank's rows; heads' norms their own heads.
OF_ROWS = (
    *("norm_weight", "norm_bias", "layernorm.weight", "layernorm.bias"),
    *("linear_proj.bias", "linear_fc2.bias", "router.weight", "gate_weight"),
)
OF_HEADS = ("q_layernorm.weight", "q_layernorm.bias", "k_layernorm.weight", "k_layernorm.bias")
CHOSEN = "expert_bias"  # Moves by another rule than by gradients, in pre-training.

# torch's Adafactor takes steps relative to a tensor's size and never above 1 / sqrt(step). Told
# that no tensor is smaller than this, and with rates that are smaller by it, it takes plain ones,
# as Lester's does: exactly, as it is a power of two.
SIZE_LEAST = 2.0**20
# Its square is the least that a squared gradient counts for, as in Adafactor's paper.
GRADIENT_LEAST = 1e-15

SCALE_FIRST = 2.0**16
SCALE_STEPS = 1000  # Good ones in a row, until the scale is doubled.


class Copies(Enum):
    """How the tensor ranks hold one tensor."""

    SPLIT = "each has its own part"
    GROUPS = "each has its own part, but keys and values are copied where groups are too few"
    HEADS = "keys and values alone, all of them copied where groups are too few"
    EQUAL = "copies, whose gradients come out equal"
    SUMMED = "copies, each with the gradient of its own rows or heads"


@dataclass(frozen=True)
class Learned:
    """A tensor that is learned, as the forward pass reads it."""

    name: str
    value: Tensor
    copies: Copies
    again: bool = False  # The last stage's copy of the embedding: the first stage's is counted.


def of_encoder(named: Iterable[tuple[str, Tensor]], split: Iterable[str]) -> list[Learned]:
    """An encoder's parameters; those in `split` are in parts over the tensor ranks."""
    parts = set(split)
    return [
        Learned(name, value, Copies.SPLIT if name in parts else Copies.EQUAL)
        for name, value in named
    ]


def of_prefix(named: Iterable[tuple[str, Tensor]], config: GPTConfig, mesh: Mesh) -> list[Learned]:
    """Keys and values of this rank's layers and groups."""
    copies = Copies.HEADS if config.num_query_groups < mesh.tp else Copies.SPLIT
    return [Learned(name, value, copies) for name, value in named]


def of_model(chunks: Sequence[GPT]) -> list[Learned]:
    """All of a model's parameters on this rank, made to have gradients."""
    config, mesh = chunks[0].config, chunks[0].mesh
    tied = mesh.pp > 1 and not config.untie_embeddings_and_output_weights
    table, found = parameters(config), []
    for chunk in chunks:
        for name, value in chunk.named_parameters():
            if name.endswith(CHOSEN):
                continue
            value.requires_grad_()
            again = tied and name == WORDS and chunk.last
            copies = _copies(name, table[name].split, config, mesh)
            found.append(Learned(name, value, copies, again))
    return found


def _copies(name: str, split: Split, config: GPTConfig, mesh: Mesh) -> Copies:
    if split is Split.QKV and config.num_query_groups < mesh.tp:
        return Copies.GROUPS
    if split is not Split.WHOLE:
        return Copies.SPLIT
    rows = mesh.sequence_parallel and name.endswith(OF_ROWS)
    return Copies.SUMMED if rows or name.endswith(OF_HEADS) else Copies.EQUAL


@dataclass
class Scale:
    """What a loss is multiplied by, so that fp16 gradients do not vanish; 1 for wider ones."""

    value: float = 1.0
    good: int = 0  # Steps in a row that were made with it.

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Scale":
        return cls(SCALE_FIRST if dtype is torch.float16 else 1.0)

    def learn(self, *, finite: bool) -> None:
        """Halved where gradients overflowed, doubled after many good steps."""
        if self.value == 1.0:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(2.0, self.value / 2)
        elif self.good % SCALE_STEPS == 0:
            self.value = min(2.0**24, self.value * 2)


class Optimizer:
    """Moves what is learned. Ranks that learn nothing have one too, which does nothing."""

    def __init__(self, learned: Sequence[Learned], config: TuneConfig, mesh: Mesh) -> None:
        self._learned, self._mesh, self._config = list(learned), mesh, config
        self._wide = [_wide(one.value) for one in self._learned]
        self._optimizer = _optimizer(self._wide, config)

    def gather(self, sizes: GPTConfig) -> float:
        """Put all ranks' gradients together; this rank's share of their squares' sum."""
        total = 0.0
        for one, wide in zip(self._learned, self._wide, strict=True):
            if wide is not one.value and one.value.grad is not None:
                _take(wide, one.value)
            if wide.grad is None:
                wide.grad = torch.zeros_like(wide)
            _over_ranks(one, wide.grad, sizes, self._mesh)
            total += self._squares(one, wide.grad, sizes)
        return total

    def move(self, step: int, factor: float) -> float:
        """One step, with gradients times `factor`; the learning rate that it was made with."""
        rate = self._config.rate * share_of_rate(step, self._config)
        if self._optimizer is None:
            return rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate / group["unit"]
        for wide in self._wide:
            assert wide.grad is not None
            wide.grad.mul_(factor)
        self._optimizer.step()
        with torch.no_grad():
            for one, wide in zip(self._learned, self._wide, strict=True):
                if wide is not one.value:
                    one.value.copy_(wide)
        self.forget()
        return rate

    def forget(self) -> None:
        """Drop all gradients."""
        for one, wide in zip(self._learned, self._wide, strict=True):
            one.value.grad = wide.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """All that a later run needs to go on exactly: values, moments, counts."""
        found: dict[str, Tensor] = {}
        for one, wide in zip(self._learned, self._wide, strict=True):
            key = _key(one)
            found[f"value/{key}"] = wide.detach()
            state = self._optimizer.state.get(wide, {}) if self._optimizer else {}
            for kind, tensor in state.items():
                found[f"{kind}/{key}"] = torch.as_tensor(tensor)
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for one, wide in zip(self._learned, self._wide, strict=True):
            key = _key(one)
            wide.copy_(tensors[f"value/{key}"])
            if wide is not one.value:
                one.value.copy_(wide)
            assert self._optimizer is not None
            kinds = {name.split("/", 1)[0] for name in tensors if name.endswith(f"/{key}")}
            self._optimizer.state[wide] = {
                # Counts stay on the CPU, where they were.
                kind: saved.clone() if saved.ndim == 0 else saved.to(wide.device, copy=True)
                for kind in sorted(kinds - {"value"})
                for saved in [tensors[f"{kind}/{key}"]]
            }

    def _squares(self, one: Learned, grad: Tensor, sizes: GPTConfig) -> float:
        """Of all ranks' gradients each number is counted once."""
        mesh = self._mesh
        if mesh.dp_rank or one.again:
            return 0.0
        if one.copies in (Copies.EQUAL, Copies.SUMMED) and mesh.tp_rank:
            return 0.0
        squares = float(grad.double().square().sum())
        if one.copies in (Copies.GROUPS, Copies.HEADS):
            copied = float(_copied(one, grad, sizes).double().square().sum())
            squares -= copied * (1 - sizes.num_query_groups / mesh.tp)
        return squares


def share_of_rate(step: int, config: TuneConfig) -> float:
    """Of the full learning rate, for the step of this number from 1: a line up, then as asked."""
    warmup = config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse-sqrt":
        return math.sqrt(max(1, warmup) / step)
    done = (step - 1 - warmup) / max(1, config.steps - warmup)
    return config.minimum_rate + (1 - config.minimum_rate) * 0.5 * (
        1 + math.cos(math.pi * min(1.0, done))
    )


def _optimizer(values: Sequence[Tensor], config: TuneConfig) -> torch.optim.Optimizer | None:
    if not values:
        return None
    unit = SIZE_LEAST if config.optimizer == "adafactor" else 1.0
    decays = {True: config.weight_decay * unit, False: 0.0}
    kinds = {wide: [one for one in values if (one.ndim > 1) == wide] for wide in decays}
    groups = [
        {"params": some, "weight_decay": decays[wide], "unit": unit}
        for wide, some in kinds.items()
        if some
    ]
    match config.optimizer:
        case "adamw":
            betas = (config.beta1, config.beta2)
            return torch.optim.AdamW(groups, lr=config.rate, betas=betas, eps=config.epsilon)
        case "adafactor":
            return torch.optim.Adafactor(groups, eps=(GRADIENT_LEAST, SIZE_LEAST))
    raise ConfigError(f"optimizer {config.optimizer!r} is not known")


def _wide(value: Tensor) -> Tensor:
    """The values that move: these themselves, or a copy of them in fp32 that collects gradients."""
    if value.dtype in (torch.float32, torch.float64):
        return value
    wide = value.detach().float()

    def collect(narrow: Tensor) -> None:
        # After each micro-batch, so that they are summed in fp32.
        _take(wide, narrow)

    value.register_post_accumulate_grad_hook(collect)
    return wide


def _take(wide: Tensor, narrow: Tensor) -> None:
    assert narrow.grad is not None
    if wide.grad is None:
        wide.grad = narrow.grad.float()
    else:
        wide.grad += narrow.grad
    narrow.grad = None


def _key(one: Learned) -> str:
    return f"{one.name}/again" if one.again else one.name


def _over_ranks(one: Learned, grad: Tensor, sizes: GPTConfig, mesh: Mesh) -> None:
    if one.copies is Copies.SUMMED and mesh.tp > 1:
        _sum(grad, mesh, mesh.tp_group)
    if one.copies in (Copies.GROUPS, Copies.HEADS):
        _sum_groups(_copied(one, grad, sizes), sizes, mesh)
    if one.name == WORDS and mesh.pp > 1 and not sizes.untie_embeddings_and_output_weights:
        _sum_ends(grad, mesh)
    if mesh.dp > 1:
        _sum(grad, mesh, mesh.dp_group)


def _sum(grad: Tensor, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
    sent = grad.cpu() if mesh.staged else grad
    dist.all_reduce(sent, group=group)
    if sent is not grad:
        grad.copy_(sent)


def _copied(one: Learned, grad: Tensor, sizes: GPTConfig) -> Tensor:
    """Of keys and values, which several ranks have; of a weight these are the last rows."""
    return grad if one.copies is Copies.HEADS else grad[-2 * sizes.kv_channels :]


def _sum_groups(own: Tensor, sizes: GPTConfig, mesh: Mesh) -> None:
    """Every rank that has a copy of a group's key and value saw only its own queries' share."""
    share = mesh.tp // sizes.num_query_groups
    sent = (own.cpu() if mesh.staged else own).contiguous()
    pieces = [torch.empty_like(sent) for _ in range(mesh.tp)]
    dist.all_gather(pieces, sent, group=mesh.tp_group)
    first = mesh.tp_rank // share * share
    own.copy_(torch.stack(pieces[first : first + share]).sum(0))


def _sum_ends(grad: Tensor, mesh: Mesh) -> None:
    """A tied embedding stands on the first stage and on the last."""
    other = mesh.pp - 1 if mesh.pp_rank == 0 else 0
    shape, dtype = tuple(grad.shape), grad.dtype
    if mesh.pp_rank == 0:
        send_to(grad, mesh, other)
        grad += receive_from(shape, dtype, mesh, other)
    else:
        theirs = receive_from(shape, dtype, mesh, other)
        send_to(grad, mesh, other)
        grad += theirs
