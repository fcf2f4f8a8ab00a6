"""`make demo`: what an adapter is worth; then the model is served with it, and asked a few things.

Every step is a command that is printed before it runs, so that a reader can type it too. What is
asked was kept out of the model's training, and the adapter's, and stands beside what the answer
should be. The adapter is learned before by the same Makefile target, once.
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
ADAPTED = "mood"  # The task of tune.yaml.
HELD_OUT = "build/demo/mood-held-out.jsonl"
INSTRUCTED = ("past", "larger", "english")
STOP_S = 10.0
SHOWN = ("preamble_requests", "preamble_generated_tokens", "preamble_virtual_tokens")
NEXT = f"""
Next:
  make serve-demo                 serves the same until Ctrl-C; then, in another terminal:
  .venv/bin/preamble generate --server localhost:9000 --task {ADAPTED} \\
      --field 'prompt=Anna paints a red boat in Rome and smiles {MARK}'
  http://localhost:9001/          the same in a browser, while it is served
  build/demo/runs/mood/           how it was learned: curves and answers, in a report for a browser
  examples/demo/tune.yaml         what was learned; change the task, and `make demo`
  make test                       shows that all of it works here
"""


def main() -> int:
    try:
        compare()
        with server() as (grpc, http):
            for task in INSTRUCTED:
                record = plain_records(task, 1, 0, "held-out")[0]
                ask(grpc, record.completion, f"{INSTRUCTIONS[task][0]} {record.prompt}")
            record = plain_records(ADAPTED, 1, 1, "held-out")[0]
            say(f"Bare text, no instruction: what is meant? The adapter '{ADAPTED}' knows.")
            ask(grpc, "any task's answer, at random", record.prompt)
            ask(grpc, record.completion, "--task", ADAPTED, "--field", f"prompt={record.prompt}")
            look(http)
    except (subprocess.CalledProcessError, OSError) as error:
        why = error if isinstance(error, OSError) else "the command above failed"
        print(f"the demo stopped: {why}; the server's log is {LOG}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(NEXT)
    return 0


def compare() -> None:
    """Sentences that nobody has learned from, with the adapter and without; and the same model."""
    found = latest_adapter(Path(ADAPTERS), ADAPTED)
    if found is None:
        raise OSError(f"{ADAPTERS} has no adapter {ADAPTED!r}; `make demo` learns it")
    path, adapter = found
    say("Sentences that nobody has learned from, none with an instruction, to the last letter:")
    subprocess.run(command("tune", "--evaluate", str(path), HELD_OUT, "--model", MODEL), check=True)
    before = adapter.card.base_digest or ""
    now = base_digest(open_checkpoint(MODEL))  # Of every byte, as it lies there.
    if now != before:
        raise OSError(f"the model was {before} when the adapter was learned, and is {now} now")
    say(f"The model is unchanged, bit for bit: sha256 {before[:16]} before, {now[:16]} after.")


def say(line: str) -> None:
    print(f"\n{line}", flush=True)


def command(*words: str) -> list[str]:
    say(f"$ preamble {shlex.join(words)}")
    return [sys.executable, "-m", "preamble", *words]


@contextmanager
def server() -> Iterator[tuple[str, str]]:
    """Where it listens: gRPC, HTTP. Any free ports, since the usual ones may be taken."""
    words = ["serve", MODEL, "--adapters", ADAPTERS, "--port", "0", "--http-port", "0"]
    with open(LOG, "w") as log:
        process = subprocess.Popen(
            command(*words), stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            print(ready, end="", flush=True)
            named = dict(word.split("=", 1) for word in ready.split() if "=" in word)
            if "grpc" not in named:
                raise OSError("the server did not start")
            yield named["grpc"], named["http"]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ask(grpc: str, expected: str, *words: str) -> None:
    """Streams the answer; the expected one follows in parentheses."""
    flags = ["--server", grpc, "--max-new-tokens", "32"]
    subprocess.run(command("generate", *flags, *words), check=True)
    print(f"(expected: {expected})", flush=True)


def look(http: str) -> None:
    url = f"http://{http}/metrics"
    say(f"$ curl {url}")
    with urllib.request.urlopen(url, timeout=STOP_S) as page:
        lines = page.read().decode().splitlines()
    shown = [line for line in lines if line.startswith(SHOWN) and "_created" not in line]
    print("\n".join(shown[:8]), f"... {len(lines)} lines", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
