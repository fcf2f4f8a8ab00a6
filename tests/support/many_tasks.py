"""A model with several adapters, and what each answers alone."""

from pathlib import Path

import torch

from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.adapters.prompt_template import Template
from tests.support.servers import CONFIG, write_checkpoint

TASKS = tuple(f"task{place}" for place in range(4))
NEW = 6


class World:
    def __init__(self, folder: Path) -> None:
        self.checkpoint = write_checkpoint(folder)
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        for place, task in enumerate(TASKS):
            text = "{document}<|VIRTUAL_PROMPT_0|>" + ("{question}" if place == 3 else "")
            self.write(task, place + 2, Template(text, (place + 2,)))
        self.write("before", 3, Template("<|VIRTUAL_PROMPT_0|>{document}", (3,)))
        self.write("plain", 2, None)

    def write(self, name: str, rows: int, template: Template | None) -> None:
        table = torch.randn(rows, CONFIG.hidden_size, generator=torch.Generator().manual_seed(rows))
        card = Card(name.split("@")[0], template=template, max_new_tokens=NEW)
        save_adapter(build_adapter(card, table), self.adapters / f"{name}.safetensors")
