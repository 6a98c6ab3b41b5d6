"""The score of a server: our own chain is the server here, so that every number has another
computation to agree with.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spectrain
from packages.serve.tests.servers.in_process import OwnServer, count_rounds
from packages.serve.tests.servers.stand_in import ModelStandIn, Rounds
from spectrain.data.chat_template import ChatTemplate
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.ngram import Ngram
from spectrain.errors import RunError, UserError
from spectrain.eval.identity import Identity
from spectrain.eval.metrics import Turn
from spectrain.eval.notes import describe_identity
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.trees import Chain
from spectrain_serve.engines.llamacpp_command import LlamaCppSettings
from spectrain_serve.engines.llamacpp_server import LlamaCppServer
from spectrain_serve.engines.openvino_command import OpenVinoSettings
from spectrain_serve.engines.openvino_server import OpenVinoServer
from spectrain_serve.scoring import command, search, ties
from spectrain_serve.scoring.agreement import compare_rounds, decode_prompts
from spectrain_serve.scoring.command import describe_launch, refuse_inapplicable
from spectrain_serve.scoring.latency import LatencyLimits
from spectrain_serve.scoring.notes import describe_server
from spectrain_serve.scoring.own_chain import OwnChain
from spectrain_serve.scoring.requests import LevelResult
from spectrain_serve.scoring.rounds import expand_counters
from spectrain_serve.scoring.score import (
    DRAFTED,
    PLAIN,
    ServedSubject,
    ServerEvaluation,
    compare_outputs,
)
from spectrain_serve.scoring.search import Cause
from spectrain_serve.servers.base import DraftedRounds
from spectrain_studies.comparison.recommendations import compare_runs
from spectrain_studies.comparison.scored_runs import ScoredRun
from tests.factories import build_evaluation
from tests.targets import cut_tiny

ROWS = [
    {
        "id": "count",
        "category": "math",
        "turns": ["Count: one two three one two three one two", "Go on."],
    },
    {"id": "why", "category": "talk", "turns": ["Why is the sky blue? Why is the sky blue?"]},
    {"id": "name", "category": "talk", "turns": ["Name a color."]},
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.fixture(scope="module")
def drafter(shallow: Target) -> Drafter:
    """Two of the target's three layers: they draft something in every round, and some of it is
    right.
    """
    return Causal(shallow, num_layers=2).eval()


def no_causes(position: int) -> Iterator[Cause]:
    yield from ()


def score_servers(
    folder: Path,
    server: OwnServer,
    plain: OwnServer | None,
    prompts: str,
    own: OwnChain | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Score servers in this process."""
    servers = {DRAFTED: server} | ({} if plain is None else {PLAIN: plain})
    evaluation = ServerEvaluation(prompts=prompts, max_new_tokens=24, **settings)
    target = server.target if own is not None or settings.get("report") else None
    subject = ServedSubject(
        [{name: nullcontext(each) for name, each in servers.items()}], target, {}, own
    )
    return evaluation.score(subject, folder)


def test_the_score_of_a_server_is_our_chains(
    shallow: Target, drafter: Drafter, prompts: str, tmp_path: Path
) -> None:
    """Tokens per forward by level, counters, outputs and rounds equal our own evaluation's."""
    chain = OwnChain(shallow, drafter, no_causes)
    servers = OwnServer(shallow, drafter), OwnServer(shallow, None)
    summary = score_servers(
        tmp_path / "eval" / "a",
        *servers,
        prompts,
        chain,
        concurrency=(1, 2),
        slo={"itl": "20ms", "ttft": "5ms"},
    )
    own = summary["server"]["own_chain"]
    assert own["equal"] == own["checked"] == 4 and own["same_outputs"] == 4
    assert own["drafter_dtype"] == "float32"
    assert summary["acceptance_length"]["pooled"] == own["acceptance_length"] > 1
    assert summary["server"]["requests_counted"] == summary["server"]["totals_counted"]
    second = summary["compared"]["concurrency-2"]
    assert second["acceptance_length"] == summary["acceptance_length"]
    assert second["acceptance_by_depth"] == summary["acceptance_by_depth"]
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == 4
    assert summary["speedup"]["ratio"] == pytest.approx(1, abs=1e-3)
    # The server's clock ticks 10 ms a token.
    times = summary["serving"]["drafted"]
    assert times["first_token_ms"]["p99"] == times["per_token_ms"]["p50"] == pytest.approx(10)
    assert times["within_slo"] == 0 and times["clock"] == "client"
    assert {path.name for path in (tmp_path / "eval" / "a").iterdir()} == {
        "summary.json",
        "samples.jsonl",
        "rounds.parquet",
        "prompts.parquet",
        "report.html",
    }
    page = (tmp_path / "eval" / "a" / "report.html").read_text()
    assert (
        "Times by concurrency" in page
        and "Speedup by the number of requests" in page
        and "drafts.jsonl" not in page
    )


