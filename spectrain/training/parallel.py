"""How the processes of a run share the drafter: copies of it (DDP), or each a part (FSDP2, DeepSpeed's ZeRO-2 and ZeRO-3).

accelerate starts the processes, or torchrun. What a launch file asks for is read from where accelerate leaves it, and is done
here with torch's `fully_shard` or `deepspeed.initialize` on any device: accelerate itself does neither without a GPU, and
training that is not shared as was asked would go unnoticed.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from spectrain.drafters.base import Drafter, Losses, TrainingState
from spectrain.errors import RunError, UserError
from spectrain.features.batch import Batch
from spectrain.models.target import Target

from .checkpoints import flatten_optimizer, gathered, tensors_of, unflatten_optimizer

Sharding = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
# What an accelerate file may say of these; anything else would not be done.
FOLLOWED: dict[str, tuple[tuple[str, ...], str]] = {
    "ACCELERATE_MIXED_PRECISION": (("no", "bf16"), "mixed_precision: bf16"),
    "ACCELERATE_DYNAMO_BACKEND": (("NO",), "dynamo_backend: 'NO'"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (("1", "auto"), "trainer.accumulate instead"),
    "ACCELERATE_GRADIENT_CLIPPING": (("none", "auto"), "trainer.clip instead"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (("none",), "none"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (("none",), "none"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": (("none",), "zero_stage in the accelerate file itself"),
    "FSDP_OFFLOAD_PARAMS": (("false",), "fsdp_offload_params: false"),
    "FSDP_ACTIVATION_CHECKPOINTING": (("false",), "trainer.gradient_checkpointing instead"),
}
torch.export.register_dataclass(Losses)  # so that FSDP2 finds the tensors in it


def asked_for(sharding: Sharding) -> Sharding:
    """What the launcher and `trainer.sharding` ask for; they must not disagree, nor ask for what is not done."""
    for variable, (known, instead) in FOLLOWED.items():
        if (said := os.environ.get(variable)) is not None and said.lower() not in [value.lower() for value in known]:
            raise UserError(f"launch: {variable}={said} would not be followed; use {instead}")
    launched: Sharding | None = None
    if _is_set("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise UserError("launch: the accelerate file asks for FSDP 1; write fsdp_version: 2 below fsdp_config")
        launched = "fsdp2"
    elif _is_set("ACCELERATE_USE_DEEPSPEED"):
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
        if stage not in ("2", "3"):
            raise UserError(f"launch: the accelerate file asks for ZeRO stage {stage or 'none'}; write zero_stage: 2 or 3")
        launched = "zero2" if stage == "2" else "zero3"
    if launched is not None and sharding not in ("auto", launched):
        raise UserError(f"trainer.sharding={sharding}: the launch asks for {launched}; leave one of them out")
    return launched or ("ddp" if sharding == "auto" else sharding)


def connect(mixed_precision: str, sharding: Sharding) -> Accelerator:
    """The processes of this launch; stops where they were started but cannot find one another."""
    asked_for(sharding)
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        raise UserError(
            "launch: several processes are asked for but this one has no rank, as when accelerate launches on CPUs; use "
            "torchrun --nproc-per-node N -m spectrain train ..."
        )
    with _without("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):  # or accelerate would set out to do it itself
        accelerator = Accelerator(mixed_precision=mixed_precision, cpu=not torch.cuda.is_available())
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        raise RunError(f"launch: {expected} processes were started, {accelerator.num_processes} are connected; use torchrun")
    return accelerator


def parallel(accelerator: Accelerator, sharding: Sharding, copies: int = 1) -> "Parallel":
    """The way to share that was asked for; `copies` neighbouring processes see the same data."""
    way = asked_for(sharding)
    if way != "ddp" and not dist.is_initialized():  # a single process that was started by hand
        _alone(accelerator.device)
    if way == "fsdp2":
        return FullyShard(accelerator, copies)
    return Replicated(accelerator, copies) if way == "ddp" else Zero(accelerator, int(way[-1]), copies)


class Parallel(ABC):
    """A drafter in training, as the processes share it."""

    name: str
    in_place = True  # after `release` drafter and target can be used where they are
    whole = True  # every process holds all of the drafter while it trains, so that it can write too

    def __init__(self, accelerator: Accelerator, copies: int = 1) -> None:
        self.accelerator = accelerator
        self.rank, self.count = accelerator.process_index, accelerator.num_processes
        self.copies = copies  # neighbouring processes that see the same data, for they run the target together
        self.data_rank, self.data_count = self.rank // copies, self.count // copies
        self.device = accelerator.device
        self.is_main = accelerator.is_main_process
        self.optimizer: torch.optim.Optimizer  # AdamW over what this process updates

    @abstractmethod
    def share(self, drafter: Drafter, target: Target) -> None:
        """Take a drafter whose weights are the same on every process."""

    @abstractmethod
    def optimise(self, groups: list[dict[str, Any]], clip: float, **options: Any) -> None:
        """Begin a stage: AdamW over these groups."""

    @abstractmethod
    def loss(self, batch: Batch, state: TrainingState, last: bool) -> Losses:
        """This process's losses of a batch, which may be the `last` of a step."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add to the gradients; behind the `last` batch of a step they are averaged over processes."""

    @abstractmethod
    def step(self) -> bool:
        """Clip the gradients and step, unless they are not finite: then nothing changes, and False is returned."""

    @abstractmethod
    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Parameters and buffers of a module, whole and on the CPU; every process must call it."""

    @abstractmethod
    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The optimiser's state, whole and on the CPU, numbered as in `groups`; every process must call it."""

    @abstractmethod
    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """Undo `optimizer_state`, on any number of processes."""

    def release(self) -> None:
        """Called on every process after training: on the main one all tensors are whole again, on the CPU if they were not."""

    def sums(self, *values: float) -> list[float]:
        """These numbers, each added up over the processes that see different data."""
        if self.count == 1:
            return list(values)
        found = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.device), "sum")
        return [value / self.copies for value in found.tolist()]

    def gathered(self, value: Any) -> list[Any]:
        """What every process says, by rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


class Replicated(Parallel):
    """Every process has the whole drafter; gradients are averaged (DDP)."""

    name = "ddp"

    def share(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter.to(self.device), target
        self.model: Any = drafter

    def optimise(self, groups: list[dict[str, Any]], clip: float, **options: Any) -> None:
        self.clip = clip
        self.optimizer = torch.optim.AdamW(groups, **options)
        self._wrap()

    def _wrap(self) -> None:
        """DDP holds the parameters that are being trained, so each stage has its own."""
        if self.count > 1 and any(parameter.requires_grad for parameter in self.drafter.parameters()):
            places = [self.device] if self.device.type == "cuda" else None
            self.model = nn.parallel.DistributedDataParallel(self.drafter, device_ids=places)

    def loss(self, batch: Batch, state: TrainingState, last: bool) -> Losses:
        wrapped = isinstance(self.model, nn.parallel.DistributedDataParallel)
        with self.accelerator.autocast(), self.model.no_sync() if wrapped and not last else nullcontext():
            losses: Losses = self.model(
                batch, self.target, state
            )  # which is where DDP reads whether gradients will be averaged
        return losses

    def backward(self, loss: Tensor, last: bool) -> None:
        torch.autograd.backward(loss)

    @property
    def trained(self) -> list[Any]:
        """The parameters that this stage trains, in the order of its groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self) -> bool:
        self._average_target()
        finite = bool(torch.isfinite(self._clip()))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def _clip(self) -> Tensor:
        """Clip the gradients; their norm before, over all processes."""
        return torch.nn.utils.clip_grad_norm_(self.trained, self.clip)

    def _average_target(self) -> None:
        """Average the gradients of the target's own parameters over processes: they are not in what is wrapped.

        A parameter that no sequence of this process went through, its layer dropped, has a gradient of zero.
        """
        own = {id(parameter) for parameter in self.drafter.parameters()}
        theirs = [parameter for parameter in self.trained if id(parameter) not in own]
        for parameter in theirs:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.count == 1 or not theirs:
            return
        for start in range(0, len(theirs), 64):  # a few large exchanges instead of hundreds of small ones
            part = theirs[start : start + 64]
            flat = self.accelerator.reduce(torch.cat([p.grad.flatten() for p in part]), reduction="mean")
            for parameter, mean in zip(part, flat.split([parameter.numel() for parameter in part])):
                parameter.grad = mean.view_as(parameter)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        return tensors_of(module)

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        return flatten_optimizer(self.optimizer)

    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        unflatten_optimizer(self.optimizer, tensors, numbers)


