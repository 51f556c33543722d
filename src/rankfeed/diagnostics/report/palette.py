"""Colours of a report, by what they are for: on light and on dark ground, for readers of any colour sight.

The series are told apart by lightness and by hue along blue and orange, which all kinds of colour sight keep; the
levels of a grid are one hue from the ground's own lightness away from it, so that they survive a grey printer.
"""

#: How many levels the cells of a grid have.
LEVELS = 6

LIGHT = {
    "ground": "#f6f7f9",
    "card": "#ffffff",
    "text": "#1b2430",
    "muted": "#556070",
    "line": "#d9dee5",
    "series-1": "#1f68ad",
    "series-2": "#d1662a",
    "series-3": "#5b4a9a",
    "series-4": "#4a8a7b",
    "level-1": "#e4edf6",
    "level-2": "#bdd3e9",
    "level-3": "#8db3d9",
    "level-4": "#5a8fc4",
    "level-5": "#2f69a3",
    "level-6": "#14406f",
    "good": "#17693b",
    "look": "#805300",
    "bad": "#b3261e",
}

DARK = {
    "ground": "#11151b",
    "card": "#1a2028",
    "text": "#e7ebf1",
    "muted": "#a5b0be",
    "line": "#323c49",
    "series-1": "#6fb3f2",
    "series-2": "#f0a05f",
    "series-3": "#b9a6f2",
    "series-4": "#7ccab6",
    "level-1": "#22303f",
    "level-2": "#274a6c",
    "level-3": "#2f6797",
    "level-4": "#4a8bc2",
    "level-5": "#80b6e4",
    "level-6": "#c9e2f9",
    "good": "#7fd69a",
    "look": "#f1c35b",
    "bad": "#ff9289",
}
