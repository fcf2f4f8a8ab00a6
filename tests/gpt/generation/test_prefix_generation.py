"""Generation with prefixes by the reference loop: the text's KV cache, and PEFT's tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.adapters.adapter_file import check_adapter, open_adapter
from gpt.adapters.export_peft import convert_to_peft, write_export
from gpt.errors import RequestError
from gpt.formats.registry import open_checkpoint
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from tests.support import prefix_adapters
from tests.support.checkpoints.hf_models import VOCABULARY, model_of
from tests.support.models import CONFIGS, MARGIN, build
from tests.support.ranks import ranks

V = 5
NEW = 12
# Untied: a tied random model repeats its input, whatever precedes it.
CASES = ["gpt2, untied, wide, erf", "llama, linear positions", "gpt_neox, parallel residual"]
HEAD = [9, 2, 40, 77, 5]
TEXT = [7, 3, 60, 3, 21]
RULE = SamplingParams(max_new_tokens=NEW, logprobs=2, prompt_logprobs=1)


def virtual(model: GPT) -> list[int]:
    return [model.config.vocab_size + row for row in range(V)]


@pytest.mark.parametrize("name", CONFIGS)
def test_prefix_of_a_texts_kv_equals_the_text(name: str) -> None:
    model = build(CONFIGS[name])
    table = prefix_adapters.kv_of_text(model, HEAD)
    prompts = [[*virtual(model), *TEXT], TEXT[:3], [*virtual(model), 8]]
    with_prefix, prefix_only, short_prompt = generate(
        model, prompts, RULE, adapter_table=table, adapter_kind="prefix"
    )
    expected_completions = generate(model, [[*HEAD, *TEXT], TEXT[:3], [*HEAD, 8]], RULE)

    for completion, want in zip(
        (with_prefix, prefix_only, short_prompt), expected_completions, strict=True
    ):
        assert completion.token_ids == want.token_ids
        assert completion.logprobs == pytest.approx(want.logprobs, abs=1e-9)
    logprobs = [
        None if prompt_score is None else prompt_score.logprob
        for prompt_score in with_prefix.prompt_scores
    ]
    expected_logprobs = [
        None if prompt_score is None else prompt_score.logprob
        for prompt_score in expected_completions[0].prompt_scores
    ]
    assert logprobs[: V + 1] == [None] * (V + 1)
    assert logprobs[V + 1 :] == pytest.approx(expected_logprobs[V + 1 :], abs=1e-9)
    assert [prompt_score is None for prompt_score in short_prompt.prompt_scores] == [True] * (V + 1)


@pytest.mark.parametrize(
    "prompt", ["behind a text", "twice", "half of it", "out of order", "alone"]
)
def test_prefixes_must_precede_the_text(prompt: str) -> None:
    model = build(CONFIGS["classic"])
    rows = virtual(model)
    ids = {
        "behind a text": [1, *rows, 2],
        "twice": [*rows, *rows, 2],
        "half of it": [*rows[:-1], 2],
        "out of order": [*rows[::-1], 2],
        "alone": rows,
    }[prompt]
    table = prefix_adapters.draw_prefix_table(model.config, V)
    with pytest.raises(RequestError, match="the prompt must begin with the prefix's"):
        generate(model, [[1, 2], ids], RULE, adapter_table=table, adapter_kind="prefix")


def generate_on_rank(
    rank: int, name: str, tp: int, pp: int, prompts: list[list[int]]
) -> list[list[int]]:
    torch.set_num_threads(1)
    model = build(CONFIGS[name], Mesh.create(tp, pp))
    table = prefix_adapters.draw_prefix_table(model.config, V)
    rule = SamplingParams(max_new_tokens=NEW)
    return [
        completion.token_ids
        for completion in generate(model, prompts, rule, adapter_table=table, adapter_kind="prefix")
    ]


# Fewer KV heads than ranks; stages; and both with as many heads as ranks.
@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("odd", 2, 1),
        ("modern", 1, 2),
        pytest.param("modern", 4, 1, marks=pytest.mark.slow),
        pytest.param("experts", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_prefixes_are_sharded_by_layers_and_heads(name: str, tp: int, pp: int) -> None:
    model = build(CONFIGS[name])
    prompts = [[*virtual(model), *TEXT], [*virtual(model), 1]]
    table = prefix_adapters.draw_prefix_table(model.config, V)
    rule = SamplingParams(max_new_tokens=NEW)
    expected = generate(model, prompts, rule, adapter_table=table, adapter_kind="prefix")
    results = ranks(tp * pp, generate_on_rank, name, tp, pp, prompts)
    assert results == [[completion.token_ids for completion in expected]] * (tp * pp)


def tune_by_peft(hf_model: Any) -> Any:
    """Tuned by PEFT, with a prefix as large as the model's own activations."""
    import peft

    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=V)
    model: Any = peft.get_peft_model(hf_model, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        model.prompt_encoder["default"].embedding.weight.normal_(std=1.5)
    return model


@dataclass
class Generated:
    """Tokens of transformers' `generate`, and how many come before the first near-tie."""

    tokens: list[int]
    logprobs: list[float]
    clear: int


def greedy(model: Any, ids: list[int]) -> Generated:
    generated = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(generated.logits)
    tokens = generated.sequences[0, -NEW:]
    margins = -logits.topk(2).values.diff(dim=-1).flatten()
    clear = next(
        (position for position, margin in enumerate(margins.tolist()) if margin < MARGIN), NEW
    )
    scores = logits.log_softmax(-1)[torch.arange(NEW), tokens]
    return Generated(tokens.tolist(), scores.tolist(), clear)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_peft_prefixes_generate_pefts_tokens_after_a_round_trip(case: str, tmp_path: Path) -> None:
    import peft

    hf_model: Any = model_of(case)
    hf_model.generation_config.eos_token_id = None
    hf_model.save_pretrained(tmp_path / "base")
    base = open_checkpoint(tmp_path / "base")
    model = tune_by_peft(hf_model)
    model.save_pretrained(tmp_path / "tuned")
    adapter = open_adapter(tmp_path / "tuned")
    assert (adapter.card.kind, adapter.card.method) == ("prefix", "prefix_tuning")
    check_adapter(adapter, base.config, None)

    ours = load_model(base, Mesh.single())
    rule = SamplingParams(max_new_tokens=NEW)
    texts = [TEXT, [8], [*range(3, 40)]]
    prompts = [[*range(VOCABULARY, VOCABULARY + V), *text] for text in texts]
    with_adapter = generate(ours, prompts, rule, adapter_table=adapter.table, adapter_kind="prefix")
    without_adapter = generate(ours, texts, rule)
    expected = [greedy(model, text) for text in texts]
    for completion, without_prefix, want in zip(
        with_adapter, without_adapter, expected, strict=True
    ):
        clear = want.clear
        assert clear > 3 and completion.token_ids[:clear] == want.tokens[:clear]
        assert completion.logprobs[:clear] == pytest.approx(want.logprobs[:clear], abs=1e-3)
        assert completion.logprobs[:clear] != pytest.approx(
            without_prefix.logprobs[:clear], abs=0.1
        )

    write_export(convert_to_peft(adapter, base, None), tmp_path / "back")
    peft_model: Any = peft.PeftModel.from_pretrained(model_of(case), tmp_path / "back").eval()
    peft_model.base_model.generation_config.eos_token_id = None
    assert [greedy(peft_model, text) for text in texts] == expected
