"""Queries, keys and values of a Hugging Face model's heads, from text, a layer at a time.

The hidden states that enter an attention layer are caught by a hook and sent through the layer's
own projections. What a head sees beyond one law of tokens is left out, and has to be known:

    causal masks      every query sees the whole pool, as in an encoder
    rotary positions  queries and keys are taken before the rotation, so a score is the one of two
                      tokens at the same position; learned positions are part of the hidden states
    grouped queries   shared keys and values are repeated, one copy a query head

Other kinds of attention are refused. Nothing is fetched from the network.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from measureattn._typing import Float
from measureattn.heads.models import Layout, attention_layers, project, quietly
from measureattn.streaming import CHUNK

BATCH = 8  # windows that the model reads at once
BUDGET = 3 * 2**27  # bytes of hidden states held at once


@dataclass(frozen=True)
class Windows:
    """Text cut into windows of equal length, special tokens put around each.

    ids      (windows, length), as the model reads them
    kept     (length) bool: the positions whose tokens make the pool
    labels   what each token of the pool is, window after window

    Source: ours. See: chapter 11.

    >>> Windows(torch.zeros(2, 3, dtype=torch.long), torch.ones(3) > 0, ("a",) * 6).n_tokens
    6
    """

    ids: Tensor
    kept: Tensor
    labels: tuple[str, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens in the pool."""
        return len(self.labels)


@dataclass(frozen=True)
class Collected:
    """One layer's arrays, as `measure_heads` takes them: queries are already scaled.

    layer    its number;  queries, keys (H, N, D), values (H, N, M)
    left_out what of the layer's attention these arrays do not have, in words

    Source: ours. See: chapter 11.

    >>> Collected(0, *torch.zeros(3, 2, 5, 4)).names
    ('0.0', '0.1')
    """

    layer: int
    queries: Float[Tensor, "heads N D"]
    keys: Float[Tensor, "heads N D"]
    values: Float[Tensor, "heads N M"]
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """layer.head for all its heads."""
        return tuple(f"{self.layer}.{head}" for head in range(len(self.keys)))


def windows(
    model: nn.Module,
    tokenizer,
    texts: Sequence[str],
    *,
    length: int | None = None,
    max_tokens: int | None = None,
    special: bool = False,
) -> Windows:
    """Texts, joined by line breaks, as windows that the model can read.

    length      tokens of a window with its special tokens: 256, or what the model has room for
    max_tokens  at most so many tokens, special ones apart; what fills no window is dropped
    special     keep the special tokens in the pool

    Raises ValueError if the text does not fill one window. Source: ours. See: chapter 11.

    >>> import tokenizers as tk, transformers as hf
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = hf.BertModel(hf.BertConfig(**sizes))
    >>> letter = tk.Tokenizer(tk.models.WordLevel({"a": 0}))
    >>> letter = hf.PreTrainedTokenizerFast(tokenizer_object=letter)
    >>> windows(model, letter, ["a"], length=1).labels
    ('the first token',)
    """
    room = min(
        getattr(model.config, "max_position_embeddings", 256), tokenizer.model_max_length, 256
    )
    length = length or room
    with quietly():
        ids = tokenizer("\n".join(texts), add_special_tokens=False)["input_ids"]
        before, after = _special_tokens(tokenizer)
    size = length - len(before) - len(after)
    if size < 1:
        raise ValueError(f"a window of {length} tokens has no room beside its special tokens")
    count = min(len(ids), max_tokens or len(ids)) // size
    if count < 1:
        raise ValueError(
            f"the text, or its limit, has {min(len(ids), max_tokens or len(ids)):,} tokens, and "
            f"one window needs {size:,}: give more text or a shorter window"
        )
    known = model.get_input_embeddings().num_embeddings
    if max(ids) >= known:
        raise ValueError(f"the tokenizer has tokens beyond the {known:,} that the model knows")
    body = torch.tensor(ids[: count * size]).reshape(count, size)
    edges = [torch.tensor(x, dtype=torch.long).expand(count, -1) for x in (before, after)]
    ids = torch.cat([edges[0], body, edges[1]], 1)
    kept = torch.full((length,), special)
    kept[len(before) : length - len(after)] = True
    return Windows(ids, kept, tuple(_labels(tokenizer, ids[:, kept], first=not before)))


