"""What the code of one file uses: other files' items, by path, and their methods, by call."""

from collections import defaultdict
from typing import NamedTuple

from .items import Item, use_tree
from .tokens import CLOSES, KEYWORDS, brackets, skip_angles, split_commas, split_commas_at, top_level_for
from .words import KNOWN_STD, LIST, POINTERS, STD_METHODS, TOKENS


class Type(NamedTuple):
    head: object  # an Item, or the name of a type of another crate
    inner: tuple = ()


SAME = {"clone", "to_owned", "as_ref", "as_mut", "by_ref", "deref", "deref_mut", "borrow", "borrow_mut", "iter"}
OPENS = {"unwrap", "expect", "unwrap_or", "unwrap_or_else", "unwrap_or_default", "unwrap_unchecked"}
INTO_CELLS = {"borrow", "borrow_mut", "lock", "read", "write", "get_mut", "get_or_init", "into_inner"}


def peel(kind):
    while kind and kind.head in POINTERS:
        kind = kind.inner[0] if kind.inner else None
    return kind


class Scope:
    def __init__(self, end, self_type=None, module=None):
        self.end, self.self_type, self.module = end, self_type, module
        self.variables, self.uses, self.globs = {}, defaultdict(list), []


class Walk:
    """Goes through the tokens of one file and finds what they use."""

    def __init__(self, crate, module, arrow):
        self.crate, self.module, self.arrow = crate, module, arrow
        self.tokens, self.scopes = module.tokens, [Scope(len(module.tokens), module=module)]
        self.ends = brackets(self.tokens)
        self.plans = {}  # index of a `{` -> scope
        self.bindings = []  # (index from which it holds, name, type)
        self.seen_calls = set()
        self.used = set()  # single names, and first names of paths
        self.lost = []  # (line, path): paths within the crate that lead nowhere

    # -- scopes --

    def here(self):
        return next(scope.module for scope in reversed(self.scopes) if scope.module)

    def self_type(self):
        return next((scope.self_type for scope in reversed(self.scopes) if scope.self_type), None)

    def variable(self, name):
        for scope in reversed(self.scopes):
            if name in scope.variables:
                return scope.variables[name]
        return None

    def path(self, path):
        """A path, with the `use`s of the blocks around it."""
        for scope in reversed(self.scopes):
            for whole in scope.uses.get(path[0], ()):
                return self.crate.resolve(self.here(), (*whole, *path[1:]))
            for glob in scope.globs:
                item, rest = self.crate.resolve(self.here(), (*glob, *path))
                if isinstance(item, Item):
                    return item, rest
        return self.crate.resolve(self.here(), path)

    # -- types --

    def type_of(self, tokens, module=None, self_type=None):
        """The type that tokens write."""
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if token.text in ("&", "&&", "mut", "dyn", "impl", "(") and at + 1 < len(tokens):
                at += 1  # Of a tuple, nothing can be told.
                if token.text == "(":
                    return None
            elif token.kind == "other":
                at += 1
            else:
                break
        if at >= len(tokens):
            return None
        if tokens[at].text == "[":
            end = brackets(tokens)[at]
            inner = tokens[at + 1 : end]
            cut = next((i for i, token in enumerate(inner) if token.text == ";"), len(inner))
            return Type(LIST, (self.type_of(inner[:cut], module, self_type),))
        path = []
        while at < len(tokens) and (tokens[at].kind == "ident" or tokens[at].text in ("::", "$")):
            if tokens[at].kind == "ident":
                path.append(tokens[at].text)
            at += 1
        if not path:
            return None
        if path == ["Self"]:
            return self_type or self.self_type()
        inner = ()
        if at < len(tokens) and tokens[at].text == "<":
            arguments = split_commas(tokens[at + 1 : skip_angles(tokens, at) - 1])
            arguments = [a for a in arguments if a and not (len(a) == 1 and a[0].kind == "other")]
            inner = tuple(self.type_of(a, module, self_type) for a in arguments)
        item, rest = self.crate.resolve(module, path) if module else self.path(path)
        if isinstance(item, Item) and not rest and item.kind != "alias":
            return Type(item, inner)
        if isinstance(item, Item) and not rest and path[-1] != "Result":
            return self.type_of(item.target, item.module)
        return Type(path[-1], inner)

    def method_of(self, kind, name):
        """The inherent method that a call means, and its owner."""
        seen = 0
        while (kind := peel(kind)) and isinstance(kind.head, Item) and seen < 4:
            methods = kind.head.methods.get(name)
            if methods:
                return kind, methods
            if not kind.head.deref:
                return None
            module, target = kind.head.deref
            kind, seen = self.type_of(target, module), seen + 1
        return None

    def result(self, owner, method):
        return self.type_of(method.result, method.module, owner)

    def field(self, kind, name):
        seen = 0
        while (kind := peel(kind)) and isinstance(kind.head, Item) and seen < 4:
            if name in kind.head.fields:
                return self.type_of(kind.head.fields[name], kind.head.module, kind)
            if not kind.head.deref:
                return None
            module, target = kind.head.deref
            kind, seen = self.type_of(target, module), seen + 1
        return None

    @staticmethod
    def std_result(kind, name):
        """What methods of std's types give, as far as chains of calls need it."""
        if kind is None:
            return None
        bare = peel(kind)
        head, first = (bare.head, bare.inner[0] if bare.inner else None) if bare else (None, None)
        if head in ("RefCell", "Mutex", "RwLock", "Cell", "UnsafeCell", "OnceCell", "OnceLock", "Lazy"):
            if name in INTO_CELLS or (head == "Cell" and name in ("get", "take", "replace")):
                return first
            if name in ("get", "take"):
                return Type("Option", (first,))
            if name == "get_or_try_init":
                return Type("Result", (first,))
        if head in ("Option", "Result"):
            if name in OPENS:
                return first
            if name in ("ok", "as_deref", "as_deref_mut", "cloned", "copied", "take", "map_err", "or_else", "ok_or",
                        "ok_or_else", "filter", "inspect"):
                return Type("Result" if name.startswith("ok_or") else "Option" if name == "ok" else head, (first,))
        if head in (LIST, "Vec", "VecDeque", "SmallVec"):
            if name in ("first", "last", "get", "pop", "last_mut", "first_mut", "get_mut", "pop_front", "front"):
                return Type("Option", (first,))
            if name in ("iter", "iter_mut", "into_iter", "drain", "rev", "skip", "take", "filter", "copied", "cloned"):
                return Type(LIST, (first,))
        return bare if name in SAME else None

    # -- expressions --

    def chain(self, at, stop):
        """The type of the expression that begins here, as far as it is a chain; each call in it is judged once."""
        tokens = self.tokens
        while at < stop and (tokens[at].text in ("&", "&&", "*", "mut") or tokens[at].kind == "attr"):
            at += 1
        if at >= stop:
            return None
        token, kind, name = tokens[at], None, tokens[at].text
        if token.kind == "ident":
            path, at = self.read_path(at)
            following = tokens[at].text if at < stop else ""
            if following == "!":
                at += 1
                at = self.ends.get(at, at) + 1
                kind = None
            elif path == ["self"]:
                kind = self.self_type()
            elif len(path) == 1 and following not in ("(", "{"):
                kind = self.variable(name)
            elif len(path) == 1 and name in ("Some", "Ok") and following == "(":
                kind = Type("Option" if name == "Some" else "Result", (self.chain(at + 1, self.ends[at]),))
                at = self.ends[at] + 1
            elif path and path[0] not in ("if", "match", "loop", "while", "for", "move", "unsafe", "return", "async"):
                item, rest = self.self_path(path) if path[0] == "Self" else self.path(path)
                if following == "(":
                    if isinstance(item, Item):
                        if not rest and item.kind == "fn":
                            kind = self.type_of(item.result, item.module)
                        elif len(rest) == 1 and (found := self.method_of(Type(item), rest[0])):
                            kind = self.result(found[0], found[1][0])
                        elif not rest and item.kind == "struct":
                            kind = Type(item)
                    at = self.ends[at] + 1
                elif following == "{" and isinstance(item, Item) and item.kind == "struct":
                    kind, at = Type(item), self.ends[at] + 1
            else:
                return None
            name = path[-1] if path else name
        elif token.text == "(":
            kind = self.chain(at + 1, self.ends[at]) if tokens[at + 1].text != ")" else None
            at = self.ends[at] + 1
        else:
            return None
        return self.links(at, stop, kind, name)

    def self_path(self, path):
        kind = self.self_type()
        return (kind.head, tuple(path[1:])) if kind and isinstance(kind.head, Item) else (None, ())

    def read_path(self, at):
        tokens, path = self.tokens, [self.tokens[at].text]
        at += 1
        while at + 1 < len(tokens) and tokens[at].text == "::":
            if tokens[at + 1].kind == "ident":
                path.append(tokens[at + 1].text)
                at += 2
            elif tokens[at + 1].text == "<":
                at = skip_angles(tokens, at + 1)
            else:
                break
        return path, at

    def links(self, at, stop, kind, name):
        """Fields, calls, `?` and indices after a value of this type."""
        tokens = self.tokens
        while at < stop:
            text = tokens[at].text
            if text == "?":
                kind = kind.inner[0] if kind and kind.head in ("Option", "Result") and kind.inner else None
                at += 1
            elif text == "[":
                bare = peel(kind)
                kind = bare.inner[0] if bare and bare.head in (LIST, "Vec", "SmallVec") and bare.inner else None
                at, name = self.ends[at] + 1, ""
            elif text == "(":
                kind, at = None, self.ends[at] + 1
            elif text == "." and at + 1 < stop:
                name_at, after = at + 1, at + 2
                member = tokens[name_at].text
                if after + 1 < stop and tokens[after].text == "::" and tokens[after + 1].text == "<":
                    after = skip_angles(tokens, after + 1)
                if tokens[name_at].kind == "ident" and after < len(tokens) and tokens[after].text == "(":
                    if name_at not in self.seen_calls:
                        self.seen_calls.add(name_at)
                        self.call(kind, name, name_at)
                    found = self.method_of(kind, member)
                    if not found and kind is None and name in TOKENS:
                        found = self.method_of(self.token_type(name), member)
                    kind = self.result(found[0], found[1][0]) if found else self.std_result(kind, member)
                    at, name = self.ends[after] + 1, ""
                else:
                    kind, name, at = self.field(kind, member), member, name_at + 1
            else:
                break
        return kind

    def token_type(self, name):
        root = self.module.root
        item = self.crate.lookup(root, TOKENS[name]).item
        return Type(item) if item else None

    def call(self, kind, receiver, at):
        """A call of a method: who has it?"""
        name, line = self.tokens[at].text, self.tokens[at].line
        if peel(kind) is not None and (isinstance(peel(kind).head, Item) or peel(kind).head in KNOWN_STD):
            found = self.method_of(kind, name)
        elif receiver in TOKENS:
            found = self.method_of(self.token_type(receiver), name)
        else:
            found = None
            if name not in STD_METHODS and len(owners := self.crate.owners.get(name, ())) == 1:
                owner = next(iter(owners))
                if owner in self.crate.spread:
                    found = (Type(owner), owner.methods[name])
        if found:
            owner, methods = found
            text = f"{owner.head.name}::{name}()"
            self.arrow(self.module.file, line, text, methods[0].file, "call", owner=owner.head)

    # -- the walk --

    def run(self):
        tokens, at = self.tokens, 0
        while at < len(tokens):
            while len(self.scopes) > 1 and at >= self.scopes[-1].end:
                self.scopes.pop()
            for binding in [b for b in self.bindings if b[0] <= at]:
                self.bindings.remove(binding)
                self.scopes[-1].variables[binding[1]] = binding[2]
            token = tokens[at]
            if token.kind == "ident":
                at = self.word(at)
            elif token.kind == "punct":
                if token.text == "{":
                    scope = self.plans.pop(at, None) or Scope(self.ends[at])
                    self.scopes.append(scope)
                elif token.text in ("|", "||"):
                    self.closure(at)
                elif token.text == "(" and (at == 0 or tokens[at - 1].kind != "ident"):
                    self.chain(at, len(tokens))
                elif token.text == ".":
                    self.loose_call(at)
                at += 1
            else:
                at += 1

    def word(self, at):
        tokens, text = self.tokens, self.tokens[at].text
        before = tokens[at - 1].text if at else ""
        after = tokens[at + 1].text if at + 1 < len(tokens) else ""
        if before == "." or (before == "::" and (tokens[at - 2].kind == "ident" or tokens[at - 2].text == ">")):
            return at + 1
        if before == "::":  # From another crate, or from one of the table.
            path, end = self.read_path(at)
            if path[0] in self.crate.roots:
                self.note_path(at, ["::", *path])
            return end
        if text == "use" and after != "<":
            return self.use(at)
        if text == "mod" and after and tokens[at + 1].kind == "ident":
            if tokens[at + 2].text == "{" and tokens[at + 1].text in self.here().modules:
                self.plans[at + 2] = Scope(self.ends[at + 2], module=self.here().modules[tokens[at + 1].text])
            return at + 2
        if text == "impl" and before in ("", "}", ";", "{", "unsafe", "default", "]", "#", "#!") or text == "trait":
            self.impl(at)
        elif text == "fn" and at + 1 < len(tokens) and tokens[at + 1].kind == "ident":
            self.function(at)
            return at + 2
        elif text == "macro_rules" and after == "!":
            return at + 3
        elif text == "let":
            self.let(at)
        elif text == "for" and after != "<":
            self.loop(at)
        elif text in ("struct", "enum", "union", "type", "static", "const") and tokens[at + 1].kind == "ident":
            return at + (1 if text in ("static", "const") else 2)
        if text in KEYWORDS and not (text in ("crate", "self", "super", "Self") and after in ("::", ".", "?")):
            return at + 1
        self.chain(at, len(tokens))
        path, end = self.read_path(at)
        self.note_path(at, path)
        # Generics within the path are looked at in their turn.
        step = at + 1
        while step + 1 < end and tokens[step].text == "::" and tokens[step + 1].kind == "ident":
            step += 2
        return step

    def note_path(self, at, path):
        tokens, line = self.tokens, self.tokens[at].line
        end = self.read_path(at)[1]
        following = tokens[end].text if end < len(tokens) else ""
        is_macro = following == "!" and not (end + 1 < len(tokens) and tokens[end + 1].text == "=")
        if is_macro:
            macro = self.macro(path)
            if macro:
                self.arrow(self.module.file, line, f"{macro}!", macro.file, "path")
            return
        if len(path) == 1:
            self.used.add(path[0])
            if path[0][:1].isupper() or following == "(":
                self.through_glob(at, path[0])
            return
        if path[0] == "Self":
            item, rest = self.self_path(path)
        else:
            item, rest = self.path(path)
        if path[0] != "::" and path[0] not in ("crate", "self", "super", "Self"):
            self.used.add(path[0])
        if not isinstance(item, Item):
            self.check_path(line, path)
            return
        if path[0] != "Self":
            self.arrow(self.module.file, line, str(item), item.file, "path")
        if rest and (found := self.method_of(Type(item), rest[0])):
            text = f"{item.name}::{rest[0]}()"
            self.arrow(self.module.file, line, text, found[1][0].file, "call", owner=item)

    def check_path(self, line, path):
        """Notes a path that begins in the crate and leads nowhere: not to an item, a module, or another crate."""
        if path[0] not in ("crate", "self", "super") or (len(path) > 1 and path[-1] in ("self", "super")):
            return
        if not self.crate.leads_somewhere(self.here(), path):
            self.lost.append((line, "::".join(path)))

    def macro(self, path):
        for scope in reversed(self.scopes):
            for whole in scope.uses.get(path[0], ()):
                return self.crate.find(self.here(), (*whole, *path[1:])).macro
        return self.crate.find(self.here(), path).macro

    def through_glob(self, at, name):
        """A single name that only a `use ..::*` can have brought."""
        module = self.here()
        if self.variable(name) is not None or name in module.items or name in module.uses or name in module.modules:
            return
        globs = [*module.globs, *(glob for scope in self.scopes for glob in scope.globs)]
        for glob in globs:
            found = self.crate.find(module, glob)
            item = self.crate.lookup(found.module, name).item if found.module else None
            item = item or (found.item if found.item and name in found.item.variants else None)
            if item and item.kind != "made" or item and item.module is found.module:
                self.arrow(self.module.file, self.tokens[at].line, str(item), item.file, "path")
                return

    def use(self, at):
        tokens = self.tokens
        end = next(i for i in range(at, len(tokens)) if tokens[i].text == ";")
        public = at > 0 and (tokens[at - 1].text == "pub" or tokens[at - 1].text == ")")
        local = len(self.scopes) > 1 and self.scopes[-1].module is None
        for path, name, line in use_tree(tokens[at + 1 : end]):
            if local and name == "*":
                self.scopes[-1].globs.append(path)
            elif local:
                self.scopes[-1].uses[name].append(path)
            self.check_path(line, path)
            if name == "*":
                item = self.crate.find(self.here(), path).item
            else:
                found = self.crate.find(self.here(), path)
                item = found.item or (None if found.module else found.macro)
            if item:
                text = f"{item}!" if item.kind == "macro" else str(item)
                self.arrow(self.module.file, line, text, item.file, "re-export" if public else "use", name)
        return end + 1

    def impl(self, at):
        tokens = self.tokens
        start = skip_angles(tokens, at + 1)
        brace = start
        while brace < len(tokens) and tokens[brace].text not in ("{", ";"):
            brace = self.ends[brace] + 1 if tokens[brace].text in ("(", "[") else brace + 1
        if brace >= len(tokens) or tokens[brace].text == ";":
            return
        header = tokens[start:brace]
        split = top_level_for(header)
        target = self.crate.type_item(self.here(), header[split + 1 :] if split is not None else header)
        self.plans[brace] = Scope(self.ends[brace], Type(target) if target else Type("?"))

    def function(self, at):
        tokens = self.tokens
        start = skip_angles(tokens, at + 2)
        if start >= len(tokens) or tokens[start].text != "(":
            return
        scope = Scope(0)
        self.parameters(tokens[start + 1 : self.ends[start]], scope)
        brace = self.ends[start]
        while brace < len(tokens) and tokens[brace].text not in ("{", ";"):
            brace = self.ends[brace] + 1 if tokens[brace].text in ("(", "[") else brace + 1
        if brace < len(tokens) and tokens[brace].text == "{":
            scope.end = self.ends[brace]
            self.plans[brace] = scope

    def parameters(self, tokens, scope):
        for part in split_commas(tokens):
            part = [token for token in part if token.kind != "attr"]
            cut = next((i for i, token in enumerate(part) if token.text == ":"), len(part))
            names = [token.text for token in part[:cut] if token.kind == "ident" and token.text not in ("mut", "ref")]
            if len(names) == 1 and names[0] != "self":
                scope.variables[names[0]] = self.type_of(part[cut + 1 :])

    def closure(self, at):
        tokens = self.tokens
        before = tokens[at - 1]
        if before.kind == "other" or before.text in (")", "]", "}") or (
            before.kind == "ident" and before.text not in ("move", "return", "else", "in", "match", "static", "async")
        ):
            return  # An `or`.
        end = at
        if tokens[at].text == "|":
            end = at + 1
            while end < len(tokens) and tokens[end].text != "|":
                end = self.ends[end] + 1 if tokens[end].text in CLOSES else end + 1
        body = end + 1
        while body < len(tokens) and tokens[body].text not in ",;)]}":
            body = self.ends[body] + 1 if tokens[body].text in CLOSES else body + 1
        scope = Scope(body)
        self.parameters(tokens[at + 1 : end], scope)
        self.scopes.append(scope)

    def let(self, at):
        tokens, end = self.tokens, at + 1
        while end < len(tokens) and tokens[end].text not in ("=", ":", ";", "in"):
            end = self.ends[end] + 1 if tokens[end].text in CLOSES else end + 1
        pattern = tokens[at + 1 : end]
        kind = None
        if end < len(tokens) and tokens[end].text == ":":
            start = end + 1
            while end < len(tokens) and tokens[end].text not in ("=", ";"):
                end = self.ends[end] + 1 if tokens[end].text in CLOSES else end + 1
            kind = self.type_of(tokens[start:end])
        conditional = at > 0 and tokens[at - 1].text in ("if", "while", "&&", "(")
        stop = end
        while stop < len(tokens) and tokens[stop].text not in (";", "}", ")") and not (
            conditional and tokens[stop].text in ("{", "&&")
        ):
            stop = self.ends[stop] + 1 if tokens[stop].text in CLOSES else stop + 1
        start = end + 1
        if kind is None and start < stop and tokens[start].text == "(" and pattern and pattern[0].text == "(":
            values = split_commas_at(tokens, start + 1, self.ends[start])
            for part, (low, high) in zip(split_commas(pattern[1:-1]), values):
                self.bind(part, self.chain(low, high), stop)
            return
        if kind is None and start < stop:
            kind = self.chain(start, stop)
        self.bind(pattern, kind, stop)

    def bind(self, pattern, kind, when):
        pattern = [token for token in pattern if token.text not in ("&", "ref", "mut")]
        if len(pattern) == 1 and pattern[0].kind == "ident":
            self.bindings.append((when, pattern[0].text, kind))
        elif len(pattern) > 3 and pattern[0].text in ("Some", "Ok") and pattern[1].text == "(":
            inner = kind.inner[0] if kind and kind.head in ("Option", "Result") and kind.inner else None
            self.bind(pattern[2:-1], inner, when)
        elif pattern and pattern[-1].text == "}" and peel(kind) and isinstance(peel(kind).head, Item):
            brace = next(i for i, token in enumerate(pattern) if token.text == "{")
            for part in split_commas(pattern[brace + 1 : -1]):
                if len(part) == 1 and part[0].kind == "ident":
                    self.bindings.append((when, part[0].text, self.field(kind, part[0].text)))

    def loop(self, at):
        tokens, end = self.tokens, at + 1
        while end < len(tokens) and tokens[end].text not in ("in", "{", ";"):
            end = self.ends[end] + 1 if tokens[end].text in "([" else end + 1
        if end >= len(tokens) or tokens[end].text != "in":
            return
        stop = end + 1
        while stop < len(tokens) and tokens[stop].text != "{":
            stop = self.ends[stop] + 1 if tokens[stop].text in "([" else stop + 1
        kind = peel(self.chain(end + 1, stop))
        element = kind.inner[0] if kind and kind.head in (LIST, "Vec", "SmallVec", "VecDeque") and kind.inner else None
        self.bind(tokens[at + 1 : end], element, stop)

    def loose_call(self, at):
        """A call on a value that no chain has begun: of a literal, a block, or a macro."""
        tokens, name = self.tokens, at + 1
        if name >= len(tokens) or tokens[name].kind != "ident" or name in self.seen_calls:
            return
        after = name + 1
        if after + 1 < len(tokens) and tokens[after].text == "::":
            after = skip_angles(tokens, after + 1)
        if after < len(tokens) and tokens[after].text == "(":
            self.seen_calls.add(name)
            before = tokens[at - 1]
            self.call(None, before.text if before.kind == "ident" else "", name)
