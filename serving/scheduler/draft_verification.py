"""Draft verification: acceptance of the draft tokens of speculative decoding.

For a sequence with a draft, a step samples one token after the sequence's last token and one after
each draft token. A draft token is accepted if it equals the token sampled in its position; the
first draft token that differs and all after it are rejected. The sampled tokens up to and including
the position of the first rejected draft token depend only on accepted tokens, so the output is the
same as without drafts. The rule is exact: it compares tokens, not probabilities.
"""

from collections.abc import Collection


def verify_draft(
    draft_tokens: list[int],
    sampled_tokens: list[int],
    stop_token_ids: Collection[int],
    tokens_left: int,
) -> list[int]:
    """The valid sampled tokens: the accepted draft tokens and the token sampled after them.

    `sampled_tokens` has one token more than `draft_tokens`. Its first token is always valid; each
    further token is valid if the draft tokens before it are accepted. The returned list ends at the
    first stop token, and has at most `tokens_left` tokens, the number that the sequence may still
    generate.
    """
    count = 1
    for draft_token, sampled_token in zip(draft_tokens, sampled_tokens, strict=False):
        if sampled_token != draft_token or sampled_token in stop_token_ids or count == tokens_left:
            break
        count += 1
    return sampled_tokens[:count]