def test_rounds_that_differ_are_explained(
    shallow: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other types end the comparison, near ties explain single rounds, and the search for causes
    ends with its time.
    """
    prompt = shallow.tokenizer("Count: one two three one two three one two").input_ids
    shallower = Causal(shallow, num_layers=1).eval()
    [served] = decode_prompts(shallow, shallower, Chain(3), [Generation(prompt)], 24)
    turns = [Turn("count", 0, "all", Generation(prompt, [0]), served)]

    def list_cause(position: int) -> Iterator[Cause]:
        yield Cause("layers", "one layer", "take two", lambda: (shallow, shallower))

    def describe_agreement(server_dtype: str) -> tuple[dict[str, Any], str]:
        own = OwnChain(shallow, drafter, list_cause, server_dtype=server_dtype).compare(turns, 24)
        entry = {
            "counts": "none",
            "requests_counted": None,
            "totals_counted": None,
            "speedups": [],
            "failed": {},
        }
        return own, " ".join(describe_server(entry | {"own_chain": own}))

    own, text = describe_agreement("bfloat16")
    assert "server.dtype=float32" in text and "search" not in own
    own, text = describe_agreement("float32")
    assert (
        own["cause"]["name"] == "layers"
        and own["cause"]["agreement"]["share"] == 1
        and not own["ties"]
    )
    monkeypatch.setattr(search, "MAX_SECONDS", -1.0)
    own, text = describe_agreement("float32")
    assert own["search"]["is_cut"] and "before every cause was tested" in text
    monkeypatch.setattr(ties, "MAX_GAP", float("inf"))
    own, text = describe_agreement("float32")
    [tie] = own["ties"]
    assert "Rounding explains" in text and "search" not in own
    assert tie["gap"] > 0 and tie["draft"] == min(tie["served_length"], tie["own_length"])


@pytest.mark.parametrize("concurrency", [1, 2])
def test_totals_give_the_same_rounds_untrimmed(
    shallow: Target, drafter: Drafter, prompts: str, tmp_path: Path, concurrency: int
) -> None:
    """Counters around every prompt, or around all of them, give the tokens per forward of all
    rounds.
    """
    server = OwnServer(shallow, drafter, counts="totals")
    totals = score_servers(
        tmp_path / "totals", server, None, prompts, concurrency=(concurrency,), report=False
    )
    each = score_servers(
        tmp_path / "each", OwnServer(shallow, drafter), None, prompts, report=False
    )
    assert totals["server"]["counts"] == "totals" and each["server"]["counts"] == "requests"
    assert totals["server"]["totals_counted"] == each["server"]["totals_counted"]
    assert totals["speedup"] is None and totals["tokens_per_second"]["autoregressive"] is None
    untrimmed = each["acceptance_length"]["by_convention"]["spec_bench"]
    assert (
        totals["acceptance_length"]["pooled"]
        == totals["acceptance_length"]["by_convention"]["spec_bench"]
        == untrimmed
        > 1
    )
    # An interval needs counts of each prompt.
    assert (totals["acceptance_length"]["ci95"] is None) == (concurrency > 1)


def test_failed_requests_are_left_out(shallow: Target, prompts: str, tmp_path: Path) -> None:
    """A request that fails on one server is left out of both, and named; if all fail, the run
    fails.
    """
    server = OwnServer(shallow, Ngram(shallow))
    plain = OwnServer(shallow, None)
    lines = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    assert lines[2]["id"] == "name"
    summary = score_servers(
        tmp_path / "a",
        server,
        plain,
        prompts,
        OwnChain(shallow, Ngram(shallow), no_causes),
        report=False,
    )
    samples = [
        json.loads(line) for line in (tmp_path / "a" / "samples.jsonl").read_text().splitlines()
    ]
    server.failing_length = len(
        next(line["prompt_tokens"] for line in samples if line["id"] == "name")
    )
    failed = score_servers(
        tmp_path / "b",
        server,
        plain,
        prompts,
        OwnChain(shallow, Ngram(shallow), no_causes),
        report=False,
    )
    assert (
        list(failed["server"]["failed"]) == ["name"]
        and failed["lossless"]["checked"] == summary["lossless"]["checked"] - 1
    )
    assert failed["serving"]["drafted"]["failed"] == 1


def test_scores_of_servers_are_compared(shallow: Target, prompts: str, tmp_path: Path) -> None:
    """`spectrain compare` reads them as any other score, with and without a baseline."""
    for name, plain in (("a", OwnServer(shallow, None)), ("b", OwnServer(shallow, None))):
        score_servers(
            tmp_path / name / "eval" / "x", OwnServer(shallow, Ngram(shallow)), plain, prompts
        )
    runs = [ScoredRun.read(name, tmp_path / name / "eval" / "x") for name in "ab"]
    result = compare_runs(runs, tmp_path)
    assert result["recommendations"][0]["goal"] == "one user" and len(result["rows"]) == 2
    score_servers(tmp_path / "c" / "eval" / "x", OwnServer(shallow, Ngram(shallow)), None, prompts)
    result = compare_runs([ScoredRun.read("c", tmp_path / "c" / "eval" / "x")], tmp_path)
    assert result["recommendations"][0]["goal"] == "tokens per forward"


def test_the_template_of_the_server(shallow: Target, prompts: str, tmp_path: Path) -> None:
    """Messages that the server renders with another template are named, with the first token
    that differs.
    """
    server = OwnServer(shallow, Ngram(shallow))
    tokenizer = type(shallow.tokenizer).from_pretrained(shallow.path)
    tokenizer.chat_template = "Answer briefly. " + str(tokenizer.chat_template)
    server.template = ChatTemplate(tokenizer)
    summary = score_servers(
        tmp_path / "a",
        server,
        None,
        prompts,
        OwnChain(shallow, Ngram(shallow), no_causes),
        report=False,
    )
    assert (
        summary["server"]["template"]["equal"] == 0
        and summary["server"]["template"]["first_difference"] is not None
    )
    assert "chat template" in " ".join(describe_server(summary["server"]))


def test_an_answer_may_part_at_a_near_tie() -> None:
    """Where the target's two best logits are equal, another answer is no difference, and it is
    said that what follows was not compared; where they are not, it is one.
    """
    prompt = [11, 12, 13]
    target = cut_tiny(3)
    model = target.model
    best, other = model(torch.tensor([prompt])).logits[0, -1].topk(2).indices.tolist()
    turn = SimpleNamespace(id="a", turn=0, drafted=Generation(prompt, [other, 5]))

    def compare(reference: Target | None) -> Identity:
        levels = [
            LevelResult(1, [SimpleNamespace(completion=SimpleNamespace(token_ids=tokens))])
            for tokens in ([other, 5], [best, 6])
        ]
        return compare_outputs([turn], *levels, reference)

    apart = compare(target)
    assert apart.lossless is False and apart.differences[0]["gap"] > 0
    assert compare(None).differences[0]["gap"] is None
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[other] = rows[best]
    tied = compare(target)
    assert (tied.checked, tied.identical, tied.lossless) == (1, 0, True)
    assert tied.near_ties[0]["position"] == 0 and tied.near_ties[0]["gap"] == 0
    assert "1 part from it at a near tie" in describe_identity(tied.summary())


def make_generation(prompt: int, lengths: list[int], output: list[int]) -> Generation:
    return Generation([0] * prompt, output, round_lengths=lengths, depths=[3] * len(lengths))


def test_rounds_are_compared_up_to_the_first_other_token() -> None:
    """Equal rounds count; the first round that differs has a position in the sequence. Rounds at
    the end are left out.
    """
    output = list(range(12))
    first = make_generation(5, [2, 2, 1, 3, 3], output)
    second = make_generation(5, [2, 1, 2, 4, 2], output)
    agreement = compare_rounds([first, first], [first, second])
    # Before position 9, rounds begin at 1, 3, 5 and 6, and at 1, 3, 4 and 6.
    assert (agreement.equal, agreement.checked, agreement.shared_rounds, agreement.rounds) == (
        1,
        2,
        5,
        8,
    )
    assert agreement.first_difference == 5 + 3
    # After another token, nothing is compared.
    parted = make_generation(5, [2, 3, 3, 3], [0, 1, 2, *[99] * 9])
    assert compare_rounds([first], [parted]).equal == 1


def test_counters_expand_to_rounds_that_count_so() -> None:
    """Rounds from counters have the same counters."""
    rounds = DraftedRounds((0, 3, 1, 1, 0, 2), (3,) * 6)
    counted = count_rounds(rounds)
    expanded = expand_counters(counted)
    assert (
        sorted(expanded.accepted) == sorted(rounds.accepted) and count_rounds(expanded) == counted
    )


def test_limits_of_latency() -> None:
    """Times have units; anything else is refused in one sentence."""
    assert LatencyLimits.parse({"ttft": "500ms", "itl": "0.05s"}) == LatencyLimits(0.5, 0.05)
    for slo, key in (({"ttft": "5"}, "eval.slo.ttft"), ({"tpot": "5ms"}, "eval.slo.tpot")):
        with pytest.raises(UserError, match=key):
            LatencyLimits.parse(slo)


def test_how_an_engine_is_started_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are those in which it computes, but packed weights and a GGUF file's drafter keep
    theirs; null is its own.
    """
    checkpoint = SimpleNamespace(tensors={"w": torch.zeros(2, 2).half(), "norm": torch.zeros(2)})
    drafter: Any = SimpleNamespace(checkpoint=checkpoint, target=TargetFiles("tiny"))
    launch = EngineLaunch("target", dtype="float32", drafter=DrafterLaunch("eagle3", None, 3))
    tree = {"draft_tokens": 4, "tree_depth": 2, "branching_factor": 2}
    openvino = OpenVinoServer(OpenVinoSettings(dtype="bfloat16", threads=2, **tree))
    described = describe_launch(openvino, launch, drafter)
    assert described.items() >= {**tree, "threads": 2, "alternates": False}.items()
    assert {described[key] for key in ("dtype", "weight_type", "drafter_dtype")} == {"bfloat16"}
    packed = OpenVinoServer(OpenVinoSettings(weights="int8", baseline_port=8001))
    assert (
        describe_launch(packed, launch, drafter).items()
        >= {"weight_type": "int8", "alternates": True}.items()
    )
    llamacpp = describe_launch(LlamaCppServer(LlamaCppSettings()), launch, drafter)
    assert (
        llamacpp["drafter_dtype"] == "float16"
        and llamacpp["threads"] is None
        and llamacpp["draft_tokens"] == 3
    )
    # A target's own GGUF file is served as it is unless server.dtype names another type.
    monkeypatch.setattr(command, "read_weight_type", lambda path: "q4_1")
    own: Any = SimpleNamespace(checkpoint=checkpoint, target=TargetFiles("model.gguf"))
    for dtype, weight_type in ((None, "q4_1"), ("bfloat16", "bfloat16")):
        assert (
            describe_launch(LlamaCppServer(LlamaCppSettings(dtype=dtype)), launch, own)[
                "weight_type"
            ]
            == weight_type
        )
    with pytest.raises(UserError, match="server.baseline_port=8000"):
        OpenVinoSettings(baseline_port=8000)


def test_keys_that_do_not_apply_are_refused() -> None:
    """Settings that mean nothing for a server, or nothing without one, are refused."""
    server = {"_target_": "spectrain_serve.servers.vllm.VllmServer"}
    for settings in (
        {"eval": {"sweep": "tree"}},
        {"tree": {"depth": 3}},
        {"acceptance": {"temperature": 1.0}},
    ):
        with pytest.raises(UserError, match=next(iter(settings))):
            refuse_inapplicable({"server": server, **settings})
    with pytest.raises(UserError, match="serve=true"):
        refuse_inapplicable({"server": None})
    for settings in ({"concurrency": (1, 2)}, {"slo": {"ttft": "1s"}}):
        with pytest.raises(UserError, match="server=vllm"):
            build_evaluation(**settings)


def test_where_drafting_stops_paying() -> None:
    """Intervals decide: above 1 drafting pays, below 1 it does not, and around 1 the result is
    open.
    """
    speedups = [
        {"concurrency": level, "ratio": ratio, "ci95": [ratio - 0.1, ratio + 0.1]}
        for level, ratio in ((1, 1.5), (4, 1.05), (8, 0.8))
    ]
    server = {
        "counts": "requests",
        "requests_counted": None,
        "totals_counted": None,
        "speedups": speedups,
        "failed": {},
    }
    text = " ".join(describe_server(server))
    assert (
        "pays at 1 (1.50 times" in text
        and "costs more than it gains at 8" in text
        and "undecided at 4" in text
    )
    assert "stops paying at 8" in text


def test_a_server_that_answers_nothing(shallow: Target, prompts: str, tmp_path: Path) -> None:
    """If no prompt can be given to it, the run fails with the reason."""
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "Once upon a time"}\n')
    with pytest.raises(RunError, match="plain text"):
        score_servers(
            tmp_path / "a", OwnServer(shallow, Ngram(shallow)), None, str(path), report=False
        )


