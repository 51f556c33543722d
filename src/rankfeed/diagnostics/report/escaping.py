"""Text that comes from data: no part of a page, and no order to who draws it."""

from html import escape


def plain(text: str) -> str:
    r"""Text with what is not printable spelt out: ends of lines, turns of direction, half characters.

    Examples:
        >>> plain("a\x1b[31m\u202eb")
        'a\\x1b[31m\\u202eb'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def escaped(text: str) -> str:
    """The same for HTML, in an attribute too.

    Examples:
        >>> escaped('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return escape(plain(text))
