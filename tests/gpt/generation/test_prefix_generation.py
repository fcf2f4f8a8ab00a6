"""A prefix by the plain loop: the text whose keys and values it is, and PEFT's own tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.adapters.adapter_file import check_adapter, open_adapter
from gpt.adapters.export_peft import as_peft, write_export
from gpt.errors import RequestError
from gpt.formats.registry import open_checkpoint
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from tests.support import prefix_adapters
from tests.support.checkpoints.hf_models import VOCABULARY, model_of
from tests.support.models import CONFIGS, MARGIN, build
from tests.support.ranks import ranks

V, NEW = 5, 12
# Untied: a tied random model says again what it has read, whatever stands before that.
CASES = ["gpt2, untied, wide, erf", "llama, linear positions", "gpt_neox, parallel residual"]
HEAD, TEXT = [9, 2, 40, 77, 5], [7, 3, 60, 3, 21]
RULE = Sampling(max_new_tokens=NEW, logprobs=2, prompt_logprobs=1)


def virtual(model: GPT) -> list[int]:
    return [model.config.vocab_size + row for row in range(V)]


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_and_values_of_a_text_are_that_text(name: str) -> None:
    model = build(CONFIGS[name])
    table = prefix_adapters.kept(model, HEAD)
    prompts = [[*virtual(model), *TEXT], TEXT[:3], [*virtual(model), 8]]
    first, bare, short = generate(model, prompts, RULE, table=table, kind="prefix")
    wanted = generate(model, [[*HEAD, *TEXT], TEXT[:3], [*HEAD, 8]], RULE)

    for found, want in zip((first, bare, short), wanted, strict=True):
        assert found.token_ids == want.token_ids
        assert found.logprobs == pytest.approx(want.logprobs, abs=1e-9)
    told = [None if one is None else one.logprob for one in first.prompt_scores]
    there = [None if one is None else one.logprob for one in wanted[0].prompt_scores]
    assert told[: V + 1] == [None] * (V + 1)
    assert told[V + 1 :] == pytest.approx(there[V + 1 :], abs=1e-9)
    assert [one is None for one in short.prompt_scores] == [True] * (V + 1)


@pytest.mark.parametrize(
    "prompt", ["behind a text", "twice", "half of it", "out of order", "alone"]
)
def test_a_prefix_stands_before_a_text_or_nowhere(prompt: str) -> None:
    model = build(CONFIGS["classic"])
    rows = virtual(model)
    ids = {
        "behind a text": [1, *rows, 2],
        "twice": [*rows, *rows, 2],
        "half of it": [*rows[:-1], 2],
        "out of order": [*rows[::-1], 2],
        "alone": rows,
    }[prompt]
    table = prefix_adapters.drawn(model.config, V)
    with pytest.raises(RequestError, match="keys and values of layers can only stand first"):
        generate(model, [[1, 2], ids], RULE, table=table, kind="prefix")


def on_a_rank(rank: int, name: str, tp: int, pp: int, prompts: list[list[int]]) -> list[list[int]]:
    torch.set_num_threads(1)
    model = build(CONFIGS[name], Mesh.create(tp, pp))
    table = prefix_adapters.drawn(model.config, V)
    rule = Sampling(max_new_tokens=NEW)
    return [one.token_ids for one in generate(model, prompts, rule, table=table, kind="prefix")]


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
def test_each_rank_takes_its_own_layers_and_heads(name: str, tp: int, pp: int) -> None:
    model = build(CONFIGS[name])
    prompts = [[*virtual(model), *TEXT], [*virtual(model), 1]]
    table, rule = prefix_adapters.drawn(model.config, V), Sampling(max_new_tokens=NEW)
    wanted = generate(model, prompts, rule, table=table, kind="prefix")
    found = ranks(tp * pp, on_a_rank, name, tp, pp, prompts)
    assert found == [[one.token_ids for one in wanted]] * (tp * pp)


def tuned(theirs: Any) -> Any:
    """By PEFT, with a prefix as loud as what the model makes itself."""
    import peft

    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=V)
    model: Any = peft.get_peft_model(theirs, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        model.prompt_encoder["default"].embedding.weight.normal_(std=1.5)
    return model


@dataclass
class Written:
    """What transformers' `generate` writes, and how much of it is no near tie."""

    tokens: list[int]
    logprobs: list[float]
    clear: int


def greedy(model: Any, ids: list[int]) -> Written:
    made = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits, tokens = torch.cat(made.logits), made.sequences[0, -NEW:]
    margins = -logits.topk(2).values.diff(dim=-1).flatten()
    clear = next((place for place, one in enumerate(margins.tolist()) if one < MARGIN), NEW)
    scores = logits.log_softmax(-1)[torch.arange(NEW), tokens]
    return Written(tokens.tolist(), scores.tolist(), clear)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_what_peft_tuned_says_what_it_says_there_and_back(case: str, tmp_path: Path) -> None:
    import peft

    theirs: Any = model_of(case)
    theirs.generation_config.eos_token_id = None
    theirs.save_pretrained(tmp_path / "base")
    base = open_checkpoint(tmp_path / "base")
    model = tuned(theirs)
    model.save_pretrained(tmp_path / "tuned")
    adapter = open_adapter(tmp_path / "tuned")
    assert (adapter.card.kind, adapter.card.method) == ("prefix", "prefix_tuning")
    check_adapter(adapter, base.config, None)

    ours = load_model(base, Mesh.single())
    rule, texts = Sampling(max_new_tokens=NEW), [TEXT, [8], [*range(3, 40)]]
    prompts = [[*range(VOCABULARY, VOCABULARY + V), *text] for text in texts]
    made = generate(ours, prompts, rule, table=adapter.table, kind="prefix")
    plain = generate(ours, texts, rule)
    wanted = [greedy(model, text) for text in texts]
    for one, bare, want in zip(made, plain, wanted, strict=True):
        clear = want.clear
        assert clear > 3 and one.token_ids[:clear] == want.tokens[:clear]
        assert one.logprobs[:clear] == pytest.approx(want.logprobs[:clear], abs=1e-3)
        assert one.logprobs[:clear] != pytest.approx(bare.logprobs[:clear], abs=0.1)

    write_export(as_peft(adapter, base, None), tmp_path / "back")
    again: Any = peft.PeftModel.from_pretrained(model_of(case), tmp_path / "back").eval()
    again.base_model.generation_config.eos_token_id = None
    assert [greedy(again, text) for text in texts] == wanted
