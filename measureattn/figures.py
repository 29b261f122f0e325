"""The house style of the book's figures; the only module that knows matplotlib."""

import matplotlib.pyplot as plt

# Okabe and Ito's palette: told apart with any colour vision, readable on a white ground
COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "black": "#000000",
}


def house_style() -> None:
    """Set the look of all figures that follow: size, fonts, colours, a white ground.

    The ground is white in dark mode too, so that colours keep their contrast.
    """
    plt.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 100,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.prop_cycle": plt.cycler(color=list(COLOURS.values())),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "lines.linewidth": 1.8,
            "font.size": 11,
            "axes.titlesize": 11,
            "legend.frameon": False,
        }
    )


def head_map(share, names=None):
    """Draw the share explained, 1 - share, of each head: layers down, heads across.

    share  (layers, heads), the share left unexplained, as in `HeadReport`; above 1 it is drawn as 1
    names  the layers' numbers, 0, 1, ... unless told

    Returns (figure, axes). Every cell carries its share left unexplained as a number.
    """
    layers, heads = share.shape
    figure, axes = plt.subplots(figsize=(1 + 0.55 * heads, 1.2 + 0.42 * layers))
    picture = axes.imshow(1 - share.clip(max=1), cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for layer in range(layers):
        for head in range(heads):
            value = float(share[layer, head])
            shade = "black" if value < 0.5 else "white"
            text = f"{value:.2f}" if value < 9.95 else f"{value:.0f}"
            axes.text(head, layer, text, ha="center", va="center", color=shade, fontsize=8)
    axes.set_xticks(range(heads))
    axes.set_yticks(range(layers), names or range(layers))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.grid(False)
    figure.colorbar(picture, label="share explained by the linear prediction")
    return figure, axes
