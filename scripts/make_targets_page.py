"""Write docs/targets.md, from what the tests find with every architecture (20 minutes on a core).

python -m scripts.make_targets_page
"""

import json
import tempfile
from pathlib import Path

import transformers

from scripts.train_tiny_targets import RESULTS
from tests.models.architectures import names
from tests.models.test_architectures import IDENTICAL, PAGE, outcomes, row

INTRODUCTION = """# Which targets work

Any causal LM of `transformers` whose layers attend is a target, and so is the text decoder of a model of text and images:
the model's own code runs, unmodified. What is loaded is checked once against plain `transformers`, on {length} tokens:
the features of every layer, the logits, and a small tree over the cache. How far back each layer sees is read from the
model's masks, whatever the length. Where anything differs, loading ends with one sentence.

The table is what the tests find with small random models (windows of 8 positions, experts, scaled and capped logits) of
every architecture in transformers {version}, `make test-full`: {identical} of {total} are identical, the others are
refused. *Identical* means: features and logits of whole texts, logits at every node of random trees over three rounds of
commits (alone and in a ragged batch), and 24 greedy tokens with copied n-grams and with an untrained EAGLE-3 drafter, all
as transformers gives them. Where only some of it is, the table names that.

- **Longrope** (Phi-3, Phi-4-mini) turns all positions otherwise from `original_max_position_embeddings` on, those of
  cached keys too: such a target decodes texts up to there, and longer ones are refused.
- **Llama 4** scales its queries by a token's slot from `floor_scale` on: it decodes texts up to 256 tokens before that.
- **Sinks** (gpt-oss), heads of up to 512 and **values of another size than keys** (DeepSeek) run in the kernel and in
  training; **chunks** (Llama 4) are exact but take the slower reference attention on a GPU. Latent attention caches
  expanded heads.
- **Layers that keep a state** (Qwen3-Next, Qwen3.5, Kimi Linear, Nemotron-H, LFM2, MiniMax-01, Granite 4 hybrid, Mamba 2,
  ZAYA1) verify trees and chains, [at the cost of their tokens](#layers-that-keep-a-state). Drafters that run some of the
  layers only, or take committed tokens back, are refused.
- **Layers that attend by themselves**, without transformers' attention interface (Falcon, GPT-J, CodeGen, StableLM, Nemotron,
  BLOOM, MPT, GPT-Neo, XGLM), are told by masks what a token sees and get all keys of the cache; biases of keys (ALiBi) are
  moved from slots to positions. Scores are then computed by the model's code, on a GPU too, and rounds are not captured.
- **Gemma 3n** has several residual streams between its layers: drafters that read none but the final features work.
- Of a **model of text and images** the text decoder is the target; [images](#images) come through the model's own code.

## Layers that keep a state

The weights of such a layer lie in the linears at its ends, and these see all nodes of a round at once, in whatever way the
states between them are computed: level by level, each node from its parent's state, or along whole paths in the module's own
way over several tokens, which short convolutions always take, and recurrences where a chain fills a quarter of their chunk;
then the accepted tokens are run once more, between the linears. Which modules make the same of several tokens behind a state
as of one after another is found when a target is loaded. CPU milliseconds of a round, verify and commit, level by level with
the linears of every level, as it was, and now (median of 14, in turn, one busy core, float32; four layers of width 1024, random
weights, all but one of Qwen3-Next's and LFM2's keeping a state, all of Mamba 2's, two of Nemotron-H's):

| | root alone | chain of 6, 3 kept | chain of 16, 8 kept | tree of 16 |
|---|---|---|---|---|
| Qwen3-Next | 23.6, 23.6 | 105, 72 | 243, 89 | 179, 118 |
| LFM2 | 13.9, 13.9 | 44, 26 | 92, 33 | 84, 40 |
| Mamba 2 | 17.4, 18.1 | 97, 66 | 263, 158 | 261, 186 |
| Nemotron-H | 14.6, 14.2 | 58, 41 | 145, 91 | 107, 75 |

`tree=auto` and the other measured trees time what a level costs on the machine they run on.

## Images

The model of text and images runs up to its text decoder, and what it calls that with is what the decoder is run with here:
embeddings, rotary positions in three planes (Qwen), states that later layers add (DeepStack). Behind an image a token's
position is not its place; the cache knows the difference, for trees as for chains. The first text with images is held against
transformers, whole and behind the cache, and a model that sees otherwise reads text alone. {images}

## Weights in few bits

`target.quantization=8bit` or `4bit` loads weights through bitsandbytes (LLM.int8 without outliers, NF4), `int8` through
torchao; a checkpoint that is quantised already is loaded as it is, by transformers' own path, and where a package is missing
the refusal names it. The quantised model is the target: drafts are judged by it, and output is what it says by itself. A
target whose weights learn (`recipe=medusa2`, `recipe=layerskip`) takes adapters on bitsandbytes or torchao weights
(`drafter.adapt=lora`, QLoRA); what was learnt is merged into whole weights, for in few bits it would be rounded away.
{quantised}

## Drafters on targets of unlike kinds

`python -m scripts.train_tiny_targets --work DIR` trains a hybrid, one with sinks, one with latent attention and one of text and
images (four layers of width 128) on the embedded conversations, the last one on pictures of coloured squares too, and EAGLE-3,
Medusa and DFlash on their features.
{unlike}

## All architectures

| architecture | identical | why not |
|---|---|---|
"""