class FullyShard(Replicated):
    """Every process has a part of each of the drafter's tensors, and the whole of a block while it runs (FSDP2)."""

    name = "fsdp2"
    in_place = whole = False

    def share(self, drafter: Drafter, target: Target) -> None:
        from torch.distributed.fsdp import fully_shard

        super().share(drafter, target)
        mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.count,))
        for block in blocks(drafter):
            fully_shard(block, mesh=mesh)
        fully_shard(drafter, mesh=mesh)
        parameters: list[Any] = list(drafter.parameters())
        if not parameters:
            raise UserError(
                "trainer.sharding=fsdp2: this family has no weights beside the target's, so nothing would be sharded; use "
                "zero2, zero3 or ddp"
            )
        whole = sum(parameter.numel() for parameter in parameters)
        held = sum(parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor))
        if self.count > 1 and not 0 < held < whole:
            raise RunError(f"trainer.sharding=fsdp2: this process holds {held} of {whole} parameters, so nothing was sharded")

    def _wrap(self) -> None:
        """The hooks that `share` put in do the work."""

    def backward(self, loss: Tensor, last: bool) -> None:
        self.drafter.set_requires_gradient_sync(last)  # type: ignore[operator]
        torch.autograd.backward(loss)

    def _clip(self) -> Tensor:
        parts = [[p for p in self.trained if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
        norms = [_norm(part) for part in parts]
        norm = torch.stack([value for value in norms if value is not None]).norm()
        for part in parts:
            torch.nn.utils.clip_grads_with_norm_(part, self.clip, norm)
        return norm

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # of tied ones the first
                seen.add(id(tensor))
                found[name] = gathered(tensor)
        return found

    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        parameters, shared = self.trained, {}
        for name, value in tensors.items():
            parameter = parameters[int(name.split(".", 1)[0])]
            fits = isinstance(parameter, DTensor) and value.shape == parameter.shape
            shared[name] = (
                distribute_tensor(value.to(self.device), parameter.device_mesh, parameter.placements) if fits else value
            )
        unflatten_optimizer(self.optimizer, shared, numbers)

    def release(self) -> None:
        done: dict[int, nn.Parameter] = {}  # of tied ones the same again
        for module in self.drafter.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in done:
                    whole = gathered(parameter)  # on every process, for all of them send
                    done[id(parameter)] = nn.Parameter(whole if self.is_main else torch.empty(0))
                setattr(module, name, done[id(parameter)])


class Zero(Parallel):
    """DeepSpeed: optimiser state and gradients are spread over processes (ZeRO-2), and parameters too (ZeRO-3)."""

    in_place = False

    def __init__(self, accelerator: Accelerator, stage: int, copies: int = 1) -> None:
        super().__init__(accelerator, copies)
        self.name, self.stage, self.whole = f"zero{stage}", stage, stage == 2

    def share(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter.to(self.device), target
        self.engine: Any = None
        target.in_step = True

    def optimise(self, groups: list[dict[str, Any]], clip: float, **options: Any) -> None:
        import deepspeed

        if self.engine is not None:
            self._dismantle(everywhere=True)
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        plain = torch.optim.AdamW(groups, **options)
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # what a batch holds is ours to say, and losses are sums
            "gradient_clipping": clip,
            "zero_optimization": {"stage": self.stage, "overlap_comm": self.device.type == "cuda"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "torch_autocast": {
                "enabled": self.accelerator.mixed_precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },  # gradients are averaged in float32
            "steps_per_print": 1 << 40,
        }
        model = _Both(self.drafter, self.target)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=plain, config=settings, dist_init_required=False
        )
        self.optimizer.check_grad_overflow = True  # type: ignore[attr-defined]  # it then leaves out a step that is not finite
        held = sum(p.ds_tensor.numel() for p in self.parameters) if self.stage == 3 else 0  # type: ignore[attr-defined]
        whole = sum(p.ds_numel for p in self.parameters) if self.stage == 3 else 0  # type: ignore[attr-defined]
        if self.engine.zero_optimization_stage() != self.stage or (self.count > 1 and held and held >= whole):
            raise RunError(f"trainer.sharding={self.name}: DeepSpeed did not shard; check its version")

    def loss(self, batch: Batch, state: TrainingState, last: bool) -> Losses:
        terms, hits, counts = self.engine(batch, state)
        return Losses(terms, hits, counts)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # counts the batch; nothing moves

    def step(self) -> bool:
        self.engine.step()
        return not self.optimizer.overflow  # type: ignore[attr-defined]

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        from deepspeed import zero

        parameters = list(module.parameters())
        with zero.GatheredParameters(parameters, enabled=self.stage == 3):
            return {name: tensor.clone() for name, tensor in tensors_of(module).items()}

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        inner: Any = self.optimizer.optimizer  # type: ignore[attr-defined]
        steps = [float(entry["step"]) for entry in inner.state.values() if "step" in entry]
        if steps and self.stage == 2:
            self._link_state()
        tensors = {}
        for index, parameter in enumerate(self.parameters if steps else []):
            tensors[f"{index}.step"] = torch.tensor(steps[0])
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{index}.{key}"] = safe_get_full_optimizer_state(parameter, key).detach().cpu().clone()
        return tensors, {}

    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not tensors:
            return
        outer: Any = self.optimizer
        parts = outer.fp32_partitioned_groups_flat if self.stage == 3 else outer.single_partition_of_fp32_groups
        for part in parts:  # this process's; their state is made by a first step otherwise
            zeros = {"exp_avg": torch.zeros_like(part), "exp_avg_sq": torch.zeros_like(part)}
            outer.optimizer.state[part] = {"step": tensors["0.step"].clone(), **zeros}
        if self.stage == 2:
            self._link_state()
        for index, parameter in enumerate(self.parameters):
            for key in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(parameter, tensors[f"{index}.{key}"].to(self.device), key)

    def _link_state(self) -> None:
        """Let each parameter find its piece of this process's state: DeepSpeed does so once, after the first group's step."""
        outer: Any = self.optimizer
        outer._hp_optimizer_states_linked = False
        outer._lazy_init_hp_params_optimizer_state()

    def release(self) -> None:
        self._dismantle(everywhere=False)
        self.target.in_step = False

    def _dismantle(self, everywhere: bool) -> None:
        """Plain parameters in place of DeepSpeed's, whole on every process or on the main one alone."""
        from deepspeed import zero

        module: _Both = self.engine.module
        parameters = list(module.parameters())
        with zero.GatheredParameters(parameters, enabled=self.stage == 3):
            whole = [parameter.detach().clone() if everywhere or self.is_main else torch.empty(0) for parameter in parameters]
        self.engine.destroy()
        self.engine.optimizer = (
            None  # else it would be destroyed once more when it is collected, with the next one's links to state
        )
        for parameter, value in zip(parameters, whole):
            parameter.data = value


class _Both(nn.Module):
    """What DeepSpeed takes: one module that owns all that is trained, the target included where it is."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        super().__init__()
        self.drafter = drafter
        if any(parameter.requires_grad for parameter in target.parameters()):
            self.trained = target.model
        self.lent = [target]  # in a list, so that it is no submodule

    def forward(self, batch: Batch, state: TrainingState) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        losses = self.drafter.loss(batch, self.lent[0], state)
        return losses.terms, losses.hits, losses.counts  # in the open, for DeepSpeed hangs its hooks on tensors


def blocks(drafter: nn.Module) -> list[nn.Module]:
    """The parts of a drafter that are sharded by themselves: the layers of a model inside it, each of which runs as a whole."""
    return [layer for module in drafter.modules() if isinstance(module, Target) for layer in module.layers]


def _norm(parameters: list[Any]) -> Tensor | None:
    """The norm of the gradients, over all processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return None
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """The environment without these variables."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _alone(device: torch.device) -> None:
    """A process group of one."""
    os.environ.setdefault("LOCAL_RANK", "0")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
