"""What the plugin refuses before anything starts, and that it does nothing unless it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from wakesight.engines.vllm import flags, keys, settings
from wakesight.errors import RequestError

ID, CHILD = "a" * 32, "b" * 32


def arguments(**changes):
    usual = {
        "enable_prefix_caching": None, "async_scheduling": None, "scheduler_cls": None, "speculative_config": None,
        "kv_transfer_config": None, "tensor_parallel_size": 1, "kv_cache_dtype": "auto", "enforce_eager": False,
        "mamba_ssm_cache_dtype": "auto", "enable_lora": None,
    }  # fmt: skip
    return SimpleNamespace(**usual | changes)


def test_what_sessions_need_is_set():
    given = arguments()

    flags.prepare(given)

    assert given.scheduler_cls == flags.SCHEDULER
    assert given.enable_prefix_caching is False
    assert given.async_scheduling is False
    assert given.enforce_eager is True
    assert given.mamba_ssm_cache_dtype == "float32"
    flags.prepare(given)  # what we set ourselves is no conflict


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("enable_prefix_caching", True, "--enable-prefix-caching"),
        ("async_scheduling", True, "--async-scheduling"),
        ("scheduler_cls", "mine.Scheduler", "--scheduler-cls"),
        ("speculative_config", {"method": "ngram"}, "--speculative-config"),
        ("kv_transfer_config", {"kv_connector": "x"}, "--kv-transfer-config"),
        ("tensor_parallel_size", 2, "--tensor-parallel-size"),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype"),
    ],
)
def test_a_flag_set_against_sessions_is_refused_by_name(name, value, option):
    with pytest.raises(RequestError, match=option):
        flags.prepare(arguments(**{name: value}))


@pytest.mark.parametrize(
    "words",
    [
        ["--enable-prefix-caching"],
        ["--enable_prefix_caching"],
        ["--tensor-parallel-size", "2"],
        ["--tensor-parallel-size=2"],
        ["-tp", "4"],
        ["--max-num-seqs", "4", "--speculative-config", "{}"],
        ["--speculative-config.method", "ngram"],
        ["--kv-cache-dtype", "fp8"],
        ["--enable-lora"],
        ["--async-scheduling"],
    ],
)
def test_the_same_on_the_command_line(words):
    with pytest.raises(RequestError, match="does not go with sessions"):
        flags.check_words(words)


def test_other_flags_pass():
    flags.check_words(["--max-num-seqs", "4", "-tp", "1", "--kv-cache-dtype=auto", "--no-enable-prefix-caching", "--x"])


def test_the_v2_runner_is_refused():
    cache = SimpleNamespace(mamba_cache_mode="none")
    flags.check(SimpleNamespace(use_v2_model_runner=False, cache_config=cache))
    with pytest.raises(RequestError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        flags.check(SimpleNamespace(use_v2_model_runner=True, cache_config=cache))
    with pytest.raises(RequestError, match="mamba_cache_mode"):
        flags.check(SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="align")))


@pytest.mark.parametrize(
    ("ask", "changes", "sentence"),
    [
        ({"ws_session": ID}, {"max_tokens": 2}, "max_tokens=1, not 2"),
        ({"ws_session": ID}, {"n": 2}, "n=1"),
        ({"ws_fork": ID, "ws_child": CHILD, "ws_keep": 0.5}, {"n": 2}, "n=1"),
        ({"ws_attach": ID}, {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_sampling_settings_that_make_no_session(ask, changes, sentence):
    params = SimpleNamespace(**{"max_tokens": 1, "n": 1, "prompt_logprobs": None} | changes)
    with pytest.raises(RequestError, match=sentence):
        flags.check_params(keys.read(ask), params)


def test_stock_requests_may_do_as_they_like():
    flags.check_params(None, SimpleNamespace(max_tokens=5, n=3, prompt_logprobs=1))


def test_versions_are_refused_by_name():
    settings.check_version("0.28.0")
    settings.check_version("0.28.0+cpu")
    with pytest.raises(RequestError, match=r"this is 0\.29\.1"):
        settings.check_version("0.29.1")


@pytest.mark.parametrize(("name", "value"), [(settings.TTL, "soon"), (settings.TTL, "-1"), (settings.SHARE, "1.5")])
def test_settings_from_the_environment(monkeypatch, name, value):
    assert settings.Settings.from_environment() == settings.Settings()
    monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=name):
        settings.Settings.from_environment()


def test_the_plugin_is_inert_until_it_is_asked_for():
    """Without WAKESIGHT_VLLM=1 vLLM is not even imported."""
    plain = {name: value for name, value in os.environ.items() if name != settings.ENABLED}
    code = "import sys\nfrom wakesight.engines.vllm.plugin import register\nregister()\nprint('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain)

    assert done.stdout.strip() == "False", done.stderr


def test_every_module_but_patches_is_importable_without_vllm():
    code = (
        "import importlib, pathlib, sys\nsys.modules['vllm'] = None\nimport wakesight.engines.vllm as here\n"
        "for file in pathlib.Path(here.__file__).parent.glob('*.py'):\n"
        "    if file.stem not in ('__init__', 'patches'):\n"
        "        importlib.import_module(f'{here.__name__}.{file.stem}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
