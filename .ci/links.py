#!/usr/bin/env python3
"""The links of built pages lead somewhere.

Usage: .ci/links.py FOLDER.., folders of HTML pages that `cargo doc` or mdBook has written. On each page, a relative
link must name a file that is there, and a fragment must be an id in that file. So no page of rustdoc names a file of
the repository, which docs.rs does not have. Addresses on the web are not visited.
"""

import pathlib
import sys
import urllib.parse
from html.parser import HTMLParser

# What rustdoc repeats from the documentation of other crates' traits, relative to their pages: tracing's.
FOREIGN = {"dispatcher#setting-the-default-subscriber"}
# mdBook's page of all pages has their links as they were, and its 404 is served at any address.
LEFT_OUT = {"print.html", "404.html"}


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.ids, self.moved = [], set(), None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if attributes.get("id"):
            self.ids.add(attributes["id"])
        if attributes.get("http-equiv") == "refresh":
            self.moved = attributes["content"].partition("URL=")[2]
        for name in ("href", "src"):
            if tag in ("a", "img") and attributes.get(name):
                self.links.append(attributes[name])


def main():
    folders = [pathlib.Path(folder).resolve() for folder in sys.argv[1:]]
    pages = {path: Page(path) for folder in folders for path in sorted(folder.rglob("*.html"))}
    for folder in folders:
        if folder / "index.html" not in pages:
            sys.exit(f"{folder} has no front page")
    count, broken = 0, []
    for path, page in list(pages.items()):
        for link in () if path.name in LEFT_OUT else page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc or link in FOREIGN:
                continue
            count += 1
            name = urllib.parse.unquote(parts.path)
            target = (path.parent / name).resolve() if name else path
            if not target.is_file():
                broken.append(f"{path}: {link}: no such file")
            # The lines of sources are numbered by a script.
            elif parts.fragment and target.suffix == ".html" and "/src/" not in target.as_posix():
                if target not in pages:
                    pages[target] = Page(target)
                # From the module that has an item to the page of its public name. The place is kept.
                if pages[target].moved:
                    target = (target.parent / pages[target].moved).resolve()
                    pages.setdefault(target, Page(target))
                # Some ids are written as they stand in links.
                if not {parts.fragment, urllib.parse.unquote(parts.fragment)} & pages[target].ids:
                    broken.append(f"{path}: {link}: no such place on that page")
    if broken:
        sys.exit("\n".join(broken[:50]) + f"\n{len(broken)} of {count} links lead nowhere")
    print(f"{count} links of {len(pages)} pages lead somewhere")


main()
