"""A day of traffic in minutes: English chat, then Spanish questions in another template, which the drafter has not seen.

    python -m benchmarks.follow_day              # one seed, with this project's engine: make follow-demo
    python -m benchmarks.follow_day seeds=0,1,2 out=eval/results/follow.json

It trains a small EAGLE-3 drafter for the tiny target on the first kind, and starts `spectrain follow` with its server behind
the proxy. It prints when drift was noticed, when a better drafter served, and the tokens per forward of both kinds.
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
from spectrain.follow.examples import tokenize_conversation, write_examples
from spectrain.follow.ledger import read_ledger
from spectrain.follow.traffic import RecordedConversation
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.servers.ports import find_free_port

from .follow_traffic import ANSWER_TOKENS, Body, SentAnswer, make_chats, make_questions, send_all, tokens_per_forward

NUM_TRAINED, NUM_FIRST, NUM_AFTER = 160, 72, 40
BATCH = 32
START_SECONDS, LONGEST_SECONDS = 120.0, 420.0
OPTIONS = {
    "follow.reference": 32, "follow.horizon": 500, "follow.least_new": 40, "follow.held_out": 24, "follow.prove_tokens": 32,
    "follow.tolerance": 0.1, "follow.pause_seconds": 15, "follow.rollback_after": 24, "follow.start": "true",
}  # fmt: skip


@dataclass
class DayResult:
    """What one seed gave."""

    seed: int
    tokens_per_forward: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    promoted: dict[str, Any] | None = None
    events: list[str] = field(default_factory=list)
    # Seconds after the first request, kind, accepted and rounds of every answer.
    answers: list[tuple[float, str, int, int]] = field(default_factory=list)


def train_first_drafter(folder: Path, seed: int, minutes: float) -> None:
    """Train a drafter on the target's own answers to requests of the first kind."""
    target = load_tiny()
    target.pack_weights()
    examples = answer_requests(target, make_chats(seed)[:NUM_TRAINED])
    folder.mkdir(parents=True, exist_ok=True)
    write_examples(folder / "first.jsonl", examples)
    words = ["recipe=eagle3", "target=tiny", f"run={folder / 'run'}", "data=tokens", f"data.path={folder / 'first.jsonl'}"]
    words += ["data.limit=null", "eval=none", "trainer.epochs=1000", f"trainer.max_minutes={minutes}", f"trainer.seed={seed}"]
    subprocess.run([sys.executable, "-m", "spectrain", "train", *words], check=True, stdout=subprocess.DEVNULL)


def answer_requests(target: Target, bodies: list[Body]) -> list[Example]:
    """Return requests with the target's answers as training sequences."""
    prompts = [tokenize_conversation(RecordedConversation("", 0.0, body, ""), target)[0] for body in bodies]
    examples = []
    for start in range(0, len(prompts), BATCH):
        for text in decode(target, prompts[start : start + BATCH], Greedy(), ANSWER_TOKENS):
            examples.append(Example(text.prompt + text.output, [False] * len(text.prompt) + [True] * len(text.output)))
    return examples


