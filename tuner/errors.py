"""The one exception for input that the user can mend.

Every command turns it into one line on standard error and exit code 2. A traceback means a bug of
ours. No imports here: every module may use this one, and `--help` stays fast.
"""

from __future__ import annotations

EXIT_BAD_INPUT = 2

OUT_OF_MEMORY_TEXT = (
    r"MemoryError|bad_alloc|out of memory|[Mm]alloc.*fail|[Aa]lloc\w* .*memory.*fail"
    r"|[Mm]emory not enough|Unable to allocate"
)
"""What allocators say when they fail: NumPy and Python, C++, MindSpore on CPU and on Ascend."""


class BadInputError(Exception):
    """Something the user gave is wrong: names what, where, and the way out, in one line.

    Args:
        problem: What is wrong and where: the field or file, the rule, the value.
        fix: What to do about it.

    Example:
        >>> str(BadInputError("no such file: data.mindrecord", fix="check the path"))
        'no such file: data.mindrecord; check the path'
    """

    def __init__(self, problem: str, *, fix: str) -> None:
        # One line, whatever a file name or a library's words hold.
        super().__init__(" ".join(f"{problem}; {fix}".splitlines()))
        self.problem = problem
        self.fix = fix
