"""The loop: what is promoted serves, what fails live is rolled back, and no failure ends it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError
from spectrain_serve.engines.own import OwnServer
from spectrain_serve.follow.candidate import CandidateData, CandidateJob
from spectrain_serve.follow.exchange import Exchange
from spectrain_serve.follow.follower import TrafficFollower
from spectrain_serve.follow.ledger import read_ledger
from spectrain_serve.follow.pages import format_metrics, format_page
from spectrain_serve.follow.proxy import ProxyCounters, Recorder
from spectrain_serve.follow.reservoir import is_for_proof
from spectrain_serve.follow.settings import FollowSettings
from spectrain_serve.follow.state import ActiveDrafter, FollowFolder, hash_weights
from spectrain_serve.follow.swap import DrafterSwapper, SwapOutcome, SwapWay
from spectrain_serve.follow.traffic import RecordedConversation
from spectrain_serve.follow.upstream import UpstreamSwitch
from spectrain_serve.follow.watch import DriftAlarm
from spectrain_serve.promotion import LEAST_PROMPTS, PairedGain, PromotionProof
from spectrain_serve.servers.settings import EngineSettings
from spectrain_serve.servers.vllm import VllmServer, VllmSettings

GAIN = PairedGain(20, 1.5, 1.8, 0.2, [0.1, 0.3], 20)


class FakeSwapper:
    """Notes which drafters it was given; it may fail."""

    way: SwapWay = "push"

    def __init__(self) -> None:
        self.drafters: list[str] = []
        self.fails = False
        self.servers = UpstreamSwitch("http://127.0.0.1:1/v1")

    def swap(self, directory: Path, digest: str) -> SwapOutcome:
        if self.fails:
            raise RunError("the server is gone")
        assert hash_weights(directory) == digest
        self.drafters.append(directory.name)
        return SwapOutcome(self.way)

    def is_served(self, directory: Path, digest: str) -> bool:
        return directory.name in self.drafters[-1:]

    def restart_ended(self, directory: Path, digest: str) -> bool:
        return False

    def push(self, directory: Path, digest: str) -> None:
        self.drafters.append(directory.name)


class FakeJob:
    """A candidate that is trained."""

    def __init__(self, directory: Path) -> None:
        self.directory = self.folder = directory


def make_drafter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(folder.name)
    return folder


@pytest.fixture
def follower(tmp_path: Path) -> TrafficFollower:
    first = make_drafter(tmp_path / "first")
    folder = FollowFolder(tmp_path)
    folder.root.mkdir()
    settings = FollowSettings(
        reference=16, rollback_after=8, least_new=4, held_out=16, shadow=0, pause_seconds=1000
    )
    active = ActiveDrafter(str(first), hash_weights(first) or "", 0.0)
    swapper: Any = FakeSwapper()
    return TrafficFollower(
        RunSpec(), settings, folder, OwnServer(EngineSettings()), Recorder(1.0), swapper, active
    )


def send_requests(follower: TrafficFollower, accepted: int, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        rounds = (accepted, accepted + number % 2)
        request = {"prompt": f"p{number}"}
        follower.add_conversation(
            RecordedConversation("a", time.time(), request, "x", accepted=rounds, drafted=(3, 3))
        )


def list_events(follower: TrafficFollower) -> list[str]:
    return [entry["event"] for entry in read_ledger(follower.folder.ledger)]


def test_a_promoted_drafter_serves_and_is_rolled_back_when_it_fails_live(
    follower: TrafficFollower, tmp_path: Path
) -> None:
    send_requests(follower, 2, 16)
    second = make_drafter(tmp_path / "second")
    follower.decide(FakeJob(second), PromotionProof(GAIN, GAIN, True, "gains"))  # type: ignore[arg-type]
    assert follower.active.path == str(second) and follower.swapper.drafters == ["second"]  # type: ignore[attr-defined]
    assert follower.folder.read_active(tmp_path / "first") == follower.active
    send_requests(follower, 0, 16, 100)
    follower.check_live()
    assert follower.active.path == str(tmp_path / "first") and follower.swapper.drafters == [
        "second",
        "first",
    ]  # type: ignore[attr-defined]
    assert list_events(follower)[-3:] == ["promoted", "live", "rolled back"]


def test_a_server_that_started_anew_gets_the_active_candidate_again(
    follower: TrafficFollower,
) -> None:
    """Also a candidate that a rollback brought back; the run's own drafter is what the server
    starts with.
    """
    first, second = (
        make_drafter(follower.folder.candidates / name) for name in ("first", "second")
    )
    for candidate in (first, second):
        follower.promote(candidate, {})
    follower.roll_back("a test")
    follower.restore_drafter()
    drafters: list[str] = follower.swapper.drafters  # type: ignore[attr-defined]
    assert drafters == ["first", "second", "first"]
    drafters.clear()
    follower.restore_drafter()
    assert drafters == ["first"] and list_events(follower)[-1] == "sent again"


def test_a_rare_kind_does_not_hold_up_further_candidates(
    follower: TrafficFollower, tmp_path: Path
) -> None:
    """Without enough requests of a kind before a swap, the check of live acceptance ends with a
    filled series.
    """
    send_requests(follower, 2, 4)
    follower.decide(
        FakeJob(make_drafter(tmp_path / "second")), PromotionProof(GAIN, GAIN, True, "gains")
    )  # type: ignore[arg-type]
    send_requests(follower, 2, 63, 100)
    follower.check_live()
    assert follower.before_swap
    send_requests(follower, 2, 1, 200)
    follower.check_live()
    assert not follower.before_swap and list_events(follower)[-1] == "live"


@pytest.mark.parametrize("swap", ["push", "start"])
def test_a_way_that_the_server_does_not_have_is_refused(swap: Any) -> None:
    server = VllmServer(VllmSettings())
    swapper = DrafterSwapper(
        RunSpec(), server, FollowSettings(swap=swap), UpstreamSwitch("http://127.0.0.1:1/v1")
    )
    with pytest.raises(UserError, match=f"^follow.swap={swap}: "):
        swapper.check_settings()


def test_what_is_not_proven_or_not_swapped_changes_nothing(
    follower: TrafficFollower, tmp_path: Path
) -> None:
    before = follower.active
    second = make_drafter(tmp_path / "second")
    follower.decide(FakeJob(second), PromotionProof(GAIN, GAIN, False, "no gain"))  # type: ignore[arg-type]
    follower.swapper.fails = True  # type: ignore[attr-defined]
    follower.decide(FakeJob(second), PromotionProof(GAIN, GAIN, True, "gains"))  # type: ignore[arg-type]
    assert follower.active == before and list_events(follower) == [
        "kept for inspection",
        "not swapped",
    ]


def test_drift_is_noticed_and_counts_new_conversations(follower: TrafficFollower) -> None:
    send_requests(follower, 2, 40)
    send_requests(follower, 0, 60, 100)
    assert follower.alarm is not None and follower.num_new >= follower.settings.least_new
    data = follower.select_data()
    assert data.new and data.replay and data.prove_new
    assert not {entry.digest for entry in data.new} & {
        entry.digest for entry in [*data.prove_new, *data.prove_old]
    }


def test_failures_and_malformed_traffic_do_not_end_the_loop(
    follower: TrafficFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = (
        b"",
        b"{",
        b"[]",
        b'{"choices": [3]}',
        b"data: [DONE]\n",
        b"[" * 20_000,
        b"data: [1]\n\ndata: [DONE]\n",
    )
    odd += tuple(
        b'{"choices": [{"text": "a", "token_ids": [%d]}]}' % token for token in (2**40, 10**400)
    )
    odd += (
        b'{"choices": [{"text": "\\ud800"}]}',
        b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": -1}}',
    )
    for content in odd:
        follower.recorder.exchanges.append(Exchange("/v1/completions", b'{"prompt": "x"}', content))

    def fail() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(follower, "save", fail)
    follower.tick()
    assert follower.num_errors == 1 and list_events(follower) == ["error"]
    # Of the empty stream, which is complete.
    assert [entry.answer for entry in follower.reservoir.select()] == [""]


def test_a_candidate_that_cannot_be_written_is_tried_again_after_a_pause(
    follower: TrafficFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk gets no folder at every tick."""
    entry = RecordedConversation("a", 0.0, {"prompt": "p"}, "x")
    prompts = [entry] * LEAST_PROMPTS
    data = CandidateData([entry], [], prompts, prompts)
    attempts = []

    def fail(job: CandidateJob, *arguments: Any) -> None:
        attempts.append(job.folder)
        raise UserError("the disk is full")

    monkeypatch.setattr(CandidateJob, "prepare", fail)
    monkeypatch.setattr(follower, "select_data", lambda: data)
    monkeypatch.setattr(follower, "alarm", DriftAlarm("a", 2.0, 1.0, 8, 1.0, 0.0))
    follower.num_new = 100
    for _ in range(3):
        follower.begin_candidate()
    assert follower.job is None and len(attempts) == 1
    assert [*read_ledger(follower.folder.ledger)][-1]["reason"].endswith("the disk is full")


