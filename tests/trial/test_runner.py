"""What the study relies on when a trial runs: every end of a process is a TrialResult.

The workers are small scripts that do on purpose what a real trial may do by accident.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import psutil
import pytest
from strategies import make_config

from tuner.errors import BadInputError
from tuner.simulate.measurement import ShapeMeasurement, UpdateMeasurement
from tuner.trial.fake import FakeRunner, HiddenCost
from tuner.trial.folder import TrialFolder
from tuner.trial.record import (
    Installation,
    Refusal,
    Status,
    TrialResult,
    TrialSpec,
    is_sound,
    parse_json,
    to_json,
)
from tuner.trial.runner import OnMeasured, ProcessRunner, TrialRunner, go_on

GB = 10**9
STATUSES = set(get_args(Status))


def measurement(length: int) -> ShapeMeasurement:
    return ShapeMeasurement(
        batch_size=4,
        padded_length=length,
        first_call_s=3.5,
        steady_s=(0.25, 0.375, 0.125, 0.25),
        has_compiled=True,
        memory_bytes=123_456_789,
        added_bytes=23_456_789,
        loss=4.5,
    )


MEASURED = [to_json(measurement(length)) for length in (32, 16)]
OK = TrialResult(
    status="ok",
    shapes=(measurement(32), measurement(16)),
    update=UpdateMeasurement(first_call_s=1.0, update_s=0.125),
    base_bytes=10**8,
    peak_bytes=5 * 10**8,
    memory_kind="resident set of the process",
)
# What the scripts may use: the folder, ways to write its files, and lines measured so far.
PRELUDE = f"""
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[-1])
MEASURED = {MEASURED!r}
OK = {to_json(OK)!r}
def measured(*lines):
    (folder / "measured.jsonl").write_text("".join(lines))
def result(text):
    (folder / "result.json").write_bytes(text if isinstance(text, bytes) else text.encode())
