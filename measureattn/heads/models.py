"""Hugging Face models: loading one, where its heads are, and putting linear ones in their place.

transformers is imported only when a model is loaded: it comes with the extra `heads`.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

INSTALL = "reading a model needs the extra `heads`: pip install 'measureattn[heads]'"


@dataclass(frozen=True)
class Layout:
    """Where an attention layer keeps its projections; one fused name or three."""

    projections: tuple[str, ...]
    output: str = ""  # the projection that its heads' outputs enter; "" if the layer returns them
    rotary: bool = False
    causal: bool = False


ENCODER = Layout(("query", "key", "value"))
ROTARY = Layout(("q_proj", "k_proj", "v_proj"), "o_proj", rotary=True, causal=True)
LAYOUTS = {
    "BertSelfAttention": ENCODER,
    "CamembertSelfAttention": ENCODER,
    "ElectraSelfAttention": ENCODER,
    "RobertaSelfAttention": ENCODER,
    "XLMRobertaSelfAttention": ENCODER,
    "DistilBertSelfAttention": Layout(("q_lin", "k_lin", "v_lin"), "out_lin"),
    "GPT2Attention": Layout(("c_attn",), "c_proj", causal=True),
    "LlamaAttention": ROTARY,
    "MistralAttention": ROTARY,
    "Qwen2Attention": ROTARY,
}


def load(folder: str | Path):
    """(model, tokenizer) from a folder, float32, no network.

    Raises ImportError without the extra `heads`, OSError or ValueError if the folder holds no
    model or no tokenizer, if weights are missing or not finite, or if the attention is of a kind
    that is not supported; each in one line. Source: ours. See: chapter 11.

    >>> load("no such folder")
    Traceback (most recent call last):
    NotADirectoryError: expected a folder with a model, got no such folder
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"expected a folder with a model, got {folder}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "IProgress"
            )  # tqdm's, where a notebook has no widgets
            from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise ImportError(INSTALL) from None
    with quietly():
        model, facts = _from_folder(
            AutoModel, folder, "model", dtype=torch.float32, output_loading_info=True
        )
        tokenizer = _from_folder(AutoTokenizer, folder, "tokenizer")
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # what transformers makes up where there are no files
        raise ValueError(f"{folder} holds no tokenizer: its vocabulary is empty")
    missing = [name for name in facts["missing_keys"] if "pooler" not in name]
    if missing:
        raise ValueError(f"{folder} lacks weights of its model, {sorted(missing)[0]} for one")
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"weights must be finite; {name} in {folder} has NaN or infinity")
    attention_layers(model)
    return model.eval(), tokenizer


def attention_layers(model: nn.Module) -> list[tuple[nn.Module, Layout]]:
    """The attention layers in order, or a ValueError that says why they cannot be measured."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has an encoder and a decoder; one stack of layers is "
            f"supported. Load its encoder alone"
        )
    found = [module for module in model.modules() if type(module).__name__ in LAYOUTS]
    if len(found) != config.num_hidden_layers:
        kinds = {type(module).__name__ for module in model.modules()}
        named = ", ".join(sorted(name for name in kinds if "Attention" in name)) or "none"
        raise ValueError(
            f"{type(model).__name__} has attention of a kind that is not supported (found "
            f"{named}; supported are {', '.join(LAYOUTS)})"
        )
    return [(module, LAYOUTS[type(module).__name__]) for module in found]


@contextlib.contextmanager
def linear_heads(
    model: nn.Module, heads: Mapping[tuple[int, int], tuple[Tensor, Tensor] | None]
) -> Iterator[None]:
    """Inside the block, the model's given heads answer with a linear function of their query.

    heads  (layer, head) -> (offset (M), matrix (M, D)): the answer is offset + matrix a, with a
           the scaled query, as in `HeadReport.offset` and `HeadReport.matrix`; or None for
           linear attention on the prompt itself, mean(v) + Cov(v, k) a over all its tokens

    None needs prompts without padding, and knows no causal mask. Raises ValueError if a head does
    not exist, or for padding where none is allowed. Source: ours. See: chapter 11.

    >>> import transformers as hf
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = hf.BertModel(hf.BertConfig(**sizes))
    >>> with linear_heads(model, {(0, 1): (torch.zeros(4), torch.eye(4))}):
    ...     changed = model(torch.zeros(1, 3, dtype=torch.long))
    """
    found = attention_layers(model)
    with contextlib.ExitStack() as stack:
        for layer in sorted({layer for layer, _ in heads}):
            if not 0 <= layer < len(found):
                raise ValueError(f"layers are numbered 0 to {len(found) - 1}, got {layer}")
            mine = {head: linear for (place, head), linear in heads.items() if place == layer}
            for handle in _replace(*found[layer], mine):
                stack.callback(handle.remove)
        yield


def _replace(module: nn.Module, layout: Layout, heads: Mapping):
    """Hooks: one remembers the layer's input, one writes the linear answers over its heads'."""
    count = module.config.num_attention_heads
    wrong = [head for head in heads if not 0 <= head < count]
    if wrong:
        raise ValueError(f"heads are numbered 0 to {count - 1}, got {wrong[0]}")
    entered = []

    def remember(_, args, kwargs):
        if None in heads.values() and kwargs.get("attention_mask") is not None:
            raise ValueError("linear attention on the prompt needs prompts of one length, unpadded")
        entered[:] = [args[0] if args else kwargs["hidden_states"]]

    def rewritten(context: Tensor) -> Tensor:
        arrays = [x.movedim(-2, 0) for x in project(module, layout, entered[0])]
        width = arrays[-1].shape[-1]
        context = context.clone()
        for head, linear in heads.items():
            answer = _linear_answer(*(x[head] for x in arrays), linear)
            context[..., head * width : (head + 1) * width] = answer
        return context

    yield module.register_forward_pre_hook(remember, with_kwargs=True)
    if layout.output:
        output = getattr(module, layout.output)
        yield output.register_forward_pre_hook(lambda _, args: (rewritten(args[0]), *args[1:]))
    else:
        yield module.register_forward_hook(lambda *x: (rewritten(x[2][0]), *x[2][1:]))


def _linear_answer(queries: Tensor, keys: Tensor, values: Tensor, linear) -> Tensor:
    """(..., N, M) for one head, from (..., N, D) and (..., N, M)."""
    if linear is None:
        offset = values.mean(-2, keepdim=True)
        matrix = (values - offset).mT @ (keys - keys.mean(-2, keepdim=True)) / keys.shape[-2]
    else:
        offset, matrix = (x.to(queries) for x in linear)
    return offset + queries @ matrix.mT


def project(module: nn.Module, layout: Layout, hidden: Tensor) -> list[Tensor]:
    """Scaled queries, keys and values (*hidden, heads, dim), shared ones repeated."""
    parts = [getattr(module, name)(hidden) for name in layout.projections]
    if len(parts) == 1:
        parts = parts[0].chunk(3, -1)
    dim = getattr(module, "head_dim", None) or module.attention_head_size
    queries, keys, values = (x.unflatten(-1, (-1, dim)) for x in parts)
    copies = queries.shape[-2] // keys.shape[-2]
    keys, values = (x.repeat_interleave(copies, -2) for x in (keys, values))
    return [queries * module.scaling, keys, values]


def _from_folder(loader, folder: Path, what: str, **options):
    try:
        return loader.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # of many kinds, most of them pages long
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{folder} holds no {what} that transformers can load: {reason}") from None


@contextlib.contextmanager
def quietly():
    """transformers without its progress bars and warnings."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
