"""Client libraries of the OpenAI API other than openai's Python package, unmodified.

A test is skipped if its library is not installed: langchain-openai and litellm in this environment,
and openai's Node package in a folder that `NODE_PATH` names.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints_tools.conversion.convert import write_native
from tests.support.chat_templates import CHATML
from tests.support.models import lively
from tests.support.servers import CONFIG, WAIT_S, Server, serving
from tests.support.trained_tokenizers import sentencepiece_model

pytestmark = [
    pytest.mark.slow,  # A server of its own: too long for the fast suite.
    pytest.mark.filterwarnings("default"),  # The libraries raise warnings about themselves.
]

MODEL = "chat-model"
QUESTION = "twelve and thirty?"
NODE_PROGRAM = """
const OpenAI = require("openai");
(async () => {
  const client = new OpenAI({baseURL: process.argv[1], apiKey: "none", maxRetries: 0});
  const messages = [{role: "user", content: process.argv[2]}];
  const fields = {model: "", messages, temperature: 0, max_tokens: 12, service_tier: "auto",
    modalities: ["text"], verbosity: "low", seed: -1, audio: null};
  const completion = await client.chat.completions.create(fields);
  let text = "";
  for await (const chunk of await client.chat.completions.create({...fields, stream: true})) {
    text += chunk.choices[0].delta.content ?? "";
  }
  const failure = await client.chat.completions.create({...fields, n: 0}).catch((error) => error);
  console.log(JSON.stringify([completion.choices[0].message.content, text, completion._request_id,
    failure.status, failure.requestID]));
})();
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("libraries")
    words = folder / "words"
    words.mkdir()
    model = sentencepiece_model(model_type="bpe", byte_fallback=True)
    (words / "tokenizer.model").write_bytes(model)
    (words / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    write_native(lively(CONFIG), folder / MODEL, tokenizer=words)
    with serving(folder / MODEL, folder / "s.yaml") as server:
        yield server


def base_url(server: Server) -> str:
    return f"http://{server.http_address}/v1"


def test_langchain_sends_fields_that_ask_for_nothing(server: Server) -> None:
    langchain_openai: Any = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        base_url=base_url(server),
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=12,
        seed=-1,
        logprobs=True,
        top_logprobs=0,
        service_tier="auto",
        verbosity="low",
        reasoning_effort="none",
        use_responses_api=False,
        max_retries=0,
        timeout=WAIT_S,
    )
    answer = chat.invoke(QUESTION)
    streamed = "".join(chunk.content for chunk in chat.stream(QUESTION))
    assert answer.content == streamed
    assert answer.response_metadata["logprobs"]["content"]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_drops_only_what_its_provider_lacks(server: Server, provider: str) -> None:
    litellm: Any = pytest.importorskip("litellm")
    fields: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "api_base": base_url(server),
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 12,
        "user": "a",
        "service_tier": "auto",
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "reasoning_effort": "none",
        "drop_params": True,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "cache_salt": "a"},
    }
    answer = litellm.completion(**fields).choices[0].message.content
    chunks = litellm.completion(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer


def test_openai_for_node(server: Server, tmp_path: Path) -> None:
    def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = ["node", "-e", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    try:
        is_installed = run('require.resolve("openai")').returncode == 0
    except FileNotFoundError:
        is_installed = False
    if not is_installed:
        pytest.skip("node, or its package openai in NODE_PATH, is not installed")
    completed = run(NODE_PROGRAM, base_url(server), QUESTION)
    assert completed.returncode == 0, completed.stderr
    answer, streamed, request_id, status, failed_id = json.loads(completed.stdout)
    assert answer == streamed and answer
    assert request_id and failed_id and request_id != failed_id
    assert status == 400
