"""The modules and items of a crate, and what names and paths stand for."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from .tokens import (
    CLOSES, Token, brackets, skip_angles, split_commas, thing_end, tokenize, top_level_for, without_tests,
)
from .words import KNOWN_STD


class Item:
    """A type, function, constant, trait or macro, and the file that defines it."""

    def __init__(self, kind, name, module, line):
        self.kind, self.name, self.module, self.file, self.line = kind, name, module, module.file, line
        self.variants = set()
        self.fields = {}  # name -> tokens of the type
        self.methods = defaultdict(list)  # name -> [Method]: of inherent impls, in all files
        self.deref = None  # (module, tokens of the target)

    def __str__(self):
        return "::".join([*self.module.path[1:], self.name])


class Method(NamedTuple):
    file: str
    line: int
    module: object
    result: tuple  # tokens of the type


class Found(NamedTuple):
    """What a name stands for: it may be a module, an item and a macro at once."""

    module: object = None
    item: object = None
    macro: object = None


NOTHING = Found()


class Module:
    def __init__(self, path, file, parent, inline=False, by_path=False):
        self.path, self.file, self.parent = path, file, parent
        self.inline, self.by_path = inline, by_path  # `mod x { .. }`; `#[path = ".."]`
        self.root = parent.root if parent else self
        self.modules, self.items, self.macros, self.made = {}, {}, {}, {}
        self.uses = defaultdict(list)  # name -> paths
        self.globs = []
        self.tokens = []


def use_tree(tokens, prefix=()):
    """The leaves of a `use`, as (path, name or "*", line)."""
    path, at = list(prefix), 0
    if tokens and tokens[0].text == "::":
        path, at = ["::"], 1
    while at < len(tokens):
        token = tokens[at]
        if token.text == "{":
            inner = tokens[at + 1 : brackets(tokens)[at]]
            for part in split_commas(inner):
                yield from use_tree(part, tuple(path))
            return
        if token.text == "*":
            yield tuple(path), "*", token.line
            return
        if token.text == "$":
            at += 1
            continue
        if token.kind != "ident":
            at += 1
            continue
        line = token.line
        if token.text != "self" or not path:
            path.append(token.text)
        rest = tokens[at + 1 :]
        if not rest or rest[0].text == "as":
            name = rest[1].text if len(rest) > 1 else path[-1]
            yield tuple(path), name, line
            return
        at += 1


DEFINES = {"struct", "enum", "union", "trait", "fn", "const", "static", "type", "mod"}


class Crate:
    """The modules and items of all crates of the table."""

    def __init__(self, root, crates):
        self.root, self.roots, self.files = root, {}, {}
        self.impls = []  # (module, header tokens, body tokens)
        for name, file in crates:
            if (root / file).is_file():
                module = self.roots[name] = Module((name,), file, None)
                self.load(module)
        self.collect_impls()

    def load(self, module):
        path = self.root / module.file
        self.files[module.file] = module
        module.tokens = without_tests(tokenize(path.read_text(encoding="utf-8")))
        self.declare(module, module.tokens)

    # -- items --

    def declare(self, module, tokens):
        ends, at, attributes = brackets(tokens), 0, []
        while at < len(tokens):
            token = tokens[at]
            if token.kind == "attr":
                attributes.append(token)
                at += 1
                continue
            if token.kind != "ident":
                at += 1
                continue
            if token.text == "pub":
                at += 1
                if at < len(tokens) and tokens[at].text == "(":
                    at = ends[at] + 1
                continue
            end = self.item(module, tokens, ends, at, attributes)
            if end is None:  # `unsafe`, `async`, `extern "C"`: the item's own word is yet to come.
                at += 1
                continue
            at, attributes = end, []

    def item(self, module, tokens, ends, at, attributes):
        word, line = tokens[at].text, tokens[at].line
        following = tokens[at + 1] if at + 1 < len(tokens) else Token("punct", "", line)
        name = following.text
        if word == "use":
            end = next(i for i in range(at, len(tokens)) if tokens[i].text == ";")
            for path, leaf, _ in use_tree(tokens[at + 1 : end]):
                if leaf == "*":
                    module.globs.append(path)
                else:
                    module.uses[leaf].append(path)
            return end + 1
        if word == "mod":
            return self.submodule(module, tokens, ends, at, attributes)
        if word == "macro_rules":
            name = tokens[at + 2].text
            item = Item("macro", name, module, line)
            module.macros[name] = item
            if any(a.inner and a.inner[0].text == "macro_export" for a in attributes):
                module.root.macros[name] = item
            body = at + 3
            item.body = tokens[body + 1 : ends[body]]
            return ends[body] + 1
        if following.text in ("!", "::"):  # A macro makes items; which, only their names in it can tell.
            while at < len(tokens) and tokens[at].text not in CLOSES:
                at += 1
            self.impls.append((module, None, (word, tokens[at + 1 : ends[at]])))
            return ends[at] + 1
        if word == "impl":
            start = skip_angles(tokens, at + 1)
            brace = start
            while tokens[brace].text != "{":
                brace += 1
            self.impls.append((module, tokens[start:brace], tokens[brace + 1 : ends[brace]]))
            return ends[brace] + 1
        if word in ("const", "static") and name in ("fn", "unsafe", "async", "extern"):
            return None
        if word in ("unsafe", "async", "extern", "auto", "default") or following.kind != "ident":
            return None
        if word in ("const", "static") and name == "mut":
            name = tokens[at + 2].text
        if word in ("struct", "enum", "union", "trait", "fn", "const", "static", "type"):
            kind = "alias" if word == "type" else word
            item = Item(kind, name, module, line)
            # A type and a function may share a name; the type has the methods.
            if name not in module.items or kind not in ("fn", "const", "static"):
                module.items[name] = item
            end = thing_end(tokens, ends, at)
            if kind == "fn":
                item.result = result_of(tokens[at:end])
            elif kind == "alias":
                equals = next((i for i in range(at, end) if tokens[i].text == "="), end)
                item.target = tokens[equals + 1 : end - 1]
            elif kind in ("struct", "enum", "union"):
                self.shape(item, tokens, ends, at + 2, end)
            elif kind == "trait":
                brace = next((i for i in range(at, end) if tokens[i].text == "{"), end)
                item.body = tokens[brace + 1 : end - 1]
            return end
        return None

    def shape(self, item, tokens, ends, at, end):
        brace = next((i for i in range(at, end) if tokens[i].text in ("{", "(")), None)
        if brace is None or tokens[brace].text == "(":
            return
        for part in split_commas(tokens[brace + 1 : ends[brace]]):
            part = [token for token in part if token.kind != "attr"]
            if part and part[0].text == "pub":
                part = part[brackets(part)[1] + 1 :] if len(part) > 1 and part[1].text == "(" else part[1:]
            if not part:
                continue
            if item.kind == "enum":
                item.variants.add(part[0].text)
            elif len(part) > 2 and part[1].text == ":":
                item.fields[part[0].text] = part[2:]

    def submodule(self, module, tokens, ends, at, attributes):
        name = tokens[at + 1].text
        whole = (*module.path, name)
        if tokens[at + 2].text == "{":
            sub = module.modules.get(name)  # One of several, by `cfg`.
            if sub is None or not sub.inline:
                sub = module.modules[name] = Module(whole, module.file, module, inline=True)
            self.declare(sub, tokens[at + 3 : ends[at + 2]])
            return ends[at + 2] + 1
        path = next((a.inner[2].text[1:-1] for a in attributes if a.inner and a.inner[0].text == "path"), None)
        file = self.file_of(module, name, path, tokens[at].line)
        module.modules[name] = sub = Module(whole, file, module, by_path=path is not None)
        self.load(sub)
        return at + 3

    def file_of(self, module, name, path, line):
        # Inline modules between a file and a `mod` line add folders.
        inline, holder = [], module
        while holder.inline:
            inline.insert(0, holder.path[-1])
            holder = holder.parent
        file = Path(holder.file)
        owns_folder = file.name in ("mod.rs", "lib.rs", "main.rs") or holder.by_path
        folder = file.parent if owns_folder else file.with_suffix("")
        if path:
            base = folder.joinpath(*inline) if inline else file.parent
            candidates = [base / path]
        else:
            base = folder.joinpath(*inline)
            candidates = [base / f"{name}.rs", base / name / "mod.rs"]
        for candidate in candidates:
            real = (self.root / candidate).resolve()
            if real.is_file():
                return real.relative_to(self.root.resolve()).as_posix()
        raise SystemExit(f"floors: {module.file}:{line}: no file for `mod {name}`")

    def collect_impls(self):
        calls = [(module, body) for module, header, body in self.impls if header is None]
        for module, body in calls:
            self.made_by_macro(module, *body)
        for module, body in calls:
            self.methods_of_macro(module, *body)
        for module, header, body in self.impls:
            if header is None:
                continue
            split = top_level_for(header)
            target = self.type_item(module, header[split + 1 :] if split is not None else header)
            if target is None:
                continue
            if split is None:
                self.methods(module, target, body)
            elif any(token.text == "Deref" for token in header[:split]):
                for at, token in enumerate(body):
                    if token.text == "Target" and body[at + 1].text == "=":
                        end = next(i for i in range(at, len(body)) if body[i].text == ";")
                        target.deref = (module, tuple(body[at + 2 : end]))

    def methods(self, module, target, body):
        ends, at = brackets(body), 0
        while at < len(body):
            token = body[at]
            if token.text == "fn" and at + 1 < len(body) and body[at + 1].kind == "ident":
                end = thing_end(body, ends, at)
                method = Method(module.file, body[at + 1].line, module, tuple(result_of(body[at:end])))
                target.methods[body[at + 1].text].append(method)
                at = end
            elif token.text == "!" and at + 1 < len(body) and body[at + 1].text in CLOSES:
                self.methods(module, target, body[at + 2 : ends[at + 1]])
                at = ends[at + 1] + 1
            elif token.text in CLOSES and token.kind == "punct":
                at = ends[at] + 1
            else:
                at += 1

    def made_by_macro(self, module, name, arguments):
        """Names that a macro's call defines: as far as they stand there, or in the macro itself."""
        macro = self.lookup(module, name).macro
        for at, token in enumerate(arguments):
            defines = at > 0 and arguments[at - 1].text in DEFINES
            is_path = at + 1 < len(arguments) and arguments[at + 1].text == "::"
            if token.kind == "ident" and (defines or macro and not is_path and token.text not in KNOWN_STD):
                module.made.setdefault(token.text, Item("made", token.text, module, token.line))
        body = macro.body if macro else []
        for before, token in zip(body, body[1:]):
            if before.text in DEFINES and token.kind == "ident":
                module.made.setdefault(token.text, Item("made", token.text, module, before.line))

    def methods_of_macro(self, module, name, arguments):
        """A macro that writes `impl Device`, told which functions: those are methods of `Device`."""
        macro = self.lookup(module, name).macro
        names = [i for i, token in enumerate(arguments[:-1]) if token.text == "fn" and arguments[i + 1].kind == "ident"]
        if not macro or not names:
            return
        body = macro.body
        for at, token in enumerate(body):
            if token.text != "impl" or token.kind != "ident":
                continue
            start = skip_angles(body, at + 1)
            end = next((i for i in range(start, len(body)) if body[i].text == "{"), start)
            if top_level_for(body[start:end]) is None:
                target = self.type_item(module, body[start:end]) or self.type_item(macro.module, body[start:end])
                for i in names if target else ():
                    method = Method(module.file, arguments[i].line, module, tuple(result_of(arguments[i:])))
                    target.methods[arguments[i + 1].text].append(method)

    # -- names --

    def type_item(self, module, tokens):
        path = []
        for token in tokens:
            if token.kind == "ident" and token.text not in ("mut", "dyn", "where"):
                path.append(token.text)
            elif token.text in ("<", "("):
                break
            elif path and token.text != "::":
                break
        item, _ = self.resolve(module, path) if path else (None, ())
        return item if isinstance(item, Item) and item.kind in ("struct", "enum", "union", "trait", "made") else None

    def lookup(self, module, name, seen=frozenset()):
        """What a name stands for in a module."""
        key = (module, name)
        inner, item, macro = module.modules.get(name), module.items.get(name), module.macros.get(name)
        if key in seen:  # `pub use name::name`, for one.
            return Found(inner, item, macro)
        seen = seen | {key}
        for path in module.uses.get(name, ()):
            found = self.find(module, path, seen)
            inner, item, macro = inner or found.module, item or found.item, macro or found.macro
        if not (inner or item or macro or name in module.uses):
            for path in module.globs:
                found = self.find(module, path, seen)
                if found.module:
                    found = self.lookup(found.module, name, seen)
                elif found.item and name in found.item.variants:
                    found = Found(item=found.item)
                else:
                    continue
                inner, item, macro = inner or found.module, item or found.item, macro or found.macro
        if not (inner or item or name in module.uses):
            item = module.made.get(name)
        if not macro:  # Macros also come from above, in the order of the text.
            holder = module.parent
            while holder and not macro:
                macro, holder = holder.macros.get(name), holder.parent
        return Found(inner, item, macro)

    def find(self, module, path, seen=frozenset()):
        """What a path stands for; of a path into an item, the item."""
        at, here = 0, module
        if path and path[0] == "::":
            path = path[1:]
            here = self.roots.get(path[0]) if path else None
            if here is None:
                return NOTHING
            at = 1
        elif path and path[0] in ("crate", "self", "super"):
            while at < len(path) and path[at] in ("crate", "self", "super"):
                here = here.root if path[at] == "crate" else here.parent if path[at] == "super" else here
                if here is None:
                    return NOTHING
                at += 1
        found = Found(module=here)
        for index in range(at, len(path)):
            found = self.lookup(here, path[index], seen)
            if index == at == 0 and found == NOTHING and path[0] in self.roots:
                found = Found(module=self.roots[path[0]])
            if index + 1 == len(path):
                return found
            if found.module:
                inner = self.lookup(found.module, path[index + 1], seen)
                if inner == NOTHING and found.item:  # A type and a module of one name.
                    return Found(item=found.item)
                here = found.module
            else:
                return Found(item=found.item)
        return found

    def leads_somewhere(self, module, path):
        """Whether a path leads to a module, to an item or into it, or to what another crate has."""
        for length in range(1, len(path) + 1):
            if path[length - 1] in ("crate", "self", "super"):
                continue
            holder = self.find(module, path[: length - 1]).module if length > 1 else module
            if holder is None:
                return True  # Into an item.
            if self.lookup(holder, path[length - 1]) == NOTHING:
                return self.is_foreign(holder, path[length - 1])
        return True

    def is_foreign(self, module, name):
        """Whether a name that is nothing here may come from another crate."""
        globs = [self.find(module, glob).module for glob in module.globs]
        return name in module.uses or any(inner is None or self.is_foreign(inner, name) for inner in globs)

    def resolve(self, module, path):
        """The item that a path leads to, and what follows in the path: `Device::index` leads to `Device`."""
        for length in range(len(path), 0, -1):
            found = self.find(module, path[:length])
            if found.item and (length == len(path) or not found.module):
                known = length
                while known > 1 and self.find(module, path[: known - 1]).item is found.item:
                    known -= 1
                return found.item, tuple(path[known:])
            if found.module:
                return found.module, tuple(path[length:])
        return None, ()


def result_of(tokens):
    """The tokens of a function's result."""
    ends, at = brackets(tokens), 2
    at = skip_angles(tokens, at)
    if at >= len(tokens) or tokens[at].text != "(":
        return []
    at = ends[at] + 1
    if at >= len(tokens) or tokens[at].text != "->":
        return []
    end = at + 1
    while end < len(tokens) and tokens[end].text not in ("{", ";", "where"):
        end = ends[end] + 1 if tokens[end].text in ("(", "[") else end + 1
    return tokens[at + 1 : end]