@pytest.fixture(scope="module")
def stand_in(shallow: Target, drafter: Drafter) -> Iterator[ModelStandIn]:
    """A stand-in for vLLM whose answers have the rounds of our own chain."""

    def count_own_rounds(prompt: list[int], answer: list[int]) -> Rounds:
        own = decode(shallow, [prompt], Greedy(), len(answer), drafter, Chain(3))[0]
        return [length - 1 for length in own.round_lengths], own.depths

    stand_in = ModelStandIn(shallow)
    stand_in.count_rounds = count_own_rounds
    yield stand_in
    stand_in.stop()


def test_a_server_without_a_run(
    stand_in: ModelStandIn,
    shallow_folder: Path,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`spectrain eval server=vllm` scores what is served: with a target's token ids, and with
    messages, it is the same.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spectrain_serve.servers.counters.SETTLE_SECONDS", 0)
    settings = {
        "eval.prompts": prompts,
        "eval.max_new_tokens": 16,
        "eval.concurrency": [1, 2],
        "eval.limit": 2,
    }
    target = {"target": "hf", "target.model": str(shallow_folder)}
    with_tokens = spectrain.evaluate_server("vllm", stand_in.url, **{**settings, **target})
    assert with_tokens["setting"]["server"]["prompts_as"] == "token ids"
    assert (
        with_tokens["server"]["counts"] == "requests"
        and with_tokens["server"]["template"]["equal"] > 0
    )
    assert (
        with_tokens["serving"]["drafted"]["per_token_ms"]["p50"] == 2
        and with_tokens["serving"]["drafted"]["clock"] == "engine"
    )
    assert with_tokens["serving"]["drafted"]["first_token_ms"]["p50"] == 6
    messages = spectrain.evaluate_server(
        "vllm", stand_in.url, **settings, **{"eval.name": "messages"}
    )
    assert (
        messages["setting"]["server"]["prompts_as"] == "messages"
        and messages["setting"]["target"] == "served"
    )
    for key in ("acceptance_length", "acceptance_by_depth", "tokens_by_round"):
        assert messages[key] == with_tokens[key]
    assert {path.name for path in (tmp_path / "runs" / "eval").iterdir()} == {
        "vllm-prompts",
        "messages",
    }
    # Requests of one level share prefixes, and none with another level.
    salts = {body.get("cache_salt") for body in stand_in.bodies if body.get("stream")}
    assert len(salts) == 4
