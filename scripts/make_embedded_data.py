"""Generate the embedded conversations: hand-written prompts, answers by the target itself.

    python scripts/make_embedded_data.py TARGET_DIR [--work build/embedded] [--out
    spectrain/data/conversations.jsonl.gz]

Prompts are read from scripts/embedded_prompts/*.jsonl. Answers are sampled in batches of 64 at a
low temperature. Each finished batch is one file in --work, so a killed run goes on where it
stopped; each batch has its own seed. 2,200 conversations take about an hour on two CPU cores,
minutes on a GPU.

Apart from `spectrain data regenerate`, which answers conversations anew that have answers already:
here questions are all there is, answers that hit the limit are cut back to whole sentences, and the
draws stay those of the data that ships.
"""

import argparse
import gzip
import json
import os
import re
import time
import zlib
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from spectrain.models.fast import pack_linears
from spectrain.models.pretrained import load_pretrained

PROMPTS = Path(__file__).with_name("embedded_prompts")


def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, str]]],
    max_new_tokens: int,
    temperature: float,
) -> list[str]:
    """Return the target's sampled reply to each conversation, cut back to full sentences where
    it hit the limit.
    """
    texts = [
        tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
        for c in conversations
    ]
    inputs = tokenizer(
        texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
    )
    with torch.inference_mode():
        output = model.generate(
            **inputs.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            pad_token_id=tokenizer.pad_token_id,
        )
    replies = []
    for row in output[:, inputs["input_ids"].shape[1] :]:
        text = tokenizer.decode(row, skip_special_tokens=True).strip()
        if tokenizer.eos_token_id not in row:
            end = [m.end() for m in re.finditer(r"[.!?:](?=\s)|\n", text)]
            text = text[: end[-1]].strip() if end else text
        replies.append(text)
    return replies


def generate_conversations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict],
    max_new_tokens: int,
    temperature: float,
) -> list[dict]:
    """Return full conversations: every user turn of each prompt, answered one after another."""
    chats: list[list[dict[str, str]]] = [[] for _ in prompts]
    for turn in range(max(len(p["turns"]) for p in prompts)):
        rows = [i for i, p in enumerate(prompts) if len(p["turns"]) > turn]
        for i in rows:
            chats[i].append({"role": "user", "content": prompts[i]["turns"][turn]})
        for i, text in zip(
            rows,
            sample_answers(model, tokenizer, [chats[i] for i in rows], max_new_tokens, temperature),
        ):
            chats[i].append({"role": "assistant", "content": text})
    return [
        {"id": p["id"], "category": p["category"], "messages": c} for p, c in zip(prompts, chats)
    ]


def read_batches(batch_size: int) -> dict[str, list[dict]]:
    """Return prompts with an id, in named batches of one subject, equally many turns and similar
    length.
    """
    batches = {}
    for path in sorted(PROMPTS.glob("*.jsonl")):
        lines = path.read_text().strip().split("\n")
        prompts = [
            {"id": f"{path.stem}-{number}", **json.loads(line)} for number, line in enumerate(lines)
        ]
        prompts.sort(key=lambda p: (len(p["turns"]), len(p["turns"][0]), p["id"]))
        for number, start in enumerate(range(0, len(prompts), batch_size)):
            batches[f"{path.stem}-{number}"] = prompts[start : start + batch_size]
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="directory of the target, in transformers format")
    parser.add_argument("--work", type=Path, default=Path("build/embedded"))
    parser.add_argument("--out", type=Path, default=Path("spectrain/data/conversations.jsonl.gz"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=224)
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = (
        load_pretrained(AutoModelForCausalLM, args.target, "target", dtype=torch.float32)
        .eval()
        .to(device)
    )
    pack_linears(model)
    args.work.mkdir(parents=True, exist_ok=True)
    batches = read_batches(args.batch_size)
    for number, (name, batch) in enumerate(batches.items()):
        part = args.work / f"{name}.jsonl"
        if part.exists():
            continue
        began = time.monotonic()
        torch.manual_seed(zlib.crc32(name.encode()))
        rows = generate_conversations(
            model, tokenizer, batch, args.max_new_tokens, args.temperature
        )
        scratch = part.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(scratch, part)
        print(
            f"batch {number + 1} of {len(batches)}: {len(rows)} conversations in "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    lines = "".join((args.work / f"{name}.jsonl").read_text() for name in batches)
    args.out.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    print(
        f"{args.out}: {sum(map(len, batches.values()))} conversations, "
        f"{args.out.stat().st_size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
