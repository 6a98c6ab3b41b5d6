"""Train a tiny encoder-decoder target: T5 or BART on the embedded conversations, or Whisper on
sequences of tones.

    python -m lab.small_targets.make_encoder_decoder t5 --out runs/t5-tiny
    python -m lab.small_targets.make_encoder_decoder whisper --out runs/whisper-tiny

One to three minutes on one CPU core. Whisper's folder also holds the sounds, conversations.jsonl
and prompts.jsonl: its prompts are names of WAV files, and its answers the notes that they play.
"""

import argparse
import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from lab.small_targets.tiny_training import minimize_loss
from spectrain.data.readers import EmbeddedReader
from spectrain.models.bundled import load_tiny_tokenizer
from spectrain_research.encoder_decoder.sources import read_sound

# special tokens of the tiny tokenizer
PAD = 0
BEGIN = 1
END = 2
NOTES = ("do", "re", "mi", "fa", "sol", "la", "ti")
SEMITONES = (0, 2, 4, 5, 7, 9, 11)
RATE = 16000
NOTE_SECONDS = 0.1
NOTE_COUNT = 10
SOURCE_TOKENS = 48
ANSWER_TOKENS = 64
Rows = list[tuple[Any, list[int]]]
"""Sources, token ids or mel features, with the tokens of their answers."""


def make_t5(vocab: int) -> Any:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocab,
            d_model=96,
            d_kv=24,
            d_ff=256,
            num_layers=2,
            num_decoder_layers=4,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
        )
    )


def make_bart(vocab: int) -> Any:
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=vocab,
            d_model=96,
            encoder_layers=2,
            decoder_layers=4,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=256,
            decoder_ffn_dim=256,
            max_position_embeddings=512,
            dropout=0.0,
            pad_token_id=PAD,
            bos_token_id=BEGIN,
            eos_token_id=END,
            decoder_start_token_id=END,
            forced_eos_token_id=None,
        )
    )


def make_whisper(vocab: int) -> Any:
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=vocab,
            num_mel_bins=40,
            d_model=96,
            encoder_layers=2,
            decoder_layers=4,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=192,
            decoder_ffn_dim=192,
            max_source_positions=50,
            max_target_positions=256,
            pad_token_id=PAD,
            bos_token_id=BEGIN,
            eos_token_id=END,
            decoder_start_token_id=BEGIN,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def load_conversation_rows(tokenizer: Any) -> Rows:
    """Return the first question and answer of every embedded conversation."""
    rows: Rows = []
    for chat in EmbeddedReader().read_conversations():
        texts = [
            tokenizer(str(message["content"]), add_special_tokens=False)["input_ids"]
            for message in chat.messages[:2]
        ]
        # A cut answer has no end.
        rows.append(([*texts[0][:SOURCE_TOKENS], END], [*texts[1], END][:ANSWER_TOKENS]))
    return rows


def play_notes(notes: list[int]) -> np.ndarray:
    """Return a second of samples: ten notes of a tenth, each a sine with an overtone."""
    time_axis = np.arange(int(RATE * NOTE_SECONDS)) / RATE
    envelope = np.minimum(1, np.minimum(time_axis, time_axis[::-1]) / 0.01)
    tones = [440 * 2 ** (SEMITONES[note] / 12) for note in notes]
    parts = [
        envelope
        * (0.4 * np.sin(2 * np.pi * f * time_axis) + 0.2 * np.sin(4 * np.pi * f * time_axis))
        for f in tones
    ]
    return np.concatenate(parts)


def write_sound(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def write_tones(folder: Path, count: int, held_out: int) -> list[dict[str, str]]:
    """Write sound files, and the conversations and prompts about them; return the name and notes
    of each.
    """
    (folder / "sounds").mkdir(parents=True, exist_ok=True)
    order = random.Random(0)
    entries = []
    for number in range(count + held_out):
        steps = [order.choice((-1, 0, 1, 1)) for _ in range(NOTE_COUNT)]
        notes = (
            [(order.randrange(7) + sum(steps[:at])) % 7 for at in range(NOTE_COUNT)]
            if number % 4
            else [(number + at) % 7 for at in range(NOTE_COUNT)]
        )
        name = str(folder / "sounds" / f"{number}.wav")
        write_sound(Path(name), play_notes(notes))
        entries.append({"name": name, "notes": " ".join(NOTES[note] for note in notes)})
    chats = [
        {
            "messages": [
                {"role": "user", "content": entry["name"]},
                {"role": "assistant", "content": entry["notes"]},
            ]
        }
        for entry in entries[:count]
    ]
    prompts = [
        {"id": number, "category": "tones", "turns": [entry["name"]]}
        for number, entry in enumerate(entries[count:])
    ]
    for file, rows in (("conversations.jsonl", chats), ("prompts.jsonl", prompts)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return entries[:count]


def load_tone_rows(tokenizer: Any, folder: Path) -> Rows:
    extractor = WhisperFeatureExtractor(feature_size=40, sampling_rate=RATE, chunk_length=1)
    extractor.save_pretrained(folder)
    rows: Rows = []
    for entry in write_tones(folder, 1200, 40):
        sound = read_sound(Path(entry["name"]), RATE)
        features = extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features[0]
        rows.append(
            (features, [*tokenizer(entry["notes"], add_special_tokens=False)["input_ids"], END])
        )
    return rows


def collate(rows: Rows, start: int) -> dict[str, torch.Tensor]:
    """Return the arguments of a model for rows: sources, decoder tokens and labels, padded on
    the right.
    """
    sources, answers = zip(*rows)
    width = max(map(len, answers))
    decoder = torch.tensor(
        [[start, *answer[:-1], *[PAD] * (width - len(answer))] for answer in answers]
    )
    labels = torch.tensor([[*answer, *[-100] * (width - len(answer))] for answer in answers])
    if isinstance(sources[0], torch.Tensor):
        return {
            "input_features": torch.stack(sources),
            "decoder_input_ids": decoder,
            "labels": labels,
        }
    longest = max(map(len, sources))
    tokens = torch.tensor([[*source, *[PAD] * (longest - len(source))] for source in sources])
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "decoder_input_ids": decoder,
        "labels": labels,
    }


def train(model: Any, rows: Rows, steps: int, batch: int, lr: float) -> None:
    """Minimise the cross-entropy of the answers."""
    order = random.Random(0)
    start = model.config.decoder_start_token_id
    minimize_loss(model, lambda: model(**collate(order.sample(rows, batch), start)).loss, steps, lr)


KINDS: dict[str, tuple[Any, int, int, float]] = {
    "t5": (make_t5, 500, 16, 3e-3),
    "bart": (make_bart, 500, 16, 2e-3),
    "whisper": (make_whisper, 700, 32, 2e-3),
}
"""By kind: what makes the model, the number of steps, rows of a step, and the learning rate."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    make_model, steps, batch, lr = KINDS[args.kind]
    torch.manual_seed(0)
    tokenizer = load_tiny_tokenizer()
    rows = (
        load_tone_rows(tokenizer, args.out)
        if args.kind == "whisper"
        else load_conversation_rows(tokenizer)
    )
    model = make_model(len(tokenizer)).train()
    train(model, rows, args.steps or steps, batch, lr)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
