"""A small target that uses its whole context of 8,192 tokens: a Llama of three layers, trained on
synthetic documents.

    python -m lab.benchmarks.long_target [folder=runs/long-target]
    [out=lab/results/long-target.json]

The documents (`private_documents`) return to their own passages and facts at any distance. The
attention that copies is not left to chance: the heads of the first layer begin as heads that mostly
attend one and two tokens back, those of the second as induction heads (Olsson et al., 2022), and
training does the rest, first on short documents and last on ones of 8,192 tokens. The folder is an
ordinary one of transformers, so every command takes it as `target=hf target.model=FOLDER`. Its
language is
synthetic: a word tokenizer reads the words of these documents only. Numbers on this target show how
length acts on a drafter. They do not show the level of acceptance in natural text.

Shapes: B documents, T tokens, D width, W values of a word's embedding, C values of its code.
"""

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lab.small_targets.tiny_training import take_step
from spectrain.files import write_text
from spectrain.models.fast import pack_linears, unpack_linears
from spectrain.models.pretrained import load_pretrained
from spectrain.provenance import collect_provenance

from .command import run_benchmark
from .long_documents import Document
from .long_scoring import RANGES
from .private_documents import KEY_WORDS, SPECIAL, VALUE_WORDS, PrivateWriter, WordChain

VOCAB_SIZE = 512
WIDTH = 128
HEADS = 2
HEAD_DIM = 64
LAYERS = 3
MAX_LENGTH = 8192
ROPE_THETA = 1e7
SHORT_LENGTH = 512
EXTENDED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": ROPE_THETA,
    "factor": MAX_LENGTH / SHORT_LENGTH,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": SHORT_LENGTH,
}
"""Llama 3.1's scaling: pairs of values that turn slowly turn 16 times slower still, so that
words match at any distance.
"""
WORD = 64
CODE = 32
"""Values of the residual stream that hold the word itself, and values of the code of each of the
two words before it.
"""
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }}\n{{ message['content'] }} "
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)
BATCH_TOKENS = 4096
WARM_UP_STEPS = 20
SEED = 0
EXTENDED_SEED = 10
LOOKUP_DISTANCES = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Stage:
    """A part of the training, on documents of one length, with a learning rate that falls
    linearly.
    """

    length: int
    steps: int
    lr: tuple[float, float]
    passage_tokens: tuple[int, int] = (64, 96)


STAGES = (
    Stage(256, 300, (3e-3, 1.859e-3), (16, 32)),
    Stage(512, 200, (1.239e-3, 7.324e-4)),
    Stage(2048, 120, (5.493e-4, 3.211e-4)),
    Stage(8192, 90, (2.141e-4, 1e-4)),
)
EXTENDED_STAGES = (Stage(2048, 60, (8e-4, 4e-4)), Stage(8192, 30, (4e-4, 5e-5)))
"""Stages after the rotary embedding was extended; words at a distance of 4,096 tokens were
matched rarely before.
"""


@dataclass
class LongTarget:
    """Train the target unless its folder holds one, and measure how it uses its context."""

    # Folder of the target.
    folder: str = "runs/long-target"
    # JSON file of the results; null writes none.
    out: str | None = "lab/results/long-target.json"
    # Number of documents of 8,192 tokens to measure on.
    documents: int = 12

    def run(self) -> None:
        folder = Path(self.folder)
        if not (folder / "config.json").exists():
            train_target(folder)
        model = load_pretrained(LlamaForCausalLM, folder, "folder", dtype=torch.float32)
        documents = write_documents(1, MAX_LENGTH, self.documents)
        results = {
            **measure_target(model, documents),
            "training": json.loads((folder / "training.json").read_text()),
        }
        print(json.dumps(results, indent=1))
        if self.out is not None:
            write_text(
                Path(self.out),
                json.dumps({**results, "provenance": collect_provenance()}, indent=1) + "\n",
            )


def write_documents(seed: int, length: int, count: int) -> list[Document]:
    """Return documents in the language of the target; the seed 0 is that of its own training."""
    writer = PrivateWriter(WordChain.build_chain(VOCAB_SIZE), seed)
    return [writer.write_document(length) for _ in range(count)]


