"""Which rank a process is, by what launchers set."""

from __future__ import annotations

import pytest

from tuner.errors import BadInputError
from tuner.train.world import ALONE, World, is_scheduler, world_of


@pytest.mark.parametrize("environment", [{}, {"RANK_ID": "0"}, {"RANK_SIZE": "1"}])
def test_without_a_launcher_a_process_is_alone(environment):
    assert world_of(environment) == ALONE
    assert ALONE.is_alone
    assert ALONE.is_first


def test_ranks_of_msrun():
    environment = {
        "MS_ROLE": "MS_WORKER", "RANK_ID": "5", "RANK_SIZE": "8", "DEVICE_ID": "1",
    }  # fmt: skip
    world = world_of(environment)
    assert world == World(rank=5, size=8, local_rank=1)
    assert not world.is_first
    assert not is_scheduler(environment)
    assert is_scheduler({**environment, "MS_ROLE": "MS_SCHED"})


def test_ranks_of_a_rank_table():
    assert world_of({"RANK_ID": "1", "RANK_SIZE": "2"}) == World(rank=1, size=2)


def test_ranks_of_open_mpi():
    environment = {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }  # fmt: skip
    assert world_of(environment) == World(rank=3, size=4, local_rank=1)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"MS_ROLE": "MS_WORKER", "RANK_SIZE": "2"}, "did not set RANK_ID"),
        ({"RANK_SIZE": "2", "RANK_ID": "two"}, "RANK_ID, RANK_SIZE, DEVICE_ID: invalid literal"),
        ({"RANK_SIZE": "2", "RANK_ID": "2"}, "RANK_ID is 2, but RANK_SIZE is 2"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "did not set OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_half_a_launcher_is_refused(environment, problem):
    with pytest.raises(BadInputError, match=problem):
        world_of(environment)
