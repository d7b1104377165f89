"""wakesight ask: read a document once, keep a fraction of its cache, answer questions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from wakesight.cli.common import (
    model_options,
    peak_memory_bytes,
    print_json,
    progress,
    read_bytes_size,
    read_text,
    shared_options,
    show_bytes,
)
from wakesight.errors import RequestError
from wakesight.policy import Policy

if TYPE_CHECKING:
    from wakesight.core import Answer
    from wakesight.engines.session import Session


@click.command("ask", short_help="Answer questions about a long document.")
@click.option("--model", required=True, help="Bundled name (smollm2), model folder, .gguf file or hub id.")
@click.option("--context", required=True, help="Document: a UTF-8 text file, or - for standard input.")
@click.option("--question", "question_list", multiple=True, help="A question; may be given several times.")
@click.option("--questions", "questions_file", default=None, help="A file with one question per line.")
@click.option("--keep", type=float, default=None, help="Fraction of the entries to keep, 0 < p <= 1. Default 0.3.")
@click.option("--entries", type=int, default=None, help="Entries to keep per (layer, KV head) on average.")
@click.option("--fit", default=None, help="Fast memory for the whole session, for example 500MB or 2GiB.")
@click.option("--scorer", default="keydiff", show_default=True, help="Which entries matter; see wakesight methods.")
@click.option("--allocation", default="flat", show_default=True, help="Share among layers: a name, or counts 40,30,20.")
@click.option("--evicted", default="drop", show_default=True, help="What becomes of the rest: drop.")
@click.option("--unit", default="entry", show_default=True, help="Evict by: entry.")
@click.option("--protect", type=int, default=None, help="Tokens kept at the start. Default: template and instruction.")
@click.option("--pages", type=int, default=None, hidden=True)
@click.option("--attend", type=int, default=None, hidden=True)
@click.option("--rerank", type=int, default=None, hidden=True)
@click.option("--page-size", type=int, default=None, hidden=True)
@click.option("--instruction", default=None, help="Text before the document; it is never evicted.")
@click.option("--no-chat", is_flag=True, help="Plain text, without the model's chat template.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Longest answer, in tokens.")
@click.option("--chunk", type=int, default=512, show_default=True, help="Prefill tokens per step, a multiple of 64.")
@click.option("--stream", is_flag=True, help="Print the answer while it is made.")
@model_options
@shared_options
def command(
    model: str, context: str, question_list: tuple[str, ...], questions_file: str | None, fit: str | None,
    instruction: str | None, no_chat: bool, max_new_tokens: int, chunk: int, stream: bool, device: str | None,
    dtype: str | None, as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Read a document once, keep a fraction of its KV cache, answer questions from what is left.

    The document is scored before any question is seen, so one compacted cache serves every question.

    \b
    wakesight ask --model smollm2 --context report.txt --question "Who signed it?" --keep 0.3
    cat report.txt | wakesight ask --model smollm2 --context - --question "When?" --entries 500 --json
    """
    if stream and as_json:
        raise RequestError("--stream and --json exclude each other; leave one out")
    policy = make_policy(fit=fit, **choices)
    questions = _questions(question_list, questions_file, context)
    document = read_text(context, "context")
    if max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens {max_new_tokens} must be at least 1")

    from wakesight.engines.hf.engine import load

    engine = load(model, device=device, dtype=dtype)
    with progress("reading") as on_chunk:
        whole = engine.prefill(document, instruction=instruction, chat=not no_chat, chunk=chunk, on_chunk=on_chunk)
    with whole.compact(policy) as session:
        whole.close()  # its bytes are free before the first answer
        answers = []
        for question in questions:
            answers.append(
                _answer(session, question, max_new_tokens, stream, several=len(questions) > 1, quiet=as_json)
            )
        if as_json:
            print_json(record(session, questions, answers, engine.name))
        else:
            click.echo(summary(session, answers), err=True)


def make_policy(*, fit: str | None, **choices: Any) -> Policy:
    """The policy that the command line's choices spell; 0.3 where no size was given."""
    for flag in ("pages", "attend", "rerank", "page_size"):
        if choices.pop(flag, None) is not None:
            name = flag.replace("_", "-")
            raise RequestError(f"--{name} belongs to --evicted demote, which is not built yet; leave it out")
    choices["bytes"] = None if fit is None else read_bytes_size(fit)
    counts = choices["allocation"].split(",")
    if all(part.strip().isdigit() for part in counts):
        choices["allocation"] = tuple(int(part) for part in counts)
    elif all(choices[size] is None for size in ("keep", "entries", "bytes")):
        choices["keep"] = 0.3
    return Policy(**choices)


def _questions(given: tuple[str, ...], file: str | None, context: str) -> list[str]:
    if file == context == "-":
        raise RequestError("--context and --questions cannot both come from standard input; put one in a file")
    questions = list(given)
    if file is not None:
        questions += [line.strip() for line in read_text(file, "questions").splitlines() if line.strip()]
    if not questions:
        raise RequestError("there is no question; give --question TEXT or --questions FILE")
    if any(not question.strip() for question in questions):
        raise RequestError("a question is empty; type one after --question")
    return questions


def _answer(session: Session, question: str, limit: int, stream: bool, *, several: bool, quiet: bool) -> Answer:
    if several and not quiet:
        click.echo(f"> {question}")
    show = (lambda piece: click.echo(piece, nl=False)) if stream else None
    answer = session.ask(question, max_new_tokens=limit, stream=show)
    if not quiet:
        click.echo("" if stream else answer.text)
    return answer


def record(session: Session, questions: list[str], answers: list[Answer], model: str) -> dict[str, Any]:
    """The one object that `ask --json` prints."""
    stats = asdict(session.stats)
    del stats["physical_lengths"]
    assert session.policy is not None
    return {
        "answers": [
            {
                "question": question,
                "answer": answer.text,
                "tokens": len(answer.tokens),
                "token_ids": list(answer.tokens),
                "finish": answer.finish,
                "misses": answer.misses,
                "fetches": answer.fetches,
            }
            for question, answer in zip(questions, answers, strict=True)
        ],
        "answer": answers[0].text,
        **stats,
        "decode_tokens_per_s": _rate(answers),
        "peak_memory_bytes": peak_memory_bytes(),
        "policy": session.policy.to_json(),
        "model": model,
    }


def _rate(answers: list[Answer]) -> float:
    """Decode steps per second over all answers (each answer's first token comes from the question's own pass)."""
    rates = [a.timings for a in answers if a.timings["decode_tokens_per_s"] > 0]
    seconds = sum(t["decode_s"] for t in rates)
    return sum(t["decode_s"] * t["decode_tokens_per_s"] for t in rates) / seconds if seconds else 0.0


def summary(session: Session, answers: list[Answer]) -> str:
    """What was kept and what it cost, for people."""
    stats = session.stats
    kept, heads = sum(map(sum, stats.kept_entries)), sum(map(len, stats.kept_entries))
    share = kept / (heads * stats.logical_length)
    return (
        f"kept {kept:,} of {heads * stats.logical_length:,} entries ({share:.1%} with the protected prefix): "
        f"{show_bytes(stats.kv_bytes_full)} -> {show_bytes(stats.kv_bytes_kept)} KV, "
        f"{show_bytes(stats.kv_bytes_freed)} freed (growth slack {show_bytes(stats.kv_bytes_slack)}); "
        f"prefill {stats.prefill_s:.1f} s, scoring {stats.score_s:.2f} s, compaction {stats.compact_s:.2f} s, "
        f"{_rate(answers):.1f} tokens/s"
    )
