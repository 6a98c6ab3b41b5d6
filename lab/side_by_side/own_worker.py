"""spectrain's own engine: a trained drafter, a draft model, and drafters that need no training."""

import torch

import spectrain
from lab.side_by_side.protocol import Decode, Decoding, Setting, read_setting, serve
from spectrain.decoding.acceptance.matching import Greedy
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.ngram import Ngram
from spectrain.drafters.retrieval import Retrieval
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.trees import Auto, Chain
from spectrain.trees.base import TreeBuilder

TUNING_PROMPT = list(range(100, 164))
"""Tokens that nothing is scored on, for what is chosen by trials before decoding."""


def main() -> None:
    setting = read_setting()
    torch.set_num_threads(setting.threads)
    target = load_target(setting)
    target.pack_weights()
    systems: dict[str, Decode] = {"plain": use_session(Session(target, Greedy()))}
    if setting.eagle3 is not None:
        for name, tree in {"EAGLE-3, chain of 3": Chain(3), "EAGLE-3, auto": Auto()}.items():
            drafter = spectrain.Drafter.from_pretrained(setting.eagle3, target).module
            systems[name] = connect(target, drafter, tree)
    if setting.assistant is not None:
        systems["draft model, chain of 3"] = connect(
            target, Causal(target, model=setting.assistant), Chain(3)
        )
    systems["prompt lookup, chain of 3"] = connect(target, Ngram(target), Chain(3))
    systems["retrieval from the text, auto"] = connect(target, Retrieval(target), Auto())
    serve(spectrain.__version__, systems)


def load_target(setting: Setting) -> Target:
    if setting.is_block_target:
        return load_hf(setting.target_name, quantization="gguf")
    return Target.from_pretrained(setting.target_name, dtype=setting.dtype)


def connect(target: Target, drafter: Drafter, builder: TreeBuilder) -> Decode:
    return use_session(
        Session.from_drafter(target, drafter, builder, Greedy(), lambda: [TUNING_PROMPT])
    )


def use_session(session: Session) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Decoding:
        (generation,) = session.decode([prompt], tokens, ignore_eos=True)
        return Decoding(generation.output, len(generation.round_lengths))

    return decode


if __name__ == "__main__":
    main()
