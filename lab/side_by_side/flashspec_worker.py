"""flashspec: its engine with prompt lookup, and a draft model where there is one."""

from importlib.metadata import version
from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import NgramDrafter, TargetModel
from transformers import AutoModelForCausalLM

from lab.side_by_side.protocol import Decode, Decoding, read_setting, serve
from lab.side_by_side.transformers_worker import make_decode

CPU = torch.device("cpu")


def main() -> None:
    setting = read_setting()
    torch.set_num_threads(setting.threads)
    dtype = getattr(torch, setting.dtype)
    model = AutoModelForCausalLM.from_pretrained(setting.target, dtype=dtype).eval()
    target = TargetModel(setting.target, CPU, dtype, model=model)
    config = FlashSpecConfig(
        device="cpu",
        compile=False,
        drafter_strategy="bandit",
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0, gamma=3),
    )
    engine = SpeculativeEngine(config, [NgramDrafter()], target)
    # The package has no loop without drafts, so plain decoding is that of transformers.
    systems = {"plain": make_decode(model), "prompt lookup, chain of 3": use_engine(engine)}
    serve(version("flashspec"), systems)


def use_engine(engine: Any) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Decoding:
        result = engine.generate(torch.tensor([prompt]), max_new_tokens=tokens, eos_token_ids=())
        return Decoding(result.output_ids[0].tolist(), len(result.arm_steps) or None)

    return decode


if __name__ == "__main__":
    main()
