"""What is collected is what the model's own attention uses; the rest is refused in one line."""

import math

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
import transformers

from measureattn.heads import collect, collector, linear_heads, load, measure_heads, windows
from measureattn.heads.models import LAYOUTS, attention_layers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One saved model a kind, made when first asked for."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = tiny_models.save(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


def caught(module, layout, run):
    """What enters the output projection of an attention layer, or what the layer returns."""
    found = []
    if layout.output:
        output = getattr(module, layout.output)
        handle = output.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    else:
        handle = module.register_forward_hook(lambda *x: found.append(x[2][0]))
    with torch.no_grad():
        run()
    handle.remove()
    return found[0]


def rotated(model, queries, keys, length):
    """Queries and keys (..., length, D) after the model's own rotation."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = model.rotary_emb(keys, torch.arange(length)[None])
    return apply_rotary_pos_emb(queries, keys, cos, sin)


@pytest.mark.parametrize("kind", tiny_models.CONFIGS)
def test_the_arrays_are_the_layers_own(kind, folders):
    """Attention put together from them, masks and rotation added, is what the layer computes."""
    model, _ = load(folders(kind))
    # transformers would make a Qwen2 tokenizer of any saved one
    tokenizer = tiny_models.tokenizer(special=kind in tiny_models.ENCODERS)
    pool = windows(model, tokenizer, [tiny_models.text(95)], length=24, special=True)
    count, length = pool.ids.shape
    layers = attention_layers(model)
    for found in collect(model, pool):
        module, layout = layers[found.layer]
        context = caught(module, layout, lambda: model(pool.ids))
        queries, keys, values = (
            x.unflatten(1, (count, length)).transpose(0, 1)
            for x in (found.queries, found.keys, found.values)
        )
        if layout.rotary:
            queries, keys = rotated(model, queries, keys, length)
        scores = queries @ keys.mT
        if layout.causal:
            hidden = torch.ones(length, length).triu(1).bool()
            scores = scores.masked_fill(hidden, -math.inf)
        own = (scores.softmax(-1) @ values).transpose(1, 2).flatten(-2)
        assert (own - context).abs().max() < 1e-4 * context.abs().max()
        assert len(found.left_out) == layout.causal + layout.rotary
        assert found.names == tuple(f"{found.layer}.{h}" for h in range(4))
    assert found.layer == 2


def test_every_supported_kind_is_tried():
    kinds = {type(attention_layers(tiny_models.model(kind))[0][0]) for kind in tiny_models.CONFIGS}
    assert {kind.__name__ for kind in kinds} == set(LAYOUTS)


def test_windows_leave_special_tokens_out_or_keep_them(folders):
    model, tokenizer = load(folders("bert"))
    texts = [tiny_models.text(50), tiny_models.text(45, seed=1)]
    words = " ".join(texts).split()
    pool = windows(model, tokenizer, texts, length=12)
    assert pool.ids.shape == (9, 12)
    assert pool.n_tokens == 90
    assert list(pool.labels) == words[:90]
    assert (pool.ids[:, 0] == 2).all() and (pool.ids[:, -1] == 3).all()
    kept = windows(model, tokenizer, texts, length=12, special=True)
    assert kept.n_tokens == 108
    assert kept.labels[:2] == ("[CLS]", words[0])
    assert windows(model, tokenizer, texts, length=12, max_tokens=29).n_tokens == 20
    assert windows(model, tokenizer, texts).ids.shape == (2, 40)  # what the model has room for
    arrays = [next(collect(model, x)) for x in (pool, kept)]
    inner = kept.kept.clone()
    inner[[0, -1]] = False
    assert torch.equal(arrays[0].keys, arrays[1].keys[:, inner.repeat(9)])


def test_without_special_tokens_the_first_of_a_window_goes_by_its_place(folders):
    model, tokenizer = load(folders("gpt2"))
    pool = windows(model, tokenizer, [tiny_models.text(30)], length=10)
    assert pool.labels[::10] == ("the first token",) * 3
    assert "the first token" not in pool.labels[1:10]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_memory_or_choice_of_layers_changes_nothing(kind, folders, monkeypatch):
    """One layer a reading, in the place of all at once."""
    model, tokenizer = load(folders(kind))
    pool = windows(model, tokenizer, [tiny_models.text(200)], length=20)
    whole = list(collect(model, pool))
    monkeypatch.setattr(collector, "BUDGET", 1)
    for one, other in zip(collect(model, pool), whole, strict=True):
        assert torch.equal(one.queries, other.queries) and torch.equal(one.values, other.values)
    (last,) = collect(model, pool, [2, 2])
    assert torch.equal(last.keys, whole[2].keys)
    with pytest.raises(ValueError, match="numbered 0 to 2, got 3"):
        list(collect(model, pool, [3]))


def test_the_global_generator_and_the_model_are_left_alone(folders):
    model, tokenizer = load(folders("bert"))
    state = torch.get_rng_state()
    pool = windows(model, tokenizer, [tiny_models.text(100)], length=20)
    before = model(pool.ids).last_hidden_state
    for found in collect(model, pool):
        arrays = found.queries, found.keys, found.values
        measure_heads(*arrays, generator=torch.Generator().manual_seed(0), names=found.names)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(pool.ids).last_hidden_state, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


# -- linear heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "llama"])
def test_linear_heads_answer_linearly(kind, folders):
    model, tokenizer = load(folders(kind))
    pool = windows(model, tokenizer, [tiny_models.text(60)], length=20, special=True)
    found = list(collect(model, pool))[1]
    module, layout = attention_layers(model)[1]
    width = found.values.shape[-1]
    g = torch.Generator().manual_seed(0)
    offset, matrix = torch.randn(width, generator=g), torch.randn(width, width, generator=g)

    def run():
        model(pool.ids)

    plain = caught(module, layout, run)
    with linear_heads(model, {(1, 2): (offset, matrix), (1, 0): None}):
        # a hook that reads is put after the one that writes
        changed = caught(module, layout, run)
    answer = (offset + found.queries[2] @ matrix.mT).reshape(*pool.ids.shape, width)
    assert torch.allclose(changed[..., 2 * width : 3 * width], answer, rtol=1e-4, atol=1e-4)
    for w, own in enumerate(changed[..., :width]):
        part = slice(w * pool.ids.shape[1], (w + 1) * pool.ids.shape[1])
        q, k, v = (x[0, part] for x in (found.queries, found.keys, found.values))
        cov = (v - v.mean(0)).mT @ (k - k.mean(0)) / len(k)
        assert torch.allclose(own, v.mean(0) + q @ cov.mT, rtol=1e-3, atol=1e-3)
    for other in (1, 3):
        part = slice(other * width, (other + 1) * width)
        assert torch.equal(changed[..., part], plain[..., part])
    assert torch.equal(caught(module, layout, run), plain)


def test_wrong_heads_and_padding_are_refused(folders):
    model, tokenizer = load(folders("bert"))
    with pytest.raises(ValueError, match="heads are numbered 0 to 3, got 4"):
        linear_heads(model, {(0, 4): None}).__enter__()
    with pytest.raises(ValueError, match="layers are numbered 0 to 2, got 7"):
        linear_heads(model, {(7, 0): None}).__enter__()
    batch = tokenizer([tiny_models.text(5), tiny_models.text(9)], padding=True, return_tensors="pt")
    with linear_heads(model, {(0, 0): None}), pytest.raises(ValueError, match="unpadded"):
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert not any(module._forward_hooks for module in model.modules())


# -- what is refused ----------------------------------------------------------------------------


def refused(folder, kind=ValueError):
    with pytest.raises(kind) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_kinds_of_attention_are_refused(tmp_path):
    small = dict(vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
    t5 = transformers.T5Config(vocab_size=60, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    cases = [
        (transformers.MPNetConfig(**small, intermediate_size=32), "MPNetSelfAttention"),
        (transformers.Qwen3Config(**small, head_dim=8), "Qwen3Attention"),
        (t5, "an encoder and a decoder"),
    ]
    for number, (config, reason) in enumerate(cases):
        folder = tmp_path / str(number)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        tiny_models.tokenizer().save_pretrained(folder)
        assert reason in refused(folder)


def test_a_folder_that_is_no_model_is_refused(tmp_path, folders):
    assert "expected a folder" in refused(tmp_path / "none", NotADirectoryError)
    assert "holds no model" in refused(tmp_path)
    transformers.BertConfig(**tiny_models.SMALL).save_pretrained(tmp_path)
    assert "holds no model" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_missing_tokenizer_is_named(kind, tmp_path):
    """transformers makes up an empty one for the first two."""
    tiny_models.model(kind).save_pretrained(tmp_path)
    assert "holds no tokenizer" in refused(tmp_path)


def test_a_tokenizer_of_another_model_is_refused():
    model, tokenizer = tiny_models.model("bert"), tiny_models.tokenizer()
    tokenizer.add_tokens(["w50", *(f"x{i}" for i in range(10))])
    with pytest.raises(ValueError, match="beyond the 60 that the model knows"):
        windows(model, tokenizer, ["x9 " + tiny_models.text(50)])


def test_damaged_and_missing_weights_are_named(tmp_path):
    folder = tiny_models.save("bert", tmp_path)
    model = tiny_models.model("bert")
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[0, 0] = math.nan
    model.save_pretrained(folder)
    assert "encoder.layer.1.attention.self.key.weight" in refused(folder)
    weights = {k: v for k, v in tiny_models.model("bert").state_dict().items() if "value" not in k}
    model.save_pretrained(folder, state_dict=weights)
    assert "lacks weights of its model" in refused(folder)


def test_text_shorter_than_a_window_is_refused(folders):
    model, tokenizer = load(folders("bert"))
    with pytest.raises(ValueError, match="one window needs 38"):
        windows(model, tokenizer, [tiny_models.text(37)])
    with pytest.raises(ValueError, match="no room beside its special tokens"):
        windows(model, tokenizer, [tiny_models.text(37)], length=2)
