"""Loss mask: the positions of a tuning example whose tokens have a loss.

A token has a loss if the model is trained to predict it. By default these are the tokens of the
answer. With `answer_only_loss: false`, they are all tokens of the text; virtual tokens never have a
loss. The mask is a list of positions, because most positions of an example have no loss.
"""

from array import array
from collections.abc import Sequence


def loss_positions(
    ids: Sequence[int], first_position: int, *, prefix_tokens: int, vocab_size: int
) -> Sequence[int]:
    """Return the positions of the ids that have a loss, from `first_position` on.

    The first id has no loss, because no token predicts it. After `prefix_tokens` virtual tokens of
    a prefix adapter, the first text token has no loss, for the same reason. Ids of `vocab_size` and
    above are virtual tokens.
    """
    first_position = max(first_position, prefix_tokens + 1)
    positions = [
        position for position in range(first_position, len(ids)) if ids[position] < vocab_size
    ]
    if positions and len(positions) == positions[-1] - positions[0] + 1:
        # Consecutive positions are stored as a range, which takes no memory per position.
        return range(positions[0], positions[-1] + 1)
    return array("i", positions)
