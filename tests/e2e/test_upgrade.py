"""Upgrade from an earlier release: two wheels, the same model, adapters, settings and clients.

The wheel of EARLIER_RELEASE is built from the git history. It serves, and leaves adapters, aliases,
unfinished tuning runs, sweeps and unfinished conversions. The wheel of this checkout takes all of
them over, also while both serve the same adapter directory, as in a rolling upgrade. A clone
without the commit skips the tests and prints the reason.
"""

import csv
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import checkpoints_tools.__main__
from gpt.adapters.adapter_file import open_adapter
from tests.support.installations import (
    ROOT,
    Installation,
    build_wheel,
    call,
    clean_environment,
    copy_checkout,
    extract_commit,
    install_wheel,
)
from tests.support.servers import Server, eventually, server_process
from tests.support.tokens_file import BOSS, GUEST, sha256, tokens_file

pytestmark = pytest.mark.slow

EARLIER_RELEASE = "b871380"  # The last commit of version 0.1.0.
CLIENT = ROOT / "tests/support/release_client.py"
# Adapters of the tenant `boss`, and of all tenants.
ADAPTERS = ("mood", "mood@1", "mood@2", "tone")
SHARED_ADAPTERS = ("tone",)
STEPS = 24
INTERRUPTED_AT = 6  # Steps after which a tuning run is interrupted.
RUN_S = 300.0
PROMPT = "How far apart are the numbers? 60 and 26 =>"
TUNE = {
    "template": "<|VIRTUAL_PROMPT_0|>{prompt} {completion}",
    "virtual_tokens": 4,
    "batch_examples": 4,
    "dtype": "float32",
}
# Settings of the unfinished runs.
RUNS: dict[str, dict[str, object]] = {
    "prompt-tuning": {"validate_every": 4, "patience": 5, "validation_examples": 4},
    "lstm": {"method": "lstm", "encoder_dropout": 0.1, "tp": 2},
}
# A program for the earlier release: `convert` that is killed when the journal has three tensors.
KILLED_CONVERSION = """\
import os, signal, sys
from checkpoints_tools import copying
from checkpoints_tools.__main__ import main
from checkpoints_tools.journal import Journal

copying.COMMIT_SECONDS = 0.0
commit = Journal.commit

def commit_and_die(journal, done):
    commit(journal, done)
    if len(journal.done) >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.commit = commit_and_die
sys.exit(main(["convert", *sys.argv[1:]]))
"""
FORMATS = {"native": [], "megatron": ["--tp", "2"], "megatron-dist": [], "nemo": [], "hf": []}


@dataclass(frozen=True)
class Upgrade:
    """The installations of both releases, and the files that the earlier one wrote."""

    earlier: Installation
    current: Installation
    folder: Path

    @property
    def model(self) -> Path:
        """A checkpoint with a proof that the earlier release converted."""
        return self.folder / "models" / "demo"

    @property
    def source(self) -> Path:
        """The Megatron checkpoint of the demo."""
        return self.folder / "earlier" / "examples" / "demo" / "checkpoint"

    @property
    def adapters(self) -> Path:
        return self.folder / "adapters"


@pytest.fixture(scope="module")
def upgrade(tmp_path_factory: pytest.TempPathFactory) -> Upgrade:
    folder = tmp_path_factory.mktemp("upgrade")
    problem = extract_commit(EARLIER_RELEASE, folder / "earlier")
    if problem is not None:
        pytest.skip(f"upgrade from the earlier release: {problem}")
    copy_checkout(folder / "current")
    # Without the C library, whose compilation takes longer than most tests here, torch computes the
    # same operations. tests/repository/test_wheel.py has a wheel with it.
    earlier, current = (
        install_wheel(
            build_wheel(folder / release, CC="no-such-compiler"), folder / f"environment-{release}"
        )
        for release in ("earlier", "current")
    )
    files = Upgrade(earlier, current, folder)
    files.model.parent.mkdir()
    earlier.run("convert", files.source, files.model, "--to", "native", "--prove")
    for name, seed in (("records", 0), ("held-out", 1)):
        write_records(files, folder / f"{name}.jsonl", seed)
    output = files.adapters / "boss"
    earlier.run("tune", write_tune_file(files, folder, "mood", steps=3, output=str(output)))
    shutil.copy(output / "mood@1.safetensors", files.adapters / "tone@1.safetensors")
    return files


