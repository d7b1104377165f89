"""The entry point that vLLM calls in each of its processes: nothing happens unless WAKESIGHT_VLLM=1."""

from __future__ import annotations

from wakesight.engines.vllm.settings import check_version, enabled


def register() -> None:
    """Install the patches once, if they were asked for. Raises RequestError for a vLLM that is not known."""
    if not enabled():
        return
    import vllm

    check_version(vllm.__version__)
    from wakesight.engines.vllm import patches

    patches.install()