def make_words() -> list[str]:
    """Return the special tokens and the made-up words of the vocabulary."""
    syllables = [consonant + vowel for consonant in "bdfghjklmnprstvwz" for vowel in "aeiou"]
    pairs = [first + second for first in syllables for second in syllables]
    return [*SPECIAL, *random.Random(SEED).sample(pairs, VOCAB_SIZE - len(SPECIAL))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words between spaces, with a chat template of ChatML's form."""
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(make_words())}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model() -> LlamaForCausalLM:
    """Return the untrained model, with heads that copy."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            bos_token_id=None,
            pad_token_id=SPECIAL.index("<|endoftext|>"),
            eos_token_id=SPECIAL.index("<|im_end|>"),
        )
    )
    init_copying(model)
    return model


@torch.no_grad()
def init_copying(model: LlamaForCausalLM) -> None:
    """Initialise the embedding and the first two layers so that the model copies what followed the
    last two words before.

    An embedding is a constant, then the word [W - 1], then zeros [2 C]. In the first layer, head h
    mostly attends h + 1 tokens back and writes the code of that word to its part of the zeros. In
    the second layer, keys hold the codes of the two words before a token, and queries the codes of
    the current word and the one before it, in the pairs of values that turn slowest; where both
    agree, the head adds the token's word to the residual stream.
    """
    # [C, W - 1]
    embedding = model.model.embed_tokens.weight
    code = torch.linalg.qr(torch.randn(WORD - 1, CODE))[0].T
    embedding.normal_()
    embedding[:, WORD:], embedding[:, 0] = 0, 4.0
    model.model.norm.weight.fill_(0.12)
    first, second = (model.model.layers[number].self_attn for number in range(2))
    for attention in (first, second):
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            linear.weight.mul_(0.2)
    for head in range(HEADS):
        _attend_back(first, head, head + 1)
        rows = slice(head * HEAD_DIM, head * HEAD_DIM + CODE)
        written = slice(WORD + head * CODE, WORD + (head + 1) * CODE)
        first.v_proj.weight[rows, 1:WORD] = code
        first.o_proj.weight[written, rows] = torch.eye(CODE)
        _match_words(second, head, code)


def _attend_back(attention: Any, head: int, distance: int) -> None:
    """Make a head attend a number of tokens back, by the phases of the eight pairs of values
    that turn fastest.
    """
    for pair in range(8):
        angle = ROPE_THETA ** (-2 * pair / HEAD_DIM) * distance
        row = head * HEAD_DIM + pair
        attention.q_proj.weight[row, 0] = 2.6 * math.cos(angle)
        attention.q_proj.weight[row + HEAD_DIM // 2, 0] = -2.6 * math.sin(angle)
        attention.k_proj.weight[row, 0] = 2.6


def _match_words(attention: Any, head: int, code: Tensor) -> None:
    """Make a head copy the word of a token before which the last two words stand, by half of the
    codes [C, W - 1].
    """
    half = CODE // 2
    start = head * HEAD_DIM
    scale = 3**0.5
    slow = [
        start + value
        for value in (*range(HEAD_DIM // 4, HEAD_DIM // 2), *range(3 * HEAD_DIM // 4, HEAD_DIM))
    ]
    part = slice(head * half, (head + 1) * half)
    one_back, two_back = (
        slice(WORD + number * CODE + part.start, WORD + number * CODE + part.stop)
        for number in range(2)
    )
    attention.q_proj.weight[slow[:half], 1:WORD] = scale * code[part]
    attention.k_proj.weight[slow[:half], one_back] = scale * torch.eye(half)
    attention.q_proj.weight[slow[half:], one_back] = scale * torch.eye(half)
    attention.k_proj.weight[slow[half:], two_back] = scale * torch.eye(half)
    attention.v_proj.weight[start : start + WORD - 1, 1:WORD] = torch.eye(WORD - 1)
    attention.o_proj.weight[1:WORD, start : start + WORD - 1] = 1.5 * torch.eye(WORD - 1)


def train_target(folder: Path) -> None:
    """Train the target in stages of growing length, and save it with its tokenizer and the cost
    of each stage.
    """
    model = make_model()
    log = train_stages(model, STAGES, SEED)
    extend_rope(model)
    log += train_stages(model, EXTENDED_STAGES, SEED + EXTENDED_SEED)
    save_target(model, folder, log)


def extend_rope(model: LlamaForCausalLM) -> None:
    """Scale the rotary embedding for texts of the largest length."""
    model.config.rope_parameters = dict(EXTENDED_ROPE)
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)


@torch.no_grad()
def separate_head(model: LlamaForCausalLM) -> None:
    """Give the model an output layer of its own that takes over the weights of the final norm, and
    leave these at 1.

    The logits stay the same. A drafter that begins with the target's output layer and a norm of
    ones so begins with its scale.
    """
    norm = model.model.norm.weight
    weight = model.model.embed_tokens.weight
    model.lm_head.weight = torch.nn.Parameter(weight * norm)
    model.config.tie_word_embeddings = False
    norm.fill_(1)


def save_target(model: LlamaForCausalLM, folder: Path, log: list[dict[str, Any]]) -> None:
    """Save the target with its tokenizer and the cost of each stage."""
    separate_head(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    write_text(folder / "training.json", json.dumps(log))


def train_stages(
    model: LlamaForCausalLM, stages: Sequence[Stage], seed: int
) -> list[dict[str, Any]]:
    """Train a model with AdamW through stages, and return the cost and the last loss of each."""
    pack_linears(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    log = list[dict[str, Any]]()
    done = 0
    for stage in stages:
        start = time.process_time()
        losses = list[float]()
        for number, batch in enumerate(iterate_batches(stage, seed)):
            falling = stage.lr[0] + (stage.lr[1] - stage.lr[0]) * number / stage.steps
            optimizer.param_groups[0]["lr"] = falling * min(1, (done + 1) / WARM_UP_STEPS)
            loss = measure_losses(model, batch).mean()
            take_step(model, optimizer, loss)
            losses = [*losses[-9:], loss.item()]
            done = done + 1
            if number % 10 == 9:
                nats = sum(losses) / len(losses)
                seconds = time.process_time() - start
                print(
                    f"{stage.length} tokens, step {number + 1}: {nats:.3f} nats, {seconds:.0f} "
                    "CPU seconds",
                    flush=True,
                )
        tokens = stage.steps * max(BATCH_TOKENS, stage.length)
        seconds = round(time.process_time() - start, 1)
        nats = round(sum(losses) / len(losses), 3)
        log.append(
            {
                "length": stage.length,
                "steps": stage.steps,
                "tokens": tokens,
                "cpu_seconds": seconds,
                "nats": nats,
            }
        )
    unpack_linears(model)
    return log


def iterate_batches(stage: Stage, seed: int) -> Iterator[Tensor]:
    """Yield the batches [B, T] of a stage."""
    writer = PrivateWriter(WordChain.build_chain(VOCAB_SIZE), seed, stage.passage_tokens)
    for _ in range(stage.steps):
        documents = [
            writer.write_document(stage.length) for _ in range(max(1, BATCH_TOKENS // stage.length))
        ]
        yield torch.tensor([document.tokens for document in documents])


def measure_losses(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the losses [B, T - 1] in nats of all tokens but the first of documents [B, T]."""
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), tokens[:, 1:], reduction="none"
    )