def write_records(upgrade: Upgrade, path: Path, seed: int) -> None:
    words = ["-m", "examples.demo.tasks", "--task", "mood", "--count", "24", "--seed", str(seed)]
    path.write_text(call(upgrade.earlier.python, *words, cwd=upgrade.folder / "earlier"))


def write_tune_file(upgrade: Upgrade, folder: Path, name: str, **changes: object) -> Path:
    settings = {
        **TUNE,
        "model": str(upgrade.model),
        "data": str(upgrade.folder / "records.jsonl"),
        "validation": str(upgrade.folder / "held-out.jsonl"),
        "name": name,
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_an_unfinished_conversion_is_completed(form: str, upgrade: Upgrade, tmp_path: Path) -> None:
    end = ".nemo" if form == "nemo" else ""
    target, uninterrupted = tmp_path / f"target{end}", tmp_path / f"uninterrupted{end}"
    (tmp_path / "killed.py").write_text(KILLED_CONVERSION)
    words: list[str | Path] = [upgrade.source, target, "--to", form, *FORMATS[form]]
    call(upgrade.earlier.python, "killed.py", *words, cwd=tmp_path, code=-signal.SIGKILL)
    assert not target.exists() and (tmp_path / f".{target.name}.partial/journal").exists()

    upgrade.current.run("convert", *words, "--resume")
    run_in_process("convert", upgrade.source, uninterrupted, "--to", form, *FORMATS[form])

    assert tree(target) == tree(uninterrupted)
    assert not (tmp_path / f".{target.name}.partial").exists()
    run_in_process("verify", upgrade.source, target)


def run_in_process(*words: str | Path) -> None:
    """Run a command of this checkout, whose code is that of the current wheel."""
    assert checkpoints_tools.__main__.main([str(word) for word in words]) == 0


def tree(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


@pytest.mark.parametrize("name", RUNS)
def test_an_unfinished_tuning_run_resumes_to_the_same_losses(
    name: str, upgrade: Upgrade, tmp_path: Path
) -> None:
    # The output and the run's folder are relative to the working directory, so that both releases
    # continue the same run in copies of one folder.
    folders = {release: tmp_path / release for release in ("earlier", "current")}
    folders["earlier"].mkdir()
    write_tune_file(upgrade, folders["earlier"], name, steps=STEPS, save_every=2, **RUNS[name])
    interrupt_run(upgrade.earlier, folders["earlier"], name)
    shutil.copytree(folders["earlier"], folders["current"])

    upgrade.earlier.run("tune", f"{name}.yaml", cwd=folders["earlier"])
    upgrade.current.run("tune", f"{name}.yaml", cwd=folders["current"])

    expected, resumed = (logged_losses(folder, name) for folder in folders.values())
    assert len(expected) > INTERRUPTED_AT
    assert list(resumed) == list(expected)
    assert list(resumed.values()) == pytest.approx(list(expected.values()), rel=1e-4)
    validation_losses = [logged_validation_losses(folder, name) for folder in folders.values()]
    assert validation_losses[1] == pytest.approx(validation_losses[0], rel=1e-4)
    tables = [
        open_adapter(folder / f"adapters/{name}@1.safetensors").table for folder in folders.values()
    ]
    torch.testing.assert_close(tables[1], tables[0], rtol=1e-3, atol=1e-3)
    assert not list(folders["current"].rglob("state-*"))


def test_a_sweep_keeps_its_finished_runs(upgrade: Upgrade, tmp_path: Path) -> None:
    file = write_tune_file(upgrade, tmp_path, "sweep", steps=3)
    words = ("tune", file, "--json", "--sweep")
    earlier_report = upgrade.earlier.run(*words, "learning_rate=0.01,0.1", cwd=tmp_path)
    current_report = upgrade.current.run(*words, "learning_rate=0.01,0.1,0.2", cwd=tmp_path)

    # A repeated run would have another duration.
    earlier_durations, durations = (
        [run["seconds"] for run in json.loads(report)["runs"]]
        for report in (earlier_report, current_report)
    )
    assert durations[:2] == earlier_durations and len(durations) == 3


def interrupt_run(release: Installation, folder: Path, name: str) -> None:
    """Start a tuning run, and interrupt it after some steps."""
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [release.preamble, "tune", f"{name}.yaml"],
            cwd=folder,
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            end = time.monotonic() + RUN_S
            while len(logged_losses(folder, name)) < INTERRUPTED_AT:
                assert process.poll() is None, (folder / "stderr").read_text()
                assert time.monotonic() < end, "the run is too slow"
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(RUN_S) == 130
        finally:
            process.kill()
            process.wait()
    assert len(logged_losses(folder, name)) < STEPS


def logged_losses(folder: Path, name: str) -> dict[int, float]:
    path = folder / "runs" / name / "1" / "metrics.csv"
    if not path.exists():
        return {}
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(lines)}


def logged_validation_losses(folder: Path, name: str) -> dict[int, float]:
    with (folder / "runs" / name / "1" / "validations.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["measure"] == "loss"]
    return {int(row["step"]): float(row["value"]) for row in rows}


@pytest.fixture(scope="module")
def settings_file(upgrade: Upgrade) -> Path:
    """Write the settings file of both servers."""
    tokens = {
        "boss": {"token_sha256": sha256(BOSS), "roles": ["generate", "adapters", "operator"]},
        "guest": {"token_sha256": sha256(GUEST), "limits": {"calls_max": 8}},
    }
    settings = {
        "adapters": str(upgrade.adapters),
        "tokens": tokens_file(upgrade.folder / "tokens.yaml", tokens),
        "dtype": "float64",
        "running_requests_max": 8,
        "queue_requests_max": 64,
        "step_timeout_s": 60.0,
        "adapters_poll_s": 0.2,
        "flight_dir": str(upgrade.folder),
        "log_format": "json",
    }
    path = upgrade.folder / "server.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@contextmanager
def serving(release: Installation, upgrade: Upgrade, settings_file: Path) -> Iterator[Server]:
    command: list[str | Path] = [release.preamble, "serve", upgrade.model]
    command += ["--config", settings_file, "--port", "0", "--http-port", "0"]
    log = release.home / "log"
    with server_process(command, release.home, clean_environment(), log) as server:
        yield server
        assert server.stop() == 0, log.read_text()


def answers(
    release: Installation,
    server: Server,
    token: str = BOSS,
    adapters: Sequence[str] = ADAPTERS,
) -> Any:
    """Return the answers that the release's client gets from the server."""
    output = call(release.python, CLIENT, server.address, token, *adapters, cwd=release.home)
    return json.loads(output)


def adapters_command(release: Installation, server: Server, *words: str | Path) -> None:
    release.run("adapters", *words, "--server", server.address, "--token", BOSS)


def test_servers_and_clients_of_both_releases_give_the_same_answers(
    upgrade: Upgrade, settings_file: Path
) -> None:
    earlier, current = upgrade.earlier, upgrade.current
    with serving(earlier, upgrade, settings_file) as earlier_server:
        version_2 = upgrade.folder / "version-2.safetensors"
        retrain(upgrade, version_2)
        adapters_command(earlier, earlier_server, "promote", "mood@1")
        adapters_command(earlier, earlier_server, "upload", "mood", version_2)
        expected = answers(earlier, earlier_server)
        expected_for_guest = answers(earlier, earlier_server, GUEST, SHARED_ADAPTERS)
        assert expected["adapters"] == [["mood", 1, True], ["mood", 2, False], ["tone", 1, True]]
        assert expected_for_guest["adapters"] == [["tone", 1, True]]
        assert expected["mood"] == expected["mood@1"] != expected["mood@2"]
        expected_http = http_answers(earlier_server)

        # A rolling upgrade: both servers use the same directory of adapters.
        with serving(current, upgrade, settings_file) as current_server:
            assert answers(current, current_server) == expected
            guest_answers = answers(current, current_server, GUEST, SHARED_ADAPTERS)
            assert guest_answers == expected_for_guest
            assert answers(earlier, current_server) == expected
            assert answers(current, earlier_server) == expected
            assert not list(http_differences(http_answers(current_server), expected_http))
            for server in (earlier_server, current_server):
                for release in (earlier, current):
                    generate_with_command(release, server)

            # Each server follows a promotion by the other one.
            adapters_command(current, current_server, "promote", "mood@2")
            eventually(lambda: current_version(earlier, earlier_server) == 2)
            adapters_command(earlier, earlier_server, "rollback", "mood")
            eventually(lambda: current_version(current, current_server) == 1)
            adapters_command(current, current_server, "promote", "mood@2")
            eventually(lambda: current_version(earlier, earlier_server) == 2)

    # Only the current release remains, and no promotion is lost.
    with serving(current, upgrade, settings_file) as current_server:
        last = answers(current, current_server)
        assert last["adapters"] == [["mood", 1, False], ["mood", 2, True], ["tone", 1, True]]
        assert last["mood"] == expected["mood@2"]
        adapters_command(current, current_server, "rollback", "mood")
        assert answers(current, current_server)["mood"] == expected["mood@1"]


def retrain(upgrade: Upgrade, target: Path) -> None:
    """Train another version of the adapter with the earlier release."""
    folder = target.with_suffix("")
    folder.mkdir()
    upgrade.earlier.run(
        "tune", write_tune_file(upgrade, folder, "mood", steps=3, seed=1), cwd=folder
    )
    shutil.copy(folder / "adapters" / "mood@1.safetensors", target)


def current_version(release: Installation, server: Server) -> int:
    words = ["adapters", "show", "mood", "--json", "--server", server.address, "--token", BOSS]
    return int(json.loads(release.run(*words))["version"])


def generate_with_command(release: Installation, server: Server) -> None:
    words = ["generate", PROMPT, "--max-new-tokens", "4", "--task", "mood"]
    assert release.run(*words, "--server", server.address, "--token", BOSS).strip()


def http_answers(server: Server) -> dict[str, Any]:
    """Return responses of the HTTP APIs that both releases have."""
    bodies: dict[str, dict[str, object]] = {
        "base": {"model": "preamble"},
        "default name": {"model": "demo", "temperature": 0.8, "seed": 5, "logprobs": 2},
        "alias": {"model": "mood"},
        "version": {"model": "mood@2", "n": 2, "temperature": 0.5, "seed": 9},
    }
    responses: dict[str, Any] = {}
    for name, body in bodies.items():
        request = {"prompt": PROMPT, "max_tokens": 6, "seed": 1, **body}
        status, text = server.request("/v1/completions", request, token=BOSS)
        responses[name] = [status, json.loads(text)]
    for path in ("/v1/models", "/v1/adapters", "/health/ready", "/metrics"):
        status, text = server.get(path, BOSS)
        responses[path] = [status, json.loads(text) if path.startswith("/v1") else text]
    return responses


def http_differences(responses: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    """Yield what the responses lack of those of the earlier release."""
    for name, (status, body) in expected.items():
        new_status, new_body = responses[name]
        if new_status != status:
            yield f"{name}: status {new_status}, not {status}"
        elif name == "/metrics":
            yield from sorted(series_names(body) - series_names(new_body))
        elif name == "/v1/models":
            names = [{model["id"] for model in record["data"]} for record in (body, new_body)]
            yield from sorted(names[0] - names[1])
        else:
            yield from differences(new_body, body, name)


def series_names(scrape: str) -> set[str]:
    return {line.split("{")[0].split(" ")[0] for line in scrape.splitlines() if line[:1] != "#"}


def differences(response: Any, expected: Any, path: str) -> Iterator[str]:
    """Yield the fields of `expected` that the response lacks; it may have more fields."""
    if isinstance(expected, dict) and isinstance(response, dict):
        for key, part in expected.items():
            if key not in ("id", "created", "cached_tokens"):
                yield from differences(response.get(key), part, f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(response, list):
        if len(response) != len(expected):
            yield f"{path}: {len(response)} elements, not {len(expected)}"
        for number, (part, expected_part) in enumerate(zip(response, expected, strict=False)):
            yield from differences(part, expected_part, f"{path}[{number}]")
    elif isinstance(expected, float) and isinstance(response, float):
        if response != pytest.approx(expected, rel=1e-6):
            yield f"{path}: {response}, not {expected}"
    elif response != expected:
        yield f"{path}: {response!r}, not {expected!r}"
