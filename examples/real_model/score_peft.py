"""Accuracy of an adapter that HF PEFT loads, on the records of a file.

    python score_peft.py MODEL ADAPTER SETTINGS.yaml RECORDS.jsonl

MODEL is a checkpoint in Hugging Face's format, ADAPTER a directory of PEFT. The prompts come from
the template in the settings of `preamble tune`. Answers are generated greedily by transformers. The
score is the measure `accuracy` of `preamble tune --evaluate`: the share of answers that equal the
expected answer except for case and spaces. Preamble's code is not used, so that the score is an
independent check.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ANSWER_TOKENS_MAX = 8  # The answers are single words; a longer answer is wrong in any case.


def prompt_and_answer(template: str, record: dict[str, str]) -> tuple[str, str]:
    """Return the text before the answer, and the answer, which is the template's last field.

    PEFT inserts the virtual tokens before the text. Other markers have no place in its format.
    """
    text = template.removeprefix("<|VIRTUAL_PROMPT_0|>")
    match = re.fullmatch(r"(.*)\{(\w+)\}", text, re.DOTALL)
    assert match is not None, f"the template {template!r} does not end with a field"
    return match[1].rstrip(" ").format(**record), record[match[2]]


def normalize(text: str) -> str:
    return " ".join(text.lower().split())


def count_correct(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> int:
    """Count the prompts for which the model generates the expected answer.

    A batch has prompts with equal numbers of tokens, so that no prompt needs padding.
    """
    import torch

    batches = defaultdict(list)
    for prompt, answer in pairs:
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        batches[len(ids)].append((ids, answer))
    correct = 0
    for length, batch in sorted(batches.items()):
        ids = torch.tensor([ids for ids, _ in batch])
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=ANSWER_TOKENS_MAX,
            pad_token_id=tokenizer.eos_token_id,
        )
        answers = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        correct += sum(
            normalize(answer) == normalize(expected)
            for answer, (_, expected) in zip(answers, batch, strict=True)
        )
    return correct


def main(model_folder: str, adapter_folder: str, settings_file: str, records_file: str) -> None:
    import torch
    import yaml
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = yaml.safe_load(Path(settings_file).read_text("utf-8"))["template"]
    records = [json.loads(line) for line in Path(records_file).read_text("utf-8").split("\n")[:-1]]
    pairs = [prompt_and_answer(template, record) for record in records]
    models: Any = AutoModelForCausalLM  # Its methods have no types.
    base = models.from_pretrained(model_folder, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, adapter_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    correct = count_correct(model, tokenizer, pairs)
    print(f"accuracy {100 * correct / len(pairs):.1f}% ({correct} of {len(pairs)} records)")


if __name__ == "__main__":
    main(*sys.argv[1:])
