"""A child process in a session of its own: nothing of it outlives the test.

Every wait has a deadline, what the child prints goes to a file that is shown when
something fails, and a kill reaches the whole session, so that no worker remains.
The child gets a private TMPDIR, which goes with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
SHM = Path("/dev/shm")
# What vLLM and multiprocessing keep there and can't remove when they are killed.
_ENGINE_SHM = ("psm_*", "sem.mp-*", "vllm_*")
# Of this process and its children, if several run tests at once (pytest-xdist): "gw0", "gw1" ...
RUN = os.environ.get("PYTEST_XDIST_WORKER", "")
_NUM_RUNS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Below the ports that Linux gives to whoever names none, above those of Mooncake (15000 to 17000).
_PORTS = range(18_000, 32_000)
_TAIL_CHARS = 6000
_POLL_S = 0.02


class ChildError(AssertionError):
    """Raised when a child died, stayed silent past a deadline or reported an error."""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until condition() holds.

    Raises:
        ChildError: It still does not hold after timeout_s seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ChildError(f"not within {timeout_s:g} s: {what}")
        time.sleep(_POLL_S)


def _port_numbers() -> Iterator[int]:
    """Yield ports for ever, from a random one on; processes that run tests at once share none."""
    ports = _PORTS[int(RUN.removeprefix("gw") or 0) % _NUM_RUNS :: _NUM_RUNS]
    first = random.randrange(len(ports))
    yield from itertools.cycle([*ports[first:], *ports[:first]])


_ports_to_try = _port_numbers()


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free; no other call gets it soon."""
    for port in itertools.islice(_ports_to_try, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of {_PORTS} is free")


def _live_processes() -> Iterator[tuple[int, int, int]]:
    """Yield (process, parent, session) of all that live (no zombies).

    From /proc/*/stat: /proc/self/task/*/children may miss some while others come and go. Names
    are listed and not globbed: glob() looks at each file, and fails when a process has just ended.
    """
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            text = Path("/proc", name, "stat").read_text()
        except OSError:  # it has just ended
            continue
        state, parent, _, session = text.rpartition(")")[2].split()[:4]
        if state != "Z":
            yield int(name), int(parent), int(session)


def session_members(session_id: int) -> list[int]:
    """Return the ids of the live (not zombie) processes of a session."""
    return [pid for pid, _, session in _live_processes() if session == session_id]


def parents() -> dict[int, int]:
    """Return the parent of every live (not zombie) process."""
    return {pid: parent for pid, parent, _ in _live_processes()}


def descendants(pid: int) -> set[int]:
    """Return pid and every live process that comes from it."""
    known = parents()
    family = {pid}
    while more := {child for child, parent in known.items() if parent in family} - family:
        family |= more
    return family


def mapped_inodes(pid: int) -> set[tuple[int, int]]:
    """Return (device, inode) of what a process maps or has open; empty if we may not look.

    By inode, because glibc makes a named semaphore under another name and renames it.
    """
    process = Path("/proc") / str(pid)
    found: set[tuple[int, int]] = set()
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            device, inode = line.split()[3:5]
            major, minor = (int(half, 16) for half in device.split(":"))
            found.add((os.makedev(major, minor), int(inode)))
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(_identity(fd))
    return found


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def mapped_by(path: Path) -> set[int]:
    """Return the processes that map a file or have it open, as far as we may look."""
    identity = _identity(path)
    processes = [int(process.name) for process in Path("/proc").glob("[0-9]*")]
    return {pid for pid in processes if identity in mapped_inodes(pid)}


def send_signal(pid: int, number: int) -> None:
    """Send a signal; SIGSTOP has stopped every thread when this returns.

    Raises:
        ChildError: A thread goes on.
    """
    os.kill(pid, number)
    if number == signal.SIGSTOP:  # one that is just running may answer once more
        wait_until(lambda: all(s in "TtZX" for s in _thread_states(pid)), 10, "it has stopped")


def _thread_states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def child_env(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: this one's, the repository importable, fixed hashes.

    Triton's interpreter is for kernel tests in this process, not for engines.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(REPO), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    env["PYTHONHASHSEED"] = "0"
    env["PYTHONUNBUFFERED"] = "1"
    return env | dict(extra)


class Child:
    """One child process and everything it starts.

    Args:
        argv: what to run.
        env: added to this process's environment.
        name: used in file names and messages.
        pipes: connect stdin and stdout to this process (stderr always goes to the log).
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], name: str, *, pipes: bool = False
    ) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"adp-{name}-"))
        self.log_path = self.folder / "log"
        pipe = subprocess.PIPE if pipes else None
        with self.log_path.open("wb") as log:
            self.popen = subprocess.Popen(
                argv,
                cwd=REPO,
                env=child_env({"TMPDIR": str(self.folder), **env}),
                stdin=pipe if pipes else subprocess.DEVNULL,
                stdout=pipe if pipes else log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its session and process group."""
        return self.popen.pid

    def alive(self) -> bool:
        """Return whether the child itself still runs."""
        return self.popen.poll() is None

    def log(self) -> str:
        """Return what the child has printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def fail(self, message: str) -> ChildError:
        """Return an error with the end of the child's log, to be raised."""
        code = self.popen.poll()
        state = "running" if code is None else f"exit status {code}"
        return ChildError(f"{self.name} ({state}): {message}\n{self.log()[-_TAIL_CHARS:]}")

    def members(self) -> list[int]:
        """Return the live processes of the child's session, workers included."""
        return session_members(self.pid)

    def give_way(self) -> None:
        """Let other processes go first from now on.

        Ranks that spin on every core were seen to keep a process that had been stopped from
        running for 30 s (/proc/PID/task/*/schedstat).
        """
        for pid in self.members():
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(task.name), 19)

    def wait_for_log(self, text: str, timeout_s: float) -> None:
        """Wait until text is in the log.

        Raises:
            ChildError: The child died first, or the deadline passed.
        """
        deadline = time.monotonic() + timeout_s
        while text not in self.log():
            if not self.alive() or time.monotonic() > deadline:
                raise self.fail(f"no {text!r} in the log within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def terminate(self, timeout_s: float = 15.0) -> int:
        """Send SIGTERM to the child alone and return its exit status.

        Raises:
            ChildError: It still runs after timeout_s; it has been killed.
        """
        self.popen.terminate()
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            error = self.fail(f"no exit within {timeout_s:g} s of SIGTERM")
            self.kill9()
            raise error from None

    def kill9(self, timeout_s: float = 10.0) -> None:
        """Kill the whole session and wait until nothing of it is left.

        Shared memory of the engine's own goes too; that of adp_kv is for the test to judge.
        """
        shared = self.shared_memory()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(timeout_s)
        for pid in self.members():  # those that made a process group of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.members(), timeout_s, f"{self.name}: all workers gone")
        for path in shared:
            path.unlink(missing_ok=True)

    def shared_memory(self) -> set[Path]:
        """Return the files that an engine here has in /dev/shm, apart from ours."""
        used = set().union(*(mapped_inodes(pid) for pid in self.members()))
        return {path for glob in _ENGINE_SHM for path in SHM.glob(glob) if _identity(path) in used}

    def cleanup(self) -> None:
        """Kill what still runs, close the pipes and remove the private folder."""
        self.kill9()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
