"""What `pyproject.toml` cannot say: the README as a package index shows it, with every link and picture absolute."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
#: the target of a picture or of a link, unless it is absolute or a place on the same page
RELATIVE = re.compile(r"(!\[[^\[\]]*\]|\])\((?![a-z]+:|#)([^()\s]+)\)")


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose links lead to the files of `repository` at `tag`, and whose pictures are theirs."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}({repository}/{kind}/{tag}/{link[2]})"

    return RELATIVE.sub(absolute, text)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    setup(
        long_description=with_absolute_links(readme, project["urls"]["Repository"], f"v{project['version']}"),
        long_description_content_type="text/markdown",
    )
