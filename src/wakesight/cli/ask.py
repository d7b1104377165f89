"""wakesight ask: read a document once, keep a fraction of its cache, answer questions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from wakesight.cli.common import (
    artifact_option,
    checked_text,
    model_options,
    once,
    peak_memory_bytes,
    print_json,
    read_text,
    shared_options,
    show_bytes,
)
from wakesight.cli.policy import make_policy, may_read_artifact, policy_options
from wakesight.cli.sessions import Reading, made_with, open_session, read_document, reading_options
from wakesight.errors import RequestError

if TYPE_CHECKING:
    from wakesight.core import Answer
    from wakesight.engines.session import Session
    from wakesight.policy import Policy


@click.command("ask", short_help="Answer questions about a long document.")
@click.option("--model", default=None, help="Bundled name (smollm2), model folder, .gguf file or hub id.")
@click.option("--context", multiple=True, callback=once, help="Document: a UTF-8 text file, or - for standard input.")
@click.option(
    "--session", "session_file", multiple=True, callback=once, help="A session saved by wakesight prefill, instead."
)
@click.option(
    "--question", "question_list", multiple=True, callback=checked_text, help="A question; may be given several times."
)
@click.option("--questions", "questions_file", default=None, help="A file with one question per line.")
@policy_options
@reading_options
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Longest answer, in tokens.")
@click.option("--stream", is_flag=True, help="Print the answer while it is made.")
@artifact_option
@model_options
@shared_options
def command(
    model: str | None, context: str | None, session_file: str | None, question_list: tuple[str, ...],
    questions_file: str | None, instruction: str | None, no_chat: bool, max_new_tokens: int, chunk: int | None,
    stream: bool, artifact: str | None, device: str | None, dtype: str | None, as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Read a document once, keep a fraction of its KV cache, answer questions from what is left.

    The document is scored before any question is seen, so one compacted cache serves every question.
    --keep is 0.3 unless a size is given. A saved session is asked as it is, or compacted if a size is given.

    \b
    wakesight ask --model smollm2 --context report.txt --question "Who signed it?" --keep 0.3
    cat report.txt | wakesight ask --model smollm2 --context - --question "When?" --entries 500 --json
    wakesight ask --session report.ws --question "Who signed it?"
    """
    if stream and as_json:
        raise RequestError("--stream and --json exclude each other; leave one out")
    made = made_with(session_file)
    if made is not None and artifact is None and may_read_artifact(**choices):
        artifact = made.estimator()
    policy = make_policy(
        default_keep=0.3 if made is None else None, model=model or (made and made.model), artifact=artifact, **choices
    )
    questions = _questions(question_list, questions_file, context)
    if max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    reading = Reading(model, context, instruction, no_chat, chunk, device, dtype, artifact)
    session = open_session(session_file, reading, policy) if session_file else read_document(reading, policy)
    with session:
        answers = []
        for question in questions:
            answers.append(
                _answer(session, question, max_new_tokens, stream, several=len(questions) > 1, quiet=as_json)
            )
        if as_json:
            print_json(record(session, questions, answers))
        else:
            click.echo(summary(session, answers), err=True)


def _questions(given: tuple[str, ...], file: str | None, context: str | None) -> list[str]:
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


def record(session: Session, questions: list[str], answers: list[Answer]) -> dict[str, Any]:
    """The one object that `ask --json` prints."""
    stats = asdict(session.stats)
    del stats["physical_lengths"]
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
                "moved_bytes": answer.moved_bytes,
            }
            for question, answer in zip(questions, answers, strict=True)
        ],
        "answer": answers[0].text,
        **stats,
        "decode_tokens_per_s": _rate(answers),
        "peak_memory_bytes": peak_memory_bytes(),
        "policy": None if session.policy is None else session.policy.to_json(),
        "model": session.engine.name,
    }


def _rate(answers: list[Answer]) -> float:
    """Decode steps per second over all answers (each answer's first token comes from the question's own pass)."""
    rates = [a.timings for a in answers if a.timings["decode_tokens_per_s"] > 0]
    seconds = sum(t["decode_s"] for t in rates)
    return sum(t["decode_s"] * t["decode_tokens_per_s"] for t in rates) / seconds if seconds else 0.0


def summary(session: Session, answers: list[Answer]) -> str:
    """What was kept, by what, and what it cost, for people."""
    moved = ""
    if session.stats.reservoir_bytes:
        misses, fetches = (sum(getattr(answer, name) for answer in answers) for name in ("misses", "fetches"))
        size = show_bytes(sum(answer.moved_bytes for answer in answers))
        moved = f"; {misses:,} misses, {fetches:,} fetches, {size} moved"
    return f"{kept_summary(session)}, {_rate(answers):.1f} tokens/s{moved}"


def kept_summary(session: Session) -> str:
    """The same without answers."""
    stats = session.stats
    kept, heads = sum(map(sum, stats.kept_entries)), sum(map(len, stats.kept_entries))
    share = kept / (heads * stats.logical_length)
    verb, waiting = "kept", ""
    if stats.reservoir_bytes:
        verb = "in fast memory"
        waiting = (
            f"{show_bytes(stats.sketch_bytes)} of it sketches, {show_bytes(stats.reservoir_bytes)} in the reservoir, "
        )
    return (
        f"{_chosen(session.policy)}"
        f"{verb} {kept:,} of {heads * stats.logical_length:,} entries ({share:.1%} with the protected prefix): "
        f"{show_bytes(stats.kv_bytes_full)} -> {show_bytes(stats.kv_bytes_kept)} KV, "
        f"{waiting}{show_bytes(stats.kv_bytes_freed)} freed (growth slack {show_bytes(stats.kv_bytes_slack)}); "
        f"prefill {stats.prefill_s:.1f} s, scoring {stats.score_s:.2f} s, compaction {stats.compact_s:.2f} s"
    )


def _chosen(policy: Policy | None) -> str:
    """By what it was kept: commands choose by themselves where nothing was typed."""
    if policy is None:
        return ""
    shared = policy.allocation
    counts = f"{', '.join(map(str, shared))} per layer" if isinstance(shared, tuple) else shared
    return f"scorer {policy.scorer}, allocation {counts}; "
