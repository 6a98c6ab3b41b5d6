"""Machines of a rehearsed cluster: network namespaces of this machine, joined by a bridge.

Each has its own network, address and host name; disk, processors and process numbers are shared.
Everything lives in namespaces that `enter_private_namespaces` makes, so it disappears with the
program, whatever happens, and root's rights are not needed where users may make namespaces.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spectrain.errors import UserError

INSIDE = "SPECTRAIN_REHEARSAL_INSIDE"
BRIDGE = "spectrain"
# Retransmissions until the system gives a connection up, about 100 seconds; its default of 15 takes
# a quarter of an hour.
TCP_RETRIES = 8


def enter_private_namespaces() -> None:
    """Run this program again, with the same words, in new namespaces; exit with its status.
    Return where this has been done.
    """
    if os.environ.get(INSIDE):
        return
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    own += [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    try:
        tried = subprocess.run(
            [*own, "ip", "link", "add", BRIDGE, "type", "bridge"], capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise UserError(
            "rehearsal: unshare is missing; install util-linux and iproute2 on a Linux machine"
        ) from error
    if tried.returncode:
        raise UserError(
            f"rehearsal: this machine makes no network namespaces ({tried.stderr.strip()}); run "
            "it as root, outside of a container or in one with the capabilities NET_ADMIN and "
            "SYS_ADMIN"
        )
    words = [sys.executable, *sys.orig_argv[1:]]
    sys.exit(subprocess.run([*own, *words], env={**os.environ, INSIDE: "1"}).returncode)


def run_command(*words: str) -> None:
    """Run a command of the system; a failure is an error with what it printed."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@dataclass
class Machine:
    """A machine of the cluster and the launcher that runs on it."""

    index: int
    log: Path = field(default_factory=Path)
    launcher: "subprocess.Popen[bytes] | None" = None

    @property
    def name(self) -> str:
        return f"machine{self.index}"

    @property
    def address(self) -> str:
        return f"10.77.0.{10 + self.index}"

    @property
    def port(self) -> str:
        """The interface of the bridge at the other end of this machine's cable."""
        return f"port{self.index}"

    def connect(self) -> None:
        """Make the machine and connect it to the bridge."""
        run_command("ip", "netns", "add", self.name)
        run_command(
            "ip",
            "link",
            "add",
            "name",
            self.port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.name,
        )
        run_command("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        limit = f"echo {TCP_RETRIES} > /proc/sys/net/ipv4/tcp_retries2"
        run_command("nsenter", f"--net=/run/netns/{self.name}", "sh", "-c", limit)
        for device in ("eth0", "lo"):
            run_command("ip", "-n", self.name, "link", "set", device, "up")
        self.restore_link()

    def cut_link(self) -> None:
        """Pull the cable: the machine loses its link, and no packet is answered with an error."""
        run_command("ip", "link", "set", self.port, "down")

    def drop_packets(self) -> None:
        """Lose every packet at the switch, while the link stays up."""
        run_command("ip", "link", "set", self.port, "nomaster")

    def restore_link(self) -> None:
        """Undo `cut_link` and `drop_packets`."""
        run_command("ip", "link", "set", self.port, "master", BRIDGE)
        run_command("ip", "link", "set", self.port, "up")

    def start(self, words: list[str], log: Path, environment: dict[str, str]) -> None:
        """Start a launcher on the machine; what it and its workers print goes to a file."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *words]
        self.log = log
        with log.open("ab") as output:
            self.launcher = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.name}", *named],
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self.launcher is not None and self.launcher.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit status of the launcher; negative if a signal ended it, None if it runs."""
        return None if self.launcher is None else self.launcher.poll()

    def worker(self) -> int:
        """Return the process id of the worker that the launcher has started."""
        assert self.launcher is not None
        children = [
            Path(task, "children").read_text()
            for task in Path(f"/proc/{self.launcher.pid}/task").iterdir()
        ]
        for process in map(int, " ".join(children).split()):
            if b"spectrain" in Path(f"/proc/{process}/cmdline").read_bytes():
                return process
        raise ProcessLookupError(f"{self.name} runs no worker")

    def signal_worker(self, number: int) -> None:
        os.kill(self.worker(), number)

    def signal_launcher(self, number: int) -> None:
        assert self.launcher is not None
        self.launcher.send_signal(number)

    def end(self) -> None:
        """Kill what is left of the launcher and its workers, as a loss of power does."""
        if self.launcher is None:
            return
        with suppress(ProcessLookupError, FileNotFoundError):
            self.signal_worker(signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.wait()

    def slow_down(self, seconds: float, share: float, period: float = 0.2) -> None:
        """Let the worker run in a share of the time only, for some seconds."""
        process = self.worker()
        end = time.monotonic() + seconds
        with suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.kill(process, signal.SIGSTOP)
                time.sleep(period * (1 - share))
                os.kill(process, signal.SIGCONT)
                time.sleep(period * share)


def make_machines(count: int, folder: Path) -> list[Machine]:
    """Make the machines of a cluster, inside private namespaces. Each finds the others by name."""
    machines = [Machine(index) for index in range(count)]
    run_command("mount", "-t", "tmpfs", "tmpfs", "/run")
    hosts = folder / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{machine.address} {machine.name}\n" for machine in machines)
    )
    run_command("mount", "--bind", str(hosts), "/etc/hosts")
    run_command("ip", "link", "add", BRIDGE, "type", "bridge")
    for device in ("lo", BRIDGE):
        run_command("ip", "link", "set", device, "up")
    for machine in machines:
        machine.connect()
    return machines
