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
