"""Seconds of kernels, summed by op type, core and shapes while the rows of a table go by.

The number of sums is bounded, so a table of any size takes the same memory: past the bound the
shapes of an op are summed as one, and totals of op types stay exact.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from tuner.diagnose.profile_tables import CPU_KINDS, TableRows

AI_CPU = "AI_CPU"
NO_CORE = "N/A"
HOST_CPU = "CPU"

MAX_SHAPES_PER_OP = 2_000
MAX_SUMS = 50_000
MAX_OPS = 5_000
"""Sums of ops at whatever shape, beyond MAX_SUMS."""

MAX_TEXT_CHARS = 400
"""Of a name or of shapes; what is longer is cut. With MAX_SUMS some 100 MB of ASCII."""

OTHER_OPS = "(other op types)"

MAX_US = 1e13
"""No duration of a kernel: over a hundred days."""

_CORES = {
    "AICPU": AI_CPU,
    "AICORE": "AI_CORE",
    "AIVECTORCORE": "AI_VECTOR_CORE",
    "AICUBECORE": "AI_CUBE_CORE",
    "MIXAIC": "MIX_AIC",
    "MIXAIV": "MIX_AIV",
    "": NO_CORE,
    "NA": NO_CORE,
    "N/A": NO_CORE,
}
"""Spellings without spaces, underscores and hyphens -> ours."""

COMPUTE_CORES = frozenset({"AI_CORE", "AI_VECTOR_CORE", "AI_CUBE_CORE", "MIX_AIC", "MIX_AIV"})
"""Where an op is fast; transfers and communication run on none of them."""


_KEY_FIELDS = ("op_type", "core", "state", "input_shapes")


class OpKey(NamedTuple):
    """What is summed apart."""

    op_type: str
    core: str
    """AI_CPU, one of COMPUTE_CORES, N/A, CPU, or as the profiler names it."""
    state: str
    """dynamic, static, or empty where the profiler does not say."""
    input_shapes: str
    """As the profiler writes them, without quotes; empty where it does not say, and for all those
    past the bound."""


@dataclass(slots=True, kw_only=True)
class OpSum:
    """Calls of one key; the only values here that change.

    Attributes:
        output_shapes: Of the first call.
        data_types: Of the inputs of the first call.
        count: Calls.
        total_us: Microseconds of all calls.
    """

    output_shapes: str = ""
    data_types: str = ""
    count: int = 0
    total_us: float = 0.0


class KernelTotals:
    """Sums over the tables that were added."""

    def __init__(self) -> None:
        self._sums: dict[OpKey, OpSum] = {}
        self._num_shapes: Counter[str] = Counter()
        self._bounded: set[str] = set()

    @property
    def sums(self) -> Mapping[OpKey, OpSum]:
        """All sums with at least one call."""
        return {key: found for key, found in self._sums.items() if found.count}

    @property
    def bounded_ops(self) -> tuple[str, ...]:
        """Op types with more shapes than are kept apart."""
        return tuple(sorted(self._bounded))

    def add(self, table: TableRows) -> None:
        """Read a table to its end and add its rows; a row without a usable number is counted."""
        rows = table.rows()
        first = next(rows, None)
        if first is None:
            return
        if "duration_us" in table.columns:
            self._add_kernels(table, chain([first], rows))
        else:
            self._add_ready_sums(table, chain([first], rows))

    def _add_kernels(self, table: TableRows, rows: Iterator[list[str]]) -> None:
        columns = table.columns
        texts_of = itemgetter(*(columns[field] for field in _KEY_FIELDS if field in columns))
        at = columns["duration_us"]
        known: dict[tuple[str, ...], OpSum] = {}
        for row in rows:
            texts = texts_of(row)
            found = known.get(texts)
            if found is None:
                key = _kernel_key(columns, row)
                found = self._sum_of(key, columns, row)
                # Where the op type comes from the name, these texts do not decide it.
                if len(known) < MAX_SUMS and _is_kept(texts) and _has_type(row, columns):
                    known[texts] = found
            try:
                us = float(row[at])
            except ValueError:
                us = parse_number(row[at])
            if 0.0 <= us < MAX_US:
                found.count += 1
                found.total_us += us
            else:
                table.bad_numbers += 1

    def _add_ready_sums(self, table: TableRows, rows: Iterator[list[str]]) -> None:
        """Of tables that hold a count and a total, in microseconds or, on CPU, milliseconds."""
        columns = table.columns
        us = 1e3 if table.kind in CPU_KINDS else 1.0
        for row in rows:
            count = parse_number(row[columns["count"]])
            total_us = us * parse_number(row[columns["total"]])
            if not (0.0 <= count < MAX_US and 0.0 <= total_us < MAX_US):
                table.bad_numbers += 1
                continue
            core = core_named(row[columns["core"]]) if "core" in columns else HOST_CPU
            key = OpKey(_cut(row[columns["op_type"]]) or NO_CORE, core, "", "")
            found = self._sum_of(key, columns, row)
            found.count += round(count)
            found.total_us += total_us

    def _sum_of(self, key: OpKey, columns: Mapping[str, int], row: list[str]) -> OpSum:
        found = self._sums.get(key)
        if found is not None:
            return found
        num_shapes = self._num_shapes[key.op_type]
        if key.input_shapes and (num_shapes >= MAX_SHAPES_PER_OP or len(self._sums) >= MAX_SUMS):
            self._bounded.add(key.op_type)
            return self._sum_of(key._replace(input_shapes=""), columns, [])
        if len(self._sums) >= MAX_SUMS + MAX_OPS:
            return self._sums.setdefault(OpKey(OTHER_OPS, NO_CORE, "", ""), OpSum())
        self._num_shapes[key.op_type] += 1
        self._sums[key] = OpSum(
            output_shapes=_shapes(columns, row, "output_shapes"),
            data_types=_shapes(columns, row, "data_types"),
        )
        return self._sums[key]


def core_named(text: str) -> str:
    """A core in our spelling: `AI CPU`, `aicpu` and `AI_CPU` are one."""
    bare = "".join(text.split()).replace("_", "").replace("-", "").upper()
    return _CORES.get(bare) or _cut("_".join(text.upper().split()))


def parse_number(text: str) -> float:
    """A number that may have thousands separators; not a number where there is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


