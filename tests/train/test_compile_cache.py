"""The compile cache's folder: only a whole one of the same key, order and files is read."""

from __future__ import annotations

import dataclasses
import json
import os
import threading

import pytest
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.train.cache_key import CacheKey, cache_key, sources_digest
from tuner.train.compile_cache import (
    FRESH_VARIABLE,
    IN_USE_FILE,
    MANIFEST_FILE,
    PATH_VARIABLE,
    GraphRecord,
    format_manifest,
    open_cache,
    parse_manifest,
    time_limit,
)
from tuner.train.device import CACHE_VARIABLE, open_device

pytestmark = pytest.mark.mindspore

SHAPES = ((4, 16), (8, 8))
KEY = CacheKey(parts={"shapes": [[4, 16], [8, 8]], "graph": {"jit_level": "O0"}})
GRAPHS = (
    GraphRecord(shape=(4, 16), compile_s=2.0, values=(3.5, 0.25)),
    GraphRecord(shape=(8, 8), compile_s=1.0, values=(3.25, 0.125)),
    GraphRecord(shape=None, compile_s=0.5, values=(1.0, float("inf"))),
)


def graph_file(folder, number):
    return folder / "rank_0" / "graph_cache" / f"compile_cache_{number}.mindir"


def graph_bytes(number):
    """A message of one field."""
    return b"\x12\x07graph %d" % number


def fill(root, key=KEY):
    """A whole folder, as MindSpore and a warm-up leave it."""
    cache = open_cache(root, key, lambda line: None)
    folder = root / key.digest
    for number in range(len(GRAPHS)):
        file = graph_file(folder, number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(graph_bytes(number))
        # As MindSpore leaves them.
        file.chmod(0o400)
    (file.parent / "compile_dependency.hash").write_text("abc")
    cache.finish(GRAPHS)
    return folder


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path)


def reopened(folder, key=KEY):
    notices = []
    return open_cache(folder.parent, key, notices.append), notices


def test_a_whole_folder_is_read_with_what_its_graphs_gave(folder):
    cache, notices = reopened(folder)
    assert cache.known == GRAPHS
    assert notices == []
    assert (folder / MANIFEST_FILE).exists()


def test_a_manifest_says_what_decided_the_graphs_for_people_too(folder):
    manifest = json.loads((folder / MANIFEST_FILE).read_text())["manifest"]
    assert manifest["key"] == KEY.parts
    assert len(manifest["files"]) == 4


def rewrite(folder, **changes):
    """Forge the manifest, checksum included."""
    file = folder / MANIFEST_FILE
    file.write_text(
        format_manifest(dataclasses.replace(parse_manifest(file.read_text()), **changes))
    )


def cut_off(folder):
    file = folder / MANIFEST_FILE
    file.write_text(file.read_text()[:-40])


def flip(folder):
    file = folder / MANIFEST_FILE
    file.write_text(file.read_text().replace("0.125", "0.126"))


def swap(folder):
    first, second = graph_file(folder, 0), graph_file(folder, 1)
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def change(folder):
    file = graph_file(folder, 2)
    file.chmod(0o600)
    file.write_bytes(b"Graph 2")


SPOILT = [
    ("its warm-up was not finished", lambda folder: (folder / MANIFEST_FILE).unlink()),
    ("the last process that read it", lambda folder: (folder / IN_USE_FILE).touch()),
    ("Unterminated|Expecting", cut_off),
    ("does not match its checksum", flip),
    ("another order", lambda folder: rewrite(folder, graphs=GRAPHS[1::-1] + GRAPHS[2:])),
    ("says another graph", lambda folder: rewrite(
        folder, key={**KEY.parts, "graph": {"jit_level": "O1"}})),
    ("was changed", swap),
    ("was changed", change),
    ("its files are not those", lambda folder: graph_file(folder, 1).unlink()),
    ("its files are not those", lambda folder: graph_file(folder, 3).write_bytes(b"graph 3")),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "spoil"), SPOILT)
def test_a_folder_that_does_not_fit_is_removed_and_filled_again(folder, reason, spoil):
    spoil(folder)
    cache, notices = reopened(folder)
    assert cache.known is None
    assert list(folder.iterdir()) == []
    (notice,) = notices
    assert "compile cache not used and removed" in notice
    assert any(words in notice for words in reason.split("|"))


def test_another_key_has_another_folder(folder):
    other = CacheKey(parts={**KEY.parts, "rank": "1"})
    cache, notices = reopened(folder, other)
    assert cache.known is None
    assert notices == []
    assert reopened(folder)[0].known == GRAPHS


def test_a_process_that_starts_over_reads_nothing_once(folder, monkeypatch):
    monkeypatch.setenv(FRESH_VARIABLE, "1")
    cache, notices = reopened(folder)
    assert cache.known is None
    assert list(folder.iterdir()) == []
    assert notices == []
    # Its own children must not inherit it.
    assert FRESH_VARIABLE not in os.environ


