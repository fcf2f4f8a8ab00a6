"""On a CUDA device a recorded step does what the step does, and steps begin before others land."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from tests.support.models import CONFIGS, build, first_tie, recompute_greedy
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
pytest.importorskip("msgspec", reason="msgspec is not installed, and the engine needs it")
pytest.importorskip("triton", reason="Triton is not installed, and other attention is not recorded")

from bench.harness.offline_engine import answered, asking, engine_of  # noqa: E402
from gpt.attention.selector import choose  # noqa: E402
from gpt.model.loading import load_model  # noqa: E402
from serving.config import ServerConfig  # noqa: E402
from serving.messages import Outcome, Step  # noqa: E402
from serving.ranks.rank import arrange  # noqa: E402
from serving.request import Answer, Request  # noqa: E402
from serving.worker import cuda_graphs  # noqa: E402
from serving.worker.model_runner import Runner, blocks_that_fit, recordings, rehearsal  # noqa: E402
from tests.support.graph_steps import RULES, after, begun  # noqa: E402
from tests.support.models import lively  # noqa: E402

CONFIG = ServerConfig(
    "model",
    device="cuda",
    kv_block_tokens=16,
    kv_tokens_max=2048,
    running_requests_max=6,
    step_tokens_max=64,
    adapter_rows_max=8,
)
DENSE = ["classic", "modern", "odd"]


def there(name: str, mesh: Mesh | None = None, dtype: torch.dtype = torch.float32) -> GPT:
    """In Triton's attention, as a server would have it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    mesh = mesh or Mesh.single("cuda")
    config = CONFIGS[name].with_fields(dtype="float64")
    word = str(dtype).removeprefix("torch.")
    found = choose("triton", config, mesh.device, dtype=word)
    model = load_model(lively(config), mesh, dtype=dtype, attend=found.attend, store=found.store)
    arrange(model.eval(), CONFIG)
    return model


def runner_of(model: GPT, config: ServerConfig = CONFIG) -> Runner:
    return Runner(model, config, blocks=blocks_that_fit(model, config), slots=6)


def ran(runner: Runner, step: Step) -> Outcome:
    outcome = runner.run(step)
    assert outcome is not None
    return outcome


def first_of(count: int, step: Step) -> Step:
    ids = step.slots[:count], step.past[:count], step.lengths[:count], step.ids[:count]
    return Step(step.number, *ids, step.draws[:count], step.scores[:count])


@pytest.mark.parametrize("name", DENSE)
def test_replayed_steps_have_the_tokens_of_steps_that_were_not_recorded(name: str) -> None:
    model = there(name)
    plain = runner_of(model, replace(CONFIG, cuda_graphs="off"))
    recorded = runner_of(model)
    assert recorded.graph_sizes == (1, 2, 4, 6) and plain.graph_sizes == ()
    step = begun(RULES, blocks=2)
    outcomes = [ran(runner, step) for runner in (plain, recorded)]
    for turn in range(8):
        one, other = outcomes
        assert other.replayed == (turn > 0) and not one.replayed
        assert (one.tokens, one.faults, one.stuck) == (other.tokens, other.faults, other.stuck)
        for mine, theirs in zip(one.scores, other.scores, strict=True):
            assert abs(mine.logprob - theirs.logprob) < 1e-3
        # Of another size as some end, so that others are recorded, too.
        step = first_of(5 - turn // 2, after(step, one, lambda place, token: token))
        outcomes = [ran(runner, step) for runner in (plain, recorded)]


def test_what_graphs_hold_is_what_was_kept_free_for_them() -> None:
    model = there("classic", dtype=torch.bfloat16)
    runner = runner_of(model)
    for step in rehearsal(CONFIG, runner)[:-1]:
        runner.run(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for step in recordings(CONFIG, runner):
        assert ran(runner, step).replayed
    held = torch.cuda.memory_reserved() - before
    assert held <= cuda_graphs.reserved_bytes(model, CONFIG)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("ahead", ["auto", "off"])
def test_an_engine_gives_the_plain_loops_tokens_with_steps_recorded_and_ahead(
    name: str, ahead: str
) -> None:
    prompts = [[7, 3, 90, 12, 5], [64], list(range(1, 30)), [5, 5, 9]]
    oracle = build(CONFIGS[name], dtype=torch.float32)
    with engine_of(there(name), replace(CONFIG, step_ahead=ahead)) as engine:
        made = answered(engine, [asking(tuple(prompt), 20) for prompt in prompts])
        load = engine.load
    assert load.replayed_steps > 10
    assert (load.early_steps > 10) == (ahead == "auto")
    for prompt, one in zip(prompts, made, strict=True):
        want = recompute_greedy(oracle, prompt, 20)
        until = first_tie(want)
        assert list(one.token_ids[:until]) == want.tokens[:until]


def test_drawn_tokens_are_the_same_recorded_ahead_or_neither() -> None:
    rules = [Sampling(20, temperature=0.9, top_p=0.9, seed=seed) for seed in range(4)]
    model = build(CONFIGS["classic"], Mesh.single("cuda"))
    want = [generate(model, [[7, 3, 9]], rule)[0].token_ids for rule in rules]
    eager, patient = replace(CONFIG, cuda_graphs="off"), replace(CONFIG, step_ahead="off")
    for config in (CONFIG, eager, patient):
        with engine_of(there("classic"), config) as engine:
            made = answered(engine, [Request((Answer((7, 3, 9), rule),)) for rule in rules])
        # Rounding may decide a draw that falls between two tokens, though hardly for all of them.
        same = [list(one.token_ids) == tokens for one, tokens in zip(made, want, strict=True)]
        assert sum(same) >= len(rules) - 1


def stage(rank: int, folder: str) -> list[int]:
    """Each stage's own graphs; hidden states hop by gloo, through the host."""
    model = there("modern", Mesh.create(1, 2, device="cuda"))
    config = replace(CONFIG, pp=2)
    plain = runner_of(model, replace(config, cuda_graphs="off"))
    recorded = runner_of(model, config)
    step, tokens = begun(RULES, blocks=2), list[int]()
    made: list[list[int]] = []
    for runner in (plain, recorded):
        outcome = runner.run(step)
        made.append([] if outcome is None else outcome.tokens)
    shared = Path(folder) / "tokens"
    for turn in range(5):
        if rank == 1:
            assert made[0] == made[1]
            half = shared.with_suffix(".part")
            half.write_text(" ".join(map(str, made[0])))
            half.rename(f"{shared}-{turn}")
        else:
            _wait_for(Path(f"{shared}-{turn}"))
        told = [int(word) for word in Path(f"{shared}-{turn}").read_text().split()]
        tokens += told
        step = after(step, Outcome(step.number, told), lambda place, token: token)
        outcomes = [runner.run(step) for runner in (plain, recorded)]
        made = [[] if outcome is None else outcome.tokens for outcome in outcomes]
        assert rank == 0 or [o is not None and o.replayed for o in outcomes] == [False, True]
    return tokens


def _wait_for(path: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.01)


def test_stages_on_one_device_replay_what_is_theirs(tmp_path: Path) -> None:
    first, last = ranks(2, stage, str(tmp_path), timeout_s=180)
    assert first == last and len(first) == 5 * len(RULES)
