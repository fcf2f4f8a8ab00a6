"""Checkpoint tools: convert, inspect and verify checkpoints; check and exchange adapters.

A reader in `gpt/formats/` opens the source as logical (unsharded) tensors. A writer plans a layout:
the target files, and the byte offset of every tensor part in these files. One copy engine then
reads the tensors and writes the files, whatever the format.
"""