def test_a_folder_with_fewer_files_than_graphs_gets_no_manifest(tmp_path):
    cache = open_cache(tmp_path, KEY, lambda line: None)
    folder = tmp_path / KEY.digest
    graph_file(folder, 0).parent.mkdir(parents=True)
    graph_file(folder, 0).write_bytes(graph_bytes(0))
    # A full disk leaves empty files.
    graph_file(folder, 1).write_bytes(b"")
    with pytest.raises(OSError, match="1 whole files for 3 graphs"):
        cache.finish(GRAPHS)
    assert not (folder / MANIFEST_FILE).exists()


def test_a_place_that_cannot_be_written_means_no_cache(tmp_path):
    (tmp_path / "file").write_text("")
    notices = []
    assert open_cache(tmp_path / "file" / "cache", KEY, notices.append) is None
    assert "going on without a compile cache" in notices[0]


def test_a_mark_says_that_graphs_are_running_and_goes_when_they_are_checked(folder):
    cache, _ = reopened(folder)
    cache.mark_in_use()
    assert (folder / IN_USE_FILE).exists()
    cache.clear_mark()
    assert reopened(folder)[0].known == GRAPHS


def test_the_variables_of_mindspore_are_set_for_the_block_only(folder, monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, "of the user")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    cache, _ = reopened(folder)
    with pytest.raises(RuntimeError), cache.compiles():
        assert os.environ[CACHE_VARIABLE] == "1"
        assert os.environ[PATH_VARIABLE] == str(folder)
        raise RuntimeError
    assert CACHE_VARIABLE not in os.environ
    assert os.environ[PATH_VARIABLE] == "of the user"


def test_a_device_is_opened_without_the_users_own_compile_cache(device, tiny_config, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "1")
    assert open_device(tiny_config) == device
    assert CACHE_VARIABLE not in os.environ


def test_a_block_that_takes_too_long_is_noticed_while_it_runs():
    over = threading.Event()
    with time_limit(0.01, over.set):
        assert over.wait(10)
    in_time = threading.Event()
    with time_limit(60.0, in_time.set):
        pass
    assert not in_time.is_set()


def key_of(device, changes=None, shapes=SHAPES):
    return cache_key(make_config({**TINY_MODEL, **(changes or {})}), device, shapes)


def test_a_key_is_the_same_for_what_changes_no_graph(device):
    same = {
        "data.path": "elsewhere", "train.out": "elsewhere", "train.epochs": 9,
        "graph.compile_cache": True, "schedule.kind": "constant",
    }  # fmt: skip
    assert key_of(device).digest == key_of(device, same).digest
    # Sources are read again: the digest does not change between two calls either.
    assert len(key_of(device).digest) == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"graph.jit_level": "O1"},
        {"graph.mode": "dynamic"},
        {"precision.compute_dtype": "fp16"},
        {"model.norm_eps": 1e-5},
        {"model.rope_theta": 20000.0},
        {"optimizer.beta2": 0.99},
        {"train.clip_norm": None},
        {"batching.strategy": "packed"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_key_differs_for_what_changes_a_graph(device, changes):
    assert key_of(device).digest != key_of(device, changes).digest


def test_a_key_holds_shapes_in_their_order_device_ranks_and_versions(device, monkeypatch):
    first = key_of(device)
    lengths = cache_key(make_config(TINY_MODEL), device, SHAPES, 128)
    assert first.digest != lengths.digest
    assert first.digest != key_of(device, shapes=SHAPES[::-1]).digest
    assert first.digest != key_of(dataclasses.replace(device, name="Ascend")).digest
    assert set(first.parts["versions"]) >= {"mindspore", "varseq_tuner", "numpy", "python", "cann"}
    monkeypatch.setenv("RANK_ID", "1")
    assert first.digest != key_of(device).digest


def test_a_key_holds_the_sources_of_a_factory(device, tmp_path, monkeypatch):
    (tmp_path / "own_layers.py").write_text("WIDTH = 4\n")
    (tmp_path / "own_model.py").write_text("from own_layers import WIDTH\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_model

    assert own_model.WIDTH == 4
    changes = {"model.factory": "own_model:build"}
    before = key_of(device, changes)
    assert before.digest == key_of(device, changes).digest
    # A module beside it, that the factory only imports.
    (tmp_path / "own_layers.py").write_text("WIDTH = 5\n")
    assert before.digest != key_of(device, changes).digest


def test_the_digest_of_sources_sees_every_byte_and_every_file(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("y = 2")
    files = sorted(tmp_path.iterdir())
    before = sources_digest(files)
    assert before == sources_digest(reversed(files))
    assert before != sources_digest(files[:1])
    (tmp_path / "b.py").write_text("y = 3")
    assert before != sources_digest(files)
