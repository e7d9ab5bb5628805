"""The commands: parse, load, call, exit code."""
