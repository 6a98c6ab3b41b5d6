"""The faults of a rehearsed cluster: what happens to a training, and what its processes must
print and do.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from .rehearsed_run import HANG_SECONDS, Cluster, Launcher, RunObserver

# Step after which a fault is made.
FAULT_STEP = 7
# Largest relative difference of a step's loss that rounding explains, where another number of
# processes adds the gradients up.
ROUNDING = 1e-5
# Seconds in which a process that sends no heartbeats must be named; a busy machine may take 2 of
# them.
NAMING_SECONDS = 10.0


@dataclass
class Case:
    """A fault: what happens after `FAULT_STEP` steps, and how the training continues."""

    name: str
    launcher: Launcher
    fault: Callable[[Cluster], None]
    # Machines that are lost; their launchers are ended in the end, as nobody can reach them.
    lost_machines: tuple[int, ...] = ()
    # Machines of the launch that continues the training; 0 where it continues without a new launch.
    resume_on: int = 4
    # What a message after the fault must say, as a regular expression.
    message: str = ""
    # Seconds from the fault within which the message must appear.
    within: float = 60.0
    # Largest relative difference of a step's loss to the undisturbed run.
    tolerance: float = 0.0
    # With a launcher that restarts: all machines are stopped by SIGTERM after the restart.
    stops: bool = False


def kill_worker(cluster: Cluster) -> None:
    cluster.machines[2].signal_worker(signal.SIGKILL)


def kill_machine(cluster: Cluster) -> None:
    cluster.machines[2].end()


def kill_saving(cluster: Cluster) -> None:
    """Kill the first process while it writes a checkpoint."""
    checkpoints = cluster.run / "checkpoints"
    deadline = time.monotonic() + HANG_SECONDS
    while (
        not list(checkpoints.glob("*.part"))
        and cluster.is_running()
        and time.monotonic() < deadline
    ):
        pass
    cluster.machines[0].signal_worker(signal.SIGKILL)


def cut_machine(cluster: Cluster) -> None:
    cluster.machines[2].cut_link()


def cut_first(cluster: Cluster) -> None:
    cluster.machines[0].drop_packets()


def interrupt_network(cluster: Cluster) -> None:
    """Cut a machine off for six seconds."""
    cluster.machines[2].cut_link()
    time.sleep(6)
    cluster.machines[2].restore_link()


def slow_worker(cluster: Cluster) -> None:
    cluster.machines[3].slow_down(seconds=20, share=0.25)


def freeze_last(cluster: Cluster) -> None:
    freeze(cluster, 3)


def freeze_first(cluster: Cluster) -> None:
    freeze(cluster, 0)


def freeze(cluster: Cluster, index: int) -> None:
    """Stop a worker for 15 seconds."""
    cluster.machines[index].signal_worker(signal.SIGSTOP)
    time.sleep(15)
    cluster.machines[index].signal_worker(signal.SIGCONT)


def freeze_for_good(cluster: Cluster) -> None:
    cluster.machines[3].signal_worker(signal.SIGSTOP)


def terminate_machine(cluster: Cluster) -> None:
    cluster.machines[1].signal_launcher(signal.SIGTERM)


def fill_disk(cluster: Cluster) -> None:
    """Leave space for lines of metrics but not for a checkpoint."""
    cluster.fill_disk(num_free=1 << 16)


def launch_twice(cluster: Cluster) -> None:
    """Suspend the training, start the same run once more beside it, and continue the first when
    the second has ended.
    """
    for machine in cluster.machines:
        machine.signal_worker(signal.SIGSTOP)
    cluster.launch_again("torchrun")
    for machine in cluster.machines:
        machine.signal_worker(signal.SIGCONT)


def do_nothing(cluster: Cluster) -> None:
    pass


DEAD = r"rank 2 \(machine2, process \d+\) died in step \d+"
SILENT = r"rank {0} \(machine{0}, process \d+\) has sent no heartbeat for \d+ s in step \d+"
STOPPED = r"stopped by SIGTERM to rank 1 \(machine1\) after step \d+, which is saved"
CASES = [
    Case("undisturbed", "accelerate", do_nothing, resume_on=0),
    Case("undisturbed", "torchrun", do_nothing, resume_on=0),
    Case("one process is killed", "accelerate", kill_worker, message=DEAD),
    Case("one process is killed", "torchrun", kill_worker, message=DEAD),
    Case("the first process is killed while it saves", "torchrun", kill_saving,
         message=r"rank 0 \(machine0, process \d+\) (has not answered for 10 s|died in step \d+)"),
    Case("a machine loses its network", "accelerate", cut_machine, message=DEAD),
    Case("the first machine loses its network", "torchrun", cut_first,
         message=r"rank 0 \(machine0, process \d+\) has not answered for 30 s"),
    Case("the network fails for 6 s", "torchrun", interrupt_network, resume_on=0),
    Case("one process has a quarter of the time for 20 s", "torchrun", slow_worker, resume_on=0),
    Case("one process is frozen for 15 s", "accelerate", freeze_last, resume_on=0,
        message=SILENT.format(3),
         within=NAMING_SECONDS),
    Case("the first process is frozen for 15 s", "torchrun", freeze_first, resume_on=0,
        message=SILENT.format(0),
         within=NAMING_SECONDS),
    Case("one process is frozen for good", "torchrun", freeze_for_good, message=SILENT.format(3),
        within=NAMING_SECONDS),
    Case("SIGTERM to one machine", "torchrun", terminate_machine, message=STOPPED),
    Case("the disk is full", "torchrun", fill_disk,
        message=r"the disk is full, so it was not saved"),
    Case("all processes are suspended, and the run is launched again", "torchrun", launch_twice,
        resume_on=0,
         message=r"another launch trains in this folder \(process \d+ on machine0\)", within=240.0),
    Case("one process is killed; restart on four", "elastic", kill_worker, resume_on=0,
        message=DEAD),
    Case("SIGTERM to one machine; restart on three", "elastic", terminate_machine,
        lost_machines=(1,), resume_on=0,
         message=STOPPED, tolerance=ROUNDING),
    Case("a machine is lost; restart on three", "elastic", kill_machine, lost_machines=(2,),
        resume_on=0, message=DEAD,
         tolerance=ROUNDING),
    Case("a machine is cut off; restart on three; SIGTERM; resume on four", "elastic", cut_machine,
        lost_machines=(2,),
         message=DEAD, tolerance=ROUNDING, stops=True),
]  # fmt: skip


def check_result(
    case: Case, cluster: Cluster, observer: RunObserver, codes: list[int | None], difference: float
) -> list[str]:
    """Return what is not as it should be."""
    remaining = [code for index, code in enumerate(codes) if index not in case.lost_machines]
    num_steps = len(cluster.losses())
    stopped = observer.last_step_before_resume
    checks = {
        f"{num_steps} of {cluster.steps} steps are logged": num_steps == cluster.steps
        and not cluster.has_doubles(),
        f"a loss differs by {difference:.1e}": difference <= case.tolerance,
        "no drafter was saved": (cluster.run / "drafter" / "config.json").exists(),
        f"an incomplete file is left: {cluster.leftovers()}": not cluster.leftovers(),
        f"no message says {case.message}": not case.message or observer.message is not None,
        f"the message took {observer.message_seconds:.0f} s": observer.message_seconds
        <= case.within,
        f"the launchers ended with {codes}": bool(case.resume_on) == any(remaining),
        f"the fault came too late, in step {stopped}": not case.resume_on
        or stopped < cluster.steps,
        "it did not go on from a checkpoint": not case.resume_on
        or "going on from" in cluster.text_since_resume,
    }
    return [failure for failure, passed in checks.items() if not passed]
