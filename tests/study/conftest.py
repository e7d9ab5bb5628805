"""Storages of every kind, for the tests that hold for all of them."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_case import running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server; the databases of all tests of a process are one."""
    with running_postgres() as url:
        yield url


@pytest.fixture
def threads() -> set[threading.Thread]:
    """Those that other tests of the process have left: MindSpore's profiler has some."""
    return set(threading.enumerate())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where the system has one: a study waits for the disk 20 times a trial."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture(params=["sqlite", "journal", "postgresql"])
def storage(request: pytest.FixtureRequest, folder: Path) -> str:
    """A storage as the user gives it."""
    if request.param == "sqlite":
        return str(folder / "study.db")
    if request.param == "journal":
        return f"journal:{folder / 'study.journal'}"
    url: str = request.getfixturevalue("postgres")
    return url


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A study of this test alone, in whatever storage."""
    return request.node.name
