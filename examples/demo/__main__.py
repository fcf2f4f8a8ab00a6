"""`make demo`: evaluates the demo adapter, serves the model with it and sends a few requests.

Every step is a command that is printed before it runs, so that you can repeat it. The prompts were
held out from the training of the model and of the adapter. Each completion is shown with the
expected completion. If the adapter does not exist, the Makefile target trains it first.
"""

import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.demo.tasks import MARK, plain_records
from examples.demo.words import INSTRUCTIONS
from gpt.adapters.adapter_file import latest_adapter
from gpt.checkpoint.digest import base_digest
from gpt.formats.registry import open_checkpoint

MODEL = "examples/demo/checkpoint"
ADAPTERS = "build/demo/adapters"
LOG = "build/demo/server.log"
ADAPTER_TASK = "mood"  # The task of tune.yaml, which is also the adapter's name.
HELD_OUT = "build/demo/mood-held-out.jsonl"
INSTRUCTED_TASKS = ("past", "larger", "english")  # Tasks that are requested by an instruction.
STOP_S = 10.0  # Timeout for the server to exit, and for an HTTP request, in seconds.
METRIC_PREFIXES = ("preamble_requests", "preamble_generated_tokens", "preamble_virtual_tokens")
NEXT_STEPS = f"""
Next:
  make serve-demo                 serves the model until Ctrl-C; then, in another terminal:
  .venv/bin/preamble generate --server localhost:9000 --task {ADAPTER_TASK} \\
      --field 'prompt=Anna paints a red boat in Rome and smiles {MARK}'
  http://localhost:9001/          the web page of the server, while it runs
  build/demo/runs/mood/           the training report: curves and completions, as an HTML page
  examples/demo/tune.yaml         the training settings; change the task and run `make demo` again
  make test                       runs the test suite
"""


def main() -> int:
    try:
        evaluate_adapter()
        with run_server() as (grpc_address, http_address):
            for task in INSTRUCTED_TASKS:
                record = plain_records(task, 1, 0, "held-out")[0]
                generate(
                    grpc_address, record.completion, f"{INSTRUCTIONS[task][0]} {record.prompt}"
                )
            record = plain_records(ADAPTER_TASK, 1, 1, "held-out")[0]
            print_line(
                "A prompt without an instruction, first without and then with the adapter "
                f"'{ADAPTER_TASK}':"
            )
            generate(grpc_address, "the answer of any task; the prompt names none", record.prompt)
            prompt_flags = ["--task", ADAPTER_TASK, "--field", f"prompt={record.prompt}"]
            generate(grpc_address, record.completion, *prompt_flags)
            print_metrics(http_address)
    except (subprocess.CalledProcessError, OSError) as error:
        reason = error if isinstance(error, OSError) else "the command above failed"
        print(f"the demo stopped: {reason}; the server's log is {LOG}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(NEXT_STEPS)
    return 0


def evaluate_adapter() -> None:
    """Score held-out sentences with and without the adapter, and verify the model's digest."""
    latest = latest_adapter(Path(ADAPTERS), ADAPTER_TASK)
    if latest is None:
        raise OSError(f"{ADAPTERS} has no adapter {ADAPTER_TASK!r}; run `make demo` to train it")
    path, adapter = latest
    print_line("Exact matches on held-out sentences without an instruction:")
    subprocess.run(command("tune", "--evaluate", str(path), HELD_OUT, "--model", MODEL), check=True)
    before = adapter.card.base_digest or ""
    after = base_digest(open_checkpoint(MODEL))  # Computed from all weights on disk.
    if after != before:
        raise OSError(f"the model's digest was {before} during the training and is now {after}")
    print_line(
        f"The model is unchanged, bit for bit: sha256 {before[:16]} before, {after[:16]} after."
    )


def print_line(line: str) -> None:
    print(f"\n{line}", flush=True)


def command(*words: str) -> list[str]:
    """Print a `preamble` command, and return its argument list."""
    print_line(f"$ preamble {shlex.join(words)}")
    return [sys.executable, "-m", "preamble", *words]


@contextmanager
def run_server() -> Iterator[tuple[str, str]]:
    """Start a server on free ports, yield its gRPC and HTTP addresses, and stop it at the end."""
    words = ["serve", MODEL, "--adapters", ADAPTERS, "--port", "0", "--http-port", "0"]
    with open(LOG, "w") as log:
        process = subprocess.Popen(
            command(*words), stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            print(ready, end="", flush=True)
            addresses = dict(word.split("=", 1) for word in ready.split() if "=" in word)
            if "grpc" not in addresses:
                raise OSError("the server did not start")
            yield addresses["grpc"], addresses["http"]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def generate(grpc_address: str, expected: str, *prompt_arguments: str) -> None:
    """Stream a completion, and print the expected completion after it in parentheses."""
    flags = ["--server", grpc_address, "--max-new-tokens", "32"]
    subprocess.run(command("generate", *flags, *prompt_arguments), check=True)
    print(f"(expected: {expected})", flush=True)


def print_metrics(http_address: str) -> None:
    """Print the first eight metric lines that begin with one of METRIC_PREFIXES."""
    url = f"http://{http_address}/metrics"
    print_line(f"$ curl {url}")
    with urllib.request.urlopen(url, timeout=STOP_S) as page:
        lines = page.read().decode().splitlines()
    metrics = [
        line for line in lines if line.startswith(METRIC_PREFIXES) and "_created" not in line
    ]
    print("\n".join(metrics[:8]), f"... {len(lines)} lines", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
