"""A model with several adapters, and the text that each generates alone."""

from pathlib import Path

import torch

from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.adapters.prompt_template import PromptTemplate
from tests.support.servers import CONFIG, write_checkpoint

TASKS = tuple(f"task{number}" for number in range(4))
NEW = 6


class TaskAdapters:
    def __init__(self, folder: Path) -> None:
        self.checkpoint = write_checkpoint(folder)
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        for number, task in enumerate(TASKS):
            text = "{document}<|VIRTUAL_PROMPT_0|>" + ("{question}" if number == 3 else "")
            self.write(task, number + 2, PromptTemplate(text, (number + 2,)))
        self.write("before", 3, PromptTemplate("<|VIRTUAL_PROMPT_0|>{document}", (3,)))
        self.write("plain", 2, None)

    def write(self, name: str, rows: int, template: PromptTemplate | None) -> None:
        table = torch.randn(rows, CONFIG.hidden_size, generator=torch.Generator().manual_seed(rows))
        card = Card(name.split("@")[0], template=template, max_new_tokens=NEW)
        save_adapter(build_adapter(card, table), self.adapters / f"{name}.safetensors")
