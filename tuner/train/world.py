"""The processes that train one run together, and which of them this one is.

Read from the environment, before MindSpore starts: `msrun` tells its workers RANK_ID and RANK_SIZE
and starts one more process, the scheduler, with the same command; `mpirun` of Open MPI has names
of its own. Source: mindspore/parallel/cluster/process_entity of MindSpore 2.10; Open MPI 4.1,
"Run-time tuning"; mpirun has not been run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.errors import BadInputError

ROLE_VARIABLE = "MS_ROLE"
SCHEDULER_ROLE = "MS_SCHED"

MSRUN_NAMES = ("RANK_ID", "RANK_SIZE", "DEVICE_ID")
OPEN_MPI_NAMES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)


@dataclass(frozen=True, kw_only=True)
class World:
    """One process among all that train a run.

    Attributes:
        rank: In [0, size).
        size: Processes, each on a device of its own; >= 1.
        local_rank: Number among those of its machine: of its device.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether it is the one that writes files."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self.size == 1


ALONE = World()


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Whether this process only brings the ranks together."""
    return environment.get(ROLE_VARIABLE) == SCHEDULER_ROLE


def world_of(environment: Mapping[str, str]) -> World:
    """What a launcher has said; alone where there is none.

    Raises:
        BadInputError: it has said a part only, or what makes no sense.
    """
    if OPEN_MPI_NAMES[0] in environment:
        return _read(environment, OPEN_MPI_NAMES, "start it with mpirun of Open MPI")
    if ROLE_VARIABLE in environment or environment.get("RANK_SIZE", "1") != "1":
        return _read(
            environment,
            MSRUN_NAMES,
            "on several machines give --node-rank (of msrun: --node_rank) on each",
        )
    return ALONE


def _read(environment: Mapping[str, str], names: tuple[str, str, str], fix: str) -> World:
    rank_name, size_name, local_name = names
    try:
        rank, size = int(environment[rank_name]), int(environment[size_name])
        local_rank = int(environment.get(local_name, "0"))
    except KeyError as error:
        raise BadInputError(f"the launcher did not set {error.args[0]}", fix=fix) from None
    except ValueError as error:
        raise BadInputError(f"{rank_name}, {size_name}, {local_name}: {error}", fix=fix) from None
    if not 0 <= rank < size:
        raise BadInputError(f"{rank_name} is {rank}, but {size_name} is {size}", fix=fix)
    return World(rank=rank, size=size, local_rank=local_rank)
