"""Peer comparison: our generation and prompt tuning compared with other engines and trainers."""
