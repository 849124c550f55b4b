# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Hooks of the documentation site: pages that live elsewhere in the repository, API pages of the
rooms, links that work both in the repository and on the site, and former names of pages.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Page of the site, by the file of the repository that it shows.
PAGES = {
    "README.md": "index.md",
    "examples/quickstart/README.md": "quickstart.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/figures.md": "figures.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
# Former pages -> where their content is.
MOVED = {
    "constitutional_ai": "algorithms.html#constitutional-ai",
    "differences": "migration.html#differences",
    "distillation": "algorithms.html#distillation",
    "dpo": "preferences.html",
    "environments": "rewards.html#environments",
    "glossary": "architecture.html#glossary",
    "gpu": "performance.html#on-a-gpu",
    "hugging_face": "models.html",
    "kto": "preferences.html#kto",
    "lora": "models.html#lora",
    "megatron_core": "architecture.html#megatron-core",
    "operations": "troubleshooting.html",
    "plan": "parallelism.html#will-it-fit",
    "reinforce": "ppo.html#reinforce",
    "reliability": "troubleshooting.html",
    "spin": "preferences.html#spin",
    "steerlm": "algorithms.html#steerlm",
    "versions": "jobs.html#versions",
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for room in sorted((ROOT / "nemo_aligner").iterdir()):
        page = f"api/{room.name}.md"
        if f": {page}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8"):
            files.append(File.generated(config, page, content=api_page(room)))
    return files


def api_page(room: Path) -> str:
    """One section per module of a room of the package; not of the keys, which config.md shows."""
    keys = [ROOT / "nemo_aligner/config" / name for name in ("keys", "jobs")]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(room.rglob("*.py"))
        if path.name != "__init__.py" and path.parent not in keys
    ]
    sections = "\n\n".join(f"::: {module}" for module in modules)
    return f"# nemo_aligner.{room.name}\n\n{sections}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the pages of the site."""
    page_uri = page.file.src_uri
    source = SOURCES.get(page_uri, f"docs/{page_uri}")
    return LINK.sub(lambda link: site_link(link.group(1), link.group(2), source), markdown)


def site_link(label: str, target: str, source: str) -> str:
    """The link of a file of the repository as a link of the site.

    A link to a file that is no page (a script, a folder) becomes its label alone.
    """
    if re.match(r"[a-z]+:|#", target):
        return f"[{label}]({target})"
    path, hash_sign, anchor = target.partition("#")
    path = os.path.normpath(os.path.join(os.path.dirname(source), path))
    page = PAGES.get(path) or (
        path.removeprefix("docs/") if re.fullmatch(r"docs/.*\.md", path) else None
    )
    return label if page is None else f"[{label}]({page}{hash_sign}{anchor})"


def on_post_build(config: MkDocsConfig) -> None:
    """Send readers of former pages on."""
    for page, target in MOVED.items():
        text = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">\n'
        (Path(config.site_dir) / f"{page}.html").write_text(text, encoding="utf-8")