def collect(
    model: nn.Module, windows: Windows, layers: Sequence[int] | None = None
) -> Iterator[Collected]:
    """The arrays of each layer in turn, all layers unless told.

    The model reads the windows once for as many layers as fit in a fixed budget of memory, and
    again for the next ones, so memory does not grow with the number of layers.
    Raises ValueError if a layer does not exist. Source: ours. See: chapter 11.

    >>> import transformers as hf
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = hf.BertModel(hf.BertConfig(**sizes))
    >>> pool = Windows(torch.zeros(2, 3, dtype=torch.long), torch.ones(3) > 0, ("a",) * 6)
    >>> [(layer.names, layer.keys.shape) for layer in collect(model, pool)]
    [(('0.0', '0.1'), torch.Size([2, 6, 4]))]
    """
    found = attention_layers(model)
    wanted = list(range(len(found))) if layers is None else sorted(set(layers))
    wrong = [layer for layer in wanted if not 0 <= layer < len(found)]
    if wrong:
        raise ValueError(f"layers are numbered 0 to {len(found) - 1}, got {wrong[0]}")
    bytes_each = 4 * windows.n_tokens * model.config.hidden_size
    size = max(1, BUDGET // bytes_each)
    for start in range(0, len(wanted), size):
        group = wanted[start : start + size]
        entered = _entering(model, [found[layer][0] for layer in group], windows)
        for layer in group:
            yield _projected(layer, *found[layer], entered.pop(0))


class _Enough(Exception):
    """The last hidden states that are wanted have been caught."""


def _entering(model: nn.Module, modules: list[nn.Module], windows: Windows) -> list[Tensor]:
    """Hidden states (N, width) that enter each of the modules."""
    width, per_batch = model.config.hidden_size, int(windows.kept.sum())
    entered = [torch.empty(windows.n_tokens, width) for _ in modules]
    place = 0

    def catcher(i):
        def catch(_, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            rows = hidden[:, windows.kept.to(hidden.device)].reshape(-1, width)
            entered[i][place : place + len(rows)] = rows
            if i == len(modules) - 1:
                raise _Enough

        return catch

    handles = [
        module.register_forward_pre_hook(catcher(i), with_kwargs=True)
        for i, module in enumerate(modules)
    ]
    try:
        with torch.no_grad():
            for batch in windows.ids.split(BATCH):
                with contextlib.suppress(_Enough):
                    model(batch.to(model.device))
                place += len(batch) * per_batch
    finally:
        for handle in handles:
            handle.remove()
    return entered


def _projected(layer: int, module: nn.Module, layout: Layout, hidden: Tensor) -> Collected:
    """The layer's arrays, filled in part by part: nothing of their size is held twice."""
    device, arrays = next(module.parameters()).device, []
    with torch.no_grad():
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            found = [x.movedim(-2, 0) for x in project(module, layout, hidden[part].to(device))]
            if not arrays:
                arrays = [x.new_empty(len(x), len(hidden), x.shape[-1]) for x in found]
            for array, x in zip(arrays, found, strict=True):
                array[:, part] = x
    left_out = [
        words
        for present, words in (
            (layout.causal, "the causal mask: each query sees the whole pool"),
            (layout.rotary, "rotary positions: scores are those of tokens at one position"),
        )
        if present
    ]
    return Collected(layer, *arrays, tuple(left_out))


def _special_tokens(tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    if not plain:
        return [], []
    full = tokenizer("a")["input_ids"]
    start = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return full[:start], full[start + len(plain) :]


def _labels(tokenizer, ids: Tensor, first: bool) -> Iterator[str]:
    """The tokens' own names; without special tokens, a window's first token goes by its place."""
    for window in ids.tolist():
        names = tokenizer.convert_ids_to_tokens(window)
        yield from ["the first token", *names[1:]] if first else names
