"""best.yaml as a fragment of a MindFormers (MindSpore Transformers) YAML config.

From its sources, not run. Names are those of the LlamaConfig family, in which lengths may vary;
packing belongs to the newer family, which reads a Hugging Face folder and names some otherwise:

- runner_config, train_dataset, context, optimizer, lr_schedule, runner_wrapper and model_config:
  mindspore-lab/mindformers configs/llama2/finetune_llama2_7b.yaml, and for context.jit_config and
  max_grad_norm research/qwen2_5/finetune_qwen2_5_7b_8k.yaml
- dynamic_batch, divisor, remainder, pad_token_id: docs/feature_cards/Dynamic_Shape.md and
  mindformers/dataset/causal_language_model_dataset.py, whose dyn_batch_wrapper pads to the next
  k * divisor + remainder, and only if both are not 0; is_dynamic: the same page
- gradient_accumulation_steps, the newer family (params in *_dtype, fp32_residual_connection),
  HFDataLoader and PackingHandler: configs/qwen3/finetune_qwen3.yaml
- create_compressed_eod_mask, its columns and its length: mindformers/dataset/dataloader/
  hf_dataloader.py; what it makes of the model: mindformers/parallel_core/transformer_config.py
- schedules and their arguments: mindformers/core/lr/lr_schedule.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from tuner.config.codec import format_plain
from tuner.data.content import IGNORED_LABEL
from tuner.report.handover_tuned import (
    Tuned,
    describe_shapes,
    lost_by_one_batch_size,
    never_expressed,
)

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
COMMENT_WIDTH = 94

GROUP_FIELDS = {"norms": "layernorm_compute_type", "softmax": "softmax_compute_type"}
NEWER_GROUP_FIELDS = {"norms": "layernorm_compute_dtype", "softmax": "softmax_compute_dtype"}
ROPE_FIELD = "rotary_dtype"
"""The same in both families."""

PACKED_COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids", "actual_seq_len")
SAMPLES_A_ROW = 128
"""Default of compressed_eod_mask_length."""

Part = tuple[list[str], Mapping[str, Any]]
"""Sentences that stand as a comment above a mapping."""


def mindformers_text(tuned: Tuned) -> str:
    """The fragment: each section with what it leaves out in a comment above it."""
    parts = [
        _runner(tuned),
        _context(tuned),
        _dataset(tuned),
        _model(tuned),
        _optimizer(tuned),
        _schedule(tuned),
        _wrapper(tuned),
    ]
    head = _comment(_header(tuned)) + "\n"
    return head + "\n" + "\n".join(_format(comments, content) for comments, content in parts)


def _format(comments: list[str], content: Mapping[str, Any]) -> str:
    return format_plain(content, header="\n".join(map(_wrap, comments)))


def _header(tuned: Tuned) -> list[str]:
    return [
        "A tuned study as a fragment of a MindFormers config; written by varseq-tune --emit "
        "mindformers. From its sources, not run. Put these values into the config of your model.",
        f"Tuned batches (rows x padded tokens): {describe_shapes(tuned)}.",
        "Not expressed here:",
        *lost_by_one_batch_size(tuned),
        *never_expressed(tuned),
    ]


def _runner(tuned: Tuned) -> Part:
    tokens = tuned.config.train.tokens_per_update
    comments = []
    if tokens is not None:
        comments.append(
            f"Accumulation is by batches, not by real tokens: on average about {tokens:,} of them "
            "an update, on one device."
        )
    return comments, {
        "runner_config": {
            "epochs": tuned.config.train.epochs,
            "batch_size": tuned.rows_of_longest,
            "gradient_accumulation_steps": tuned.batches_per_update,
        }
    }


def _context(tuned: Tuned) -> Part:
    graph = tuned.config.graph
    level, comments = graph.jit_level, []
    if _varies(tuned) and level == "O2":
        level = "O1"
        comments.append("Tuned with jit_level O2, which takes no varied lengths; so O1 here.")
    if _varies(tuned) and graph.mode == "static":
        comments.append(
            "Tuned with one static graph a shape; here lengths vary in one dynamic graph."
        )
    return comments, {"context": {"mode": 0, "jit_config": {"jit_level": level}}}


def _dataset(tuned: Tuned) -> Part:
    if tuned.strategy == "packed":
        return _packed_dataset(tuned)
    data = tuned.config.data
    columns = [column for column in (data.input_column, data.label_column) if column is not None]
    content: dict[str, Any] = {
        "data_loader": {"type": "MindDataset", "dataset_dir": data.path, "shuffle": True},
        "input_columns": columns,
        "drop_remainder": True,
        "batch_size": tuned.rows_of_longest,
    }
    comments = ["Columns must be named input_ids and labels; the model shifts labels by one."]
    if _varies(tuned):
        comments.append(
            "A batch is padded to the next divisor * k + remainder over its longest row; with "
            "remainder 1 the model computes on divisor * k positions, as it drops the last."
        )
        content |= {
            "dynamic_batch": True,
            "divisor": tuned.multiple,
            "remainder": 1,
            "pad_token_id": [data.pad_id, IGNORED_LABEL][: len(columns)],
        }
    else:
        comments.append(
            f"Rows are not padded on reading: pad them to {tuned.widths[-1] + 1} tokens "
            "beforehand (the model drops the last position)."
        )
    return comments, {"train_dataset": content}


def _packed_dataset(tuned: Tuned) -> Part:
    comments = [
        "Packing is done while text is read with HFDataLoader, by the stack's own rule; a "
        "MindRecord file is not read. Add your data handler before PackingHandler.",
        "Samples of a row are kept apart by their ends, actual_seq_len, of which there may be "
        "compressed_eod_mask_length a row; without create_compressed_eod_mask they would see each "
        "other. parallel.dataset_strategy needs an entry for each of the columns.",
    ]
    if len(tuned.widths) > 1:
        comments.append("All packed rows have one length, the longest; shorter ones are left out.")
    handler = {"type": "PackingHandler", "seq_length": tuned.widths[-1], "pack_strategy": "pack"}
    loader = {
        "type": "HFDataLoader",
        "create_compressed_eod_mask": True,
        "compressed_eod_mask_length": SAMPLES_A_ROW,
        "handler": [handler],
    }
    return comments, {
        "train_dataset": {
            "input_columns": list(PACKED_COLUMNS),
            "construct_args_key": list(PACKED_COLUMNS),
            "data_loader": loader,
            "drop_remainder": True,
        }
    }


def _model(tuned: Tuned) -> Part:
    precision = tuned.config.precision
    is_newer = tuned.strategy == "packed"
    fields = {**(NEWER_GROUP_FIELDS if is_newer else GROUP_FIELDS), "rope": ROPE_FIELD}
    compute = DTYPES[precision.compute_dtype]
    content: dict[str, Any] = {} if is_newer else {"seq_length": tuned.widths[-1]}
    content["compute_dtype"] = compute
    for group, field in fields.items():
        content[field] = "float32" if group in precision.fp32_ops else compute
    content["params_dtype" if is_newer else "param_init_type"] = "float32"
    if is_newer:
        content["use_eod_attn_mask_compression"] = True
    if is_newer and precision.compute_dtype != "fp32":
        content["fp32_residual_connection"] = "residual" in precision.fp32_ops
    if _varies(tuned):
        content["is_dynamic"] = True
    return _left_in_compute_dtype(tuned, is_newer), {"model": {"model_config": content}}


def _left_in_compute_dtype(tuned: Tuned, is_newer: bool) -> list[str]:
    expressed = {"norms", "softmax", "rope"} | ({"residual"} if is_newer else set())
    groups = [group for group in tuned.config.precision.fp32_ops if group not in expressed]
    if not groups:
        return []
    return [
        f"Op groups of fp32_ops without a field here: {', '.join(groups)}. Under flash attention "
        "the softmax follows the kernel, whatever its field says."
    ]


def _optimizer(tuned: Tuned) -> Part:
    optimizer = tuned.config.optimizer
    comments = [
        "no_decay: the stack's own rule decides which weights are not decayed "
        f"(tuned: {', '.join(optimizer.no_decay) or 'all are'})."
    ]
    return comments, {
        "optimizer": {
            "type": "AdamW",
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        }
    }


def _schedule(tuned: Tuned) -> Part:
    schedule, comments = tuned.config.schedule, []
    content: dict[str, Any] = {
        "type": "ConstantWarmUpLR",
        "learning_rate": tuned.peak_rate,
        "warmup_ratio": schedule.warmup_fraction,
        "total_steps": -1,
    }
    floor = tuned.peak_rate * schedule.min_learning_rate_fraction
    if schedule.kind == "cosine":
        content |= {"type": "CosineWithWarmUpLR", "lr_end": floor}
    elif schedule.kind == "linear" and floor < tuned.peak_rate:
        content |= {"type": "PolynomialWithWarmUpLR", "power": 1.0, "lr_end": floor}
        comments.append("The rate is at its floor already for the last warmup_ratio of the run.")
    elif schedule.kind == "wsd":
        comments.append(
            f"wsd has no counterpart: the rate stays at its peak and does not fall in the last "
            f"{schedule.decay_fraction:g} of the run."
        )
    if schedule.progress == "tokens":
        comments.append("Progress is counted in steps here, not in real tokens.")
    return comments, {"lr_schedule": content}


def _wrapper(tuned: Tuned) -> Part:
    train, precision = tuned.config.train, tuned.config.precision
    comments = []
    if train.clip_quantile is not None:
        comments.append("clip_quantile: the clipping threshold is a fixed one here.")
    content: dict[str, Any] = {"type": "MFTrainOneStepCell", "scale_sense": 1.0}
    if precision.compute_dtype == "fp16":
        content["scale_sense"] = {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": int(precision.loss_scale),
            "scale_factor": 2,
            "scale_window": precision.loss_scale_window,
        }
    content["use_clip_grad"] = train.clip_norm is not None
    if train.clip_norm is not None:
        content["max_grad_norm"] = train.clip_norm
    return comments, {"runner_wrapper": content}


def _varies(tuned: Tuned) -> bool:
    """Whether batches have more than one padded length there."""
    return tuned.strategy in ("dynamic", "bucketed")


def _comment(lines: list[str]) -> str:
    return "\n#\n".join(
        textwrap.fill(line, 96, initial_indent="# ", subsequent_indent="# ") for line in lines
    )


def _wrap(line: str) -> str:
    return textwrap.fill(line, COMMENT_WIDTH)
