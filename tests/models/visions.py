"""Small random models of text and images, with a processor each, a chat template for images, and pictures of noise."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spectrain.models.loading import TINY, load_hf, load_tokenizer
from spectrain.models.target import Target

from .architectures import auto_class, config_named

START, IMAGE, END, BREAK = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|image_break|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Processor:
    """What the models' own processors do, which need torchvision: every placeholder becomes the tokens of its image."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
        self.tokenizer, self.patch = tokenizer, config.vision_config.patch_size
        self.merged = getattr(config, "spatial_merge_size", 1) * self.patch
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)

    def __call__(self, text: list[str], images: list[Any], **kwargs: Any) -> dict[str, Any]:
        words, found = self.seen(images)
        head, *parts = text[0].split(IMAGE)
        whole = head + "".join(word + part for word, part in zip(words, parts, strict=True))
        tokens = self.tokenizer([whole], add_special_tokens=False, return_tensors="pt")
        kinds = (tokens["input_ids"] == self.image_token_id).long()
        return {**tokens, **found, "mm_token_type_ids": kinds}

    def seen(self, images: list[Any]) -> tuple[list[str], dict[str, Any]]:
        """As Qwen's: patches in a row, and a token for each four of them."""
        pictures = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=56 * 112, patch_size=self.patch)
        found = dict(pictures(images=images, return_tensors="pt"))
        return [IMAGE * count for count in (found["image_grid_thw"].prod(dim=-1) // 4).tolist()], found


class Rows(Processor):
    """As Pixtral's: padded pictures and their sizes, a token for each patch, and one at the end of each row."""

    def __call__(self, text: list[str], images: list[Any], **kwargs: Any) -> dict[str, Any]:
        found = super().__call__(text, images)
        del found["mm_token_type_ids"]
        return found

    def seen(self, images: list[Any]) -> tuple[list[str], dict[str, Any]]:
        sizes = [(image.height // self.merged, image.width // self.merged) for image in images]
        pixels = torch.zeros(len(images), 3, *(max(size) * self.merged for size in zip(*sizes)))
        for row, image, (height, width) in zip(pixels, images, sizes):
            cut = torch.tensor(list(image.getdata()), dtype=torch.float32).view(image.height, image.width, 3) / 255 - 0.5
            row[:, : height * self.merged, : width * self.merged] = cut.permute(2, 0, 1)
        words = [BREAK.join([IMAGE * width] * height) + END for height, width in sizes]
        return words, {"pixel_values": pixels, "image_sizes": torch.tensor(sizes) * self.merged}


def seeing_target(name: str, folder: Path, weights: float = 1.5, **own: Any) -> Target:
    """A small random model of this architecture, saved in a folder and loaded as a user's is, with a processor."""
    tokenizer = load_tokenizer(str(TINY), False, True)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, IMAGE, END, BREAK]})
    tokenizer.chat_template = TEMPLATE
    config = config_named(name).to_dict()
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    config["text_config"] |= {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 2, **own}
    config |= {key: image for key in ("image_token_id", "image_token_index") if key in config}
    made = AutoConfig.for_model(**config)
    torch.manual_seed(0)
    model = auto_class(made).from_config(made, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = weights * noise * parameter.shape[-1] ** -0.5 if noise.dim() > 1 else parameter.data + 0.1 * noise
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    target = load_hf(str(folder), name, device="cpu")
    target.sight.processor = (Rows if name == "mistral3" else Processor)(tokenizer, made)
    return target


def picture(folder: Path, number: int, size: tuple[int, int] = (84, 56)) -> str:
    """A picture of noise; its path."""
    torch.manual_seed(number)
    pixels = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8).numpy()
    path = folder / f"picture-{number}.png"
    Image.fromarray(pixels).save(path)
    return str(path)


def asked(*parts: str) -> list[dict[str, Any]]:
    """A question of texts and pictures."""
    content = [{"type": "image", "path": part} if part.endswith(".png") else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}]
