"""The causal drafter: what is cut, what is trained, what is decoded and what is saved are one
and the same model.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from spectrain.config.build import GroupSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.layers.losses import DIVERGENCES, jensen_shannon
from spectrain.drafters.layers.small_models import check_tokenizer, cut_model
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.model_parts import find_decoder
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.training.checkpoints import collect_tensors, load_tensors
from spectrain.trees import Chain, Eagle2, TreeBuilder
from tests.decoding.rounds import Keeping, watching
from tests.installed import load_cases
from tests.models.architectures import save_small
from tests.targets import cut_tiny

ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
PROMPTS = [[5, 900, 71, 4, 333], [17, 1200, 8], [40, 41, 42, 43, 44, 45, 46, 47, 48]]


def make_drafter(target: Target, **options: Any) -> Causal:
    """Make a small drafter of its own architecture; `options` are the architecture's."""
    torch.manual_seed(7)
    return Causal(target, architecture={**ARCHITECTURE, **options})


def make_dataset(count: int = 3) -> Dataset:
    """Make sequences of unequal length, supervised in two spans."""
    rows = torch.randint(3, 2000, (count, 24)).tolist()
    masks = [[i in (4, 5, 6) or i >= 12 for i in range(24 - 3 * n)] for n in range(count)]
    return Dataset([Example(row[: len(mask)], mask) for row, mask in zip(rows, masks)], count, 0, 0)


def make_batch(target: Target, drafter: Causal) -> Batch:
    return LiveSource().make_batch(
        BatchRequest(make_dataset()[[0, 1, 2]], target, drafter.stages[0].layers)
    )


# Cutting


@pytest.mark.parametrize(
    ("count", "expected_layers"),
    [
        (1, [0]),
        (2, [0, 7]),
        (3, [0, 4, 7]),
        (4, [0, 2, 5, 7]),
        (5, [0, 2, 4, 5, 7]),
        (7, [0, 1, 2, 4, 5, 6, 7]),
    ],
)
def test_cut_layers_are_evenly_spaced_copies(
    tiny: Target, count: int, expected_layers: list[int]
) -> None:
    """The first and the last layer stay, the gaps differ by at most one, and every tensor equals
    the target's.
    """
    if count > 1:
        gaps = [right - left for left, right in zip(expected_layers, expected_layers[1:])]
        assert (
            expected_layers[0] == 0
            and expected_layers[-1] == tiny.num_layers - 1
            and max(gaps) - min(gaps) <= 1
        )
    cut = Causal(tiny, num_layers=count).model
    target = tiny
    assert cut.num_layers == cut.config.num_hidden_layers == count
    for new, old in enumerate(expected_layers):
        expected = target.layers[old].state_dict()
        actual = cut.layers[new].state_dict()
        assert actual.keys() == expected.keys() and all(
            torch.equal(actual[key], expected[key]) for key in actual
        )
    for left, right in (
        (cut.head.output, target.head.output),
        (cut.head.embedding, target.head.embedding),
        (cut.decoder.norm, target.decoder.norm),
    ):
        assert torch.equal(left.weight, right.weight)


def test_a_cut_copy_shares_no_memory_with_the_target(shallow: Target) -> None:
    """Learning never writes into the target."""
    target_pointers = {parameter.data_ptr() for parameter in shallow.parameters()}
    assert target_pointers.isdisjoint(
        parameter.data_ptr() for parameter in Causal(shallow, num_layers=2).parameters()
    )


@pytest.mark.parametrize("count", [8, 9, -1])
def test_a_cut_that_cuts_nothing_is_refused(tiny: Target, count: int) -> None:
    """As many layers as the target has, more of them, or fewer than one are refused."""
    with pytest.raises(UserError, match=rf"drafter\.num_layers={count}: tiny has 8 layers"):
        cut_model(tiny, count)


