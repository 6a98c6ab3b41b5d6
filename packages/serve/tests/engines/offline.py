"""A process of its own: vLLM's offline class answers token ids. One model a process is what vLLM is
made for.

Reads JSON from standard input: `model` (arguments of vllm.LLM), `prompts` (lists of token ids),
`limits`, and `out`, the file that `answers` (token ids), `texts` and `counters` (name -> number or
list, since the start) are written to.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.load(sys.stdin)
    model = LLM(**job["model"], disable_log_stats=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    sampling = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in job["limits"]]
    outputs = [request.outputs[0] for request in model.generate(prompts, sampling, use_tqdm=False)]
    counters = {
        metric.name: metric.values if hasattr(metric, "values") else metric.value
        for metric in model.get_metrics()
        if "spec_decode" in metric.name
    }
    results = {
        "answers": [list(output.token_ids) for output in outputs],
        "texts": [output.text for output in outputs],
        "counters": counters,
    }
    Path(job["out"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
