"""llama.cpp's server with the same target as one file, alone and with a draft model."""

from contextlib import ExitStack

from lab.benchmarks.llama_cpp import LlamaCppProcess, launch_pair
from lab.side_by_side.protocol import Decode, Decoding, read_setting, serve
from spectrain_serve.engines.llamacpp import LlamaCppStarter, find_program
from spectrain_serve.engines.llamacpp_command import LlamaCppSettings
from spectrain_serve.engines.llamacpp_server import LlamaCppServer

CONTEXT = 2048
DRAFTED = 3


def main() -> None:
    setting = read_setting()
    program = find_program(None)
    if program is None or setting.gguf is None:
        raise SystemExit("llama.cpp needs a server (make llama-cpp) and the target as a GGUF file")
    drafters: dict[str, str | None] = {"plain": None}
    if setting.assistant_gguf is not None:
        drafters["draft model, chain of 3"] = setting.assistant_gguf
    version = LlamaCppStarter(LlamaCppServer(LlamaCppSettings())).read_version()
    systems: dict[str, Decode] = {}
    with ExitStack() as stack:
        for name, drafter in drafters.items():
            launch = launch_pair(setting.gguf, drafter, DRAFTED)
            process = LlamaCppProcess(program, launch, setting.threads, CONTEXT)
            systems[name] = use_server(stack.enter_context(process))
        serve(version or "unknown", systems)


def use_server(server: LlamaCppProcess) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Decoding:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"return_tokens": True, "cache_prompt": False}
        answer = server.request("/completion", body)
        accepted = answer["timings"].get("draft_n_accepted", 0)
        return Decoding(answer["tokens"], tokens - 1 - accepted)

    return decode


if __name__ == "__main__":
    main()
