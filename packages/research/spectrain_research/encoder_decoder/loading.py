"""Loading encoder-decoder targets from a directory or the hub, and the check of what they
compute.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    GenerationConfig,
)

from spectrain.errors import UserError
from spectrain.models.check import check_weights
from spectrain.models.load_errors import explain_load_failure
from spectrain.models.loading import check_device, resolve_device, warn_of_tokens_beyond
from spectrain.models.pretrained import check_model_files, load_pretrained
from spectrain.trees.token_tree import TokenTree

from .model import SourcePrefixLM, make_reader
from .target import EncoderDecoderTarget

MAX_GAP = 1e-3  # largest relative difference of logits in the check
CHECK_TOKENS = 6  # tokens of the decoder in the check


def load_encoder_decoder(
    # Directory in transformers format or name on the hub of an encoder-decoder model, such as T5,
    # BART or Whisper.
    model: str,
    # Name of the target in reports; null takes the name of the directory, or the name on the hub.
    name: str | None = None,
    # Weight type: float32, bfloat16 or float16.
    dtype: str = "float32",
    # Device such as cpu or cuda:0; auto takes the GPU of this process, or the CPU where there is
    # none.
    device: str = "auto",
    # Jinja template of a text in resolved of the usual one; null renders question, end of text,
    # decoder start, answer, end.
    template: str | None = None,
) -> EncoderDecoderTarget:
    """Load an encoder-decoder model as a target whose texts begin with the source. It is greedy
    without the checkpoint's own rules on tokens: no beams, no forced or suppressed tokens.

    The source of a model of speech is the name of a WAV file.
    """
    resolved = resolve_device(device)
    check_device(resolved)
    if not hasattr(torch, dtype):
        raise UserError(f"target.dtype={dtype}: use float32, bfloat16 or float16")
    with explain_load_failure(model):
        check_model_files(model)
        config = AutoConfig.from_pretrained(model)
        is_speech = type(config) in AutoModelForSpeechSeq2Seq._model_mapping
        auto: Any = AutoModelForSpeechSeq2Seq if is_speech else AutoModelForSeq2SeqLM
        network = load_pretrained(
            auto, model, "target.model", dtype=getattr(torch, dtype), use_safetensors=True
        ).to(resolved)
        tokenizer = AutoTokenizer.from_pretrained(model)
    check_weights(network, f"target.model={model}")
    target = make_target(
        network, tokenizer, name or model.rstrip("/").rsplit("/", 1)[-1], model, template
    )
    check_encoder_decoder(target)
    return target


def make_target(
    network: Any, tokenizer: Any, name: str, path: str, template: str | None = None
) -> EncoderDecoderTarget:
    """Wrap a model and its tokenizer as a target."""
    settings = network.generation_config
    config = network.config
    start = settings.decoder_start_token_id
    start = config.decoder_start_token_id if start is None else start
    if start is None:
        raise UserError(
            f"target.model={path}: its configuration names no decoder_start_token_id; add one"
        )
    network.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        decoder_start_token_id=start,
    )
    reader = make_reader(network, tokenizer, path)
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    tokenizer.chat_template = template or make_template(
        *tokenizer.convert_ids_to_tokens([end, start])
    )
    target = EncoderDecoderTarget(SourcePrefixLM(network, reader, end), tokenizer, name, path)
    warn_of_tokens_beyond(target)
    return target


def make_template(end: str, start: str) -> str:
    """Return a chat template of one question: its text, the end of text and the decoder's start,
    then the answer and an end.
    """
    return (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        f"{end}{start}{{{{ message['content'] }}}}{end}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{end}{start}{{% endif %}}"
    )


@torch.no_grad()
def check_encoder_decoder(target: EncoderDecoderTarget) -> None:
    """Raise UserError where logits of a text, read at once and as a tree after its first tokens,
    are not those of transformers. The source of a model of speech is a file, so only models of text
    are checked."""
    wrapper = target.model
    if not wrapper.reader.reads_tokens:
        return
    taken = {wrapper.boundary.end, wrapper.boundary.start}
    usable = [token for token in range(min(target.head.vocab_size, 200)) if token not in taken]
    text = [*usable[:9], wrapper.boundary.end, wrapper.boundary.start, *usable[-CHECK_TOKENS:]]
    tokens = torch.tensor([text], device=target.device)
    half = len(text) - CHECK_TOKENS // 2
    wrapper.model.set_attn_implementation("sdpa")
    expected = wrapper(tokens).logits[:, len(text) - CHECK_TOKENS - 1 :].float()
    wrapper.model.set_attn_implementation(target.architecture.attention_name)
    cache = target.new_cache(1, len(text))
    target.prefill(tokens[:, :half], torch.tensor([half], device=target.device), cache, ())
    at_once = target.head.logits(target.features(tokens, ("final",)).at_layer("final"))[
        :, -CHECK_TOKENS - 1 :
    ]
    as_tree = target.verify(TokenTree.from_chain(tokens[:, half:]), cache).logits
    assert as_tree is not None
    for actual, wanted in (
        (at_once, expected),
        (as_tree.float(), expected[:, -as_tree.shape[1] :]),
    ):
        gap = float((actual - wanted).norm() / wanted.norm())
        if not gap <= (MAX_GAP if target.dtype == torch.float32 else 0.1):
            raise UserError(
                f"target {target.name}: its logits differ by {gap:.1%} from what transformers "
                "computes; use another target"
            )
