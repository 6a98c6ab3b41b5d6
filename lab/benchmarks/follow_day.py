"""A day of traffic in minutes: English chat, then Spanish questions in another template, which the
drafter has not seen.

    make follow-demo                                 # one seed, with this project's engine
    python -m lab.benchmarks.follow_day seeds=0,1,2 out=lab/results/follow-day.json
    python -m lab.benchmarks.follow_day quiet=1500 out=lab/results/follow-quiet.json
    python -m lab.benchmarks.follow_day server=vllm server.python=ENV/bin/python
        out=lab/results/follow-vllm.json

It trains a small EAGLE-3 drafter for the tiny target on the first kind, and starts `spectrain
follow` with its server behind the proxy. It prints when drift was noticed, when a better drafter
served, and the tokens per forward of both kinds. With `quiet` there are so many requests and no
change.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import torch

from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.files import write_text
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.servers.ports import find_free_port
from spectrain_serve.continuation import write_examples
from spectrain_serve.engines.control_key import bearer_header, read_control_key
from spectrain_serve.follow.examples import tokenize_conversation
from spectrain_serve.follow.ledger import read_ledger
from spectrain_serve.follow.traffic import RecordedConversation

from .follow_plot import plot_days
from .follow_traffic import (
    ANSWER_TOKENS,
    Body,
    SentAnswer,
    make_chats,
    make_questions,
    send_all,
    tokens_per_forward,
    tokens_per_second,
)

NUM_TRAINED = 160
NUM_FIRST = 72
NUM_AFTER = 40
BATCH = 32
START_SECONDS = 600.0
LONGEST_SECONDS = 900.0
OPTIONS = {
    "follow.reference": 32,
    "follow.horizon": 500,
    "follow.least_new": 40,
    "follow.held_out": 24,
    "follow.prove_tokens": 32,
    "follow.tolerance": 0.1,
    "follow.pause_seconds": 15,
    "follow.rollback_after": 24,
    "follow.start": "true",
}
# What a server needs beside them.
SERVER_OPTIONS: dict[str, dict[str, Any]] = {
    "spectrain": {},
    "vllm": {
        "server.max_length": 1024,
        "server.draft_tokens": 3,
        "server.arguments": "[--max-num-seqs,8]",
    },
}


@dataclass
class DayResult:
    """What one seed gave."""

    seed: int
    tokens_per_forward: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    # Tokens per second of requests, one at a time: with the first drafter before and during the
    # training of the candidate, and with the second drafter.
    tokens_per_second: dict[str, float | None] = field(default_factory=dict)
    promoted: dict[str, Any] | None = None
    events: list[str] = field(default_factory=list)
    # Seconds after the change of traffic, kind, accepted and rounds of every answer.
    answers: list[tuple[float, str, int, int]] = field(default_factory=list)


def train_first_drafter(folder: Path, seed: int, minutes: float) -> None:
    """Train a drafter on the target's own answers to requests of the first kind."""
    target = load_tiny()
    target.pack_weights()
    examples = answer_requests(target, make_chats(seed)[:NUM_TRAINED])
    folder.mkdir(parents=True, exist_ok=True)
    write_examples(folder / "first.jsonl", examples)
    words = [
        "recipe=eagle3",
        "target=tiny",
        f"run={folder / 'run'}",
        "data=tokens",
        f"data.path={folder / 'first.jsonl'}",
    ]
    words += [
        "data.limit=null",
        "eval=none",
        "trainer.epochs=1000",
        f"trainer.max_minutes={minutes}",
        f"trainer.seed={seed}",
    ]
    subprocess.run(
        [sys.executable, "-m", "spectrain", "train", *words], check=True, stdout=subprocess.DEVNULL
    )


def answer_requests(target: Target, bodies: list[Body]) -> list[Example]:
    """Return requests with the target's answers as training sequences."""
    prompts = [
        tokenize_conversation(RecordedConversation("", 0.0, body, ""), target)[0] for body in bodies
    ]
    examples = []
    for start in range(0, len(prompts), BATCH):
        for text in decode(target, prompts[start : start + BATCH], Greedy(), ANSWER_TOKENS):
            examples.append(
                Example(
                    text.prompt + text.output,
                    [False] * len(text.prompt) + [True] * len(text.output),
                )
            )
    return examples


