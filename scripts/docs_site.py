"""What mkdocs needs to know about this repository: pages that are not in docs/, and links that lead out of it.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages, too. Links between pages are those of the repository, so that
they work where the files are read; other targets, such as results and code, are not part of the site, and only the
link text is kept.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository's root, and their names on the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between pages."""
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def site_link(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            return match[0]  # mkdocs reports it as broken
        linked = PAGES.get(path, path.removeprefix("docs/"))
        if not files.get_file_from_path(linked):
            return text
        relative = posixpath.relpath(linked, posixpath.dirname(page.file.src_uri))
        return f"{image}[{text}]({relative}{anchor})"

    return LINK.sub(site_link, markdown)
