"""The extension of griffe with which mkdocstrings reads the docstrings of the reference."""

from griffe import Extension, Object

from tools.docs_hooks import docstring_markdown


class Docstrings(Extension):  # type: ignore[misc]
    """Changes the docstring of every object to Markdown."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Replace the text of its docstring."""
        if obj.docstring is not None:
            obj.docstring.value = docstring_markdown(obj.docstring.value)
