"""Texts with images: features, training and decoding as transformers computes them, or a refusal
in a sentence.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.data.chat import Example, tokenize_conversation, tokenize_prompt
from spectrain.data.image_processor import get_images, open_image
from spectrain.data.images import expand_codes
from spectrain.data.readers import JsonlReader
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.medusa import Medusa
from spectrain.errors import UserError
from spectrain.eval.prompts import read_prompts
from spectrain.export.targets import TargetFiles
from spectrain.features.base import BatchRequest, FeaturesRead
from spectrain.features.live_source import LiveSource
from spectrain.features.stored_source import StoredSource
from spectrain.models.architectures.vision import (
    _bidirectional_masks,
    make_decoder_inputs,
    masks_for_kind,
)
from spectrain.models.check import check_vision
from spectrain.models.loading import load_tiny
from spectrain.models.masks import RequestedMask
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2

from .visions import make_question, picture, seeing_target

NEW_TOKENS = 16


@pytest.fixture(scope="module", params=["qwen2_5_vl", "mistral3"])
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return seeing_target(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pictures")
    return picture(folder, 1), picture(folder, 2, (56, 112))


def make_conversations(pictures: tuple[str, str]) -> list[list[dict[str, Any]]]:
    first, second = pictures
    answers = [
        "A red house by the sea, and a boat.",
        "The first is larger.",
        "Nothing to see here.",
    ]
    questions = [
        make_question("What is this?", first),
        make_question(first, "and", second, "Which?"),
        [{"role": "user", "content": "Hello"}],
    ]
    return [
        [*question, {"role": "assistant", "content": answer}]
        for question, answer in zip(questions, answers)
    ]


def make_examples(target: Target, pictures: tuple[str, str]) -> list[Example]:
    return [
        tokenize_conversation(target.template, messages, target.vision)[0]
        for messages in make_conversations(pictures)
    ]


def make_drafter(family: Any, target: Target) -> Drafter:
    torch.manual_seed(1)
    settings: dict[Any, Any] = {Eagle3: {"vocab_size": 256}, DFlash: {"config": DFlashConfig()}}
    drafter: Drafter = family(target, **settings.get(family, {}))
    counts = torch.ones(target.head.vocab_size, dtype=torch.int64)
    counts[-4:] = 0  # no answer holds what stands for images
    drafter.prepare(target, counts)
    return drafter


def test_only_the_answer_carries_loss(target: Target, pictures: tuple[str, str]) -> None:
    """The supervised tokens are the answer, whatever images stand before it."""
    for messages, example in zip(make_conversations(pictures), make_examples(target, pictures)):
        answer = [token for token, supervised in zip(example.tokens, example.mask) if supervised]
        assert target.tokenizer.decode(answer).removesuffix("<|im_end|>") == messages[-1]["content"]


@pytest.mark.parametrize("packed", [False, True])
def test_features_over_images_equal_the_models(
    target: Target, pictures: tuple[str, str], packed: bool
) -> None:
    """Padded or packed together, every text has the features that the model of text and images
    gives it alone.
    """
    examples = make_examples(target, pictures)
    layers = (*range(1, target.num_layers), "final")
    batch = LiveSource().make_batch(BatchRequest(examples, target, layers, packed))
    assert batch.features is not None
    rows = batch.features.hidden[0].split(batch.lengths) if batch.lengths else batch.features.hidden
    with torch.no_grad(), reference_model(target) as model:
        for example, row in zip(examples, rows):
            images = get_images(example.tokens)
            image_inputs = {} if images is None else images.model_inputs(len(example.tokens), model)
            with target.capture_layers(tuple(range(1, target.num_layers))) as states:
                logits = model(
                    input_ids=torch.tensor([example.tokens]), use_cache=False, **image_inputs
                ).logits
            ours = row[: len(example.tokens)]
            for layer in range(target.num_layers - 1):
                torch.testing.assert_close(
                    ours[:, layer], states[layer + 1][0], atol=1e-3, rtol=1e-3
                )
            torch.testing.assert_close(
                target.head.logits(ours[:, -1]), logits[0].float(), atol=1e-3, rtol=1e-3
            )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", [Eagle3, Medusa, DFlash])
def test_decoding_with_images_equals_generate(
    target: Target, pictures: tuple[str, str], family: Any
) -> None:
    """Trees and chains, alone and in a batch with a text that has no image, are continued as by
    `generate` with the pixels.
    """
    prompts = [
        tokenize_prompt(target.template, messages[:1], target.vision)
        for messages in make_conversations(pictures)
    ]
    with reference_model(target) as model:
        expected = [generate(model, prompt, NEW_TOKENS, target.stop_ids) for prompt in prompts]
    drafter = make_drafter(family, target)
    for builder in (Eagle2(3, 8), Chain(3)):
        session = Session(target, Greedy(), drafter, builder)
        assert [generation.output for generation in session.decode(prompts, NEW_TOKENS)] == expected
        assert session.decode(prompts[:1], NEW_TOKENS)[0].output == expected[0]


OTHERS = ("gemma3", "gemma4", "glm4v", "internvl", "llama4", "llava", "llava_next",
    "llava_onevision", "qwen2_vl", "qwen3_5",
          "qwen3_vl", "qwen3_vl_moe")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_vision_towers_decode_as_generate(
    name: str, pictures: tuple[str, str], tmp_path: Path
) -> None:
    """Towers take pictures of one size, tiles, or patches with positions; tokens of an image see
    each other in all layers, in some or in none."""
    target = seeing_target(name, tmp_path)
    for packed in (False, True):
        test_features_over_images_equal_the_models(target, pictures, packed)
    test_decoding_with_images_equals_generate(target, pictures, Eagle3)
    text = make_examples(target, pictures)[0].tokens
    inputs = make_decoder_inputs(
        target, torch.tensor([list(text)]), [text], torch.arange(len(text))[None], None
    )
    assert [*map(set, inputs.visible_masks)] == [AHEAD.get(name, set())]


AHEAD = {"gemma3": {"full_attention", "sliding_attention"}, "gemma4": {"sliding_attention"}}


def test_bidirectional_image_masks_follow_requested_masks() -> None:
    """Two tokens see each other where a model's mask says so; a causal mask adds nothing."""
    positions = torch.arange(5)

    def image(
        batch: torch.Tensor, head: torch.Tensor, here: torch.Tensor, there: torch.Tensor
    ) -> torch.Tensor:
        return (there <= here) | ((here >= 1) & (here <= 2) & (there >= 1) & (there <= 2))

    first = torch.zeros(1)
    second = torch.ones(1)
    masks = [
        (first, RequestedMask(image, None)),
        (second, RequestedMask(lambda batch, head, here, there: there <= here, None)),
    ]
    visible = _bidirectional_masks({"near": first, "far": second}, masks, positions)
    expected = torch.ones(5, 5, dtype=torch.bool).tril()
    expected[1, 2] = True
    assert {*visible} == {"near"} and torch.equal(visible["near"], expected)
    for kind, expected_mask in (("near", expected), ("far", expected.tril())):
        assert torch.equal(masks_for_kind([visible, {}], [5, 4], kind)[0], expected_mask)


