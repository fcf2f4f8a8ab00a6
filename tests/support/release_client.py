"""gRPC client calls for the wheels of two releases: prints every answer as JSON.

    python tests/support/release_client.py HOST:PORT TOKEN ADAPTER...

The program uses the module paths and names of release 0.1, which later releases must still have. It
runs in the environment of an installed wheel.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any

from clients.aio import AsyncClient
from clients.generation import CallError, Client, Guide, Options

PROMPT = "How far apart are the numbers? 60 and 26 =>"
FIELDS = {"prompt": "Zoë from Delhi buys a white ring and is proud =>"}
FLOAT_DIGITS = 6  # Kernels of two releases may round differently.


def main(address: str, token: str, *adapters: str) -> int:
    with Client(address, timeout_s=60.0, token=token) as client:
        answers = {
            "greedy": asdict(client.generate(PROMPT, Options(max_new_tokens=8, seed=1))),
            "sampled": asdict(client.generate(PROMPT, _sampled(7))),
            "guided": asdict(
                client.generate(PROMPT, Options(guide=Guide(choices=["yes", "no"]), seed=1))
            ),
            "streamed": _streamed(client),
            "scored": asdict(client.score(PROMPT, [" 34", " 35"])),
            "tokens": client.tokenize(PROMPT),
            "text": client.detokenize(client.tokenize(PROMPT)),
            "error": _error(client),
            "adapters": sorted([a.name, a.version, a.current] for a in client.adapters()),
            "concurrent": asyncio.run(_concurrent(address, token)),
        }
        for adapter in adapters:
            options = Options(adapter=adapter, max_new_tokens=6, logprobs=2, seed=1)
            answers[adapter] = asdict(client.generate(FIELDS, options))
        several = Options(adapters=["", *adapters], answers=2, max_new_tokens=4, seed=3)
        answers["several"] = [asdict(answer) for answer in client.completions(PROMPT, several)]
    print(json.dumps(_comparable(answers)))
    return 0


def _sampled(seed: int) -> Options:
    return Options(max_new_tokens=8, temperature=0.9, top_p=0.95, seed=seed, logprobs=1)


def _streamed(client: Client) -> dict[str, Any]:
    pieces = list(client.stream(PROMPT, _sampled(11)))
    return {
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [token_id for piece in pieces for token_id in piece.token_ids],
        "finish_reason": pieces[-1].finish_reason,
    }


def _error(client: Client) -> list[object]:
    try:
        client.generate(PROMPT, Options(temperature=-1))
    except CallError as error:
        return [error.code, error.reason, error.field]
    raise AssertionError("a negative temperature was accepted")


async def _concurrent(address: str, token: str) -> list[dict[str, Any]]:
    async with AsyncClient(address, timeout_s=60.0, token=token) as client:
        calls = [client.generate(PROMPT, _sampled(seed)) for seed in range(3)]
        return [asdict(answer) for answer in await asyncio.gather(*calls)]


def _comparable(answer: Any) -> Any:
    """Round numbers, and omit the field that depends on the state of the prefix cache."""
    if isinstance(answer, float):
        return round(answer, FLOAT_DIGITS)
    if isinstance(answer, dict):
        return {key: _comparable(x) for key, x in answer.items() if key != "cached_tokens"}
    return [*map(_comparable, answer)] if isinstance(answer, list | tuple) else answer


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
