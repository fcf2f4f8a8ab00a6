"""Files: atomic writes, files of killed processes, regular files, and logs of JSON lines."""
