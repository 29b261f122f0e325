"""Measuring the heads of a real transformer: how linear they are, and how long is long.

    arrays   `measure_heads(queries, keys, values, generator=...)`: any source, no model needed
    models   `load`, `windows` and `collect` take the arrays out of a Hugging Face model, and
             `linear_heads` puts the linear predictions in the place of its heads

The extra `heads` installs what the second needs: pip install measureattn[heads].
"""

from measureattn.heads.collector import Collected, Windows, collect, windows
from measureattn.heads.decay import Decay
from measureattn.heads.models import linear_heads, load
from measureattn.heads.report import HeadReport, measure_heads
from measureattn.heads.sinks import Sink

__all__ = [
    "Collected",
    "Decay",
    "HeadReport",
    "Sink",
    "Windows",
    "collect",
    "linear_heads",
    "load",
    "measure_heads",
    "windows",
]
