"""Checkpoints in and out: `convert`, `inspect` and `verify`.

A reader of `gpt/` gives whole logical tensors; a layout says which part of which goes to which byte
of which file; copying is one loop from the one to the other. So a format's writer only plans.
"""
