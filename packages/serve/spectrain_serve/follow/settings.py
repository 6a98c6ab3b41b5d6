"""The settings of `spectrain follow`, which are keys of `follow`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from spectrain.config.values import Count, Number, Positive, Share
from spectrain.errors import UserError

RECORDED_ROUTES = ("/v1/chat/completions", "/v1/completions")
PORT = re.compile("[0-9]{1,5}")


@dataclass
class ListenSettings:
    """How the proxy listens, and what it keeps of the traffic."""

    # Folder of request logs, files that end in .jsonl, which are followed instead of a proxy's
    # traffic; null runs the proxy.
    requests: str | None = None
    # Address and port of the proxy, as in 127.0.0.1:9000.
    listen: str = "127.0.0.1:9000"
    # Routes whose requests may be recorded; all other routes below /v1 are only passed on.
    routes: list[str] = field(default_factory=lambda: [*RECORDED_ROUTES])
    # Share of the requests that are recorded; the others are only passed on.
    sample: Share = 1.0
    # Largest body of a request that is passed on, in bytes; a larger one is refused with status
    # 413.
    max_body_bytes: Count = 16 * 2**20
    # Bytes that the bodies and recorded answers of all open requests may hold together; a request
    # beyond them is refused with status 503, and an answer is not recorded.
    max_total_bytes: Count = 512 * 2**20
    # Largest request and largest answer that are recorded, in bytes; larger ones are only passed
    # on.
    max_record_bytes: Count = 2**20
    # Number of complete requests that are open at the same time; further ones are refused with
    # status 503.
    max_requests: Count = 1024
    # Seconds that a request waits for a server that does not answer, as while it is started again.
    wait_seconds: Positive = 60.0
    # Number of conversations that are kept for training.
    conversations: Count = 512
    # Number of recent conversations that are held out of training, for the proof.
    held_out: Count = 64
    # Hours after which a recorded conversation is deleted.
    retention_hours: Positive = 72.0
    # Number of kinds of traffic that are distinguished; further ones share the kind "other".
    kinds: Count = 16

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not host or not PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
            raise UserError(
                f"follow.listen={self.listen}: give an address and a port, as in 127.0.0.1:9000"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and the port of the proxy."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass
class FollowSettings(ListenSettings):
    """All settings of `spectrain follow`."""

    # Probability of a false alarm of drift within follow.horizon requests, for all kinds of traffic
    # together.
    false_alarms: Share = 0.05
    # Number of requests that the rate of false alarms is stated for.
    horizon: Count = 1000
    # Number of requests that a reference of a drift test is measured on.
    reference: Count = 48
    # Number of new conversations after which a candidate is trained even without drift; null trains
    # only after drift.
    train_after: Count | None = None
    # Fewest new conversations that a candidate is trained on after an alarm of drift.
    least_new: Count = 64
    # Minutes that a candidate trains.
    train_minutes: Positive = 30.0
    # Learning rate of a candidate; null takes that of the run.
    lr: Positive | None = None
    # Address of a server of the same engine that captures hidden states, from which candidates are
    # trained; null computes the states here, or with source=server takes server.url.
    states_url: str | None = None
    # What a candidate learns: all weights, or low-rank updates that are merged at the end.
    learn: Literal["full", "lora"] = "full"
    # Share of replayed old conversations in the data of a candidate.
    replay: Share = 0.5
    # Conversations of earlier traffic, as JSON Lines with messages, that no candidate may lose on;
    # null takes the first follow.held_out ones that the proxy records, which no candidate is
    # trained on.
    old: str | None = None
    # Share of the tokens per forward on old conversations that a candidate may lose.
    tolerance: Share = 0.03
    # Number of new tokens per conversation that the proof decodes.
    prove_tokens: Count = 64
    # Number of answered requests that are repeated before and after a swap, to check that outputs
    # are the same.
    shadow: Number = 4
    # Share of the repeated requests whose answer may differ, as rounding can make it.
    shadow_tolerance: Share = 0.25
    # Fewest requests of a kind before and after a swap that an automatic roll-back is decided by; 0
    # never rolls back by itself.
    rollback_after: Number = 32
    # How a proven candidate gets into use: push sends its weights to the running server, start
    # starts a second server and drains the first one, auto takes push where the server can, and
    # keep only keeps it for inspection.
    swap: Literal["auto", "push", "start", "keep"] = "auto"
    # Whether follow starts the server by itself, with the drafter of the run.
    start: bool = False
    # Command that starts a server, in which {drafter} stands for the folder of its drafter and
    # {port} for its port, on this machine; null starts it as spectrain serve does.
    command: str | None = None
    # Niceness of the processes that train and prove.
    nice: Number = 10
    # Threads of the processes that train and prove.
    threads: Count = 1
    # Seconds to wait after a candidate that was not promoted, before another one is trained.
    pause_seconds: Positive = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.false_alarms < 1:
            raise UserError(
                f"follow.false_alarms={self.false_alarms}: use more than 0 and less than 1"
            )
        if self.command is not None and not all(
            word in self.command for word in ("{drafter}", "{port}")
        ):
            raise UserError(
                f"follow.command={self.command}: say where {{drafter}} and {{port}} belong in the "
                "command"
            )
        if self.reference < 16:
            raise UserError(
                f"follow.reference={self.reference}: a reference needs 16 requests or more"
            )
