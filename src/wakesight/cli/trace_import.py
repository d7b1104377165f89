"""wakesight trace import: somebody else's log as a run folder."""

from __future__ import annotations

from pathlib import Path

import click

from wakesight.cli.common import print_json, shared_options


@click.command("import")
@click.argument("files", nargs=-1, required=True)
@click.option("--out", required=True, help="Run folder; needs the extra wakesight[traces].")
@click.option("--resume", is_flag=True, help="Add to a folder of imported traces.")
@shared_options
def command(files: tuple[str, ...], out: str, resume: bool, as_json: bool) -> None:
    """Check FILES (.npz, one trace each) and write them as traces, named as the files.

    Arrays: topk_idx, topk_val [step, layer, query head, up to 64], needle, copy [step, layer, query head], tokens,
    ctx_len [step], prompt_len, kv_heads [layer]; if known needle_spans [span, 2], page_size, prompt_mass [layer,
    query head, prompt_len], meta (a JSON object as text). Nothing is written unless all files are right.

    \b
    wakesight trace import log-0.npz log-1.npz --out traces/theirs
    """
    from wakesight.errors import RequestError
    from wakesight.traces.importing import read_npz
    from wakesight.traces.writing import check_name, write, writing

    names = [Path(file).stem for file in files]
    for name in names:
        check_name(name)
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(f"two files would make the trace {twice[0]}; rename one of them")
    for file in files:
        read_npz(Path(file))
    with writing(Path(out), {"imported": True}, resume) as run:
        for file in files:  # read again: two logs need not be in memory at once
            write(run, read_npz(Path(file)))
    if as_json:
        print_json({"folder": out, "traces": names})
    else:
        click.echo(f"{out}: {len(names)} traces imported")