"""


@pytest.fixture
def spec(tmp_path: Path) -> TrialSpec:
    np.save(tmp_path / "lengths.npy", np.array([5, 9, 30, 31], np.int32))
    return TrialSpec(
        config=make_config({"batching.strategy": "fixed"}),
        lengths_file=str(tmp_path / "lengths.npy"),
        shapes=((4, 32), (4, 16)),
        timed_steps=4,
        time_limit_s=60.0,
        memory_limit_bytes=4 * GB,
    )


@pytest.fixture
def folder(tmp_path: Path) -> TrialFolder:
    return TrialFolder(tmp_path / "results" / "trials" / "0003")


Run = Callable[..., TrialResult]


@pytest.fixture
def run(tmp_path: Path, spec: TrialSpec, folder: TrialFolder) -> Run:
    """Run a script as the worker."""

    def run_script(
        code: str,
        *,
        time_limit_s: float = 60.0,
        memory_limit_bytes: int = 4 * GB,
        on_measured: OnMeasured = go_on,
    ) -> TrialResult:
        script = tmp_path / "worker script.py"
        script.write_text(PRELUDE + textwrap.dedent(code), encoding="utf-8")
        limits = {"time_limit_s": time_limit_s, "memory_limit_bytes": memory_limit_bytes}
        return ProcessRunner([sys.executable, str(script)]).run(
            TrialSpec(**{**vars(spec), **limits}), folder, on_measured
        )

    return run_script


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


class TestAnEndByItself:
    def test_the_written_result_is_the_answer(self, run, folder, spec):
        found = run("print('hello'); result(OK)")
        seen = {"wall_s": found.wall_s, "other_cores": found.other_cores}
        assert found == TrialResult(**{**vars(OK), **seen})
        assert 0.0 < found.wall_s < 30.0
        assert parse_json(TrialSpec, folder.spec.read_text()) == spec
        assert folder.stdout.read_text() == "hello\n"

    def test_the_worker_has_no_standard_input(self, run):
        assert run("assert sys.stdin.read() == ''; result(OK)").status == "ok"

    @pytest.mark.parametrize(
        "ending",
        ["os._exit(3)", "os.kill(os.getpid(), signal.SIGSEGV)", "raise RuntimeError('at exit')"],
    )
    def test_a_result_counts_though_the_process_falls_over_afterwards(self, run, ending):
        assert run(f"result(OK); {ending}").status == "ok"

    def test_a_result_counts_though_the_process_never_ends(self, run):
        found = run("result(OK); time.sleep(60)", time_limit_s=1.0)
        assert (found.status, found.shapes) == ("ok", OK.shapes)

    def test_a_traceback_gives_its_last_line_and_stays_on_disk(self, run, folder):
        found = run("raise ValueError('no such thing: 7')")
        assert found.status == "crashed"
        assert found.reason == "exit code 1: ValueError: no such thing: 7"
        assert found.shapes == ()
        assert "Traceback (most recent call last)" in folder.stderr.read_text()

    def test_an_exit_without_a_word(self, run):
        assert run("sys.exit(9)").reason == "exit code 9: it printed nothing"

    def test_an_exit_with_0_and_no_result(self, run):
        found = run("pass")
        assert (found.status, found.reason) == ("crashed", "it ended without a result")

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            "null",
            '{"status": "fine"}',
            '{"status": "ok"}',
            '{"status": "ok", "shapes": [], "update": {"first_call_s": 1, "update_s": 1}}',
            to_json(OK)[:-20],
            to_json(dataclasses.replace(OK, update=None)),
            to_json(OK).replace("0.375", "NaN"),
            to_json(OK).replace("0.375", "-0.375"),
            to_json(OK).replace("0.375", "0.0"),
            to_json(OK).replace("[0.25,0.375,0.125,0.25]", "[]"),
            to_json(OK).replace('"first_call_s":3.5', '"first_call_s":Infinity'),
            to_json(OK).replace('"update_s":0.125', '"update_s":0.0'),
            b"\\xff\\xfe\\x00",
        ],
    )
    def test_a_garbage_result(self, run, text):
        assert text != to_json(OK)
        found = run(f"result({text!r})")
        assert (found.status, found.reason) == ("crashed", "it wrote an unreadable result")

    def test_stderr_that_is_not_text(self, run):
        found = run("sys.stderr.buffer.write(b'\\xff\\xfe bad \\x00\\n'); sys.exit(4)")
        assert found.status == "crashed"
        assert found.reason.startswith("exit code 4: ") and "bad" in found.reason

    def test_a_very_long_last_line_is_cut(self, run):
        found = run("sys.exit('x' * 100_000)")
        assert len(found.reason) < 400

    def test_a_program_that_is_not_there_is_a_fault_of_ours(self, spec, folder):
        with pytest.raises(FileNotFoundError):
            ProcessRunner(["/no/such/program"]).run(spec, folder)


class TestKills:
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("SIGKILL", "killed by SIGKILL (by the system, often for memory)"),
            ("SIGSEGV", "killed by SIGSEGV"),
            ("SIGABRT", "killed by SIGABRT"),
            ("SIGTERM", "killed by SIGTERM"),
        ],
    )
    def test_a_signal_is_named(self, run, name, reason):
        found = run(f"os.kill(os.getpid(), signal.{name})")
        assert (found.status, found.reason) == ("crashed", reason)

    def test_a_signal_without_a_name_is_numbered(self, run):
        number = 41  # a real-time signal
        found = run(f"os.kill(os.getpid(), {number})")
        assert (found.status, found.reason) == ("crashed", "killed by signal 41")

    def test_a_hang_ends_at_the_time_limit(self, run):
        started = time.monotonic()
        found = run("time.sleep(600)", time_limit_s=1.5)
        seconds = time.monotonic() - started
        assert (found.status, found.reason) == ("timeout", "over the time limit of 1.5 s")
        assert 1.5 <= found.wall_s <= seconds < 1.5 + 2.0

    def test_a_hang_that_ignores_sigterm_ends_too(self, run):
        found = run(
            """
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(600)
            """,
            time_limit_s=1.0,
        )
        assert found.status == "timeout"

    @pytest.mark.parametrize(
        "ending", ["time.sleep(600)", "result(OK)", "sys.exit(1)"], ids=["hang", "ok", "crash"]
    )
    def test_grandchildren_do_not_survive(self, run, folder, ending):
        run(
            f"""
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (folder / "child.pid").write_text(str(child.pid))
            {ending}
            """,
            time_limit_s=3.0,
        )
        wait_until_gone(int((folder.path / "child.pid").read_text()))

    def test_the_worker_is_ended_when_the_caller_is_interrupted(self, run, folder):
        def interrupt(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        try:
            with pytest.raises(KeyboardInterrupt):
                run('(folder / "own.pid").write_text(str(os.getpid())); time.sleep(600)')
        finally:
            signal.signal(signal.SIGALRM, before)
        wait_until_gone(int((folder.path / "own.pid").read_text()))


class TestMemory:
    def test_growth_over_the_limit(self, run):
        limit = 300 * 10**6
        found = run(
            """
            held = []
            for _ in range(4000):
                held.append(bytearray(os.urandom(1 << 20)))
                time.sleep(0.005)
            """,
            memory_limit_bytes=limit,
        )
        assert found.status == "oom"
        assert found.reason.endswith("GB, over the limit of 0.30 GB")
        assert limit < found.peak_bytes < 10 * limit
        assert found.memory_kind == "resident set of the process"

    def test_growth_of_a_child_counts(self, run):
        code = "import os, time; held = os.urandom(400 << 20); time.sleep(600)"
        found = run(
            f'subprocess.run([sys.executable, "-c", {code!r}])', memory_limit_bytes=300 * 10**6
        )
        assert found.status == "oom"

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("raise MemoryError", "MemoryError"),
            (
                "import numpy; numpy.zeros(1 << 50, numpy.uint8)",
                "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 1.00 PiB for an "
                "array with shape (1125899906842624,) and data type uint8",
            ),
            (
                "sys.stderr.write('Malloc failed: 12345 bytes\\n'); sys.exit(1)",
                "Malloc failed: 12345 bytes",
            ),
            (
                # As libstdc++ says it.
                'sys.stderr.write("terminate called after throwing an instance of '
                "'std::bad_alloc'\\n  what():  std::bad_alloc\\n\"); sys.stderr.flush(); "
                "os.abort()",
                "what():  std::bad_alloc",
            ),
            (
                # The cause is told, not what was printed after it.
                "sys.stderr.write('[ERROR] Out of memory on device\\n'.lower() + 'bye\\n'); "
                "sys.exit(1)",
                "[error] out of memory on device",
            ),
        ],
        ids=["python", "numpy", "mindspore", "c++", "not the last line"],
    )
    def test_a_failed_allocation_is_oom(self, run, code, reason):
        found = run(code)
        assert (found.status, found.reason) == ("oom", reason)


class TestMeasurementsBeforeAFailure:
    @pytest.mark.parametrize(
        ("ending", "status"),
        [
            ("raise ValueError('late')", "crashed"),
            ("os.kill(os.getpid(), signal.SIGKILL)", "crashed"),
            ("raise MemoryError", "oom"),
            ("time.sleep(600)", "timeout"),
            ("result('{')", "crashed"),
            ("""result('{"status": "oom", "reason": "MemoryError: x"}')""", "oom"),
            ("""result('{"status": "diverged", "reason": "the loss is nan"}')""", "diverged"),
        ],
    )
    def test_are_kept_and_counted(self, run, ending, status):
        found = run(f"measured(*[line + '\\n' for line in MEASURED]); {ending}", time_limit_s=2.0)
        assert found.status == status
        assert found.shapes == (measurement(32), measurement(16))
        assert found.reason.endswith(", after 2 measured shapes")
        assert found.update is None

    def test_a_half_written_last_line_is_left_out(self, run):
        found = run("measured(MEASURED[0] + '\\n', MEASURED[1][:40]); sys.exit(1)")
        assert found.shapes == (measurement(32),)
        assert found.reason.endswith(", after 1 measured shape")

    def test_a_refusal_says_nothing_of_shapes(self, run):
        found = run("""result('{"status": "refused", "reason": "no; do that"}')""")
        assert (found.status, found.reason) == ("refused", "no; do that")


# Writes a line at a time and lives on.
STEP_BY_STEP = """
import os
(folder / "own.pid").write_text(str(os.getpid()))
for line in MEASURED:
    with (folder / "measured.jsonl").open("a") as file:
        file.write(line + "\\n")
    time.sleep(0.7)
