"""Synthetic documents, and the target that begins as a model that copies."""

import torch

from lab.benchmarks.long_target import (
    HEADS,
    MAX_LENGTH,
    make_model,
    make_tokenizer,
    write_documents,
)
from lab.benchmarks.private_documents import SPECIAL


def test_documents_return_to_their_own_segments() -> None:
    """A repetition holds the tokens of its source; the same seed gives the same documents, which
    the tokenizer reads.
    """
    documents = write_documents(5, 2048, 2)
    assert documents == write_documents(5, 2048, 2) and documents[0] != documents[1]
    tokenizer = make_tokenizer()
    for document in documents:
        assert len(document.tokens) == 2048 and document.segments[-1].end >= 2048
        repeated = [
            segment
            for segment in document.segments
            if segment.source is not None and segment.end <= 2048
        ]
        assert len(repeated) > len(document.segments) / 3
        for segment in repeated:
            source = document.tokens[segment.source : segment.source + len(segment.tokens)]
            assert source == segment.tokens == document.tokens[segment.start : segment.end]
        assert (
            tokenizer(tokenizer.decode(document.tokens), add_special_tokens=False)["input_ids"]
            == document.tokens
        )


@torch.inference_mode()
def test_the_untrained_target_copies() -> None:
    """Its heads attend one and two tokens back, and its choice is what followed the last two
    words before, both mostly.
    """
    model = make_model()
    words = torch.randint(len(SPECIAL), 512, (1, 96), generator=torch.Generator().manual_seed(1))
    for gap in (96, 512):
        between = torch.randint(
            len(SPECIAL), 512, (1, gap), generator=torch.Generator().manual_seed(2)
        )
        tokens = torch.cat([words, between, words], 1)
        choices = model(tokens, use_cache=False).logits.argmax(-1)[0]
        again = slice(len(words[0]) + gap, None)
        right = (choices[again][1:-1] == tokens[0, again][2:]).float().mean()
        assert right > 0.7, gap
        assert (choices[1:95] == tokens[0, 2:96]).float().mean() < 0.1
    model.set_attn_implementation("eager")
    first = model(tokens, output_attentions=True, use_cache=False).attentions[0][0]
    for head in range(HEADS):
        assert (
            first[head].argmax(-1)[2:] == torch.arange(2, tokens.shape[1]) - head - 1
        ).float().mean() > 0.6
    assert model.config.max_position_embeddings == MAX_LENGTH