@contextmanager
def run_follow(run: Path, words: list[str]) -> Iterator[str]:
    """Run `spectrain follow` on a run, and yield the address of its proxy."""
    port, engine_port = find_free_port(), find_free_port()
    options = [f"{key}={value}" for key, value in OPTIONS.items()]
    command = [sys.executable, "-m", "spectrain", "follow", f"run={run}", f"follow.listen=127.0.0.1:{port}"]
    with (run.parent / "follow.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "server=spectrain", f"server.port={engine_port}", *options, *words], stdout=log, stderr=log
        )
        try:
            wait_for_proxy(f"http://127.0.0.1:{port}", process, run.parent / "follow.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def wait_for_proxy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the proxy answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/metrics", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit(f"spectrain follow did not start: {log.read_text()[-2000:]}")


def simulate_day(folder: Path, seed: int, minutes: float, words: list[str]) -> DayResult:
    """Send a day of traffic through follow, and return what happened."""
    result = DayResult(seed)
    if not (folder / "run" / "drafter" / "config.json").exists():
        report(f"seed {seed}: a drafter is trained on the first kind of traffic")
        train_first_drafter(folder, seed, minutes)
    ledger = folder / "run" / "follow" / "ledger.jsonl"
    chats, questions = iter(make_chats(seed)[NUM_TRAINED:]), iter(make_questions(seed))
    with run_follow(folder / "run", [f"follow.train_minutes={minutes}", *words]) as url:
        report(f"seed {seed}: the first kind of traffic begins")
        first = send_all(url, islice(chats, NUM_FIRST))
        change = time.time()
        report(f"seed {seed}: the second kind of traffic begins")
        second = send_until_promoted(url, questions, ledger, change)
        after_questions = send_all(url, islice(questions, NUM_AFTER))
        after_chats = send_all(url, islice(chats, NUM_AFTER))
    entries = [*read_ledger(ledger)]
    promoted = next((entry for entry in entries if entry["event"] == "promoted"), None)
    result.promoted = promoted
    result.events = [f"{entry['time'] - change:+.0f} s {entry['event']}" for entry in entries]
    swapped = float("inf") if promoted is None else promoted["time"]
    before = [answer for answer in second if answer.time < swapped]
    result.tokens_per_forward = {
        "first kind, before": tokens_per_forward(first, "chat"),
        "second kind, before": tokens_per_forward(before, "questions"),
        "second kind, after": tokens_per_forward(after_questions, "questions"),
        "first kind, after": tokens_per_forward(after_chats, "chat"),
    }
    for event in ("drift", "training", "trained", "promoted"):
        moment = next((entry["time"] for entry in entries if entry["event"] == event and entry["time"] > change), None)
        if moment is not None:
            result.seconds[event] = round(moment - change, 1)
    answers: list[SentAnswer] = [*first, *second, *after_questions, *after_chats]
    result.answers = [(round(entry.time - answers[0].time, 2), entry.kind, entry.accepted, entry.rounds) for entry in answers]
    return result


def send_until_promoted(url: str, questions: Iterator[Body], ledger: Path, began: float) -> list[SentAnswer]:
    """Send requests of the second kind until a better drafter serves, or the time is over."""
    answers: list[SentAnswer] = []
    while time.time() - began < LONGEST_SECONDS:
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
    rates = {name: f"{rate:.2f}" for name, rate in result.tokens_per_forward.items() if rate is not None}
    shown = ", ".join(f"{name} {rate}" for name, rate in rates.items())
    if result.promoted is None:
        return f"seed {result.seed}: not promoted ({shown}); events: {'; '.join(result.events)}"
    new, old = result.promoted["new"], result.promoted["old"]
    return (
        f"seed {result.seed}: promoted {result.seconds['promoted']:.0f} s after the change (drift noticed after "
        f"{result.seconds.get('drift', float('nan')):.0f} s): new traffic {new['gain']:+.1%} {new['interval']}, "
        f"old {old['gain']:+.1%} {old['interval']}; live tokens per forward: {shown}"
    )


def report(text: str) -> None:
    """Print a line at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(words: list[str]) -> None:
    """Simulate the day of every seed."""
    own = {"seeds": "0", "work": "runs/follow-demo", "minutes": "0.6", "out": ""}
    given = dict(word.split("=", 1) for word in words)
    passed = [f"{key}={value}" for key, value in given.items() if key not in own]
    own |= {key: value for key, value in given.items() if key in own}
    torch.set_num_threads(1)
    results = []
    for seed in map(int, own["seeds"].split(",")):
        began = time.monotonic()
        results.append(simulate_day(Path(own["work"]) / str(seed), seed, float(own["minutes"]), passed))
        report(f"{describe_day(results[-1])}; {time.monotonic() - began:.0f} s")
        if own["out"]:
            content = {"provenance": collect_provenance(), "days": [asdict(result) for result in results]}
            write_text(Path(own["out"]), json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
