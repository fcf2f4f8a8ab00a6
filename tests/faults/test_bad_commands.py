"""Bad command lines: each ends with exit code 1 or 2, and one message that names the mistake."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import preamble
from tests.support.servers import write_checkpoint

pytestmark = pytest.mark.slow  # Imports of all commands.

# Command lines, each with a text that the message must contain. MODEL is a checkpoint, MISSING a
# path that does not exist, FILE a file with a random text, FOLDER an empty folder, OUT a new path.
COMMANDS: tuple[tuple[str, str], ...] = (
    ("", "COMMAND"),
    ("serv MODEL", "did you mean 'serve'"),
    ("serve", "model"),
    ("serve MISSING", "does not exist"),
    ("serve FILE", "FILE"),
    ("serve FOLDER", "not a checkpoint"),
    ("serve MODEL --port -1", "port is -1"),
    ("serve MODEL --port 70000", "port is 70000"),
    ("serve MODEL --port five", "--port"),
    ("serve MODEL --http-port 70000", "http_port is 70000"),
    ("serve MODEL --tp 0", "tp is 0"),
    ("serve MODEL --tp 1000000", "tp is 1000000"),
    ("serve MODEL --tp 3", "tp"),
    ("serve MODEL --pp -2", "pp is -2"),
    ("serve MODEL --pp 3", "pp"),
    ("serve MODEL --tp two", "--tp"),
    ("serve MODEL --host 0.0.0.0", "--insecure"),
    ("serve MODEL --host 300.1.1.1 --insecure --port 0 --http-port 0", "300.1.1.1"),
    ("serve MODEL --dtype int3", "int3"),
    ("serve MODEL --device tpu", "tpu"),
    ("serve MODEL --attention-backend magic", "magic"),
    ("serve MODEL --kv-dtype int1", "int1"),
    ("serve MODEL --linear-backend magic", "magic"),
    ("serve MODEL --weights int1", "int1"),
    ("serve MODEL --config MISSING", "cannot be read"),
    ("serve MODEL --config FOLDER", "cannot be read"),
    ("serve MODEL --config FILE", "FILE"),
    ("serve MODEL --adapters MISSING", "is not a directory"),
    ("serve MODEL --adapters FILE", "is not a directory"),
    ("serve MODEL --adapter-imports MISSING", "is not a directory"),
    ("serve MODEL --lora-modules mail", "an entry is NAME=PATH"),
    ("serve MODEL --lora-modules a/b=FOLDER", "is not an adapter name"),
    ("serve MODEL --lora-modules mail=/nowhere/mail", "does not exist"),
    ("serve MODEL --max-loras 4", "adapter_memory_mb"),
    ("serve MODEL --max-lora-rank=64", "adapter_memory_mb"),
    ("serve MODEL --max-cpu-loras 4", "adapter_bytes_max"),
    ("serve MODEL --chat-template MISSING", "chat_template"),
    ("serve MODEL --chat-template FOLDER", "chat_template"),
    ("serve MODEL --tokenizer MISSING", "does not exist"),
    ("serve MODEL --tokenizer FILE", "FILE"),
    ("serve MODEL --tokenizer FOLDER", "tokenizer"),
    ("serve MODEL --true-vocab-size -1", "vocab"),
    ("serve MODEL --true-vocab-size 0", "vocab"),
    ("serve MODEL --true-vocab-size 99999999", "vocab"),
    ("serve MODEL --true-vocab-size many", "--true-vocab-size"),
    ("serve MODEL --config-json MISSING", "--config-json"),
    ("serve MODEL --config-json FILE", "--config-json"),
    ("serve MODEL --config-json FOLDER", "--config-json"),
    ("serve MODEL --served-model-name", "--served-model-name"),
    ("serve MODEL --tool-call-format magic", "magic"),
    ("serve MODEL --profile magic", "magic"),
    ("serve MODEL --unheard-of", "--unheard-of"),
    ("serve MODEL MODEL", "unrecognized"),
    ("generate", "--model"),
    ("generate --model MISSING hello", "does not exist"),
    ("generate --model MODEL", "prompt"),
    ("generate --model MODEL hello --temperature -1", "temperature"),
    ("generate --model MODEL hello --top-p 2", "top_p"),
    ("generate --model MODEL hello --max-new-tokens -1", "max_new_tokens"),
    ("generate --model MODEL hello --max-new-tokens many", "--max-new-tokens"),
    ("generate --model MODEL hello --adapters FOLDER --task nobody", "nobody"),
    ("generate --model MODEL hello --task nobody", "nobody"),
    ("generate --model MODEL --field a", "--field"),
    ("generate --model MODEL hello --json-schema MISSING", "--json-schema"),
    ("inspect", "usage"),
    ("inspect MISSING", "does not exist"),
    ("inspect FILE", "FILE"),
    ("inspect FOLDER", "not a checkpoint"),
    ("inspect MODEL --unheard-of", "--unheard-of"),
    ("verify", "usage"),
    ("verify MODEL MISSING", "does not exist"),
    ("verify MODEL FOLDER", "not a checkpoint"),
    ("convert MODEL", "usage"),
    ("convert MODEL OUT", "--to"),
    ("convert MODEL OUT --to xml", "xml"),
    ("convert MISSING OUT --to native", "does not exist"),
    ("convert MODEL FILE --to native", "already exists"),
    ("convert MODEL OUT --to megatron --tp 0", "tp"),
    ("convert MODEL OUT --to megatron --tp 3", "tp"),
    ("convert MODEL OUT --to megatron --pp 7", "pp"),
    ("convert MODEL OUT --to native --dtype int3", "int3"),
    ("convert MODEL OUT --to native --tp 2", "tp"),
    ("adapters", "usage"),
    ("adapters check", "usage"),
    ("adapters check MISSING", "does not exist"),
    ("adapters check FILE", "FILE"),
    ("adapters import MISSING OUT", "does not exist"),
    ("adapters export MISSING OUT --to peft", "does not exist"),
    ("adapters export FILE OUT --to xml", "xml"),
    ("adapters list --server localhost", "such as localhost:9000"),
    ("adapters list --server localhost:1", "the connection to localhost:1 failed"),
    ("tune", "usage"),
    ("tune MISSING", "cannot be read"),
    ("tune FILE", "FILE"),
    ("tune --check FOLDER", "cannot be read"),
    ("plan", "usage"),
    ("plan estimate", "no model is given"),
    ("plan estimate nothing", "nothing"),
    ("plan estimate 22b --gpu abacus", "abacus"),
    ("plan estimate 22b --gpu h100 --tp 0", "0"),
    ("plan train --gpus -1", "-1"),
    ("bench --server localhost:1 --requests 0", "requests"),
    ("bench --concurrency -1", "concurrency"),
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("bad-commands")
    (folder / "FILE").write_text("neither JSON nor YAML: [\n")
    (folder / "FOLDER").mkdir()
    yield {
        "MODEL": str(write_checkpoint(folder / "model")),
        "MISSING": str(folder / "MISSING"),
        "FILE": str(folder / "FILE"),
        "FOLDER": str(folder / "FOLDER"),
        "OUT": str(folder / "OUT"),
    }
    assert not Path(folder / "OUT").exists()


@pytest.mark.parametrize(("line", "words"), COMMANDS)
def test_a_bad_command_line_ends_with_a_message(
    line: str, words: str, paths: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [paths.get(word, word) for word in line.split()]
    try:
        code = preamble.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    output = capsys.readouterr()
    message = output.err + output.out
    assert code in (1, 2), message
    assert words in message or paths.get(words, words) in message, message
    assert "Traceback" not in message
