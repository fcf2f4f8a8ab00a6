"""LoRA, activated LoRA, DoRA and IA3 beside HF PEFT: equal losses in 50 steps of fp32.

Both start with PEFT's initial values, and train on the same batches in turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.adapters.adapter_file import open_adapter
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.formats.registry import open_checkpoint
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import join_key
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example
from ptuning.linears.layout import LinearsLayout
from ptuning.linears.trainable_linears import TrainableLinears
from ptuning.training.trainer import Trainer
from tests.support.checkpoints.hf_models import VOCABULARY, model_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Between peft and transformers.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STEPS = 50
BATCHES = 5
LOSS_TOLERANCE = 1e-5
INVOCATION = (7, 8, 9)
RATES = {"lora": 1e-2, "alora": 1e-2, "dora": 1e-2, "ia3": 1e-2}
RANK, ALPHA = 4, 6
SPLIT_TARGETS = (
    "linear_qkv.query",
    "linear_qkv.key",
    "linear_qkv.value",
    "linear_proj",
    "linear_fc1.gate",
    "linear_fc1.up",
    "linear_fc2",
)
# The linear or part of each module of a layer.
LLAMA_MODULES = {
    "self_attn.q_proj": ("self_attention.linear_qkv", "query"),
    "self_attn.k_proj": ("self_attention.linear_qkv", "key"),
    "self_attn.v_proj": ("self_attention.linear_qkv", "value"),
    "self_attn.o_proj": ("self_attention.linear_proj", ""),
    "mlp.gate_proj": ("mlp.linear_fc1", "gate"),
    "mlp.up_proj": ("mlp.linear_fc1", "up"),
    "mlp.down_proj": ("mlp.linear_fc2", ""),
}
GPT2_MODULES = {
    "attn.c_attn": ("self_attention.linear_qkv", ""),
    "attn.c_proj": ("self_attention.linear_proj", ""),
    "mlp.c_fc": ("mlp.linear_fc1", ""),
    "mlp.c_proj": ("mlp.linear_fc2", ""),
}
# The llama has as many KV heads as heads; the qwen2 has half as many, and biases of qkv.
MODELS = {"gpt2": GPT2_MODULES, "llama, multi-head": LLAMA_MODULES, "qwen2": LLAMA_MODULES}


def batches() -> list[list[Example]]:
    """Examples of unequal lengths, with the invocation in the middle."""
    draws = torch.Generator().manual_seed(3)
    examples = []
    for number in range(4 * BATCHES):
        context = torch.randint(10, VOCABULARY, (3 + 7 * number % 19,), generator=draws).tolist()
        tail = torch.randint(10, VOCABULARY, (4,), generator=draws).tolist()
        answer = torch.randint(10, VOCABULARY, (1 + number % 4,), generator=draws).tolist()
        ids = [*context, *INVOCATION, *tail, *answer]
        examples.append(Example(ids, len(ids) - len(answer), invocation_start=len(context)))
    return [examples[number::BATCHES] for number in range(BATCHES)]


@torch.no_grad()
def base_of(case: str) -> Any:
    """A model whose logits are about as large as those of a trained one."""
    hf_model: Any = model_of(case)
    for name, value in hf_model.named_parameters():
        if name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight", "lm_head.weight")):
            value.mul_(0.3)
    return hf_model


def peft_model_of(case: str, method: str) -> Any:
    import peft

    torch.manual_seed(0)
    hf_model = base_of(case)
    hf_model.set_attn_implementation("eager")
    targets = [module.rpartition(".")[2] for module in MODELS[case]]
    common: Any = {"task_type": "CAUSAL_LM", "target_modules": targets}
    if method == "ia3":
        feedforward = ["down_proj"]
        if case == "gpt2":  # c_proj is the name of two modules.
            common["target_modules"] = [*MODELS[case]]
            feedforward = ["mlp.c_proj"]
        config: Any = peft.IA3Config(**common, feedforward_modules=feedforward)
    else:
        invocation = list(INVOCATION) if method == "alora" else None
        config = peft.LoraConfig(
            **common,
            r=RANK,
            lora_alpha=ALPHA,
            use_dora=method == "dora",
            alora_invocation_tokens=invocation,
        )
    # Dropout is off; nothing else in these models depends on the training mode.
    return peft.get_peft_model(hf_model, config).eval()


def initial_linears(peft_model: Any, case: str, config: GPTConfig) -> dict[str, LinearAdapter]:
    """PEFT's initial values under our names; magnitudes start as norms of weights in both."""
    tensors = {
        name.removeprefix("base_model.model.").replace(".default", ""): value.detach().clone()
        for name, value in peft_model.named_parameters()
        if value.requires_grad
    }
    linears = {}
    for layer in range(config.num_layers):
        for module, (linear, part) in MODELS[case].items():
            prefix = f"{'transformer.h' if case == 'gpt2' else 'model.layers'}.{layer}.{module}."
            module_tensors = {
                name.removeprefix(prefix): value
                for name, value in tensors.items()
                if name.startswith(prefix)
            }
            key = join_key(f"decoder.layers.{layer}.{linear}", part)
            linears[key] = linear_adapter(
                module_tensors, is_gpt2_qkv=module == "attn.c_attn", config=config
            )
    return linears


