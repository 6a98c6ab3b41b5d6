"""Train the tiny target: a Llama of under two million parameters with its own BPE vocabulary, on
the embedded conversations.

    python scripts/make_tiny_target.py [--out spectrain/data/tiny] [--epochs 20]

It is trained on every token of the text, prompts included, so that it also reads prompts well.
About twenty minutes on two CPU cores. The weights are stored in bfloat16 (4 MB) and read as
float32.
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.data.readers import EmbeddedReader
from spectrain.models.fast import pack_linears, unpack_linears

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return byte-level BPE with a chat template of ChatML's form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def make_batches(
    rows: list[list[int]], batch_tokens: int, order: random.Random
) -> list[list[list[int]]]:
    """Return shuffled batches of rows of similar length."""
    rows = sorted(rows, key=lambda row: (len(row) // 16, order.random()))
    groups: list[list[list[int]]] = [[]]
    for row in rows:
        if groups[-1] and (len(groups[-1]) + 1) * len(row) > batch_tokens:
            groups.append([])
        groups[-1].append(row)
    order.shuffle(groups)
    return groups


def cross_entropy(model: LlamaForCausalLM, rows: list[list[int]]) -> torch.Tensor:
    """Return the loss in nats per token over a batch of rows, padding left out."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    logits = model(tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("spectrain/data/tiny"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(0)
    order = random.Random(0)
    conversations = list(EmbeddedReader().read_conversations())
    tokenizer = make_tokenizer(
        [message["content"] for chat in conversations for message in chat.messages], args.vocab_size
    )
    texts = [tokenizer.apply_chat_template(chat.messages, tokenize=False) for chat in conversations]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:512] for text in texts]
    held_out = rows[::40]
    rows = [row for number, row in enumerate(rows) if number % 40]
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    pack_linears(model)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{sum(map(len, rows)) / 1e3:.0f} k tokens",
        flush=True,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    total = args.epochs * len(make_batches(rows, args.batch_tokens, random.Random(0)))
    step = 0
    began = time.monotonic()
    for epoch in range(args.epochs):
        for batch in make_batches(rows, args.batch_tokens, order):
            scale = min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * min(1, step / total))))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * scale
            loss = cross_entropy(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        with torch.inference_mode():
            parts = make_batches(held_out, 8192, random.Random(0))
            nats = sum(cross_entropy(model, part).item() * len(part) for part in parts) / len(
                held_out
            )
        seconds = time.monotonic() - began
        print(
            f"epoch {epoch + 1}: train {loss.item():.3f}, held out {nats:.3f} nats, {seconds:.0f} "
            "s",
            flush=True,
        )
    unpack_linears(model)
    model.generation_config.eos_token_id = end
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
