"""The in-process engine: batch generation without a server and without asyncio.

    python -m examples.in_process [CHECKPOINT]

The example loads a checkpoint (default: the demo model), completes a list of prompts in one batch,
samples several completions of one prompt, and scores the prompt.
"""

import sys

import serving
from examples.demo.tasks import plain_records
from examples.demo.words import INSTRUCTIONS
from serving.config import ServerConfig
from serving.request import Ask

MODEL = "examples/demo/checkpoint"


def main(argv: list[str]) -> int:
    config = ServerConfig(argv[0] if argv else MODEL)
    prompts = [
        f"{INSTRUCTIONS[task][0]} {plain_records(task, 1, 0, 'held-out')[0].prompt}"
        for task in ("past", "larger")
    ]
    with serving.open_engine(config) as engine:
        for prompt, answer in zip(prompts, engine.generate(map(Ask, prompts)), strict=True):
            print(f"{prompt} ->{answer.text}")

        ask = Ask(prompts[0], answers=3, temperature=1.0, seed=7, max_new_tokens=8, logprobs=0)
        for answer in engine.generate([ask]):
            logprob = sum(score.logprob for score in answer.scores)
            print(f"seed {answer.seed}: log-probability {logprob:.1f},{answer.text}")

        (scored,) = engine.generate([Ask(prompts[0], max_new_tokens=0, prompt_logprobs=0)])
        logprobs = [score.logprob for score in scored.prompt_scores if score is not None]
        print(f"the prompt: log-probability {sum(logprobs):.1f} over {len(logprobs)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
