"""The results folder: writable, held by one tuner at a time, cleared for a new study."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import BadInputError
from tuner.trial.folder import StudyFolder


@contextlib.contextmanager
def hold_folder(folder: StudyFolder) -> Iterator[None]:
    """Hold the folder for as long as the block runs; the system lets go if the process dies.

    Args:
        folder: Made if it is not there.

    Raises:
        BadInputError: it cannot be written, or another tuner holds it.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = folder.lock.open("w")
    except OSError as error:
        raise BadInputError(
            f"--out {folder.path} cannot be written: {error.strerror or error}",
            fix="choose another folder",
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(
                f"another varseq-tune works in {folder.path}",
                fix="wait for it, or choose another --out",
            ) from None
        yield


def put_aside(folder: StudyFolder) -> None:
    """Rename an earlier study, its trials and confirmation: study.db to study.1.db, and so on.

    Its best.yaml and tables stay until the new study has its first outcome.

    Args:
        folder: Held by this process.
    """
    number = 1
    while _aside(folder.storage, number).exists():
        number += 1
    for path in (folder.storage, folder.trials, folder.confirmations):
        if path.exists():
            path.rename(_aside(path, number))


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
