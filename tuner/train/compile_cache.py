"""Compiled graphs kept on disk for the warm-up after --resume; a wrong one is never trained on.

MindSpore writes the N-th graph that a process compiles to `compile_cache_N.mindir` and takes the
N-th file for the N-th compile of the next process, whatever its shape, level or constants (2.10,
measured: other order of shapes, a wrong number without a word). So:

- A folder for every key (see `cache_key`), with nothing compiled before the warm-up.
- A manifest, written last, holds the key, the order, a hash of every file and what each graph gave
  for a known batch. Without a whole and fitting one the folder is removed.
- Every graph from the cache is compared with a fresh value (see `graph_check`). If one is off, or
  fails, or an earlier attempt died with it, the folder is removed and the process starts over:
  MindSpore keeps its place in the order, so only a new process compiles cleanly.

On CPU with 2.10 the file holds the graph before kernels are chosen for it. This never ran on
Ascend, where MindSpore caches the kernels too.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.batching.grouping import Shape
from tuner.config.codec import write_text
from tuner.train.cache_key import CacheKey
from tuner.train.checksum import file_sha256, plain_sha256
from tuner.train.device import CACHE_VARIABLE
from tuner.train.graph_file import is_whole

CACHE_FOLDER = "compile_cache"
MANIFEST_FILE = "manifest.json"
IN_USE_FILE = "in_use"
GRAPH_SUFFIX = ".mindir"

PATH_VARIABLE = "MS_COMPILER_CACHE_PATH"
FRESH_VARIABLE = "VARSEQ_FRESH_GRAPHS"
"""Set for a process that starts over: whatever graphs are there are removed, not read."""

# A graph from the cache is given up after so many times the seconds of its compile, and these.
STUCK_FACTOR = 3.0
STUCK_LEAST_S = 60.0


class UnsoundCacheError(Exception):
    """A cached graph is wrong or fails; its folder is removed, this process must start over."""


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """What a graph gave when it was compiled.

    Attributes:
        shape: (B, L); None for the update.
        compile_s: Seconds of its first call.
        values: Of the known batch: the loss, then the square sum of every gradient buffer; of
            the update the square sums of all that it changes.
    """

    shape: Shape | None
    compile_s: float
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a whole folder says about itself.

    Attributes:
        key: Parts of the key.
        graphs: In the order of their compiles.
        files: Path in the folder -> sha256 of its content.
    """

    key: dict[str, Any]
    graphs: tuple[GraphRecord, ...]
    files: dict[str, str]


class CompileCache:
    """The folder of one key: filled by this process, or read by it.

    Attributes:
        known: What the graphs gave when they were compiled; None while it is being filled.
    """

    def __init__(self, folder: Path, key: CacheKey, known: tuple[GraphRecord, ...] | None) -> None:
        self.known = known
        self._folder = folder
        self._key = key

    @contextmanager
    def compiles(self) -> Iterator[None]:
        """Graphs compiled inside come from the folder, or go there.

        The variables are set for no longer: child processes and graphs that nobody checks must
        not see them. MindSpore reads the first at every compile, the second at the first one.
        """
        before = {name: os.environ.get(name) for name in (CACHE_VARIABLE, PATH_VARIABLE)}
        os.environ[CACHE_VARIABLE] = "1"
        os.environ[PATH_VARIABLE] = str(self._folder.resolve())
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def mark_in_use(self) -> None:
        """Graphs from it are about to run: a process that dies with one leaves the mark."""
        (self._folder / IN_USE_FILE).touch()

    def clear_mark(self) -> None:
        """All that ran is checked."""
        (self._folder / IN_USE_FILE).unlink()

    def finish(self, graphs: Sequence[GraphRecord]) -> None:
        """Write the manifest of a folder that this process has filled.

        Raises:
            OSError: a file is missing, cut off or cannot be read, or the disk is full.
        """
        files = _cached_files(self._folder)
        graph_files = [file for name, file in files.items() if name.endswith(GRAPH_SUFFIX)]
        num_whole = sum(map(is_whole, graph_files))
        if num_whole < max(len(graphs), len(graph_files)):
            raise OSError(
                f"{num_whole} whole files for {len(graphs)} graphs; is the disk full "
                f"({shutil.disk_usage(self._folder).free:,} bytes free)?"
            )
        hashes = {name: file_sha256(file) for name, file in files.items()}
        manifest = Manifest(key=dict(self._key.parts), graphs=tuple(graphs), files=hashes)
        write_text(self._folder / MANIFEST_FILE, format_manifest(manifest))

    def remove(self) -> None:
        """Take the folder away."""
        remove_folder(self._folder)


