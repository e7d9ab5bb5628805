"""What other training stacks are told of a tuned config, and what all of them leave out.

Most stacks have one padded length or one multiple, and one batch size. So from the planned shapes
follow the figures that fit there: the longest padded length, the batch size that fits with it, and
the rows of an update.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.batching.plan import length_limit
from tuner.config.schema import AlignRule, TrainConfig
from tuner.errors import BadInputError


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A tuned config as others need it.

    Attributes:
        config: The whole of best.yaml, with its provenance.
        peak_rate: Highest learning rate, scaled to the size of an update.
        widths: Padded lengths in tokens, rising.
        batch_sizes: Rows a batch of one rank for each of them; of several the largest.
        mean_row_tokens: Real tokens of a row, about; None where best.yaml does not tell.
    """

    config: TrainConfig
    peak_rate: float
    widths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    mean_row_tokens: float | None

    @property
    def strategy(self) -> str:
        """Batching strategy."""
        return self.config.batching.strategy

    @property
    def rows_of_longest(self) -> int:
        """Rows of a batch of the longest padded length: those that fit whatever the length."""
        return self.batch_sizes[-1]

    @property
    def batches_per_update(self) -> int:
        """Batches of `rows_of_longest` rows that make an update, >= 1."""
        tokens = self.config.train.tokens_per_update
        if tokens is None or self.mean_row_tokens is None:
            return self.config.train.steps_per_update
        return max(1, round(tokens / (self.mean_row_tokens * self.rows_of_longest)))

    @property
    def multiple(self) -> int:
        """The alignment as one multiple in tokens: the coarsest of a table."""
        align = self.config.batching.align
        return align if isinstance(align, int) else max(rule.multiple for rule in align)

    @property
    def align_rules(self) -> tuple[AlignRule, ...]:
        """The alignment as a table."""
        align = self.config.batching.align
        return (AlignRule(multiple=align),) if isinstance(align, int) else align


def read_tuned(config: TrainConfig, peak_rate: float) -> Tuned:
    """What a config stands for.

    Args:
        config: As varseq-tune has written it.
        peak_rate: Highest learning rate of its run.

    Raises:
        BadInputError: it says no shapes, as one written by hand.
    """
    if config.provenance is None or not config.provenance.shapes:
        raise BadInputError(
            "best.yaml has no provenance.shapes, so the tuned batches are not known",
            fix="give the folder of a study that varseq-tune has written (--out)",
        )
    largest = {length: size for size, length in sorted(config.provenance.shapes)}
    widths = tuple(sorted(largest))
    sizes = tuple(largest[width] for width in widths)
    if config.batching.strategy == "dynamic":
        # There is one batch size; of those that differ by one the larger.
        sizes = (max(sizes),) * len(sizes)
    return Tuned(
        config=config,
        peak_rate=peak_rate,
        widths=widths,
        batch_sizes=sizes,
        mean_row_tokens=_mean_row_tokens(config, widths[-1]),
    )


def _mean_row_tokens(config: TrainConfig, longest: int) -> float | None:
    """Of a packed row by the share of real tokens, of a sample by the percentiles of lengths."""
    tuned = config.provenance
    assert tuned is not None
    if config.batching.strategy == "packed":
        return tuned.prediction.effective_token_fraction * longest
    if not tuned.length_percentiles:
        return None
    limit = length_limit(config) or tuned.length_percentiles[-1]
    cut = [min(tokens, limit) for tokens in tuned.length_percentiles]
    # A hundred steps of one percent, each at the mean of its ends.
    return (sum(cut) - (cut[0] + cut[-1]) / 2) / (len(cut) - 1)


def describe_shapes(tuned: Tuned) -> str:
    """`64 x 128, 32 x 256`: rows and padded tokens of the tuned batches, rising by length."""
    pairs = zip(tuned.batch_sizes, tuned.widths, strict=True)
    return ", ".join(f"{size} x {width}" for size, width in pairs)


def never_expressed(tuned: Tuned) -> list[str]:
    """What no other stack has, whatever the strategy; a sentence each."""
    config = tuned.config
    lines = [
        "The order of rows: varseq-train's plan of an epoch follows from batching.seed "
        f"{config.batching.seed} alone and spreads every length over the epoch.",
        "Warm-up and shape record: varseq-train compiles every shape before step 1 and keeps the "
        "shapes in its checkpoints; here nothing is prepared before a shape first comes.",
        "Loss over accumulated batches: varseq-train divides by the labels of the whole update, "
        "so batches of few tokens do not weigh more; check how your stack averages.",
    ]
    if tuned.strategy != "packed":
        lines.append(
            "Fillers: varseq-train completes a last batch with empty rows, so it has the shape of "
            "the others; here it is smaller, or dropped."
        )
    if config.data.overflow == "truncate":
        lines.append(f"Rows longer than {tuned.widths[-1]} tokens must be cut before.")
    elif config.data.overflow == "drop":
        lines.append(f"Rows longer than {tuned.widths[-1]} tokens must be left out before.")
    if config.evaluation is not None and config.evaluation.fraction is not None:
        lines.append(
            f"Held-out rows: evaluation.fraction {config.evaluation.fraction:g} of the rows are "
            "not trained on by varseq-train; keep them out of the data yourself."
        )
    return lines


def lost_by_one_batch_size(tuned: Tuned) -> list[str]:
    """What a stack with one batch size and one multiple leaves out; a sentence each."""
    if tuned.strategy in ("fixed", "packed"):
        return []
    lines = []
    if tuned.strategy == "bucketed":
        lines.append(
            "Buckets: rows are not batched by length, so batches are padded to the longest of "
            f"random rows. The tuned batches were (rows x tokens): {describe_shapes(tuned)}."
        )
        lines.append(
            "Token budgets that vary by bucket: there is one batch size, here that of the longest "
            f"bucket, {tuned.rows_of_longest} rows; shorter buckets had up to "
            f"{max(tuned.batch_sizes)}."
        )
    if not isinstance(tuned.config.batching.align, int):
        rules = ", ".join(
            f"{rule.multiple} up to {rule.up_to}" if rule.up_to else f"{rule.multiple} above"
            for rule in tuned.align_rules
        )
        lines.append(
            f"Alignment by length ({rules} tokens): there is one multiple, here the coarsest."
        )
    return lines
