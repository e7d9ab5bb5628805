"""best.yaml as a plain MindSpore dataset: Python that needs MindSpore and NumPy alone.

`Dataset.bucket_batch_by_length` differs from varseq-train's rule twice: the upper bound of a
bucket is exclusive, and pad_to_bucket_boundary pads to the boundary - 1. So for padded lengths W
the boundaries are W + 1. Its last bucket has no upper bound and takes no row under
pad_to_bucket_boundary, so it only needs a batch size that is never used.

Source: mindspore.dataset.Dataset.bucket_batch_by_length and padded_batch, MindSpore 2.10; run on
CPU by tests/report/test_handover.py.
"""

from __future__ import annotations

import textwrap
from string import Template

from tuner.data.content import IGNORED_LABEL
from tuner.errors import BadInputError
from tuner.report.handover_tuned import Tuned, describe_shapes, never_expressed

LABELS = "labels"
"""The column that labels get where the ids are the labels."""

_HEAD = Template('''\
"""Batches of a tuned study as a MindSpore dataset; written by varseq-tune --emit minddata.

Rows x padded tokens of a batch: $shapes.

Not expressed here:
$lost
"""

import mindspore.dataset as ds
import numpy as np

# Tuned on $path
INPUT = $input
COLUMNS = $columns
# What fills a row up to its padded length.
PAD_INFO = {$pad_info}
LONGEST = $longest  # tokens
''')

_ROWS = Template('''

def open_rows(files, seed, num_shards, shard_id):
    """Rows of varied length in random order, from a list of MindRecord files."""
    ds.config.set_seed(seed)
    rows = ds.MindDataset(
        files,
        columns_list=$read,
        shuffle=ds.Shuffle.GLOBAL,
        num_shards=num_shards,
        shard_id=shard_id,
    )
    rows = rows.filter($keep, input_columns=[INPUT])
$maps    return rows
''')

_KEEP = {
    "drop": ('''

def fits(tokens):
    """Empty rows, which MindSpore reads as scalars, and those that are too long are left out."""
    return tokens.ndim == 1 and len(tokens) <= LONGEST
''', "fits"),
    "truncate": ('''

def is_not_empty(tokens):
    """MindSpore reads a row without tokens as a scalar."""
    return tokens.ndim == 1


def cut(tokens):
    """Longer rows are cut."""
    return tokens[:LONGEST]
''', "is_not_empty"),
    "error": ('''

def fits(tokens):
    """Empty rows, which MindSpore reads as scalars, are left out; too long ones are an error."""
    if tokens.size > LONGEST:
        raise ValueError(f"a row has {tokens.size} tokens, more than {LONGEST}")
    return tokens.ndim == 1
''', "fits"),
}  # fmt: skip

_COPY = '''

def copy_ids(tokens):
    """The ids are the labels."""
    return tokens, tokens
'''

_BUCKETED = Template("""
WIDTHS = $widths  # padded lengths in tokens
BATCH_SIZES = $sizes  # rows of a batch, for each of the widths
# The upper bound of a bucket is exclusive, and rows are padded to the boundary - 1.
BOUNDARIES = [width + 1 for width in WIDTHS]
""")

_OPEN_BUCKETED = '''

def open_batches(files, seed=0, drop_remainder=False, num_shards=None, shard_id=None):
    """Batches [B, L] of COLUMNS, each row in the first of WIDTHS that holds it.

    The last batch of each width has fewer rows: another shape, so another compile of a static
    graph. drop_remainder=True leaves these rows out instead, in every epoch anew.
    """
    rows = open_rows(files, seed, num_shards, shard_id)
    return rows.bucket_batch_by_length(
        [INPUT],
        BOUNDARIES,
        [*BATCH_SIZES, 1],  # no row lands in the last bucket, which has no upper bound
        pad_info=PAD_INFO,
        pad_to_bucket_boundary=True,
        drop_remainder=drop_remainder,
    )
'''

_DYNAMIC = Template('''
BATCH_SIZE = $size  # rows
ALIGN = $rules  # (up to so many tokens, padded to multiples of): the first that holds


def aligned(length):
    """The padded length of a row of so many tokens."""
    multiple = next(multiple for up_to, multiple in ALIGN if up_to is None or length <= up_to)
    return -(-length // multiple) * multiple


def pad_with(fill):
    """Rows padded to their own aligned length; that of a batch is then the largest of them."""

    def pad(tokens):
        return np.pad(tokens, (0, aligned(len(tokens)) - len(tokens)), constant_values=fill)

    return pad
''')