def test_another_image_changes_the_output(
    target: Target, pictures: tuple[str, str], tmp_path: Path
) -> None:
    """The tokens are the same and the answer is not; nor is the key by which features are
    stored.
    """
    texts = [
        tokenize_prompt(target.template, make_question("What?", path), target.vision)
        for path in (pictures[0], picture(tmp_path, 3))
    ]
    assert list(texts[0]) == list(texts[1])
    first, second = (
        generation.output for generation in Session(target, Greedy()).decode(texts, NEW_TOKENS)
    )
    assert first != second
    assert len({Example(text, [True] * len(text)).content_hash for text in texts}) == 2


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", [Eagle3, Medusa, DFlash])
def test_a_drafter_trains_on_images(target: Target, pictures: tuple[str, str], family: Any) -> None:
    """The loss is finite and falls, on features over images."""
    drafter = make_drafter(family, target)
    examples = make_examples(target, pictures)
    batch = LiveSource().make_batch(BatchRequest(examples, target, drafter.stages[0].layers))
    learning = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(8):
        total = drafter.loss(batch, target, TrainingState(0, 0.0)).total
        learning.zero_grad()
        total.backward()
        learning.step()
        losses.append(float(total.detach()))
    assert losses[-1] < losses[0] and all(loss == loss for loss in losses)


def test_stored_features_are_the_live_ones(
    target: Target, pictures: tuple[str, str], tmp_path: Path
) -> None:
    examples = make_examples(target, pictures)
    layers = (1, "final")
    store = StoredSource(str(tmp_path / "store"))
    store.prepare(target, FeaturesRead(layers), examples)
    request = BatchRequest(examples, target, layers)
    live, captured, read = (
        source.make_batch(request).features for source in (LiveSource(1.0), store, store)
    )
    assert live is not None and captured is not None and read is not None
    for example, ours, first, again in zip(examples, live.hidden, captured.hidden, read.hidden):
        count = len(example.tokens)
        assert torch.equal(ours[:count], first[:count]) and torch.equal(ours[:count], again[:count])


def test_conversations_with_images_are_read_from_a_file(
    pictures: tuple[str, str], tmp_path: Path
) -> None:
    """Paths stand in the parts, or next to the messages in their order, relative to the file."""
    name = Path(pictures[0]).name
    (tmp_path / name).write_bytes(Path(pictures[0]).read_bytes())
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "path": name}, {"type": "text", "text": "So?"}],
                },
                answer,
            ]
        },
        {
            "images": [name],
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "So?"}]},
                answer,
            ],
        },
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second = JsonlReader(str(file)).load_conversations()
    assert first == second
    assert (
        first.messages[0]["content"][0]["path"] == str(tmp_path / name)
        and first.messages[1]["content"] == "Yes"
    )


