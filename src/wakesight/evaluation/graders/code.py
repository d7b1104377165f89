"""RepoQA: which function of a repository did the reply repeat, and how well?

Source: microsoft/MInference scbench/repo_qa_utils.py (after evalplus/repoqa).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.graders.rules import References, RuleName, optional
from wakesight.registry import did_you_mean

THRESHOLD = 0.8
# language -> the package with its grammar, the function in it that gives the grammar, the node that is a function
_GRAMMARS = {
    "python": ("tree-sitter-python", "language", "function_definition"),
    "java": ("tree-sitter-java", "language", "method_declaration"),
    "typescript": ("tree-sitter-typescript", "language_typescript", "function_declaration"),
    "rust": ("tree-sitter-rust", "language", "function_item"),
    "cpp": ("tree-sitter-cpp", "language", "function_definition"),
    "go": ("tree-sitter-go", "language", "function_declaration"),
}
LANGUAGES = tuple(_GRAMMARS)


def repoqa(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """1 if, of all needles of the repository, the reply is most like the target, and like it by 0.8 at least.
    [needle_evaluator, compute_score at threshold 0.8]

    References: the target's code. extra: needles, name -> code or a list of {"name", "needle"}, the target
    included; lang; func_name, else the needle whose code is the reference.
    """
    needles = _needles(extra["needles"])
    target = extra.get("func_name") or next((name for name, code in needles if code == references[0]), None)
    if target is None or target not in {name for name, _ in needles}:
        raise RequestError(
            f"the target {target!r} is not among the {len(needles)} needles of its repository; give func_name= and "
            "needles= from the same record"
        )
    said = reply_code(prediction, extra.get("lang") or extra.get("language") or "python", rule)
    best, likeness = None, 0.0
    for name, code in needles:
        if (value := similarity(said, code)) > likeness:
            best, likeness = name, value
    return float(best == target and likeness >= THRESHOLD)


def _needles(given: Any) -> list[tuple[str, str]]:
    if isinstance(given, Mapping):
        return list(given.items())
    return [(needle["name"], needle["needle"]) for needle in given]


def similarity(candidate: str, reference: str) -> float:
    """Sentence BLEU-4 over white-space tokens, smoothing method 4. [compute_function_similarity]"""
    bleu = optional("nltk.translate.bleu_score", "nltk")
    tokens, wanted = (re.split(r"\s+", text.strip()) for text in (candidate, reference))
    return float(bleu.sentence_bleu([wanted], tokens, smoothing_function=bleu.SmoothingFunction().method4))


def reply_code(reply: str, lang: str, rule: RuleName = "official") -> str:
    """The first function in the reply's code blocks; else the first block; else the whole reply. [sanitize_output]

    Official: a block has a word or nothing behind its opening fence, so "```c++" opens none, and it must be
    closed. Strict: anything may follow the opening fence, and the reply's end closes a block too.
    """
    text = reply.strip()
    form = r"^[ \t]*```[^`\n]*\n(.*?)(?:^[ \t]*```|\Z)" if rule == "strict" else r"^```(?:\w+)?\s*\n(.*?)^```"
    blocks = re.findall(form, text, re.DOTALL | re.MULTILINE)
    functions = (first_function(block, lang) for block in blocks)
    return next(filter(None, functions), blocks[0] if blocks else text)


def first_function(code: str, lang: str) -> str | None:
    """The first function in `code` by tree-sitter, outer before inner; methods count where the language has them
    as functions. In C++ only a function with a plain name counts. [FUNCTION_QUERY]
    """
    source = code.encode()
    parser, kind = _parser(lang)
    for node in _nodes(parser.parse(source).root_node):
        if node.type == kind and _is_named(node, lang):
            return source[node.start_byte : node.end_byte].decode()
    return None


def _is_named(node: Any, lang: str) -> bool:
    if lang != "cpp":
        return node.child_by_field_name("name") is not None
    declarator = node.child_by_field_name("declarator")
    if declarator is None or declarator.type != "function_declarator":
        return False
    return bool(declarator.child_by_field_name("declarator").type == "identifier")


def _nodes(root: Any) -> Iterator[Any]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(node.children))


@functools.cache
def _parser(lang: str) -> tuple[Any, str]:
    if lang not in _GRAMMARS:
        raise RequestError(f"no grammar for {lang!r}{did_you_mean(lang, LANGUAGES)}; languages: {', '.join(LANGUAGES)}")
    package, function, kind = _GRAMMARS[lang]
    tree_sitter = optional("tree_sitter", "tree-sitter")
    grammar = optional(package.replace("-", "_"), package)
    return tree_sitter.Parser(tree_sitter.Language(getattr(grammar, function)())), kind
