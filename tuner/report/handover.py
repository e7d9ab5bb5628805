"""best.yaml for other training stacks: a fragment of their config, with what is lost said in it.

Only option names that stand in files of these projects are written; each writer cites them. None
of the fragments was run with its stack: they rest on the documentation and sources, except
`minddata`, which tests run with MindSpore on CPU.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tuner.config.codec import parse_yaml
from tuner.config.schema import TrainConfig
from tuner.report.handover_minddata import minddata_text
from tuner.report.handover_mindformers import mindformers_text
from tuner.report.handover_mindspeed import mindspeed_text
from tuner.report.handover_tuned import Tuned, read_tuned


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A stack that a tuned config can be handed to.

    Attributes:
        file_name: Of the fragment, beside best.yaml.
        write: The fragment's text.
        check: Raises ValueError or SyntaxError for text that the stack's reader could not parse.
    """

    file_name: str
    write: Callable[[Tuned], str]
    check: Callable[[str], object]


def _check_python(text: str) -> object:
    return compile(text, "minddata.py", "exec")


def _check_shell(text: str) -> object:
    return shlex.split(text, comments=True)


STACKS: Mapping[str, Stack] = {
    "mindformers": Stack(file_name="mindformers.yaml", write=mindformers_text, check=parse_yaml),
    "mindspeed": Stack(file_name="mindspeed.sh", write=mindspeed_text, check=_check_shell),
    "minddata": Stack(file_name="minddata.py", write=minddata_text, check=_check_python),
}
"""Stacks by the names of the command line."""


def hand_over(config: TrainConfig, stack: str, *, peak_rate: float) -> str:
    """The settings of a tuned config as a fragment for another stack.

    Args:
        config: As varseq-tune has written it, with its provenance.
        stack: One of STACKS.
        peak_rate: Highest learning rate of the run, scaled to the size of its updates.

    Returns:
        The text of a file; it parses.

    Raises:
        BadInputError: the config says no shapes, or the stack cannot express its strategy at all.
    """
    text = STACKS[stack].write(read_tuned(config, peak_rate))
    STACKS[stack].check(text)
    return text
