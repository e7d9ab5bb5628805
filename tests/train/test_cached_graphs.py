"""Resuming with a compile cache: the same bits, sooner; and no run on a graph that is wrong."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from checkpoint_case import parameter_bytes

from tuner.data.mindrecord import MindRecordWriter
from tuner.train.checksum import file_sha256
from tuner.train.compile_cache import (
    IN_USE_FILE,
    MANIFEST_FILE,
    format_manifest,
    parse_manifest,
)

pytestmark = pytest.mark.mindspore

VOCAB = 20
FIRST_STEPS, ALL_STEPS = 3, 6
STARTED_OVER = "compile cache removed, starting over with fresh compiles"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of two planned shapes and a config that keeps its graphs."""
    folder = tmp_path_factory.mktemp("cached")
    rng = np.random.default_rng(0)
    description = {"length_of": "input_ids"}
    with MindRecordWriter(folder / "data.mindrecord", description=description) as writer:
        for _ in range(60):
            ids = (rng.integers(VOCAB) + np.arange(rng.integers(3, 17))) % VOCAB
            row = np.array(ids, np.int32)
            writer.write([{"input_ids": row, "labels": row, "length": len(row)}])
    config = {
        "data": {"path": str(folder / "data.mindrecord")},
        "batching": {"num_buckets": 2, "tokens_per_batch": 64},
        "graph": {"compile_cache": True},
        "model": {
            "vocab_size": VOCAB, "width": 16, "num_layers": 1, "num_heads": 2,
            "num_kv_heads": 1, "ffn_width": 16,
        },
        # The same rate however many steps are asked for.
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "train": {"epochs": 9, "max_steps": FIRST_STEPS, "async_checkpoint": False,
                  "tensorboard": False},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def train(folder, out, *assignments, resume=False):
    """Run varseq-train in a process; what it said on standard error."""
    command = [sys.executable, "-m", "tuner.cli.train", "--config", str(folder / "config.yaml")]
    if resume:
        command += ["--resume", "--set", f"train.max_steps={ALL_STEPS}"]
    for assignment in (f"train.out={folder / out}", *assignments):
        command += ["--set", assignment]
    environment = {key: value for key, value in os.environ.items() if key != "RANK_ID"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "unplanned compile" not in done.stdout + done.stderr
    return done.stderr


def cache_folder(folder, out):
    (cache,) = (folder / out / "compile_cache").iterdir()
    return cache


def graph_files(cache):
    return sorted(cache.rglob("*.mindir"), key=lambda file: int(re.findall(r"\d+", file.stem)[-1]))


def weights(folder, out):
    return parameter_bytes(folder / out, ALL_STEPS)


def num_cached(errors):
    """Warm-up lines that say a graph came from the cache; (cached, all)."""
    lines = [line for line in errors.splitlines() if line.startswith("[warm-up ")]
    return sum("(cached), verified in" in line for line in lines), len(lines)


@pytest.fixture(scope="module")
def plain(folder):
    """The weights of the same run without a cache."""
    train(folder, "plain", "graph.compile_cache=false", f"train.max_steps={ALL_STEPS}")
    return weights(folder, "plain")


@pytest.fixture(scope="module")
def started(folder):
    """A run of the first steps, its graphs kept."""
    errors = train(folder, "started")
    assert num_cached(errors) == (0, 2)
    return folder / "started"


def copy_of(started, name):
    """The started run under another name; its cache is of this folder only by its files."""
    target = started.parent / name
    shutil.copytree(started, target)
    return target


def forge(cache):
    """Give a manifest the hashes of the files that are there now."""
    file = cache / MANIFEST_FILE
    manifest = parse_manifest(file.read_text())
    hashes = {name: file_sha256(cache / name) for name in manifest.files}
    file.write_text(format_manifest(dataclasses.replace(manifest, files=hashes)))


def put(source: Path, target: Path):
    """Overwrite a graph, which MindSpore has made read-only."""
    content = source.read_bytes()
    target.chmod(0o600)
    target.write_bytes(content)


def swap(first, second):
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def test_a_resumed_run_takes_its_graphs_from_the_cache_to_the_same_bits(folder, plain, started):
    copy_of(started, "cached")
    cache = cache_folder(folder, "cached")
    assert len(graph_files(cache)) == 3
    before = {file.name: file_sha256(file) for file in graph_files(cache)}
    errors = train(folder, "cached", resume=True)
    assert num_cached(errors) == (2, 2)
    assert STARTED_OVER not in errors
    assert weights(folder, "cached") == plain
    # Nothing of the resumed process was added or left.
    assert {file.name: file_sha256(file) for file in graph_files(cache)} == before
    assert not (cache / IN_USE_FILE).exists()


@pytest.mark.slow
def test_graphs_in_another_order_are_found_out_and_the_run_starts_over(folder, plain, started):
    """As a cache of another order: valid hashes, every file a graph of this model."""
    copy_of(started, "swapped")
    cache = cache_folder(folder, "swapped")
    first, second, _ = graph_files(cache)
    swap(first, second)
    forge(cache)
    errors = train(folder, "swapped", resume=True)
    assert errors.count(STARTED_OVER) == 1
    # Named with its shape; then both shapes are compiled afresh.
    assert re.search(STARTED_OVER + r": B=\d+ L=\d+: ", errors)
    assert num_cached(errors) == (0, 2)
    assert weights(folder, "swapped") == plain
    # The cache was filled again and is good.
    errors = train(folder, "swapped", f"train.max_steps={ALL_STEPS + 1}", resume=True)
    assert num_cached(errors) == (2, 2)


@pytest.mark.slow
def test_a_step_in_the_place_of_the_update_is_found_out(folder, plain, started):
    copy_of(started, "mixed")
    cache = cache_folder(folder, "mixed")
    _, second, update = graph_files(cache)
    swap(second, update)
    forge(cache)
    errors = train(folder, "mixed", resume=True)
    assert errors.count(STARTED_OVER) == 1
    assert weights(folder, "mixed") == plain


# What the graphs of the other run hold, and how many of the steps' graphs are taken from it.
OTHER_CONSTANTS = [
    ("model.norm_eps=1e-3", [0]),
    ("model.norm_eps=1e-3", [1]),
    ("model.rope_theta=11000", [1]),
    ("optimizer.beta2=0.96", [2]),
    ("optimizer.beta1=0.91", [2]),
    ("optimizer.no_decay=[]", [2]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("assignment", "graphs"), OTHER_CONSTANTS)
def test_a_graph_with_another_constant_is_found_out(folder, plain, started, assignment, graphs):
    """The key is forced equal: graphs of another run under the manifest of this one."""
    name = re.sub(r"\W", "_", assignment)
    if not (folder / f"other_{name}").exists():
        train(folder, f"other_{name}", assignment)
    out = f"constant_{name}_{graphs[0]}"
    copy_of(started, out)
    cache = cache_folder(folder, out)
    theirs = graph_files(cache_folder(folder, f"other_{name}"))
    for number in graphs:
        put(theirs[number], graph_files(cache)[number])
    forge(cache)
    errors = train(folder, out, resume=True)
    assert errors.count(STARTED_OVER) == 1
    assert num_cached(errors)[0] == graphs[0]
    assert weights(folder, out) == plain


@pytest.mark.slow
def test_graphs_of_another_level_are_not_read_even_under_this_runs_key(folder, plain, started):
    """On CPU both levels compute the same, so values cannot tell; the manifest does."""
    train(folder, "level", "graph.jit_level=O1")
    copy_of(started, "other_level")
    cache = cache_folder(folder, "other_level")
    shutil.rmtree(cache)
    shutil.copytree(cache_folder(folder, "level"), cache)
    errors = train(folder, "other_level", resume=True)
    assert "compile cache not used and removed: manifest.json says another graph" in errors
    assert num_cached(errors) == (0, 2)
    assert weights(folder, "other_level") == plain


@pytest.mark.slow
def test_values_that_were_not_those_of_the_compile_are_found_out(folder, plain, started):
    copy_of(started, "values")
    file = cache_folder(folder, "values") / MANIFEST_FILE
    manifest = parse_manifest(file.read_text())
    first, *others = manifest.graphs
    values = (first.values[0], *(value * 1.0001 for value in first.values[1:]))
    graphs = (dataclasses.replace(first, values=values), *others)
    file.write_text(format_manifest(dataclasses.replace(manifest, graphs=graphs)))
    errors = train(folder, "values", resume=True)
    assert "when the graph was compiled" in errors
    assert weights(folder, "values") == plain


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"no graph at all" * 50])
def test_a_file_that_is_no_graph_is_compiled_afresh_or_found_out(folder, plain, started, content):
    out = f"broken{len(content)}"
    copy_of(started, out)
    cache = cache_folder(folder, out)
    file = graph_files(cache)[1]
    file.chmod(0o600)
    file.write_bytes(content)
    if content:
        forge(cache)
    errors = train(folder, out, resume=True)
    assert "removed" in errors or num_cached(errors) == (2, 2)
    assert weights(folder, out) == plain


@pytest.mark.slow
def test_a_process_that_died_with_the_cache_is_the_last_to_read_it(folder, plain, started):
    copy_of(started, "died")
    (cache_folder(folder, "died") / IN_USE_FILE).touch()
    errors = train(folder, "died", resume=True)
    assert "the last process that read it ended before its graphs were checked" in errors
    assert num_cached(errors) == (0, 2)
    assert weights(folder, "died") == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "assignments",
    [
        ("graph.mode=dynamic",),
        ("batching.strategy=packed",),
        ("precision.compute_dtype=fp16", 'precision.fp32_ops=["softmax","norms","loss"]'),
        ("model.tie_embedding=false", "train.clip_norm=null"),
    ],
)
def test_other_configs_resume_from_their_caches_to_the_same_bits(folder, assignments):
    name = re.sub(r"\W", "_", assignments[0])
    plain_out, out = f"plain_{name}", f"cached_{name}"
    train(folder, plain_out, *assignments, "graph.compile_cache=false",
          f"train.max_steps={ALL_STEPS}")  # fmt: skip
    train(folder, out, *assignments)
    errors = train(folder, out, *assignments, resume=True)
    assert STARTED_OVER not in errors
    cached, lines = num_cached(errors)
    assert cached == lines >= 1
    assert weights(folder, out) == weights(folder, plain_out)


