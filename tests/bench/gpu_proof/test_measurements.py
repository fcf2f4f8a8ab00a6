"""Measurements of a GPU proof: checks that find a planted fault, and figures of known input."""

from pathlib import Path

import pytest
import torch

from bench.gpu_proof.model_checks import token_deficit
from bench.gpu_proof.proof_sizes import TINY
from bench.gpu_proof.step_profile import span_figures
from bench.gpu_proof.test_runs import SANITIZED_TESTS, read_report
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.generation.generate import generate
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[3]


def test_a_wrong_token_has_a_large_deficit() -> None:
    checkpoint = random_init_checkpoint(TINY.with_fields(dtype="float32"), 0, 0.1)
    twin = load_model(checkpoint, Mesh.single("cpu")).eval()
    prompt = (5, 9, 200, 31)
    answer = tuple(generate(twin, [prompt], SamplingParams(8))[0].token_ids)
    assert token_deficit(twin, prompt, answer) < 1e-3
    wrong = (*answer[:4], (answer[4] + 1) % TINY.vocab_size, *answer[5:])
    assert token_deficit(twin, prompt, wrong) > 0.2


def test_spans_of_parallel_streams_count_once() -> None:
    figures = span_figures([(0, 10), (5, 12), (20, 30), (22, 24)], steps=2)
    assert figures == {
        "kernels a step": 2.0,
        "busy, %": pytest.approx(100 * 22 / 30, abs=0.1),
        "longest gap, ms": 0.008,
    }
    assert span_figures([], steps=1) == {"kernels a step": 0.0}


def test_a_report_gives_counts_and_the_last_line_of_failures(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="a" name="passes"/>
        <testcase classname="a" name="skips"><skipped message="no device"/></testcase>
        <testcase classname="a" name="fails"><failure message="first&#10;last"/></testcase>
        <testcase classname="a" name="errs"><error>only text</error></testcase>
        </testsuite></testsuites>"""
    )
    counts, failures = read_report(report)
    assert counts == {"tests": 4, "passed": 1, "failed": 2, "skipped": 1}
    assert failures == {"a::fails": "last", "a::errs": "only text"}


def test_the_tests_for_the_sanitizer_exist() -> None:
    for test in SANITIZED_TESTS:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text("utf-8")


def test_the_plain_gpt_decodes_as_its_prompt_pass() -> None:
    from bench.gpu_proof.peer_models import PlainGPT

    torch.manual_seed(0)
    network = TINY.with_fields(max_position_embeddings=8)
    model = PlainGPT(network, lambda function: function).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        want = model(ids, torch.arange(5), None)
        model(ids[:, :4], torch.arange(4), None)
        mask = (torch.arange(8) <= 4).view(1, 1, 1, -1)
        got = model(ids[:, 4:], torch.tensor([4]), mask)
    assert torch.allclose(got, want, atol=1e-5)
