"""Model configs of published sizes, for the tests of costs."""

from gpt.config import GPTConfig


def gpt3_config(
    layers: int, hidden: int, heads: int, vocab: int = 51200, sequence: int = 2048
) -> GPTConfig:
    return GPTConfig(layers, hidden, heads, vocab, sequence)


LLAMA_7B = GPTConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=32000,
    max_position_embeddings=4096,
    ffn_hidden_size=11008,
    gated=True,
)
