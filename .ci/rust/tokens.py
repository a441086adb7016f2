"""Rust sources as tokens, without comments and without test code."""

import re
from typing import NamedTuple


class Token(NamedTuple):
    kind: str  # ident, punct, attr, or other: a literal or a lifetime
    text: str
    line: int
    inner: tuple = ()  # of an attribute: its tokens


TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<comment>//[^\n]*)
      | (?P<block>/\*)
      | (?P<raw>\b(?:br|cr|r)(?P<hashes>\#*)")
      | (?P<string>(?:\b[bc])?"(?:\\.|[^"\\])*")
      | (?P<char>(?:\bb)?'(?:\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F_]+\}|.)|[^\\'])')
      | (?P<lifetime>'[^\W\d]\w*)
      | (?P<ident>(?:r\#)?[^\W\d]\w*)
      | (?P<number>\d\w*(?:\.\d\w*)?)
      | (?P<punct>::|->|=>|\.\.[.=]?|\|\||&&|.)""",
    re.VERBOSE | re.DOTALL,
)
BLOCK_EDGE = re.compile(r"/\*|\*/")
CLOSES = {"(": ")", "[": "]", "{": "}"}


def tokenize(text):
    """The tokens of a Rust source, without comments. Attributes are one token each."""
    tokens, at, line = [], 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        kind, end = match.lastgroup, match.end()
        if match["block"]:  # Block comments nest.
            kind, depth = "block", 1
            while depth:
                edge = BLOCK_EDGE.search(text, end)
                if not edge:
                    raise SystemExit(f"floors: a block comment of line {line} has no end")
                depth += 1 if edge[0] == "/*" else -1
                end = edge.end()
        elif match["raw"]:
            kind, close = "string", '"' + match["hashes"]
            end = text.index(close, end) + len(close)
        if kind in ("ident", "punct"):
            tokens.append(Token(kind, text[at:end].removeprefix("r#"), line))
        elif kind in ("string", "char", "lifetime", "number"):
            tokens.append(Token("other", text[at:end], line))
        line += text.count("\n", at, end)
        at = end
    return join_attributes(tokens)


def brackets(tokens):
    """For each opening bracket, where it closes."""
    ends, stack = {}, []
    for at, token in enumerate(tokens):
        if token.kind == "punct" and token.text in CLOSES:
            stack.append(at)
        elif token.kind == "punct" and token.text in ")]}" and stack:
            ends[stack.pop()] = at
    for at in stack:  # Half of a macro's pattern.
        ends[at] = len(tokens)
    return ends


def join_attributes(tokens):
    ends, out, at = brackets(tokens), [], 0
    while at < len(tokens):
        token, bang = tokens[at], at + 1
        if token.text == "#" and token.kind == "punct":
            bang += bang < len(tokens) and tokens[bang].text == "!"
            if bang < len(tokens) and tokens[bang].text == "[":
                inner = tuple(tokens[bang + 1 : ends[bang]])
                out.append(Token("attr", "#!" if bang > at + 1 else "#", token.line, inner))
                at = ends[bang] + 1
                continue
        out.append(token)
        at += 1
    return out


def cfg_of(tokens):
    """What a condition of `cfg` is outside of tests: True, False, or None where it depends on the build."""
    if not tokens:
        return None
    name = tokens[0].text
    if len(tokens) > 1 and tokens[1].text == "(":
        parts, depth, start = [], 0, 2
        for at in range(2, len(tokens)):
            depth += {"(": 1, ")": -1}.get(tokens[at].text, 0)
            if depth < 0 or (depth == 0 and tokens[at].text == ","):
                if at > start:
                    parts.append(cfg_of(tokens[start:at]))
                start = at + 1
        if name == "not":
            return None if parts[0] is None else not parts[0]
        decides = name == "any"
        if decides in parts:
            return decides
        return None if None in parts else not decides
    return False if name in ("test", "doctest") and len(tokens) == 1 else None


def is_test(attribute):
    words = attribute.inner
    if len(words) == 1 and words[0].text in ("test", "bench"):
        return True
    return len(words) > 1 and words[0].text == "cfg" and cfg_of(words[2:-1]) is False


ITEM_WORDS = set(
    "use mod fn struct enum union trait impl const static type unsafe async extern macro_rules let".split()
)


def thing_end(tokens, ends, at):
    """Where the item, statement, field or match arm that begins here ends."""
    while at < len(tokens) and tokens[at].kind == "attr":
        at += 1
    first = at
    if at < len(tokens) and tokens[at].text == "pub":
        at += 1
        at = ends[at] + 1 if tokens[at].text == "(" else at
    named = at + 1 < len(tokens) and tokens[at + 1].text == ":"  # A field may be called `union`.
    word = tokens[at].text if at < len(tokens) and not named else ""
    is_item = word in ITEM_WORDS
    until_semicolon = word in ("use", "let", "static", "const", "type")
    while at < len(tokens):
        text, kind = tokens[at].text, tokens[at].kind
        if kind == "ident" and text == "fn" and is_item:
            until_semicolon = False
        if kind == "punct":
            if text == "{" and not until_semicolon:
                end = ends[at] + 1
                goes_on = end < len(tokens) and tokens[end].text in ("=>", "if", "|", ".", "?", "else", ",")
                if is_item or not goes_on:
                    return end
            if text in CLOSES:
                at = ends[at]
            elif text == ";" or (text == "," and not is_item):
                return at + 1
            elif text in ")]}":
                return max(at, first + 1)
        at += 1
    return at


def without_tests(tokens):
    ends, out, at = brackets(tokens), [], 0
    while at < len(tokens):
        if tokens[at].kind == "attr" and is_test(tokens[at]):
            if tokens[at].text == "#!":
                return []
            while out and out[-1].kind == "attr" and out[-1].text == "#":
                out.pop()
            at = thing_end(tokens, ends, at)
            continue
        out.append(tokens[at])
        at += 1
    return out


def skip_angles(tokens, at):
    """Past a list of generics that begins here, if one does."""
    if at >= len(tokens) or tokens[at].text != "<":
        return at
    depth = 0
    while at < len(tokens):
        depth += {"<": 1, ">": -1}.get(tokens[at].text, 0) if tokens[at].kind == "punct" else 0
        at += 1
        if depth == 0:
            break
    return at


def split_commas(tokens):
    """The parts between commas, as slices."""
    parts, depth, start = [], 0, 0
    for at, token in enumerate(tokens):
        if token.kind == "punct":
            depth += {"(": 1, "[": 1, "{": 1, "<": 1, ")": -1, "]": -1, "}": -1, ">": -1}.get(token.text, 0)
            if token.text == "," and depth == 0:
                parts.append(tokens[start:at])
                start = at + 1
    if start < len(tokens):
        parts.append(tokens[start:])
    return parts


def split_commas_at(tokens, low, high):
    """The parts between commas, as indices."""
    start, depth, parts = low, 0, []
    for at in range(low, high):
        if tokens[at].kind == "punct":
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(tokens[at].text, 0)
            if tokens[at].text == "," and depth == 0:
                parts.append((start, at))
                start = at + 1
    parts.append((start, high))
    return parts


def top_level_for(tokens):
    depth = 0
    for at, token in enumerate(tokens):
        if token.kind == "punct":
            depth += {"<": 1, ">": -1, "(": 1, ")": -1}.get(token.text, 0)
        elif token.text == "for" and depth == 0 and tokens[at + 1].text != "<":
            return at
    return None


KEYWORDS = set("""
    as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut
    pub ref return self Self static struct super trait true type unsafe use where while yield
""".split())