def test_the_old_set_is_written_once_there_is_space(
    follower: TrafficFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the traffic is lost meanwhile."""

    def fail(path: Path, entries: Any) -> None:
        raise UserError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("spectrain_serve.follow.follower.write_conversations", fail)
        send_requests(follower, 2, 200)
    assert len(follower.old) == 16 and follower.num_errors == 1
    entries = [RecordedConversation("a", 0.0, {"prompt": f"p{n}"}, "x") for n in range(200)]
    num_trained = sum(not is_for_proof(entry.digest) for entry in entries)
    assert len(follower.reservoir.select(False)) == num_trained
    assert not follower.folder.old.exists()
    follower.save()
    assert len(follower.folder.old.read_text().splitlines()) == 16


def test_a_copy_that_cannot_be_deleted_keeps_nothing_off_the_disk(
    follower: TrafficFollower,
) -> None:
    """What stands in a candidate's folder may be no file; the failure is in the ledger."""
    (follower.folder.candidates / "0001" / "new.jsonl").mkdir(parents=True)
    (follower.folder.candidates / "0001" / "seen.json").write_text("0")
    send_requests(follower, 2, 5)
    follower.save()
    assert len(follower.folder.recorded.read_text().splitlines()) == len(follower.reservoir) > 0
    assert follower.folder.status.exists() and list_events(follower)[-1] == "error"


def test_what_was_recorded_is_saved_before_a_training_is_stopped(
    follower: TrafficFollower, tmp_path: Path
) -> None:
    """A training may take as long to end as whoever stops follow waits."""

    class SlowJob(FakeJob):
        phase = "train"
        saved: list[str] | None = None

        def close(self) -> None:
            self.saved = follower.folder.recorded.read_text().splitlines()
            assert list_events(follower)[-1] == "stopped"

    send_requests(follower, 2, 5)
    job: Any = SlowJob(tmp_path / "candidate")
    follower.job = job
    follower.is_stopping.set()
    follower.run()
    assert len(job.saved) == len(follower.reservoir) > 0
    *_, last = read_ledger(follower.folder.ledger)
    assert (last["candidate"], last["phase"]) == ("candidate", "train")


def test_pages_tell_what_was_measured(follower: TrafficFollower) -> None:
    send_requests(follower, 2, 40)
    metrics = format_metrics(ProxyCounters(requests=7), follower.describe())
    assert "spectrain_follow_proxy_requests_total 7" in metrics
    assert 'spectrain_follow_acceptance_rate{kind="a",position="0"} 1' in metrics
    page = format_page(follower.describe(), follower.watch, follower.folder.ledger)
    assert "<svg" in page and "p13" not in page and json.dumps(follower.describe())
