"""Check the prose of the tree: docs, docstrings, comments, error messages, command-line help and test names.

``tools/prose_allowed.txt`` records the allowed number of hits for each kind of text. More hits are an error,
because the numbers may only fall. Fewer hits are also an error until ``python tools/prose.py --record`` has
recorded the new number. ``python tools/prose.py PATH…`` lists the hits in these files or folders.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ALLOWED = ROOT / "tools" / "prose_allowed.txt"
FOLDERS = (
    "flowchan",
    "pipelines",
    "viz",
    "flowchan_torch",
    "tests",
    "tools",
    "benchmarks",
    "examples",
    "docs",
)
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
MOST_WORDS = 25
MOST_WORDS_OF_A_TEST = 10


class Text(NamedTuple):
    """Paragraph of one kind, such as ``docstring``, and its first line."""

    kind: str
    path: Path
    line: int
    text: str


class Hit(NamedTuple):
    """Sentence that breaks a rule."""

    kind: str
    path: Path
    line: int
    rule: str
    remedy: str
    sentence: str

    def __str__(self) -> str:
        where = f"{self.path.relative_to(ROOT)}:{self.line}"
        return f"{where}: {self.kind}: {self.rule}; {self.remedy}: {self.sentence[:120]}"


class Rule(NamedTuple):
    """Rule for sentences.

    A sentence breaks it if ``pattern`` matches, after code has been replaced with ``CODE``.
    """

    pattern: re.Pattern[str]
    rule: str
    remedy: str


def _rule(pattern: str, rule: str, remedy: str, flags: int = re.IGNORECASE) -> Rule:
    return Rule(re.compile(pattern, flags), rule, remedy)


BANNED = (
    "anew|beside|for ever|so many|told|whoever|nobody|somebody|everybody|such an? one|shall|gives? free"
    "|hands? over|in hand|at home|by itself|of its own|goes home|by chance|at first hand"
)
RULES = (
    _rule(rf"\b({BANNED})\b", "banned word", "use a plain term (STYLE, rule 10)"),
    _rule(r"\bmeanwhile\b", "'meanwhile'", "write 'in the meantime', or name the event"),
    _rule(r"^(Of|By|Into|Besides|Beside)\b", "opens with a preposition", "begin with the subject", 0),
    _rule(r"^With (?!CODE|no\b|an?\b|the\b|\d)", "opens with 'With'", "begin with the subject", 0),
    _rule(
        r"\b(is|are|was|were) no (?!longer|more|less|fewer|(larg|small|fast|slow|high|low|old|new|bett)er\b)",
        "'is no …'",
        "write 'is not a …'",
    ),
    _rule(r"\b(of|to|by|for|from|with|than|as|and|or|but|that) who\b", "clause as a noun", "name the actor"),
    _rule(r"^(Who|Whose|Whom) [^?]*$", "clause as a noun", "name the actor", 0),
    _rule(r"^What [^?]*[.;:,]?$", "clause as a noun", "name the thing", 0),
    _rule(r"\b(of|to|by|for|from|with|than|as|but) what\b", "clause as a noun", "name the thing"),
    _rule(r", too\b", "', too'", "write 'also' before the verb"),
    _rule(r"\bas (?:it|they) (?:is|are|was|were) \w+ed, ", "fronted clause", "begin with the subject"),
    _rule(r";.*;", "two semicolons", "make two sentences"),
)
OPENINGS = re.compile(r"(Of|As|Whether|Where|The same|That|What|Who|How|See above)\b")
NAMES = re.compile(
    r"_(who|whose|whoever|what|nobody|somebody|everybody|beside|anew|told|cant|shall|too)(_|$)"
)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a paragraph, with code replaced with ``CODE``."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``.+?``|`[^`]+`|:\w+:`[^`]+`|\{[^{}]*\}|https?://\S+", "CODE", text)
    text = re.sub(r"[*_]{1,2}(\S(?:.*?\S)?)[*_]{1,2}", r"\1", text)
    for sentence in re.split(r"(?<=[.!?])[\"')]?\s+(?=[A-Z\"'(])", " ".join(text.split())):
        if len(sentence.split()) > 1:
            yield sentence.strip()


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items and table cells of Markdown or a docstring, but no code blocks."""
    block: list[str] = []
    first, is_code, indent = 0, False, 0
    for number, raw in enumerate([*text.splitlines(), ""]):
        line = raw.strip()
        fence = line.startswith(("```", "~~~"))
        is_code ^= fence
        starts = re.match(r"([-*+]|\d+\.|#+|>)\s|\|", line)
        is_indented = raw.startswith("    ") and not block and not starts and indent == 0
        if block and (fence or is_code or not line or starts):
            yield first, " ".join(block)
            block = []
        if not line or is_code or fence or line.startswith((">>>", "...", "<!--")) or is_indented:
            continue
        if line.startswith("|"):
            for cell in line.strip("|").split("|"):
                if re.search(r"[a-z]", cell):
                    yield number, cell.strip()
            continue
        if not block:
            first, line = number, re.sub(r"^([-*+]|\d+\.|#+|>)\s+", "", line)
        block.append(line)


