"""Opening the storage of a study: a SQLite file, a database server, or a journal file.

| text | storage |
|---|---|
| a path | SQLite file; the default |
| `sqlite:///PATH` | the same |
| `postgresql://USER:PASSWORD@HOST:PORT/DATABASE` | PostgreSQL, by psycopg2 |
| `mysql://USER:PASSWORD@HOST:PORT/DATABASE` | MySQL, by PyMySQL |
| `journal:PATH` | a journal file, which works on network file systems too |

Passwords never leave this module: neither in a description nor in an error.
"""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from urllib.parse import unquote

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from tuner.errors import BadInputError

JOURNAL = "journal:"
KINDS = "a file, sqlite:///PATH, postgresql://..., mysql://... or journal:PATH"
DRIVERS = {
    # SQLAlchemy's own choice of a driver differs from version to version.
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg2",
    "postgres": "postgresql+psycopg2",
    "mysql": "mysql+pymysql",
}
PACKAGES = {"psycopg2": "psycopg2-binary", "pymysql": "PyMySQL", "MySQLdb": "mysqlclient"}
SQLITE_WAIT_S = 60.0
OPEN_ATTEMPTS = 8
# Two processes make the tables of a new storage at the same time: one of them meets these.
RACES = ("already exists", "UNIQUE constraint", "duplicate key", "Duplicate entry", "is locked")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.+-]+):")
MASK = "***"


class Placed(Protocol):
    """Something that is kept in a storage."""

    place: str
    """The storage in words."""


Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")
PlacedT = TypeVar("PlacedT", bound=Placed)


def with_storage_errors(
    method: Callable[Concatenate[PlacedT, Parameters], Answer],
) -> Callable[Concatenate[PlacedT, Parameters], Answer]:
    """Turn what a storage raises (a full disk, a server that is gone) into one line."""

    @functools.wraps(method)
    def wrapped(
        self: PlacedT, /, *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Answer:
        try:
            return method(self, *arguments, **options)
        except (
            optuna.exceptions.StorageInternalError,
            sqlalchemy.exc.SQLAlchemyError,
            OSError,
        ) as error:
            raise BadInputError(
                f"{self.place} cannot be read or written: {_reason(error)}",
                fix="make room for it, or bring it back; the same command goes on from the "
                "finished trials",
            ) from error

    return wrapped


def open_storage(text: str | Path) -> BaseStorage:
    """Open a storage, or make it.

    Args:
        text: See the table of this module; a Path is always a file.

    Raises:
        BadInputError: there is no such kind of storage, or it cannot be opened.
    """
    _check_kind(text)
    try:
        if isinstance(text, str) and text.startswith(JOURNAL):
            return JournalStorage(JournalFileBackend(text.removeprefix(JOURNAL)))
        return _open_database(text)
    except BadInputError:
        raise
    except Exception as error:
        # Whatever a driver says of a broken file or an absent server, it is the user's to mend.
        raise cannot_open(text, error) from None


def open_study(
    storage: BaseStorage,
    text: str | Path,
    name: str,
    sampler: optuna.samplers.BaseSampler | None = None,
) -> optuna.Study:
    """Open a study of values to maximise, or create it.

    Args:
        storage: Opened.
        text: What it was opened by, for errors.
        name: Of the study.
        sampler: Makes its proposals; None for a study that is not asked for any.

    Raises:
        BadInputError: the storage is not one of Optuna, or cannot be written.
    """
    try:
        return optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            sampler=sampler,
        )
    except Exception as error:
        raise cannot_open(text, error) from None


def describe_storage(text: str | Path) -> str:
    """The storage in words that may be printed: a password in it is masked.

    Example:
        >>> describe_storage("postgresql://tuner:secret@db/studies")
        'postgresql://tuner:***@db/studies'
    """
    if isinstance(text, Path) or not _scheme(text) or text.startswith(JOURNAL):
        return str(text)
    try:
        sqlalchemy.engine.make_url(text)
    except Exception:
        # What stands where cannot be told, so nothing of it is shown.
        return f"{_scheme(text)}:..."
    # Up to the last @: a password may hold one that was not encoded.
    masked = re.sub(r"(://[^:/@]*):.*@", rf"\1:{MASK}@", text)
    return re.sub(r"(?i)([?&]\w*(?:password|passwd|pwd)\w*=)[^&]*", rf"\1{MASK}", masked)


