"""The process of a trial on a tiny real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from strategies import make_config

from tuner.batching.grouping import Shape
from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.errors import BadInputError
from tuner.simulate.measurement import ShapeMeasurement
from tuner.trial.folder import TrialFolder
from tuner.trial.past import read_measured
from tuner.trial.record import TrialResult, TrialSpec, parse_json, to_json
from tuner.trial.runner import WORKER_COMMAND, ProcessRunner

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTHS = [3, 5, 7, 8] * 6 + [12, 15] * 4 + [30, 31, 33]
GB = 10**9
TINY = {
    "model.vocab_size": 32,
    "model.width": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.ffn_width": 16,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.mindrecord"
    rng = np.random.default_rng(3)
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for length in LENGTHS:
            ids = rng.integers(1, 32, length).astype(np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": length}])
    return path


MakeSpec = Callable[..., TrialSpec]


@pytest.fixture
def make_spec(data: Path, tmp_path: Path) -> MakeSpec:
    lengths = scan_lengths(open_mindrecord(data))
    np.save(tmp_path / "lengths.npy", lengths.tokens)

    def make(shapes: Sequence[Shape] = (), **changes: Any) -> TrialSpec:
        """A spec; without shapes it asks for all that the epoch meets, largest first."""
        config = make_config({"data.path": str(data), **TINY, **changes})
        config = resolve_boundaries(lengths, config)
        counts = plan_batches(lengths, config).shape_counts()
        met = sorted(filter(counts.get, counts), key=lambda shape: -shape[0] * shape[1])
        return TrialSpec(
            config=config,
            lengths_file=str(tmp_path / "lengths.npy"),
            shapes=tuple(shapes or met),
            timed_steps=3,
            time_limit_s=240.0,
            memory_limit_bytes=8 * GB,
        )

    return make


def run(spec: TrialSpec, folder: TrialFolder) -> TrialResult:
    return ProcessRunner().run(spec, folder)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(happens: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := happens()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


@pytest.mark.mindspore
def test_a_new_graph_settles_before_it_is_timed():
    """By hand: five calls on one thread, five on two, five on four; at most 30 are searched."""
    from tuner.train.device import Device
    from tuner.trial.measure import calls_before_steady

    cpu, npu = (Device(name=name, memory_kind="") for name in ("CPU", "Ascend"))
    expected = {1: 5, 2: 5, 3: 10, 4: 10, 8: 15, 64: 30, 192: 30}
    assert {cores: calls_before_steady(cpu, cores) for cores in expected} == expected
    assert calls_before_steady(npu, 192) == 2
    assert calls_before_steady(cpu, 8, is_new_graph=False) == 1
    assert calls_before_steady(npu, 8, is_new_graph=False) == 2


@pytest.mark.mindspore
class TestMeasuring:
    def test_every_shape_of_a_static_plan_once_largest_first(self, tmp_path, make_spec):
        spec = make_spec(
            **{
                "batching.strategy": "bucketed",
                "batching.boundaries": [8, 40],
                "batching.tokens_per_batch": 80,
            }
        )
        folder = TrialFolder(tmp_path / "trials with ü" / "0000")
        found = run(spec, folder)
        assert (found.status, found.reason) == ("ok", ""), folder.stderr.read_text()[-2000:]
        # By hand: the budget takes 10 rows of 8, 24 rows make 3 batches of 8; it takes 2 rows of
        # 40, 11 rows make 6 batches of 2.
        assert [item.shape for item in found.shapes] == [(2, 40), (8, 8)]
        for item in found.shapes:
            assert len(item.steady_s) == 3
            # On CPU the first calls of a graph search for the number of threads.
            assert len(item.settling_s) >= 4
            assert item.first_call_s > item.step_s > 0
            assert item.has_compiled
            assert item.memory_bytes > 50 * 10**6
            assert item.added_bytes >= 0
            # Untrained: as good as guessing among 32 ids.
            assert item.loss == pytest.approx(np.log(32), abs=0.5)
        assert found.shapes[0].compile_s > 0.2
        assert found.update is not None
        assert found.update.first_call_s > found.update.update_s > 0
        assert found.peak_bytes >= max(item.memory_bytes for item in found.shapes)
        added = sum(item.added_bytes for item in found.shapes)
        assert 50 * 10**6 < found.base_bytes <= found.peak_bytes
        assert found.base_bytes + added == pytest.approx(found.shapes[-1].memory_bytes, rel=0.2)
        assert found.memory_kind == "resident set of the process"
        kept = [
            parse_json(ShapeMeasurement, line) for line in folder.measured.read_text().splitlines()
        ]
        # After its visit, and after all steps.
        assert [len(item.steady_s) for item in kept] == [1, 1, 3, 3]
        assert tuple(kept[2:]) == found.shapes == read_measured(folder)

    def test_a_dynamic_graph_at_the_shapes_asked_for_compiles_once(self, tmp_path, make_spec):
        changes = {
            "batching.strategy": "dynamic",
            "batching.tokens_per_batch": 40,
            "batching.align": 1,
            "graph.mode": "dynamic",
        }
        planned = make_spec(**changes).shapes
        assert len(planned) > 3
        asked = planned[0], planned[2], planned[-1]
        found = run(make_spec(asked, **changes), TrialFolder(tmp_path / "0000"))
        assert found.status == "ok", found.reason
        assert tuple(item.shape for item in found.shapes) == asked
        assert [item.has_compiled for item in found.shapes] == [True, False, False]
        # One graph: the compile is in the first call of the first shape.
        first, *others = (item.compile_s for item in found.shapes)
        assert all(first > 3 * other for other in others)

    def test_a_shape_that_the_plan_does_not_have_gets_random_rows(self, tmp_path, make_spec):
        """Longer than every row of the set, too."""
        spec = make_spec([(3, 77)], **{"batching.strategy": "fixed"})
        found = run(spec, TrialFolder(tmp_path / "0000"))
        assert (found.status, found.reason) == ("ok", "")
        (item,) = found.shapes
        assert item.shape == (3, 77)
        assert item.loss == pytest.approx(np.log(32), abs=0.5)


@pytest.mark.mindspore
class TestFailing:
    def test_bad_input_is_refused_in_its_own_words(self, tmp_path, make_spec):
        spec = make_spec([(1, 8)], **{"data.path": str(tmp_path / "nowhere.mindrecord")})
        found = run(spec, TrialFolder(tmp_path / "0000"))
        assert found.status == "refused"
        assert "nowhere.mindrecord" in found.reason
        assert (found.shapes, found.update) == ((), None)

    def test_a_diverging_model(self, tmp_path, make_spec):
        spec = make_spec(
            **{
                "batching.strategy": "fixed",
                "batching.tokens_per_batch": 80,
                # Weights that no float32 holds.
                "model.init_std": 1e300,
            }
        )
        found = run(spec, TrialFolder(tmp_path / "0000"))
        assert found.status == "diverged"
        assert found.reason.startswith("the loss at B=2 L=40 is ")

    def test_a_spec_that_is_no_spec_is_a_crash_with_its_traceback(self, tmp_path):
        (tmp_path / "spec.json").write_text("{}")
        done = subprocess.run(
            [*WORKER_COMMAND, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert done.returncode == 0
        found = parse_json(TrialResult, (tmp_path / "result.json").read_text())
        assert found.status == "crashed"
        assert found.reason == "UnreadableRecordError: config: Field required"
        assert "Traceback" in done.stderr


class TestProbe:
    def test_says_device_and_versions(self):
        import mindspore

        found = ProcessRunner().probe("cpu")
        assert found.device == "CPU"
        assert found.versions["mindspore"] == mindspore.__version__
        assert found.versions["numpy"] == np.__version__

    def test_a_device_that_is_not_there_is_refused_in_its_own_words(self):
        with pytest.raises(BadInputError) as caught:
            ProcessRunner().probe("ascend")
        assert caught.value.problem == (
            "device is ascend, but MindSpore finds no Ascend device here"
        )
        assert "cpu" in caught.value.fix


# Runs a trial as the tuner does, and says whose process it is.
TUNER = """
import sys
from tuner.trial.folder import TrialFolder
from tuner.trial.record import TrialSpec, parse_json
from tuner.trial.runner import ProcessRunner
from pathlib import Path
spec = parse_json(TrialSpec, Path(sys.argv[1]).read_text())
ProcessRunner().run(spec, TrialFolder(Path(sys.argv[2])))
"""


@pytest.mark.mindspore
class TestWithoutItsTuner:
    @pytest.fixture
    def begin(self, tmp_path: Path) -> Iterator[Callable[[TrialSpec], tuple[int, int]]]:
        """A tuner and its worker, by their ids."""
        started: list[subprocess.Popen[bytes]] = []
        workers: list[int] = []

        def start(spec: TrialSpec) -> tuple[int, int]:
            (tmp_path / "given.json").write_text(to_json(spec))
            arguments = [str(tmp_path / "given.json"), str(tmp_path / "0000")]
            tuner = subprocess.Popen([sys.executable, "-c", TUNER, *arguments], cwd=REPOSITORY)
            started.append(tuner)
            (worker,) = wait_for(lambda: psutil.Process(tuner.pid).children())
            workers.append(worker.pid)
            return tuner.pid, worker.pid

        yield start
        for pid in [*workers, *(tuner.pid for tuner in started)]:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        for tuner in started:
            tuner.wait()

    def slow(self, make_spec: MakeSpec) -> TrialSpec:
        """A trial of minutes: many shapes to compile."""
        changes = {"batching.strategy": "dynamic", "batching.tokens_per_batch": 80}
        return make_spec(**changes, **{"batching.align": 1})

    def test_it_ends_though_the_tuner_died_before_it_had_started(self, make_spec, begin):
        tuner, worker = begin(self.slow(make_spec))
        os.kill(tuner, signal.SIGKILL)
        wait_for(lambda: is_gone(worker), seconds=25)

    def test_it_ends_in_the_middle_of_compiling(self, make_spec, begin, tmp_path):
        tuner, worker = begin(self.slow(make_spec))
        measured = TrialFolder(tmp_path / "0000").measured
        wait_for(lambda: measured.exists() and measured.stat().st_size, seconds=120)
        os.kill(tuner, signal.SIGKILL)
        wait_for(lambda: is_gone(worker), seconds=15)
        assert not TrialFolder(tmp_path / "0000").result.exists()
