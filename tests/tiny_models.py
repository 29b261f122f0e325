"""Tiny random transformers models with tokenizers of their own, for the tests of the collector."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"w{i}" for i in range(50)]
SMALL = dict(
    vocab_size=60, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=32, max_position_embeddings=40, hidden_act="gelu",
)  # fmt: skip
GROUPED = SMALL | dict(num_key_value_heads=2, hidden_act="silu", pad_token_id=0)
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SMALL),
    "roberta": lambda: transformers.RobertaConfig(**SMALL, pad_token_id=0),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SMALL, pad_token_id=0),
    "camembert": lambda: transformers.CamembertConfig(**SMALL, pad_token_id=0),
    "electra": lambda: transformers.ElectraConfig(**SMALL, embedding_size=16),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=60, dim=24, n_layers=3, n_heads=4, hidden_dim=32, max_position_embeddings=40
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=60, n_embd=24, n_layer=3, n_head=4, n_positions=40,
        bos_token_id=0, eos_token_id=0, scale_attn_by_inverse_layer_idx=True,
    ),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, head_dim=8, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
}  # fmt: skip

ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")


def text(n: int, seed: int = 0) -> str:
    """n words."""
    chosen = torch.randint(len(WORDS), (n,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in chosen.tolist())


def tokenizer(special: bool = True):
    """A word a token; [CLS] and [SEP] around each text if asked for."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    vocabulary |= {word: 4 + i for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=40
    )


def model(kind: str):
    """A random model, with weights large enough that heads are not nearly uniform."""
    torch.manual_seed(0)  # transformers draws initial weights from the global generator
    made = transformers.AutoModel.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return made.eval()


def save(kind: str, folder: Path) -> Path:
    """A folder as `load` expects it."""
    transformers.logging.disable_progress_bar()
    model(kind).save_pretrained(folder)
    tokenizer(special=kind in ENCODERS).save_pretrained(folder)
    return folder
