"""Lets the reference show examples in docstrings as code.

A docstring is Markdown to MkDocs, which takes the `>>>` of an example for a quotation. Griffe reads
the docstrings and calls this extension, which mkdocs.yml names, with each object that has one.
"""

import re

import griffe

# A line that starts an example, and all lines up to the next empty one.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts examples into fences."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        """Changes the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
