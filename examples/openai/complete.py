"""OpenAI's Python client on a running server: lists models, streams a completion, scores a prompt.

    python examples/openai/complete.py http://HOST:PORT/v1 [MODEL]

The example needs `pip install openai` and uses only the API of docs/openai.md. If the server
requires a token, set the environment variable OPENAI_API_KEY to the token.
"""

import os
import sys

import openai


def main(address: str, *names: str) -> int:
    # The client requires a key; a server without tokens ignores it.
    client = openai.OpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY") or "none")
    try:
        models = [model.id for model in client.models.list()]
        print("models:", ", ".join(models))
        model = names[0] if names else models[0]

        for chunk in client.completions.create(
            model=model, prompt="the quick brown", max_tokens=16, temperature=0, stream=True
        ):
            print(chunk.choices[0].text, end="", flush=True)
        print()

        scored = client.completions.create(
            model=model, prompt="the quick brown", max_tokens=0, echo=True, logprobs=1
        )
        scores = scored.choices[0].logprobs
        assert scores is not None
        for token, logprob in zip(scores.tokens or (), scores.token_logprobs or (), strict=True):
            print(f"{token!r:>12}  {'' if logprob is None else f'{logprob:.3f}'}")
    except openai.APIStatusError as error:
        print(f"{error.status_code} {error.code}: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
