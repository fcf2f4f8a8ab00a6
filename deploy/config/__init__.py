"""Profiles: settings that belong together, as data for `preamble serve --profile`."""