def of_page(path: Path) -> Iterator[Text]:
    for number, text in paragraphs(path.read_text()):
        yield Text("docs", path, number + 1, text)


def of_python(path: Path) -> Iterator[Text]:
    source = path.read_text()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstring(node, path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Text("test name", path, node.lineno, node.name)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from (Text("error", path, node.lineno, said) for said in _strings(node.exc.args))
        if isinstance(node, ast.Call):
            helps = [
                keyword.value for keyword in node.keywords if keyword.arg in ("help", "description", "epilog")
            ]
            yield from (Text("help", path, node.lineno, said) for said in _strings(helps))
    yield from _comments(source, path)


def _docstring(node: ast.AST, path: Path) -> Iterator[Text]:
    doc = ast.get_docstring(node)  # type: ignore[arg-type]
    if not doc:
        return
    line = node.body[0].lineno  # type: ignore[attr-defined]
    doc = re.sub(r"(?s)::\n\n(?: {2,}.*\n?|\n)+", ".\n\n", doc)
    doc = re.sub(r"(?m)^(Args|Returns|Raises|Yields|Example|Examples|Attributes):$", "", doc)
    body = [text.strip() for text in doc.splitlines()]
    entries = re.compile(r"^(\*{0,2}\w+(?: \([^)]*\))?): ")
    text = "\n".join("\n" + entries.sub("", one) if entries.match(one) else one for one in body)
    for number, (offset, paragraph) in enumerate(paragraphs(text)):
        yield Text("docstring" if number else "summary", path, line + offset, paragraph)


def _strings(values: Iterable[ast.expr]) -> Iterator[str]:
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value
        elif isinstance(value, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in value.values)
            yield "".join(parts)


def _comments(source: str, path: Path) -> Iterator[Text]:
    lines: dict[int, tuple[int, str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#").strip()
        if token.type == tokenize.COMMENT and not re.match(r"(type:|noqa|pragma|---|!|mypy:|pyright:)", text):
            lines[token.start[0]] = token.start[1], text
    yield from _joined(lines, path)


def of_cpp(path: Path) -> Iterator[Text]:
    lines = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.search(r"(?<!:)//+\s?(.*)", line):
            text = match[1].strip()
            text = "" if re.match(r"(clang-format|NOLINT|---|===)", text) else text
            lines[number] = match.start(), text
    yield from _joined(lines, path)


def _joined(lines: dict[int, tuple[int, str]], path: Path) -> Iterator[Text]:
    """Join the lines of each comment that begin in the same column, and split the result at empty lines."""
    first, block, last = 0, [], (-1, -1)
    for number, (column, text) in [*sorted(lines.items()), (1 << 60, (0, ""))]:
        if block and ((number - 1, column) != last or not text):
            yield Text("comment", path, first, " ".join(block))
            block = []
        if text:
            first = first if block else number
            block.append(text)
        last = number, column


def texts(paths: Iterable[Path]) -> Iterator[Text]:
    readers = {".md": of_page, ".py": of_python, ".cpp": of_cpp, ".hpp": of_cpp}
    for path in paths:
        if path.suffix in readers and path.is_file():
            yield from readers[path.suffix](path)


def hits(text: Text) -> Iterator[Hit]:
    """Yield the hits in a text, at most one per sentence."""
    if text.kind == "test name":
        words = text.text.removeprefix("test_").split("_")
        if len(words) > MOST_WORDS_OF_A_TEST:
            rule = f"{len(words)} words (at most {MOST_WORDS_OF_A_TEST})"
            yield Hit(*text[:3], rule, "say subject, verb, condition", text.text)
        elif NAMES.search(text.text):
            yield Hit(*text[:3], "clause or banned word", "say subject, verb, condition", text.text)
        return
    for number, sentence in enumerate(sentences(text.text)):
        words = len([word for word in sentence.split() if re.search(r"\w", word)])
        if text.kind == "summary" and number == 0 and OPENINGS.match(sentence):
            yield Hit(*text[:3], "summary without a verb", "begin with a verb and its object", sentence)
        elif found := next((rule for rule in RULES if rule.pattern.search(sentence)), None):
            yield Hit(*text[:3], found.rule, found.remedy, sentence)
        elif words > MOST_WORDS:
            rule = f"{words} words in a sentence (at most {MOST_WORDS})"
            yield Hit(*text[:3], rule, "make two sentences", sentence)


def tree() -> list[Path]:
    """Return the files to check for prose."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in found if not path.name.endswith(".pyi")] + [ROOT / page for page in PAGES]


def allowed() -> dict[str, int]:
    lines = (line.rsplit(None, 1) for line in ALLOWED.read_text().splitlines() if line and line[0] != "#")
    return {kind: int(number) for kind, number in lines}


def record(found: Counter[str]) -> None:
    head = "# Hits of tools/prose.py by kind of text. These numbers may only fall.\n"
    ALLOWED.write_text(head + "".join(f"{kind} {found[kind]}\n" for kind in sorted(found)))


def complaints(found: Counter[str]) -> Iterator[str]:
    """Compare the hits with the recorded numbers, and yield the differences."""
    known = allowed()
    for kind in sorted({*found, *known}):
        if found[kind] > known.get(kind, 0):
            most = known.get(kind, 0)
            yield f"{kind}: there must be at most {most} hits, got {found[kind]}; rewrite the new sentences"
        elif found[kind] < known[kind]:
            problem = f"{kind}: the recorded number must be {found[kind]}, got {known[kind]}"
            yield f"{problem}; run `python tools/prose.py --record`"


def main() -> int:
    named = [Path(argument).resolve() for argument in sys.argv[1:] if not argument.startswith("-")]
    inside = [path for one in named for path in ([one] if one.is_file() else sorted(one.rglob("*")))]
    read = list(texts(inside or tree()))
    found = [hit for text in read for hit in hits(text)]
    counts = Counter(hit.kind for hit in found)
    if "--record" in sys.argv:
        record(counts)
        return 0
    if named:
        print(*found, sep="\n")
    totals: Counter[str] = Counter()
    for text in read:
        totals[text.kind] += 1 if text.kind == "test name" else len(list(sentences(text.text)))
    for kind, total in sorted(totals.items()):
        share = 100 * counts[kind] / max(1, total)
        print(f"{kind}: {counts[kind]} of {total} sentences ({share:.1f} %)")
    if named:
        return bool(found)
    wrong = list(complaints(counts))
    print(*wrong, sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