_OPEN_DYNAMIC = '''

def open_batches(files, seed=0, drop_remainder=False, num_shards=None, shard_id=None):
    """Batches [BATCH_SIZE, L] of COLUMNS, padded to their longest row, aligned.

    The last batch of an epoch has fewer rows, or is left out with drop_remainder=True.
    """
    rows = open_rows(files, seed, num_shards, shard_id)
    for column in COLUMNS:
        rows = rows.map(pad_with(PAD_INFO[column][1]), input_columns=[column])
    return rows.padded_batch(BATCH_SIZE, drop_remainder=drop_remainder, pad_info=PAD_INFO)
'''


def minddata_text(tuned: Tuned) -> str:
    """The snippet; `open_batches(files)` in it gives the dataset.

    Raises:
        BadInputError: the strategy is packed.
    """
    if tuned.strategy == "packed":
        raise BadInputError(
            "--emit minddata cannot express packed rows: MindSpore's dataset has no operation "
            "that packs",
            fix="train best.yaml with varseq-train, or emit mindformers or mindspeed",
        )
    return _head(tuned) + _batching(tuned) + _reading(tuned) + _opening(tuned)


def _head(tuned: Tuned) -> str:
    data = tuned.config.data
    labels = data.label_column or LABELS
    text = _HEAD.substitute(
        shapes=_wrapped(describe_shapes(tuned), first=30),
        lost="\n".join(_bullet(line) for line in _lost(tuned)),
        path=ascii(data.path),
        input=repr(data.input_column),
        columns=repr([data.input_column, labels]),
        pad_info=f"{data.input_column!r}: ([None], {data.pad_id}), "
        f"{labels!r}: ([None], {IGNORED_LABEL})",
        longest=tuned.widths[-1],
    )
    # Only the alignment of random batches pads by hand.
    return text if tuned.strategy == "dynamic" else text.replace("import numpy as np\n", "")


def _lost(tuned: Tuned) -> list[str]:
    """Rows over the limit are cut or left out by the snippet itself."""
    config = tuned.config
    lines = [line for line in never_expressed(tuned) if not line.startswith("Rows longer than")]
    groups = (
        f", {', '.join(config.precision.fp32_ops)} in fp32" if config.precision.fp32_ops else ""
    )
    lines.append(
        f"Graph and precision are not a matter of the dataset: graph.mode {config.graph.mode}, "
        f"jit_level {config.graph.jit_level}, compute_dtype {config.precision.compute_dtype}"
        f"{groups}."
    )
    lines.append(
        "Labels stand at their own tokens: position i predicts the label of position i + 1, which "
        "varseq-train shifts on the host."
    )
    return lines


def _batching(tuned: Tuned) -> str:
    if tuned.strategy == "dynamic":
        rules = [(rule.up_to, rule.multiple) for rule in tuned.align_rules]
        return _DYNAMIC.substitute(size=tuned.rows_of_longest, rules=_short(repr(rules)))
    return _BUCKETED.substitute(
        widths=_short(repr(list(tuned.widths))), sizes=_short(repr(list(tuned.batch_sizes)))
    )


def _reading(tuned: Tuned) -> str:
    data = tuned.config.data
    functions, keep = _KEEP[data.overflow]
    columns = [data.input_column, *([data.label_column] if data.label_column else [])]
    maps = ""
    if data.overflow == "truncate":
        maps += (
            f"    for column in {columns!r}:\n"
            "        rows = rows.map(cut, input_columns=[column])\n"
        )
    if data.label_column is None:
        functions += _COPY
        maps += "    rows = rows.map(copy_ids, input_columns=[INPUT], output_columns=COLUMNS)\n"
    return functions + _ROWS.substitute(read=repr(columns), keep=keep, maps=maps)


def _opening(tuned: Tuned) -> str:
    return _OPEN_DYNAMIC if tuned.strategy == "dynamic" else _OPEN_BUCKETED


def _bullet(line: str) -> str:
    return textwrap.fill(line, 96, initial_indent="- ", subsequent_indent="  ")


def _wrapped(text: str, first: int) -> str:
    return textwrap.fill(text, 96, initial_indent=" " * first).lstrip()


def _short(values: str) -> str:
    """A list on lines of at most 96 characters."""
    if len(values) < 60:
        return values
    opening, closing = values[0], values[-1]
    body = textwrap.indent(textwrap.fill(values[1:-1], 90), "    ")
    return f"{opening}\n{body}\n{closing}"
