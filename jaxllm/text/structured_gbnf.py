"""GBNF, the EBNF of llama.cpp and XGrammar, written as llguidance's variant of Lark.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md describes the notation. A GBNF
grammar speaks of characters, a Lark grammar of terminals, each of which takes the longest text that
it can. So as not to change the language, terminals are made as large as possible: a rule that
refers to no recursive rule is a terminal as a whole, and in other rules neighbouring parts without
recursion are one terminal. The longest match is taken only where such a part meets a recursive
rule.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_GROUP_NESTING = 24
_MAX_CODE_POINT = 0x10FFFF
_TOKEN = re.compile(
    r"(?P<skip>\s+|\#[^\n]*)"
    r"|(?P<define>::=)"
    r"|(?P<name>[A-Za-z0-9_-]+)"
    r'|(?P<literal>"(?:\\.|[^"\\\n])*")'
    r"|(?P<set>\[(?:\\.|[^\]\\\n])*\])"
    r"|(?P<times>\{\s*[0-9]{1,9}\s*(?:,\s*[0-9]{0,9}\s*)?\}|[*+?])"
    r"|(?P<mark>[()|.])"
)
_CHARACTER = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2})|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<U>[0-9A-Fa-f]{8})"
    r"|\\(?P<escaped>.)|(?P<plain>[^\\])",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in '"\\[]-^/'}
_TIMES = {"*": "{0,}", "+": "{1,}", "?": "{0,1}"}


class GbnfError(ValueError):
    """A GBNF grammar that cannot be read; names the line."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A terminal's source in Lark: a string or an expression between slashes."""

    source: str


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: "_Node"
    times: str


_Node = _Text | _Reference | _Sequence | _Choice | _Repeat


def gbnf_to_lark(grammar: str) -> str:
    """Translate a GBNF grammar, whose start is the rule `root`, to Lark with the rule `start`.

    Raises `GbnfError`, which names the line or the rule.
    """
    rules = _Parser(grammar).rules()
    if "root" not in rules:
        raise GbnfError("the grammar has no rule named root")
    for name, node in rules.items():
        for other in _references(node):
            if other not in rules:
                raise GbnfError(f"rule {name} refers to {other}, which is not defined")
    return _Writer(rules).lark()


class _Parser:
    """Recursive descent over the tokens; a rule ends where `name ::=` begins the next one."""

    def __init__(self, grammar: str):
        self._grammar = grammar
        self._tokens = list(self._tokenize())
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._kind() != "end":
            name = self._take("name")
            if name in rules:
                raise self._error(f"rule {name} is defined twice")
            self._take("define")
            rules[name] = self._choice()
        return rules

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._text() == "|":
            self._next += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (part := self._part()) is not None:
            if self._kind() == "times":
                part = _Repeat(part, _braces(self._take("times")))
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _part(self) -> _Node | None:
        kind, text = self._kind(), self._text()
        if kind == "name" and self._tokens[self._next + 1][0] != "define":
            return _Reference(self._take("name"))
        if kind == "literal":
            characters = "".join(map(chr, self._characters(self._take("literal")[1:-1])))
            return _Text(json.dumps(characters, ensure_ascii=False))
        if kind == "set":
            return _Text(f"/{self._set(self._take('set')[1:-1])}/")
        if text == ".":
            self._next += 1
            return _Text("/(?s:.)/")
        if text == "(":
            return self._group()
        return None

    def _group(self) -> _Node:
        self._next += 1
        self._depth += 1
        if self._depth > MAX_GROUP_NESTING:
            raise self._error(f"groups are nested more than {MAX_GROUP_NESTING} deep")
        node = self._choice()
        if self._text() != ")":
            raise self._error("expected )")
        self._next += 1
        self._depth -= 1
        return node

    def _set(self, body: str) -> str:
        negated = body.startswith("^")
        codes = list(self._characters(body[negated:]))
        dashes = [match[0] == "-" for match in _CHARACTER.finditer(body[negated:])]
        if not codes:
            raise self._error("an empty set of characters")
        ranges, i = [], 0
        while i < len(codes):
            if i + 2 < len(codes) and dashes[i + 1]:
                if codes[i] > codes[i + 2]:
                    raise self._error("a range of characters that ends before it begins")
                ranges.append(f"\\x{{{codes[i]:X}}}-\\x{{{codes[i + 2]:X}}}")
                i += 3
            else:
                ranges.append(f"\\x{{{codes[i]:X}}}")
                i += 1
        return f"[{'^' if negated else ''}{''.join(ranges)}]"

    def _characters(self, body: str) -> Iterator[int]:
        for match in _CHARACTER.finditer(body):
            if (digits := match["x"] or match["u"] or match["U"]) is not None:
                code = int(digits, 16)
                if code > _MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF:
                    raise self._error(f"{match[0]} is not a character")
                yield code
            elif match["escaped"] is not None:
                if match["escaped"] not in _ESCAPED:
                    raise self._error(f"unknown escape {match[0]}")
                yield ord(_ESCAPED[match["escaped"]])
            else:
                yield ord(match["plain"])

    def _tokenize(self) -> Iterator[tuple[str, str, int]]:
        position = 0
        while position < len(self._grammar):
            match = _TOKEN.match(self._grammar, position)
            if match is None:
                shown = self._grammar[position : position + 20].split("\n")[0]
                raise GbnfError(f"line {self._line(position)}: cannot read {shown!r}")
            if match.lastgroup != "skip":
                yield str(match.lastgroup), match[0], position
            position = match.end()
        yield "end", "", position

    def _kind(self) -> str:
        return self._tokens[self._next][0]

    def _text(self) -> str:
        return self._tokens[self._next][1]

    def _take(self, kind: str) -> str:
        if self._kind() != kind:
            wanted = {"name": "the name of a rule", "define": "::="}[kind]
            raise self._error(f"expected {wanted}")
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _line(self, position: int) -> int:
        return self._grammar.count("\n", 0, position) + 1

    def _error(self, what: str) -> GbnfError:
        kind, text, position = self._tokens[self._next]
        at = "the end" if kind == "end" else repr(text[:20])
        return GbnfError(f"line {self._line(position)}, at {at}: {what}")