"""


class TestWhileItRuns:
    def test_shapes_are_told_as_they_come(self, run):
        told, threads = [], set()

        def keep(shapes):
            told.append(shapes)
            threads.add(threading.get_ident())
            return False

        found = run(STEP_BY_STEP + "result(OK)", on_measured=keep)
        assert told == [(measurement(32),), (measurement(32), measurement(16))]
        assert threads == {threading.get_ident()}
        assert found.status == "ok"

    def test_a_line_that_is_still_being_written_is_not_told(self, run):
        told = []
        run(
            """
            with (folder / "measured.jsonl").open("a") as file:
                for part in (MEASURED[0][:30], MEASURED[0][30:] + "\\n", MEASURED[1][:9]):
                    file.write(part)
                    file.flush()
                    time.sleep(0.7)
            """,
            on_measured=lambda shapes: bool(told.append(shapes)),
        )
        assert told == [(measurement(32),)]

    @pytest.mark.parametrize("count", [1, 2])
    def test_a_trial_that_was_told_to_end_is_pruned(self, run, folder, count):
        started = time.monotonic()
        found = run(
            STEP_BY_STEP + "time.sleep(600)", on_measured=lambda shapes: len(shapes) == count
        )
        assert time.monotonic() - started < 20.0
        words = "1 measured shape" if count == 1 else "2 measured shapes"
        assert (found.status, found.update) == ("pruned", None)
        assert found.reason == f"it cannot become the best, after {words}"
        assert found.shapes == (measurement(32), measurement(16))[:count]
        assert found.wall_s > 0.0
        wait_until_gone(int((folder.path / "own.pid").read_text()))

    def test_a_fault_of_the_caller_ends_the_trial(self, run, folder):
        def fail(shapes):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run(STEP_BY_STEP + "time.sleep(600)", on_measured=fail)
        wait_until_gone(int((folder.path / "own.pid").read_text()))


class TestStop:
    def runner(self, tmp_path: Path) -> ProcessRunner:
        script = tmp_path / "worker.py"
        code = """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child.pid").write_text(str(child.pid))
        (folder / "own.pid").write_text(str(os.getpid()))
        time.sleep(600)
        """
        script.write_text(PRELUDE + textwrap.dedent(code))
        return ProcessRunner([sys.executable, str(script)])

    def test_ends_what_runs_within_two_seconds(self, tmp_path, spec, folder):
        runner = self.runner(tmp_path)
        found: list[TrialResult] = []
        thread = threading.Thread(target=lambda: found.append(runner.run(spec, folder)))
        thread.start()
        own = folder.path / "own.pid"
        deadline = time.monotonic() + 30.0
        while not (own.exists() and own.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stopped = time.monotonic()
        runner.stop()
        thread.join(timeout=10.0)
        assert time.monotonic() - stopped < 2.0
        assert [item.status for item in found] == ["pruned"]
        for name in ("own.pid", "child.pid"):
            wait_until_gone(int((folder.path / name).read_text()), seconds=2.0)

    def test_lets_nothing_start_any_more(self, tmp_path, spec, folder):
        runner = self.runner(tmp_path)
        runner.stop()
        started = time.monotonic()
        found = runner.run(spec, folder)
        assert time.monotonic() - started < 2.0
        assert (found.status, found.shapes) == ("pruned", ())


class TestTheFolder:
    @pytest.mark.parametrize("name", ["with space", "数据 ü", "-dash", 'quo\'te "$HOME"'])
    def test_may_be_called_anything(self, tmp_path, spec, name):
        script = tmp_path / "worker.py"
        script.write_text(PRELUDE + "result(OK)")
        folder = TrialFolder(tmp_path / name / "0000")
        found = ProcessRunner([sys.executable, str(script)]).run(spec, folder)
        assert found.status == "ok"
        assert folder.result.exists()

    def test_is_cleared_of_an_interrupted_attempt(self, run, folder):
        folder.path.mkdir(parents=True)
        folder.result.write_text(to_json(OK))
        folder.measured.write_text(MEASURED[0] + "\n")
        (folder.path / "rank_0").mkdir()
        found = run("pass")
        assert (found.status, found.shapes) == ("crashed", ())
        assert not (folder.path / "rank_0").exists()


class TestProbe:
    def script(self, tmp_path: Path, code: str) -> ProcessRunner:
        file = tmp_path / "probe.py"
        file.write_text("import sys\nassert sys.argv[1:] == ['--probe', 'cpu']\n" + code)
        return ProcessRunner([sys.executable, str(file)])

    def test_the_last_line_is_the_answer(self, tmp_path):
        known = Installation(device="CPU", versions={"mindspore": "2.10.0"})
        runner = self.script(tmp_path, f"print('[WARNING] noise')\nprint({to_json(known)!r})")
        assert runner.probe("cpu") == known

    def test_a_refusal_is_told_as_it_is(self, tmp_path):
        refusal = to_json(Refusal(problem="no Ascend here", fix="set device to cpu"))
        runner = self.script(tmp_path, f"print({refusal!r})")
        with pytest.raises(BadInputError) as caught:
            runner.probe("cpu")
        assert str(caught.value) == "no Ascend here; set device to cpu"

    @pytest.mark.parametrize(
        ("code", "words"),
        [
            ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
            ("print('hello')", "it printed nothing"),
            ("pass", "it printed nothing"),
        ],
    )
    def test_anything_else_says_how_to_check(self, tmp_path, code, words):
        with pytest.raises(BadInputError) as caught:
            self.script(tmp_path, code).probe("cpu")
        assert words in caught.value.problem
        assert "import mindspore" in caught.value.fix


@pytest.fixture(params=["process", "fake"])
def any_runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., object]]:
    """A runner whose trial ends with a given result."""

    def make(result: TrialResult | None) -> TrialRunner:
        if request.param == "fake":
            failure = None if result is None else (result.status, result.reason)
            return FakeRunner(HiddenCost(), fails=lambda config: failure)
        script = tmp_path / "worker.py"
        ending = f"result({to_json(result or OK)!r})"
        script.write_text(PRELUDE + (ending if result else STEP_BY_STEP + ending))
        return ProcessRunner([sys.executable, str(script)])

    yield make


class TestContractOfEveryRunner:
    def test_ok_has_shapes_an_update_and_no_reason(self, any_runner, spec, folder):
        found = any_runner(None).run(spec, folder)
        assert (found.status, found.reason) == ("ok", "")
        assert found.shapes and found.update is not None
        assert found.peak_bytes > 0 and found.memory_kind and found.wall_s > 0
        assert all(shape.first_call_s >= shape.step_s > 0 for shape in found.shapes)
        assert tuple(shape.shape for shape in found.shapes) == spec.shapes
        assert found.base_bytes > 0
        assert is_sound(found)

    @pytest.mark.parametrize("status", sorted(STATUSES - {"ok"}))
    def test_a_failure_is_a_value_with_its_reason(self, any_runner, spec, folder, status):
        failure = TrialResult(status=status, reason="because of this")
        found = any_runner(failure).run(spec, folder)
        assert (found.status, found.reason) == (status, "because of this")
        assert (found.shapes, found.update) == ((), None)

    def test_the_answer_survives_json(self, any_runner, spec, folder):
        found = any_runner(None).run(spec, folder)
        assert parse_json(TrialResult, to_json(found)) == found

    def test_every_measured_shape_is_told_and_may_end_the_trial(self, any_runner, spec, folder):
        told = []

        def keep(shapes):
            told.append([item.shape for item in shapes])
            return False

        assert any_runner(None).run(spec, folder, keep).status == "ok"
        assert told == [[(4, 32)], [(4, 32), (4, 16)]]

    def test_a_pruned_trial_keeps_what_it_measured(self, any_runner, spec, folder):
        found = any_runner(None).run(spec, folder, lambda shapes: True)
        assert found.status == "pruned"
        assert found.reason.startswith("it cannot become the best")
        assert [item.shape for item in found.shapes] == [(4, 32)]
        assert found.update is None
        assert is_sound(found)

    def test_may_be_stopped_when_nothing_runs(self, any_runner):
        any_runner(None).stop()
