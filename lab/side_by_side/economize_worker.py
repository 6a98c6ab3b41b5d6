"""economize: our own EAGLE-3 export, a draft model, and prompt lookup."""

from importlib.metadata import version
from typing import Any

import economize
import torch
from economize.decoding.cost import CostKind
from economize.techniques.lookup import LookupConfig
from transformers import AutoModelForCausalLM

from lab.side_by_side.protocol import Decode, Decoding, Setting, read_setting, serve


def main() -> None:
    setting = read_setting()
    torch.set_num_threads(setting.threads)
    # A cycle of 4 tokens is one verified token and 3 drafts.
    decoding = economize.DecodeConfig(cycle_length=4)
    models = {"plain": economize.apply(load_target(setting))}
    if setting.eagle3 is not None:
        models["EAGLE-3, chain of 3"] = economize.load(
            load_target(setting), setting.eagle3, check_teacher=False, decoding=decoding
        )
    models["prompt lookup, chain of 3"] = economize.apply(
        load_target(setting), LookupConfig(max_ngram=3), decoding=decoding
    )
    serve(version("economize"), {name: make_decode(model) for name, model in models.items()})


def load_target(setting: Setting) -> Any:
    dtype = getattr(torch, setting.dtype)
    return AutoModelForCausalLM.from_pretrained(setting.target, dtype=dtype).eval()


def make_decode(model: Any) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Decoding:
        result = model.decode(torch.tensor(prompt), tokens)
        exact = sum(event.kind == CostKind.EXACT for event in result.cost.events)
        # The first of them reads the prompt.
        return Decoding(result.tokens.tolist(), exact - 1)

    return decode


if __name__ == "__main__":
    main()