@dataclass(slots=True)
class _Writer:
    """Writes rules as Lark: lower-case names for rules, upper-case ones for terminals."""

    rules: dict[str, _Node]
    _regular: set[str] = field(default_factory=set)
    _names: dict[str, str] = field(default_factory=dict)
    _terminals: dict[str, str] = field(default_factory=dict)

    def lark(self) -> str:
        self._regular = _without_recursion(self.rules)
        for i, name in enumerate(self.rules):
            readable = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
            self._names[name] = (
                f"R{i}_{readable}".upper() if name in self._regular else (f"r{i}_{readable}")
            )
        lines = [f"start: {self._names['root']}"]
        for name, node in self.rules.items():
            body = self._terminal(node) if name in self._regular else self._rule(node)
            lines.append(f"{self._names[name]}: {body}")
        lines += [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join(lines) + "\n"

    def _terminal(self, node: _Node) -> str:
        """A part without recursion, as the body of a terminal."""
        if isinstance(node, _Text):
            return node.source
        if isinstance(node, _Reference):
            return self._names[node.name]
        if isinstance(node, _Repeat):
            return f"({self._terminal(node.part)}){node.times}"
        if isinstance(node, _Choice):
            return "(" + " | ".join(map(self._terminal, node.options)) + ")"
        return " ".join(map(self._terminal, node.parts)) or '""'

    def _rule(self, node: _Node) -> str:
        """Any part, as the body of a rule."""
        if self._is_regular(node):
            return self._named_terminal(node)
        if isinstance(node, _Reference):
            return self._names[node.name]
        if isinstance(node, _Repeat):
            return f"({self._rule(node.part)}){node.times}"
        if isinstance(node, _Choice):
            return "(" + " | ".join(map(self._rule, node.options)) + ")"
        if isinstance(node, _Sequence):
            return " ".join(map(self._rule, self._merged(node.parts)))
        raise TypeError(f"{node!r} holds no reference")

    def _merged(self, parts: tuple[_Node, ...]) -> Iterator[_Node]:
        """The parts, neighbours without recursion joined into one."""
        run: list[_Node] = []
        for part in parts:
            if self._is_regular(part):
                run.append(part)
                continue
            if run:
                yield _Sequence(tuple(run))
            run = []
            yield part
        if run:
            yield _Sequence(tuple(run))

    def _is_regular(self, node: _Node) -> bool:
        return all(name in self._regular for name in _references(node))

    def _named_terminal(self, node: _Node) -> str:
        body = self._terminal(node)
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")


def _braces(times: str) -> str:
    """A repetition as `{m,n}`; without n it has no end."""
    times = re.sub(r"\s", "", _TIMES.get(times, times))
    return times if "," in times else f"{{{times[1:-1]},{times[1:-1]}}}"


def _references(node: _Node) -> Iterator[str]:
    if isinstance(node, _Reference):
        yield node.name
    elif isinstance(node, _Repeat):
        yield from _references(node.part)
    elif isinstance(node, _Sequence):
        for part in node.parts:
            yield from _references(part)
    elif isinstance(node, _Choice):
        for option in node.options:
            yield from _references(option)


def _without_recursion(rules: dict[str, _Node]) -> set[str]:
    """The rules from which no rule that refers to itself can be reached."""
    waiting = {name: set(_references(node)) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in waiting.items():
        for other in others:
            users[other].append(name)
    ready = [name for name, others in waiting.items() if not others]
    done: set[str] = set()
    while ready:
        name = ready.pop()
        done.add(name)
        for user in users[name]:
            waiting[user].discard(name)
            if not waiting[user]:
                ready.append(user)
    return done
