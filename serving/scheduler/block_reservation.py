"""Block reservation: the number of KV blocks that admission reserves for a sequence.

The scheduler admits a waiting sequence if the block pool has enough blocks for it beside the blocks
reserved for the running sequences. The planner's simulator admits requests by the same numbers.
"""

from dataclasses import dataclass

from gpt.kv_groups import SequenceBlocks


@dataclass(frozen=True)
class BlockReservation:
    """Counts the blocks that a sequence needs to go on.

    `prefill_tokens_max`, `decode_tokens_max`: the largest numbers of tokens of one sequence that
    its steps in flight compute, if they have prefill chunks or only decodes.
    """

    sequence_blocks: SequenceBlocks
    prefill_tokens_max: int
    decode_tokens_max: int = 1

    def blocks_needed(self, tokens: int, prefill_tokens: int, kv_tokens_max: int) -> int:
        """Return the number of blocks for `tokens` tokens and one more block of tokens.

        `prefill_tokens`: the number of tokens whose prefill is not completed. In groups with a
        window, the sequence needs the blocks of its largest prefill chunk, or of a decode.
        `kv_tokens_max`: the number of tokens with keys and values at the end of the sequence.
        """
        return self.sequence_blocks.held_max(
            min(tokens + self.sequence_blocks.block_tokens, kv_tokens_max),
            max(self.decode_tokens_max, min(prefill_tokens, self.prefill_tokens_max)),
        )