@torch.inference_mode()
def measure_target(model: LlamaForCausalLM, documents: Sequence[Document]) -> dict[str, Any]:
    """Return perplexity by position of all tokens, of repeated passages and of new ones, and the
    share of values of repeated facts that are the target's first choice by the distance back to the
    fact."""
    sums: dict[str, dict[str, list[float]]] = {kind: {} for kind in ("all", "repeated", "new")}
    lookups: dict[str, list[int]] = {}
    for document in documents:
        tokens = torch.tensor([document.tokens])
        logits = model(tokens, use_cache=False).logits[0, :-1]
        nats = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        is_right = logits.argmax(-1) == tokens[0, 1:]
        for low, high in RANGES:
            name = f"{low // 1024}-{high // 1024}k"
            add_losses(sums["all"], name, nats[max(0, low - 1) : high - 1])
            for segment in document.segments:
                # What a passage begins with is any word, and the second word does not show yet
                # which passage it is.
                part = nats[segment.start + 1 : segment.end - 1]
                if low <= segment.start < high and not segment.is_fact:
                    add_losses(sums["new" if segment.source is None else "repeated"], name, part)
        count_lookups(lookups, document, is_right)
    perplexity = {
        kind: {name: round(math.exp(nats / count), 3) for name, (nats, count) in parts.items()}
        for kind, parts in sums.items()
    }
    shares = {
        name: {"right": right, "words": words} for name, (right, words) in sorted(lookups.items())
    }
    return {"documents": len(documents), "perplexity": perplexity, "lookups": shares}


def add_losses(sums: dict[str, list[float]], name: str, nats: Tensor) -> None:
    """Add losses and their number to those of a range."""
    total, count = sums.get(name, [0.0, 0])
    sums[name] = [total + float(nats.sum()), count + len(nats)]


def count_lookups(lookups: dict[str, list[int]], document: Document, is_right: Tensor) -> None:
    """Count, by the distance to the newest earlier occurrence, the words of values of repeated
    facts that are predicted.
    """
    newest: dict[int, int] = {}
    for segment in document.segments:
        if not segment.is_fact:
            continue
        original = segment.start if segment.source is None else segment.source
        first = segment.start + 3 + KEY_WORDS
        if segment.source is not None and segment.end <= len(document.tokens):
            distance = segment.start - newest[original]
            low = max(value for value in (0, *LOOKUP_DISTANCES) if value <= distance)
            entry = lookups.setdefault(f"{low:04d}", [0, 0])
            entry[0] += int(is_right[first : first + VALUE_WORDS].sum())
            entry[1] += VALUE_WORDS
        newest[original] = segment.start


if __name__ == "__main__":
    run_benchmark(LongTarget)
