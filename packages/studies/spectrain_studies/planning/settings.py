"""The settings of `spectrain plan`: for which devices, and what it assumes."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from spectrain.errors import UserError
from spectrain.servers.commands import is_decreasing


@dataclass
class PlanSettings:
    """The devices of a plan, and what is assumed of them."""

    # Device to plan for: cpu or cuda; auto is the device that this machine has.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Number of devices.
    devices: int = 1
    # Memory of a device in gigabytes (10^9 bytes); null is that of this machine, or none if the
    # device is not here.
    device_gb: float | None = None
    # Tokens of the data; batches are then full and every token is supervised. Null reads the data
    # and counts them.
    tokens: int | None = None
    # Padded tokens a second that one device trains on, from which hours are computed; null measures
    # or assumes it.
    tokens_per_second: float | None = None
    # Whether to run 8 to 20 steps on this machine for the hours; null does so if the target is
    # small and its weights are here.
    calibrate: bool | None = None
    # Peak rate of a device in 10^12 operations a second; the default is an H100's for bfloat16.
    peak_tflops: float = 989.0
    # Share of the peak rate that is assumed to be reached, above 0.
    share: float = 0.4
    # Share of rounds that accept all draft tokens up to each position, for the printed commands
    # that simulate acceptance; null assumes that 0.7 of the tokens after accepted ones are
    # accepted.
    acceptance_rates: list[float] | None = None
    # Number of texts that are served at once: what their keys and values take is said beside the
    # training.
    users: int = 1
    # Number of tokens of each of these texts.
    context: int = 8192
    # File that the JSON is written to; null writes none.
    out: str | None = None

    def __post_init__(self) -> None:
        for key in (
            "devices",
            "device_gb",
            "tokens",
            "tokens_per_second",
            "peak_tflops",
            "share",
            "users",
            "context",
        ):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise UserError(f"plan.{key}={value}: use a number above 0")
        rates = self.acceptance_rates
        if rates is not None and not is_decreasing(rates):
            raise UserError(
                f"plan.acceptance_rates={rates}: use rates from 0 to 1, none above the one before "
                "it"
            )

    @property
    def torch_device(self) -> torch.device:
        """The device that is planned for."""
        has_gpu = torch.cuda.is_available() if self.device == "auto" else self.device == "cuda"
        return torch.device("cuda", 0) if has_gpu else torch.device("cpu")

    @property
    def is_here(self) -> bool:
        return self.torch_device.type == "cpu" or torch.cuda.is_available()

    @property
    def flops_per_second(self) -> float:
        """The operations a second of a device that are assumed."""
        return self.share * self.peak_tflops * 1e12

    def limit(self) -> float | None:
        """Return the bytes of a device, None if they are unknown because it is not here."""
        if self.device_gb is not None:
            return self.device_gb * 1e9
        if not self.is_here:
            return None
        if self.torch_device.type == "cuda":
            return float(torch.cuda.get_device_properties(0).total_memory)
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
