"""Presets of server settings for `preamble serve --profile`."""
