"""Small tokenizers that differ, and small models that speak them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "the bees find the hive again",
    "a tree of tokens, is it not?",
    " \u00c4pfel und B\u00e4ume\n\n",
    "12 + 30 = 42\n",
] * 3


def byte_level(
    vocab_size: int, texts: list[str], specials: tuple[str, ...] = ("<|im_end|>",)
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on some texts; the first special token ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(specials),
            initial_alphabet=letters,
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[0])


def sentencepiece(vocab_size: int, texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer as sentencepiece makes them: a space before every text, bytes for what has no
    token, and a first token.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    specials = ["<unk>", "<s>", "</s>"]
    words = [text.replace("\u00c4", "A") for text in texts]  # which has no token then
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 256, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}},
    }
    tokenizer = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def random_model(tokenizer: PreTrainedTokenizerFast, folder: Path, **settings: Any) -> str:
    """The directory of a small Llama with random weights and this tokenizer."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        **settings,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