def test_prompts_with_images_are_read_from_a_file(
    target: Target, pictures: tuple[str, str], tmp_path: Path
) -> None:
    """What is scored may have images too; the answers that follow them are left out."""
    row = {
        "messages": [
            *make_question("What?", pictures[0]),
            {"role": "assistant", "content": "A boat."},
        ]
    }
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    (prompt,) = read_prompts(str(tmp_path / "prompts.jsonl")).prompts
    text = tokenize_prompt(target.template, prompt.opening_conversation, target.vision)
    assert (
        text == tokenize_prompt(target.template, make_question("What?", pictures[0]), target.vision)
        and get_images(text) is not None
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "path": "missing.png"},
        {"type": "image"},
        {"type": "image", "url": "https://a/b"},
    ],
)
def test_a_missing_image_is_refused(part: dict[str, str], tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Yes"}]
    }
    (tmp_path / "chats.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="line 1: .*image"):
        JsonlReader(str(tmp_path / "chats.jsonl")).load_conversations()


def test_text_only_readers_refuse_images(target: Target, pictures: tuple[str, str]) -> None:
    """A target without vision, a family that runs the target itself, and data that nobody gave
    eyes.
    """
    messages = make_conversations(pictures)[0]
    tiny = load_tiny()
    with pytest.raises(UserError, match="text alone"):
        tokenize_conversation(
            tiny.template,
            [{**messages[0], "content": [{"type": "image", "path": pictures[0]}]}, messages[1]],
            tiny.vision,
        )
    with pytest.raises(UserError, match="text alone"):
        tokenize_conversation(target.template, messages)
    with pytest.raises(UserError, match="text alone"):
        LiveSource().make_batch(BatchRequest(make_examples(target, pictures), target))


def test_images_with_other_logits_than_transformers_are_refused(
    target: Target, pictures: tuple[str, str]
) -> None:
    """The check compares transformers with the very forward that decoding would use."""
    text = tokenize_prompt(target.template, make_question("What?", pictures[0]), target.vision)

    def flip_embeddings(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Reverse the embeddings, in forwards of this project only."""
        is_ours = "visibility" in kwargs and "inputs_embeds" in kwargs
        return (
            (args, {**kwargs, "inputs_embeds": kwargs["inputs_embeds"].flip(1)})
            if is_ours
            else None
        )

    handle = target.decoder.register_forward_pre_hook(flip_embeddings, with_kwargs=True)
    target.image_check = check_vision
    try:
        with pytest.raises(UserError, match="with images its logits differ"):
            target.features(torch.tensor([text]), ("final",), texts=[text])
    finally:
        handle.remove()


def test_exports_name_the_model_of_text_and_images(target: Target) -> None:
    """An engine loads the full model; the ends that drafters take are those of its text decoder."""
    files = TargetFiles(target.path)
    assert (
        files.full_config.architectures == [type(target.model).__name__]
        and files.engine_path == target.path
    )
    assert files.build_meta_target().num_layers == target.num_layers
    assert torch.equal(files.load_embedding(), target.head.embedding.weight)
    assert torch.equal(files.load_head(), target.head.output.weight)


@pytest.mark.parametrize(
    ("plain", "expanded"),
    [
        ([1, 9, 2], [1, 9, 9, 9, 2]),
        ([9, 3], [9, 8, 9, 8, 3]),
        ([1, 9, 9, 2], [1, 9, 8, 9, 8, 2]),
        ([9, 5, 9, 6], [9, 9, 5, 9, 6]),
    ],
)
def test_loss_masks_expand_over_placeholders(plain: list[int], expanded: list[int]) -> None:
    """Tokens that are no placeholder keep what they have, and the tokens of images have nothing."""
    expected = [token not in (8, 9) for token in expanded]
    assert expand_codes(plain, [token != 9 for token in plain], expanded, 9) == expected
    with pytest.raises(UserError, match="changes the text"):
        expand_codes([*plain, 7], [True] * (len(plain) + 1), expanded, 9)


def write_png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG with a size that it claims, and with these chunks."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", size), *chunks, (b"IDAT", zlib.compress(bytes(200))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )  # fmt: skip


PICTURES = {
    "a size that would fill the memory": write_png(30_000, 30_000),
    "a profile that unpacks to 100 MB": write_png(
        8, 8, (b"iCCP", b"a\0\0" + zlib.compress(bytes(10**8)))
    ),
    "no picture": b"x",
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PICTURES[name])
    with pytest.raises(UserError, match=r"a\.png: it is no picture that can be read"):
        open_image(str(path))
