"""Soft prompts: the prompt encoder, prefix tuning and their initialization."""
