"""Small targets of unlike kinds with real language statistics, and drafters for them: what they
accept, and that it is exact.

    python -m lab.small_targets.train_tiny_targets --work DIR [--steps 400]
        [--names lfm2 gpt_oss deepseek_v3 qwen2_5_vl]

Each target (four layers of width 128, the tiny target's tokenizer) learns the embedded
conversations for a few minutes on a core; the one of text and images learns pictures of coloured
squares beside them. EAGLE-3, Medusa and DFlash are then trained on its features, and held-out
prompts are decoded greedily, by a tree and by a chain, and compared with `generate`. Targets and
drafters that are there already are not trained again. `python -m lab.pages.make_pages` shows
the JSON that this writes.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig

from lab.small_targets.tiny_training import take_step
from spectrain.cli.interface import compose_spec, hydra_context
from spectrain.data.chat import Example, tokenize_conversation, tokenize_prompt
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.image_processor import get_images
from spectrain.data.readers import EmbeddedReader, JsonlReader
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session
from spectrain.eval.prompts import read_prompts
from spectrain.files import write_text
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.loading import load_hf, load_tokenizer
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs import train as training
from spectrain.runs.drafters import load_drafter
from spectrain.trees import Chain, Eagle2
from tests.models.architectures import auto_class, config_named
from tests.models.visions import BREAK, END, IMAGE, START, TEMPLATE, Processor

NAMES = ("lfm2", "gpt_oss", "deepseek_v3", "qwen2_5_vl")
FAMILIES = ("eagle3", "medusa1", "dflash")
RESULTS = Path(__file__).parents[2] / "lab" / "results" / "unlike-targets.json"
LARGER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 64,
    "max_position_embeddings": 1024,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "initializer_range": 0.02,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 16},
    "gpt_oss": {"intermediate_size": 128},
    "qwen2_5_vl": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
        }
    },
}
COLOURS = {
    "red": "#d02020",
    "green": "#20a020",
    "blue": "#2040d0",
    "yellow": "#e0d020",
    "white": "#f0f0f0",
    "black": "#101010",
}
CORNERS = {
    "upper left": (4, 4),
    "upper right": (32, 4),
    "lower left": (4, 32),
    "lower right": (32, 32),
}
QUESTIONS = ("What does the picture show?", "Describe this image.", "What do you see here?")


def make_tokenizer(has_vision: bool) -> Any:
    tokenizer = load_tokenizer(str(TINY_DIRECTORY), False, True)
    if has_vision:
        tokenizer.add_special_tokens({"additional_special_tokens": [START, IMAGE, END, BREAK]})
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(name: str, tokenizer: Any) -> Any:
    """Return the untrained model of the tests of this name, but wider."""
    settings = config_named(name).to_dict()
    has_vision = "vision_config" in settings
    text = settings["text_config"] if has_vision else settings
    text |= {key: value for key, value in (LARGER | OVERRIDES.get(name, {})).items() if key in text}
    text |= {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if has_vision:
        settings["vision_config"] |= {
            "out_hidden_size": text["hidden_size"],
            "hidden_size": 64,
            "intermediate_size": 64,
        }
        settings |= {
            "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE),
            "tie_word_embeddings": False,
        }
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    return auto_class(config).from_config(config, dtype=torch.float32)


def make_pictures(folder: Path, count: int = 400) -> Path:
    """Write pictures of squares on grounds, each with a question and its answer; return the file
    of conversations.
    """
    file = folder / "pictures.jsonl"
    rows = []
    draw = random.Random(0)
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        square, ground = draw.sample(sorted(COLOURS), 2)
        corner = draw.choice(sorted(CORNERS))
        left, top = CORNERS[corner]
        picture = Image.new("RGB", (56, 56), COLOURS[ground])
        ImageDraw.Draw(picture).rectangle((left, top, left + 19, top + 19), fill=COLOURS[square])
        picture.save(folder / f"{number}.png")
        answer = (
            f"The picture shows a {square} square in the {corner} corner. The ground behind "
            f"the square is {ground}."
        )
        parts = [
            {"type": "image", "path": f"{number}.png"},
            {"type": "text", "text": draw.choice(QUESTIONS)},
        ]
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": parts},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def load_target(name: str, folder: Path) -> Target:
    target = load_hf(str(folder), name, device="cpu")
    if target.vision.has_vision:
        target.vision.processor = Processor(target.tokenizer, target.model.config)
    return target


def train_target(
    name: str, folder: Path, pictures: Path, steps: int, batch_tokens: int = 2048
) -> None:
    """Train next-token prediction over all text; with a vision tower, every third batch is of
    pictures.
    """
    has_vision = "vision_config" in config_named(name).to_dict()
    tokenizer = make_tokenizer(has_vision)
    model = make_model(name, tokenizer).train()
    order = random.Random(0)
    texts = [
        tokenizer.apply_chat_template(chat.messages, tokenize=False)
        for chat in EmbeddedReader().read_conversations()
    ]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:256] for text in texts]
    picture_examples: list[Example] = []
    if has_vision:
        folder.mkdir(parents=True, exist_ok=True)
        images = make_image_processor(model, tokenizer)
        picture_examples = [
            example
            for messages in JsonlReader(str(pictures)).load_conversations()[40:]
            for example in tokenize_conversation(ChatTemplate(tokenizer), messages, images)
        ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    began = time.monotonic()
    for step in range(steps):
        picked = order.sample(picture_examples, 24) if picture_examples and step % 3 == 2 else []
        batch = [list(example.tokens) for example in picked]
        pixels = collect_pixels(picked, model)
        while not batch or (not pixels and (len(batch) + 1) * max(map(len, batch)) <= batch_tokens):
            batch.append(order.choice(rows))
        scale = min((step + 1) / 40, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * scale
        loss = cross_entropy(model, batch, pixels)
        take_step(model, optimizer, loss)
        if step % 50 == 49:
            print(
                f"{name} step {step + 1}: {loss.item():.3f} nats, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_image_processor(model: Any, tokenizer: Any) -> Any:
    from spectrain.data.image_processor import ImageProcessor

    images = ImageProcessor("", True)
    images.processor = Processor(tokenizer, model.config)
    return images


def collect_pixels(examples: list[Example], model: Any) -> dict[str, Any]:
    """Return the image inputs of the model for all examples together."""
    if not examples:
        return {}
    longest = max(len(example.tokens) for example in examples)
    parts = [
        images.model_inputs(longest, model)
        for example in examples
        if (images := get_images(example.tokens)) is not None
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def cross_entropy(model: Any, rows: list[list[int]], pixels: dict[str, Any]) -> torch.Tensor:
    """Return the loss in nats per token, padding left out."""
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    labels = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-100)
    logits = model(input_ids=tokens, use_cache=False, **pixels).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def train_drafter(family: str, target: Target, run: Path, pictures: Path, steps: int) -> Any:
    """Train a drafter by its recipe, on pictures where the target has vision; return the
    configuration.
    """
    data = {"data": "jsonl", "data.path": str(pictures)} if target.vision.has_vision else {}
    settings = {
        "recipe": family,
        "run": run,
        "target": "hf",
        "target.model": target.path,
        **data,
        "eval": "none",
        "trainer.max_steps": steps,
        "trainer.batch_tokens": 1024,
        "trainer.resume": "auto",
    }
    with hydra_context():
        spec = compose_spec(settings)
    training.train_and_score(spec, target, None)
    return spec


def make_prompts(target: Target, pictures: Path, count: int) -> list[list[int]]:
    """Return held-out prompts: pictures that nothing was trained on, or questions of the
    held-out set.
    """
    if target.vision.has_vision:
        chats = [
            conversation.messages[:1]
            for conversation in JsonlReader(str(pictures)).load_conversations()[:count]
        ]
        return [tokenize_prompt(target.template, chat, target.vision) for chat in chats]
    return [prompt.tokenize_for(target) for prompt in read_prompts(None, count).prompts]


def measure_drafter(
    target: Target, drafter: Any, prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """Return, for a tree and a chain, the acceptance length (bonus token included, pooled over
    rounds) and how many texts equal those of `generate`."""
    with reference_model(target) as model:
        references = [generate(model, prompt, new_tokens, target.stop_ids) for prompt in prompts]
    target.pack_weights()
    results = {}
    for kind, builder in {"tree": Eagle2(4, 16), "chain": Chain(4)}.items():
        session = Session(target, Greedy(), drafter.eval(), builder)
        answers = [session.decode([prompt], new_tokens)[0] for prompt in prompts]
        rounds = [count for answer in answers for count in answer.complete_round_lengths]
        identical = sum(answer.output == text for answer, text in zip(answers, references))
        length = round(sum(rounds) / max(1, len(rounds)), 4)
        results[kind] = {
            "acceptance_length": length,
            "identical": identical,
            "checked": len(prompts),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=list(NAMES))
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--drafter-steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()
    pictures = make_pictures(args.work / "pictures")
    rows = []
    setting = {key: value for key, value in vars(args).items() if isinstance(value, int)}
    for name in args.names:
        folder = args.work / name
        if not (folder / "model.safetensors").exists():
            train_target(name, folder, pictures, args.steps)
        for family in args.families:
            target = load_target(name, folder)
            config = train_drafter(
                family, target, args.work / f"{name}-{family}", pictures, args.drafter_steps
            )
            drafter = load_drafter(config, args.work / f"{name}-{family}", target)
            results = measure_drafter(
                target, drafter, make_prompts(target, pictures, args.prompts), args.new_tokens
            )
            rows.append({"target": name, "drafter": family, **results})
            print(rows[-1], flush=True)
            write_text(
                RESULTS,
                json.dumps({"setting": {**setting, **collect_provenance()}, "rows": rows}, indent=1)
                + "\n",
            )


if __name__ == "__main__":
    main()