def _kernel_key(columns: Mapping[str, int], row: list[str]) -> OpKey:
    state = row[columns["state"]].strip().lower() if "state" in columns else ""
    return OpKey(
        op_type=_op_type(columns, row),
        core=core_named(row[columns["core"]]),
        state=state if state in ("dynamic", "static") else "",
        input_shapes=_shapes(columns, row, "input_shapes"),
    )


def _has_type(row: list[str], columns: Mapping[str, int]) -> bool:
    return row[columns["op_type"]].strip().upper() not in ("", "NA", NO_CORE)


def _op_type(columns: Mapping[str, int], row: list[str]) -> str:
    """The type; where msprof gives none (its task times at l0), what the name ends in."""
    if _has_type(row, columns) or "name" not in columns:
        return _cut(row[columns["op_type"]].strip()) or NO_CORE
    last = row[columns["name"]].strip().rsplit("/", 1)[-1]
    return _cut(re.sub(r"-op\d+$", "", last)) or NO_CORE


def _shapes(columns: Mapping[str, int], row: list[str], field: str) -> str:
    if not row or field not in columns:
        return ""
    text = row[columns[field]].replace('"', "").strip()
    return "" if text.upper() in ("NA", NO_CORE) else _cut(text)


def _cut(text: str) -> str:
    return text.strip()[:MAX_TEXT_CHARS]


def _is_kept(texts: tuple[str, ...]) -> bool:
    return sum(map(len, texts)) <= MAX_TEXT_CHARS
