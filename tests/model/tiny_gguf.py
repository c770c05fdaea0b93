"""A one-layer model for fast tests on the real server: real template, tokenizer, slots, cache and API.

Its weights are a chain: every token of `answer` has a direction of its own in the embedding, and the output matrix
maps each direction to the next token; everything else is zero. Generation prompts end with a newline, so the chain
begins there, and it ends with the end of the turn. A text can only be chained if no token in it comes twice;
`pieces` adds tokens of its own to the vocabulary for longer texts, such as a whole tool call.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np

_WIDTH = 64
_GAIN = 1000.0
_START = "Ċ"  # a newline in byte-level BPE
_END = "<|im_end|>"
_USER_DEFINED = 4


def make_tiny_gguf(
    source: Path,
    target: Path,
    *,
    answer: Sequence[str],
    pieces: Sequence[str] = (),
    endless: bool = False,
    context_tokens: int = 8192,
) -> None:
    """Write a model that always gives one answer.

    Args:
        source: a GGUF file whose tokenizer is taken.
        target: the file to write.
        answer: its tokens as the vocabulary spells them (a space is `Ġ`), all different.
        pieces: tokens to add to the vocabulary, spelt as text; `answer` may use them.
        endless: after the last token the second one comes again, for ever.
        context_tokens: the model's own context length.
    """
    reader = gguf.GGUFReader(source)
    tokens: list[str] = [*reader.fields["tokenizer.ggml.tokens"].contents(), *pieces]
    writer = gguf.GGUFWriter(target, "llama")
    _write_shape(writer, context_tokens)
    _copy_tokenizer(reader, writer, tokens, added=len(pieces))
    numbers = {token: number for number, token in enumerate(tokens)}
    chain = [numbers[token] for token in (_START, *answer)]
    _write_weights(writer, len(tokens), chain, chain[2] if endless else numbers[_END])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, context_tokens: int) -> None:
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, tokens: list[str], *, added: int) -> None:
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([*fields["tokenizer.ggml.token_type"], *[_USER_DEFINED] * added])
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])
    writer.add_add_bos_token(fields.get("tokenizer.ggml.add_bos_token", False))
    writer.add_chat_template(fields["tokenizer.chat_template"])


def _write_weights(writer: gguf.GGUFWriter, vocabulary: int, chain: list[int], after: int) -> None:
    if len(set(chain)) != len(chain) or len(chain) >= _WIDTH:
        raise ValueError("the answer's tokens must all be different, and fewer than the embedding is wide")
    embedding = np.zeros((vocabulary, _WIDTH), np.float16)
    embedding[:, -1] = 1  # no vector may be zero: it is divided by its length
    output = np.zeros((vocabulary, _WIDTH), np.float16)
    for direction, (token, following) in enumerate(pairwise([*chain, after])):
        embedding[token] = 0
        embedding[token, direction] = 1
        output[following, direction] = _GAIN
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", output)
    writer.add_tensor("output_norm.weight", np.ones(_WIDTH, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(_WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((_WIDTH, _WIDTH), np.float16))
