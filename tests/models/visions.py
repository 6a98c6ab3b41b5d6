"""Small random models of text and images, with a processor each, a chat template for images, and
pictures of noise.
"""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerBase
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.loading import load_hf, load_tokenizer
from spectrain.models.target import Target

from .architectures import SIGHT, config_named

START = "<|vision_start|>"
IMAGE = "<|image_pad|>"
END = "<|vision_end|>"
BREAK = "<|image_break|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is "
    "string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if "
    "part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ "
    "part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Processor:
    """Does what the models' own processors do, which need torchvision: every placeholder becomes
    the tokens of its image.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
        self.tokenizer = tokenizer
        self.patch = config.vision_config.patch_size
        self.merged = getattr(config, "spatial_merge_size", 1) * self.patch
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)

    def __call__(self, text: list[str], images: list[Any], **kwargs: Any) -> dict[str, Any]:
        words, inputs = self.process_images(images)
        head, *parts = text[0].split(IMAGE)
        prompt = head + "".join(word + part for word, part in zip(words, parts, strict=True))
        tokens = self.tokenizer([prompt], add_special_tokens=False, return_tensors="pt")
        kinds = (tokens["input_ids"] == self.image_token_id).long()
        return {**tokens, **inputs, "mm_token_type_ids": kinds}

    def process_images(self, images: list[Any]) -> tuple[list[str], dict[str, Any]]:
        """Return tokens and inputs as Qwen's processor does: patches in a row, and a token for
        each four of them.
        """
        pictures = Qwen2VLImageProcessorPil(
            min_pixels=56 * 56, max_pixels=56 * 112, patch_size=self.patch
        )
        inputs = dict(pictures(images=images, return_tensors="pt"))
        return [
            IMAGE * count for count in (inputs["image_grid_thw"].prod(dim=-1) // 4).tolist()
        ], inputs


class Rows(Processor):
    """Does as Pixtral's: padded pictures and their sizes, a token for each patch, and one at the
    end of each row.
    """

    def __call__(self, text: list[str], images: list[Any], **kwargs: Any) -> dict[str, Any]:
        inputs = super().__call__(text, images)
        del inputs["mm_token_type_ids"]
        return inputs

    def process_images(self, images: list[Any]) -> tuple[list[str], dict[str, Any]]:
        sizes = [(image.height // self.merged, image.width // self.merged) for image in images]
        pixels = torch.zeros(len(images), 3, *(max(size) * self.merged for size in zip(*sizes)))
        for row, image, (height, width) in zip(pixels, images, sizes):
            cut = (
                torch.tensor(list(image.getdata()), dtype=torch.float32).view(
                    image.height, image.width, 3
                )
                / 255
                - 0.5
            )
            row[:, : height * self.merged, : width * self.merged] = cut.permute(2, 0, 1)
        words = [BREAK.join([IMAGE * width] * height) + END for height, width in sizes]
        return words, {"pixel_values": pixels, "image_sizes": torch.tensor(sizes) * self.merged}


class FixedSize(Processor):
    """Does as processors of towers that take pictures of one size: each becomes so many tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
        self.tokenizer = tokenizer
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
        self.kinds = KINDS.get(config.model_type)
        sight = config.vision_config
        sides = getattr(sight, "image_size", SIGHT["image_size"]), sight.patch_size
        size, patch = (side[0] if isinstance(side, (list, tuple)) else side for side in sides)
        self.size, self.patch = size, patch
        self.count = (size // patch) ** 2 // (1 if config.model_type == "llava" else 4)

    def __call__(self, text: list[str], images: list[Any], **kwargs: Any) -> dict[str, Any]:
        inputs = super().__call__(text, images)
        kinds = inputs.pop("mm_token_type_ids")
        return inputs if self.kinds is None else {**inputs, self.kinds: kinds}

    def process_images(self, images: list[Any]) -> tuple[list[str], dict[str, Any]]:
        pixels = torch.zeros(len(images), 3, self.size, self.size)
        for row, image in zip(pixels, images):
            resized = image.resize((self.size, self.size))
            shown = torch.tensor(list(resized.getdata()), dtype=torch.float32).view(
                self.size, self.size, 3
            )
            row[:] = shown.permute(2, 0, 1) / 255 - 0.5
        return [IMAGE * self.count] * len(images), {"pixel_values": pixels}


class Patches(FixedSize):
    """Does as Gemma 4's: patches with their positions, a token for four of them."""

    def process_images(self, images: list[Any]) -> tuple[list[str], dict[str, Any]]:
        words, inputs = super().process_images(images)
        side = self.size // self.patch
        # [n, 3, y, x, ..]
        cut = (
            inputs["pixel_values"]
            .unfold(2, self.patch, self.patch)
            .unfold(3, self.patch, self.patch)
        )
        patches = cut.permute(0, 2, 3, 4, 5, 1).reshape(len(images), side * side, -1) + 0.5
        positions = torch.stack(
            torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), dim=-1
        ).view(-1, 2)
        return words, {
            "pixel_values": patches,
            "image_position_ids": positions.expand(len(images), -1, -1).contiguous(),
        }


