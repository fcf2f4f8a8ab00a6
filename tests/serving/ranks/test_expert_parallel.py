"""A server whose ranks hold whole experts: its answers, its mesh, and the loss of a rank."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from checkpoints_tools.__main__ import main as convert
from checkpoints_tools.conversion.convert import write_native
from clients.client import Options
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model.loading import load
from gpt.sampling_params import SamplingParams
from serving.config import ParallelConfig
from tests.support.models import EIGHT_EXPERTS, lively
from tests.support.servers import WAIT_S, command, eventually, serving
from tests.support.suites import cases_by_suite

# Megatron cannot express the other fields of `EIGHT_EXPERTS`.
CONFIG = EIGHT_EXPERTS.with_fields(
    activation="silu", moe_router_bias=False, mlp_bias=False, proj_bias=False, dtype="float32"
)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 30]
TOKENS = 12


@pytest.mark.parametrize(("tp", "ep"), [(3, 2), (2, 3)])
def test_one_size_must_be_a_multiple_of_the_other(tp: int, ep: int) -> None:
    with pytest.raises(ConfigError, match="must be a multiple of the other"):
        ParallelConfig(tp=tp, ep=ep)


@pytest.mark.parametrize(
    ("sizes", "ranks"), [((1, 1, 4), 4), ((2, 2, 4), 8), ((4, 2, 2), 8), ((2, 3, 1), 6)]
)
def test_a_stage_has_as_many_ranks_as_the_larger_size(
    sizes: tuple[int, int, int], ranks: int
) -> None:
    tp, pp, ep = sizes
    assert ParallelConfig(tp=tp, pp=pp, ep=ep).ranks == ranks


@pytest.mark.parametrize(("tp", "pp", "ep"), cases_by_suite([(1, 2, 2)], [(1, 1, 2), (2, 1, 2)]))
def test_a_checkpoint_of_expert_ranks_is_served_by_expert_ranks(
    tp: int, pp: int, ep: int, tmp_path: Path
) -> None:
    write_native(lively(CONFIG), tmp_path / "native")
    model = tmp_path / "megatron"
    split = ["--to", "megatron", "--tp", "2", "--ep", "4"]
    assert convert(["convert", str(tmp_path / "native"), str(model), *split]) == 0
    want = [
        completion.token_ids
        for completion in generate(
            load(tmp_path / "native", dtype=torch.float64),
            PROMPTS,
            SamplingParams(max_new_tokens=TOKENS),
        )
    ]
    sizes = {"tp": tp, "pp": pp, "ep": ep}
    log = tmp_path / "log"
    with serving(model, tmp_path / "settings.yaml", log, **sizes) as server:
        client = server.client()

        def answers() -> list[list[int]]:
            options = Options(max_new_tokens=TOKENS)
            return [list(client.generate(prompt, options).token_ids) for prompt in PROMPTS]

        assert answers() == want
        info = client.info()
        assert (info.tensor_parallel, info.pipeline_parallel, info.expert_parallel) == (tp, pp, ep)
        assert f"tp={tp} pp={pp} ep={ep}" in log.read_text()
        os.kill(server.ranks[-1], signal.SIGKILL)
        eventually(lambda: server.metric("preamble_engine_restarts_total") > 0, WAIT_S)
        eventually(lambda: client.load().engine_up, WAIT_S)
        assert answers() == want


@pytest.mark.slow
def test_a_number_that_does_not_divide_the_experts_is_refused(tmp_path: Path) -> None:
    write_native(lively(EIGHT_EXPERTS), tmp_path / "native")
    arguments = command("serve", tmp_path / "native", "--ep", "3", "--port", "0")
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert process.returncode != 0
    assert "--ep can be 1, 2, 4, 8" in process.stderr
