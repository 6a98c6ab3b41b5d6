"""Tokens without a row in an embedding: a tokenizer that was extended, and a small model whose
vocabulary is padded less.
"""

import json
from pathlib import Path

import pytest
import torch

from spectrain.data.chat import tokenize_conversation, tokenize_prompt
from spectrain.data.readers import JsonlReader
from spectrain.data.tokens import TokensReader
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.causal import Causal
from spectrain.drafters.pard import Pard
from spectrain.errors import UserError
from spectrain.models.loading import load_hf
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain
from tests.models.checkpoints import save_unquantized

ROWS = 2000


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return a target of which 48 tokens of the tokenizer have no embedding."""
    folder = tmp_path_factory.mktemp("small")
    save_unquantized(folder, vocab_size=ROWS)
    return load_hf(str(folder), "small", device="cpu")


def test_loading_says_once_how_many_tokens_have_no_embedding(
    small: Target, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    load_hf(small.path, "small", device="cpu")
    assert (
        capfd.readouterr().err.count(
            "target small: 48 tokens of its tokenizer have no embedding, which has 2000 rows"
        )
        == 1
    )


def test_texts_with_such_a_token_are_refused(small: Target, tmp_path: Path) -> None:
    word = small.tokenizer.decode([ROWS + 40])
    sentence = (
        "a text holds '.*', the token 20.. of the target's tokenizer, and the target's "
        "embedding has 2000 rows"
    )
    question = {"role": "user", "content": word}
    answer = {"role": "assistant", "content": f"so {word} it is"}
    with pytest.raises(UserError, match=sentence):
        tokenize_prompt(small.template, [question])
    with pytest.raises(UserError, match=sentence):
        tokenize_conversation(small.template, [{"role": "user", "content": "a"}, answer])
    with pytest.raises(UserError, match=sentence):
        tokenize_prompt(small.template.with_arguments({"x": 1}), [question])
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [question, answer]}) + "\n")
    with pytest.raises(UserError, match=sentence):
        JsonlReader(str(path)).make_dataset(small.template)
    path.write_text(json.dumps({"input_ids": [5, ROWS], "loss_mask": [0, 1]}) + "\n")
    with pytest.raises(UserError, match="holds the token id 2000, and the target has 2000 tokens"):
        TokensReader(str(path)).make_dataset(small.template)


@pytest.mark.parametrize("rows", [2048, 2112])
@pytest.mark.parametrize("family", [Causal, Pard])
def test_a_small_model_may_be_padded_otherwise(
    family: type[Causal] | type[Pard], rows: int, tmp_path: Path
) -> None:
    """A random target writes tokens of its padding too; drafted output is its own."""
    save_unquantized(tmp_path / "target", vocab_size=2080)
    target = load_hf(str(tmp_path / "target"), device="cpu")
    save_unquantized(tmp_path / "drafter", vocab_size=rows)
    drafter = family(target, model=str(tmp_path / "drafter")).eval()
    drafter.prepare(target, torch.arange(2080))
    # The first prompts end with tokens of the padding.
    prompts = [[5, 7, 9], [5, 2070], [2079, 2060, 11]]
    with reference_model(target) as model:
        expected = [generate(model, prompt, 16, target.stop_ids) for prompt in prompts]
    assert [
        row.output for row in decode(target, prompts, Greedy(), 16, drafter, Chain(2))
    ] == expected


def test_a_tokenizer_of_countless_added_tokens_is_refused(tmp_path: Path) -> None:
    """A million of them take longer than a minute to load."""
    save_unquantized(tmp_path, vocab_size=ROWS)
    token = {"id": 3, "content": "<x>", "single_word": False, "special": True}
    content = json.dumps({"added_tokens": [token] * 50_001})
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: it has 50001 added tokens"):
        load_hf(str(tmp_path), "many", device="cpu")