def linear_adapter(
    tensors: Mapping[str, Tensor], *, is_gpt2_qkv: bool, config: GPTConfig
) -> LinearAdapter:
    def in_our_order(rows: Tensor) -> Tensor:
        if not is_gpt2_qkv:
            return rows
        heads = rows.view(3, config.num_attention_heads, config.kv_channels, -1)
        return heads.transpose(0, 1).reshape(len(rows), *rows.shape[1:])

    if "ia3_l" in tensors:
        vector = tensors["ia3_l"]
        if vector.shape[0] == 1:
            return LinearAdapter(input_scale=vector.flatten())
        return LinearAdapter(output_scale=in_our_order(vector).flatten())
    b = in_our_order(tensors["lora_B.weight"])
    return LinearAdapter(tensors["lora_A.weight"], b, ALPHA / RANK)


def trainer_of(folder: Path, case: str, method: str, peft_model: Any) -> Trainer:
    checkpoint = open_checkpoint(folder)
    targets = () if case == "gpt2" else SPLIT_TARGETS
    initial = initial_linears(peft_model, case, checkpoint.config)
    return trainer_from(checkpoint, method, targets, initial)


def trainer_from(
    checkpoint: Checkpoint,
    method: str,
    targets: tuple[str, ...],
    initial: Mapping[str, LinearAdapter],
) -> Trainer:
    low_rank = {} if method == "ia3" else {"rank": RANK, "alpha": ALPHA}
    invocation = {"invocation_ids": INVOCATION} if method == "alora" else {}
    settings = TuneConfig(
        "m",
        data="d",
        name="n",
        method=method,
        targets=targets,
        learning_rate=RATES[method],
        schedule="constant",
        warmup_steps=0,
        gradient_norm_max=1.0,
        **low_rank,
        **invocation,
    )
    sizes = checkpoint.config.with_fields(hidden_dropout=0.0, attention_dropout=0.0)
    model = load_model(replace(checkpoint, config=sizes), Mesh.single())
    layout = LinearsLayout.create([settings.method_config], sizes)
    return Trainer([model], settings, linears=TrainableLinears(layout, [initial], [model]))


def padded(examples: Sequence[Example]) -> dict[str, Tensor]:
    longest = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        size = len(example.ids)
        ids[row, :size] = torch.tensor(example.ids)
        mask[row, :size] = 1
        labels[row, example.answer_start : size] = ids[row, example.answer_start : size]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def peft_losses(peft_model: Any, rate: float) -> list[float]:
    trained = [value for value in peft_model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    losses, turns = [], batches()
    for step in range(STEPS):
        loss = peft_model(**padded(turns[step % BATCHES])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("method", RATES)
@pytest.mark.parametrize("case", MODELS)
def test_losses_equal_those_of_peft(case: str, method: str, tmp_path: Path) -> None:
    base_of(case).save_pretrained(tmp_path)
    peft_model = peft_model_of(case, method)
    trainer = trainer_of(tmp_path, case, method, peft_model)
    expected = peft_losses(peft_model, RATES[method])
    turns = batches()
    losses = [trainer.step(turns[step % BATCHES]).loss for step in range(STEPS)]
    worst = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    print(f"{case}, {method}: {expected[0]:.3f} to {expected[-1]:.3f}, at most {worst:.1e} apart")
    assert worst <= LOSS_TOLERANCE
    assert sum(expected[-BATCHES:]) < 0.8 * sum(expected[:BATCHES])


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe, renormalized, wide heads"])
def test_losses_of_experts_equal_those_of_peft(case: str, tmp_path: Path) -> None:
    """PEFT's changes of stacked experts, imported before the first step."""
    import peft

    torch.manual_seed(0)
    hf_model = base_of(case)
    hf_model.save_pretrained(tmp_path / "base")
    hf_model.set_attn_implementation("eager")
    peft_config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    peft_model = peft.get_peft_model(hf_model, peft_config).eval()
    peft_model.save_pretrained(str(tmp_path / "start"))
    checkpoint = open_checkpoint(tmp_path / "base")
    initial = open_adapter(tmp_path / "start", base=checkpoint).linears
    targets = (
        "linear_qkv.query",
        "linear_qkv.value",
        "experts.linear_fc1",
        "experts.linear_fc2",
    )
    trainer = trainer_from(checkpoint, "lora", targets, initial)
    expected = peft_losses(peft_model, RATES["lora"])
    turns = batches()
    losses = [trainer.step(turns[step % BATCHES]).loss for step in range(STEPS)]
    worst = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    print(f"{case}: {expected[0]:.3f} to {expected[-1]:.3f}, at most {worst:.1e} apart")
    assert worst <= LOSS_TOLERANCE
    assert sum(expected[-BATCHES:]) < 0.8 * sum(expected[:BATCHES])
