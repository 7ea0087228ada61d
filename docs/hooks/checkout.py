"""What stands outside `docs/`: the README is the site's first page, and what a page links to comes along."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[2]
#: pages from the top of the checkout -> where they stand on the site
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: what follows `](` and `src="`, up to an anchor
LINK = re.compile(r'(?<=\]\()[^()\s#]+|(?<=src=")[^"]+')


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the top, and whatever pages link to outside `docs/`."""
    for name, uri in TOP.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    read: set[str] = set()
    while pages := [file for file in files.documentation_pages() if file.src_uri not in read]:
        for page in pages:
            read.add(page.src_uri)
            for target in _targets(page):
                if (uri := _on_site(target)) not in files.src_uris:
                    files.append(File.generated(config, uri, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where things stand on the site."""
    here = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = _target(page.file, link[0])
        return link[0] if target is None else posixpath.relpath(_on_site(target), here)

    return LINK.sub(moved, markdown)


def _targets(page: File) -> Iterator[Path]:
    """Yield the files of the checkout that `page` links to."""
    for link in LINK.findall(page.content_string):
        if target := _target(page, link):
            yield target


def _target(page: File, link: str) -> Path | None:
    """Return the file of the checkout that `link` on `page` names, of a folder its README; None if there is none."""
    if page.abs_src_path is None or re.match(r"[a-z]+:|/", link):
        return None
    target = (Path(page.abs_src_path).parent / link).resolve()
    target = target / "README.md" if target.is_dir() else target
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _on_site(target: Path) -> str:
    """Return where a file of the checkout stands on the site."""
    path = target.relative_to(ROOT).as_posix()
    return TOP.get(path, path.removeprefix("docs/"))