@pytest.mark.slow
def test_a_cache_is_left_by_no_run_that_did_not_finish_its_warm_up(folder):
    """A disk that is full: every file that MindSpore writes is cut off."""
    limit = "import resource, signal, runpy, sys\n" \
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" \
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n" \
        "from tuner.cli import train\n" \
        "sys.argv[0] = train.__file__\n" \
        "sys.exit(train.main())\n"  # fmt: skip
    arguments = ["--config", str(folder / "config.yaml"), "--set", f"train.out={folder / 'full'}",
                 "--set", "train.max_steps=1"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", limit, *arguments], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "going on without a compile cache" in done.stderr, done.stderr[-2000:]
    assert not list((folder / "full" / "compile_cache").rglob(MANIFEST_FILE))


# The built-in decoder as it is, and shapes of one budget.
SIZES = {"vocab_size": 2000}
LENGTHS = (48, 96, 160, 256, 384, 512)
# Padded tokens of a batch -> share of the cold warm-up that one from the cache may take.
MAX_FRACTION = {1024: 0.35, 4096: 0.35}


@pytest.fixture(scope="module", params=MAX_FRACTION)
def sized_folder(tmp_path_factory, request):
    """Data with rows up to each of six boundaries; and the tokens of a batch."""
    tokens = request.param
    folder = tmp_path_factory.mktemp("sized")
    rng = np.random.default_rng(0)
    description = {"length_of": "input_ids"}
    with MindRecordWriter(folder / "data.mindrecord", description=description) as writer:
        for length in LENGTHS:
            for _ in range(tokens // length):
                row = rng.integers(0, SIZES["vocab_size"], length).astype(np.int32)
                writer.write([{"input_ids": row, "labels": row, "length": length}])
    config = {
        "data": {"path": str(folder / "data.mindrecord")},
        "batching": {"boundaries": list(LENGTHS), "tokens_per_batch": tokens},
        "graph": {"compile_cache": True},
        "model": SIZES,
        "train": {"epochs": 9, "max_steps": 1, "tensorboard": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder, tokens


def warm_up_s(folder, out, *arguments):
    """Seconds of the warm-up as the table at the end says, and what was said."""
    command = [
        sys.executable, "-m", "tuner.cli.train", "--config", str(folder / "config.yaml"),
        "--set", f"train.out={folder / out}", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("warm-up seconds")]
    return float(line.split()[-1]), done.stderr


@pytest.mark.slow
def test_the_warm_up_from_a_cache_takes_a_third_of_the_cold_one_checks_included(sized_folder):
    folder, tokens = sized_folder
    plain_s, _ = warm_up_s(folder, "plain", "--set", "graph.compile_cache=false")
    cold_s, errors = warm_up_s(folder, "run")
    assert num_cached(errors) == (0, len(LENGTHS))
    cached_s, errors = warm_up_s(folder, "run", "--resume", "--set", "train.max_steps=2")
    assert num_cached(errors) == (len(LENGTHS), len(LENGTHS))
    print(
        f"\nwarm-up of {len(LENGTHS)} shapes of {tokens} tokens: {plain_s:.1f} s without a cache, "
        f"{cold_s:.1f} s filling it, {cached_s:.1f} s from it ({cached_s / cold_s:.0%})\n{errors}"
    )
    assert cached_s <= MAX_FRACTION[tokens] * min(plain_s, cold_s)
