"""A real PostgreSQL server for the tests: started from a wheel, on a socket, gone at the end."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

UNPRIVILEGED = "nobody"


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of a server of its own in a new folder; skips the test if there is none to run."""
    pgserver = pytest.importorskip("pgserver", reason="pgserver is not installed")
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    package = Path(pgserver.__file__).parent
    # Not tmp_path: its parents are closed to others, and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    try:
        if os.geteuid() == 0:
            package = _open_to_all(package, folder)
        programs = package / "pginstall" / "bin"
        data = folder / "data"
        _run(programs / "initdb", "-D", data, "-U", "tuner", "--auth=trust", "--encoding=UTF8")
        options = f"-c listen_addresses='' -k {folder} -c fsync=off"
        log = folder / "log"
        _run(programs / "pg_ctl", "-D", data, "-w", "-o", options, "-l", log, "start")
        try:
            yield f"postgresql://tuner@/postgres?host={folder}"
        finally:
            _run(programs / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def _open_to_all(package: Path, folder: Path) -> Path:
    """PostgreSQL refuses to run as root: a copy that another user may run.

    The package itself would open the home folder to all users, and make a user of its own.
    """
    for name in (package.name, f"{package.name}.libs"):
        shutil.copytree(package.with_name(name), folder / name, symlinks=True)
    account = pwd.getpwnam(UNPRIVILEGED)
    folder.chmod(0o755)
    os.chown(folder, account.pw_uid, account.pw_gid)
    return folder / package.name


def _run(program: Path, *arguments: object) -> None:
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    # The server inherits what it writes to: a pipe would never end.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [program, *map(str, arguments)],
            user=user,
            group=pwd.getpwnam(user).pw_gid if user else None,
            extra_groups=[] if user else None,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        output.seek(0)
        assert done.returncode == 0, output.read().decode(errors="replace")