def open_cache(root: Path, key: CacheKey, notice: Callable[[str], None]) -> CompileCache | None:
    """Find the folder of a key; what does not fit is removed.

    Args:
        root: Holds a folder for every key.
        key: Of the run.
        notice: Told why a folder is not used.

    Returns:
        To be read if it is whole, else empty and to be filled; None if it cannot be written.
    """
    folder = root / key.digest
    known = None
    if os.environ.pop(FRESH_VARIABLE, None) is None and folder.exists():
        try:
            known = _read_whole(folder, key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            notice(f"compile cache not used and removed: {error}")
    try:
        if known is None:
            remove_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        notice(f"going on without a compile cache: {error}")
        return None
    return CompileCache(folder, key, known)


def format_manifest(manifest: Manifest) -> str:
    """As JSON, with a checksum of itself."""
    plain = json.loads(json.dumps(asdict(manifest)))
    return json.dumps({"manifest": plain, "sha256": plain_sha256(plain)}, indent=1)


def parse_manifest(text: str) -> Manifest:
    """The inverse of `format_manifest`.

    Raises:
        ValueError, KeyError, TypeError: it is not whole.
    """
    content = json.loads(text)
    plain = content["manifest"]
    if content["sha256"] != plain_sha256(plain):
        raise ValueError(f"{MANIFEST_FILE} does not match its checksum")
    graphs = tuple(
        GraphRecord(
            shape=None if graph["shape"] is None else tuple(graph["shape"]),
            compile_s=float(graph["compile_s"]),
            values=tuple(map(float, graph["values"])),
        )
        for graph in plain["graphs"]
    )
    return Manifest(key=plain["key"], graphs=graphs, files=dict(plain["files"]))


def remove_folder(folder: Path) -> None:
    """Take a folder away; MindSpore makes its files read-only, which hinders nobody.

    Raises:
        OSError: it is still there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise OSError(f"{folder} cannot be removed")


@contextmanager
def time_limit(seconds: float, on_over: Callable[[], None]) -> Iterator[None]:
    """Call a function from another thread if the block takes too long.

    Args:
        seconds: The limit, > 0.
        on_over: Called once, while the block may still be running.
    """
    timer = threading.Timer(seconds, on_over)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read_whole(folder: Path, key: CacheKey) -> tuple[GraphRecord, ...]:
    """The graphs of a folder that may be used.

    Raises:
        OSError, ValueError, KeyError, TypeError: it may not, and why.
    """
    if (folder / IN_USE_FILE).exists():
        raise ValueError("the last process that read it ended before its graphs were checked")
    if not (folder / MANIFEST_FILE).exists():
        raise ValueError("its warm-up was not finished")
    manifest = parse_manifest((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    for name, value in key.parts.items():
        if manifest.key.get(name) != value:
            raise ValueError(f"{MANIFEST_FILE} says another {name}")
    shapes = [list(graph.shape) for graph in manifest.graphs if graph.shape is not None]
    if shapes != key.parts["shapes"]:
        raise ValueError(f"{MANIFEST_FILE} has its shapes in another order")
    files = _cached_files(folder)
    if set(files) != set(manifest.files):
        raise ValueError(f"its files are not those of {MANIFEST_FILE}")
    for name, file in files.items():
        if file_sha256(file) != manifest.files[name]:
            raise ValueError(f"{name} was changed")
    return manifest.graphs


def _cached_files(folder: Path) -> dict[str, Path]:
    """What MindSpore wrote: path in the folder -> file; empty files do not count."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)
    own = {folder / MANIFEST_FILE, folder / IN_USE_FILE}
    return {str(file.relative_to(folder)): file for file in files if file not in own}
