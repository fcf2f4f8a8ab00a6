"""Adapters beside the real Megatron-Bridge: logits of its files here, and of ours there.

The differences of logits are those of two correct fp32 implementations.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import check_adapter, open_adapter
from gpt.adapters.export_bridge import convert_linears_to_bridge
from gpt.errors import AdapterError
from gpt.formats.megatron.torch_dist import open_torch_dist
from tests.support.checkpoints import mcore_adapters
from tests.support.checkpoints.mcore_adapters import ADAPTER, ALL, BASE, CASES, REFUSED, Run
from tests.support.peft_adapters import adapted_logits, relative_difference
from tests.support.ranks import ranks

TOLERANCE = 2e-6
# Megatron-Bridge 0.3.1 would reorder the rows of linear_fc1 in the others.
RELOADED = (
    "plain",
    "gated",
    "gated, TP 2, SP",
    "attention of two layers",
    "canonical",
    "canonical, plain, TP 2",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not mcore_adapters.FOLDER.is_dir() and not os.environ.get("CI"),
        reason="Megatron-Bridge 0.3.1, the oracle, is absent; `make tools` installs it",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bridge")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    """The ids and logits of all cases, in one start of processes for each number of ranks."""
    results: dict[str, Run] = {}
    for count in (1, 2, 4):
        names = [name for name, adapter_case in ALL.items() if adapter_case.case.ranks == count]
        results |= ranks(count, mcore_adapters.save_and_run, names, folder)[-1]
    return results


@pytest.mark.parametrize("name", CASES)
def test_adapters_of_megatron_bridge_have_its_logits(
    name: str, folder: Path, runs: dict[str, Run]
) -> None:
    ids, bridge_logits = runs[name]
    base = open_torch_dist(folder / name / BASE)
    adapter = open_adapter(folder / name / ADAPTER, base=base)
    check_adapter(adapter, base.config, None)
    logits = adapted_logits(base, adapter, ids)
    bridge_logits = bridge_logits[..., : logits.shape[-1]]
    assert relative_difference(adapted_logits(base, None, ids), bridge_logits) > 0.1
    assert relative_difference(logits, bridge_logits) <= TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_without_an_equal_here_are_refused(
    name: str, folder: Path, runs: dict[str, Run]
) -> None:
    assert name in runs  # Megatron-Bridge runs them.
    base = open_torch_dist(folder / name / BASE)
    with pytest.raises(AdapterError, match=REFUSED[name][1]):
        open_adapter(folder / name / ADAPTER, base=base)


@pytest.fixture(scope="module")
def reloaded(folder: Path, runs: dict[str, Run]) -> Callable[[str], torch.Tensor]:
    """The logits of Megatron-Bridge with the adapters that are exported here."""
    logits: dict[str, torch.Tensor] = {}
    for count in (1, 2):
        exported = {}
        for name in (name for name in RELOADED if CASES[name].case.ranks == count):
            base = open_torch_dist(folder / name / BASE)
            adapter = open_adapter(folder / name / ADAPTER, base=base)
            exported[name] = folder / name / "exported"
            exported[name].mkdir()
            for file, content in convert_linears_to_bridge(adapter, base).files.items():
                (exported[name] / file).write_bytes(content)
        logits |= ranks(count, mcore_adapters.load_and_run, exported)[-1]
    return logits.__getitem__


@pytest.mark.parametrize("name", RELOADED)
def test_megatron_bridge_loads_exported_adapters(
    name: str, runs: dict[str, Run], reloaded: Callable[[str], torch.Tensor]
) -> None:
    assert relative_difference(reloaded(name), runs[name][1]) <= TOLERANCE
