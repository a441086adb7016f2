"""Rust sources as text without what a check must not see. Each character keeps its place, and each line its number."""

import re

# Comments, strings and characters. A lifetime is no character: `'a` has no second quote.
HIDDEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^\n']+|\\'|[^\\\n'])'""", re.DOTALL
)
TEST = re.compile(r"#\[cfg\((?:test|doctest|all\(test\b[^\]]*|any\(test\b[^\]]*)\)\]")
TEST_MODULE = TEST.pattern + r"(?:\s*#\[[^\]]*\])*\s*(?:pub(?:\(\w+\))? )?mod (\w+);"
OPEN = {"(": ")", "[": "]", "{": "}"}


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def ends(text):
    """The place of the bracket that closes each one, by the place of the one that opens."""
    found, stack = {}, []
    for match in re.finditer(r"[()\[\]{}]", text):
        if match[0] in OPEN:
            stack.append(match.start())
        elif stack:
            found[stack.pop()] = match.start()
    return found


def code(text):
    """The source without comments, the insides of strings, and items that only tests have."""
    text = HIDDEN.sub(lambda match: blank(match[0]), text)
    closing = ends(text)
    for match in list(TEST.finditer(text)):
        at = match.end()
        while at < len(text) and text[at] not in ";{,}":  # To the end of the item, over brackets and attributes.
            at = closing[at] if text[at] in "([" else at
            at += 1
        end = closing.get(at, at) + 1
        text = text[: match.start()] + blank(text[match.start() : end]) + text[end:]
    return text


def only_tests(source):
    """The files of modules that only tests have."""
    found = set()
    for file in source.rglob("*.rs"):
        folder = file.parent if file.stem in ("mod", "lib") else file.with_suffix("")
        for name in re.findall(TEST_MODULE, file.read_text()):
            found |= {folder / f"{name}.rs", *(folder / name).rglob("*.rs")}
    return found
