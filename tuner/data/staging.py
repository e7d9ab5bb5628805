"""Files that appear under their names only when all of them are complete.

They are written in a hidden folder beside the target (the same file system, so that a rename is
enough) whose name carries host and process, and which is removed whatever happens. Only SIGKILL
or a power cut can leave it behind; the next run for the same target then removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from tuner.errors import BadInputError


class StagingFolder:
    """A temporary folder beside the target.

    Args:
        target: The file (or the common name of the files) that will be written.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._host = re.sub(r"\W", "-", socket.gethostname())
        self._made_folders: list[Path] = []
        self.path = target.with_name(f".{target.name}.{self._host}.{os.getpid()}.tmp")

    def open(self) -> None:
        """Make the folder, and remove those that killed processes left behind.

        Raises:
            BadInputError: If the folder of the target cannot be made or written to.
        """
        try:
            self._make_target_folder()
            self._remove_stale()
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            self.close(keep_folders=False)
            raise BadInputError(
                f"cannot write to the folder {self._target.parent}: {error.strerror}",
                fix="name a folder that you may write to",
            ) from error

    def close(self, *, keep_folders: bool) -> None:
        """Remove the folder; also the folders made for the target unless they are to be kept."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not keep_folders:
            self._remove_made_folders()

    def publish(self, names: Sequence[str], *, remove: Sequence[Path] = ()) -> None:
        """Move the finished files to the target's folder under the same names.

        Args:
            names: Files in the staging folder, in the order in which they shall appear: what makes
                the others usable (an index) last.
            remove: Older files that the new ones take the place of.
        """
        for name in names:
            _flush_to_disk(self.path / name)
        for path in remove:
            path.unlink(missing_ok=True)
        placed: list[Path] = []
        try:
            for name in names:
                placed.append(self._target.with_name(name))
                os.replace(self.path / name, placed[-1])
        except BaseException:
            for path in placed:
                path.unlink(missing_ok=True)
            raise

    def _make_target_folder(self) -> None:
        folder = self._target.parent
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
            self._made_folders.append(one)

    def _remove_made_folders(self) -> None:
        with contextlib.suppress(OSError):  # not empty: someone else uses it by now
            for folder in reversed(self._made_folders):
                folder.rmdir()

    def _remove_stale(self) -> None:
        pattern = re.compile(
            rf"\.{re.escape(self._target.name)}\.{re.escape(self._host)}\.(\d+)\.tmp"
        )
        for folder in self._target.parent.iterdir():
            match = pattern.fullmatch(folder.name)
            if match and not _is_running(int(match[1])):
                shutil.rmtree(folder, ignore_errors=True)


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
