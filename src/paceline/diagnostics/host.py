"""Checks of the processors, the memory, the limits, the disk and the clock."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from shutil import disk_usage

import psutil

from paceline.diagnostics.check import Check, Status
from paceline.utils.wording import counted

GB = 1e9
SHARED_MEMORY = Path("/dev/shm")
FEW_FILES, ENOUGH_FILES = 256, 1024
LITTLE_SHARED_BYTES = 256e6
LITTLE_DISK_BYTES = 1e9
TRIAL_BYTES = 1 << 20
COARSE_CLOCK_S = 1e-3
TRIAL = b"shared"
OPENING = "import sys; print(open('/proc/{}/fd/{}'.format(*sys.argv[1:]), 'rb').read().decode(), end='')"


def check_cores() -> Check:
    """Return the number of cores that this process may use, and the threads that torch would start."""
    return judge_cores(_usable_cores(), psutil.cpu_count() or 1, os.getloadavg()[0], os.environ)


def judge_cores(usable: int, installed: int, load: float, environment: Mapping[str, str]) -> Check:
    """Judge the cores of a machine.

    Args:
        usable: cores that this process may use, >= 1.
        installed: cores of the machine, >= 1.
        load: mean number of runnable processes in the last minute.
        environment: environment variables.
    """
    threads = environment.get("OMP_NUM_THREADS")
    finding = f"{counted(usable, 'core')} of {installed}, load {load:.1f}" + (
        f", OMP_NUM_THREADS={threads}" if threads else ""
    )
    if usable == 1:
        advice = "one core runs all workers in turn: use a simulated cluster, for example --cluster '4*exp(mean=1)'"
        return Check(subject="cores", status=Status.WARNING, finding=finding, advice=advice)
    if load > 1.5 * usable:
        return Check(
            subject="cores",
            status=Status.WARNING,
            finding=finding,
            advice="other processes use the cores: times of real workers will vary",
        )
    return Check(
        subject="cores", status=Status.OK, finding=f"{finding}; paceline run --nproc-per-node {usable} uses all"
    )


def _usable_cores() -> int:
    """Return the cores of the affinity mask, or of the quota of the container if it is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    words = quota.read_text(encoding="ascii").split() if quota.exists() else ["max"]
    return cores if words[0] == "max" else max(1, min(cores, int(words[0]) // int(words[1])))


def check_memory() -> Check:
    """Return the free memory, and the size of the shared memory that local workers use."""
    shared = disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    return judge_memory(psutil.virtual_memory().available, shared)


def judge_memory(free_bytes: float, shared_bytes: float | None) -> Check:
    """Judge the free memory and the free shared memory; None for a system without ``/dev/shm``."""
    finding = f"{free_bytes / GB:.1f} GB free"
    if shared_bytes is None:
        return Check(subject="memory", status=Status.OK, finding=finding)
    finding += f", {shared_bytes / GB:.1f} GB of shared memory free"
    if shared_bytes < LITTLE_SHARED_BYTES:
        advice = (
            f"workers of --cluster local:N exchange gradients in {SHARED_MEMORY}: enlarge it "
            "(docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm)"
        )
        return Check(subject="memory", status=Status.WARNING, finding=finding, advice=advice)
    return Check(subject="memory", status=Status.OK, finding=finding)


def check_sharing() -> Check:
    """Return whether another process of this user opens memory of this one, as ranks do with that of their server."""
    with tempfile.TemporaryFile() as trial:
        trial.write(TRIAL)
        trial.flush()
        command = [sys.executable, "-P", "-c", OPENING, str(os.getpid()), str(trial.fileno())]
        try:
            read = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return judge_sharing("", f"no process could be started: {error.strerror}")
    return judge_sharing(read.stdout, (read.stderr.strip().splitlines() or [""])[-1])


def judge_sharing(read: str, error: str) -> Check:
    """Judge what another process has read of a file of this one, and its error."""
    if read.encode() == TRIAL:
        return Check(subject="sharing", status=Status.OK, finding="processes of one user share memory")
    finding = f"no process can open memory of another one: {error}"
    advice = "ranks on one host send each other everything: start them in one container, as one user"
    return Check(subject="sharing", status=Status.WARNING, finding=finding, advice=advice)


def check_files() -> Check:
    """Return the limits on open files."""
    return judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_files(soft: int, hard: int) -> Check:
    """Judge the soft and the hard limit on the open files of a process; -1 for no limit."""
    soft, hard = (limit if limit != resource.RLIM_INFINITY else 1 << 30 for limit in (soft, hard))
    if soft >= ENOUGH_FILES:
        return Check(subject="open files", status=Status.OK, finding=f"at most {soft}")
    wanted = f"type ulimit -n {min(hard, 4 * ENOUGH_FILES)} before paceline"
    if hard < ENOUGH_FILES:
        wanted = f"the hard limit is {hard}: raise nofile in /etc/security/limits.conf, or start the shell as root"
    status = Status.PROBLEM if soft < FEW_FILES else Status.WARNING
    return Check(subject="open files", status=status, finding=f"at most {soft}; each worker takes a few", advice=wanted)


def check_folder(subject: str, folder: Path) -> Check:
    """Return whether a file can be written to disk in a folder, and the free space.

    Args:
        subject: name of the check.
        folder: existing folder.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as trial:
            trial.write(bytes(TRIAL_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
        return judge_disk(subject, folder, disk_usage(folder).free)
    except OSError as error:
        finding = f"cannot write to {folder.absolute()}: {error.strerror}"
        advice = "free some space, or use another folder (--out for runs, TMPDIR for temporary files)"
        return Check(subject=subject, status=Status.PROBLEM, finding=finding, advice=advice)


def judge_disk(subject: str, folder: Path, free_bytes: float) -> Check:
    """Judge the free space of a folder that can be written."""
    finding = f"{free_bytes / GB:.1f} GB free in {folder.absolute()}"
    if free_bytes < LITTLE_DISK_BYTES:
        advice = "a run keeps three checkpoints of the model and its optimizer: free some space, or use --out elsewhere"
        return Check(subject=subject, status=Status.WARNING, finding=finding, advice=advice)
    return Check(subject=subject, status=Status.OK, finding=finding)


def check_clock() -> Check:
    """Return the resolution of the clock, and whether the date is later than that of this file."""
    return judge_clock(time.get_clock_info("monotonic").resolution, time.time() - Path(__file__).stat().st_mtime)


def judge_clock(resolution_s: float, age_s: float) -> Check:
    """Judge the clock.

    Args:
        resolution_s: resolution of the monotonic clock, in seconds, > 0.
        age_s: seconds by which the system's date is later than the installation of paceline.
    """
    finding = f"resolution {resolution_s:.0e} s"
    if age_s < 0:
        advice = "the date lies before the installation of paceline: set it, for example with timedatectl set-ntp true"
        return Check(subject="clock", status=Status.WARNING, finding=finding, advice=advice)
    if resolution_s > COARSE_CLOCK_S:
        return Check(
            subject="clock",
            status=Status.WARNING,
            finding=finding,
            advice="times of gradients under 100 ms will be rounded",
        )
    return Check(subject="clock", status=Status.OK, finding=finding)
