"""The gRPC clients: unary and streamed completions, several adapters, scores, concurrent calls.

    python -m examples.grpc.ask HOST:PORT

The example needs only the packages `clients` and `protos`, without a model and without torch.
"""

import asyncio
import sys

from clients import AsyncClient, CallError, Client, Options

PROMPT = "One and two is"


def main(address: str) -> int:
    try:
        with Client(address, timeout_s=30.0) as client:
            complete(client)
            stream(client)
            compare_adapters(client)
            score(client)
        asyncio.run(complete_concurrently(address))
    except CallError as error:
        print(f"{error.code} ({error.reason}): {error}", file=sys.stderr)
        return 1
    return 0


def complete(client: Client) -> None:
    completion = client.generate(PROMPT, Options(max_new_tokens=8, temperature=0.8, seed=1))
    print(f"{completion.text!r}, ended by {completion.finish_reason}, seed {completion.seed}")


def stream(client: Client) -> None:
    for piece in client.stream(PROMPT, Options(max_new_tokens=8)):
        print(repr(piece.text), end=" ", flush=True)
    print()


def compare_adapters(client: Client) -> None:
    """Run the base model and every adapter that needs no input fields on the same prompt."""
    adapters = client.adapters()
    names = [adapter.name for adapter in adapters if adapter.current and not adapter.input_fields]
    options = Options(adapters=["", *names], max_new_tokens=4)
    for completion in client.completions(PROMPT, options):
        print(f"{completion.adapter or 'no adapter'}: {completion.text!r}")


def score(client: Client) -> None:
    continuations = [" three", " four"]
    scores = client.score(PROMPT, continuations).texts
    for text, text_score in zip(continuations, scores, strict=True):
        greedy = ", greedy" if text_score.greedy else ""
        print(f"{text!r}: log-probability {text_score.logprob:.3f}{greedy}")


async def complete_concurrently(address: str) -> None:
    async with AsyncClient(address, timeout_s=30.0) as client:
        calls = [
            client.generate(PROMPT, Options(max_new_tokens=4, temperature=1.0, seed=seed))
            for seed in range(3)
        ]
        for completion in await asyncio.gather(*calls):
            print(f"seed {completion.seed}: {completion.text!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
