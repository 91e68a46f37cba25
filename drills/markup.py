"""HTML and SVG elements as strings that cannot be built unescaped."""

from html import escape


class Markup(str):
    """Text that is markup already: the only kind that `element` takes over as it stands."""

    __slots__ = ()


def element(name: str, *children: object, **attributes: object) -> Markup:
    """`<name attributes>children</name>`.

    Text is escaped unless it is Markup. An attribute's `_` stands for `-`, a trailing one is dropped (`class_`); floats
    are rounded to hundredths; None leaves the attribute out.
    """
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{listed}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """All children after one another, escaped where they are not Markup."""
    return Markup("".join(child if isinstance(child, Markup) else escape(_text(child)) for child in children))


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