def test_cut_models_may_say_nothing_of_their_layers(tmp_path: Path) -> None:
    """Mamba's kinds of layers follow from the number of layers, and cannot be set."""
    save_small("mamba2", tmp_path)
    load_tiny().tokenizer.save_pretrained(tmp_path)
    model = cut_model(load_hf(str(tmp_path), "mamba2", device="cpu"), 2)
    assert len(find_decoder(model).layers) == 2  # type: ignore[arg-type]


def test_zero_layers_are_refused(shallow: Target) -> None:
    """drafter.num_layers=0 is a mistake, and not the default."""
    with pytest.raises(UserError, match=r"drafter\.num_layers=0"):
        Causal(shallow, num_layers=0)


def test_a_quarter_of_the_layers_by_default(tiny: Target) -> None:
    """Without settings the drafter has a quarter of the target's layers."""
    assert Causal(tiny).model.num_layers == 2


# Decoding


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "builder",
    [
        Chain(4),
        Chain(3, "sampled", 0.7),
        Eagle2(3, 6, 2),
        *CASES.get("test_what_is_drafted_is_what_is_trained", ()),
    ],
    ids=lambda builder: f"{builder.name}-{builder.children}",
)
def test_what_is_drafted_is_what_is_trained(
    shallow: Target, builder: TreeBuilder, count: int
) -> None:
    """After every node, over ragged rounds, the rollout's log q equals the training forward's
    over the whole text.
    """
    drafter = Causal(shallow, num_layers=2)
    records, builder = watching(builder)
    generations = decode(shallow, PROMPTS[:count], Greedy(), 16, drafter, builder, ignore_eos=True)
    accepted = [generation.round_lengths for generation in generations]
    assert (
        max(map(max, accepted)) > 1
        and min(map(len, accepted)) > 2
        and (count == 1 or accepted[0] != accepted[1])
    )
    assert len(records) > 10
    for text, drafted, log_q in records:
        logits = drafter.model.run(torch.tensor([text + drafted]), ForwardPlan(logits=True)).logits
        assert logits is not None
        torch.testing.assert_close(log_q, logits[0, -1].log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("builder", [Chain(4), Eagle2(3, 6, 2)], ids=["chain", "tree"])
def test_an_accepted_node_is_run_once(
    shallow: Target, builder: TreeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round begins with the root and, where a leaf was accepted, which was not run, the leaf."""
    drafter = Causal(shallow, num_layers=2)
    run_tokens = drafter.run_tokens
    begun = []

    def record(tokens: Tensor, plan: ForwardPlan) -> Tensor:
        if plan.mask is None:
            begun.append(tokens.shape[1])
        return run_tokens(tokens, plan)

    monkeypatch.setattr(drafter, "run_tokens", record)
    generations = decode(shallow, PROMPTS, Greedy(), 16, drafter, builder, ignore_eos=True)
    longest = max(length for each in generations for length in each.round_lengths)
    assert longest > 2
    assert begun[0] == 1 + max(map(len, PROMPTS))
    assert max(begun[1:]) == 2


def make_padded_target(rows: int) -> Target:
    """Make the tiny target with more rows of embeddings than its tokenizer has tokens."""
    target = cut_tiny(3)
    target.model.resize_token_embeddings(target.head.vocab_size + rows, mean_resizing=False)  # type: ignore[operator]
    with torch.no_grad():
        target.head.output.weight[-rows:] = 0
    return target


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "builder",
    [Chain(3), Eagle2(3, 6, 3), Chain(3, "sampled", 50.0)],
    ids=["chain", "eagle2", "drawn"],
)
@pytest.mark.parametrize(("vocab_size", "extra_rows"), [(2112, 0), (2048, 64), (2080, 64)])
def test_padded_vocabularies(vocab_size: int, extra_rows: int, builder: TreeBuilder) -> None:
    """With more or fewer rows than the target's, the output is the target's own and no id is
    drafted that either lacks.
    """
    target = make_padded_target(extra_rows) if extra_rows else cut_tiny(3)
    drafter = make_drafter(target, vocab_size=vocab_size)
    with torch.no_grad():
        # often the most likely tokens
        drafter.model.head.output.weight[2048:] = 100 * drafter.model.head.output.weight[:1]
    recorder = Keeping(builder)
    expected = [decode(target, [prompt], Greedy(), 12)[0].output for prompt in PROMPTS]
    assert [
        generation.output for generation in decode(target, PROMPTS, Greedy(), 12, drafter, recorder)
    ] == expected
    limit = min(vocab_size, target.head.vocab_size)
    assert (
        drafter.vocab_size == limit
        and recorder.trees
        and all(int(tree.tokens.max()) < limit for tree in recorder.trees)
    )
    losses = drafter.loss(make_batch(target, drafter), target, TrainingState())
    assert torch.isfinite(losses.total) and losses.total > 0


def test_a_vocabulary_without_all_tokens_is_refused(shallow: Target) -> None:
    """A drafter that has no embedding for a token of the tokenizer could not read what the
    target emits.
    """
    with pytest.raises(UserError, match=r"drafter\.architecture.*vocab_size"):
        make_drafter(shallow, vocab_size=2000)


# Saving


def rebuild_drafter(drafter: Causal, target: Target, **options: Any) -> Causal:
    """Build a drafter from the saved settings, as they come back from JSON, and the saved
    tensors only.
    """
    torch.manual_seed(99)
    rebuilt = Causal(target, **json.loads(json.dumps({**options, **drafter.saved.settings})))
    load_tensors(rebuilt, collect_tensors(drafter))
    return rebuilt


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2},
        {"architecture": ARCHITECTURE},
        {"architecture": {**ARCHITECTURE, "tie_word_embeddings": True}},
        {"architecture": {**ARCHITECTURE, "vocab_size": 32000, "max_position_embeddings": 2048}},
        {"architecture": {**ARCHITECTURE, "model_type": "qwen2", "num_hidden_layers": 1}},
    ],
    ids=["cut", "untied", "tied", "class defaults", "qwen2"],
)
def test_saved_settings_rebuild_the_drafter(shallow: Target, options: dict[str, Any]) -> None:
    """Settings and tensors alone give the same configuration, the same weights and the same
    logits.
    """
    drafter = Causal(shallow, **options)
    rebuilt = rebuild_drafter(drafter, shallow, **options)
    config, rebuilt_config = (
        each_drafter.model.config.to_dict() for each_drafter in (drafter, rebuilt)
    )
    assert {
        key: value for key, value in config.items() if value != rebuilt_config.get(key)
    }.keys() <= {
        "architectures",
        "dtype",
        "_name_or_path",
    }
    assert all(
        torch.equal(value, rebuilt.state_dict()[name])
        for name, value in drafter.state_dict().items()
    )
    tokens = torch.tensor(PROMPTS[:1])
    assert torch.equal(
        drafter.model.run(tokens, ForwardPlan(logits=True)).logits,
        rebuilt.model.run(tokens, ForwardPlan(logits=True)).logits,
    )


def test_saved_settings_need_no_other_directory(shallow: Target, tmp_path: Path) -> None:
    """A drafter that came from a directory loads when that directory is gone."""
    make_drafter(shallow).model.save(tmp_path / "model")
    drafter = Causal(shallow, model=str(tmp_path / "model"))
    shutil.rmtree(tmp_path / "model")
    rebuilt = rebuild_drafter(drafter, shallow, model=str(tmp_path / "model"))
    assert all(
        torch.equal(value, rebuilt.state_dict()[name])
        for name, value in drafter.state_dict().items()
    )


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_saved_once(shallow: Target, tied: bool) -> None:
    """Tied embeddings are one tensor of the file and stay tied after loading."""
    drafter = make_drafter(shallow, tie_word_embeddings=tied)
    full = [name for name, tensor in collect_tensors(drafter).items() if tensor.shape == (2048, 32)]
    assert len(full) == (1 if tied else 2)
    head = rebuild_drafter(drafter, shallow).model.head
    assert (head.output.weight is head.embedding.weight) == tied


# Where it comes from


def copy_tokenizer(
    target: Target, folder: Path, swap: tuple[str, str] | None = None, **specials: str
) -> PreTrainedTokenizerFast:
    """Copy the target's tokenizer, with two tokens swapped or with other special tokens."""
    target.tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    if swap is not None:
        vocab = content["model"]["vocab"]
        vocab[swap[0]], vocab[swap[1]] = vocab[swap[1]], vocab[swap[0]]
        file.write_text(json.dumps(content))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **specials}
    return PreTrainedTokenizerFast(tokenizer_file=str(file), **special)


def test_the_same_tokenizer_passes(shallow: Target, tmp_path: Path) -> None:
    """A copy of the tokenizer is the target's, and so is that of a saved drafter, which loads as
    it was.
    """
    check_tokenizer(copy_tokenizer(shallow, tmp_path / "copy"), shallow.tokenizer, "copy")
    drafter = make_drafter(shallow)
    drafter.model.save(tmp_path / "model")
    loaded = Causal(shallow, model=str(tmp_path / "model"))
    assert all(
        torch.equal(value, loaded.state_dict()[name])
        for name, value in drafter.state_dict().items()
    )


def pick_two_tokens(target: Target) -> tuple[str, str]:
    """Pick two ordinary tokens that no merge builds or uses: single bytes of no text."""
    names = target.tokenizer.convert_ids_to_tokens([3, 4])
    return str(names[0]), str(names[1])


def test_a_tokenizer_with_a_changed_id_is_refused(shallow: Target, tmp_path: Path) -> None:
    """The tokens whose ids differ are named, with both ids."""
    first, second = pick_two_tokens(shallow)
    with pytest.raises(UserError) as caught:
        check_tokenizer(
            copy_tokenizer(shallow, tmp_path, (first, second)), shallow.tokenizer, "DIR"
        )
    assert str(caught.value).startswith("drafter.model=DIR: its tokenizer is not the target's")
    assert f"{first!r} is 4 against 3" in str(caught.value) and f"{second!r} is 3 against 4" in str(
        caught.value
    )


@pytest.mark.parametrize("special", ["eos_token", "bos_token"])
def test_a_tokenizer_with_another_special_token_is_refused(
    shallow: Target, tmp_path: Path, special: str
) -> None:
    """Another end or beginning of text is named."""
    with pytest.raises(UserError, match=rf"{special} '<\|im_start\|>' against"):
        check_tokenizer(
            copy_tokenizer(shallow, tmp_path, **{special: "<|im_start|>"}), shallow.tokenizer, "DIR"
        )


def test_a_tokenizer_with_an_extra_token_is_refused(shallow: Target, tmp_path: Path) -> None:
    """A token that the target's lacks is named, as is one that only the target's has."""
    more = copy_tokenizer(shallow, tmp_path)
    more.add_tokens(["<extra>"])
    for tokenizer, reference in ((more, shallow.tokenizer), (shallow.tokenizer, more)):
        with pytest.raises(UserError, match="'<extra>' is (2048|None) against (2048|None)"):
            check_tokenizer(tokenizer, reference, "DIR")


def test_a_model_with_another_tokenizer_is_refused(shallow: Target, tmp_path: Path) -> None:
    """The tokenizer is checked when a directory is loaded."""
    make_drafter(shallow).model.save(tmp_path)
    copy_tokenizer(shallow, tmp_path, pick_two_tokens(shallow)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"drafter\.model=.*its tokenizer is not the target's"):
        Causal(shallow, model=str(tmp_path))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "/nowhere/at/all"}, r"drafter\.model=/nowhere/at/all: it cannot be loaded"),
    ({"num_layers": 2, "model": "DIR"}, r"drafter\.model: drafter\.num_layers already names"),
    (
        {"num_layers": 2, "architecture": ARCHITECTURE},
        r"drafter\.architecture: drafter\.num_layers already names",
    ),
    (
        {"model": "DIR", "architecture": ARCHITECTURE},
        r"drafter\.architecture: drafter\.model already names",
    ),
    (
        {"architecture": {"model_type": "nonsense"}},
        r"drafter\.architecture: transformers cannot build it",
    ),
    ({"beta": 0.0}, r"drafter\.beta=0\.0"),
    ({"beta": 1.0}, r"drafter\.beta=1\.0"),
    ({"loss_temperature": 0.0}, r"drafter\.loss_temperature=0\.0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_settings_are_refused(shallow: Target, options: dict[str, Any], message: str) -> None:
    """A setting that cannot be met is refused under its own key."""
    with pytest.raises(UserError, match=message):
        GroupSpec("drafter", "causal", options).build(target=shallow)


# Training


def compute_loss_by_loop(
    target: Target, drafter: Causal, batch: Batch, temperature: float
) -> tuple[Tensor, int, int]:
    """Compute the summed loss, the hits and the count by a loop over the assistant's tokens."""
    logits = drafter.model.run(batch.tokens, ForwardPlan(logits=True)).logits
    target_logits = target.run(batch.tokens, ForwardPlan(logits=True)).logits
    assert logits is not None and target_logits is not None
    total = torch.zeros(())
    hits = 0
    count = 0
    for b, t in batch.loss_mask.nonzero().tolist():
        if t == 0:
            continue
        log_q = (logits[b, t - 1] / temperature).log_softmax(-1)
        log_p = (target_logits[b, t - 1] / temperature).log_softmax(-1)
        token = int(batch.tokens[b, t])
        if drafter.divergence == "cross_entropy":
            total = total - log_q[token]
            label = token
        elif drafter.divergence == "jensen_shannon":
            total = total + jensen_shannon(log_p[None], log_q[None], drafter.beta)[0]
            label = int(log_p.argmax())
        else:
            total = total + DIVERGENCES[drafter.divergence](log_p[None], log_q[None])[0]
            label = int(log_p.argmax())
        hits = hits + (int(log_q.argmax()) == label)
        count = count + 1
    return total, hits, count


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("loss", ["cross_entropy", *DIVERGENCES])
def test_the_loss_equals_brute_force(shallow: Target, loss: Any, temperature: float) -> None:
    """Sum, hits and count are those of a loop over the assistant's tokens, both distributions at
    loss_temperature.
    """
    drafter = Causal(shallow, num_layers=2, loss=loss, beta=0.3, loss_temperature=temperature)
    batch = make_batch(shallow, drafter)
    losses = drafter.loss(batch, shallow, TrainingState())
    total, hits, count = compute_loss_by_loop(shallow, drafter, batch, temperature)
    assert losses.terms.keys() == {loss}
    torch.testing.assert_close(losses.total.detach(), total, rtol=1e-4, atol=1e-3)
    assert losses.hits.tolist() == [hits] and losses.counts.tolist() == [count] == [
        batch.num_supervised
    ]


def test_many_rows_add_up(shallow: Target) -> None:
    """More supervised tokens than are taken at once give the sum of their parts."""
    drafter = make_drafter(shallow)
    rows = torch.randint(3, 2000, (3, 500)).tolist()
    data = Dataset([Example(row, [i > 0 for i in range(500)]) for row in rows], 3, 0, 0)
    full = drafter.loss(
        LiveSource().make_batch(BatchRequest(data[[0, 1, 2]], shallow, ("final",))),
        shallow,
        TrainingState(),
    )
    parts = [
        drafter.loss(
            LiveSource().make_batch(BatchRequest(data[[n]], shallow, ("final",))),
            shallow,
            TrainingState(),
        )
        for n in range(3)
    ]
    torch.testing.assert_close(
        full.total, torch.stack([part.total for part in parts]).sum(), rtol=1e-4, atol=1e-3
    )
    assert full.counts.tolist() == [1497] and full.hits.item() == sum(
        part.hits.item() for part in parts
    )


@pytest.mark.parametrize("position", [2, 3, 4, 6, 8, 11, 12, 23])
def test_prompt_tokens_carry_no_loss(shallow: Target, position: int) -> None:
    """The logits after token t - 1 get a gradient exactly where token t is the assistant's."""
    drafter = make_drafter(shallow)
    batch = make_batch(shallow, drafter)
    outputs: list[Tensor] = []

    def retain_output(module: Any, args: Any, output: Tensor) -> Tensor:
        outputs.append(output)
        output.retain_grad()
        return output

    handle = drafter.model.decoder.norm.register_forward_hook(retain_output)
    drafter.loss(batch, shallow, TrainingState()).total.backward()
    handle.remove()
    assert outputs[0].grad is not None
    assert bool(outputs[0].grad[0, position - 1].abs().sum() > 0) == bool(
        batch.loss_mask[0, position]
    )


@pytest.mark.parametrize(
    "options", [{"num_layers": 2}, {"architecture": ARCHITECTURE}], ids=["cut", "fresh"]
)
def test_gradients_do_not_reach_the_target(options: dict[str, Any]) -> None:
    """Even a target that could learn gets no gradient; every parameter of the drafter gets one."""
    target = cut_tiny(3)
    drafter = Causal(target, **options)
    target.requires_grad_(True)
    drafter.loss(make_batch(target, drafter), target, TrainingState()).total.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(parameter.grad is not None for parameter in drafter.parameters())


# As an assistant of transformers' own


def test_transformers_drafts_with_it_the_same(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As assistant_model of generate, the saved drafter drafts the same in every round, and as
    much is accepted.
    """
    depth = 4
    limit = 16
    drafter = Causal(shallow, num_layers=2).eval()
    drafter.model.save(tmp_path)
    assistant: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    settings = assistant.generation_config
    settings.num_assistant_tokens = depth
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    rounds: list[tuple[list[int], list[int]]] = []
    accepted_counts: list[int] = []
    draft = AssistedCandidateGenerator.get_candidates
    update = AssistedCandidateGenerator.update_candidate_strategy

    def record_candidates(self: Any, input_ids: Tensor, **options: Any) -> Any:
        result = draft(self, input_ids, **options)
        rounds.append((input_ids[0].tolist(), result[0][0, input_ids.shape[1] :].tolist()))
        return result

    def record_num_matches(self: Any, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        accepted_counts.append(int(num_matches))
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", record_candidates)
    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", record_num_matches)
    with reference_model(shallow) as model:
        assisted = [
            generate(model, prompt, limit, frozenset(), assistant_model=assistant)
            for prompt in PROMPTS
        ]
    assert assisted == [
        decode(shallow, [prompt], Greedy(), limit, ignore_eos=True)[0].output for prompt in PROMPTS
    ]
    assert len(rounds) == len(accepted_counts) and {0} < set(accepted_counts)
    reference_accepted = torch.zeros(depth)
    our_accepted = torch.zeros(depth)
    drafted = 0
    for (text, candidates), count in zip(rounds, accepted_counts):
        assert (
            candidates
            == decode(drafter.model, [text], Greedy(), depth, ignore_eos=True)[0].output[
                : len(candidates)
            ]
        )
        # in our engine a round begins after a token of the target
        if len(candidates) == depth and text not in PROMPTS:
            (generation,) = decode(
                shallow, [text[:-1]], Greedy(), depth + 2, drafter, Chain(depth), ignore_eos=True
            )
            our_accepted += torch.arange(depth) < generation.round_lengths[0] - 1
            reference_accepted += torch.arange(depth) < count
            drafted += 1
    assert drafted > 10 and torch.equal(our_accepted, reference_accepted)