def cannot_open(text: str | Path, error: Exception) -> BadInputError:
    """The refusal of a storage, for whatever reason, in one line and without its password.

    Args:
        text: As given by the user.
        error: What was met.
    """
    place, reason = describe_storage(text), _reason(error)
    for secret in _secrets(str(text)):
        reason = reason.replace(secret, MASK)
    missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    if isinstance(missing, ImportError) and missing.name:
        return BadInputError(
            f"{place} needs the package {missing.name}, which is not installed",
            fix=f"pip install {PACKAGES.get(missing.name, missing.name)}",
        )
    fix = "give --new-study to start over, or another --study/--out"
    if not isinstance(text, Path) and _scheme(text) not in ("", "sqlite", "journal"):
        fix = "check that the server runs and that the user may create tables in the database"
    return BadInputError(f"{place} cannot be opened as a study: {reason}", fix=fix)


def _check_kind(text: str | Path) -> None:
    if isinstance(text, Path):
        return
    scheme = _scheme(text)
    if scheme and scheme != "journal" and scheme.split("+")[0] not in DRIVERS:
        raise BadInputError(
            f"no storage is called {scheme}:",
            fix=f"give {KINDS}; for a file of that name write ./{scheme}:...",
        )
    if scheme not in ("", "journal") and "://" not in text:
        raise BadInputError(f"{scheme}: is not followed by //", fix=f"give {KINDS}")
    if not text.removeprefix(JOURNAL).strip():
        raise BadInputError("the storage has no name", fix=f"give {KINDS}")


def _open_database(text: str | Path) -> RDBStorage:
    url = _url(text)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        if not url.database or url.database == ":memory:":
            raise BadInputError("a database in memory ends with its process", fix="give a file")
        options = {"connect_args": {"timeout": SQLITE_WAIT_S}}
    # Optuna formats the URL as a template: braces in a password would break it.
    address = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    for attempt in range(OPEN_ATTEMPTS):
        try:
            storage = RDBStorage(address, engine_kwargs=options)
            break
        except Exception as error:
            if attempt == OPEN_ATTEMPTS - 1 or not any(word in str(error) for word in RACES):
                raise
            time.sleep(0.1 + 0.2 * random.random())
    if url.get_backend_name() == "sqlite":
        _lock_whole_transactions(storage.engine)
    return storage


def _url(text: str | Path) -> sqlalchemy.engine.URL:
    if isinstance(text, Path) or not _scheme(text):
        return sqlalchemy.engine.URL.create("sqlite", database=str(text))
    try:
        url = sqlalchemy.engine.make_url(text)
    except Exception:
        # The words of this error may quote a part of the password.
        raise BadInputError(
            f"{describe_storage(text)} is not a URL that can be read",
            fix="write it as scheme://user:password@host:port/database, with @ : / in a password "
            "as %40 %3A %2F",
        ) from None
    if "@" in (url.host or ""):
        raise BadInputError(
            f"{describe_storage(text)} has an @ in its password",
            fix="write it as %40",
        )
    return url.set(drivername=DRIVERS.get(url.drivername, url.drivername))


def _lock_whole_transactions(engine: sqlalchemy.engine.Engine) -> None:
    """Let a SQLite transaction hold the database from its first read on.

    SQLite has no SELECT FOR UPDATE: two processes would read the same waiting trial and both
    start it.
    """

    @sqlalchemy.event.listens_for(engine, "connect")
    def leave_transactions_to_us(connection: Any, record: object) -> None:
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    # Connections that were made before have no such rule.
    engine.dispose()


def _scheme(text: str) -> str:
    """`postgresql` of `postgresql://...`; empty for a plain path."""
    match = SCHEME.match(text)
    return match[1].lower() if match else ""


def _secrets(text: str) -> list[str]:
    """What in a URL must not be shown, as written and decoded; longest first."""
    found = re.findall(r"://[^:/@]*:(.*)@", text)
    found += re.findall(r"(?i)[?&]\w*(?:password|passwd|pwd)\w*=([^&]*)", text)
    return sorted({*found, *map(unquote, found)} - {""}, key=len, reverse=True)


def _reason(error: BaseException) -> str:
    text = str(error.__cause__ or error).strip() or type(error).__name__
    return text.splitlines()[0]