IMAGES = """Tried with small random
vision towers (`tests/models/test_images.py`) and found identical to `generate` with the pixels, by trees and chains, alone and
beside texts without images: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE, Qwen3.5, Gemma 3 and Gemma 4, where tokens of an
image see each other (in all layers, or in those with windows: read from the model's masks, kind of layer by kind), Llama 4,
Mistral 3, LLaVA, LLaVA-Next, LLaVA-OneVision, InternVL and GLM-4V. What could be loaded as a text decoder alone (Llama 4,
Qwen3.5) sees images where the checkpoint was saved as a model of text and images. Videos and sounds are not read."""
QUANTISED = """
| weights | here | needs | tried on a CPU |
|---|---|---|---|
| LLM.int8 | `target.quantization=8bit` | bitsandbytes | identical to `generate` (bitsandbytes 0.50.2; float32, bfloat16) |
| NF4 | `target.quantization=4bit` | bitsandbytes | layers must be multiples of 64 wide there, else refused |
| int8, weights only | `target.quantization=int8` | torchao | identical to `generate` (torchao 0.18.0; float32, bfloat16) |
| int4 of torchao | as found in a checkpoint | torchao | no: its kernels want a GPU |
| GPTQ, AWQ | as found in a checkpoint | optimum, gptqmodel | refused, the package named |
| int8 of torchao | as found in a checkpoint | torchao | identical to `generate` (torchao 0.18.0; float32, bfloat16) |
| compressed-tensors | as found in a checkpoint | compressed-tensors, loguru | dequantised while it is loaded; identical \
to `generate` (0.20.0; int8 and float8 with a scale a row, int4 in groups, inputs rounded token by token) |
| FP8 (fine-grained) | as found in a checkpoint | | dequantised by transformers without a GPU; identical to `generate` |
| MXFP4 (gpt-oss) | as found in a checkpoint | kernels, for 4 bits at work | \
dequantised by transformers without it; identical to `generate` |
| GGUF | `target.model=FILE.gguf` | | dequantised to float32, once, into the cache \
directory, and used from there; identical to `generate` (Q8_0) |

*Identical*: 32 greedy tokens of two prompts on the tiny target, alone and in a batch, autoregressively, with copied n-grams in
a chain and with an untrained EAGLE-3 drafter's tree; of checkpoints, 16 to 24 tokens in float32 with copied n-grams, chain
and tree, on small random models in the layouts that people publish (`tests/models/checkpoints.py`). What was dequantised takes
the memory of whole weights. What a GPU's kernels make of FP8 and MXFP4 was never run."""


UNLIKE = """
| target | drafter | tree of 16: acceptance length | identical | chain of 4: acceptance length | identical |
|---|---|---|---|---|---|
{rows}

Measured with `--steps {steps} --drafter-steps {drafter_steps} --prompts {prompts} --new-tokens {new_tokens}` on one core: one
to five minutes of training each, which leaves the targets at 4.3 to 4.8 nats a token and their answers repetitive. The table
shows that training and decoding work, and that output is `generate`'s; what a drafter gains on a real model is another matter.
The pictures' answers are of one pattern, hence the lengths there."""


def unlike() -> str:
    """What `train_tiny_targets` measured, as a table."""
    found = json.loads(RESULTS.read_text())
    rows = []
    for one in found["rows"]:
        pairs = [f"{s['acceptance_length']:.2f} | {s['identical']} of {s['checked']}" for s in (one["tree"], one["chain"])]
        rows.append(f"| {one['target']} | {one['drafter']} | {pairs[0]} | {pairs[1]} |")
    return UNLIKE.format(rows="\n".join(rows), **found["setting"])


def main() -> None:
    """Every architecture in turn, then the page."""
    found = {}
    for name in names():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = outcomes(name, Path(folder))
        print(row(name, found[name]), flush=True)
    identical = sum({*said.values()} == {IDENTICAL} for said in found.values())
    facts = {"length": 24, "version": transformers.__version__, "identical": identical, "total": len(found),
             "images": IMAGES, "quantised": QUANTISED, "unlike": unlike()}  # fmt: skip
    rows = "\n".join(row(name, said) for name, said in found.items())
    PAGE.write_text(INTRODUCTION.format(**facts) + rows + "\n")


if __name__ == "__main__":
    main()
