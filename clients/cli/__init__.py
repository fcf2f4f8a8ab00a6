"""Commands of the clients: `preamble adapters`, `preamble bench` and their server flags."""
