"""best.yaml as flags of MindSpeed-LLM, in a shell variable to put into a tuning script.

MindSpeed-LLM trains with PyTorch, op by op: no graphs are compiled and no shapes recorded.
From its sources and documentation, not run:

- seq-length, micro-batch-size, global-batch-size, lr, min-lr, weight-decay, clip-grad, adam-beta1,
  adam-beta2, initial-loss-scale, seed, bf16, attention-softmax-in-fp32:
  Ascend/MindSpeed-LLM examples/mcore/qwen3/tune_qwen3_8b_4K_full_ptd.sh
- lr-warmup-fraction, lr-decay-style, reset-position-ids: examples/mcore/qwen25/
  tune_qwen25_72b_32k_full_pack.sh; the values of lr-decay-style, lr-wsd-decay-style and
  lr-wsd-decay-iters: NVIDIA/Megatron-LM megatron/training/config/training_config.py
- no-pad-to-seq-lengths (before: variable-seq-lengths), pad-to-multiple-of:
  docs/en/pytorch/training/finetune/mcore/single_sample_finetune.md
- neat-pack, reset-attention-mask, pack: docs/en/pytorch/training/finetune/mcore/
  multi_sample_pack_finetune.md
- fp16: the fp16 counterpart of bf16 (Megatron-LM); without either it trains in fp32
"""

from __future__ import annotations

import textwrap

from tuner.report.handover_tuned import (
    Tuned,
    describe_shapes,
    lost_by_one_batch_size,
    never_expressed,
)

DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}


def mindspeed_text(tuned: Tuned) -> str:
    """The fragment: comments, then VARSEQ_ARGS."""
    comments = "\n#\n".join(_comment(line) for line in _comments(tuned))
    flags = " \\\n".join(f"    {flag}" for flag in _flags(tuned))
    return f'{comments}\nVARSEQ_ARGS="\n{flags}\n"\n'


def _flags(tuned: Tuned) -> list[str]:
    batch = tuned.rows_of_longest
    return [
        f"--seq-length {tuned.widths[-1]}",
        f"--micro-batch-size {batch}",
        f"--global-batch-size {batch * tuned.batches_per_update}",
        *_padding_flags(tuned),
        *_precision_flags(tuned),
        *_optimizer_flags(tuned),
    ]


def _padding_flags(tuned: Tuned) -> list[str]:
    if tuned.strategy == "packed":
        return ["--reset-position-ids", "--reset-attention-mask", "--neat-pack"]
    if tuned.strategy == "fixed":
        return []  # Rows are padded to --seq-length by default.
    return ["--no-pad-to-seq-lengths", f"--pad-to-multiple-of {tuned.multiple}"]


def _precision_flags(tuned: Tuned) -> list[str]:
    precision = tuned.config.precision
    if precision.compute_dtype == "fp32":
        return []
    flags = [f"--{precision.compute_dtype}"]
    if precision.compute_dtype == "fp16":
        flags.append(f"--initial-loss-scale {precision.loss_scale:.0f}")
    if "softmax" in precision.fp32_ops:
        flags.append("--attention-softmax-in-fp32")
    return flags


def _optimizer_flags(tuned: Tuned) -> list[str]:
    config = tuned.config
    flags = [
        f"--lr {tuned.peak_rate:g}",
        f"--lr-decay-style {DECAY_STYLES[config.schedule.kind]}",
        f"--lr-warmup-fraction {config.schedule.warmup_fraction:g}",
        f"--weight-decay {config.optimizer.weight_decay:g}",
        f"--adam-beta1 {config.optimizer.beta1:g}",
        f"--adam-beta2 {config.optimizer.beta2:g}",
        f"--seed {config.train.seed}",
    ]
    if config.schedule.kind != "constant":
        floor = tuned.peak_rate * config.schedule.min_learning_rate_fraction
        flags.append(f"--min-lr {floor:g}")
    if config.schedule.kind == "wsd":
        flags.append("--lr-wsd-decay-style linear")
    if config.train.clip_norm is not None:
        flags.append(f"--clip-grad {config.train.clip_norm:g}")
    return flags


def _comments(tuned: Tuned) -> list[str]:
    return [
        "A tuned study as flags of MindSpeed-LLM; written by varseq-tune --emit mindspeed. From "
        "its documentation, not run. Source this file in a tuning script and give $VARSEQ_ARGS to "
        "posttrain_gpt.py in place of the same flags.",
        f"Tuned batches (rows x padded tokens): {describe_shapes(tuned)}.",
        *_how_to(tuned),
        "Not expressed here:",
        *lost_by_one_batch_size(tuned),
        *_precision_left_out(tuned),
        f"Graph: mode {tuned.config.graph.mode} and jit_level {tuned.config.graph.jit_level} have "
        "no counterpart; ops run one by one.",
        *never_expressed(tuned),
    ]


def _how_to(tuned: Tuned) -> list[str]:
    lines = [
        f"--global-batch-size is for one device: about {_update_size(tuned)}. With more devices "
        "it must be a multiple of --micro-batch-size times the data parallel size. Set "
        f"--train-iters so that the data is passed {tuned.config.train.epochs} times.",
        "Data is made by preprocess_data.py from text; a MindRecord file is not read.",
    ]
    if tuned.strategy == "packed":
        lines.append(
            f"Rows are packed by preprocess_data.py: give it --pack --neat-pack --seq-length "
            f"{tuned.widths[-1]}. All packed rows have that one length"
            + (", shorter ones are not expressed." if len(tuned.widths) > 1 else ".")
        )
    elif tuned.strategy != "fixed":
        lines.append(
            "In older releases --no-pad-to-seq-lengths is --variable-seq-lengths. A batch is "
            "padded to the next multiple over its longest row."
        )
    if tuned.config.schedule.kind == "wsd":
        lines.append(
            f"Set --lr-wsd-decay-iters to {tuned.config.schedule.decay_fraction:g} of "
            "--train-iters."
        )
    return lines


def _update_size(tuned: Tuned) -> str:
    tokens = tuned.config.train.tokens_per_update
    if tokens is None:
        return f"{tuned.batches_per_update} batches of the longest rows an update"
    return f"{tokens:,} real tokens an update"


def _precision_left_out(tuned: Tuned) -> list[str]:
    precision = tuned.config.precision
    lines = []
    groups = [group for group in precision.fp32_ops if group != "softmax"]
    if groups:
        lines.append(f"fp32 op groups for which no flag is written: {', '.join(groups)}.")
    if precision.compute_dtype == "fp16":
        lines.append(f"loss_scale_window {precision.loss_scale_window}: the stack's own is used.")
    if tuned.config.train.clip_quantile is not None:
        lines.append("clip_quantile: the clipping threshold is a fixed one.")
    lines.append(f"optimizer.eps {tuned.config.optimizer.eps:g} and no_decay: the stack's own.")
    return lines


def _comment(line: str) -> str:
    return textwrap.fill(line, 96, initial_indent="# ", subsequent_indent="# ")