class Tiles(Processor):
    """LLaVA-Next's own, which reads a picture in full and in tiles."""

    def __call__(self, text: list[str], images: list[Any], **kwargs: Any) -> dict[str, Any]:
        return dict(
            self.own(text=text, images=images, add_special_tokens=False, return_tensors="pt")
        )

    @property
    def own(self) -> Any:
        side = SIGHT["image_size"]
        size = {"shortest_edge": side}
        crop = {"height": side, "width": side}
        pictures = LlavaNextImageProcessorPil(
            size=size, crop_size=crop, image_grid_pinpoints=PINPOINTS
        )
        return LlavaNextProcessor(
            pictures,
            self.tokenizer,
            self.patch,
            "default",
            image_token=IMAGE,
            num_additional_image_tokens=1,
        )


class MoreTiles(Tiles):
    """LLaVA-OneVision's own."""

    @property
    def own(self) -> Any:
        side = SIGHT["image_size"]
        pictures = LlavaOnevisionImageProcessorPil(
            size={"height": side, "width": side}, image_grid_pinpoints=PINPOINTS
        )
        return OfImages(
            pictures,
            self.tokenizer,
            None,
            16,
            "full",
            image_token=IMAGE,
            vision_aspect_ratio="anyres_max_9",
        )


class OfImages(LlavaOnevisionProcessor):
    """A processor without videos, which would need torchvision."""

    def check_argument_for_proper_class(self, *args: Any) -> None: ...


PINPOINTS = [[56, 112], [112, 56], [112, 112]]
OWN: dict[str, dict[str, Any]] = {  # of the full model, and of its tower
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 64}},
    "llama4": {"vision_config": {"intermediate_size": 128}},
    "llava_next": {"image_grid_pinpoints": PINPOINTS},
    "llava_onevision": {"image_grid_pinpoints": PINPOINTS},
}
KINDS = {
    "gemma3": "token_type_ids",
    "gemma4": "mm_token_type_ids",
}  # the name of a model's argument for kinds of tokens, if it has one
PROCESSORS: dict[str, type[Processor]] = {
    "mistral3": Rows,
    "gemma3": FixedSize,
    "gemma4": Patches,
    "internvl": FixedSize,
    "llama4": FixedSize,
    "llava": FixedSize,
    "llava_next": Tiles,
    "llava_onevision": MoreTiles,
}


def seeing_target(name: str, folder: Path, weights: float = 1.5, **own: Any) -> Target:
    """A small random model of this architecture, saved in a folder and loaded as a user's is,
    with a processor.
    """
    tokenizer = load_tokenizer(str(TINY_DIRECTORY), False, True)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, IMAGE, END, BREAK]})
    tokenizer.chat_template = TEMPLATE
    config = config_named(name).to_dict()
    # Gemma 4, whose larger ones look ahead within an image
    if "vocab_size_per_layer_input" in config["text_config"]:
        config["text_config"] |= {
            "vocab_size_per_layer_input": len(tokenizer),
            "use_bidirectional_attention": "vision",
        }
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    config["text_config"] |= {
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "eos_token_id": 2,
        **own,
    }
    config |= {key: image for key in ("image_token_id", "image_token_index") if key in config}
    overrides = OWN.get(name, {})
    config |= overrides | {
        "vision_config": config["vision_config"] | overrides.get("vision_config", {})
    }
    model_config = AutoConfig.for_model(**config)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        model_config, attn_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = (
            weights * noise * parameter.shape[-1] ** -0.5
            if noise.dim() > 1
            else parameter.data + 0.1 * noise
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    target = load_hf(str(folder), name, device="cpu")
    target.vision.processor = PROCESSORS.get(name, Processor)(tokenizer, model_config)
    return target


def picture(folder: Path, number: int, size: tuple[int, int] = (84, 56)) -> str:
    """A picture of noise; its path."""
    torch.manual_seed(number)
    pixels = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8).numpy()
    path = folder / f"picture-{number}.png"
    Image.fromarray(pixels).save(path)
    return str(path)


def make_question(*parts: str) -> list[dict[str, Any]]:
    """A question of texts and pictures."""
    content = [
        {"type": "image", "path": part} if part.endswith(".png") else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]
