"""A program that asks a running server: whole, streamed, several tasks at once, and scores.

    python -m examples.grpc.ask HOST:PORT

It needs the clients and the protos only: no model and no torch.
"""

import asyncio
import sys

from clients.async_client import AsyncClient
from clients.client import CallError, Client, Options

PROMPT = "One and two is"


def main(address: str) -> int:
    try:
        with Client(address, timeout_s=30.0) as client:
            whole(client)
            streamed(client)
            several_tasks(client)
            scores(client)
        asyncio.run(side_by_side(address))
    except CallError as error:
        print(f"{error.code} ({error.reason}): {error}", file=sys.stderr)
        return 1
    return 0


def whole(client: Client) -> None:
    answer = client.generate(PROMPT, Options(max_new_tokens=8, temperature=0.8, seed=1))
    print(f"{answer.text!r}, ended by {answer.finish_reason}, seed {answer.seed}")


def streamed(client: Client) -> None:
    for piece in client.stream(PROMPT, Options(max_new_tokens=8)):
        print(repr(piece.text), end=" ", flush=True)
    print()


def several_tasks(client: Client) -> None:
    """Every adapter that takes a plain text, and the model without one, on the same prompt."""
    names = [one.name for one in client.adapters() if one.current and not one.input_fields]
    for one in client.completions(PROMPT, Options(adapters=["", *names], max_new_tokens=4)):
        print(f"{one.adapter or 'no adapter'}: {one.text!r}")


def scores(client: Client) -> None:
    texts = [" three", " four"]
    for text, score in zip(texts, client.score(PROMPT, texts).texts, strict=True):
        print(f"{text!r}: {score.logprob:.3f}{', the likeliest' if score.greedy else ''}")


async def side_by_side(address: str) -> None:
    async with AsyncClient(address, timeout_s=30.0) as client:
        options = [Options(max_new_tokens=4, temperature=1.0, seed=seed) for seed in range(3)]
        for answer in await asyncio.gather(*(client.generate(PROMPT, one) for one in options)):
            print(f"seed {answer.seed}: {answer.text!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
