"""Read this process's rank and size from its launcher's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from flowchan.errors import GroupError


class Launched(NamedTuple):
    """A process's rank, its job and the job's size, according to the launcher.

    ``job`` is the same for all members of a job, and differs between jobs on this host. ``local_size`` is the
    number of members on this host.
    """

    rank: int
    size: int
    job: str
    local_size: int
    launcher: str


class Launcher(NamedTuple):
    """Names of a launcher's environment variables.

    Each field names the variables for one value: the rank, the size, the number of members on this host
    (``local``), or the job's name (``job``). ``ppid`` is true if all of the launcher's processes on a host
    have the same parent.
    """

    name: str
    rank: str
    size: str
    local: tuple[str, ...]
    job: tuple[str, ...]
    ppid: bool


LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_WORLD_SIZE",),
             ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), False),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_SIZE",),
             ("PMIX_NAMESPACE",), True),
    Launcher("PMI", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
             ("PMI_JOBID", "PMI_ID_JOB"), True),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", (), ("SLURM_JOB_ID", "SLURM_STEP_ID"), False),
)  # fmt: skip


def place(environ: Mapping[str, str] = os.environ) -> Launched:
    """Read this process's rank and size from its launcher's variables.

    Args:
        environ: Environment variables (default: ``os.environ``).

    Returns:
        The rank and size. A process without a launcher is the only member.

    Raises:
        GroupError: The variables are not numbers, or the rank is out of range.
    """
    for launcher in LAUNCHERS:
        if launcher.rank in environ and launcher.size in environ and not _is_srun_with_pmi(launcher, environ):
            return _place_by(launcher, environ)
    return Launched(0, 1, f"alone {os.getpid()}", 1, "")


def _is_srun_with_pmi(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether srun set the PMI variables, which then do not describe this host."""
    return (
        launcher.name == "PMI"
        and not any(environ.get(name) for name in launcher.local)
        and environ.get("SLURM_PROCID") == environ[launcher.rank]
        and environ.get("SLURM_NTASKS") == environ[launcher.size]
    )


class SlurmStep(NamedTuple):
    """A Slurm job step: its unique name, and the address of srun's host."""

    name: str
    address: str


def slurm_step(environ: Mapping[str, str] = os.environ) -> SlurmStep | None:
    """Return this process's Slurm job step, or ``None`` if Slurm's variables are missing."""
    job, step, address = (
        environ.get(f"SLURM_{name}") for name in ("JOB_ID", "STEP_ID", "LAUNCH_NODE_IPADDR")
    )
    if not job or not step or not address:
        return None
    cluster, restart = (environ.get(f"SLURM_{name}", "0") for name in ("CLUSTER_NAME", "RESTART_COUNT"))
    return SlurmStep(f"slurm-{cluster}-{job}.{step}.{restart}".replace("/", "_"), address)


def _place_by(launcher: Launcher, environ: Mapping[str, str]) -> Launched:
    try:
        rank, size = int(environ[launcher.rank]), int(environ[launcher.size])
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        raise GroupError(
            f"{launcher.rank} must be an int from 0 to {launcher.size} - 1, got "
            f"{launcher.rank}={environ[launcher.rank]!r} with {launcher.size}={environ[launcher.size]!r}"
        )
    local_sizes = (int(environ[name]) for name in launcher.local if environ.get(name, "").isdigit())
    local_size = next(local_sizes, _slurm_local_size(environ) if launcher.name == "Slurm" else size)
    named = [environ.get(name, "") for name in launcher.job]
    parent = [str(os.getppid())] if launcher.ppid else []
    return Launched(rank, size, "\n".join([launcher.name, *named, *parent]), local_size, launcher.name)


def _slurm_local_size(environ: Mapping[str, str]) -> int:
    """Return how many tasks of this job step Slurm started on this node.

    Slurm lists the task counts of all nodes, for example ``2(x3),1``.
    """
    counts = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_NTASKS"]).split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts[int(environ.get("SLURM_NODEID", 0))]
