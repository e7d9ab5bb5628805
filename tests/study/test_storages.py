"""What a user may give as a storage, what is wrong with it, and what the dashboard shows of it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuner_process import SPACE

from tuner.errors import BadInputError
from tuner.study.optuna_board import ConfirmationBoard
from tuner.study.optuna_json import MAX_CHARACTERS, join_attribute, split_attribute
from tuner.study.optuna_storage import describe_storage, open_storage
from tuner.study.optuna_study import OptunaStudy

SECRET = "s3cr3t"


def refused(text: str | Path) -> BadInputError:
    """The refusal of a storage, which is one line and hides the password."""
    with pytest.raises(BadInputError) as caught:
        open_storage(text)
    shown = "".join(traceback.format_exception(caught.value))
    said = f"{caught.value} {caught.value.problem} {caught.value.fix}"
    assert SECRET not in said and "\n" not in said
    # The source line of the test may be part of a traceback, its values are not.
    assert SECRET not in shown
    return caught.value


class TestKinds:
    @pytest.mark.parametrize("make", [str, Path, "sqlite:///{}".format])
    def test_a_file_is_a_database(self, tmp_path, make):
        path = tmp_path / "a folder: 100%" / "study {1}.db"
        path.parent.mkdir()
        OptunaStudy(make(path), "one", SPACE, 0).set_note("a", 1)
        assert OptunaStudy(path, "one", SPACE, 0).note("a") == 1
        assert path.read_bytes().startswith(b"SQLite format 3")

    def test_a_journal(self, tmp_path):
        text = f"journal:{tmp_path / 'journal.log'}"
        OptunaStudy(text, "one", SPACE, 0).set_note("a", 1)
        assert OptunaStudy(text, "one", SPACE, 0).note("a") == 1

    def test_a_server_whose_password_has_every_kind_of_sign(self, postgres):
        # The server trusts everybody; what is tested is that the URL reaches it.
        with_password = postgres.replace("tuner@", "tuner:%40{x}%25%2F@")
        OptunaStudy(with_password, "password", SPACE, 0).set_note("a", 1)
        assert OptunaStudy(postgres, "password", SPACE, 0).note("a") == 1

    def test_several_studies_live_in_one_storage(self, tmp_path):
        storage = tmp_path / "study.db"
        for name in ("one", "two"):
            study = OptunaStudy(storage, name, SPACE, 0)
            study.tell_measured(study.ask().number, 1.0, {"of": name})
        assert OptunaStudy(storage, "one", SPACE, 0).told()[0].outcome == {"of": "one"}


class TestDescription:
    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("results/study.db", "results/study.db"),
            ("journal:/data/j.log", "journal:/data/j.log"),
            ("sqlite:///study.db", "sqlite:///study.db"),
            ("postgresql://a@db:5432/s", "postgresql://a@db:5432/s"),
            (f"postgresql://a:{SECRET}@db/s", "postgresql://a:***@db/s"),
            (f"mysql://a:{SECRET}@x{SECRET}@db/s", "mysql://a:***@db/s"),
            (
                f"postgresql://db/s?user=a&password={SECRET}",
                "postgresql://db/s?user=a&password=***",
            ),
            (f"postgresql://a:{SECRET}/db", "postgresql:..."),
        ],
    )
    def test_has_no_password(self, text, shown):
        assert describe_storage(text) == shown


class TestRefusals:
    def test_an_unknown_kind(self):
        error = refused(f"redis://a:{SECRET}@db")
        assert error.problem == "no storage is called redis:"
        assert "postgresql://" in error.fix and "journal:" in error.fix

    @pytest.mark.parametrize("text", ["", "journal:", " "])
    def test_no_name(self, text):
        assert refused(text).problem == "the storage has no name"

    def test_a_slash_too_few(self):
        assert "//" in refused(f"postgresql:/a:{SECRET}@db").problem

    def test_a_database_in_memory(self):
        assert refused("sqlite://").fix == "give a file"

    def test_a_server_that_is_not_there(self):
        pytest.importorskip("psycopg2")
        error = refused(f"postgresql://a:{SECRET}@127.0.0.1:1/studies")
        assert error.problem.startswith("postgresql://a:***@127.0.0.1:1/studies cannot be opened")
        assert "refused" in error.problem and "server runs" in error.fix

    def test_a_user_whom_the_server_does_not_know(self, postgres):
        error = refused(postgres.replace("tuner@", f"stranger:{SECRET}@"))
        assert 'role "stranger" does not exist' in error.problem

    def test_a_user_who_may_not_make_tables(self, postgres):
        import psycopg2

        with contextlib.closing(psycopg2.connect(postgres)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("CREATE ROLE guest LOGIN")
                cursor.execute("CREATE DATABASE closed")
        url = postgres.replace("tuner@/postgres", f"guest:{SECRET}@/closed")
        error = refused(url)
        assert "permission denied" in error.problem and "create tables" in error.fix

    def test_a_driver_that_is_not_installed(self):
        error = refused(f"postgresql+pg8000://a:{SECRET}@db/s")
        assert "needs the package pg8000" in error.problem
        assert error.fix == "pip install pg8000"

    @pytest.mark.parametrize(
        "text",
        [
            f"postgresql://a:{SECRET}/db",
            f"mysql://a:b@{SECRET}@db/s",
            f"mysql://a:{SECRET}@db:x/s",
        ],
    )
    def test_a_url_that_cannot_be_read(self, text):
        assert "%40" in refused(text).fix

    def test_a_folder_and_a_file_that_are_not_a_study(self, tmp_path):
        (tmp_path / "other.db").write_bytes(b"not a database at all" * 100)
        (tmp_path / "other.log").write_bytes(b"not a journal\n" * 3)
        for text in (
            tmp_path,
            tmp_path / "missing" / "study.db",
            tmp_path / "other.db",
            f"journal:{tmp_path / 'missing' / 'journal.log'}",
            f"journal:{tmp_path / 'other.log'}",
        ):
            error = refused(text)
            assert "cannot be opened as a study: " in error.problem
            assert error.fix == "give --new-study to start over, or another --study/--out"

    def test_a_storage_that_breaks_in_the_middle(self, tmp_path):
        path = tmp_path / "study.db"
        study = OptunaStudy(path, "one", SPACE, 0)
        path.write_bytes(b"broken" * 1000)
        with pytest.raises(BadInputError, match="cannot be read or written") as caught:
            study.ask()
        assert "\n" not in str(caught.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


class TestLargeValues:
    @given(value=PLAIN, times=st.integers(0, 3), character=st.sampled_from('a"\\ä€'))
    def test_come_back_and_no_part_is_too_large(self, value, times, character):
        whole = {"value": value, "text": character * (times * MAX_CHARACTERS // 2)}
        parts = dict(split_attribute("key", whole))
        assert join_attribute(parts, "key") == whole
        assert list(parts)[-1] == "key"
        assert all(len(json.dumps(part)) < 65_535 for part in parts.values())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_dashboard(storage: Path) -> Iterator[str]:
    """The address of a dashboard on a storage, stopped at the end."""
    port = free_port()
    code = (
        "import sys, optuna_dashboard\n"
        "optuna_dashboard.run_server(sys.argv[1], host='127.0.0.1', port=int(sys.argv[2]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, f"sqlite:///{storage}", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process)
        yield address
    finally:
        process.kill()
        process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the dashboard has ended"
        with contextlib.suppress(OSError):
            get(f"{address}/api/studies")
            return
        time.sleep(0.1)
    raise AssertionError("the dashboard does not answer")


def get(address: str) -> Any:
    # Loopback needs no proxy, whatever the environment says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=30) as answer:
        return json.loads(answer.read())


class TestDashboard:
    def test_shows_the_study_and_its_confirmation(self, tmp_path):
        pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
        storage = tmp_path / "study.db"
        study = OptunaStudy(storage, "varseq-tune", SPACE, 0)
        study.enqueue_baselines(["packing"])
        asked = [study.ask() for _ in range(4)]
        study.tell_measured(asked[0].number, 50.0, {"status": "ok"})
        study.report(asked[1].number, 1, 11.0)
        study.tell_measured(asked[1].number, 12.5, {"status": "ok"}, violation=0.25)
        study.tell_failed(asked[2].number, {"status": "oom"})
        board = ConfirmationBoard(storage, "varseq-tune")
        run = board.take(["trial 1"], 1)
        assert run is not None
        board.put(run.number, 99.0, {})
        with running_dashboard(storage) as address:
            studies = get(f"{address}/api/studies")["study_summaries"]
            ids = {item["study_name"]: item["study_id"] for item in studies}
            assert set(ids) == {"varseq-tune", "varseq-tune-confirmation"}
            shown, confirmed = (
                get(f"{address}/api/studies/{ids[name]}?after=0")["trials"] for name in sorted(ids)
            )
        assert [trial["state"] for trial in shown] == ["Complete", "Complete", "Pruned", "Running"]
        assert [trial.get("values") for trial in shown[:3]] == [[50.0], [12.5], None]
        assert shown[1]["intermediate_values"] == [{"step": 1, "value": 11.0}]
        assert [max(trial["constraints"]) for trial in shown[:3]] == [0.0, 0.25, 1.0]
        attributes = {item["key"]: item["value"] for item in shown[0]["user_attrs"]}
        assert "packing" in attributes["baseline"]
        assert [trial["values"] for trial in confirmed] == [[99.0]]
