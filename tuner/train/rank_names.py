"""How a checkpoint names what ranks other than the first have of their own."""

from __future__ import annotations

MARK = "@"


def name_of_rank(name: str, rank: int) -> str:
    """The name of a parameter as one rank has it."""
    return f"{name}{MARK}{rank}"


def is_of_other_rank(name: str) -> bool:
    """Whether `name_of_rank` made it."""
    return MARK in name
