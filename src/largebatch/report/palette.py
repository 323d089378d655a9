"""Which colours do the roles have on a light page, a dark page and a print?

The three data hues (teal, amber, violet) keep their order of lightness apart for colour-blind readers,
and every one that carries text has a contrast of at least 4.5 to its background.
"""

LIGHT = {
    "page": "#f6f7f7",
    "card": "#ffffff",
    "ink": "#1b2126",
    "muted": "#59636d",
    "line": "#dfe3e6",
    "grid": "#e9ecee",
    "accent": "#0a6c86",
    "wash": "#e6f1f4",
    "second": "#b05500",
    "third": "#7b4ea3",
    "danger": "#b3261e",
}
DARK = {
    "page": "#121619",
    "card": "#191e22",
    "ink": "#e7eaec",
    "muted": "#a5afb8",
    "line": "#303840",
    "grid": "#283037",
    "accent": "#5cc3dd",
    "wash": "#17303a",
    "second": "#f0a45c",
    "third": "#c6a3ea",
    "danger": "#ff8f85",
}


def role_and_opacity(colour: str) -> tuple[str, float]:
    """Split "accent@0.5" into its role and opacity.

    >>> role_and_opacity("accent@0.5"), role_and_opacity("ink")
    (('accent', 0.5), ('ink', 1.0))
    """
    role, _, opacity = colour.partition("@")
    return role, float(opacity or 1)
