"""Adds pages from the top of the checkout, and files outside `docs/` that a page links to."""

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
TOP = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
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
                if (uri := _on_site(target)) in files.src_uris:
                    continue
                if target.is_dir():
                    files.append(File.generated(config, uri, content=_shown(target)))
                else:
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
    """Return what `link` on `page` names in the checkout: a file, a folder's README or else the folder, or None."""
    if page.abs_src_path is None or re.match(r"[a-z]+:|/", link):
        return None
    target = (Path(page.abs_src_path).parent / link).resolve()
    target = readme if (readme := target / "README.md").exists() else target
    return target if target.exists() and target.is_relative_to(ROOT) else None


def _on_site(target: Path) -> str:
    """Return where a file of the checkout, or the page of a folder, stands on the site."""
    path = target.relative_to(ROOT).as_posix() + "/index.md" * target.is_dir()
    return TOP.get(path, path.removeprefix("docs/"))


def _shown(folder: Path) -> str:
    """Return a page of what is in the files of `folder`."""
    parts = [f"# {folder.relative_to(ROOT)}"]
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        parts.append(f"## {path.name}\n\n````{path.suffix[1:] or 'text'}\n{path.read_text(errors='replace')}\n````")
    return "\n\n".join(parts)
