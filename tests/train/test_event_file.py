"""Event files, read back by the rules of the format and not by who wrote them."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest
from step_records import evaluation_record, record
from tensorboardX.proto.event_pb2 import Event, SessionLog

from tuner.errors import BadInputError
from tuner.train.event_file import EventFile
from tuner.train.run_log import RunLog

CASTAGNOLI = 0x82F63B78


def crc32c(data):
    """CRC-32C bit by bit (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (CASTAGNOLI if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    """As TensorFlow's record format masks a checksum of data that holds checksums itself."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(path):
    """Length, its checksum, data, its checksum: all events of a file."""
    content, place, events = path.read_bytes(), 0, []
    while place < len(content):
        header = content[place : place + 8]
        (length,) = struct.unpack("<Q", header)
        (length_crc,) = struct.unpack("<I", content[place + 8 : place + 12])
        data = content[place + 12 : place + 12 + length]
        (data_crc,) = struct.unpack("<I", content[place + 12 + length : place + 16 + length])
        assert (length_crc, data_crc) == (masked(header), masked(data))
        events.append(Event.FromString(data))
        place += 16 + length
    return events


def scalars(folder):
    """Tag -> step -> value, as TensorBoard shows it: a session start purges later steps."""
    found = {}
    for path in sorted((folder / "events").iterdir()):
        for event in read_events(path):
            if event.session_log.status == SessionLog.START:
                for steps in found.values():
                    for step in [step for step in steps if step >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_the_checksum_is_the_published_one():
    # RFC 3720, appendix B.4: 32 bytes of zeros, and of ones.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


def test_scalars_are_read_back_as_written(tmp_path):
    events = EventFile(tmp_path, keep_steps=0)
    events.write(1, {"train/loss": 2.5, "train/grad_norm": None})
    events.write(2, {"train/loss": float("nan"), "train/grad_norm": 0.25})
    events.close()
    assert scalars(tmp_path) == {"train/loss": {1: 2.5}, "train/grad_norm": {2: 0.25}}
    first = read_events(next((tmp_path / "events").iterdir()))[0]
    assert first.file_version == "brain.Event:2"
    assert abs(first.wall_time - time.time()) < 60


def test_a_resumed_run_writes_a_file_of_its_own_that_purges_later_steps(tmp_path):
    log = RunLog(tmp_path, 0, writes_events=True)
    for step in range(1, 8):
        log.append(record(step, loss=float(step)))
    log.close()
    log = RunLog(tmp_path, 5, writes_events=True)
    for step in range(6, 9):
        log.append(record(step, loss=float(10 * step)))
    log.close()
    assert len(list((tmp_path / "events").iterdir())) == 2
    expected = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 60.0, 7: 70.0, 8: 80.0}
    assert scalars(tmp_path)["train/loss"] == expected


def test_a_step_and_an_evaluation_have_all_their_scalars(tmp_path):
    log = RunLog(tmp_path, 0, writes_events=True)
    log.append(
        record(
            1, (4, 16), step_s=0.25, data_wait_s=0.25, real_tokens=48, loss_scale=1024.0,
            clip_norm=1.5, memory_bytes=2**30, recompiles=1,
        )
    )  # fmt: skip
    log.evaluated(evaluation_record(1, loss=3.0, perplexity=20.0))
    log.close()
    found = {tag: steps[1] for tag, steps in scalars(tmp_path).items()}
    assert found == pytest.approx(
        {
            "train/loss": 1.5, "train/learning_rate": 1e-3, "train/grad_norm": 0.5,
            "train/clip_norm": 1.5, "train/loss_scale": 1024.0,
            "batch/effective_token_fraction": 0.75, "batch/padded_length": 16.0,
            "speed/real_tokens_per_s": 96.0, "speed/step_s": 0.25, "speed/data_wait_s": 0.25,
            "speed/recompiles": 1.0, "memory/bytes": 2.0**30,
            "evaluation/loss": 3.0, "evaluation/perplexity": 20.0,
            "evaluation/loss_up_to_00064": 3.0,
        }
    )  # fmt: skip


def test_without_tensorboard_there_is_no_folder(tmp_path):
    log = RunLog(tmp_path, 0)
    log.append(record(1))
    log.close()
    assert not (tmp_path / "events").exists()


def test_a_step_costs_less_than_a_millisecond_to_record(tmp_path):
    """Every file of a run together, in seconds of this thread; of four hundreds the fastest.

    Other programs slow a thread down even by its own clock, but nothing makes it faster.
    """
    log = RunLog(tmp_path, 0, writes_events=True)
    seconds = []
    for hundred in range(4):
        started = time.thread_time()
        for step in range(100 * hundred + 1, 100 * hundred + 101):
            log.append(record(step, (2, 8 * (step % 7 + 1)), loss_scale=2.0, clip_norm=1.0))
        seconds.append(time.thread_time() - started)
    assert min(seconds) / 100 < 1e-3
    log.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_and_not_waited_for(tmp_path, monkeypatch):
    opened = Path.open

    def full(path, *arguments, **options):
        is_event_file = path.name.startswith("events.out")
        return opened(Path("/dev/full") if is_event_file else path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(BadInputError, match="No space left on device; make room"):
        EventFile(tmp_path, keep_steps=0)


def test_events_are_there_without_closing(tmp_path):
    events = EventFile(tmp_path, keep_steps=0)
    events.write(3, {"train/loss": 1.25})
    assert scalars(tmp_path) == {"train/loss": {3: 1.25}}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "events").write_text("")
    with pytest.raises(BadInputError, match=r"train\.tensorboard"):
        EventFile(tmp_path, keep_steps=0)
