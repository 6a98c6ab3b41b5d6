"""DeepSpeed's ZeRO-2 and ZeRO-3."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.base import Drafter, Losses, TrainingState
from spectrain.errors import RunError
from spectrain.features.batch import Batch
from spectrain.models.target import Target

from ..checkpoints import collect_tensors
from .base import OptimizerFactory, ParallelStrategy, ParameterGroups

BUCKET_VALUES = 1 << 26
"""Values of a buffer in which gradients are summed or weights gathered: 268 MB in float32. By
default DeepSpeed allocates buffers of 500 million, whatever the size of what it trains."""


def bucket_values(parameters: Iterable[Tensor]) -> int:
    """Return the values of a buffer of gradients: all of them, or as many as a buffer may hold.
    DeepSpeed asks for an even number.
    """
    values = sum(parameter.numel() for parameter in parameters)
    return max(2, min(BUCKET_VALUES, values + values % 2))


class ZeroStrategy(ParallelStrategy):
    """DeepSpeed: optimizer state and gradients are sharded over processes (ZeRO-2), and
    parameters too (ZeRO-3).
    """

    is_reusable = full_parameters = False
    stage: int

    def set_drafter(self, drafter: Drafter, target: Target) -> None:
        self.drafter = drafter.to(self.device)
        self.target = target
        self.engine: Any = None
        target.runs_in_lockstep = True

    def start_stage(
        self, groups: ParameterGroups, clip: float, make_optimizer: OptimizerFactory
    ) -> None:
        import deepspeed

        if self.device.type == "cpu":
            # DeepSpeed would compile a faster all-reduce for half a minute. If it is killed
            # meanwhile, it leaves a lock on which every later process hangs.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if self.engine is not None:
            self._destroy_engine(on_every_process=True)
        self.parameters: list[nn.Parameter] = [
            parameter for group in groups for parameter in group["params"]
        ]
        plain = make_optimizer(groups)
        bucket = bucket_values(self.parameters)
        settings = {
            # The trainer makes the batches, and losses are sums.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": clip,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": self.device.type == "cuda",
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # Gradients are averaged in float32.
            "torch_autocast": {
                "enabled": self.autocast is not None,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
            "steps_per_print": 1 << 40,
        }
        model = _DrafterWithTarget(self.drafter, self.target)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=plain, config=settings, dist_init_required=False
        )
        # DeepSpeed then skips a step whose gradients are not finite.
        self.optimizer.check_grad_overflow = True  # type: ignore[attr-defined]
        num_local = sum(p.ds_tensor.numel() for p in self.parameters) if self.stage == 3 else 0  # type: ignore[attr-defined]
        total = sum(p.ds_numel for p in self.parameters) if self.stage == 3 else 0  # type: ignore[attr-defined]
        if self.engine.zero_optimization_stage() != self.stage or (
            self.num_processes > 1 and num_local and num_local >= total
        ):
            raise RunError(
                f"trainer.sharding={self.name}: DeepSpeed did not shard; check its version"
            )

    def loss(self, batch: Batch, state: TrainingState, is_last: bool) -> Losses:
        terms, hits, counts = self.engine(batch, state)
        return Losses(terms, hits, counts)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss)
        if not is_last:
            self.engine.step()  # counts the batch

    def step(self) -> Tensor:
        self.engine.step()
        return torch.tensor(not self.optimizer.overflow)  # type: ignore[attr-defined]

    @property
    def steps_without_host(self) -> bool:
        """DeepSpeed reads by itself whether the gradients are finite."""
        return False

    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        from deepspeed import zero

        parameters = list(module.parameters())
        with zero.GatheredParameters(parameters, enabled=self.stage == 3):
            return {name: tensor.clone() for name, tensor in collect_tensors(module).items()}

    def gather_optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        inner: Any = self.optimizer.optimizer  # type: ignore[attr-defined]
        steps = [float(entry["step"]) for entry in inner.state.values() if "step" in entry]
        if steps and self.stage == 2:
            self._link_state()
        tensors = {}
        for index, parameter in enumerate(self.parameters if steps else []):
            tensors[f"{index}.step"] = torch.tensor(steps[0])
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{index}.{key}"] = (
                    safe_get_full_optimizer_state(parameter, key).detach().cpu().clone()
                )
        return tensors, {}

    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not tensors:
            return
        outer: Any = self.optimizer
        parts = (
            outer.fp32_partitioned_groups_flat
            if self.stage == 3
            else outer.single_partition_of_fp32_groups
        )
        for part in parts:  # this process's; their state is made by a first step otherwise
            zeros = {"exp_avg": torch.zeros_like(part), "exp_avg_sq": torch.zeros_like(part)}
            outer.optimizer.state[part] = {"step": tensors["0.step"].clone(), **zeros}
        if self.stage == 2:
            self._link_state()
        for index, parameter in enumerate(self.parameters):
            for key in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(
                    parameter, tensors[f"{index}.{key}"].to(self.device), key
                )

    def _link_state(self) -> None:
        """Link each parameter to its part of this process's state, as DeepSpeed does only after
        the first step.
        """
        outer: Any = self.optimizer
        outer._hp_optimizer_states_linked = False
        outer._lazy_init_hp_params_optimizer_state()

    def restore_tensors(self) -> None:
        self._destroy_engine(on_every_process=False)
        self.target.runs_in_lockstep = False

    def _destroy_engine(self, on_every_process: bool) -> None:
        """Replace DeepSpeed's parameters by ordinary full ones, on every process or only on the
        main process.
        """
        from deepspeed import zero

        module: _DrafterWithTarget = self.engine.module
        parameters = list(module.parameters())
        with zero.GatheredParameters(parameters, enabled=self.stage == 3):
            full_tensors = [
                parameter.detach().clone() if on_every_process or self.is_main else torch.empty(0)
                for parameter in parameters
            ]
        self.engine.destroy()
        self.engine.optimizer = (
            # else it would be destroyed once more when it is collected, with the next one's links
            # to state
            None
        )
        for parameter, value in zip(parameters, full_tensors):
            parameter.data = value


class Zero2Strategy(ZeroStrategy):
    name = "zero2"
    stage = 2


class Zero3Strategy(ZeroStrategy):
    name = "zero3"
    stage = 3
    unsharded = False


class _DrafterWithTarget(nn.Module):
    """One module for DeepSpeed that owns all trained parameters: the drafter, and the target if
    it is trained.
    """

    def __init__(self, drafter: Drafter, target: Target) -> None:
        super().__init__()
        self.drafter = drafter
        if any(parameter.requires_grad for parameter in target.parameters()):
            self.trained_target = target.model
        # In a list, so that it is not a submodule.
        self.borrowed_target = [target]

    def forward(
        self, batch: Batch, state: TrainingState
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        losses = self.drafter.loss(batch, self.borrowed_target[0], state)
        # As plain tensors, on which DeepSpeed registers its hooks.
        return losses.terms, losses.hits, losses.counts
