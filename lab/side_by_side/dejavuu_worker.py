"""dejavuu: drafters that copy, without training."""

from importlib.metadata import version
from typing import Any

import torch
from dejavuu.core.engine import generate
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter

from lab.side_by_side.protocol import Decode, Decoding, read_setting, serve

METHODS = {
    "plain": "baseline",
    "prompt lookup": "pld",
    "suffix decoding": "suffix_decoding",
    "token recycling, tree": "token_recycling",
}
TREES = {"token_recycling"}  # methods that gain from branches
DRAFTED = 8  # tokens a round at most, the package's default
NO_TOKEN = -1  # no token ends the text


class Backend(HFBackend):
    """The package's backend with the sign that a cache of transformers 5.23 is cut by."""

    def rollback_kv(self, kv: Any, committed: int) -> Any:
        surplus = kv.get_seq_length() - committed
        if surplus > 0:
            kv.crop(-surplus)
        return kv


def main() -> None:
    setting = read_setting()
    torch.set_num_threads(setting.threads)
    backend = Backend(setting.target, device="cpu", dtype=setting.dtype, attn_implementation="sdpa")
    systems = {name: make_decode(backend, method) for name, method in METHODS.items()}
    serve(version("dejavuu"), systems)


def make_decode(backend: Any, method: str) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Decoding:
        drafter = make_drafter(method)
        with torch.inference_mode():
            result = generate(
                backend, prompt, tokens, drafter, DRAFTED, NO_TOKEN, tree=method in TREES
            )
        # The first step yields the token that elsewhere the prompt's forward yields.
        return Decoding([int(token) for token in result.tokens][:tokens], result.steps - 1)

    return decode


if __name__ == "__main__":
    main()