@contextmanager
def run_follow(run: Path, server: str, words: list[str]) -> Iterator[str]:
    """Run `spectrain follow` on a run, and yield the address of its proxy."""
    port = find_free_port()
    engine_port = find_free_port()
    options = [f"{key}={value}" for key, value in {**OPTIONS, **SERVER_OPTIONS[server]}.items()]
    command = [
        sys.executable,
        "-m",
        "spectrain",
        "follow",
        f"run={run}",
        f"follow.listen=127.0.0.1:{port}",
    ]
    with (run.parent / "follow.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, f"server={server}", f"server.port={engine_port}", *options, *words],
            stdout=log,
            stderr=log,
        )
        try:
            wait_for_proxy(f"http://127.0.0.1:{port}", process, run.parent / "follow.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(120)


def wait_for_proxy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the proxy answers."""
    deadline = time.monotonic() + START_SECONDS
    headers = bearer_header(read_control_key())
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if (
                httpx.get(f"{url}/metrics", headers=headers, timeout=5, trust_env=False).status_code
                == 200
            ):
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit(f"spectrain follow did not start: {log.read_text()[-2000:]}")


def simulate_day(
    folder: Path, seed: int, minutes: float, server: str, words: list[str]
) -> DayResult:
    """Send a day of traffic through follow, and return what happened."""
    require_first_drafter(folder, seed, minutes)
    ledger = folder / "run" / "follow" / "ledger.jsonl"
    chats = iter(make_chats(seed)[NUM_TRAINED:])
    questions = iter(make_questions(seed))
    with run_follow(folder / "run", server, [f"follow.train_minutes={minutes}", *words]) as url:
        report(f"seed {seed}: the first kind of traffic begins")
        first = send_all(url, islice(chats, NUM_FIRST))
        change = time.time()
        report(f"seed {seed}: the second kind of traffic begins")
        second = send_until_promoted(url, questions, ledger, change)
        after_questions = send_all(url, islice(questions, NUM_AFTER))
        after_chats = send_all(url, islice(chats, NUM_AFTER))
        roll_back(folder / "run", ledger)
        rolled_back = send_all(url, islice(questions, NUM_AFTER))
    entries = [*read_ledger(ledger)]
    return summarize_day(
        seed, change, entries, [first, second, after_questions, after_chats, rolled_back]
    )


def roll_back(run: Path, ledger: Path) -> None:
    """Bring the drafter before the active one back by the command, and wait until it serves."""
    command = [sys.executable, "-m", "spectrain", "follow", "status", f"run={run}", "rollback=true"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if any(entry["event"] in ("rolled back", "no roll-back") for entry in read_ledger(ledger)):
            return
        time.sleep(0.5)


def require_first_drafter(folder: Path, seed: int, minutes: float) -> None:
    """Train the drafter of a folder, unless it is there."""
    if not (folder / "run" / "drafter" / "config.json").exists():
        report(f"seed {seed}: a drafter is trained on the first kind of traffic")
        train_first_drafter(folder, seed, minutes)


def summarize_day(
    seed: int, change: float, entries: list[dict[str, Any]], parts: list[list[SentAnswer]]
) -> DayResult:
    """Return what happened, from the ledger and the parts of the traffic: the first kind, the
    second kind until a better drafter serves, the second and the first kind afterwards, and the
    second kind after a roll-back by command."""
    first, second, after_questions, after_chats, rolled_back = parts
    moments = {}
    for event in ("drift", "training", "trained", "promoted", "rolled back"):
        moment = next(
            (
                entry["time"]
                for entry in entries
                if entry["event"] == event and entry["time"] > change
            ),
            None,
        )
        if moment is not None:
            moments[event] = moment
    swapped = moments.get("promoted", float("inf"))
    training = moments.get("training", float("inf"))
    trained = moments.get("trained", float("inf"))
    answers = [answer for part in parts for answer in part]
    return DayResult(
        seed,
        {
            "first kind, before": tokens_per_forward(first, "chat"),
            "second kind, before": tokens_per_forward(
                (answer for answer in second if answer.time < swapped), "questions"
            ),
            "second kind, after": tokens_per_forward(after_questions, "questions"),
            "first kind, after": tokens_per_forward(after_chats, "chat"),
            "second kind, rolled back": tokens_per_forward(rolled_back, "questions"),
        },
        {event: round(moment - change, 1) for event, moment in moments.items()},
        {
            "before training": tokens_per_second(
                answer for answer in second if answer.time < training
            ),
            "during training": tokens_per_second(
                answer
                for answer in second
                if training < answer.time - answer.seconds and answer.time < trained
            ),
            "after the swap": tokens_per_second(after_questions),
        },
        next((entry for entry in entries if entry["event"] == "promoted"), None),
        [f"{entry['time'] - change:+.0f} s {entry['event']}" for entry in entries],
        [
            (round(entry.time - change, 2), entry.kind, entry.accepted, entry.rounds)
            for entry in answers
        ],
    )


def simulate_quiet(
    folder: Path, seed: int, minutes: float, server: str, count: int, words: list[str]
) -> dict[str, Any]:
    """Send requests of the first kind alone, and return the events of the ledger, which should
    hold no drift.
    """
    require_first_drafter(folder, seed, minutes)
    run = folder / "run"
    chats = make_chats(seed)[NUM_TRAINED:]
    bodies = (chats[number % len(chats)] for number in range(count))
    with run_follow(run, server, [f"follow.train_minutes={minutes}", *words]) as url:
        answers = send_all(url, bodies)
    events = [entry["event"] for entry in read_ledger(run / "follow" / "ledger.jsonl")]
    rate = tokens_per_forward(answers, "chat")
    report(
        f"seed {seed}: {len(answers)} requests without a change, {rate} tokens per forward, "
        f"events: {', '.join(events)}"
    )
    return {
        "seed": seed,
        "requests": len(answers),
        "distinct": min(count, len(chats)),
        "tokens_per_forward": rate,
        "events": events,
    }


def send_until_promoted(
    url: str, questions: Iterator[Body], ledger: Path, began: float
) -> list[SentAnswer]:
    """Send requests of the second kind until a better drafter serves, or the time is over."""
    answers = list[SentAnswer]()
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline:
        answers += send_all(url, islice(questions, 4))
        events = [entry["event"] for entry in read_ledger(ledger) if entry["time"] > began]
        if "promoted" in events:
            break
        if "training" in events:
            # Training and traffic share the machine.
            time.sleep(1.0)
        if len(answers) % 4:
            break
    return answers


def describe_day(result: DayResult) -> str:
    """Return the line that the demonstration prints."""
    rates = {
        name: f"{rate:.2f}" for name, rate in result.tokens_per_forward.items() if rate is not None
    }
    shown = ", ".join(f"{name} {rate}" for name, rate in rates.items())
    if result.promoted is None:
        return f"seed {result.seed}: not promoted ({shown}); events: {'; '.join(result.events)}"
    new = result.promoted["new"]
    old = result.promoted["old"]
    return (
        f"seed {result.seed}: promoted {result.seconds['promoted']:.0f} s after the change (drift "
        f"noticed after {result.seconds.get('drift', float('nan')):.0f} s): new traffic "
        f"{new['gain']:+.1%} {new['interval']}, old {old['gain']:+.1%} {old['interval']}; live "
        f"tokens per forward: {shown}"
    )


def report(text: str) -> None:
    """Print a line at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(words: list[str]) -> None:
    """Simulate the day of every seed, or the same traffic without a change."""
    own = {
        "seeds": "0",
        "work": "runs/follow-demo",
        "minutes": "0.6",
        "out": "",
        "server": "spectrain",
        "quiet": "0",
    }
    settings = dict(word.split("=", 1) for word in words)
    passed = [f"{key}={value}" for key, value in settings.items() if key not in own]
    own |= {key: value for key, value in settings.items() if key in own}
    torch.set_num_threads(1)
    results: list[Any] = []
    for seed in map(int, own["seeds"].split(",")):
        began = time.monotonic()
        folder = Path(own["work"]) / str(seed)
        if int(own["quiet"]):
            results.append(
                simulate_quiet(
                    folder, seed, float(own["minutes"]), own["server"], int(own["quiet"]), passed
                )
            )
        else:
            day = simulate_day(folder, seed, float(own["minutes"]), own["server"], passed)
            results.append(asdict(day))
            report(f"{describe_day(day)}; {time.monotonic() - began:.0f} s")
        if own["out"]:
            setting = {
                "server": own["server"],
                "minutes": float(own["minutes"]),
                "options": OPTIONS,
            }
            content = {"provenance": collect_provenance(), "setting": setting, "days": results}
            write_text(Path(own["out"]), json.dumps(content, indent=1) + "\n")
    if own["out"] and not int(own["quiet"]):
        plot_days(Path(own["out"]).with_suffix(".svg"), results)


if __name__ == "__main__":
    main(sys.argv[1:])
